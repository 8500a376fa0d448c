//! The norm of all gradients, and clipping by it.

use std::collections::BTreeMap;

use phalanx_kernels as kernels;
use phalanx_tensor::{Device, Tensor};

use crate::{Error, Parameter, Result, norm_tree};

/// The gradients' norm and the factor that brings it down to the bound.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Clip {
    /// The norm of all gradients together.
    pub norm: f64,
    /// `min(1, max_norm / (norm + 1e-6))`, to be given to [`crate::Optimizer::step_scaled`].
    pub scale: f64,
}

impl Clip {
    /// The factor for gradients of that norm.
    pub fn new(norm: f64, max_norm: f64) -> Clip {
        // Not `f64::min`, which would turn a NaN into 1.
        let scale = max_norm / (norm + 1e-6);
        Clip { norm, scale: if scale > 1.0 { 1.0 } else { scale } }
    }
}

/// A parameter's gradient in the norm.
#[derive(Clone, Debug, PartialEq)]
pub struct Square {
    /// The parameter's global name.
    pub name: String,
    /// The sum of the squares of what is here of its gradient.
    pub sum: f64,
    /// Whether that is all of it, or a part of a parameter that is cut ([`crate::Shard::is_whole`]).
    pub whole: bool,
}

/// The Euclidean norm of all gradients, in an order that no layout changes: each parameter's sum of squares by the
/// tree of [`norm_tree`], in f64, the parameters in order of their global names, one that comes twice once. Gradient
/// chains of several sites are added first ([`Parameter::finish_grad`]). On a `meta` device it is 0.
///
/// # Errors
/// If a gradient cannot be read.
pub fn grad_norm(parameters: &[Parameter]) -> Result<f64> {
    Ok(norm_of(grad_squares(parameters)?))
}

/// The sums of squares of [`grad_norm`], of parameters that have a gradient or not.
///
/// # Errors
/// If a gradient cannot be read.
pub fn grad_squares(parameters: &[Parameter]) -> Result<Vec<Square>> {
    let mut sorted: Vec<&Parameter> = parameters.iter().collect();
    sorted.sort_by(|a, b| a.name().cmp(b.name()));
    sorted.dedup_by(|a, b| a.is(b));
    let grads = sorted.iter().map(|parameter| parameter.finish_grad()).collect::<Result<Vec<_>>>()?;
    let sums = sums_of_squares(&grads)?;
    let square = |(parameter, sum): (&&Parameter, f64)| {
        let (name, whole) = (parameter.name().to_string(), parameter.part().is_whole());
        Square { name, sum, whole }
    };
    Ok(sorted.iter().zip(sums).map(square).collect())
}

/// The sum of the squares of each gradient; 0 where there is none. A GPU is waited for once, not for each.
fn sums_of_squares(grads: &[Option<Tensor>]) -> Result<Vec<f64>> {
    let mut sums = vec![0.0; grads.len()];
    let mut roots: BTreeMap<Device, (Vec<usize>, Vec<Tensor>)> = BTreeMap::new();
    for (at, grad) in grads.iter().enumerate() {
        let Some(grad) = grad else { continue };
        if grad.device().is_cuda() {
            let (places, roots) = roots.entry(grad.device()).or_default();
            places.push(at);
            roots.push(kernels::sum_of_squares(grad)?.with_shape(&[1])?);
        } else {
            sums[at] = norm_tree::sum(&kernels::sum_of_squares_blocks(grad)?);
        }
    }
    for (places, roots) in roots.into_values() {
        let all = kernels::cat(&roots.iter().collect::<Vec<_>>(), 0)?.to_vec::<f64>()?;
        places.into_iter().zip(all).for_each(|(at, sum)| sums[at] = sum);
    }
    Ok(sums)
}

/// The root of all sums, added in order of the names.
pub fn norm_of(mut squares: Vec<Square>) -> f64 {
    squares.sort_by(|a, b| a.name.cmp(&b.name));
    squares.iter().fold(0.0, |sum, square| sum + square.sum).sqrt()
}

/// The norm of all gradients and the factor that clips it to `max_norm`. The gradients are left as they are: the
/// optimizer applies the factor as it reads them.
///
/// # Errors
/// If a gradient cannot be read, or the bound is not positive.
pub fn clip_grad_norm(parameters: &[Parameter], max_norm: f64) -> Result<Clip> {
    if max_norm.is_nan() || max_norm <= 0.0 {
        return Err(Error::invalid(
            "clip_grad_norm",
            format!("got a bound of {max_norm}, wanted more than 0"),
        ));
    }
    Ok(Clip::new(grad_norm(parameters)?, max_norm))
}

/// Scales gradients in place so that their joint `p`-norm (infinite `p`: the largest magnitude) is at most
/// `max_norm`, and returns the norm before.
///
/// # Errors
/// If a gradient is of no floating-point dtype, or `p` is not positive.
pub fn clip_grad_norm_(grads: &mut [Tensor], max_norm: f64, p: f64) -> Result<f64> {
    if p.is_nan() || p <= 0.0 {
        return Err(Error::invalid(
            "clip_grad_norm_",
            format!("got a norm of order {p}, wanted more than 0"),
        ));
    }
    let mut sum = 0.0;
    for grad in &*grads {
        if p == 2.0 {
            sum += norm_tree::sum(&kernels::sum_of_squares_blocks(grad)?);
            continue;
        }
        let wide = kernels::cast(grad, phalanx_tensor::DType::F64)?;
        let values = if grad.device().is_meta() { Vec::new() } else { wide.to_vec::<f64>()? };
        let norm = values.iter().fold(0.0, |sum, x| match p.is_infinite() {
            true => larger(sum, x.abs()),
            false => sum + x.abs().powf(p),
        });
        sum = if p.is_infinite() { larger(sum, norm) } else { sum + norm };
    }
    let norm = if p.is_infinite() { sum } else { sum.powf(1.0 / p) };
    let clip = Clip::new(norm, max_norm);
    grads.iter_mut().try_for_each(|grad| kernels::scale_(grad, clip.scale))?;
    Ok(norm)
}

fn larger(a: f64, b: f64) -> f64 {
    if b > a || b.is_nan() { b } else { a }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_norm_counts_every_parameter_once() {
        let parameter = |name: &str, n: usize| {
            let p =
                Parameter::new(name, Tensor::from_slice(&vec![0f32; n], &[n], Device::CPU).unwrap()).unwrap();
            p.set_grad(Some(Tensor::from_slice(&vec![2f32; n], &[n], Device::CPU).unwrap()));
            p
        };
        let (a, b) = (parameter("a", 200), parameter("b", 25));
        let norm = grad_norm(&[b.clone(), a.clone(), b.clone()]).unwrap();
        assert_eq!(norm, 900f64.sqrt());
        assert_eq!(clip_grad_norm(&[a, b], 60.0).unwrap().scale, 1.0);
        assert!((Clip::new(30.0, 3.0).scale - 0.1).abs() < 1e-8);
        assert!(Clip::new(f64::NAN, 3.0).scale.is_nan());
    }
}
