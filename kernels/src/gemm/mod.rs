//! Matrix products over slices with any row and column strides.
//!
//! The rule that everything here keeps: an element of A B is one chain of fused multiply-adds over ascending k, begun at
//! zero, in f32 (f64 for f64). Its bits are those of `for k { sum = a.mul_add(b, sum) }`, whatever the number of rows
//! and columns, strides, blocking, threads, batch, tile position or instruction set. One exception: AVX-512's dot product
//! of bf16 pairs, used where the CPU has it, takes subnormal elements for zero and makes subnormal sums zero. A column that is
//! asked for as such (`gemm_column`) has another order, which the number of steps alone decides.
//!
//! ```text
//! mat        the views        plan      the cut, pure numbers
//! element    the types        pack      panels in the order tiles read them
//! epilogue   the last steps   kernel    a tile of C in registers
//! scratch    working memory   finish    a tile's sums to C
//! batch      several at once  product   one of them, its jobs
//! tile       size and work    job       packs, runs and finishes its tiles
//! small      in the caches    turned    the steps of a B that lies in columns
//! column     few long sums    thin      few rows of halves
//! cuda       on a GPU         places    a B in planes, as convolutions have it
//! cells      for threads      runs      an A in runs, as their weight's gradient has it
//! parts      taken in turns   tables    the steps of these two
//! speed      what a product can reach at most
//! ```
//!
//! What is read once is read where it lies: a product of few rows takes B straight into a tile, turned in registers where
//! its columns lie along k, and one of few columns is done as its transpose. A tile of few rows is wide, for long runs and
//! many chains. So tiny products pack nothing, and a matrix by a vector goes as fast as the matrix is read. Halves are widened
//! or paired in registers then. What is read
//! again is packed by the first tile that reads it, where the order in memory allows; else a B that all threads read is packed
//! once, by all of them.
//!
//! `Accumulate` and half types sum all of k first and touch C once. In half precision the finished sum is rounded once
//! for a plain product; bias, activation and accumulation each round again, as they would as operations of their own.

mod column;
mod cuda;
mod element;
mod epilogue;
mod job;
mod kernel;
mod mat;
mod pack;
mod places;
mod plan;
mod product;
mod runs;
mod small;
mod speed;
#[cfg(test)]
mod tests;
mod thin;
mod tile;

use phalanx_tensor::Pool;

pub(crate) use crate::scratch::{Scratch, with_scratch};
pub(crate) use column::{COLUMN_STEPS_MIN, gemm_column};
pub(crate) use cuda::multiply_on_gpu;
pub(crate) use element::{GemmElem, Place};
pub(crate) use epilogue::{Epilogue, Write};
pub(crate) use mat::Cell;
pub(crate) use mat::{MatMut, MatRef};
pub(crate) use places::{Places, Step, gemm_by_panel, gemm_by_places};
pub(crate) use plan::{is_parallel, share};
pub(crate) use product::Batch;
pub(crate) use runs::{Rows, Run, gemm_by_rows, pack_columns, pack_panels, packed_len, steps_in_place};
pub(crate) use small::{gemm_few, gemm_small};
pub use speed::{peak_bandwidth, peak_flops};
pub(crate) use tile::TileShape;

use crate::simd::{Float, Runner};

/// The size of the tiles that sums of type `T` are kept in. Operands that lie as a tile reads them, `rows` of A next to
/// each other and [`TileShape::cols`] of B, are read in place.
pub(crate) fn tile_shape<T: Float>() -> TileShape {
    TileShape::of::<T>(Runner::current())
}

/// [`gemm_batched`] of one product.
#[cfg(test)]
fn gemm<T: GemmElem>(
    pool: &Pool,
    a: MatRef<'_, T>,
    b: MatRef<'_, T>,
    c: MatMut<'_, T>,
    write: Write,
    epilogue: Epilogue<'_, T>,
) {
    gemm_batched(Some(pool), Batch { count: 1, a: 0, b: 0, c: 0 }, a, b, c, write, epilogue);
}

/// C = A B, or C += A B, with an epilogue on the product, for each item of a batch; `a`, `b` and `c` are the first item's. The bits
/// are those of each product alone. Without a pool, this thread works alone.
///
/// # Panics
///
/// If the shapes do not fit together, an item lies outside its slice, or two items share a place in C.
pub(crate) fn gemm_batched<T: GemmElem>(
    pool: Option<&Pool>,
    batch: Batch,
    a: MatRef<'_, T>,
    b: MatRef<'_, T>,
    c: MatMut<'_, T>,
    write: Write,
    epilogue: Epilogue<'_, T>,
) {
    product::run(Runner::current(), pool, batch, a, b, c, (write, epilogue), None);
}

/// C = A B with an epilogue, one of a series of products of one shape by one B. `kept` is empty before the first; if B has to be
/// packed, it holds the panels from then on, about as many bytes as B.
///
/// # Panics
///
/// If the shapes do not fit together, or `kept` is another series'.
pub(crate) fn gemm_again<T: GemmElem>(
    pool: &Pool,
    a: MatRef<'_, T>,
    b: MatRef<'_, T>,
    c: MatMut<'_, T>,
    epilogue: Epilogue<'_, T>,
    kept: &mut Vec<T::Acc>,
) {
    let batch = Batch { count: 1, a: 0, b: 0, c: 0 };
    product::run(Runner::current(), Some(pool), batch, a, b, c, (Write::Store, epilogue), Some(kept));
}
