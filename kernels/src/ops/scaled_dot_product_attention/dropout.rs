//! Dropout of attention's probabilities. Each draw is a function of the probability's position in the whole model and batch, so the forward and the
//! backward pass draw the same and store nothing. The draws are those of [`dropout`](crate::random::dropout) on the
//! whole's probabilities.

use phalanx_tensor::{Context, Error, PhiloxStream, Result, Tensor};

use super::cuda;
use super::tile::Tile;
use crate::dispatch::Kernels;
use crate::real::{Real, for_real};
use crate::simd::Float;

/// Which probabilities are left out: each with probability `p`, the others scaled by `1 / (1 - p)`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AttentionDropout {
    /// From 0 to 1.
    pub p: f64,
    /// The draws.
    pub stream: PhiloxStream,
    /// The batch's first row in the global batch.
    pub batch_offset: u64,
    /// The heads of the whole model and the first of these among them; absent if these are all.
    pub heads: Option<[u64; 2]>,
}

impl AttentionDropout {
    /// The bit of [`Context::flags`] that turns dropout off, as in evaluation.
    pub const OFF: u32 = 1;

    /// Draws of `site` under the current context: none for `p` = 0 and in evaluation.
    pub fn new(p: f64, site: u64) -> Option<AttentionDropout> {
        let context = Context::current();
        let (stream, batch_offset) = (context.rng.site(site), context.batch_offset);
        (context.flags & AttentionDropout::OFF == 0 && p != 0.0).then_some(AttentionDropout {
            p,
            stream,
            batch_offset,
            heads: None,
        })
    }
}

/// What probabilities are multiplied with, 0 or `1 / (1 - p)`, as a tensor [.., T, S] for queries [.., T, D]: for gradients
/// that are differentiated again.
///
/// # Errors
/// If `p` is no probability.
pub fn attention_keep(query: &Tensor, keys: usize, dropout: AttentionDropout) -> Result<Tensor> {
    const OP: &str = "attention_keep";
    let mut shape = phalanx_tensor::Dims::from_slice(query.shape());
    shape[query.rank() - 1] = keys;
    let mut out = Tensor::empty_for(OP, &shape, query.dtype(), query.device())?;
    let keep = Keep::new(OP, dropout, query)?;
    KEEP.run(out.device(), |run| run(OP, query, keys, &keep, &mut out))?;
    Ok(out)
}

const KEEP: Kernels<KeepFn> = Kernels { cpu: keep_on_cpu, cuda: cuda::keep };

type KeepFn = fn(&'static str, &Tensor, usize, &Keep, &mut Tensor) -> Result<()>;

fn keep_on_cpu(op: &'static str, query: &Tensor, keys: usize, keep: &Keep, out: &mut Tensor) -> Result<()> {
    let queries = query.size(-2)?;
    for_real!(op, query.dtype(), T => {
        let mut out = out.write::<T>(op)?;
        for (row, to) in out.chunks_exact_mut(keys.max(1)).enumerate() {
            let (head, query) = (row / queries, row % queries);
            let [none, scale] = [0.0, keep.scale].map(|x| T::narrow(<T as Real>::Wide::from_f64(x)));
            keep.draw(head, query, [queries, keys], [0, keys], |k, kept| to[k] = if kept { scale } else { none });
        }
        Ok(())
    })
}

/// The dropout of a call, with its threshold and the numbers of its heads.
pub(super) struct Keep {
    pub(super) dropout: AttentionDropout,
    /// Heads of these queries, and of the whole model, and the first one's number.
    heads: usize,
    pub(super) all: u64,
    pub(super) first: u64,
    pub(super) threshold: u64,
    pub(super) scale: f64,
}

impl Keep {
    pub(super) fn new(op: &'static str, dropout: AttentionDropout, query: &Tensor) -> Result<Keep> {
        let p = dropout.p;
        if !(0.0..=1.0).contains(&p) {
            return Err(Error::range(op, format!("the dropout probability {p}"), "one from 0 to 1"));
        }
        let heads = if query.rank() > 2 { query.size(-3)? } else { 1 };
        let [all, first] = dropout.heads.unwrap_or([heads as u64, 0]);
        // A probability stays if its word is not below p 2^32.
        let threshold = (p * 2f64.powi(32)).round() as u64;
        let scale = if p < 1.0 { 1.0 / (1.0 - p) } else { 0.0 };
        Ok(Keep { dropout, heads, all, first, threshold, scale })
    }

    /// Sets `to` to the factors of a tile's probabilities, [keys, width]; `all` is a head's number of queries and keys.
    pub(super) fn tile<'b, T: Float>(&self, tile: &Tile, all: [usize; 2], to: &'b mut [T]) -> &'b [T] {
        let (scale, to) = (T::from_f64(self.scale), &mut to[..tile.keys * tile.width]);
        to.fill(T::ZERO);
        for q in 0..tile.queries {
            self.draw(tile.head, tile.query + q, all, [tile.key, tile.keys], |k, kept| {
                if kept {
                    to[k * tile.width + q] = scale;
                }
            });
        }
        to
    }

    /// Calls `put` with the number of each of `keys` keys from `first_key` on, counted from there, and whether its
    /// probability stays. The draws are those of `dropout` on the whole's probabilities [B, H, T, S].
    fn draw(
        &self,
        head: usize,
        query: usize,
        [queries, all_keys]: [usize; 2],
        [first_key, keys]: [usize; 2],
        mut put: impl FnMut(usize, bool),
    ) {
        let batch = (head / self.heads) as u64 + self.dropout.batch_offset;
        let head = batch * self.all + self.first + (head % self.heads) as u64;
        let row = (head * queries as u64 + query as u64) * all_keys as u64;
        let first = row + first_key as u64;
        let mut words = self.dropout.stream.block(first / 4, 0);
        for k in 0..keys {
            let place = first + k as u64;
            if place.is_multiple_of(4) {
                words = self.dropout.stream.block(place / 4, 0);
            }
            put(k, u64::from(words[(place % 4) as usize]) >= self.threshold);
        }
    }
}
