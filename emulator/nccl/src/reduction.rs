//! Element types, and the reduction of several ranks' buffers to one, element by element, in order of the ranks.

use half::{bf16, f16};

use crate::status::{Result, Status};

/// The type of a buffer's elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ElementType {
    I8,
    U8,
    I32,
    U32,
    I64,
    U64,
    F16,
    F32,
    F64,
    Bf16,
}

impl ElementType {
    /// The type of an `ncclDataType_t`.
    pub(crate) fn from_number(number: i32) -> Result<ElementType> {
        use ElementType::*;
        let known = [I8, U8, I32, U32, I64, U64, F16, F32, F64, Bf16];
        let found = usize::try_from(number).ok().and_then(|i| known.get(i)).copied();
        found.ok_or_else(|| Status::INVALID_ARGUMENT.because(format!("data type {number} is not emulated")))
    }

    pub(crate) fn bytes(self) -> usize {
        match self {
            ElementType::I8 | ElementType::U8 => 1,
            ElementType::F16 | ElementType::Bf16 => 2,
            ElementType::I32 | ElementType::U32 | ElementType::F32 => 4,
            ElementType::I64 | ElementType::U64 | ElementType::F64 => 8,
        }
    }
}

/// How elements are reduced.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Reduction {
    Sum,
    Product,
    Max,
    Min,
    Average,
}

impl std::fmt::Display for Reduction {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&format!("{self:?}").to_lowercase())
    }
}

impl Reduction {
    /// The reduction of an `ncclRedOp_t`.
    pub(crate) fn from_number(number: i32) -> Result<Reduction> {
        use Reduction::*;
        let known = [Sum, Product, Max, Min, Average];
        let found = usize::try_from(number).ok().and_then(|i| known.get(i)).copied();
        found.ok_or_else(|| Status::INVALID_ARGUMENT.because(format!("reduction {number} is not emulated")))
    }
}

/// How two numbers are reduced, and what is done with the result of all ranks, given their number.
struct Steps<T> {
    pair: fn(T, T) -> T,
    end: fn(T, usize) -> T,
}

/// Reduces buffers of the same length.
pub(crate) fn reduce(kind: ElementType, reduction: Reduction, buffers: &[&[u8]]) -> Vec<u8> {
    macro_rules! steps {
        ($type:ty, $add:expr, $multiply:expr, $divide:expr) => {
            match reduction {
                Reduction::Sum => Steps { pair: $add, end: |x, _| x },
                Reduction::Average => Steps { pair: $add, end: $divide },
                Reduction::Product => Steps { pair: $multiply, end: |x, _| x },
                Reduction::Max => Steps { pair: <$type>::max, end: |x, _| x },
                Reduction::Min => Steps { pair: <$type>::min, end: |x, _| x },
            }
        };
    }
    macro_rules! float_steps {
        ($type:ty) => {
            steps!($type, |x, y| x + y, |x, y| x * y, |x, ranks| x / ranks as $type)
        };
    }
    macro_rules! integer_steps {
        ($type:ty) => {
            steps!($type, <$type>::wrapping_add, <$type>::wrapping_mul, |x, ranks| x
                .wrapping_div(ranks as $type))
        };
    }
    macro_rules! numbers {
        ($type:ty, $steps:expr) => {{
            const BYTES: usize = size_of::<$type>();
            elements::<$type, BYTES>(buffers, <$type>::from_le_bytes, <$type>::to_le_bytes, $steps)
        }};
    }
    // Narrow floats are reduced in f32.
    macro_rules! narrow_floats {
        ($type:ty) => {
            elements::<f32, 2>(
                buffers,
                |bytes| <$type>::from_le_bytes(bytes).to_f32(),
                |x| <$type>::from_f32(x).to_le_bytes(),
                float_steps!(f32),
            )
        };
    }
    match kind {
        ElementType::I8 => numbers!(i8, integer_steps!(i8)),
        ElementType::U8 => numbers!(u8, integer_steps!(u8)),
        ElementType::I32 => numbers!(i32, integer_steps!(i32)),
        ElementType::U32 => numbers!(u32, integer_steps!(u32)),
        ElementType::I64 => numbers!(i64, integer_steps!(i64)),
        ElementType::U64 => numbers!(u64, integer_steps!(u64)),
        ElementType::F32 => numbers!(f32, float_steps!(f32)),
        ElementType::F64 => numbers!(f64, float_steps!(f64)),
        ElementType::F16 => narrow_floats!(f16),
        ElementType::Bf16 => narrow_floats!(bf16),
    }
}

/// Reduces each element, which has `N` bytes and is computed in `T`.
fn elements<T: Copy, const N: usize>(
    buffers: &[&[u8]],
    load: impl Fn([u8; N]) -> T,
    store: impl Fn(T) -> [u8; N],
    steps: Steps<T>,
) -> Vec<u8> {
    let at = |buffer: &[u8], i: usize| {
        let mut bytes = [0; N];
        bytes.copy_from_slice(&buffer[i * N..][..N]);
        load(bytes)
    };
    let Some((first, rest)) = buffers.split_first() else { return Vec::new() };
    let element = |i| {
        let all = rest.iter().fold(at(first, i), |sum, buffer| (steps.pair)(sum, at(buffer, i)));
        store((steps.end)(all, buffers.len()))
    };
    (0..first.len() / N).flat_map(element).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_reduction_of_bytes_and_floats_is_that_of_its_numbers() {
        let wanted = [
            (Reduction::Sum, 13.0),
            (Reduction::Product, 60.0),
            (Reduction::Max, 6.0),
            (Reduction::Min, 2.0),
            (Reduction::Average, 13.0 / 3.0),
        ];
        for (reduction, wanted) in wanted {
            let floats = [2_f32, 5.0, 6.0].map(f32::to_le_bytes);
            let got = reduce(ElementType::F32, reduction, &[&floats[0], &floats[1], &floats[2]]);
            assert_eq!(got, (wanted as f32).to_le_bytes());
            assert_eq!(reduce(ElementType::U8, reduction, &[&[2], &[5], &[6]]), [wanted as u8]);
        }
    }

    #[test]
    fn narrow_floats_are_rounded_once() {
        // 256 + 1 + 1: bf16 has 8 bits of mantissa, so adding one after the other would lose both ones.
        let numbers = [256.0, 1.0, 1.0].map(|x| bf16::from_f32(x).to_le_bytes());
        let got = reduce(ElementType::Bf16, Reduction::Sum, &[&numbers[0], &numbers[1], &numbers[2]]);
        assert_eq!(got, bf16::from_f32(258.0).to_le_bytes());
    }
}
