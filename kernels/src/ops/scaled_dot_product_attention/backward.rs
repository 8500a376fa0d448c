//! The backward pass: scores are made again tile by tile from what the forward pass kept of each query.
//!
//! One thread does all query heads that share a key head, blocks of queries ascending, blocks of keys inside; so each
//! gradient's additions have one order.

use phalanx_tensor::{Result, Tensor};

use super::operand::{Heads, Mask, padded, transpose};
use super::product::ROWS;
use super::tile::{self, KEYS, KeyBlock, Needs, QUERIES, QueryBlock, Sizes};
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
    for_real!(OP, query.dtype(), T => {
        let pass = Pass::<T> {
            problem,
            inputs: [query, key, value, out, dy].map(|t| Heads::open(OP, t)).into_iter().collect::<Result<_>>()?,
            mask: Mask::open(OP, mask, &problem.scores_shape(query))?,
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
struct Scratch<T> {
    keys: Vec<T>,
    values: Vec<T>,
    dk: Vec<T>,
    dv: Vec<T>,
    dq: Vec<T>,
    /// Queries and gradients of a block, as rows and as columns.
    rows: Vec<T>,
    columns: Vec<T>,
    dy_rows: Vec<T>,
    dy_columns: Vec<T>,
    out_rows: Vec<T>,
    scores: Vec<T>,
    slopes: Vec<T>,
    bias: Vec<T>,
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
        let mut scratch = Scratch::new(p);
        let (depth_row, value_row) = (padded::<T::Wide>(p.depth), padded::<T::Wide>(p.value_depth));
        self.inputs[1].rows(part.key_head, 0, p.keys, &mut scratch.keys, depth_row);
        self.inputs[2].rows(part.key_head, 0, p.keys, &mut scratch.values, value_row);
        for member in 0..p.group {
            for first in (0..p.queries).step_by(QUERIES) {
                self.run_block(part, member, first, &mut scratch);
            }
        }
        store(part.dk, &scratch.dk, p.depth, depth_row, T::Wide::ONE);
        store(part.dv, &scratch.dv, p.value_depth, value_row, T::Wide::ONE);
    }

    /// One block of queries of the group's head number `member`.
    fn run_block(&self, part: &mut Part<'_, T>, member: usize, first: usize, s: &mut Scratch<T::Wide>) {
        let p = &self.problem;
        let head = part.key_head * p.group + member;
        let count = QUERIES.min(p.queries - first);
        let width = padded::<T::Wide>(count);
        let (depth_row, value_row) = (padded::<T::Wide>(p.depth), padded::<T::Wide>(p.value_depth));
        let scale = T::Wide::from_f64(p.scale);
        self.inputs[0].rows(head, first, count, &mut s.rows[..width * depth_row], depth_row);
        s.rows.iter_mut().for_each(|x| *x = *x * scale);
        self.inputs[3].rows(head, first, count, &mut s.out_rows[..width * value_row], value_row);
        self.inputs[4].rows(head, first, count, &mut s.dy_rows[..width * value_row], value_row);
        transpose(&s.rows, depth_row, p.depth, &mut s.columns, width);
        transpose(&s.dy_rows, value_row, p.value_depth, &mut s.dy_columns, width);
        let [mut base, mut inverse, mut delta] = [[T::Wide::ZERO; QUERIES]; 3];
        let stats = self.stats[(head * p.queries + first) * 2..].chunks_exact(2);
        stats.take(count).enumerate().for_each(|(q, stats)| [base[q], inverse[q]] = [stats[0], stats[1]]);
        if value_row > 0 {
            let (a, b, out) =
                (&s.out_rows[..width * value_row], &s.dy_rows[..width * value_row], &mut delta[..]);
            dispatch(tile::RowProducts { a, b, row: value_row, out });
        }
        s.dq[..width * depth_row].fill(T::Wide::ZERO);
        let end = p.keys_before(first + count);
        for key in (0..end).step_by(KEYS) {
            let keys = KEYS.min(end - key);
            let bias = self.mask.tile(p, head, [first, count, width], [key, keys], &mut s.bias);
            let (key_at, value_at) = (key * depth_row, key * value_row);
            dispatch(tile::BackwardOf {
                sizes: Sizes {
                    keys,
                    width,
                    depth: p.depth,
                    depth_row,
                    value_depth: p.value_depth,
                    value_row,
                },
                needs: Needs {
                    query: !part.dq.is_empty(),
                    key: !part.dk.is_empty(),
                    value: !part.dv.is_empty(),
                },
                block: KeyBlock { keys: &s.keys[key_at..], values: &s.values[value_at..], bias },
                queries: QueryBlock {
                    rows: &s.rows,
                    columns: &s.columns,
                    dy_rows: &s.dy_rows,
                    dy_columns: &s.dy_columns,
                    base: &base,
                    inverse: &inverse,
                    delta: &delta,
                },
                scores: &mut s.scores,
                slopes: &mut s.slopes,
                dq: &mut s.dq,
                dk: &mut s.dk[key_at..],
                dv: &mut s.dv[value_at..],
            });
            if !part.slopes.is_empty() {
                let row = |q: usize| ((member * p.queries + first + q) * p.keys) + key;
                for q in 0..count {
                    let to = part.slopes[row(q)..][..keys].iter_mut();
                    to.zip(s.slopes[q..].iter().step_by(width)).for_each(|(to, &x)| *to = x);
                }
            }
        }
        self.hide(part, member, [first, count], end);
        if !part.dq.is_empty() {
            let dq = &mut part.dq[(member * p.queries + first) * p.depth..][..count * p.depth];
            store(dq, &s.dq, p.depth, depth_row, scale);
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

impl<T: Float> Scratch<T> {
    fn new(p: &Problem) -> Scratch<T> {
        let zeros = |rows: usize, row: usize| vec![T::ZERO; rows * row];
        let (depth_row, value_row) = (padded::<T>(p.depth), padded::<T>(p.value_depth));
        Scratch {
            keys: zeros(p.keys + ROWS, depth_row),
            values: zeros(p.keys + ROWS, value_row),
            dk: zeros(p.keys + ROWS, depth_row),
            dv: zeros(p.keys + ROWS, value_row),
            dq: zeros(QUERIES, depth_row),
            rows: zeros(QUERIES, depth_row),
            columns: zeros(QUERIES, p.depth),
            dy_rows: zeros(QUERIES, value_row),
            dy_columns: zeros(QUERIES, p.value_depth),
            out_rows: zeros(QUERIES, value_row),
            scores: zeros(QUERIES, KEYS),
            slopes: zeros(QUERIES, KEYS),
            bias: zeros(QUERIES, KEYS),
        }
    }
}

/// The parts of a slice, one after the other; none of an absent or empty one.
fn parts<T>(data: Option<&mut [T]>, size: usize) -> std::slice::ChunksMut<'_, T> {
    data.unwrap_or_default().chunks_mut(size.max(1))
}

/// Rows without their padding, times `scale`, rounded.
fn store<T: Real>(to: &mut [T], from: &[T::Wide], row: usize, stride: usize, scale: T::Wide) {
    let rows = to.chunks_exact_mut(row.max(1)).zip(from.chunks(stride.max(1)));
    rows.for_each(|(to, from)| to.iter_mut().zip(from).for_each(|(to, &x)| *to = T::narrow(x * scale)));
}
