//! Element types: the run-time tag [`DType`] and the Rust types behind it.

use std::fmt;
use std::ops::RangeInclusive;

pub use half::{bf16, f16};

use crate::{Error, Result};

/// The type of a tensor's elements. It is a whole word, so that structures of tensors are moved by words: a load that spans several narrower
/// stores stalls the processor.
#[repr(u64)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum DType {
    /// IEEE binary64.
    F64,
    /// IEEE binary32.
    F32,
    /// bfloat16: binary32's exponent with 8 bits of precision.
    BF16,
    /// IEEE binary16.
    F16,
    /// Two's complement, 64 bits.
    I64,
    /// Two's complement, 32 bits.
    I32,
    /// Unsigned, 8 bits.
    U8,
    /// A truth value, stored as a byte that is 0 or 1.
    Bool,
}

impl DType {
    /// Every dtype, widest first.
    pub const ALL: [DType; 8] =
        [DType::F64, DType::F32, DType::BF16, DType::F16, DType::I64, DType::I32, DType::U8, DType::Bool];

    /// Bytes of one element.
    pub const fn size(self) -> usize {
        match self {
            DType::F64 | DType::I64 => 8,
            DType::F32 | DType::I32 => 4,
            DType::BF16 | DType::F16 => 2,
            DType::U8 | DType::Bool => 1,
        }
    }

    /// Whether it is one of the four floating-point types, the only ones that can require a gradient.
    pub const fn is_float(self) -> bool {
        matches!(self, DType::F64 | DType::F32 | DType::BF16 | DType::F16)
    }

    /// The numbers that an integer dtype holds.
    pub const fn integers(self) -> Option<RangeInclusive<i64>> {
        match self {
            DType::I64 => Some(i64::MIN..=i64::MAX),
            DType::I32 => Some(i32::MIN as i64..=i32::MAX as i64),
            DType::U8 => Some(0..=u8::MAX as i64),
            _ => None,
        }
    }

    /// The short name: `f32`, `bool`, ...
    pub const fn name(self) -> &'static str {
        match self {
            DType::F64 => "f64",
            DType::F32 => "f32",
            DType::BF16 => "bf16",
            DType::F16 => "f16",
            DType::I64 => "i64",
            DType::I32 => "i32",
            DType::U8 => "u8",
            DType::Bool => "bool",
        }
    }

    /// The dtype with that short name.
    pub fn parse(name: &str) -> Option<DType> {
        DType::ALL.into_iter().find(|d| d.name() == name)
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A type whose values are stored in a tensor as they are. Any bit pattern is a value, so memory that was used
/// for something else can be read through it.
pub trait Element: bytemuck::Pod + PartialEq + PartialOrd + fmt::Debug + Send + Sync {
    /// The tag of this type.
    const DTYPE: DType;
}

macro_rules! element {
    ($($type:ty => $tag:ident),*) => {$(
        impl Element for $type {
            const DTYPE: DType = DType::$tag;
        }
    )*};
}

element!(f64 => F64, f32 => F32, bf16 => BF16, f16 => F16, i64 => I64, i32 => I32, u8 => U8);

/// A Rust type that tensors are made from and read into: every [`Element`], and `bool`, which is stored as a byte.
pub trait Value: Copy + Send + Sync + 'static {
    /// The tag of this type.
    const DTYPE: DType;
    /// The stored form.
    type Stored: bytemuck::Pod;
    /// To the stored form.
    fn store(self) -> Self::Stored;
    /// From the stored form.
    fn load(stored: Self::Stored) -> Self;
}

impl<T: Element> Value for T {
    const DTYPE: DType = <T as Element>::DTYPE;
    type Stored = T;
    fn store(self) -> T {
        self
    }
    fn load(stored: T) -> T {
        stored
    }
}

impl Value for bool {
    const DTYPE: DType = DType::Bool;
    type Stored = u8;
    fn store(self) -> u8 {
        u8::from(self)
    }
    fn load(stored: u8) -> bool {
        stored != 0
    }
}

/// A number given to an operation beside its tensors; it takes on their dtype.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Scalar {
    /// A floating-point number.
    Float(f64),
    /// An integer, exact in integer tensors of any size.
    Int(i64),
}

impl Scalar {
    /// The nearest f64.
    pub fn to_f64(self) -> f64 {
        match self {
            Scalar::Float(x) => x,
            Scalar::Int(x) => x as f64,
        }
    }

    /// This number as a tensor of `dtype` holds it: an integer dtype holds the whole numbers of its range, given as either
    /// kind; bool holds whether it is not 0; floating-point dtypes round it, later.
    ///
    /// # Errors
    /// [`Error::Invalid`] naming `op`, the number and the range.
    pub fn fitting(self, op: &'static str, dtype: DType) -> Result<Scalar> {
        if dtype == DType::Bool {
            return Ok(Scalar::Int(i64::from(self.to_f64() != 0.0)));
        }
        let Some(range) = dtype.integers() else { return Ok(self) };
        let whole = match self {
            Scalar::Int(x) => Some(x),
            // 2^63 is the first that i64 does not hold.
            Scalar::Float(x) if x.fract() == 0.0 && x >= i64::MIN as f64 && x < -(i64::MIN as f64) => {
                Some(x as i64)
            }
            Scalar::Float(_) => None,
        };
        whole.filter(|x| range.contains(x)).map(Scalar::Int).ok_or_else(|| {
            let (low, high) = (range.start(), range.end());
            let why = format!(
                "got the number {self} for a tensor of {dtype}, wanted an integer from {low} to {high}"
            );
            Error::invalid(op, why)
        })
    }

    /// The integer, a float truncated toward zero and saturated.
    pub fn to_i64(self) -> i64 {
        match self {
            Scalar::Float(x) => x as i64,
            Scalar::Int(x) => x,
        }
    }
}

impl fmt::Display for Scalar {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Scalar::Float(x) => write!(f, "{x:?}"),
            Scalar::Int(x) => write!(f, "{x}"),
        }
    }
}

macro_rules! scalar {
    ($($variant:ident: $($type:ty),*);*) => {$($(
        impl From<$type> for Scalar {
            fn from(x: $type) -> Scalar {
                Scalar::$variant(x.into())
            }
        }
    )*)*};
}

scalar!(Float: f64, f32, bf16, f16; Int: i64, i32, u8, bool);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn integer_dtypes_hold_the_whole_numbers_of_their_range_only() {
        let fits = |x: Scalar, dtype| x.fitting("fill", dtype).is_ok();
        assert!([0, 255].iter().all(|&x| fits(Scalar::Int(x), DType::U8)));
        assert!([-1, 256].iter().all(|&x| !fits(Scalar::Int(x), DType::U8)));
        assert_eq!(Scalar::Float(-3.0).fitting("fill", DType::I32).unwrap(), Scalar::Int(-3));
        for x in [1.5, f64::NAN, f64::INFINITY, 1e300, -(i64::MIN as f64)] {
            assert!(!fits(Scalar::Float(x), DType::I64), "{x}");
            assert!(fits(Scalar::Float(x), DType::F16) && fits(Scalar::Float(x), DType::Bool));
        }
        assert!(fits(Scalar::Float(i64::MIN as f64), DType::I64));
        let error = Scalar::Int(1 << 40).fitting("mul", DType::I32).unwrap_err().to_string();
        let wanted = "mul: got the number 1099511627776 for a tensor of i32, \
                      wanted an integer from -2147483648 to 2147483647";
        assert_eq!(error, wanted);
    }

    #[test]
    fn names_parse_back() {
        for dtype in DType::ALL {
            assert_eq!(DType::parse(dtype.name()), Some(dtype));
        }
        assert_eq!(DType::parse("float"), None);
    }
}
