//! Normalizations over the last dimensions, alone and fused with a residual addition.

use std::sync::Arc;

use phalanx_kernels as kernels;
use phalanx_tensor::{Dims, Result as TensorResult, Tensor};
use smallvec::SmallVec;

use crate::{
    Backward, Cx, Grads, Rematerialized, Result, SaveContext, SavedVariable, Var, begins, record, record_many,
};

/// `y = (x - mean) / sqrt(var + eps) * w + b` over the last dimensions, mean and variance of each row its own.
///
/// Derivative, with `xhat` the normalised row, `r` its inverse deviation and `g = dy w`:
/// `dx = r (g - mean(g) - xhat mean(g xhat))`, `dw = sum(dy xhat)` and `db = sum(dy)` over the rows.
/// Shapes: `x` [.., n..], `w` and `b` [n..]. Saves `x`, `w` and two or three numbers a row (mean, `r`), from which the
/// backward pass computes `xhat` again in its one pass, and `y` for operations that would save it ([`Rematerialized`]).
/// The mean is kept in two parts, so that a small spread beside a large mean keeps its digits.
/// Source: Ba, Kiros, Hinton: Layer Normalization (2016).
impl Var {
    /// Layer normalisation over the last dimensions, which must be `normalized_shape`, then scaled by `weight` and
    /// shifted by `bias` where they are given.
    ///
    /// # Errors
    /// If shapes, dtypes or devices do not fit.
    pub fn layer_norm(
        &self,
        normalized_shape: &[usize],
        weight: Option<&Var>,
        bias: Option<&Var>,
        eps: f64,
    ) -> Result<Var> {
        begins();
        let affine = [weight.map(Var::tensor), bias.map(Var::tensor)];
        let (y, stats) = kernels::layer_norm(self.tensor(), normalized_shape, affine[0], affine[1], eps)?;
        let form = Form { shape: Dims::from_slice(normalized_shape), centred: true, eps };
        record_norm(
            "layer_norm",
            form,
            [self].into_iter().chain(weight).chain(bias),
            weight.is_some(),
            (y, stats),
        )
    }
}

/// What is normalised and how.
pub(super) struct Form {
    pub(super) shape: Dims,
    /// Whether the mean is subtracted: layer normalisation, else root mean square.
    pub(super) centred: bool,
    pub(super) eps: f64,
}

impl Form {
    /// How the normalised rows are computed again of x, weight and bias.
    fn rematerialize(
        &self,
        weighted: bool,
    ) -> impl Fn(&[Tensor]) -> TensorResult<Tensor> + Send + Sync + 'static {
        let Form { ref shape, centred, eps } = *self;
        let shape = shape.clone();
        move |of| {
            let (w, b) = (of.get(1).filter(|_| weighted), of.get(1 + usize::from(weighted)));
            Ok(match centred {
                true => kernels::layer_norm(&of[0], &shape, w, b, eps)?.0,
                false => kernels::rms_norm(&of[0], &shape, w, eps)?.0,
            })
        }
    }
}

/// Records a normalisation of the inputs x, weight?, bias? that gave `y` and the rows' numbers.
pub(super) fn record_norm<'a>(
    name: &'static str,
    form: Form,
    inputs: impl Iterator<Item = &'a Var>,
    weighted: bool,
    (y, stats): (Tensor, Tensor),
) -> Result<Var> {
    let inputs: SmallVec<[&Var; 4]> = inputs.collect();
    record(name, &inputs, y, |s: &SaveContext<'_>| {
        let weight = (weighted && s.needs(0)).then(|| s.input(1)).transpose()?;
        let rematerialized = s.rematerialized(0, 0..inputs.len(), form.rematerialize(weighted));
        Ok(RowNorm {
            x: s.input(0)?,
            weight,
            weighted,
            inputs: inputs.len(),
            added: false,
            stats,
            form,
            rematerialized,
        })
    })
}

/// Records a normalisation of x + residual, of the inputs x, residual, weight?, bias?, that gave the sum, `y` and the rows'
/// numbers.
pub(super) fn record_added<'a>(
    name: &'static str,
    form: Form,
    inputs: impl Iterator<Item = &'a Var>,
    weighted: bool,
    [sum, y, stats]: [Tensor; 3],
) -> Result<(Var, Var)> {
    let inputs: SmallVec<[&Var; 4]> = inputs.collect();
    let mut made = record_many(name, &inputs, [sum, y].into_iter().collect(), |s: &SaveContext<'_>| {
        let weight = (weighted && (s.needs(0) || s.needs(1))).then(|| s.input(2)).transpose()?;
        let rematerialized = s.rematerialized_of_output(1, 0, 2..inputs.len(), form.rematerialize(weighted));
        Ok(RowNorm {
            x: s.output(0)?,
            weight,
            weighted,
            inputs: inputs.len(),
            added: true,
            stats,
            form,
            rematerialized,
        })
    })?;
    let y = made.remove(1);
    Ok((made.remove(0), y))
}

struct RowNorm {
    /// What was normalised.
    x: SavedVariable,
    /// Saved only if the gradient of x is wanted.
    weight: Option<SavedVariable>,
    weighted: bool,
    /// How many inputs were recorded.
    inputs: usize,
    /// Whether x is the sum of the first two, and the first output.
    added: bool,
    stats: Tensor,
    form: Form,
    /// How `y` is computed again.
    rematerialized: Option<Arc<Rematerialized>>,
}

impl Backward for RowNorm {
    const REMATERIALIZES: bool = true;

    fn rematerialized(&self, i: usize) -> Option<&Arc<Rematerialized>> {
        self.rematerialized.as_ref().filter(|_| i == usize::from(self.added))
    }

    fn backward(&self, cx: &Cx<'_>) -> Result<Grads> {
        let summands = 1 + usize::from(self.added);
        let (dy, dsum) = if self.added { (cx.dy_at(1), cx.dy_at(0)) } else { (Some(cx.dy()), None) };
        let needs_x = (0..summands).any(|i| cx.needs(i));
        let [dx, dw, db] = match dy {
            None => [dsum.cloned(), None, None],
            Some(dy) => {
                let bias = summands + usize::from(self.weighted);
                let needs = |i: usize| i < self.inputs && cx.needs(i);
                self.gradients(cx, dy, dsum, [needs_x, self.weighted && needs(summands), needs(bias)])?
            }
        };
        let affine = [Some(dw).filter(|_| self.weighted), Some(db)];
        let summands = std::iter::repeat_n(dx, summands);
        Ok(summands.chain(affine.into_iter().flatten()).take(self.inputs).collect())
    }

    /// Weight and bias ask for that of the normalised rows alone.
    fn keeps_gradient(&self, i: usize) -> bool {
        !self.added || i == 1
    }
}

impl RowNorm {
    /// Of x, weight and bias, given those of `y` and, where x is an output, of x.
    fn gradients(
        &self,
        cx: &Cx<'_>,
        dy: &Var,
        dsum: Option<&Var>,
        needs: [bool; 3],
    ) -> Result<[Option<Var>; 3]> {
        let x = cx.get(&self.x)?;
        // The weight may be gone when a split backward comes to its gradient.
        let weight = self.weight.as_ref().filter(|_| needs[0]).map(|w| cx.get(w)).transpose()?;
        if !cx.create_graph() {
            return self.fused(&x, weight.as_ref(), dy, dsum, needs);
        }
        let [dx, dw, db] = self.composed(&x, weight.as_ref(), dy, needs)?;
        let dx = match (dx, dsum) {
            (Some(dx), Some(dsum)) => Some(dsum.add(&dx)?),
            (dx, _) => dx,
        };
        Ok([dx, dw, db])
    }

    fn fused(
        &self,
        x: &Var,
        w: Option<&Var>,
        dy: &Var,
        dsum: Option<&Var>,
        needs: [bool; 3],
    ) -> Result<[Option<Var>; 3]> {
        let ([x, dy], w) = ([x.tensor(), dy.tensor()], w.map(Var::tensor));
        let (shape, stats) = (&self.form.shape, &self.stats);
        let without_bias = [needs[0], needs[1]];
        let made = match (self.form.centred, dsum.map(Var::tensor)) {
            (true, None) => kernels::layer_norm_backward(x, stats, shape, w, dy, needs)?,
            (true, Some(dsum)) => kernels::add_layer_norm_backward(x, stats, shape, w, [dy, dsum], needs)?,
            (false, None) => with_none(kernels::rms_norm_backward(x, stats, shape, w, dy, without_bias)?),
            (false, Some(dsum)) => {
                with_none(kernels::add_rms_norm_backward(x, stats, shape, w, [dy, dsum], without_bias)?)
            }
        };
        Ok(made.map(|t| t.map(Var::new)))
    }

    fn composed(&self, x: &Var, w: Option<&Var>, dy: &Var, needs: [bool; 3]) -> Result<[Option<Var>; 3]> {
        let shape = &self.form.shape;
        let dims: Dims = (x.rank() - shape.len()..x.rank()).collect();
        let Form { centred, eps, .. } = self.form;
        Normalization { x, weight: w, dy, dims: &dims, centred, eps }.gradients(shape, needs)
    }
}

fn with_none([dx, dw]: [Option<Tensor>; 2]) -> [Option<Tensor>; 3] {
    [dx, dw, None]
}

/// `y = x / sqrt(mean(x²) + eps) * w` over the last dimensions.
///
/// Derivative, with `xhat` the normalised row, `r` its inverse root and `g = dy w`: `dx = r (g - xhat mean(g xhat))` and
/// `dw = sum(dy xhat)` over the rows. Shapes: `x` [.., n..], `w` [n..]. Saves `x`, `w` and `r`.
/// Source: Zhang, Sennrich: Root Mean Square Layer Normalization (2019).
impl Var {
    /// Root-mean-square normalisation over the last dimensions, which must be `normalized_shape`, then scaled by
    /// `weight` if given.
    ///
    /// # Errors
    /// If shapes, dtypes or devices do not fit.
    pub fn rms_norm(&self, normalized_shape: &[usize], weight: Option<&Var>, eps: f64) -> Result<Var> {
        begins();
        let made = kernels::rms_norm(self.tensor(), normalized_shape, weight.map(Var::tensor), eps)?;
        let form = Form { shape: Dims::from_slice(normalized_shape), centred: false, eps };
        record_norm("rms_norm", form, [self].into_iter().chain(weight), weight.is_some(), made)
    }
}

/// `s = x + residual` and `y`, the layer normalisation of `s`: what ends a branch of a transformer's block and begins the
/// next, in one pass.
///
/// Derivative: `dx = dresidual = ds + ` [`Var::layer_norm`]'s for `dy`, added in that pass; `dw` and `db` are
/// the latter's. Shapes: `x`, `residual`, `s` and `y` [.., n..], `w` and `b` [n..]. Saves `s`, `w` and the rows' numbers.
impl Var {
    /// `self + residual`, of one shape, and its [`Var::layer_norm`]: the values of [`Var::add`] and that, to the bit.
    ///
    /// # Errors
    /// If shapes, dtypes or devices do not fit.
    pub fn add_layer_norm(
        &self,
        residual: &Var,
        normalized_shape: &[usize],
        weight: Option<&Var>,
        bias: Option<&Var>,
        eps: f64,
    ) -> Result<(Var, Var)> {
        begins();
        let [x, r] = [self, residual].map(Var::tensor);
        let [w, b] = [weight, bias].map(|v| v.map(Var::tensor));
        let made = kernels::add_layer_norm(x, r, normalized_shape, w, b, eps)?;
        let form = Form { shape: Dims::from_slice(normalized_shape), centred: true, eps };
        let inputs = [self, residual].into_iter().chain(weight).chain(bias);
        record_added("add_layer_norm", form, inputs, weight.is_some(), made)
    }
}

/// `s = x + residual` and `y`, the root-mean-square normalisation of `s`, in one pass.
///
/// Derivative: `dx = dresidual = ds + ` [`Var::rms_norm`]'s for `dy`, added in that pass; `dw` is the latter's.
/// Shapes: `x`, `residual`, `s` and `y` [.., n..], `w` [n..]. Saves `s`, `w` and a number a row.
impl Var {
    /// `self + residual`, of one shape, and its [`Var::rms_norm`]: the values of [`Var::add`] and that, to the bit.
    ///
    /// # Errors
    /// If shapes, dtypes or devices do not fit.
    pub fn add_rms_norm(
        &self,
        residual: &Var,
        normalized_shape: &[usize],
        weight: Option<&Var>,
        eps: f64,
    ) -> Result<(Var, Var)> {
        begins();
        let ([x, r], w) = ([self, residual].map(Var::tensor), weight.map(Var::tensor));
        let made = kernels::add_rms_norm(x, r, normalized_shape, w, eps)?;
        let form = Form { shape: Dims::from_slice(normalized_shape), centred: false, eps };
        let inputs = [self, residual].into_iter().chain(weight);
        record_added("add_rms_norm", form, inputs, weight.is_some(), made)
    }
}

// The gradients of a normalisation as differentiable operations, for all of them: layer, root mean square, group and
// batch.

/// A normalisation `y = xhat w + b`, shaped so that `w` broadcasts to `x`.
pub(super) struct Normalization<'a> {
    pub(super) x: &'a Var,
    pub(super) weight: Option<&'a Var>,
    pub(super) dy: &'a Var,
    /// The dimensions that a mean is taken over.
    pub(super) dims: &'a [usize],
    /// Whether the mean is subtracted.
    pub(super) centred: bool,
    pub(super) eps: f64,
}

impl Normalization<'_> {
    /// The gradients of x, weight and bias; the latter two in the shape `affine`.
    pub(super) fn gradients(&self, affine: &[usize], needs: [bool; 3]) -> Result<[Option<Var>; 3]> {
        let (x, dy) = (self.x, self.dy);
        let mean = |v: &Var| v.mean(self.dims, true);
        let centre = |v: &Var| if self.centred { v.sub(&mean(v)?) } else { Ok(v.clone()) };
        let centred = centre(x)?;
        let inverse = mean(&centred.mul(&centred)?)?.add_scalar(self.eps)?.rsqrt()?;
        let hat = centred.mul(&inverse)?;
        let dx = || {
            let g = self.weight.map_or_else(|| Ok(dy.clone()), |w| dy.mul(w))?;
            let along = hat.mul(&mean(&g.mul(&hat)?)?)?;
            centre(&g)?.sub(&along)?.mul(&inverse)
        };
        Ok([
            needs[0].then(dx).transpose()?,
            needs[1].then(|| dy.mul(&hat)?.sum_to(affine)).transpose()?,
            needs[2].then(|| dy.sum_to(affine)).transpose()?,
        ])
    }
}

/// The shape of a weight a channel that broadcasts to [N, C, ...] of this rank.
pub(super) fn beside(channels: usize, rank: usize) -> Dims {
    (0..rank).map(|d| if d == 1 { channels } else { 1 }).collect()
}

#[cfg(test)]
mod tests {
    use phalanx_tensor::{DType, Device};

    use crate::ops::testing::check_twice;
    use crate::{Leaf, Options, Result, Var, backward, backward_inputs, grad};

    #[test]
    fn first_and_second_derivatives_of_layer_norm_hold() {
        check_twice(&[&[3, 5], &[5], &[5]], |v| v[0].layer_norm(&[5], Some(&v[1]), Some(&v[2]), 1e-2));
        check_twice(&[&[3, 2, 3], &[2, 3]], |v| v[0].layer_norm(&[2, 3], None, Some(&v[1]), 1e-2));
    }

    #[test]
    fn first_and_second_derivatives_of_rms_norm_hold() {
        check_twice(&[&[3, 5], &[5]], |v| v[0].rms_norm(&[5], Some(&v[1]), 1e-2));
        check_twice(&[&[3, 2, 3]], |v| v[0].rms_norm(&[2, 3], None, 1e-2));
    }

    #[test]
    fn first_and_second_derivatives_of_add_layer_norm_hold() {
        for width in [1, 7, 33] {
            let (x, w) = (&[2, width][..], &[width][..]);
            check_twice(&[x, x, w, w], |v| v[0].add_layer_norm(&v[1], w, Some(&v[2]), Some(&v[3]), 1e-2));
        }
        check_twice(&[&[1, 129], &[1, 129]], |v| v[0].add_layer_norm(&v[1], &[129], None, None, 1e-2));
        check_twice(&[&[0, 5], &[0, 5], &[5]], |v| v[0].add_layer_norm(&v[1], &[5], Some(&v[2]), None, 1e-2));
        check_twice(&[&[2, 3, 2], &[2, 2, 3], &[2, 3]], |v| {
            v[0].transpose(1, 2)?.add_layer_norm(&v[1], &[2, 3], None, Some(&v[2]), 1e-2)
        });
    }

    #[test]
    fn either_result_may_be_left_unused_and_either_summand_constant() {
        let (x, w): (&[usize], &[usize]) = (&[3, 5], &[5]);
        let run = |x: &Var, r: &Var, w: &Var| x.add_layer_norm(r, &[5], Some(w), None, 1e-2);
        check_twice(&[x, x, w], |v| Ok(run(&v[0], &v[1], &v[2])?.0));
        check_twice(&[x, x, w], |v| Ok(run(&v[0], &v[1], &v[2])?.1));
        let [c, k] = [x, w].map(|shape| input(DType::F64, 7, shape).unwrap().detach());
        check_twice(&[x], |v| run(&v[0], &c, &k));
        check_twice(&[x, w], |v| run(&c, &v[0], &v[1]));
        check_twice(&[w], |v| run(&c, &c, &v[0]));
        check_twice(&[x], |v| run(&v[0], &v[0], &k));
    }

    fn input(dtype: DType, seed: usize, shape: &[usize]) -> Result<Var> {
        let value = |at: usize| 2.0 * (at as f64 * 0.618 + seed as f64 * 0.37).fract() - 1.0;
        let values: Vec<f64> = (0..shape.iter().product()).map(value).collect();
        Var::leaf(Var::from_slice(&values, shape, Device::CPU)?.to(dtype)?.tensor().clone())
    }

    /// The values and gradients of `f` of four inputs, as bits; the sum is used beside its norm.
    fn bits(dtype: DType, f: impl Fn(&[Var]) -> Result<(Var, Var)>) -> Result<Vec<Vec<u64>>> {
        let of = |seed: usize, shape: &[usize]| input(dtype, seed, shape);
        let v = [of(0, &[9, 33])?, of(1, &[9, 33])?, of(2, &[33])?, of(3, &[33])?];
        let (sum, y) = f(&v)?;
        let z = sum.mul(&y.exp()?)?;
        let inputs: Vec<&Var> = v.iter().collect();
        let grads = grad(&[(z.sum_all()?, None)], &inputs, Options::default())?;
        let all = [sum, y].into_iter().chain(grads.into_iter().flatten());
        let bits = |v: Var| Ok(v.to(DType::F64)?.to_vec::<f64>()?.into_iter().map(f64::to_bits).collect());
        all.map(bits).collect()
    }

    #[test]
    fn a_split_backward_gives_the_same_bits_and_keeps_no_gradient_of_the_sum() {
        let device = Device::Cpu(37);
        let run = |split: bool, with_sum: bool| {
            let of = |seed: usize, shape: &[usize]| {
                input(DType::F64, seed, shape).unwrap().tensor().to_device(device, true).unwrap()
            };
            let [x, r] = [0, 1].map(|seed| Var::leaf(of(seed, &[9, 33])).unwrap());
            let w = Leaf::new(of(2, &[33]), true).unwrap();
            let (sum, y) = x.add_layer_norm(&r, &[33], Some(&w.var()), None, 1e-2).unwrap();
            let mut roots = vec![(y, Some(Var::new(of(3, &[9, 33]))))];
            if with_sum {
                roots.push((sum, Some(Var::new(of(4, &[9, 33])))));
            }
            if !split {
                backward(&roots, Options::default()).unwrap();
            }
            let work = split.then(|| backward_inputs(&roots).unwrap());
            drop(roots);
            let left = device.ledger().unwrap().total().now;
            work.into_iter().for_each(|work| work.run().unwrap());
            let grads = [x.grad(), r.grad(), w.grad()].map(|g| g.unwrap().to_vec::<f64>().unwrap());
            (grads, left)
        };
        let (joint, (halves, left)) = (run(false, true).0, run(true, true));
        assert_eq!(joint, halves);
        assert_eq!(left, run(true, false).1, "bytes between the halves");
    }

    #[test]
    fn values_and_gradients_are_those_of_a_sum_and_its_norm() {
        for dtype in [DType::F32, DType::F64] {
            let fused = bits(dtype, |v| v[0].add_layer_norm(&v[1], &[33], Some(&v[2]), Some(&v[3]), 1e-2));
            let apart = bits(dtype, |v| {
                let sum = v[0].add(&v[1])?;
                let y = sum.layer_norm(&[33], Some(&v[2]), Some(&v[3]), 1e-2)?;
                Ok((sum, y))
            });
            let (fused, apart) = (fused.unwrap(), apart.unwrap());
            assert_eq!(fused.len(), 6);
            assert_eq!(fused, apart, "{dtype}");
        }
    }

    #[test]
    fn first_and_second_derivatives_of_add_rms_norm_hold() {
        for width in [1, 7, 33] {
            let (x, w) = (&[2, width][..], &[width][..]);
            check_twice(&[x, x, w], |v| v[0].add_rms_norm(&v[1], w, Some(&v[2]), 1e-2));
        }
        check_twice(&[&[1, 129], &[1, 129]], |v| v[0].add_rms_norm(&v[1], &[129], None, 1e-2));
        check_twice(&[&[0, 5], &[0, 5], &[5]], |v| v[0].add_rms_norm(&v[1], &[5], Some(&v[2]), 1e-2));
        check_twice(&[&[2, 3, 2], &[2, 2, 3]], |v| {
            v[0].transpose(1, 2)?.add_rms_norm(&v[1], &[2, 3], None, 1e-2)
        });
    }
}
