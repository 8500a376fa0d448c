//! The norm of all gradients, and gradient clipping.

use std::collections::BTreeMap;

use phalanx_kernels as kernels;
use phalanx_kernels::{NORM_BLOCK, Stretches};
use phalanx_tensor::{DType, Device, Tensor};

use crate::error::check_setting;
use crate::{Error, Parameter, Result, Usage, norm_tree};

/// The gradients' norm and the factor that reduces it to the bound.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Clip {
    /// The norm of all gradients together.
    pub norm: f64,
    /// `min(1, max_norm / (norm + 1e-6))`, for [`crate::Optimizer::step_scaled`].
    pub scale: f64,
}

impl Clip {
    /// The factor for gradients of that norm.
    pub fn new(norm: f64, max_norm: f64) -> Clip {
        // Not `f64::min`, which would turn a NaN into 1.
        let scale = max_norm / (norm + 1e-6);
        Clip { norm, scale: if scale > 1.0 { 1.0 } else { scale } }
    }

    /// [`Clip::scale`] of a norm that stays on its device, as a scalar of f64 for [`crate::Optimizer::step_by`].
    ///
    /// # Errors
    /// If the bound is not positive, or memory is short.
    pub fn factor(norm: &Tensor, max_norm: f64) -> Result<Tensor> {
        check_setting("Clip::factor", "a bound of", max_norm, max_norm > 0.0, "more than 0")?;
        let ratio = kernels::rdiv_scalar(&kernels::add_scalar(norm, 1e-6.into())?, max_norm.into())?;
        Ok(kernels::clamp(&ratio, None, Some(1.0.into()))?)
    }
}

/// Leaves out updates by gradients that are not finite, without a wait for a GPU: the factor of such an update is NaN, and an update by
/// a factor that is not finite changes nothing ([`crate::Optimizer::step_by`]). Clones share their state.
#[derive(Clone, Debug)]
pub struct UpdateGuard {
    /// 0; NaN once a norm was not finite. `None` if each update is guarded by its own norm only.
    lasting: Option<Tensor>,
}

impl UpdateGuard {
    /// Leaves out the update whose norm is not finite.
    pub fn once() -> UpdateGuard {
        UpdateGuard { lasting: None }
    }

    /// Leaves out the update whose norm is not finite, and all updates after it until [`UpdateGuard::reset`]. So a host that reads the norm
    /// some steps later finds the weights with which the gradients were computed.
    ///
    /// # Errors
    /// If memory is short.
    pub fn lasting(device: Device) -> Result<UpdateGuard> {
        Ok(UpdateGuard { lasting: Some(Tensor::zeros(&[], DType::F64, device)?) })
    }

    /// Allows updates again.
    ///
    /// # Errors
    /// If the state is in use.
    pub fn reset(&self) -> Result<()> {
        self.lasting.iter().try_for_each(|odd| Ok(kernels::fill_(&mut odd.clone(), 0.0)?))
    }

    /// The factor of gradients with this norm, a scalar of f64 on its device: that of [`Clip::factor`], or 1 without a bound.
    ///
    /// # Errors
    /// If the bound is not positive, or memory is short.
    pub fn factor(&self, norm: &Tensor, max_norm: Option<f64>) -> Result<Tensor> {
        // x - x is 0 if x is finite, else NaN. Adding 0 to a factor changes no bit of it.
        let mut odd = kernels::sub(norm, norm)?;
        if let Some(lasting) = self.lasting.as_ref().filter(|lasting| lasting.device() == norm.device()) {
            kernels::accumulate_(&mut lasting.clone(), &odd)?;
            odd = lasting.clone();
        }
        Ok(match max_norm {
            Some(max_norm) => kernels::add(&Clip::factor(norm, max_norm)?, &odd)?,
            None => kernels::add_scalar(&odd, 1.0.into())?,
        })
    }
}

/// Which gradient a sum of squares is of.
#[derive(Clone, Debug, PartialEq)]
pub struct Square {
    /// The parameter's global name.
    pub name: String,
    /// Whether the sum covers the whole gradient, or this rank's part of a parameter that is cut ([`crate::Shard::is_whole`]).
    pub whole: bool,
}

/// Sums of squares of gradients, in order of the parameters' names. They are on the gradients' device, and the host has not waited for
/// them.
#[derive(Clone, Debug)]
pub struct Squares {
    /// The gradient of each sum.
    pub of: Vec<Square>,
    /// f64 `[of.len()]`, contiguous: the sum of the squares of this rank's part of each gradient.
    pub sums: Tensor,
}

impl Squares {
    /// The root of all sums, added in order of the names: a scalar, f64, on their device.
    ///
    /// # Errors
    /// If a sum covers a part of a parameter that is cut over ranks, or memory is short.
    pub fn norm(&self) -> Result<Tensor> {
        if let Some(part) = self.of.iter().find(|square| !square.whole) {
            let why = "is cut over ranks, and this is the sum of its part here alone: add the ranks' first, as \
                       `tensor_parallel::sum_squares` and the mesh's `grad_norm` do";
            return Err(Error::invalid("grad_norm", format!("{:?} {why}", part.name)));
        }
        if self.of.is_empty() {
            return Ok(Tensor::zeros(&[], DType::F64, self.sums.device())?);
        }
        let mut sums = self.sums.copy()?;
        let rest: Vec<_> = (1..self.of.len()).map(|index| (0, index)).collect();
        kernels::add_pairs_(&mut sums, &rest)?;
        Ok(kernels::sqrt(&sums.select(0, 0)?)?)
    }
}

/// The Euclidean norm of all gradients. The order of additions is the same under every layout of ranks: each parameter's squares are
/// added by the tree of [`norm_tree`] in f64, and the parameters in order of their global names. A parameter that is listed twice counts
/// once. Gradient chains of several sites are added first ([`Parameter::finish_grad`]). On a `meta` device the norm is 0.
///
/// # Errors
/// If a gradient cannot be read.
pub fn grad_norm(parameters: &[Parameter]) -> Result<f64> {
    norm_of(&grad_squares(parameters)?)
}

/// The sums of squares of [`grad_norm`]. A parameter without a gradient has the sum 0. Sums of several devices are moved to the first
/// parameter's.
///
/// # Errors
/// If a gradient cannot be read, or a wrapper has sharded it over ranks ([`Parameter::set_owner`]).
pub fn grad_squares(parameters: &[Parameter]) -> Result<Squares> {
    let mut sorted: Vec<&Parameter> = parameters.iter().collect();
    sorted.sort_by(|a, b| a.name().cmp(b.name()));
    sorted.dedup_by(|a, b| a.is(b));
    sorted.iter().try_for_each(|p| p.check_usage("grad_norm", Usage::Norm))?;
    let mut parts: BTreeMap<Device, (Vec<usize>, Vec<Stretches>)> = BTreeMap::new();
    for (index, parameter) in sorted.iter().enumerate() {
        let grad = match parameter.finish_grad()? {
            Some(grad) => grad,
            None => Tensor::empty(&[0], parameter.dtype(), parameter.device())?,
        };
        let (indices, stretches) = parts.entry(grad.device()).or_default();
        let all = 0..grad.numel().div_ceil(NORM_BLOCK);
        indices.push(index);
        stretches.push((grad, vec![all]));
    }
    let home = sorted.first().map_or(Device::CPU, |parameter| parameter.device());
    let square = |parameter: &&Parameter| Square {
        name: parameter.name().to_string(),
        whole: parameter.part().is_whole(),
    };
    Ok(Squares { of: sorted.iter().map(square).collect(), sums: gather_sums(home, parts)? })
}

/// The sums of all devices on one, each at its parameter's index.
fn gather_sums(home: Device, mut parts: BTreeMap<Device, (Vec<usize>, Vec<Stretches>)>) -> Result<Tensor> {
    if let (1, Some((_, stretches))) = (parts.len(), parts.get(&home)) {
        return Ok(kernels::sums_of_squares(home, stretches)?);
    }
    let count = parts.values().map(|(indices, _)| indices.len()).sum();
    let (mut all, mut pairs) = (vec![Tensor::zeros(&[count], DType::F64, home)?], Vec::new());
    while let Some((device, (indices, stretches))) = parts.pop_first() {
        let (first, of) = (count + pairs.len(), indices.len());
        pairs.extend(indices.into_iter().zip(first..first + of));
        all.push(kernels::sums_of_squares(device, &stretches)?.to_device(home, false)?);
    }
    let mut all = kernels::cat(&all.iter().collect::<Vec<_>>(), 0)?;
    kernels::add_pairs_(&mut all, &pairs)?;
    Ok(all.narrow(0, 0, count)?)
}

/// [`Squares::norm`] as a number; the host waits for a GPU. On a `meta` device it is 0.
///
/// # Errors
/// Those that a kernel has reported.
pub fn norm_of(squares: &Squares) -> Result<f64> {
    let norm = squares.norm()?;
    Ok(if norm.device().is_meta() { 0.0 } else { norm.item()? })
}

/// The norm of all gradients and the factor that clips it to `max_norm`. The gradients do not change: the optimizer applies the factor
/// as it reads them.
///
/// # Errors
/// If a gradient cannot be read, or the bound is not positive.
pub fn clip_grad_norm(parameters: &[Parameter], max_norm: f64) -> Result<Clip> {
    check_setting("clip_grad_norm", "a bound of", max_norm, max_norm > 0.0, "more than 0")?;
    Ok(Clip::new(grad_norm(parameters)?, max_norm))
}

/// Scales gradients in place so that their joint `p`-norm (infinite `p`: the largest magnitude) is at most
/// `max_norm`, and returns the norm before.
///
/// # Errors
/// If a gradient is of no floating-point dtype, or `p` or the bound is not positive.
pub fn clip_grad_norm_(grads: &mut [Tensor], max_norm: f64, p: f64) -> Result<f64> {
    check_setting("clip_grad_norm_", "a norm of order", p, p > 0.0, "more than 0")?;
    check_setting("clip_grad_norm_", "a bound of", max_norm, max_norm > 0.0, "more than 0")?;
    let mut sum = 0.0;
    for grad in &*grads {
        if p == 2.0 {
            sum += norm_tree::sum(&kernels::sum_of_squares_blocks(grad)?);
            continue;
        }
        let wide = kernels::cast(grad, DType::F64)?;
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
    fn an_update_by_gradients_that_are_not_finite_changes_nothing() {
        let rules: [fn() -> Box<dyn crate::Rule>; 4] = [
            || Box::new(crate::AdamW::default()),
            || Box::new(crate::Ema::new(crate::Sgd { momentum: 0.9, ..Default::default() }, 0.5)),
            || Box::<crate::Muon>::default(),
            || Box::<crate::Adafactor>::default(),
        ];
        for (number, rule) in rules.into_iter().enumerate() {
            for max_norm in [None, Some(1.0)] {
                let tensor = |values: [f32; 4]| Tensor::from_slice(&values, &[2, 2], Device::CPU).unwrap();
                let p = Parameter::new("w", tensor([1.0, -2.0, 3.0, 0.5])).unwrap();
                let groups = vec![crate::Group::new(vec![p.clone()], 0.1)];
                let mut optimizer = crate::Optimizer::new(rule(), groups).unwrap();
                let mut step = |guard: &UpdateGuard, gradient: f32| {
                    p.set_grad(Some(tensor([gradient, 1.0, -1.0, 2.0])));
                    let norm = grad_squares(std::slice::from_ref(&p)).unwrap().norm().unwrap();
                    optimizer.step_by(&guard.factor(&norm, max_norm).unwrap()).unwrap();
                    let state = optimizer.state_dict().unwrap();
                    let state = state.into_iter().filter(|(name, _)| !name.ends_with("step"));
                    let state = state.flat_map(|(_, values)| values.to_vec::<f32>().unwrap());
                    p.tensor().to_vec::<f32>().unwrap().into_iter().chain(state).collect::<Vec<f32>>()
                };
                let (once, lasting) = (UpdateGuard::once(), UpdateGuard::lasting(Device::CPU).unwrap());
                let before = step(&once, 0.5);
                for odd in [f32::NAN, f32::INFINITY] {
                    let case = format!("rule {number}, {odd}");
                    assert_eq!(step(&once, odd), before, "{case}");
                    assert_eq!(step(&lasting, odd), before, "{case}");
                    assert_eq!(step(&lasting, 0.5), before, "{case}: the guard lasts");
                }
                assert_ne!(step(&once, 0.5), before, "rule {number}");
                lasting.reset().unwrap();
                let before = step(&once, 0.5);
                assert_ne!(step(&lasting, 0.5), before, "rule {number}");
            }
        }
    }

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
        for norm in [0.0, 2.9999995, 3.0, 30.0, f64::INFINITY, f64::NAN] {
            let factor = Clip::factor(&Tensor::scalar(norm, Device::CPU).unwrap(), 3.0).unwrap();
            let (factor, scale) = (factor.item::<f64>().unwrap(), Clip::new(norm, 3.0).scale);
            assert!(factor == scale || factor.is_nan() && scale.is_nan(), "{norm}: {factor}, {scale}");
        }
    }
}
