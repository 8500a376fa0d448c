//! Arithmetic of f64.

use super::round::{Mode, directed};
use super::{Lane, Map, map};

impl Lane for f64 {
    #[inline(always)]
    fn get(bits: u64) -> Self {
        f64::from_bits(bits)
    }
    #[inline(always)]
    fn put(self) -> u64 {
        self.to_bits()
    }
}

macro_rules! directions {
    ($mode:expr, $m:ident, $map:expr) => {
        match $mode {
            Mode::Zero => {
                const $m: Mode = Mode::Zero;
                $map
            }
            Mode::Down => {
                const $m: Mode = Mode::Down;
                $map
            }
            _ => {
                const $m: Mode = Mode::Up;
                $map
            }
        }
    };
}

/// What the rounded sum misses (Knuth's TwoSum).
fn sum_error(a: f64, b: f64, sum: f64) -> f64 {
    let part = sum - a;
    (a - (sum - part)) + (b - part)
}

fn sum(a: f64, b: f64, mode: Mode) -> f64 {
    let sum = a + b;
    if sum.is_infinite() && a.is_finite() && b.is_finite() {
        return overflow(sum, mode);
    }
    if sum == 0.0 && mode == Mode::Down && (a.is_sign_negative() || b.is_sign_negative()) {
        return -0.0;
    }
    directed(sum, sum_error(a, b, sum), mode)
}

fn overflow(infinite: f64, mode: Mode) -> f64 {
    let inwards = mode == Mode::Zero || (mode == Mode::Down) == (infinite > 0.0);
    if inwards { f64::MAX.copysign(infinite) } else { infinite }
}

/// `a * b + c` in a direction: the error of the nearest result is the sum of the product's and the additions' errors.
fn fused(a: f64, b: f64, c: f64, mode: Mode) -> f64 {
    let nearest = a.mul_add(b, c);
    if nearest.is_infinite() && a.is_finite() && b.is_finite() && c.is_finite() {
        return overflow(nearest, mode);
    }
    if nearest == 0.0 && mode == Mode::Down && a * b != 0.0 && a * b == -c {
        return -0.0;
    }
    let (product, low) = (a * b, a.mul_add(b, -(a * b)));
    let high = product + c;
    let rest = sum_error(product, c, high);
    let error = (high - nearest) + (rest + low);
    directed(nearest, error, mode)
}

/// `add`, `sub`, `mul`, `fma`, `div`, `rcp`, `sqrt` with their rounding. Where a result in another direction than the
/// nearest is subnormal, its last bit may be that of the nearest.
pub(crate) fn rounded(name: &str, mode: Mode) -> Option<Map> {
    if mode == Mode::Nearest {
        return nearest(name);
    }
    Some(match name {
        "add" => directions!(mode, M, map!((a: f64, b: f64) -> f64 { sum(a, b, M) })),
        "sub" => directions!(mode, M, map!((a: f64, b: f64) -> f64 { sum(a, -b, M) })),
        "mul" => directions!(
            mode,
            M,
            map!((a: f64, b: f64) -> f64 {
                let product = a * b;
                if product.is_infinite() && a.is_finite() && b.is_finite() {
                    overflow(product, M)
                } else {
                    directed(product, a.mul_add(b, -product), M)
                }
            })
        ),
        "fma" => directions!(mode, M, map!((a: f64, b: f64, c: f64) -> f64 { fused(a, b, c, M) })),
        "div" => directions!(mode, M, map!((a: f64, b: f64) -> f64 { quotient(a, b, M) })),
        "rcp" => directions!(mode, M, map!((a: f64) -> f64 { quotient(1.0, a, M) })),
        "sqrt" => directions!(
            mode,
            M,
            map!((a: f64) -> f64 {
                let root = a.sqrt();
                directed(root, (-root).mul_add(root, a), M)
            })
        ),
        _ => return None,
    })
}

fn quotient(a: f64, b: f64, mode: Mode) -> f64 {
    let quotient = a / b;
    if quotient.is_infinite() && a.is_finite() && b != 0.0 {
        return overflow(quotient, mode);
    }
    let rest = (-quotient).mul_add(b, a);
    directed(quotient, if b < 0.0 { -rest } else { rest }, mode)
}

fn nearest(name: &str) -> Option<Map> {
    Some(match name {
        "add" => map!((a: f64, b: f64) -> f64 { a + b }),
        "sub" => map!((a: f64, b: f64) -> f64 { a - b }),
        "mul" => map!((a: f64, b: f64) -> f64 { a * b }),
        "fma" => map!((a: f64, b: f64, c: f64) -> f64 { a.mul_add(b, c) }),
        "div" => map!((a: f64, b: f64) -> f64 { a / b }),
        "rcp" => map!((a: f64) -> f64 { 1.0 / a }),
        "sqrt" => map!((a: f64) -> f64 { a.sqrt() }),
        _ => return None,
    })
}

fn least(a: f64, b: f64) -> f64 {
    if a.is_nan() {
        return b;
    }
    if b.is_nan() || a < b || a == b && a.is_sign_negative() { a } else { b }
}

/// The upper half of the bits alone.
fn coarse(x: f64) -> f64 {
    f64::from_bits(x.to_bits() >> 32 << 32)
}

/// `min`, `max`, `abs`, `neg`, `copysign`, and the approximations whose result has only the upper half of its bits.
pub(crate) fn exact(name: &str) -> Option<Map> {
    Some(match name {
        "min" => map!((a: f64, b: f64) -> f64 { least(a, b) }),
        "max" => map!((a: f64, b: f64) -> f64 { -least(-a, -b) }),
        "abs" => map!((a: f64) -> f64 { a.abs() }),
        "neg" => map!((a: f64) -> f64 { -a }),
        "copysign" => map!((a: f64, b: f64) -> f64 { b.copysign(a) }),
        "rcp.approx" => map!((a: f64) -> f64 { coarse(flush(1.0 / coarse(flush(a)))) }),
        // Only with `.ftz` it is the hardware's coarse one.
        "rsqrt.approx" => map!((a: f64) -> f64 { 1.0 / a.sqrt() }),
        "rsqrt.approx.ftz" => map!((a: f64) -> f64 { coarse(1.0 / flush(a).sqrt()) }),
        _ => return None,
    })
}

fn flush(x: f64) -> f64 {
    if x.is_subnormal() { 0f64.copysign(x) } else { x }
}
