//! Gradients held against central differences, in f64.
//!
//! For outputs `y` and random cotangents `c` the scalar `<c, y>` is differentiated twice: by backward, and element
//! by element as `(<c, y(x + e)> - <c, y(x - e)>) / 2e`.

use phalanx_tensor::{DType, RngKey, Tensor};

use crate::{Error, Options, Outputs, Result, Var, enable_grad, grad, no_grad};

/// How closely [`gradcheck`] looks.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GradCheck {
    /// Step of the differences.
    pub eps: f64,
    /// Difference allowed, relative to the numeric value.
    pub rtol: f64,
    /// Difference allowed besides.
    pub atol: f64,
    /// Seed of the random cotangents.
    pub seed: u64,
}

impl Default for GradCheck {
    fn default() -> GradCheck {
        GradCheck { eps: 1e-5, rtol: 1e-5, atol: 1e-7, seed: 0 }
    }
}

/// Compares the gradients of `f` at `inputs` with central differences. Inputs of f64 are differentiated, integer and
/// bool ones handed through. `f` must be a function: of the same inputs it makes the same outputs.
///
/// # Errors
/// [`Error::GradCheck`] at the first element that differs; else if an input has a narrower floating-point dtype, or
/// `f` or its backward fails.
///
/// ```
/// use phalanx_autograd::{GradCheck, gradcheck, tensor::{Device, Tensor}};
/// let x = Tensor::from_slice(&[0.5, -1.0, 2.0], &[3], Device::CPU)?;
/// gradcheck(|v| v[0].mul(&v[0])?.tanh(), &[x], GradCheck::default())?;
/// # Ok::<(), phalanx_autograd::Error>(())
/// ```
pub fn gradcheck<O: Outputs>(
    f: impl Fn(&[Var]) -> Result<O>,
    inputs: &[Tensor],
    config: GradCheck,
) -> Result<()> {
    let f = |vars: &[Var]| f(vars).map(Outputs::into_vars);
    check("gradcheck", &f, inputs, config)
}

/// [`gradcheck`] of the gradients of `f`, as functions of its inputs and of the gradients of its outputs: second
/// derivatives.
///
/// # Errors
/// As [`gradcheck`].
pub fn gradgradcheck<O: Outputs>(
    f: impl Fn(&[Var]) -> Result<O>,
    inputs: &[Tensor],
    config: GradCheck,
) -> Result<()> {
    let f = |vars: &[Var]| -> Result<Vec<Var>> { Ok(floats(f(vars)?.into_vars())) };
    let outputs = f(&vars(inputs)?)?;
    let cotangents = cotangents(&outputs, config.seed.wrapping_add(1))?;
    let all: Vec<Tensor> =
        inputs.iter().cloned().chain(cotangents.iter().map(|c| c.tensor().clone())).collect();
    let gradients = |vars: &[Var]| -> Result<Vec<Var>> {
        let _recorded = enable_grad();
        let (x, c) = vars.split_at(inputs.len());
        gradients(&f(x)?, c, x, Options { create_graph: true, ..Options::default() })
    };
    check("gradgradcheck", &gradients, &all, config)
}

/// A function of several values.
type Function<'a> = dyn Fn(&[Var]) -> Result<Vec<Var>> + 'a;

fn check(op: &'static str, f: &Function<'_>, inputs: &[Tensor], config: GradCheck) -> Result<()> {
    if let Some(narrow) = inputs.iter().find(|t| t.dtype().is_float() && t.dtype() != DType::F64) {
        return Err(phalanx_tensor::Error::dtype(op, narrow.dtype(), "f64, or an integer").into());
    }
    if !inputs.iter().any(|t| t.dtype().is_float()) {
        let got = format!("{} inputs of integers or bools", inputs.len());
        return Err(
            phalanx_tensor::Error::invalid(op, format!("got {got}, wanted at least one of f64")).into()
        );
    }
    let leaves = vars(inputs)?;
    let outputs = floats(f(&leaves)?);
    let cotangents = cotangents(&outputs, config.seed)?;
    let analytic = gradients(&outputs, &cotangents, &leaves, Options::default())?;
    drop(outputs);
    let weights: Vec<Vec<f64>> = cotangents.iter().map(Var::to_vec).collect::<Result<_>>()?;
    let differentiable = (0..inputs.len()).filter(|&i| inputs[i].dtype().is_float());
    differentiable.zip(&analytic).try_for_each(|(input, analytic)| {
        for (element, analytic) in analytic.to_vec::<f64>()?.into_iter().enumerate() {
            let at = |step: f64| values(f, inputs, input, element, step);
            let (above, below) = (at(config.eps)?, at(-config.eps)?);
            let numeric = slope(&weights, &above, &below) / (2.0 * config.eps);
            // Written so that NaN fails.
            let close = (analytic - numeric).abs() <= config.atol + config.rtol * numeric.abs();
            if !close {
                return Err(Error::GradCheck { op, input, element, numeric, analytic });
            }
        }
        Ok(())
    })
}

/// `<weights, above - below>`.
fn slope(weights: &[Vec<f64>], above: &[Vec<f64>], below: &[Vec<f64>]) -> f64 {
    let pairs = above.iter().flatten().zip(below.iter().flatten());
    weights.iter().flatten().zip(pairs).map(|(w, (a, b))| w * (a - b)).sum()
}

/// The outputs' elements with one input element moved.
fn values(
    f: &Function<'_>,
    inputs: &[Tensor],
    input: usize,
    element: usize,
    step: f64,
) -> Result<Vec<Vec<f64>>> {
    let _plain = no_grad();
    let mut moved = inputs.to_vec();
    let mut x = moved[input].to_vec::<f64>()?;
    x[element] += step;
    moved[input] = Tensor::from_slice(&x, inputs[input].shape(), inputs[input].device())?;
    floats(f(&vars(&moved)?)?).iter().map(Var::to_vec).collect()
}

/// The gradients of the floating-point inputs; zeros where there is none.
pub(crate) fn gradients(
    outputs: &[Var],
    cotangents: &[Var],
    inputs: &[Var],
    options: Options,
) -> Result<Vec<Var>> {
    let roots: Vec<_> = outputs.iter().cloned().zip(cotangents.iter().cloned().map(Some)).collect();
    let inputs: Vec<&Var> = inputs.iter().filter(|v| v.dtype().is_float()).collect();
    let made = match outputs.iter().any(Var::requires_grad) {
        true => grad(&roots, &inputs, options)?,
        false => vec![None; inputs.len()],
    };
    let zeros = |v: &Var| -> Result<Var> { Ok(Var::new(v.tensor().zeros_like()?)) };
    made.into_iter().zip(inputs).map(|(grad, input)| grad.map_or_else(|| zeros(input), Ok)).collect()
}

fn vars(inputs: &[Tensor]) -> Result<Vec<Var>> {
    let var = |t: &Tensor| if t.dtype().is_float() { Var::leaf(t.clone()) } else { Ok(Var::new(t.clone())) };
    inputs.iter().map(var).collect()
}

fn floats(outputs: Vec<Var>) -> Vec<Var> {
    outputs.into_iter().filter(|v| v.dtype().is_float()).collect()
}

/// Uniform in (-1, 1), one tensor an output.
fn cotangents(outputs: &[Var], seed: u64) -> Result<Vec<Var>> {
    let cotangent = |(site, output): (usize, &Var)| {
        let stream = RngKey { seed, step: 0 }.site(site as u64);
        let word = |i: usize| stream.block(i as u64 / 4, 0)[i % 4];
        let values: Vec<f64> =
            (0..output.numel()).map(|i| (f64::from(word(i)) + 0.5) / f64::from(1u32 << 31) - 1.0).collect();
        Var::from_slice(&values, output.shape(), output.device())
    };
    outputs.iter().enumerate().map(cotangent).collect()
}

#[cfg(test)]
mod tests {
    use phalanx_tensor::Device;

    use super::*;
    use crate::{Backward, Cx, Grads, SaveContext, SavedVariable, grads1, record};

    fn x() -> Tensor {
        Tensor::from_slice(&[0.3, -0.7, 1.2, 0.9], &[2, 2], Device::CPU).unwrap()
    }

    /// `x * x` with the derivative `slope * x * dy`, itself differentiable if `linked`.
    struct Square {
        x: SavedVariable,
        slope: f64,
        linked: bool,
    }

    impl Backward for Square {
        fn backward(&self, cx: &Cx<'_>) -> Result<Grads> {
            let x = cx.get(&self.x)?;
            let x = if self.linked { x } else { x.detach() };
            grads1(cx.dy().mul(&x)?.mul_scalar(self.slope)?)
        }
    }

    fn square(x: &Var, slope: f64, linked: bool) -> Result<Var> {
        let y = phalanx_kernels::mul(x.tensor(), x.tensor())?;
        record("square", &[x], y, |s: &SaveContext<'_>| Ok(Square { x: s.input(0)?, slope, linked }))
    }

    #[test]
    fn right_gradients_pass_and_wrong_ones_are_named() {
        let (inputs, config) = ([x(), x()], GradCheck::default());
        gradcheck(|v| square(&v[1], 2.0, true), &inputs, config).unwrap();
        gradgradcheck(|v| square(&v[1], 2.0, true), &inputs, config).unwrap();
        let error = gradcheck(|v| square(&v[1], 2.001, true), &inputs, config).unwrap_err();
        assert!(matches!(error, Error::GradCheck { input: 1, element: 0, .. }), "{error}");
        let error = gradgradcheck(|v| square(&v[1], 2.0, false), &inputs, config).unwrap_err();
        assert!(matches!(error, Error::GradCheck { input: 1, element: 0, .. }), "{error}");
    }

    #[test]
    fn several_outputs_and_constants_pass() {
        let index = Tensor::from_slice(&[1i64, 2], &[2], Device::CPU).unwrap();
        let f =
            |v: &[Var]| Ok([v[0].tanh()?, v[0].mul(&v[2])?.sum_all()?, v[1].clone(), v[0].detach().detach()]);
        let error = gradcheck(f, &[x(), index.clone(), x()], GradCheck::default()).unwrap_err();
        assert!(error.to_string().contains("input 0"), "a detached output has no gradient: {error}");
        let f = |v: &[Var]| Ok([v[0].tanh()?, v[0].mul(&v[2])?.sum_all()?, v[1].clone()]);
        gradcheck(f, &[x(), index.clone(), x()], GradCheck::default()).unwrap();
        gradgradcheck(f, &[x(), index, x()], GradCheck::default()).unwrap();
    }

    #[test]
    fn narrower_floats_are_refused() {
        let x = Tensor::from_slice(&[1f32], &[1], Device::CPU).unwrap();
        assert!(gradcheck(|v| v[0].tanh(), &[x], GradCheck::default()).is_err());
    }
}
