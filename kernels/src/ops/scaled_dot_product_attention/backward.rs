//! The backward pass: scores are made again tile by tile from what the forward pass kept of each query.
//!
//! One thread does all query heads that share a key head, blocks of queries ascending, blocks of keys inside; so each
//! gradient's additions have one order.

use phalanx_tensor::{Result, Tensor};

use super::cuda;
use super::dropout::Keep;
use super::operand::{Heads, Mask, carve, padded, store};
use super::tile::{self, Changes, Differentiate, KEYS_BACKWARD, QUERIES, Stats};
use super::{Attention, Problem};
use crate::check;
use crate::real::{Real, for_real};
use crate::simd::{Float, dispatch};
use crate::wide::{elements, wide_dtype};

/// The gradients of [`scaled_dot_product_attention`](super::scaled_dot_product_attention) with respect to query, key,
/// value and the scores (before a mask is broadcast, in the type that is computed in; the only one of T x S elements):
/// those that `needs` names. `forward` are the forward pass's query, key, value, mask, output and numbers.
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
    check::same(OP, &[query, out, dy])?;
    check::shape(OP, "a gradient", dy, out.shape())?;
    let like = |i: usize, t: &Tensor| needs[i].then(|| t.empty_like()).transpose();
    let scores = || Tensor::empty(&problem.scores_shape(query), wide_dtype(query.dtype()), query.device());
    let mut made = [like(0, query)?, like(1, key)?, like(2, value)?, needs[3].then(scores).transpose()?];
    if query.device().is_meta() {
        return Ok(made);
    }
    if query.device().is_cuda() {
        let keep = config.dropout.map(|d| Keep::new(OP, d, query)).transpose()?;
        let inputs = [query, key, value, out, dy];
        cuda::backward(OP, &problem, inputs, stats, (mask, keep.as_ref()), &mut made)?;
        return Ok(made);
    }
    for_real!(OP, query.dtype(), T => {
        let pass = Pass::<T> {
            problem,
            inputs: [query, key, value, out, dy].map(|t| Heads::open(OP, t)).into_iter().collect::<Result<_>>()?,
            mask: Mask::open(OP, mask, &problem.scores_shape(query))?,
            keep: config.dropout.map(|d| Keep::new(OP, d, query)).transpose()?,
            stats: elements(OP, stats)?,
        };
        pass.run(OP, &mut made)
    })?;
    Ok(made)
}

/// What all threads read.
struct Pass<'a, T: Real> {
    problem: Problem,
    /// Query, key, value, output and the output's gradient.
    inputs: Vec<Heads<'a, T>>,
    mask: Mask<'a, T>,
    keep: Option<Keep>,
    stats: Vec<T::Wide>,
}

/// A key head and the query heads that share it, worked on by one thread. What is not wanted is empty.
struct Part<'a, T: Real> {
    key_head: usize,
    dq: &'a mut [T],
    dk: &'a mut [T],
    dv: &'a mut [T],
    slopes: &'a mut [T::Wide],
}

/// A thread's working memory.
struct Scratch<'a, T> {
    keys: &'a [T],
    values: &'a [T],
    dk: &'a mut [T],
    dv: &'a mut [T],
    queries: Queries<'a, T>,
    scores: &'a mut [T],
    slopes: &'a mut [T],
    bias: &'a mut [T],
    kept: &'a mut [T],
}

/// What is held of a block of queries: themselves and the output's gradient, as rows and as columns.
struct Queries<'a, T> {
    dq: &'a mut [T],
    rows: &'a mut [T],
    columns: &'a mut [T],
    dy_rows: &'a mut [T],
    dy_columns: &'a mut [T],
    out_rows: &'a mut [T],
}

impl<T: Real> Pass<'_, T> {
    fn run(&self, op: &'static str, made: &mut [Option<Tensor>; 4]) -> Result<()> {
        let p = &self.problem;
        let pool = made.iter().flatten().next().map(|t| t.device().pool()).transpose()?;
        let Some(pool) = pool else { return Ok(()) };
        let [dq, dk, dv, slopes] = made;
        let mut dq = dq.as_mut().map(|t| t.write::<T>(op)).transpose()?;
        let mut dk = dk.as_mut().map(|t| t.write::<T>(op)).transpose()?;
        let mut dv = dv.as_mut().map(|t| t.write::<T>(op)).transpose()?;
        let mut slopes = slopes.as_mut().map(|t| t.write::<T::Wide>(op)).transpose()?;
        let mut dq = parts(dq.as_deref_mut(), p.group * p.queries * p.depth);
        let mut dk = parts(dk.as_deref_mut(), p.keys * p.depth);
        let mut dv = parts(dv.as_deref_mut(), p.keys * p.value_depth);
        let mut slopes = parts(slopes.as_deref_mut(), p.group * p.queries * p.keys);
        let mut heads: Vec<Part<'_, T>> = (0..p.heads / p.group)
            .map(|key_head| Part {
                key_head,
                dq: dq.next().unwrap_or_default(),
                dk: dk.next().unwrap_or_default(),
                dv: dv.next().unwrap_or_default(),
                slopes: slopes.next().unwrap_or_default(),
            })
            .collect();
        pool.for_each_chunk(&mut heads, 1, |_, heads| {
            heads.iter_mut().for_each(|part| self.run_part(part));
        });
        Ok(())
    }

    fn run_part(&self, part: &mut Part<'_, T>) {
        let p = &self.problem;
        let [depth, value] = p.rows::<T::Wide>();
        let whole = [depth, value, depth, value].map(|row| p.keys * row);
        let block = [depth, depth, depth, value, value, value].map(|row| QUERIES * row);
        let tile = |wanted: bool| if wanted { KEYS_BACKWARD * QUERIES } else { 0 };
        let tiles =
            [tile(true), tile(true), tile(!matches!(self.mask, Mask::None)), tile(self.keep.is_some())];
        carve(whole, |[keys, values, dk, dv]| {
            self.inputs[1].rows(part.key_head, 0, p.keys, keys, depth);
            self.inputs[2].rows(part.key_head, 0, p.keys, values, value);
            dk.fill(T::Wide::ZERO);
            dv.fill(T::Wide::ZERO);
            carve(block, |[dq, rows, columns, dy_rows, dy_columns, out_rows]| {
                carve(tiles, |[scores, slopes, bias, kept]| {
                    let (dk, dv) = (&mut *dk, &mut *dv);
                    let queries = Queries { dq, rows, columns, dy_rows, dy_columns, out_rows };
                    let mut scratch = Scratch { keys, values, dk, dv, queries, scores, slopes, bias, kept };
                    for member in 0..p.group {
                        for first in (0..p.queries).step_by(QUERIES) {
                            self.run_block(part, member, first, &mut scratch);
                        }
                    }
                });
            });
            store(part.dk, dk, p.depth, depth);
            store(part.dv, dv, p.value_depth, value);
        });
    }

    /// One block of queries of the group's head number `member`.
    fn run_block(&self, part: &mut Part<'_, T>, member: usize, first: usize, s: &mut Scratch<'_, T::Wide>) {
        let p = &self.problem;
        let head = part.key_head * p.group + member;
        let count = QUERIES.min(p.queries - first);
        let width = padded::<T::Wide>(count);
        let [depth_row, value_row] = p.rows::<T::Wide>();
        let scale = [T::Wide::from_f64(p.scale); QUERIES];
        let q = &mut s.queries;
        let [dq, rows] = [&mut *q.dq, &mut *q.rows].map(|rows| &mut rows[..width * depth_row]);
        let [out_rows, dy_rows] =
            [&mut *q.out_rows, &mut *q.dy_rows].map(|rows| &mut rows[..width * value_row]);
        self.inputs[0].rows(head, first, count, rows, depth_row);
        self.inputs[3].rows(head, first, count, out_rows, value_row);
        self.inputs[4].rows(head, first, count, dy_rows, value_row);
        tile::scale_rows(rows, depth_row, &scale);
        dispatch(tile::Transpose { rows, row: depth_row, to: q.columns, width });
        dispatch(tile::Transpose { rows: dy_rows, row: value_row, to: q.dy_columns, width });
        let [mut base, mut inverse, mut delta] = [[T::Wide::ZERO; QUERIES]; 3];
        let stats = self.stats[(head * p.queries + first) * 2..].chunks_exact(2);
        stats.take(count).enumerate().for_each(|(q, stats)| [base[q], inverse[q]] = [stats[0], stats[1]]);
        dispatch(tile::RowProducts { a: out_rows, b: dy_rows, row: value_row, out: &mut delta });
        dq.fill(T::Wide::ZERO);
        for tile in p.tiles::<T::Wide>(head, first, count, KEYS_BACKWARD) {
            let [key_at, value_at] = [depth_row, value_row].map(|row| tile.key * row);
            let (keys, values) = (&s.keys[key_at..], &s.values[value_at..]);
            tile.products((keys, depth_row), (q.columns, p.depth), s.scores);
            tile.products((values, value_row), (q.dy_columns, p.value_depth), s.slopes);
            dispatch(Differentiate {
                tile,
                changes: Changes {
                    bias: self.mask.tile(&tile, s.bias),
                    keep: self.keep.as_ref().map(|k| k.tile(&tile, [p.queries, p.keys], s.kept)),
                },
                stats: Stats { base: &base, inverse: &inverse, delta: &delta },
                scores: s.scores,
                slopes: s.slopes,
            });
            if !part.dv.is_empty() {
                tile.sum_queries(s.scores, (dy_rows, value_row), &mut s.dv[value_at..]);
            }
            if !part.dk.is_empty() {
                tile.sum_queries(s.slopes, (rows, depth_row), &mut s.dk[key_at..]);
            }
            if !part.dq.is_empty() {
                tile.sum_keys(s.slopes, (keys, depth_row), dq);
            }
            if !part.slopes.is_empty() {
                let row = |q: usize| ((member * p.queries + first + q) * p.keys) + tile.key;
                for q in 0..count {
                    let to = part.slopes[row(q)..][..tile.keys].iter_mut();
                    to.zip(s.slopes[q..].iter().step_by(width)).for_each(|(to, &x)| *to = x);
                }
            }
        }
        self.hide(part, member, [first, count], p.keys_before(first + count));
        if !part.dq.is_empty() {
            tile::scale_rows(dq, depth_row, &scale);
            store(
                &mut part.dq[(member * p.queries + first) * p.depth..][..count * p.depth],
                dq,
                p.depth,
                depth_row,
            );
        }
    }

    /// Scores of keys from `end` on, which these queries do not see, have gradient 0.
    fn hide(&self, part: &mut Part<'_, T>, member: usize, [first, count]: [usize; 2], end: usize) {
        if part.slopes.is_empty() {
            return;
        }
        let p = &self.problem;
        let rows = part.slopes[(member * p.queries + first) * p.keys..].chunks_exact_mut(p.keys);
        rows.take(count).for_each(|row| row[end..].fill(T::Wide::ZERO));
    }
}

/// The parts of a slice, one after the other; none of an absent or empty one.
fn parts<T>(data: Option<&mut [T]>, size: usize) -> std::slice::ChunksMut<'_, T> {
    data.unwrap_or_default().chunks_mut(size.max(1))
}
