//! Element types: the run-time tag [`DType`] and the Rust types behind it.

use std::fmt;

pub use half::{bf16, f16};

/// The type of a tensor's elements. (A whole word: what is made of tensors is then moved by words, and what moves in odd
/// pieces stalls a processor that has just written it in others.)
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

    /// The integer, a float truncated toward zero and saturated.
    pub fn to_i64(self) -> i64 {
        match self {
            Scalar::Float(x) => x as i64,
            Scalar::Int(x) => x,
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
    fn names_parse_back() {
        for dtype in DType::ALL {
            assert_eq!(DType::parse(dtype.name()), Some(dtype));
        }
        assert_eq!(DType::parse("float"), None);
    }
}
