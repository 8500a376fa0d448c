//! Matrix times vector (GEMV), and inner products: products of one column with [`GEMV_STEPS_MIN`] steps or more.
//!
//! Such a product has few sums with many terms, so a sum is not one chain here. k is cut into parts of
//! [`PART`] steps. In a part, step s belongs to chain s mod [`chains`]; a chain is fused multiply-adds over its steps,
//! ascending, begun at zero. Chains i and i + half are added, halving, until one is left. The parts' sums are added
//! in ascending order. So k alone decides the order, and the order suits vectors and threads.
//! Operands are read in place, halves too. Rows are computed in groups: in dot-product form if A's steps are neighbours ([`DotRows`]), in AXPY
//! form if A's rows are ([`AxpyRows`]).

#![allow(unsafe_code)]

use phalanx_tensor::Pool;

use super::element::GemmElem;
use super::epilogue::{Epilogue, FinishTile, Write};
use super::mat::{MatMut, MatRef};
use super::product::Batch;
use crate::scratch::with_scratch;
use crate::simd::{Float, Isa, Kernel, LANES_MAX, Runner, Vector, each};

/// Steps from which the sums have this order; shorter ones are one chain.
pub(crate) const GEMV_STEPS_MIN: usize = 64;
/// Steps of a part.
const PART: usize = 1 << 12;
/// Chains of a part, at most: those of f32.
const CHAINS_MAX: usize = 64;
/// Bytes of all chains of a sum.
const CHAIN_BYTES: usize = 256;
/// Rows of a group in dot-product form, and in AXPY form.
const DOT_ROWS: usize = LANES_MAX;
const AXPY_ROWS: usize = 64;
/// How many rows are summed at a time in dot-product form where A has so many bytes that it comes from memory, and how many bytes ahead
/// each is prefetched.
const FAR_BYTES: usize = 1 << 20;
const TOGETHER: usize = 4;
const AHEAD_BYTES: usize = 1024;
const LINE_BYTES: usize = 64;
/// How many steps ahead A is prefetched in AXPY form.
const AHEAD: usize = 12;

/// How many chains sums of this type have.
const fn chains<A>() -> usize {
    CHAIN_BYTES / size_of::<A>()
}

/// [`super::gemm_batched`] for a B of one column and [`GEMV_STEPS_MIN`] steps or more.
///
/// # Panics
///
/// If the shapes do not fit together, an item lies outside its slice, or two items share a place in C.
pub(crate) fn gemv<T: GemmElem>(
    pool: Option<&Pool>,
    batch: Batch,
    a: MatRef<'_, T>,
    b: MatRef<'_, T>,
    c: MatMut<'_, T>,
    write: Write,
    epilogue: Epilogue<'_, T>,
) {
    run(Runner::current(), pool, batch, a, b, c, (write, epilogue));
}

/// [`gemv`] on a given instruction set.
pub(super) fn run<T: GemmElem>(
    runner: Runner,
    pool: Option<&Pool>,
    batch: Batch,
    a: MatRef<'_, T>,
    b: MatRef<'_, T>,
    mut c: MatMut<'_, T>,
    (write, epilogue): (Write, Epilogue<'_, T>),
) {
    batch.check(&a, &b, &c, &epilogue);
    assert!(b.cols() == 1, "got {} columns, wanted one", b.cols());
    if a.rows() == 0 || batch.count == 0 {
        return;
    }
    let groups = RowGroups::new(runner, batch, a, b, c.strides().0);
    let group = groups.group;
    with_scratch(groups.groups() * groups.parts * group, |sums: &mut [T::Acc]| {
        let units = |first: usize, sums: &mut [T::Acc]| {
            sums.chunks_exact_mut(group).enumerate().for_each(|(i, sums)| groups.sum(first + i, sums));
        };
        match pool.filter(|pool| pool.threads() > 1) {
            Some(pool) => {
                let together = (groups.groups() * groups.parts).div_ceil(8 * pool.threads());
                pool.for_each_chunk(sums, together * group, |i, sums| units(i * together, sums));
            }
            None => units(0, sums),
        }
        groups.finish(sums, &mut c, write, epilogue);
    });
}

/// The rows of all items of a batch, in groups; an item of one row is a row of a single item.
struct RowGroups<'a, T> {
    runner: Runner,
    a: &'a [T],
    b: &'a [T],
    items: usize,
    rows: usize,
    steps: usize,
    /// Elements of A, B and C from an item to the next, and from a row to the next.
    item_apart: [usize; 3],
    row_apart: [usize; 3],
    /// Elements of A and B from a step to the next.
    step_apart: [usize; 2],
    /// Rows of a group.
    group: usize,
    /// Parts of k.
    parts: usize,
}

impl<'a, T: GemmElem> RowGroups<'a, T> {
    fn new(runner: Runner, batch: Batch, a: MatRef<'a, T>, b: MatRef<'a, T>, c_row: usize) -> Self {
        let (rows, steps, (a_row, a_step)) = (a.rows(), a.cols(), a.strides());
        let (item_apart, b_step) = ([batch.a, batch.b, batch.c], b.strides().0);
        // The last item's bounds; the others lie before.
        let _ = (a.shifted((batch.count - 1) * batch.a), b.shifted((batch.count - 1) * batch.b));
        let (items, rows, row_apart) = match rows {
            1 => (1, batch.count, item_apart),
            _ => (batch.count, rows, [a_row, 0, c_row]),
        };
        let across = row_apart[0] == 1 && row_apart[1] == 0 && a_step != 1;
        RowGroups {
            runner,
            a: a.data(),
            b: b.data(),
            items,
            rows,
            steps,
            item_apart,
            row_apart,
            step_apart: [a_step, b_step],
            group: if across { AXPY_ROWS } else { DOT_ROWS },
            parts: steps.div_ceil(PART),
        }
    }

    /// The number of groups of an item; [`RowGroups::groups`] of all.
    fn groups_of_item(&self) -> usize {
        self.rows.div_ceil(self.group)
    }

    fn groups(&self) -> usize {
        self.items * self.groups_of_item()
    }

    /// The item of a group, its first row, and how many rows it has.
    fn place(&self, group: usize) -> (usize, usize, usize) {
        let (item, first) = (group / self.groups_of_item(), group % self.groups_of_item() * self.group);
        (item, first, self.group.min(self.rows - first))
    }

    /// The sums of a group of rows over a part of k; `unit` counts the parts of all groups.
    fn sum(&self, unit: usize, sums: &mut [T::Acc]) {
        let (item, row, rows) = self.place(unit / self.parts);
        let step = unit % self.parts * PART;
        let steps = PART.min(self.steps - step);
        let start =
            |i: usize| item * self.item_apart[i] + row * self.row_apart[i] + step * self.step_apart[i];
        let (a, b, sums) = (&self.a[start(0)..], &self.b[start(1)..], &mut sums[..rows]);
        let ([a_row, b_row, _], [a_step, b_step]) = (self.row_apart, self.step_apart);
        let far = (self.items * self.rows).saturating_mul(self.steps * size_of::<T>()) >= FAR_BYTES;
        if self.group == AXPY_ROWS {
            with_scratch(chains::<T::Acc>() * AXPY_ROWS, |chains| {
                chains.fill(T::Acc::ZERO);
                self.runner.run(AxpyRows { a, a_step, b, b_step, steps, chains, sums });
            });
        } else if a_step == 1 && b_row == 0 && rows > 1 {
            // B is widened once for all rows.
            let near = if b_step == 1 { T::as_wide(&b[..steps]) } else { None };
            with_scratch(if near.is_some() { 0 } else { steps }, |room: &mut [T::Acc]| {
                gather(b, b_step, room);
                self.runner.run(DotRows { a, a_row, b: near.unwrap_or(room), b_row, steps, far, sums });
            });
        } else if [a_step, b_step] == [1, 1] {
            self.runner.run(DotRows { a, a_row, b, b_row, steps, far, sums });
        } else {
            with_scratch(2 * steps, |room: &mut [T::Acc]| {
                let (a_near, b_near) = room.split_at_mut(steps);
                for (i, sum) in sums.iter_mut().enumerate() {
                    gather(&a[i * a_row..], a_step, a_near);
                    if i == 0 || b_row > 0 {
                        gather(&b[i * b_row..], b_step, b_near);
                    }
                    let (a, b, sums) = (&*a_near, &*b_near, std::slice::from_mut(sum));
                    self.runner.run(DotRows { a, a_row: 0, b, b_row: 0, steps, far, sums });
                }
            });
        }
    }

    /// Adds the sums of the parts, and takes them through the epilogue to C.
    fn finish(
        &self,
        sums: &mut [T::Acc],
        c: &mut MatMut<'_, T>,
        write: Write,
        Epilogue { bias, activation }: Epilogue<'_, T>,
    ) {
        let bias = bias.map(|bias| [bias[0]; AXPY_ROWS]);
        for (group, sums) in sums.chunks_exact_mut(self.group * self.parts).enumerate() {
            let (item, row, rows) = self.place(group);
            let (sums, others) = sums.split_at_mut(self.group);
            for part in others.chunks_exact(self.group) {
                sums.iter_mut().zip(part).take(rows).for_each(|(sum, &part)| *sum += part);
            }
            let start = item * self.item_apart[2] + row * self.row_apart[2];
            let tile = FinishTile {
                sums,
                sums_row: 0,
                bias: bias.as_ref().map(|bias| &bias[..rows]),
                activation,
                write,
                rows: 1,
                cols: rows,
                c: c.data()[start..].as_mut_ptr(),
                c_strides: (0, self.row_apart[2]),
            };
            // SAFETY: C's places were proven when it was made and by `repeats`, and it is borrowed mutably.
            unsafe { tile.run_on(self.runner) }
        }
    }
}

/// Widens elements `apart` from each other.
fn gather<T: GemmElem>(from: &[T], apart: usize, to: &mut [T::Acc]) {
    to.iter_mut().enumerate().for_each(|(i, to)| *to = from[i * apart].widen());
}

/// Dot-product form: a part's sums of rows whose steps, and B's, are neighbours. Rows of A are `a_row` apart, their Bs `b_row` (0 if they share one).
struct DotRows<'a, T: GemmElem, B> {
    a: &'a [T],
    a_row: usize,
    b: &'a [B],
    b_row: usize,
    steps: usize,
    /// Whether A comes from memory.
    far: bool,
    sums: &'a mut [T::Acc],
}

impl<T: GemmElem, B: GemmElem<Acc = T::Acc>> Kernel for DotRows<'_, T, B> {
    type Output = ();

    #[inline(always)]
    fn run<S: Isa>(self) {
        self.rows::<S, <T::Acc as Float>::Vec<S>>();
    }
}

impl<T: GemmElem, B: GemmElem<Acc = T::Acc>> DotRows<'_, T, B> {
    #[inline(always)]
    fn rows<S: Isa, V: Vector<Elem = T::Acc>>(self)
    where
        T::Acc: Float<Vec<S> = V>,
    {
        let mut rows = [V::zero(); DOT_ROWS];
        if self.far && self.sums.len() == DOT_ROWS {
            // Rows that lie apart, so that each is a stream of memory's that goes on with the next ones.
            for first in 0..DOT_ROWS / TOGETHER {
                let at = |i: usize| first + i * (DOT_ROWS / TOGETHER);
                for (i, sum) in self.inner::<S, V, TOGETHER>(at).into_iter().enumerate() {
                    rows[at(i)] = sum;
                }
            }
        } else {
            for (row, sum) in rows[..self.sums.len()].iter_mut().enumerate() {
                [*sum] = self.inner::<S, V, 1>(|_| row);
            }
        }
        for (sums, rows) in self.sums.chunks_mut(V::LANES).zip(rows.chunks_exact(V::LANES)) {
            if let [sum] = sums {
                *sum = rows[0].reduce_sum();
                continue;
            }
            let mut square = [V::zero(); LANES_MAX];
            square[..V::LANES].copy_from_slice(rows);
            V::transpose(&mut square);
            let mut half = V::LANES / 2;
            while half > 0 {
                for lane in 0..half {
                    square[lane] = square[lane] + square[lane + half];
                }
                half /= 2;
            }
            if sums.len() == V::LANES { square[0].store(sums) } else { square[0].store_partial(sums) }
        }
    }

    /// The chains of the inner products of R rows, those of each added until they fill one vector.
    #[inline(always)]
    fn inner<S: Isa, V: Vector<Elem = T::Acc>, const R: usize>(&self, at: impl Fn(usize) -> usize) -> [V; R]
    where
        T::Acc: Float<Vec<S> = V>,
    {
        let (round, count) = (chains::<T::Acc>(), chains::<T::Acc>() / V::LANES);
        let whole = self.steps / round * round;
        let mut sums = [[V::zero(); CHAINS_MAX]; R];
        let rows: [(&[T], &[B]); R] = each(|i| {
            let (a, b) = (&self.a[at(i) * self.a_row..], &self.b[at(i) * self.b_row..]);
            (&a[..self.steps], &b[..self.steps])
        });
        for start in (0..whole).step_by(round) {
            for (sums, (a, b)) in sums.iter_mut().zip(&rows) {
                let (a, b) = (&a[start..][..round], &b[start..][..round]);
                if R > 1 {
                    for line in (0..round).step_by(LINE_BYTES / size_of::<T>()) {
                        V::prefetch(a[line..].as_ptr().wrapping_byte_add(AHEAD_BYTES).cast());
                    }
                }
                for (j, sum) in sums[..count].iter_mut().enumerate() {
                    let lanes = j * V::LANES..(j + 1) * V::LANES;
                    *sum = T::load::<S>(&a[lanes.clone()]).mul_add(B::load::<S>(&b[lanes]), *sum);
                }
            }
        }
        let mut inner = [V::zero(); R];
        for ((inner, sums), (a, b)) in inner.iter_mut().zip(&mut sums).zip(&rows) {
            let (a, b) = (&a[whole..], &b[whole..]);
            if !a.is_empty() {
                // The steps that the last round lacks are zeros.
                for (j, sum) in sums[..count].iter_mut().enumerate() {
                    let lanes = (j * V::LANES).min(a.len())..((j + 1) * V::LANES).min(a.len());
                    *sum = T::load::<S>(&a[lanes.clone()]).mul_add(B::load::<S>(&b[lanes]), *sum);
                }
            }
            let mut half = count / 2;
            while half > 0 {
                for i in 0..half {
                    sums[i] = sums[i] + sums[i + half];
                }
                half /= 2;
            }
            *inner = sums[0];
        }
        inner
    }
}

/// AXPY form: a part's sums of rows that are neighbours. `chains` has [`AXPY_ROWS`] places for each chain, zero at first; each step adds a
/// multiple of A's column to its chain.
struct AxpyRows<'a, T: GemmElem> {
    a: &'a [T],
    a_step: usize,
    b: &'a [T],
    b_step: usize,
    steps: usize,
    chains: &'a mut [T::Acc],
    sums: &'a mut [T::Acc],
}

impl<T: GemmElem> Kernel for AxpyRows<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run<S: Isa>(self) {
        self.rows::<S, <T::Acc as Float>::Vec<S>>();
    }
}

impl<T: GemmElem> AxpyRows<'_, T> {
    #[inline(always)]
    fn rows<S: Isa, V: Vector<Elem = T::Acc>>(self)
    where
        T::Acc: Float<Vec<S> = V>,
    {
        let (round, rows) = (chains::<T::Acc>(), self.sums.len());
        for step in 0..self.steps {
            let x = V::splat(self.b[step * self.b_step].widen());
            let a = &self.a[step * self.a_step..][..rows];
            let sums = &mut self.chains[step % round * AXPY_ROWS..][..AXPY_ROWS];
            for (i, sum) in sums.chunks_exact_mut(V::LANES).enumerate() {
                let a = &a[(i * V::LANES).min(rows)..((i + 1) * V::LANES).min(rows)];
                V::prefetch(a.as_ptr().wrapping_add(AHEAD * self.a_step).cast());
                T::load::<S>(a).mul_add(x, V::load(sum)).store(sum);
            }
        }
        // The steps that the last round lacks are zeros.
        let last = self.steps % round;
        if last > 0 {
            self.chains[last * AXPY_ROWS..].iter_mut().for_each(|sum| *sum += T::Acc::ZERO);
        }
        let mut half = round / 2;
        while half > 0 {
            let (sums, others) = self.chains.split_at_mut(half * AXPY_ROWS);
            for (sum, other) in sums.chunks_exact_mut(V::LANES).zip(others.chunks_exact(V::LANES)) {
                (V::load(sum) + V::load(other)).store(sum);
            }
            half /= 2;
        }
        self.sums.copy_from_slice(&self.chains[..rows]);
    }
}

#[cfg(test)]
mod tests;
