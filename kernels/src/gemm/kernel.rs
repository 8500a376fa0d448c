//! The microkernel: a tile of C held in registers while k runs.
//!
//! A tile is H rows by W vectors of columns. Each of its elements is one chain of fused multiply-adds over ascending k,
//! begun at zero (or at the sum of the k before, brought from memory): the order is the same for every tile size and
//! instruction set, which is what makes an element's bits independent of where it lies.
//!
//! Registers on AVX-512: 14 x 2 sums, 2 vectors of B, 1 broadcast of A; a step costs 28 FMAs and 16 loads.

#![allow(unsafe_code)]

use super::element::Place;
use crate::simd::{Float, Isa, Kernel, Runner, Vector};

/// The most rows a tile has on any instruction set.
const ROWS_MAX: usize = 14;
/// How many steps ahead B is brought near.
const AHEAD: usize = 12;
/// A full tile's columns in vectors.
pub(super) const VECTORS: usize = 2;

/// A full tile's size on an instruction set.
#[derive(Clone, Copy)]
pub(crate) struct TileShape {
    pub(crate) rows: usize,
    pub(crate) lanes: usize,
}

impl TileShape {
    pub(super) fn of<T: Float>(runner: Runner) -> TileShape {
        struct Ask<T>(std::marker::PhantomData<T>);
        impl<T: Float> Kernel for Ask<T> {
            type Output = TileShape;

            #[inline(always)]
            fn run<S: Isa>(self) -> TileShape {
                TileShape { rows: rows::<S>(), lanes: T::Vec::<S>::LANES }
            }
        }
        runner.run(Ask::<T>(std::marker::PhantomData))
    }

    pub(crate) fn cols(self) -> usize {
        VECTORS * self.lanes
    }
}

/// A full tile's rows: all registers but a few hold sums.
const fn rows<S: Isa>() -> usize {
    (S::REGISTERS - 4) / VECTORS
}

/// One tile's work. A's places: `a[i * a_row + k * a_step]`; B's: `b[k * b_step + j]`.
#[derive(Clone, Copy)]
pub(super) struct Tile<T> {
    /// How many places k runs over.
    pub(super) steps: usize,
    pub(super) a: *const T,
    pub(super) a_row: usize,
    pub(super) a_step: usize,
    pub(super) b: *const T,
    pub(super) b_step: usize,
    /// The sums of the steps before: `from[i * from_row + j]`. Null: there are none.
    pub(super) from: *const T,
    pub(super) from_row: usize,
    /// Added to each row at the end. Null: nothing.
    pub(super) bias: *const T,
    /// Where the sums go: `out[i * out_row + j]`.
    pub(super) out: *mut T,
    pub(super) out_row: usize,
    /// Whether they are added to what is there.
    pub(super) add: bool,
    /// What the next tile writes, brought near meanwhile; any address.
    pub(super) next_out: *const T,
}

/// Computes a tile of `rows` by `vectors`. A is packed where `a_row` is 1 and `a_step` is `rows`.
///
/// # Safety
///
/// For i < rows, j < vectors * lanes and k < steps, the places named at [`Tile`] are valid to read, and to write for
/// `out` (which nobody else touches), and `rows` is at most the instruction set's [`TileShape`], `vectors` 1 or 2.
pub(super) unsafe fn run_tile<P: Place>(runner: Runner, rows: usize, vectors: usize, tile: Tile<P::Acc>) {
    macro_rules! by_rows {
        ($($n:literal)*) => {
            match rows {
                $($n => run_rows::<P, $n>(runner, vectors, tile),)*
                _ => unreachable!("a tile has 1 to {ROWS_MAX} rows, not {rows}"),
            }
        };
    }
    by_rows!(1 2 3 4 5 6 7 8 9 10 11 12 13 14)
}

#[inline]
fn run_rows<P: Place, const H: usize>(runner: Runner, vectors: usize, tile: Tile<P::Acc>) {
    let packed = tile.a_row == 1 && tile.a_step == H;
    match (vectors, packed) {
        (1, true) => P::run(runner, Sized::<P, H, 1, true>(tile)),
        (1, false) => P::run(runner, Sized::<P, H, 1, false>(tile)),
        (_, true) => P::run(runner, Sized::<P, H, VECTORS, true>(tile)),
        (_, false) => P::run(runner, Sized::<P, H, VECTORS, false>(tile)),
    }
}

/// A tile whose size is known to the compiler.
struct Sized<P: Place, const H: usize, const W: usize, const PACKED: bool>(Tile<P::Acc>);

impl<P: Place, const H: usize, const W: usize, const PACKED: bool> Kernel for Sized<P, H, W, PACKED> {
    type Output = ();

    #[inline(always)]
    fn run<S: Isa>(self) {
        // Sizes that an instruction set has no registers for are never asked for; this keeps them uncompiled.
        if const { H <= rows::<S>() } {
            // SAFETY: `run_tile`'s contract; the type is made only there.
            unsafe { compute::<P, S, <P::Acc as Float>::Vec<S>, H, W, PACKED>(self.0) }
        }
    }
}

/// # Safety
///
/// [`run_tile`]'s.
#[inline(always)]
unsafe fn compute<P, S, V, const H: usize, const W: usize, const PACKED: bool>(tile: Tile<P::Acc>)
where
    P: Place<Acc: Float<Vec<S> = V>>,
    S: Isa,
    V: Vector<Elem = P::Acc>,
{
    let mut sums = [[V::zero(); W]; H];
    if !tile.from.is_null() {
        for (i, row) in sums.iter_mut().enumerate() {
            for (j, sum) in row.iter_mut().enumerate() {
                // SAFETY: a place of the sums before.
                *sum = unsafe { load(tile.from.add(i * tile.from_row + j * V::LANES)) };
            }
        }
    }
    let (mut a, mut b) = (tile.a, tile.b);
    let a_step = if PACKED { H } else { tile.a_step };
    for step in 0..tile.steps {
        if step < H {
            for j in 0..W {
                V::prefetch(tile.next_out.wrapping_add(step * tile.out_row + j * V::LANES));
            }
        }
        let mut b_row = [V::zero(); W];
        for (j, lanes) in b_row.iter_mut().enumerate() {
            // SAFETY: B's places are valid.
            *lanes = unsafe { load(b.add(j * V::LANES)) };
            V::prefetch(b.wrapping_add(AHEAD * tile.b_step + j * V::LANES));
        }
        for (i, row) in sums.iter_mut().enumerate() {
            // SAFETY: A's places are valid.
            let x = V::splat(unsafe { *a.add(if PACKED { i } else { i * tile.a_row }) });
            for (sum, lanes) in row.iter_mut().zip(b_row) {
                *sum = P::add::<S>(x, lanes, *sum);
            }
        }
        // Wrapping: after the last step they point beyond the matrices and are not used.
        a = a.wrapping_add(a_step);
        b = b.wrapping_add(tile.b_step);
    }
    let mut bias = [V::zero(); W];
    if !tile.bias.is_null() {
        for (j, bias) in bias.iter_mut().enumerate() {
            // SAFETY: one of the bias's places.
            *bias = unsafe { load(tile.bias.add(j * V::LANES)) };
        }
    }
    for (i, row) in sums.iter().enumerate() {
        for (j, &sum) in row.iter().enumerate() {
            // SAFETY: a place of the result, nobody else's.
            let out = unsafe {
                std::slice::from_raw_parts_mut(tile.out.add(i * tile.out_row + j * V::LANES), V::LANES)
            };
            // Adding a bias of zero would turn -0 into 0.
            let sum = if tile.bias.is_null() { sum } else { sum + bias[j] };
            (if tile.add { V::load(out) + sum } else { sum }).store(out);
        }
    }
}

/// # Safety
///
/// A vector's elements from `src` on must be valid to read.
#[inline(always)]
unsafe fn load<V: Vector>(src: *const V::Elem) -> V {
    // SAFETY: the caller's.
    V::load(unsafe { std::slice::from_raw_parts(src, V::LANES) })
}
