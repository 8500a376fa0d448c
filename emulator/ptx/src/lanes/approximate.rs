//! Errors of approximate instructions of f32: the interpreter computes them exactly, a GPU within bounds that the PTX ISA
//! gives. A program should be right for every error within them.

use std::f64::consts::FRAC_1_SQRT_2;

use super::{Lanes, lanes};

/// How far a result may be from the correctly rounded one.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Bound {
    /// Units in the last place.
    Ulp(f64),
    /// A part of the result.
    Relative(f64),
    /// A distance.
    Absolute(f64),
}

/// An approximate instruction and its bound.
pub(crate) struct Approximation {
    pub(crate) name: &'static str,
    bound: Bound,
}

/// 2 to the power of `-n`.
const fn power(n: u32) -> f64 {
    1.0 / (1u64 << n) as f64
}

/// The instructions, with the bounds of "Floating Point Instructions" in the PTX ISA 9.0: `div.full` and `div.approx` 2 ulp,
/// `rcp.approx` 1 ulp, `sqrt.approx` 2^-23, `rsqrt.approx` 2^-22.9 (2^-23 here), `ex2.approx` and `lg2.approx` 2^-22,
/// `tanh.approx` 2^-11, `sin.approx` and `cos.approx` 2^-20.5 in all.
pub(crate) const APPROXIMATIONS: [Approximation; 9] = [
    Approximation { name: "div", bound: Bound::Ulp(2.0) },
    Approximation { name: "rcp", bound: Bound::Ulp(1.0) },
    Approximation { name: "sqrt", bound: Bound::Relative(power(23)) },
    Approximation { name: "rsqrt", bound: Bound::Relative(power(23)) },
    Approximation { name: "ex2", bound: Bound::Relative(power(22)) },
    Approximation { name: "lg2", bound: Bound::Relative(power(22)) },
    Approximation { name: "tanh", bound: Bound::Relative(power(11)) },
    Approximation { name: "sin", bound: Bound::Absolute(power(20) * FRAC_1_SQRT_2) },
    Approximation { name: "cos", bound: Bound::Absolute(power(20) * FRAC_1_SQRT_2) },
];

/// A number from -1 to 1 that depends on all of the arguments.
fn part(seed: u64, operation: u64, operands: [u64; 2]) -> f64 {
    let mut state = seed ^ operation.wrapping_mul(0xd6e8_feb8_6659_fd93);
    for operand in operands {
        state = (state ^ operand).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        state = (state ^ state >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        state ^= state >> 27;
    }
    (state >> 11) as f64 / (1u64 << 52) as f64 - 1.0
}

/// The result with an error that the instruction of that number may have. Results that PTX gives exactly stay: zeros,
/// infinities, NaN, and those of an operand of zero; and powers of two by whole numbers, on which the compiler's own
/// functions of f64 rely.
fn perturbed(result: u32, number: usize, seed: u64, operands: [u64; 2]) -> u32 {
    let exact = f32::from_bits(result);
    let operand = f32::from_bits(operands[0] as u32);
    let of_whole = APPROXIMATIONS[number].name == "ex2" && operand.fract() == 0.0;
    if exact == 0.0 || !exact.is_finite() || operand == 0.0 || of_whole {
        return result;
    }
    let exact = exact as f64;
    let ulp = (exact.abs().log2().floor().max(-126.0) - 23.0).exp2();
    let most = match APPROXIMATIONS[number].bound {
        Bound::Ulp(n) => n * ulp,
        Bound::Relative(part) => part * exact.abs(),
        Bound::Absolute(distance) => distance,
    };
    let wanted = exact + most * part(seed, number as u64, operands);
    let mut found = wanted as f32;
    if (found as f64 - exact).abs() > most {
        // Rounding has left the bound.
        found = if found as f64 > exact { found.next_down() } else { found.next_up() };
    }
    // A result stays a normal number of its sign, where `.ftz` made it one, and finite.
    let kept = found.is_finite() && (found.is_normal() || !(exact as f32).is_normal());
    if kept { found.to_bits() } else { result }
}

/// Perturbs the results of lanes.
pub(crate) fn perturb(results: &mut Lanes, number: usize, seed: u64, operands: &[Lanes; 2], mask: u32) {
    for l in lanes(mask) {
        results[l] = perturbed(results[l] as u32, number, seed, [operands[0][l], operands[1][l]]) as u64;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_stay_within_their_bounds_and_come_near_them() {
        for (number, approximation) in APPROXIMATIONS.iter().enumerate() {
            let mut worst = 0f64;
            for i in 1..20_000u64 {
                let exact = f32::from_bits(0x3000_0000 + (i as u32) * 12_347);
                let found = f32::from_bits(perturbed(exact.to_bits(), number, 5, [0x3000_0000 + i, 7]));
                let error = (found as f64 - exact as f64).abs();
                let ulp = exact.next_up() as f64 - exact as f64;
                let part = match approximation.bound {
                    Bound::Ulp(n) => error / (n * ulp),
                    Bound::Relative(part) => error / (part * exact as f64),
                    Bound::Absolute(distance) => error / distance,
                };
                worst = worst.max(part);
            }
            assert!(worst <= 1.0 && worst > 0.9, "{}: {worst} of the bound", approximation.name);
        }
    }

    #[test]
    fn the_same_operand_has_the_same_error_and_exact_results_stay() {
        let one = |seed, operand| perturbed(1.5f32.to_bits(), 6, seed, [operand, 0]);
        assert_eq!(one(1, 99), one(1, 99));
        assert!((1..50).any(|seed| one(seed, 99) != one(1, 99)));
        for exact in [0.0, -0.0, f32::INFINITY, f32::NEG_INFINITY] {
            assert_eq!(perturbed(exact.to_bits(), 4, 1, [99, 0]), exact.to_bits());
        }
        for (power, result) in [(0f32, 1f32), (7.0, 128.0), (-3.0, 0.125)] {
            assert_eq!(perturbed(result.to_bits(), 4, 1, [power.to_bits() as u64, 0]), result.to_bits());
        }
    }
}
