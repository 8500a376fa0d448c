//! Matrix products C = A B on a CPU, over slices with any row and column strides: A is m x k, B is k x n, C is m x n.
//!
//! `matmul` and `linear` call [`gemm_batched`] and [`gemv()`], the LSTM [`gemm_again`]; convolutions call [`gemm_by_offsets`], [`gemm_by_panel`] and
//! [`gemm_segmented`]; attention calls [`gemm_small`] and [`gemm_few`]. All of them end in the micro-kernel (`micro_kernel.rs`).
//!
//! **Bits.** An element of A B is one chain of fused multiply-adds over ascending k, begun at zero, in f32 (f64 for
//! f64). Its bits are those of `for k { sum = a.mul_add(b, sum) }`, whatever the number of rows and columns, strides,
//! blocking, threads, batch, position or instruction set. There are three exceptions. AVX-512's dot product of bf16 pairs
//! (`vdpbf16ps`) flushes subnormal inputs and sums to zero. AMX's tiles do so too, and take bf16 in blocks of 32 steps: two chains, of even and
//! of odd steps, are added to each other and then to the sum before (`matmul`, `linear` and the LSTM; convolutions have chains).
//! [`gemv()`] adds in another order, which k alone decides.
//!
//! **Blocking** after BLIS (Goto and van de Geijn: Anatomy of high-performance matrix multiplication, 2008; Van Zee and van de Geijn: BLIS,
//! 2015). The words of this folder, with BLIS's names of the sizes:
//!
//! ```text
//!                    n                        STEP         one value of k
//!              +----+----+----+----+          TILE         mr x nr elements of C: up to 14 rows x 2 vectors. The micro-kernel keeps
//!            k | panels of B       |                       their sums in registers while k runs (micro_kernel.rs)
//!              |    :    :    :    |          PANEL        of A: the mr rows of a tile; of B: its nr columns. A packed panel has its
//!       k      +----+----+----+----+                       elements in the order in which the micro-kernel reads them (pack.rs)
//!    +-------+ +----+----+----+----+          BLOCK of A   mc x kc: as many panels and steps as fit the L2 cache (plan.rs)
//!  m | panel | |tile|tile|tile|tile|          BLOCK of B   kc x nc: as many as fit the L3 cache
//!    +-------+ +----+----+----+----+          CHUNK        some panels of rows of a block's columns, with all of k: what a thread takes
//!    | of A  | |tile|tile|tile|tile|                       at a time; a slower thread takes fewer (plan.rs)
//!    +-------+ +----+----+----+----+ C        MACRO-KERNEL the loops around the micro-kernel, below (macro_kernel.rs)
//!
//!  for each range of C's columns                            ranges are computed by different threads
//!    for each chunk: rows of a block of columns              a thread takes the next chunk when it is done
//!      for each block of steps (kc)                          sums go on from C or from scratch memory
//!        for each block of rows of A (mc)
//!          for each panel of A, for each panel of B          or the other way round, where B's panel stays in the L1 cache
//!            the micro-kernel computes a tile
//! ```
//!
//! **Packing.** A tile reads an operand in place if no other tile reads it again, or if its order in memory suits: a
//! product of few rows reads B directly, and transposes squares of it in registers where its columns lie along k; a
//! product of few columns is computed as its transpose. Tiny products pack nothing. A matrix times a vector is as fast
//! as the matrix is read. If several tiles read an operand whose order in memory allows it, the first of these tiles packs it, by stores
//! beside its multiplications. Otherwise all threads pack B together before they multiply; or a thread with all of a prompt's rows packs a panel
//! of weights, lets all rows meet it, and prefetches the next panel's weights meanwhile. A B that lies in panels of a tile's width
//! ([`MatRef::in_panels`]) is read where it is, halves by panels that are widened, if not by tiles.
//! Halves (bf16, f16) are widened, or paired for the dot product, when they are packed or loaded.
//!
//! **Epilogue.** `Accumulate` and half types sum all of k first and touch C once. In half precision the finished sum
//! is rounded once for a plain product; bias, activation and accumulation each round again, as operations of their own
//! would.
//!
//! ```text
//! product        one product or a batch: chooses the way      mat        views of matrices, bounds proven once
//! plan           sizes of panels and blocks                   element    the types of elements and of their sums
//! chunks         what threads take in turns
//! macro_kernel   packs blocks, runs tiles, finishes them      epilogue   bias, activation, rounding, writing C
//! micro_kernel   a tile of C in registers                     pack       panels of A and B
//! tile           a tile's size and operands                   loops      the micro-kernel's for transposed B and the two below
//! small          operands that fit the caches; attention      offsets    B by a table of offsets: implicit GEMM of convolutions
//! shared_a       one A by several Bs
//! thin           up to 4 rows; thin_panels: by panels         segments   A by segments: a convolution's weight gradient
//! amx            bf16 by tiles of matrices, on CPUs that have them; amx_panels: by panels
//! gemv           one column, long sums                        peak       measures the peak that a product can reach
//! cuda           products on a GPU without cuBLASLt
//! ```

#[cfg(target_arch = "x86_64")]
mod amx;
#[cfg(target_arch = "x86_64")]
mod amx_panels;
mod chunks;
mod cuda;
mod element;
mod epilogue;
mod gemv;
mod loops;
mod macro_kernel;
mod mat;
mod micro_kernel;
mod offsets;
mod pack;
mod peak;
mod plan;
mod product;
mod segments;
mod shared_a;
mod small;
#[cfg(test)]
mod tests;
mod thin;
mod thin_panels;
mod tile;

use phalanx_tensor::{Pool, bf16};

pub(crate) use chunks::shares;
pub(crate) use cuda::multiply_on_gpu;
pub(crate) use element::{GemmElem, PanelElem};
pub(crate) use epilogue::{Epilogue, Write};
pub(crate) use gemv::{GEMV_STEPS_MIN, gemv};
pub(crate) use mat::{MatMut, MatRef, SubMatMut};
pub(crate) use offsets::{OffsetTable, gemm_by_offsets, gemm_by_panel};
pub use peak::{peak_bandwidth, peak_flops, sustained_flops};
pub(crate) use plan::is_parallel;
pub(crate) use product::Batch;
pub(crate) use segments::{
    SegmentedRows, gemm_segmented, pack_columns, pack_panels, packed_len, steps_in_place,
};
pub(crate) use shared_a::OfSharedA;
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

/// C = A B + bias for each of several Bs in [panels](MatRef::in_panels). Where A has to be packed, it is packed once. The bits are those of each
/// product alone.
///
/// # Panics
///
/// If the shapes do not fit together, or a B is not in panels.
pub(crate) fn gemm_each<T: GemmElem>(pool: Option<&Pool>, a: MatRef<'_, T>, items: &mut [OfSharedA<'_, T>]) {
    shared_a::run_each(Runner::current(), pool, a, items);
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

/// Where a step lies in its [group](GemmElem::GROUP) of so many: dot products take the first one last, tiles as steps lie.
pub(crate) fn place_in_group(runner: Runner, group: usize, nth: usize) -> usize {
    if runner.for_tiles().is_some() { nth } else { group - 1 - nth }
}

/// Whether this CPU makes products of bf16 by tiles, in their order of sums.
pub(crate) fn has_tiles() -> bool {
    Runner::current().for_tiles().is_some()
}

/// [`Write::Continue`] of bf16 as it is, in the tiles' order, where [`has_tiles`].
///
/// # Panics
///
/// If the shapes do not fit together, or there are no tiles.
pub(crate) fn gemm_continue_by_tiles(
    pool: Option<&Pool>,
    a: MatRef<'_, bf16>,
    b: MatRef<'_, bf16>,
    c: MatMut<'_, f32>,
) {
    let packer = Runner::current().for_tiles().expect("the caller asked whether it has tiles");
    #[cfg(target_arch = "x86_64")]
    amx::continue_sums(packer, pool, a, b, c);
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (packer, pool, a, b, c);
}
