//! Scaled dot-product attention in tiles, as FlashAttention: scores are computed a tile at a time and never stored whole, forward and backward.
//!
//! ```text
//!                 keys of a head                       forward: a task has some queries of a head. For each block of queries:
//!             | tile | tile | tile |                     for each block of keys:   scores = q k' scale + mask
//!    block of +------+------+------+                       new maximum, exponentials, running sum (online softmax)
//!    queries  | s, p | s, p |  -   |  - : hidden by        out = out * shrink + p v
//!             +------+------+------+  the causal mask    out / sum; stats = (maximum, 1 / sum) of each query
//!             | s, p | s, p | s, p |
//!             +------+------+------+                   backward: a task has a key head and the query heads that share it.
//!                                                        for each block of queries, for each block of keys:
//!                                                          scores again, p = exp(s - maximum) / sum;  dv += p' dy
//!                                                          ds = p (dy v' - delta);  dk += ds' q;  dq += ds k
//!
//!  mod          arguments, shapes, the choice of the device's kernel
//!  forward      the tasks of the forward pass            backward     those of the backward pass
//!  tile         a tile's products and its softmax        operand      heads of strided tensors as padded rows; masks as tiles
//!  first_keys   documents packed in one row              dropout      which probabilities are dropped, by their position
//!  cuda         the same on a GPU
//! ```
//!
//! Source: Dao, Fu, Ermon, Rudra, Ré: FlashAttention (2022); Milakov, Gimelshein: Online normalizer calculation for softmax (2018).

mod backward;
mod cuda;
mod dropout;
mod first_keys;
mod forward;
mod operand;
mod tile;

use phalanx_tensor::{DType, Dims, Error, Result, Tensor, broadcast_shapes};

use crate::dispatch::Kernels;
use crate::real::{for_real, wide_dtype};
use crate::{check, flops};

pub use backward::scaled_dot_product_attention_backward;
pub use dropout::{AttentionDropout, attention_keep};

/// The options of attention.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Attention {
    /// Whether query i sees only the keys up to i.
    pub is_causal: bool,
    /// What scores are multiplied with; 1 / sqrt(depth) if absent.
    pub scale: Option<f64>,
    /// Whether several query heads share a key head: query head h uses key head `h / (query heads / key heads)`.
    pub enable_gqa: bool,
    /// Which probabilities are left out; none if absent.
    pub dropout: Option<AttentionDropout>,
}

/// The sizes of a call.
#[derive(Clone, Copy)]
struct Problem {
    /// Query heads in all batch items, and how many share a key head.
    heads: usize,
    group: usize,
    queries: usize,
    keys: usize,
    depth: usize,
    value_depth: usize,
    causal: bool,
    scale: f64,
}

/// `softmax(q kᵀ scale + mask) v` for queries [.., T, D], keys [.., S, D] and values [.., S, E]. A bool mask marks what
/// may be seen, a floating-point one is added to the scores; it broadcasts to [.., T, S]. Queries that see nothing give
/// 0. Also gives what the backward pass needs of each query: the largest score and the inverse of the sum of the
/// exponentials below it. Where the queries' heads lie side by side in memory, [.., T, H, D], so do the result's.
///
/// An i64 mask [.., T, 1] has the first key that each query sees: query t sees keys `first[t] ..= t`. Where these are the
/// numbers at which documents begin, several documents in a row do not see each other. It wants `is_causal`, numbers
/// that do not decrease, and `0 <= first[t] <= t`; on a GPU wrong numbers are an error when the device is next waited for.
/// Tiles that it hides are not computed. On a CPU a document has the bits that it has alone, without dropout. On a GPU it
/// has them if all documents begin at multiples of 128; else they are equal to rounding, for tiles do not begin where
/// documents do.
///
/// # Errors
/// If shapes, dtypes or devices do not fit.
pub fn scaled_dot_product_attention(
    query: &Tensor,
    key: &Tensor,
    value: &Tensor,
    mask: Option<&Tensor>,
    config: &Attention,
) -> Result<(Tensor, Tensor)> {
    const OP: &str = "scaled_dot_product_attention";
    let problem = Problem::new(OP, [query, key, value], mask, config)?;
    if let Some(groups) = JoinedHeads::new(&problem, query, mask, config) {
        let mask = groups.join_mask(&problem, query, mask)?;
        let config = Attention { enable_gqa: false, scale: Some(problem.scale), ..*config };
        let made = scaled_dot_product_attention(&groups.join(query)?, key, value, mask.as_ref(), &config)?;
        return Ok((groups.split(&made.0)?, groups.split(&made.1)?));
    }
    problem.count(problem.depth + problem.value_depth);
    let mut shape = Dims::from_slice(query.shape());
    shape[query.rank() - 1] = problem.value_depth;
    let mut out = operand::empty_as(query, &shape)?;
    shape[query.rank() - 1] = 2;
    let mut stats = Tensor::empty_for(OP, &shape, wide_dtype(query.dtype()), query.device())?;
    if query.device().is_meta() {
        return Ok((out, stats));
    }
    let keep = config.dropout.map(|d| dropout::Keep::new(OP, d, query)).transpose()?;
    let (inputs, outputs) = ([query, key, value], [&mut out, &mut stats]);
    FORWARD.run(query.device(), |run| run(OP, &problem, inputs, mask, keep.as_ref(), outputs))?;
    Ok((out, stats))
}

const FORWARD: Kernels<Forward> = Kernels { cpu: forward_on_cpu, cuda: cuda::forward };

type Forward = fn(
    &'static str,
    &Problem,
    [&Tensor; 3],
    Option<&Tensor>,
    Option<&dropout::Keep>,
    [&mut Tensor; 2],
) -> Result<()>;

fn forward_on_cpu(
    op: &'static str,
    problem: &Problem,
    inputs: [&Tensor; 3],
    mask: Option<&Tensor>,
    keep: Option<&dropout::Keep>,
    outputs: [&mut Tensor; 2],
) -> Result<()> {
    for_real!(op, inputs[0].dtype(), T => forward::run::<T>(op, *problem, inputs, mask, keep, outputs))
}

/// Whether [`scaled_dot_product_attention`] takes these: everywhere but on a GPU, whose tiles hold heads up to 256 deep.
///
/// # Errors
/// If shapes, dtypes or devices do not fit.
pub fn attention_in_tiles(
    query: &Tensor,
    key: &Tensor,
    value: &Tensor,
    mask: Option<&Tensor>,
    config: &Attention,
) -> Result<bool> {
    let problem = Problem::new("scaled_dot_product_attention", [query, key, value], mask, config)?;
    Ok(!query.device().is_cuda() || problem.deepest() <= cuda::DEPTH_MAX)
}

/// The number of scores that the causal mask hides.
fn unseen(queries: usize, keys: usize) -> usize {
    // Query i does not see the keys from i + 1 on.
    let rows = queries.min(keys.saturating_sub(1));
    rows * keys.saturating_sub(1) - rows * rows.saturating_sub(1) / 2
}

impl Problem {
    /// Counts `each` multiplications for each score that the causal mask does not hide.
    fn count(&self, each: usize) {
        flops::count_multiply_adds([self.heads, self.scores_seen(), each]);
    }

    /// Scores of a head that the causal mask does not hide.
    fn scores_seen(&self) -> usize {
        let (queries, keys) = (self.queries, self.keys);
        queries * keys - if self.causal { unseen(queries, keys) } else { 0 }
    }

    fn deepest(&self) -> usize {
        self.depth.max(self.value_depth)
    }

    fn new(
        op: &'static str,
        [query, key, value]: [&Tensor; 3],
        mask: Option<&Tensor>,
        config: &Attention,
    ) -> Result<Problem> {
        check::float(op, query)?;
        check::same(op, &[query, key, value])?;
        let shapes =
            || format!("query {:?}, key {:?}, value {:?}", query.shape(), key.shape(), value.shape());
        let rank = query.rank();
        let wrong = |wanted: &str| Err(Error::shape(op, shapes(), wanted));
        if rank < 2 || key.rank() != rank || value.rank() != rank {
            return wrong("[.., T, D], [.., S, D] and [.., S, E] of one rank");
        }
        let (q, k, v) = (query.shape(), key.shape(), value.shape());
        if q[rank - 1] != k[rank - 1] || k[..rank - 1] != v[..rank - 1] {
            return wrong("one depth of query and key, one length of key and value");
        }
        let group = if config.enable_gqa && rank > 2 {
            let (heads, shared) = (q[rank - 3], k[rank - 3]);
            if shared == 0 || heads % shared != 0 || q[..rank - 3] != k[..rank - 3] {
                return wrong("query heads that are a multiple of the key heads");
            }
            (heads / shared).max(1)
        } else if q[..rank - 2] != k[..rank - 2] {
            return wrong("equal leading dimensions (`enable_gqa` lets query heads share key heads)");
        } else {
            1
        };
        let problem = Problem {
            heads: q[..rank - 2].iter().product(),
            group,
            queries: q[rank - 2],
            keys: k[rank - 2],
            depth: q[rank - 1],
            value_depth: v[rank - 1],
            causal: config.is_causal,
            scale: config.scale.unwrap_or_else(|| 1.0 / (q[rank - 1] as f64).sqrt()),
        };
        mask.map_or(Ok(()), |mask| problem.check_mask(op, query, mask))?;
        Ok(problem)
    }

    fn check_mask(&self, op: &'static str, query: &Tensor, mask: &Tensor) -> Result<()> {
        check::same_device(op, &[query, mask])?;
        if mask.dtype() == DType::I64 {
            return self.check_first_keys(op, query, mask);
        }
        if mask.dtype() != DType::Bool && mask.dtype() != query.dtype() {
            return Err(Error::dtype(op, mask.dtype(), format!("a mask of bool, i64 or {}", query.dtype())));
        }
        let scores = self.scores_shape(query);
        if broadcast_shapes(op, mask.shape(), &scores)? != scores {
            let wanted = format!("one that broadcasts to {scores:?}");
            return Err(Error::shape(op, format!("a mask of shape {:?}", mask.shape()), wanted));
        }
        Ok(())
    }

    /// The scores' shape [.., T, S].
    fn scores_shape(&self, query: &Tensor) -> Dims {
        let mut shape = Dims::from_slice(query.shape());
        shape[query.rank() - 1] = self.keys;
        shape
    }

    /// How many keys the queries before `end` may see.
    fn keys_before(&self, end: usize) -> usize {
        if self.causal { self.keys.min(end) } else { self.keys }
    }
}

/// How query heads that share a key head become the queries of one head, where each has a single query (decoding).
#[derive(Clone, Copy)]
struct JoinedHeads {
    /// Heads, and how many share a key head.
    heads: usize,
    group: usize,
}

impl JoinedHeads {
    /// `None` if joining would change bits, because a query's number matters (causal mask, dropout, first keys), and on a GPU, whose tiles join heads
    /// themselves.
    fn new(
        problem: &Problem,
        query: &Tensor,
        mask: Option<&Tensor>,
        config: &Attention,
    ) -> Option<JoinedHeads> {
        let numbered = config.is_causal
            || config.dropout.is_some()
            || mask.is_some_and(|mask| mask.dtype() == DType::I64);
        let joins = problem.queries == 1
            && problem.keys > 1
            && problem.group > 1
            && !numbered
            && !query.device().is_cuda();
        joins.then(|| JoinedHeads { heads: query.shape()[query.rank() - 3], group: problem.group })
    }

    /// [.., H, 1, D] as [.., H / group, group, D].
    fn join(self, tensor: &Tensor) -> Result<Tensor> {
        self.seen_as(tensor, [self.heads / self.group, self.group])
    }

    /// The inverse of [`JoinedHeads::join`].
    fn split(self, tensor: &Tensor) -> Result<Tensor> {
        self.seen_as(tensor, [self.heads, 1])
    }

    fn seen_as(self, tensor: &Tensor, [heads, queries]: [usize; 2]) -> Result<Tensor> {
        let mut shape: Vec<isize> = tensor.shape().iter().map(|&size| size as isize).collect();
        let lead = shape.len() - 3;
        (shape[lead], shape[lead + 1]) = (heads as isize, queries as isize);
        tensor.reshape(&shape)
    }

    /// The mask for joined queries.
    fn join_mask(self, problem: &Problem, query: &Tensor, mask: Option<&Tensor>) -> Result<Option<Tensor>> {
        mask.map(|mask| self.join(&mask.broadcast_to(&problem.scores_shape(query))?)).transpose()
    }
}

#[cfg(test)]
mod tests;
