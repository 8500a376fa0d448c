//! Instructions that compute each lane's result from the same lane's sources: one function for all lanes an
//! instruction and type.
//!
//! A register holds 64 bits a lane; of a narrower type the low bits, and zeros above. So a function reads its sources
//! as the types that the instruction names and leaves its result in the same way.

pub(crate) mod compare;
pub(crate) mod convert;
pub(crate) mod double;
pub(crate) mod float;
pub(crate) mod half;
pub(crate) mod integer;
pub(crate) mod round;

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

/// Up to four sources and the result.
pub(crate) type Map = fn(&Lanes, &Lanes, &Lanes, &Lanes, &mut Lanes);

/// A type that a register can hold.
pub(crate) trait Lane {
    /// The value in a register.
    fn get(bits: u64) -> Self;
    /// The register that holds the value.
    fn put(self) -> u64;
}

macro_rules! whole {
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
whole!(i8 as u8, i16 as u16, i32 as u32, i64 as u64);

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
