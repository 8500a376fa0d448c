//! What the tests of rules share: numbers, a run of a rule, and comparisons.

use phalanx_kernels as kernels;
use phalanx_tensor::{DType, Device, Tensor};

use super::{Group, Rule};
use crate::Parameter;

/// Numbers from -1 to 1, the same for the same seed.
pub fn random(shape: &[usize], seed: u64) -> Vec<f64> {
    let mut state = seed;
    let mut next = || {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (state >> 40) as f64 / (1u64 << 23) as f64 - 1.0
    };
    (0..shape.iter().product()).map(|_| next()).collect()
}

/// The values of a parameter, at first those of seed 1, after steps by gradients of the seeds 2, 3 and so on.
pub fn trained_by(
    rule: impl Rule,
    dtype: DType,
    shape: &[usize],
    steps: u64,
    lr: f64,
    decay: f64,
) -> Vec<f64> {
    let tensor = |seed: u64| {
        let values = Tensor::from_vec(random(shape, seed), shape, Device::CPU).unwrap();
        kernels::cast(&values, dtype).unwrap()
    };
    let p = Parameter::new("w", tensor(1)).unwrap();
    let group = Group::new(vec![p.clone()], lr).with_weight_decay(decay);
    let mut optimizer = rule.init(vec![group]).unwrap();
    for step in 1..=steps {
        p.set_grad(Some(tensor(1 + step)));
        optimizer.step().unwrap();
    }
    kernels::cast(&p.tensor(), DType::F64).unwrap().to_vec().unwrap()
}

/// Holds values against others, relative to the largest.
pub fn assert_near(got: &[f64], wanted: &[f64], tolerance: f64, what: &str) {
    assert_eq!(got.len(), wanted.len(), "{what}");
    let largest = wanted.iter().fold(1e-9f64, |largest, x| largest.max(x.abs()));
    for (i, (got, wanted)) in got.iter().zip(wanted).enumerate() {
        assert!((got - wanted).abs() <= tolerance * largest, "{what}: {got} at {i}, wanted {wanted}");
    }
}
