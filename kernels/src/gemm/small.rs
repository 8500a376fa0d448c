//! Products of matrices that lie in the caches, on the calling thread: nothing is packed, and steps whose terms are known to be zero
//! are left out. Attention calls these for its tiles: [`gemm_few`] for scores of few queries, [`gemm_small`] for all others.

#![allow(unsafe_code)]

use std::ops::Range;

use phalanx_tensor::even_piece;

use super::element::OneStep;
use super::mat::{MatMut, MatRef};
use super::micro_kernel::run_tile;
use super::tile::{Tile, TileShape, VECTORS};
use crate::simd::{Float, Runner};

/// C = A B, or, if it is to `accumulate`, C += A B in chains that begin with C. B's and C's columns are neighbours and fill whole
/// vectors. A tile of C takes only the `steps(its rows, its columns)` of k; how C is cut into tiles depends on its shape alone.
///
/// # Panics
///
/// If the shapes or strides are not as stated, or `steps` exceed k.
pub(crate) fn gemm_small<T: Float>(
    a: MatRef<'_, T>,
    b: MatRef<'_, T>,
    mut c: MatMut<'_, T>,
    accumulate: bool,
    steps: impl Fn(Range<usize>, Range<usize>) -> Range<usize>,
) {
    let runner = Runner::current();
    let shape = TileShape::of::<T>(runner);
    let (m, n, k) = (c.rows(), c.cols(), a.cols());
    let ((a_row, a_step), (b_step, b_col), (c_row, c_col)) = (a.strides(), b.strides(), c.strides());
    assert!(a.rows() == m && b.rows() == k && b.cols() == n, "matrices that do not fit together");
    assert!(b_col == 1 && c_col == 1 && n.is_multiple_of(shape.lanes), "columns that do not fill vectors");
    let panels = m.div_ceil(shape.rows);
    for col in (0..n).step_by(shape.cols()) {
        let vectors = VECTORS.min((n - col) / shape.lanes);
        for panel in 0..panels {
            let rows = even_piece(m, panels, panel);
            let steps = steps(rows.clone(), col..col + vectors * shape.lanes);
            assert!(steps.start <= steps.end && steps.end <= k, "steps beyond k");
            let out = c.data().as_mut_ptr().wrapping_add(rows.start * c_row + col);
            let mut tile = Tile {
                out_next: rows.len() * c_row,
                steps: steps.len(),
                a: a.data().as_ptr().wrapping_add(rows.start * a_row + steps.start * a_step),
                a_row,
                a_step,
                b: b.data().as_ptr().wrapping_add(steps.start * b_step + col),
                b_step,
                cols: vectors * shape.lanes,
                from: if accumulate { out } else { std::ptr::null() },
                from_row: c_row,
                out,
                out_row: c_row,
                ..Tile::default()
            };
            // SAFETY: rows, columns and steps lie within the matrices, whose bounds were proven when they were made;
            // no two of C's elements share a place, and C is borrowed mutably. The tile's size is at most `shape`'s.
            unsafe { run_tile::<OneStep<T>>(runner, shape.lanes, rows.len(), &mut tile) }
        }
    }
}

/// C = A B for at most a tile's rows and a B whose columns have their steps side by side.
///
/// # Panics
///
/// If the shapes or strides are not as stated, or there are more rows than a tile has.
pub(crate) fn gemm_few<T: Float>(a: MatRef<'_, T>, b: MatRef<'_, T>, mut c: MatMut<'_, T>) {
    let runner = Runner::current();
    let shape = TileShape::of::<T>(runner);
    let (m, n, k) = (c.rows(), c.cols(), a.cols());
    let ((a_row, a_step), (b_step, b_col), (c_row, c_col)) = (a.strides(), b.strides(), c.strides());
    assert!(a.rows() == m && b.rows() == k && b.cols() == n, "matrices that do not fit together");
    assert!(
        b_step == 1 && c_col == 1 && (1..=shape.rows).contains(&m),
        "columns or rows that are not as stated"
    );
    let width = shape.lanes;
    let whole = n - n % width;
    for (first, cols, count) in [(0, width, whole / width), (whole, n - whole, 1)] {
        if cols == 0 || count == 0 {
            continue;
        }
        let mut tile = Tile {
            count,
            b_next: cols * b_col,
            out_next: cols,
            steps: k,
            a: a.data().as_ptr(),
            a_row,
            a_step,
            b: b.data().as_ptr().wrapping_add(first * b_col),
            b_step,
            b_col,
            cols,
            out: c.data().as_mut_ptr().wrapping_add(first),
            out_row: c_row,
            ..Tile::default()
        };
        // SAFETY: as in `gemm_small`; a tile has one column at least, and at most one vector of columns.
        unsafe { run_tile::<OneStep<T>>(runner, shape.lanes, m, &mut tile) }
    }
}
