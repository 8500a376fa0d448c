//! Instructions that compute each lane's result from the same lane's sources. Each instruction and type has one
//! function, a [`Map`], that computes all 32 lanes.
//!
//! A register holds 64 bits a lane: a value of a narrower type is in the low bits, with zeros above. A [`Map`] reads its
//! sources as the types that the instruction names ([`Lane`]) and leaves its result in the same way.

pub(crate) mod approximate;
pub(crate) mod compare;
pub(crate) mod convert;
pub(crate) mod float;
pub(crate) mod half;
pub(crate) mod integer;
pub(crate) mod round;
pub(crate) mod video;

/// Threads of a warp.
pub(crate) const LANES: usize = 32;

/// A register of all lanes.
pub(crate) type Lanes = [u64; LANES];

/// Iterates over the lanes of a mask.
pub(crate) fn lanes(mut mask: u32) -> impl Iterator<Item = usize> {
    std::iter::from_fn(move || {
        if mask == 0 {
            return None;
        }
        let lane = mask.trailing_zeros() as usize;
        mask &= mask - 1;
        Some(lane)
    })
}

/// Computes an instruction's result, the last argument, from up to four sources.
pub(crate) type Map = fn(&Lanes, &Lanes, &Lanes, &Lanes, &mut Lanes);

/// A type that a register can hold.
pub(crate) trait Lane {
    /// The value in a register.
    fn get(bits: u64) -> Self;
    /// The register that holds the value.
    fn put(self) -> u64;
}

/// A lane as the number it stands for. A type may flush, saturate or round the number when it becomes bits.
pub(crate) trait Number: Lane + Copy {
    /// What the number is computed in.
    type Value: Copy + PartialOrd;
    /// A lane that stands for the number.
    fn of(value: Self::Value) -> Self;
    /// The number.
    fn value(self) -> Self::Value;
}

/// Types that are their own number.
macro_rules! numbers {
    ($($t:ty),*) => {$(
        impl Number for $t {
            type Value = $t;
            #[inline(always)]
            fn of(value: $t) -> $t { value }
            #[inline(always)]
            fn value(self) -> $t { self }
        }
    )*};
}
numbers!(u16, i16, u32, i32, u64, i64, f32, f64);

macro_rules! integer_lanes {
    ($($signed:ty as $unsigned:ty),*) => {$(
        impl Lane for $signed {
            #[inline(always)]
            fn get(bits: u64) -> Self { bits as $signed }
            #[inline(always)]
            fn put(self) -> u64 { self as $unsigned as u64 }
        }
        impl Lane for $unsigned {
            #[inline(always)]
            fn get(bits: u64) -> Self { bits as $unsigned }
            #[inline(always)]
            fn put(self) -> u64 { self as u64 }
        }
    )*};
}
integer_lanes!(i8 as u8, i16 as u16, i32 as u32, i64 as u64);

macro_rules! float_lanes {
    ($($float:ty as $unsigned:ty),*) => {$(
        impl Lane for $float {
            #[inline(always)]
            fn get(bits: u64) -> Self { <$float>::from_bits(bits as $unsigned) }
            #[inline(always)]
            fn put(self) -> u64 { self.to_bits() as u64 }
        }
    )*};
}
float_lanes!(f32 as u32, f64 as u64);

impl Lane for bool {
    #[inline(always)]
    fn get(bits: u64) -> Self {
        bits & 1 != 0
    }
    #[inline(always)]
    fn put(self) -> u64 {
        self as u64
    }
}

/// `map!((a: i32, b: u32) -> i32 { expression })` as a [`Map`].
macro_rules! map {
    (($a:ident: $ta:ty) -> $r:ty $body:block) => {
        map!(($a: $ta, _b: u64, _c: u64, _e: u64) -> $r $body)
    };
    (($a:ident: $ta:ty, $b:ident: $tb:ty) -> $r:ty $body:block) => {
        map!(($a: $ta, $b: $tb, _c: u64, _e: u64) -> $r $body)
    };
    (($a:ident: $ta:ty, $b:ident: $tb:ty, $c:ident: $tc:ty) -> $r:ty $body:block) => {
        map!(($a: $ta, $b: $tb, $c: $tc, _e: u64) -> $r $body)
    };
    (($a:ident: $ta:ty, $b:ident: $tb:ty, $c:ident: $tc:ty, $e:ident: $te:ty) -> $r:ty $body:block) => {{
        fn all(
            a: &$crate::lanes::Lanes,
            b: &$crate::lanes::Lanes,
            c: &$crate::lanes::Lanes,
            e: &$crate::lanes::Lanes,
            d: &mut $crate::lanes::Lanes,
        ) {
            for l in 0..$crate::lanes::LANES {
                let $a = <$ta as $crate::lanes::Lane>::get(a[l]);
                let $b = <$tb as $crate::lanes::Lane>::get(b[l]);
                let $c = <$tc as $crate::lanes::Lane>::get(c[l]);
                let $e = <$te as $crate::lanes::Lane>::get(e[l]);
                let result: $r = $body;
                d[l] = $crate::lanes::Lane::put(result);
            }
        }
        all as $crate::lanes::Map
    }};
}
pub(crate) use map;

/// `integers!(kind, T, map!((a: T, b: T) -> T { ... }))`: the map for the integer type of that name, or `None`.
macro_rules! integers {
    ($kind:expr, $t:ident, $map:expr) => {
        match $kind {
            "u16" | "b16" => {
                type $t = u16;
                Some($map)
            }
            "s16" => {
                type $t = i16;
                Some($map)
            }
            "u32" | "b32" => {
                type $t = u32;
                Some($map)
            }
            "s32" => {
                type $t = i32;
                Some($map)
            }
            "u64" | "b64" => {
                type $t = u64;
                Some($map)
            }
            "s64" => {
                type $t = i64;
                Some($map)
            }
            _ => None,
        }
    };
}
pub(crate) use integers;
