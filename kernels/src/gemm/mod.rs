//! Matrix products C = A B on a CPU, over slices with any row and column strides: A is m x k, B is k x n.
//!
//! **Bits.** An element of A B is one chain of fused multiply-adds over ascending k, begun at zero, in f32 (f64 for
//! f64). Its bits are those of `for k { sum = a.mul_add(b, sum) }`, whatever the number of rows and columns, strides,
//! blocking, threads, batch, position or instruction set. There are two exceptions. AVX-512's dot product of bf16 pairs
//! (`vdpbf16ps`) flushes subnormal inputs and sums to zero. `gemv` adds in another order, which the number of
//! steps alone decides.
//!
//! **Blocking** (after Goto and van de Geijn):
//!
//! ```text
//!                    n                        a STEP is one value of k
//!              +----+----+----+----+          a TILE is up to 14 rows x 2 vectors of C, whose sums stay in registers
//!            k | panels of B       |            while k runs (kernel.rs)
//!              |    :    :    :    |          a PANEL of A is the rows of one tile, a panel of B its columns; a packed
//!              +----+----+----+----+            panel holds them in the order in which the tile reads them (pack.rs)
//!       k                                     a BLOCK of A is as many panels x steps as the second-level cache holds,
//!    +-------+ +----+----+----+----+            a block of B as many as the third-level cache holds (plan.rs)
//!  m | panel | |tile|tile|tile|tile|          a JOB is some of C's columns; the pool's threads take its rows part by
//!    +-------+ +----+----+----+----+            part, so that a slower thread takes fewer (job.rs)
//!    | of A  | |tile|tile|tile|tile|
//!    +-------+ +----+----+----+----+ C
//!
//!  for each part of a job's rows                          a thread takes the next one when it is done
//!    for each block of columns of B
//!      for each block of steps                            sums go on from C or from scratch
//!        for each block of rows of A
//!          for each panel of B, for each panel of A       or the other way round where B's panel stays near
//!            one tile
//! ```
//!
//! **Packing.** A tile reads an operand in place if no other tile reads it again, or if its order in memory suits: a
//! product of few rows reads B directly, and transposes squares of it in registers where its columns lie along k; a
//! product of few columns is computed as its transpose. Tiny products pack nothing. A matrix times a vector is as fast
//! as the matrix is read. An operand that several tiles read is packed by the first of them, beside its
//! multiplications, where the order in memory allows. Otherwise all threads pack B together before they multiply.
//! Halves (bf16, f16) are widened, or paired for the dot product, when they are packed or loaded.
//!
//! **Last steps.** `Accumulate` and half types sum all of k first and touch C once. In half precision the finished sum
//! is rounded once for a plain product; bias, activation and accumulation each round again, as operations of their own
//! would.
//!
//! ```text
//! mat        the views of matrices            plan      the cut into panels, blocks and jobs: numbers only
//! element    the types of elements            pack      panels in the order in which tiles read them
//! epilogue   bias, activation, writing C      kernel    a tile of C in registers
//! product    one product or a batch           tile      a tile's size, and what it reads and writes
//! job        packs, runs and finishes tiles   tables    the steps of tiles that read offset tables and segments
//! small      operands in the caches           offsets   B by a table of offsets: implicit GEMM for convolutions
//! thin       few rows of halves               segments  A in segments: a convolution's weight gradient
//! column     one column, long sums            speed     the peak that a product can reach
//! cuda       products on a GPU
//! ```

mod cuda;
mod element;
mod epilogue;
mod gemv;
mod macro_kernel;
mod mat;
mod micro_kernel;
mod offsets;
mod pack;
mod peak;
mod plan;
mod product;
mod segments;
mod small;
mod tables;
#[cfg(test)]
mod tests;
mod thin;
mod tile;

use phalanx_tensor::Pool;

pub(crate) use cuda::multiply_on_gpu;
pub(crate) use element::{GemmElem, PanelElem};
pub(crate) use epilogue::{Epilogue, Write};
pub(crate) use gemv::{GEMV_STEPS_MIN, gemv};
pub(crate) use mat::{MatMut, MatRef, SubMatMut};
pub(crate) use offsets::{OffsetTable, gemm_by_offsets, gemm_by_panel};
pub use peak::{peak_bandwidth, peak_flops};
pub(crate) use plan::{is_parallel, share};
pub(crate) use product::Batch;
pub(crate) use segments::{
    SegmentedRows, gemm_segmented, pack_columns, pack_panels, packed_len, steps_in_place,
};
pub(crate) use small::{gemm_few, gemm_small};
pub(crate) use tile::{OffsetStep, StepSegment, TileShape};

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
