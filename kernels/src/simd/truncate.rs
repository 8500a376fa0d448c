//! Truncation of floats to integers, in a form that compilers vectorize.

#![allow(unsafe_code)]

macro_rules! truncate {
    ($($name:ident $from:ident $type:ident;)*) => {$(
        #[doc = concat!("`x as ", stringify!($type), "`: without the fraction; the nearest that the type holds; 0 of a NaN.")]
        #[inline(always)]
        pub(crate) fn $name(x: $from) -> $type {
            // Both bounds are powers of two, which floats hold; -MIN is one more than MAX. A NaN becomes the lower bound here, and 0 at the end.
            const END: $from = -($type::MIN as $from);
            const LAST: $from = $from::from_bits(END.to_bits() - 1);
            let raised = if x > -END { x } else { -END };
            let held = if raised < LAST { raised } else { LAST };
            // SAFETY: without its fraction `held` is from MIN to MAX.
            let cut = unsafe { held.to_int_unchecked::<$type>() };
            let cut = if x >= END { $type::MAX } else { cut };
            if x.is_nan() { 0 } else { cut }
        }
    )*};
}

truncate! {
    truncate_to_i64 f64 i64;
    truncate_to_i32 f64 i32;
    truncate_f32_to_i32 f32 i32;
}

/// A float that holds an integer from 0 to 2^24 as that integer, in few instructions. Any other float gives some integer of that range.
#[inline(always)]
pub(crate) fn small_integer(x: f32) -> i32 {
    const MOST: f32 = (1 << 24) as f32;
    let held = if x > 0.0 { x } else { 0.0 };
    let held = if held < MOST { held } else { MOST };
    // SAFETY: the number is from 0 to 2^24.
    unsafe { held.to_int_unchecked::<i32>() }
}

#[cfg(test)]
mod tests {
    use super::{small_integer, truncate_f32_to_i32, truncate_to_i32, truncate_to_i64};

    #[test]
    fn small_integers_are_themselves() {
        for x in [0, 1, 2, 255, 65_537, (1 << 24) - 1, 1 << 24] {
            assert_eq!(small_integer(x as f32), x);
        }
        for x in [f32::NAN, f32::INFINITY, -f32::INFINITY, -1.0, 1e9] {
            assert!((0..=1 << 24).contains(&small_integer(x)));
        }
    }

    #[test]
    fn a_cut_is_what_plain_conversion_gives() {
        let bounds =
            [0.0, 0.5, 1.0, 255.9, 2f64.powi(31), 2f64.powi(32), 2f64.powi(53), 2f64.powi(63), 1e300];
        for x in bounds.into_iter().flat_map(|x| [x, x.next_up(), x.next_down(), x - 0.7, x - 1.0]) {
            for x in [x, -x, f64::INFINITY, f64::NEG_INFINITY, f64::NAN] {
                assert_eq!((truncate_to_i64(x), truncate_to_i32(x)), (x as i64, x as i32), "{x}");
                assert_eq!(truncate_f32_to_i32(x as f32), x as f32 as i32, "{x}");
            }
        }
    }
}
