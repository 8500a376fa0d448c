//! What the operations' tests share.

use phalanx_tensor::{Device, Tensor};

use crate::{GradCheck, Outputs, Result, Var, gradcheck, gradgradcheck};

/// Holds the first and second derivatives of `f`, at inputs of these shapes, against differences.
#[track_caller]
pub(crate) fn check_twice<O: Outputs>(shapes: &[&[usize]], f: impl Fn(&[Var]) -> Result<O>) {
    let input = |(i, shape): (usize, &&[usize])| {
        let value = |at: usize| 2.0 * (at as f64 * 0.618_033_988_749_894_9 + i as f64 * 0.37).fract() - 1.0;
        let values: Vec<f64> = (0..shape.iter().product()).map(value).collect();
        Tensor::from_slice(&values, shape, Device::CPU).unwrap()
    };
    let inputs: Vec<Tensor> = shapes.iter().enumerate().map(input).collect();
    gradcheck(&f, &inputs, GradCheck::default()).unwrap_or_else(|e| panic!("{shapes:?}: {e}"));
    gradgradcheck(&f, &inputs, GradCheck::default()).unwrap_or_else(|e| panic!("{shapes:?}: {e}"));
}
