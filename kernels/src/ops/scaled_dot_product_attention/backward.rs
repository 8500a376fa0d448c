//! The backward pass: scores are computed again tile by tile, from the maximum and the sum that the forward pass kept of each query.
//!
//! A task on a CPU is a key head with all query heads that share it ([`KeyHeadPart`]): blocks of queries ascending, blocks of keys inside. So each
//! gradient's additions have one order.

use std::ops::Range;

use phalanx_tensor::{Result, Tensor};

use super::dropout::Keep;
use super::forward::PIECES;
use super::operand::{
    HeadLayout, Heads, Mask, Rows, empty_as, empty_joined, padded_queries, store, with_slices,
};
use super::tile::{self, Differentiate, KEYS_BACKWARD, QUERIES, ScoreChanges, Stats};
use super::{Attention, JoinedHeads, Problem, cuda};
use crate::block_reader::elements;
use crate::check;
use crate::dispatch::Kernels;
use crate::gemm::SubMatMut;
use crate::real::{Real, for_real, wide_dtype};
use crate::simd::{Float, dispatch};

/// The gradients of [`scaled_dot_product_attention`](super::scaled_dot_product_attention) with respect to query, key,
/// value and the scores (before a mask is broadcast, in the type that is computed in; the only one of T x S elements):
/// those that `needs` names. `forward` are the forward pass's query, key, value, mask, output and numbers. Each of the first
/// three lies in memory as its tensor does; those of all heads of one tensor are all heads of one.
///
/// # Errors
/// If shapes, dtypes or devices do not fit.
pub fn scaled_dot_product_attention_backward(
    [query, key, value]: [&Tensor; 3],
    mask: Option<&Tensor>,
    [out, stats]: [&Tensor; 2],
    dy: &Tensor,
    config: &Attention,
    needs: [bool; 4],
) -> Result<[Option<Tensor>; 4]> {
    const OP: &str = "scaled_dot_product_attention_backward";
    let problem = Problem::new(OP, [query, key, value], mask, config)?;
    if let Some(groups) = JoinedHeads::new(&problem, query, mask, config) {
        let mask = groups.join_mask(&problem, query, mask)?;
        let [query, out, stats, dy] = [query, out, stats, dy].map(|t| groups.join(t));
        let (config, inputs) =
            (Attention { enable_gqa: false, scale: Some(problem.scale), ..*config }, [&query?, key, value]);
        let [dq, dk, dv, slopes] = scaled_dot_product_attention_backward(
            inputs,
            mask.as_ref(),
            [&out?, &stats?],
            &dy?,
            &config,
            needs,
        )?;
        let part = |made: Option<Tensor>| made.map(|made| groups.split(&made)).transpose();
        return Ok([part(dq)?, dk, dv, part(slopes)?]);
    }
    // The scores and the gradient of the probabilities, then what is asked for.
    let [depth, value_depth] = [problem.depth, problem.value_depth];
    let asked = [(needs[0], depth), (needs[1], depth), (needs[2], value_depth)];
    problem
        .count(depth + value_depth + asked.iter().filter(|(is, _)| *is).map(|(_, each)| each).sum::<usize>());
    check::same(OP, &[query, out, dy])?;
    check::shape(OP, "a gradient", dy, out.shape())?;
    let inputs = [query, key, value];
    let mut whole = if needs[..3] == [true; 3] { empty_joined(inputs)? } else { None };
    let mut made = match &whole {
        Some(whole) => gradients_in(whole, inputs)?,
        None => {
            let like = |i: usize| needs[i].then(|| empty_as(inputs[i], inputs[i].shape())).transpose();
            [like(0)?, like(1)?, like(2)?, None]
        }
    };
    if needs[3] {
        let shape = problem.scores_shape(query);
        made[3] = Some(Tensor::empty_for(OP, &shape, wide_dtype(query.dtype()), query.device())?);
    }
    if query.device().is_meta() {
        return Ok(made);
    }
    let keep = config.dropout.map(|d| Keep::new(OP, d, query)).transpose()?;
    let inputs = [query, key, value, out, dy];
    let outputs = (whole.as_mut(), &mut made);
    BACKWARD.run(query.device(), |run| run(OP, &problem, inputs, stats, (mask, keep), outputs))?;
    Ok(made)
}

const BACKWARD: Kernels<Backward> = Kernels { cpu: backward_on_cpu, cuda: backward_on_gpu };

type Backward = fn(
    &'static str,
    &Problem,
    [&Tensor; 5],
    &Tensor,
    (Option<&Tensor>, Option<Keep>),
    (Option<&mut Tensor>, &mut [Option<Tensor>; 4]),
) -> Result<()>;

fn backward_on_cpu(
    op: &'static str,
    problem: &Problem,
    inputs: [&Tensor; 5],
    stats: &Tensor,
    (mask, keep): (Option<&Tensor>, Option<Keep>),
    (whole, made): (Option<&mut Tensor>, &mut [Option<Tensor>; 4]),
) -> Result<()> {
    for_real!(op, inputs[0].dtype(), T => {
        let pass = BackwardPass::<T> {
            problem: *problem,
            inputs: inputs.map(|t| Heads::open(op, t)).into_iter().collect::<Result<_>>()?,
            mask: Mask::open(op, mask, &problem.scores_shape(inputs[0]))?,
            keep,
            stats: elements(op, stats)?,
        };
        pass.run(op, whole, made)
    })
}

fn backward_on_gpu(
    op: &'static str,
    problem: &Problem,
    inputs: [&Tensor; 5],
    stats: &Tensor,
    (mask, keep): (Option<&Tensor>, Option<Keep>),
    (_, made): (Option<&mut Tensor>, &mut [Option<Tensor>; 4]),
) -> Result<()> {
    cuda::backward(op, problem, inputs, stats, (mask, keep.as_ref()), made)
}

/// The gradients of query, key and value as parts of `whole`, head after head. The gradient of the scores is no part of it.
fn gradients_in(whole: &Tensor, inputs: [&Tensor; 3]) -> Result<[Option<Tensor>; 4]> {
    let mut first = 0;
    let part = |input: &Tensor| {
        let heads = input.size(-3)?;
        first += heads;
        whole.narrow(-3, first - heads, heads).map(Some)
    };
    let [dq, dk, dv] = inputs.map(part);
    Ok([dq?, dk?, dv?, None])
}

/// What all tasks read.
struct BackwardPass<'a, T: Real> {
    problem: Problem,
    /// Query, key, value, output and the output's gradient.
    inputs: Vec<Heads<'a, T>>,
    mask: Mask<'a, T>,
    keep: Option<Keep>,
    stats: Vec<T::Wide>,
}

/// A task: a key head and the query heads that share it, with the gradients that it writes. Gradients that are not wanted are absent or empty.
struct KeyHeadPart<'a, T: Real> {
    key_head: usize,
    /// One for each query head.
    dq: Vec<SubMatMut<'a, T>>,
    dk: Option<SubMatMut<'a, T>>,
    dv: Option<SubMatMut<'a, T>>,
    slopes: &'a mut [T::Wide],
}

/// Scratch memory of a task.
struct BackwardBuffers<'a, T> {
    keys: Rows<'a, T>,
    values: Rows<'a, T>,
    dk: &'a mut [T],
    dv: &'a mut [T],
    queries: QueryBuffers<'a, T>,
    scores: &'a mut [T],
    slopes: &'a mut [T],
    bias: &'a mut [T],
    kept: &'a mut [T],
}

/// Scratch memory for a block of queries: the queries and the output's gradient as rows and transposed, the output as rows.
struct QueryBuffers<'a, T> {
    dq: &'a mut [T],
    rows: &'a mut [T],
    columns: &'a mut [T],
    dy_rows: &'a mut [T],
    dy_columns: &'a mut [T],
    out_rows: &'a mut [T],
}

impl<T: Real> BackwardPass<'_, T> {
    /// Computes the gradients in `made`. The first three are parts of `whole`, if there is one.
    fn run(
        &self,
        op: &'static str,
        whole: Option<&mut Tensor>,
        made: &mut [Option<Tensor>; 4],
    ) -> Result<()> {
        let p = &self.problem;
        let pool = made.iter().flatten().next().map(|t| t.device().pool()).transpose()?;
        let Some(pool) = pool else { return Ok(()) };
        let [dq, dk, dv, slopes] = made;
        let open = |t| HeadLayout::open::<T>(op, t);
        let (mut whole, mut apart) = match whole {
            Some(whole) => (Some(open(whole)?), [None, None, None]),
            None => {
                let [dq, dk, dv] = [dq, dk, dv].map(|t| t.as_mut().map(open).transpose());
                (None, [dq?, dk?, dv?])
            }
        };
        let mut cells = apart.each_mut().map(|open| match open {
            Some((layout, data)) => layout.heads(data).collect(),
            None => Vec::new(),
        });
        if let Some((layout, data)) = &mut whole {
            let queries = p.heads / layout.outer.max(1);
            let ends = [queries, queries + queries / p.group];
            for (i, cell) in layout.heads(data).enumerate() {
                let i = i % layout.across;
                cells[ends.iter().filter(|&&end| i >= end).count()].push(cell);
            }
        }
        let [mut dq, mut dk, mut dv] = cells.map(Vec::into_iter);
        let mut slopes = slopes.as_mut().map(|t| t.write::<T::Wide>(op)).transpose()?;
        let mut slopes = parts_of(slopes.as_deref_mut(), p.group * p.queries * p.keys);
        let mut heads: Vec<KeyHeadPart<'_, T>> = (0..p.heads / p.group)
            .map(|key_head| KeyHeadPart {
                key_head,
                dq: dq.by_ref().take(p.group).collect(),
                dk: dk.next(),
                dv: dv.next(),
                slopes: slopes.next().unwrap_or_default(),
            })
            .collect();
        let together = (heads.len() / (PIECES * pool.threads())).max(1);
        pool.for_each_chunk(&mut heads, together, |_, heads| {
            heads.iter_mut().for_each(|part| self.run_part(part));
        });
        Ok(())
    }

    fn run_part(&self, part: &mut KeyHeadPart<'_, T>) {
        let p = &self.problem;
        let [depth, value] = p.rows::<T::Wide>();
        let whole =
            [self.inputs[1].room(p.keys), self.inputs[2].room(p.keys), p.keys * depth, p.keys * value];
        let block = [depth, depth, depth, value, value, value].map(|row| QUERIES * row);
        let tile = |wanted: bool| if wanted { KEYS_BACKWARD * QUERIES } else { 0 };
        // The second half is for the rows that a mask's tile is transposed from.
        let bias = 2 * tile(!matches!(self.mask, Mask::None));
        let tiles = [tile(true), tile(true), bias, tile(self.keep.is_some())];
        with_slices(whole, |[keys, values, dk, dv]| {
            let keys = self.inputs[1].rows(part.key_head, 0, [p.keys; 2], keys);
            let values = self.inputs[2].rows(part.key_head, 0, [p.keys; 2], values);
            dk.fill(T::Wide::ZERO);
            dv.fill(T::Wide::ZERO);
            with_slices(block, |[dq, rows, columns, dy_rows, dy_columns, out_rows]| {
                with_slices(tiles, |[scores, slopes, bias, kept]| {
                    let (dk, dv) = (&mut *dk, &mut *dv);
                    let queries = QueryBuffers { dq, rows, columns, dy_rows, dy_columns, out_rows };
                    let mut scratch =
                        BackwardBuffers { keys, values, dk, dv, queries, scores, slopes, bias, kept };
                    for member in 0..p.group {
                        let mut first = 0;
                        while first < p.queries {
                            first += self.run_block(part, member, first, &mut scratch);
                        }
                    }
                });
            });
            if let Some(to) = &mut part.dk {
                let scale = [T::Wide::from_f64(p.scale); QUERIES];
                for (i, rows) in dk.chunks_mut((QUERIES * depth).max(1)).enumerate() {
                    tile::scale_rows(rows, depth, &scale);
                    store(to, i * QUERIES, rows, depth);
                }
            }
            if let Some(to) = &mut part.dv {
                store(to, 0, dv, value);
            }
        });
    }

    /// Adds the gradients of a block of queries, from number `first` on, of the group's head number `member`. Returns how many queries they are.
    fn run_block(
        &self,
        part: &mut KeyHeadPart<'_, T>,
        member: usize,
        first: usize,
        s: &mut BackwardBuffers<'_, T::Wide>,
    ) -> usize {
        let p = &self.problem;
        let head = part.key_head * p.group + member;
        let (count, seen) = self.mask.block(head, first, p.queries - first);
        let width = padded_queries::<T::Wide>(count);
        let q = &mut s.queries;
        let rows = self.inputs[0].rows(head, first, [count, width], q.rows);
        let out_rows = self.inputs[3].rows(head, first, [count, width], q.out_rows);
        let dy_rows = self.inputs[4].rows(head, first, [count, width], q.dy_rows);
        let scale = T::Wide::from_f64(p.scale);
        dispatch(tile::Transpose { rows, factor: scale, to: q.columns, width });
        dispatch(tile::Transpose { rows: dy_rows, factor: T::Wide::ONE, to: q.dy_columns, width });
        let [mut base, mut inverse, mut delta] = [[T::Wide::ZERO; QUERIES]; 3];
        let stats = self.stats[(head * p.queries + first) * 2..].chunks_exact(2);
        stats.take(count).enumerate().for_each(|(q, stats)| [base[q], inverse[q]] = [stats[0], stats[1]]);
        dispatch(tile::RowProducts { a: out_rows, b: dy_rows, out: &mut delta[..count] });
        let dq = &mut q.dq[..width * rows.width];
        dq.fill(T::Wide::ZERO);
        for tile in p.tiles::<T::Wide>(head, [first, count], seen, KEYS_BACKWARD) {
            let (keys, values) = (s.keys.from(tile.key), s.values.from(tile.key));
            tile.products(keys, (q.columns, p.depth), s.scores);
            tile.products(values, (q.dy_columns, p.value_depth), s.slopes);
            dispatch(Differentiate {
                tile,
                changes: ScoreChanges {
                    bias: self.mask.tile(&tile, s.bias),
                    keep: self.keep.as_ref().map(|k| k.tile(&tile, [p.queries, p.keys], s.kept)),
                },
                stats: Stats { base: &base, inverse: &inverse, delta: &delta },
                scores: s.scores,
                slopes: s.slopes,
            });
            if part.dv.is_some() {
                tile.sum_queries(s.scores, dy_rows, &mut s.dv[tile.key * dy_rows.width..]);
            }
            if part.dk.is_some() {
                tile.sum_queries(s.slopes, rows, &mut s.dk[tile.key * rows.width..]);
            }
            if !part.dq.is_empty() {
                tile.sum_keys(s.slopes, keys, dq);
            }
            if !part.slopes.is_empty() {
                let row = |q: usize| ((member * p.queries + first + q) * p.keys) + tile.key;
                for q in 0..count {
                    let to = part.slopes[row(q)..][..tile.keys].iter_mut();
                    to.zip(s.slopes[q..].iter().step_by(width)).for_each(|(to, &x)| *to = x);
                }
            }
        }
        self.zero_hidden(part, member, [first, count], seen..p.keys_before(first + count));
        if let Some(to) = part.dq.get_mut(member) {
            tile::scale_rows(dq, rows.width, &[scale; QUERIES]);
            store(to, first, &dq[..count * rows.width], rows.width);
        }
        count
    }

    /// Sets the gradient of the scores of keys outside of `seen`, which these queries do not see, to 0.
    fn zero_hidden(
        &self,
        part: &mut KeyHeadPart<'_, T>,
        member: usize,
        [first, count]: [usize; 2],
        seen: Range<usize>,
    ) {
        if part.slopes.is_empty() {
            return;
        }
        let p = &self.problem;
        let rows = part.slopes[(member * p.queries + first) * p.keys..].chunks_exact_mut(p.keys);
        rows.take(count).for_each(|row| {
            row[..seen.start.min(p.keys)].fill(T::Wide::ZERO);
            row[seen.end..].fill(T::Wide::ZERO);
        });
    }
}

/// The parts of a slice, one after the other; none of an absent or empty one.
fn parts_of<T>(data: Option<&mut [T]>, size: usize) -> std::slice::ChunksMut<'_, T> {
    data.unwrap_or_default().chunks_mut(size.max(1))
}
