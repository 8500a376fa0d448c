//! Attention, and rotary position embedding.

use phalanx_kernels as kernels;
use phalanx_tensor::{DType, Dims, Tensor};
use smallvec::SmallVec;

use crate::{Backward, Cx, Grads, Result, SaveContext, SavedVariable, Var, begins, grads1, record};

pub use phalanx_kernels::{Attention, AttentionDropout};
pub use phalanx_kernels::{Rope, RopeFrequencies};

// `y = softmax(q kᵀ scale + mask) v`.
//
// Derivative, with `p` the softmax and `dp = dy vᵀ`: `dv = pᵀ dy`, `ds = p (dp - sum(p dp))`, `dq = ds k scale`,
// `dk = dsᵀ q scale`, and `ds` summed over what was broadcast for a floating-point mask.
// Shapes: q [.., T, D], k [.., S, D], v [.., S, E], mask broadcasts to [.., T, S], y [.., T, E].
// Saves q, k, v, the mask, y and two numbers a query; scores and probabilities are computed again tile by tile and never
// stored whole, except the scores' gradient where a mask's gradient is asked for. `sum(p dp)` is `sum(y dy)`. Dropout's
// draws are functions of their place and drawn again. Heads too deep for a GPU's tiles, and gradients that are
// differentiated again, are made of other operations and hold whole score matrices.
// Source: Dao, Fu, Ermon, Rudra, Ré: FlashAttention (2022).

const OP: &str = "scaled_dot_product_attention";

impl Var {
    /// Attention of these queries. A bool mask marks what may be seen; a floating-point one is added to the scores. An
    /// i64 mask `[.., T, 1]` has the first key that each query sees under a causal mask: query t sees keys `first[t]
    /// ..= t`. It keeps documents in one row apart without a matrix, see [`kernels::scaled_dot_product_attention`].
    ///
    /// # Errors
    /// If shapes, dtypes or devices do not fit.
    pub fn scaled_dot_product_attention(
        &self,
        key: &Var,
        value: &Var,
        mask: Option<&Var>,
        config: &Attention,
    ) -> Result<Var> {
        begins();
        let [q, k, v] = [self, key, value].map(Var::tensor);
        if !kernels::attention_in_tiles(q, k, v, mask.map(Var::tensor), config)? {
            return composed([self, key, value], mask, config);
        }
        let (y, stats) = kernels::scaled_dot_product_attention(q, k, v, mask.map(Var::tensor), config)?;
        let inputs: SmallVec<[&Var; 4]> = [self, key, value].into_iter().chain(mask).collect();
        record(OP, &inputs, y, |s: &SaveContext<'_>| {
            let mask = mask.is_some().then(|| s.input(3)).transpose()?;
            let inputs = [s.input(0)?, s.input(1)?, s.input(2)?];
            Ok(Recorded { inputs, mask, y: s.output(0)?, stats, config: *config })
        })
    }
}

struct Recorded {
    inputs: [SavedVariable; 3],
    mask: Option<SavedVariable>,
    y: SavedVariable,
    stats: Tensor,
    config: Attention,
}

impl Backward for Recorded {
    fn backward(&self, cx: &Cx<'_>) -> Result<Grads> {
        let [q, k, v] = &self.inputs;
        let inputs = [cx.get(q)?, cx.get(k)?, cx.get(v)?];
        let mask = self.mask.as_ref().map(|m| cx.get(m)).transpose()?;
        let needs = [0, 1, 2, 3].map(|i| (i < 3 || mask.is_some()) && cx.needs(i));
        let made = if cx.create_graph() {
            self.composed_backward(inputs, mask.as_ref(), cx.dy(), needs)?
        } else {
            self.fused(inputs, mask.as_ref(), [&cx.get(&self.y)?, cx.dy()], needs)?
        };
        Ok(made.into_iter().take(3 + usize::from(mask.is_some())).collect())
    }
}

impl Recorded {
    fn fused(
        &self,
        [q, k, v]: [Var; 3],
        mask: Option<&Var>,
        [y, dy]: [&Var; 2],
        needs: [bool; 4],
    ) -> Result<[Option<Var>; 4]> {
        let made = kernels::scaled_dot_product_attention_backward(
            [q.tensor(), k.tensor(), v.tensor()],
            mask.map(Var::tensor),
            [y.tensor(), &self.stats],
            dy.tensor(),
            &self.config,
            needs,
        )?;
        let [dq, dk, dv, ds] = made.map(|t| t.map(Var::new));
        let to_mask = |(ds, mask): (Var, &Var)| ds.sum_to(mask.shape())?.to(mask.dtype());
        Ok([dq, dk, dv, ds.zip(mask).map(to_mask).transpose()?])
    }

    /// The gradients as differentiable operations on whole score matrices.
    fn composed_backward(
        &self,
        [q, k, v]: [Var; 3],
        mask: Option<&Var>,
        dy: &Var,
        [dq, dk, dv, dm]: [bool; 4],
    ) -> Result<[Option<Var>; 4]> {
        let (wide_k, wide_v) = (repeat_heads(&k, &q)?, repeat_heads(&v, &q)?);
        let seen = mask.map(|mask| matrix(mask, &k)).transpose()?;
        let mask = seen.as_ref();
        let p = probabilities(&q, &wide_k, mask, &self.config)?;
        let keep = keep(&q, &k, &self.config)?;
        let product = p.mul(&kept(dy.matmul(&turned(&wide_v)?)?, keep.as_ref())?)?;
        let ds = product.sub(&p.mul(&product.sum(&[-1], true)?)?)?;
        let scaled = ds.mul_scalar(scale(&q, &self.config))?;
        Ok([
            dq.then(|| scaled.matmul(&wide_k)).transpose()?,
            dk.then(|| sum_heads(&turned(&scaled)?.matmul(&q)?, k.shape())).transpose()?,
            dv.then(|| sum_heads(&turned(&kept(p, keep.as_ref())?)?.matmul(dy)?, v.shape())).transpose()?,
            mask.filter(|_| dm).map(|mask| ds.sum_to(mask.shape())).transpose()?,
        ])
    }
}

/// The whole of it as differentiable operations, halves in f32 until the result.
fn composed([q, k, v]: [&Var; 3], mask: Option<&Var>, config: &Attention) -> Result<Var> {
    let dtype = q.dtype();
    let mask = mask.map(|mask| matrix(mask, k)).transpose()?;
    let wide = |x: &Var| if x.dtype().size() == 2 { x.to(DType::F32) } else { Ok(x.clone()) };
    let (q, k, v, mask) = (&wide(q)?, &wide(k)?, &wide(v)?, mask.as_ref().map(wide).transpose()?);
    let p = probabilities(q, &repeat_heads(k, q)?, mask.as_ref(), config)?;
    kept(p, keep(q, k, config)?.as_ref())?.matmul(&repeat_heads(v, q)?)?.to(dtype)
}

/// `softmax(q kᵀ scale + mask)`, 0 for queries that see nothing.
fn probabilities(q: &Var, k: &Var, mask: Option<&Var>, config: &Attention) -> Result<Var> {
    let scores = hide(q.matmul(&turned(k)?)?.mul_scalar(scale(q, config))?, mask, config.is_causal)?;
    if mask.is_none() || scores.shape()[scores.rank() - 1] == 0 {
        return scores.softmax(-1);
    }
    let blind = scores.detach().amax(&[-1], true)?.eq_scalar(f64::NEG_INFINITY)?;
    scores.masked_fill(&blind, 0.0)?.softmax(-1)?.masked_fill(&blind, 0.0)
}

/// A mask over the scores: first visible keys as what may be seen of these keys, others as they are.
fn matrix(mask: &Var, k: &Var) -> Result<Var> {
    if mask.dtype() != DType::I64 {
        return Ok(mask.clone());
    }
    let keys = k.shape()[k.rank() - 2] as i64;
    mask.le(&Var::arange(0, keys, 1, DType::I64, k.device())?)
}

/// The scores with the mask, and with negative infinity where a key lies behind the query.
fn hide(mut scores: Var, mask: Option<&Var>, is_causal: bool) -> Result<Var> {
    let hidden = Var::full(f64::NEG_INFINITY, &scores)?;
    if is_causal {
        scores = scores.add(&hidden.triu(1)?)?;
    }
    match mask {
        None => Ok(scores),
        Some(mask) if mask.dtype() == DType::Bool => scores.where_(mask, &hidden),
        Some(mask) => scores.add(mask),
    }
}

fn scale(q: &Var, config: &Attention) -> f64 {
    config.scale.unwrap_or_else(|| 1.0 / (q.shape()[q.rank() - 1] as f64).sqrt())
}

fn turned(x: &Var) -> Result<Var> {
    x.transpose(-2, -1)
}

/// What dropout multiplies the probabilities with.
fn keep(q: &Var, k: &Var, config: &Attention) -> Result<Option<Var>> {
    let draw = |d| kernels::attention_keep(q.tensor(), k.shape()[k.rank() - 2], d).map(Var::new);
    Ok(config.dropout.map(draw).transpose()?)
}

fn kept(x: Var, keep: Option<&Var>) -> Result<Var> {
    keep.map_or_else(|| Ok(x.clone()), |keep| x.mul(keep))
}

/// Keys or values with a head for every query head.
fn repeat_heads(x: &Var, q: &Var) -> Result<Var> {
    let rank = x.rank();
    if rank < 3 || x.shape()[rank - 3] == q.shape()[rank - 3] {
        return Ok(x.clone());
    }
    let heads = q.shape()[rank - 3];
    let mut shape = Dims::from_slice(x.shape());
    let group = heads / shape[rank - 3];
    shape.insert(rank - 2, group);
    let repeated = x.unsqueeze(rank - 2)?.broadcast_to(&shape)?;
    shape.remove(rank - 2);
    shape[rank - 3] = heads;
    repeated.reshape_to(&shape)
}

/// The reverse of [`repeat_heads`]: the gradients of the heads that shared one, added.
fn sum_heads(dx: &Var, shape: &[usize]) -> Result<Var> {
    if dx.shape() == shape {
        return Ok(dx.clone());
    }
    let rank = shape.len();
    let mut split = Dims::from_slice(shape);
    split.insert(rank - 2, dx.shape()[rank - 3] / shape[rank - 3]);
    dx.reshape_to(&split)?.sum(&[rank - 2], false)
}

// Rotary position embedding: each row of `x` [.., T, D] turned by its position. With `a, b` the row's halves and
// `angle[i] = position * base^(-2i/D)`, `y = (a cos - b sin, b cos + a sin)`.
//
// Derivative: the rotation back. Only the positions are saved. Angles are computed in f64.
// Source: Su et al.: RoFormer (2021), in the half-split form of GPT-NeoX.

impl Var {
    /// The rotation by positions `offset, offset + 1, ..` or by `position_ids`, i64 `[T]` or `[B, T]`.
    ///
    /// # Errors
    /// If D is odd, or shapes, dtypes or devices do not fit.
    pub fn rope(&self, position_ids: Option<&Var>, config: &Rope) -> Result<Var> {
        self.turn(&Turn {
            ids: position_ids.map(Var::tensor).cloned(),
            config: *config,
            by: None,
            forth: true,
        })
    }

    /// [`Var::rope`] by given frequencies, and times a factor. Of `config` the offset counts.
    ///
    /// # Errors
    /// As [`Var::rope`], or if the frequencies do not fit.
    pub fn rope_by(
        &self,
        position_ids: Option<&Var>,
        config: &Rope,
        frequencies: &RopeFrequencies,
    ) -> Result<Var> {
        let (ids, by) = (position_ids.map(Var::tensor).cloned(), Some(frequencies.clone()));
        self.turn(&Turn { ids, config: *config, by, forth: true })
    }

    fn turn(&self, turn: &Turn) -> Result<Var> {
        begins();
        let (x, ids, config) = (self.tensor(), turn.ids.as_ref(), &turn.config);
        let y = match (&turn.by, turn.forth) {
            (None, true) => kernels::rope(x, ids, config)?,
            (None, false) => kernels::rope_backward(x, ids, config)?,
            (Some(by), true) => kernels::rope_by(x, ids, config, by)?,
            (Some(by), false) => kernels::rope_by_backward(x, ids, config, by)?,
        };
        record("rope", &[self], y, |_: &SaveContext<'_>| Ok(turn.clone()))
    }
}

/// A rotation, forth or back.
#[derive(Clone)]
struct Turn {
    ids: Option<Tensor>,
    config: Rope,
    by: Option<RopeFrequencies>,
    forth: bool,
}

impl Backward for Turn {
    fn backward(&self, cx: &Cx<'_>) -> Result<Grads> {
        grads1(cx.dy().turn(&Turn { forth: !self.forth, ..self.clone() })?)
    }
}

#[cfg(test)]
mod tests {
    use phalanx_tensor::{DType, Device};

    use super::{Attention, AttentionDropout, composed};
    use crate::Var;
    use crate::ops::testing::check_twice;

    #[test]
    fn first_and_second_derivatives_of_attention_hold() {
        let causal = Attention { is_causal: true, ..Attention::default() };
        let shapes: [&[usize]; 3] = [&[2, 3, 4], &[2, 5, 4], &[2, 5, 3]];
        check_twice(&shapes, |v| v[0].scaled_dot_product_attention(&v[1], &v[2], None, &causal));
        let grouped = Attention { enable_gqa: true, scale: Some(0.7), ..Attention::default() };
        let shapes: [&[usize]; 4] = [&[1, 4, 3, 2], &[1, 2, 3, 2], &[1, 2, 3, 2], &[4, 1, 3]];
        check_twice(&shapes, |v| v[0].scaled_dot_product_attention(&v[1], &v[2], Some(&v[3]), &grouped));
        let seen = [true, false, true, false, true, true];
        let mask = Var::from_slice(&seen, &[2, 3], Device::CPU).unwrap();
        check_twice(&[&[2, 2], &[3, 2], &[3, 2]], |v| {
            v[0].scaled_dot_product_attention(&v[1], &v[2], Some(&mask), &Attention::default())
        });
        let first = Var::from_slice(&[0i64, 0, 2, 2, 0, 1, 1, 3], &[2, 1, 4, 1], Device::CPU).unwrap();
        let shared = Attention { enable_gqa: true, ..causal };
        check_twice(&[&[2, 2, 4, 3], &[2, 1, 4, 3], &[2, 1, 4, 2]], |v| {
            v[0].scaled_dot_product_attention(&v[1], &v[2], Some(&first), &shared)
        });
        let dropping = Attention { dropout: AttentionDropout::new(0.3, 7), ..causal };
        check_twice(&[&[2, 3, 2], &[2, 3, 2], &[2, 3, 2]], |v| {
            v[0].scaled_dot_product_attention(&v[1], &v[2], None, &dropping)
        });
    }
    /// Of three queries the second sees nothing.
    fn blinding_mask() -> Var {
        let seen = [true, false, true, true, false, false, false, false, false, false, true, true];
        Var::from_slice(&seen, &[3, 4], Device::CPU).unwrap()
    }

    #[test]
    fn queries_that_see_nothing_have_no_gradient_of_any_order() {
        let (mask, shapes): (_, [&[usize]; 3]) = (blinding_mask(), [&[3, 2], &[4, 2], &[4, 2]]);
        check_twice(&shapes, |v| {
            v[0].scaled_dot_product_attention(&v[1], &v[2], Some(&mask), &Attention::default())
        });
        check_twice(&shapes, |v| composed([&v[0], &v[1], &v[2]], Some(&mask), &Attention::default()));
    }

    #[test]
    fn composed_of_other_operations_it_is_the_same() {
        let waves = |shape: &[usize], step: f64| {
            let values: Vec<f32> =
                (0..shape.iter().product()).map(|i| (i as f64 * step).sin() as f32).collect();
            Var::from_slice(&values, shape, Device::CPU).unwrap()
        };
        let first = Var::from_slice(&[0i64, 0, 2, 0, 1, 1], &[2, 1, 3, 1], Device::CPU).unwrap();
        let masks = [None, Some(blinding_mask()), Some(waves(&[4, 1, 4], 0.9)), Some(first)];
        for (dtype, tolerance) in [(DType::F32, 1e-6), (DType::BF16, 0.008), (DType::F64, 1e-14)] {
            let [q, k, v] = [(4, 3, 0.7), (2, 4, 0.4), (2, 4, 0.3)]
                .map(|(heads, length, step)| waves(&[2, heads, length, 5], step).to(dtype).unwrap());
            for mask in &masks {
                let fits = |m: &Var| if m.dtype() == DType::F32 { m.to(dtype) } else { Ok(m.clone()) };
                let mask = mask.as_ref().map(fits).transpose().unwrap();
                let marks = |m: &Var| m.dtype() == DType::I64;
                let causal =
                    [(false, 0.0), (true, 0.4)].into_iter().skip(mask.iter().filter(|m| marks(m)).count());
                for (is_causal, p) in causal {
                    let dropout = AttentionDropout::new(p, 3);
                    let config = Attention { is_causal, scale: Some(1.5), enable_gqa: true, dropout };
                    let tiles = q.scaled_dot_product_attention(&k, &v, mask.as_ref(), &config).unwrap();
                    let other = composed([&q, &k, &v], mask.as_ref(), &config).unwrap();
                    assert_eq!(other.dtype(), dtype);
                    let apart = tiles.sub(&other).unwrap().abs().unwrap().to(DType::F64).unwrap();
                    let apart = apart.max_all().unwrap().item::<f64>().unwrap();
                    assert!(apart <= tolerance, "{dtype} {is_causal}: {apart}");
                }
            }
        }
    }

    #[test]
    fn first_and_second_derivatives_of_rope_hold() {
        let config = super::Rope { base: 100.0, offset: 3 };
        check_twice(&[&[2, 3, 6]], |v| v[0].rope(None, &config));
        let values = phalanx_tensor::Tensor::from_slice(&[1.0, 0.3, 0.01], &[3], Device::CPU).unwrap();
        let by = super::RopeFrequencies { values, factor: 1.5 };
        check_twice(&[&[2, 3, 6]], |v| v[0].rope_by(None, &config, &by));
    }
}
