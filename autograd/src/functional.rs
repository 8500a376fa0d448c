//! Derivatives of functions: [`vjp`], [`jvp`], [`jacobian`], [`hvp`] and [`hessian`], under the names of
//! `torch.autograd.functional`.
//!
//! A function takes a list of values and returns one or several. Where it is differentiated, it is called once, with new
//! leaves that hold the inputs' values, and its graph is recorded also under [`no_grad`](crate::no_grad). All results are
//! constants; for results with a graph of their own use [`grad()`](crate::grad) with [`Options::create_graph`]. What the
//! function captures counts as a constant, and gets no gradient.
//!
//! With inputs `x[j]` and outputs `y[i]`:
//!
//! | | given | returns | passes |
//! |---|---|---|---|
//! | [`vjp`] | `v[i]` like `y[i]` | for each input `sum_i v[i] dy[i]/dx[j]`, like `x[j]` | one |
//! | [`jvp`] | `v[j]` like `x[j]` | for each output `sum_j dy[i]/dx[j] v[j]`, like `y[i]` | two |
//! | [`jacobian`] | | `dy[i]/dx[j]`, of shape `y[i].shape + x[j].shape` | one an element of the outputs |
//! | [`hvp`] | `v[j]` like `x[j]` | for each input `sum_k d²y/dx[j]dx[k] v[k]`, like `x[j]` | two |
//! | [`hessian`] | | `d²y/dx[j]dx[k]`, of shape `x[j].shape + x[k].shape` | one, and one an element of the inputs |

use phalanx_kernels as kernels;

use crate::function::reassemble;
use crate::gradcheck::gradients;
use crate::{Error, Options, Outputs, Result, Var, enable_grad};

/// For all passes over one graph.
const KEEP: Options = Options { retain_graph: true, create_graph: false };
const CREATE: Options = Options { retain_graph: true, create_graph: true };

/// The product of `cotangents` (one for each output, of its shape) with the Jacobian of `f` at `inputs`: the outputs, and
/// for each input its gradient. An input that no output depends on gets zeros.
///
/// # Errors
/// If an input or output is of integers, a cotangent does not fit its output, or `f` or its backward fails.
pub fn vjp<O: Outputs>(
    f: impl FnOnce(&[Var]) -> Result<O>,
    inputs: &[&Var],
    cotangents: &[&Var],
) -> Result<(O, Vec<Var>)> {
    let _recorded = enable_grad();
    let (x, y) = evaluate("vjp", f, inputs)?;
    let v = fitting("vjp", "cotangent", cotangents, "output", &y)?;
    let products = gradients(&y, &v, &x, Options::default())?;
    Ok((constants(y), products))
}

/// The product of the Jacobian of `f` at `inputs` with `tangents` (one for each input, of its shape): the outputs, and for
/// each output its derivative in that direction.
///
/// It is the gradient, with respect to `u`, of the gradient with cotangents `u`, which is linear in them.
///
/// ```
/// use phalanx_autograd::{Var, jvp, tensor::Device};
/// let x = Var::from_slice(&[1.0, 2.0], &[2], Device::CPU)?;
/// let v = Var::from_slice(&[1.0, 0.5], &[2], Device::CPU)?;
/// let (y, slope) = jvp(|x| x[0].square()?.sum_all(), &[&x], &[&v])?;
/// assert_eq!((y.item::<f64>()?, slope.item::<f64>()?), (5.0, 4.0)); // 2 x[0] v[0] + 2 x[1] v[1]
/// # Ok::<(), phalanx_autograd::Error>(())
/// ```
///
/// # Errors
/// If an input or output is of integers, a tangent does not fit its input, or `f` or its backward fails, of which an
/// operation may have no second derivative.
pub fn jvp<O: Outputs>(
    f: impl FnOnce(&[Var]) -> Result<O>,
    inputs: &[&Var],
    tangents: &[&Var],
) -> Result<(O, O)> {
    let _recorded = enable_grad();
    let v = fitting("jvp", "tangent", tangents, "input", inputs)?;
    let (x, y) = evaluate("jvp", f, inputs)?;
    let u = y.iter().map(|y| Var::leaf(y.tensor().zeros_like()?)).collect::<Result<Vec<_>>>()?;
    let linear = gradients(&y, &u, &x, CREATE)?;
    let products = gradients(&linear, &v, &u, Options::default())?;
    Ok((constants(y), reassemble(products)))
}

/// The Jacobian of `f` at `inputs`: for each output a list with, for each input, a value of the output's shape followed by
/// the input's.
///
/// ```
/// use phalanx_autograd::{Var, jacobian, tensor::Device};
/// let x = Var::from_slice(&[1.0, 2.0], &[2], Device::CPU)?;
/// let rows = jacobian(|x| x[0].square(), &[&x])?;
/// assert_eq!(rows[0][0].shape(), [2, 2]);
/// assert_eq!(rows[0][0].to_vec::<f64>()?, [2.0, 0.0, 0.0, 4.0]);
/// # Ok::<(), phalanx_autograd::Error>(())
/// ```
///
/// # Errors
/// If an input or output is of integers, or `f` or its backward fails.
pub fn jacobian<O: Outputs>(f: impl FnOnce(&[Var]) -> Result<O>, inputs: &[&Var]) -> Result<Vec<Vec<Var>>> {
    let _recorded = enable_grad();
    let (x, y) = evaluate("jacobian", f, inputs)?;
    y.iter().map(|y| rows(y, &x)).collect()
}

/// The product of the Hessian of `f`, whose output has one element, with `v` (one for each input, of its shape): the
/// output, and for each input its share of the product.
///
/// # Errors
/// If an input is of integers, the output has not one element, a part of `v` does not fit its input, or `f` or its backward
/// fails, of which an operation may have no second derivative.
pub fn hvp(f: impl FnOnce(&[Var]) -> Result<Var>, inputs: &[&Var], v: &[&Var]) -> Result<(Var, Vec<Var>)> {
    let _recorded = enable_grad();
    let v = fitting("hvp", "vector", v, "input", inputs)?;
    let (x, y) = evaluate("hvp", f, inputs)?;
    let first = slopes("hvp", &y, &x)?;
    let products = gradients(&first, &v, &x, Options::default())?;
    Ok((reassemble(constants(y)), products))
}

/// The Hessian of `f`, whose output has one element, at `inputs`: for each input a list with, for each input, a value of
/// the first's shape followed by the second's.
///
/// # Errors
/// If an input is of integers, the output has not one element, or `f` or its backward fails, of which an operation may have
/// no second derivative.
pub fn hessian(f: impl FnOnce(&[Var]) -> Result<Var>, inputs: &[&Var]) -> Result<Vec<Vec<Var>>> {
    let _recorded = enable_grad();
    let (x, y) = evaluate("hessian", f, inputs)?;
    let first = slopes("hessian", &y, &x)?;
    first.iter().map(|slope| rows(slope, &x)).collect()
}

/// The inputs as new leaves, and what `f` makes of them.
fn evaluate<O: Outputs>(
    op: &'static str,
    f: impl FnOnce(&[Var]) -> Result<O>,
    inputs: &[&Var],
) -> Result<(Vec<Var>, Vec<Var>)> {
    if let Some((i, x)) = inputs.iter().enumerate().find(|(_, x)| !x.dtype().is_float()) {
        let why = format!(
            "input {i} has dtype {}, wanted a floating-point one; let the function capture it",
            x.dtype()
        );
        return Err(refusal(op, why));
    }
    let x = inputs.iter().map(|x| Var::leaf(x.tensor().clone())).collect::<Result<Vec<_>>>()?;
    let y = f(&x)?.into_vars();
    match y.iter().enumerate().find(|(_, y)| !y.dtype().is_float()) {
        Some((i, y)) => {
            Err(refusal(op, format!("output {i} has dtype {}, wanted a floating-point one", y.dtype())))
        }
        None => Ok((x, y)),
    }
}

/// One value of the same shape, dtype and device for each of `places`.
fn fitting<V: std::borrow::Borrow<Var>>(
    op: &'static str,
    what: &str,
    given: &[&Var],
    place: &str,
    places: &[V],
) -> Result<Vec<Var>> {
    if given.len() != places.len() {
        let why = format!("got {} {what}s for {} {place}s, wanted one for each", given.len(), places.len());
        return Err(refusal(op, why));
    }
    let about = |v: &Var| format!("{:?} {} on {}", v.shape(), v.dtype(), v.device());
    for (i, (given, wanted)) in given.iter().zip(places).enumerate() {
        let (got, wanted) = (about(given), about(wanted.borrow()));
        if got != wanted {
            return Err(refusal(op, format!("{what} {i} is {got}, wanted {wanted} as {place} {i}")));
        }
    }
    Ok(given.iter().map(|v| v.detach()).collect())
}

/// The gradients of the only output, which has one element, with a graph of their own.
fn slopes(op: &'static str, y: &[Var], x: &[Var]) -> Result<Vec<Var>> {
    let [y] = y else { return Err(refusal(op, format!("got {} outputs, wanted one", y.len()))) };
    if y.numel() != 1 {
        return Err(refusal(op, format!("got an output of shape {:?}, wanted one element", y.shape())));
    }
    let one = Var::new(kernels::full(y.shape(), 1.0, y.dtype(), y.device())?);
    gradients(std::slice::from_ref(y), &[one], x, CREATE)
}

/// The Jacobian of one value: an element a pass.
fn rows(y: &Var, x: &[Var]) -> Result<Vec<Var>> {
    let mut rows: Vec<Vec<Var>> = vec![Vec::with_capacity(y.numel()); x.len()];
    for element in 0..y.numel() {
        let one = kernels::full(&[y.numel()], 0.0, y.dtype(), y.device())?;
        kernels::fill_(&mut one.narrow(0, element, 1)?, 1.0)?;
        let one = Var::new(one.with_shape(y.shape())?);
        let slopes = gradients(std::slice::from_ref(y), &[one], x, KEEP)?;
        rows.iter_mut().zip(slopes).for_each(|(rows, slope)| rows.push(slope.detach()));
    }
    let joined = |(rows, x): (Vec<Var>, &Var)| {
        let shape = [y.shape(), x.shape()].concat();
        match rows.is_empty() {
            true => Ok(Var::new(kernels::full(&shape, 0.0, x.dtype(), x.device())?)),
            false => Ok(Var::new(Var::stack(&rows, 0)?.tensor().with_shape(&shape)?)),
        }
    };
    rows.into_iter().zip(x).map(joined).collect()
}

fn constants<O: Outputs>(y: Vec<Var>) -> O {
    reassemble(y.iter().map(Var::detach).collect())
}

fn refusal(op: &'static str, why: String) -> Error {
    phalanx_tensor::Error::invalid(op, why).into()
}

#[cfg(test)]
mod tests {
    use phalanx_tensor::{DType, Device, Tensor};

    use super::*;
    use crate::no_grad;

    fn var(values: &[f64], shape: &[usize]) -> Var {
        Var::from_slice(values, shape, Device::CPU).unwrap()
    }

    fn values(x: &Var) -> Vec<f64> {
        x.to_vec().unwrap()
    }

    fn close(got: &Var, want: &[f64], shape: &[usize]) {
        assert_eq!(got.shape(), shape);
        assert!(!got.requires_grad());
        let off = values(got).iter().zip(want).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
        assert!(off < 1e-12, "{got:?}, wanted {want:?}");
    }

    /// `a b` and the sum of `a³`, for a of `[2]` and b of `[2]` or `[1]`.
    fn both(v: &[Var]) -> Result<(Var, Var)> {
        Ok((v[0].mul(&v[1])?, v[0].square()?.mul(&v[0])?.sum_all()?))
    }

    #[test]
    fn jacobians_have_the_outputs_shape_before_the_inputs() {
        let (a, b) = (var(&[2.0, 3.0], &[2]), var(&[5.0], &[1]));
        let rows = jacobian(both, &[&a, &b]).unwrap();
        close(&rows[0][0], &[5.0, 0.0, 0.0, 5.0], &[2, 2]);
        close(&rows[0][1], &[2.0, 3.0], &[2, 1]);
        close(&rows[1][0], &[12.0, 27.0], &[2]);
        close(&rows[1][1], &[0.0], &[1]);
    }

    #[test]
    fn products_with_vectors_are_those_with_the_jacobian() {
        let (a, b) = (var(&[2.0, 3.0], &[2]), var(&[5.0], &[1]));
        let ((y, z), (dy, dz)) =
            jvp(both, &[&a, &b], &[&var(&[1.0, -1.0], &[2]), &var(&[2.0], &[1])]).unwrap();
        close(&y, &[10.0, 15.0], &[2]);
        close(&z, &[35.0], &[]);
        close(&dy, &[5.0 + 4.0, -5.0 + 6.0], &[2]);
        close(&dz, &[12.0 - 27.0], &[]);
        let ((y, _), grads) = vjp(both, &[&a, &b], &[&var(&[1.0, -1.0], &[2]), &var(&[2.0], &[])]).unwrap();
        close(&y, &[10.0, 15.0], &[2]);
        close(&grads[0], &[5.0 + 24.0, -5.0 + 54.0], &[2]);
        close(&grads[1], &[-1.0], &[1]);
    }

    #[test]
    fn directional_derivatives_are_central_differences_of_layers() {
        let (x, w) = (var(&[0.3, -0.7, 1.2, 0.9, 0.1, -0.4], &[2, 3]), var(&[0.5, -1.1, 0.8], &[1, 3]));
        let (dx, dw) = (var(&[0.2, 0.4, -1.0, 0.7, -0.3, 0.6], &[2, 3]), var(&[1.0, -0.5, 0.25], &[1, 3]));
        let f = |v: &[Var]| {
            v[0].layer_norm(&[3], None, None, 1e-5)?.linear(&v[1], None)?.gelu(kernels::Gelu::Exact)
        };
        let (_, got) = jvp(f, &[&x, &w], &[&dx, &dw]).unwrap();
        let moved = |step: f64| {
            let along = |x: &Var, d: &Var| x.add(&d.mul_scalar(step).unwrap()).unwrap();
            values(&f(&[along(&x, &dx), along(&w, &dw)]).unwrap())
        };
        let (above, below) = (moved(1e-5), moved(-1e-5));
        for ((a, b), got) in above.iter().zip(&below).zip(values(&got)) {
            assert!(((a - b) / 2e-5 - got).abs() < 1e-8, "{got}");
        }
    }

    #[test]
    fn hessians_of_quadratic_forms_are_their_matrices() {
        let (x, y) = (var(&[1.0, 2.0], &[2]), var(&[3.0], &[]));
        // x0² + 3 x0 x1 + y x1
        let f = |v: &[Var]| {
            let (a, b) = (v[0].narrow(0, 0, 1)?, v[0].narrow(0, 1, 1)?);
            a.square()?.add(&a.mul(&b)?.mul_scalar(3.0)?)?.add(&v[1].mul(&b)?)
        };
        let blocks = hessian(f, &[&x, &y]).unwrap();
        close(&blocks[0][0], &[2.0, 3.0, 3.0, 0.0], &[2, 2]);
        close(&blocks[0][1], &[0.0, 1.0], &[2]);
        close(&blocks[1][0], &[0.0, 1.0], &[2]);
        close(&blocks[1][1], &[0.0], &[]);
        let (value, products) = hvp(f, &[&x, &y], &[&var(&[1.0, -2.0], &[2]), &var(&[4.0], &[])]).unwrap();
        close(&value, &[13.0], &[1]);
        close(&products[0], &[2.0 - 6.0, 3.0 + 4.0], &[2]);
        close(&products[1], &[-2.0], &[]);
    }

    #[test]
    fn functions_without_curvature_inputs_or_elements_have_zeros() {
        let x = var(&[1.0, 2.0], &[2]);
        close(&hessian(|v| v[0].sum_all(), &[&x]).unwrap()[0][0], &[0.0; 4], &[2, 2]);
        close(&jacobian(|v| Ok(v[0].clone()), &[&x]).unwrap()[0][0], &[1.0, 0.0, 0.0, 1.0], &[2, 2]);
        close(&jacobian(|_| Ok(var(&[7.0], &[1])), &[&x]).unwrap()[0][0], &[0.0; 2], &[1, 2]);
        close(&jvp(|v| Ok(v[0].clone()), &[&x], &[&var(&[3.0, 4.0], &[2])]).unwrap().1, &[3.0, 4.0], &[2]);
        close(&jvp(|_| Ok(var(&[7.0], &[1])), &[&x], &[&x]).unwrap().1, &[0.0], &[1]);
        let none = var(&[], &[0, 2]);
        assert_eq!(jacobian(|v| v[0].square(), &[&none]).unwrap()[0][0].shape(), [0, 2, 0, 2]);
        assert_eq!(hessian(|v| v[0].square()?.sum_all(), &[&none]).unwrap()[0][0].shape(), [0, 2, 0, 2]);
    }

    #[test]
    fn the_graph_is_recorded_inside_no_grad_and_nothing_reaches_the_inputs_slots() {
        let x = Var::leaf(Tensor::from_slice(&[2.0], &[1], Device::CPU).unwrap()).unwrap();
        let _plain = no_grad();
        let (_, products) = hvp(|v| v[0].square()?.sum_all(), &[&x], &[&var(&[1.0], &[1])]).unwrap();
        close(&products[0], &[2.0], &[1]);
        assert!(x.grad().is_none() && !crate::is_grad_enabled());
    }

    #[test]
    fn shapes_are_known_without_elements() {
        let x = Var::new(Tensor::zeros(&[2, 3], DType::F32, Device::Meta(0)).unwrap());
        let rows = jacobian(|v| v[0].tanh()?.sum(&[1], false), &[&x]).unwrap();
        assert_eq!(rows[0][0].shape(), [2, 2, 3]);
        assert_eq!(jvp(|v| v[0].tanh(), &[&x], &[&x]).unwrap().1.shape(), [2, 3]);
    }

    #[test]
    fn what_does_not_fit_is_named() {
        let (x, i) = (var(&[1.0, 2.0], &[2]), Var::from_slice(&[1i64], &[1], Device::CPU).unwrap());
        let said = |e: Error, parts: &[&str]| {
            let text = e.to_string();
            assert!(parts.iter().all(|part| text.contains(part)), "{text:?} lacks one of {parts:?}");
        };
        said(jacobian(|v| v[0].square(), &[&i]).unwrap_err(), &["jacobian", "input 0", "i64", "capture"]);
        said(hessian(|v| v[0].square(), &[&x]).unwrap_err(), &["hessian", "[2]", "one element"]);
        said(hvp(|v| v[0].sum_all(), &[&x], &[]).unwrap_err(), &["hvp", "0 vectors for 1 inputs"]);
        let three = var(&[1.0; 3], &[3]);
        said(jvp(|v| v[0].square(), &[&x], &[&three]).err().unwrap(), &["jvp", "tangent 0", "[3]", "[2]"]);
        said(vjp(|v| v[0].square(), &[&x], &[&three]).err().unwrap(), &["vjp", "cotangent 0", "[3]", "[2]"]);
    }
}
