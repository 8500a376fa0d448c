//! What an operation costs beside its arithmetic: chains of tiny ones.

use phalanx::autograd::{Options, grad, no_grad};
use phalanx::{DType, Device, Tensor, Var, kernels};

use crate::report::{Report, median_ms};

/// Multiplications and additions of 8-element tensors in a chain.
const PAIRS: usize = 1000;

pub fn run(report: &Report) -> Result<(), Box<dyn std::error::Error>> {
    let filled = |x: f64| kernels::full(&[8], x, DType::F32, Device::CPU);
    let (a, b) = (Var::new(filled(1.0001)?), Var::new(filled(0.001)?));
    let chain = |x: &Var| -> phalanx::autograd::Result<Var> {
        (0..PAIRS).try_fold(x.clone(), |x, _| x.mul(&a)?.add(&b))
    };
    let leaf = Var::leaf(filled(1.0)?)?;
    let ones: Tensor = filled(1.0)?;
    chain(&leaf)?;
    let emit = |metric: &str, f: &mut dyn FnMut()| {
        report.emit("overhead", metric, median_ms(1.0, f) * 1e6 / (2 * PAIRS) as f64, "ns/op");
    };
    emit("fwd_no_grad", &mut || {
        let _guard = no_grad();
        drop(chain(&leaf));
    });
    emit("fwd", &mut || drop(chain(&leaf)));
    emit("fwd+bwd", &mut || {
        let both = chain(&leaf)
            .and_then(|y| grad(&[(y, Some(Var::new(ones.clone())))], &[&leaf], Options::default()));
        assert!(both.is_ok(), "the chain has a gradient");
    });
    Ok(())
}
