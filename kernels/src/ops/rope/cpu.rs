//! The table of cosines and sines, and the rotation of a row.

use phalanx_tensor::Pool;

use crate::rows::{Row, RowKernel, lanes};
use crate::simd::{Float, Isa, Kernel, Vector, dispatch};

/// For each position the cosines and then the sines of `half` angles, the sines times `sense`.
pub(super) fn table<T: Float>(pool: &Pool, positions: &[i64], base: f64, half: usize, sense: f64) -> Vec<T> {
    let slowness: Vec<f64> = (0..half).map(|i| base.powf(-(i as f64) / half as f64)).collect();
    let mut table = vec![T::ZERO; positions.len() * 2 * half];
    let rows = (4096 / half).max(1);
    pool.for_each_chunk(&mut table, rows * 2 * half, |piece, part| {
        let mut row = vec![0.0; 2 * half];
        for (i, to) in part.chunks_exact_mut(2 * half).enumerate() {
            let position = positions[piece * rows + i] as f64;
            dispatch(Angles { position, slowness: &slowness, sense, row: &mut row });
            to.iter_mut().zip(&row).for_each(|(to, &x)| *to = T::from_f64(x));
        }
    });
    table
}

struct Angles<'a> {
    position: f64,
    slowness: &'a [f64],
    sense: f64,
    row: &'a mut [f64],
}

impl Kernel for Angles<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Isa>(self) {
        let (cos, sin) = self.row.split_at_mut(self.slowness.len());
        let (position, sense) = (S::F64::splat(self.position), S::F64::splat(self.sense));
        lanes::map([self.slowness], cos, |[x]: [S::F64; 1]| (x * position).cos());
        lanes::map([self.slowness], sin, |[x]: [S::F64; 1]| (x * position).sin() * sense);
    }
}

pub(super) struct Rotate<'a, T> {
    pub(super) table: &'a [T],
    /// Rows of one head, and rows for which the positions are the same ones.
    pub(super) length: usize,
    pub(super) shared: usize,
}

impl<T: Float> RowKernel<T, 1> for Rotate<'_, T> {
    #[inline(always)]
    fn run<S: Isa>(&self, row: Row<'_, T, 1>) {
        let ([x], half) = (row.x, row.x[0].len() / 2);
        let at = row.index / self.shared * self.length + row.index % self.length;
        let (cos, sin) = self.table[at * 2 * half..][..2 * half].split_at(half);
        let ((a, b), (y, z)) = (x.split_at(half), row.y.split_at_mut(half));
        lanes::map([a, b, cos, sin], y, |[a, b, cos, sin]: [T::Vec<S>; 4]| a * cos - b * sin);
        lanes::map([a, b, cos, sin], z, |[a, b, cos, sin]: [T::Vec<S>; 4]| b * cos + a * sin);
    }
}
