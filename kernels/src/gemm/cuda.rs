//! Products on a GPU by our own kernels: those that cuBLASLt does not support, and all if it is not installed or not wanted.
//! `warpgroup.cu` does those of 16-bit types on devices of compute capability 9.0, `gemm.cu` the others.

use phalanx_tensor::cuda::{Args, Boxes, Grid, Matrices, Products, Program, Traffic};
use phalanx_tensor::{DType, Result};

use crate::cuda::{File, HOPPER, PRELUDE, type_name};

const FILES: &[File] = &[PRELUDE, ("gemm.cu", include_str!("gemm.cu"))];
const WARPGROUP_FILES: &[File] = &[PRELUDE, HOPPER, ("warpgroup.cu", include_str!("warpgroup.cu"))];
const THREADS: u32 = 256;

/// Computes products of any strides, whose [`phalanx_tensor::cuda::Epilogue`] is plain.
pub(crate) fn multiply_on_gpu(op: &'static str, products: Products<'_>) -> Result<()> {
    if products.c.0.device().gpu()?.capability().0 == 9
        && let [Some(a), Some(b)] = [Side::new(&products, true), Side::new(&products, false)]
    {
        return multiply_by_warpgroups(op, products, [a, b]);
    }
    let Products { count, size: [m, n, k], a, b, c: (c, c_start, c_strides), accumulate, bias, .. } =
        products;
    let gpu = c.device().gpu()?;
    let dtype = a.tensor.dtype();
    // Whether neighbours in memory are neighbours along k: so the kernel reads them side by side.
    let flag = |along_k: bool| if along_k { "1" } else { "0" };
    let defines = [
        ("ELEM", type_name(dtype)),
        ("OUT", type_name(c.dtype())),
        ("A_ALONG_K", flag(!(a.strides[1] == 1 && a.strides[2] != 1))),
        ("B_ALONG_K", flag(b.strides[1] == 1 && b.strides[2] != 1)),
    ];
    let program = Program { name: "gemm.cu", files: FILES, defines: &defines };
    let tile = if dtype == DType::F64 { 64 } else { 128 };
    let clamp = |blocks: usize| blocks.min(usize::from(u16::MAX));
    let grid = Grid::new(n.div_ceil(tile), THREADS).by(clamp(m.div_ceil(tile)), clamp(count));
    let args = Args::new(op, gpu).write_at(c, c_start)?.read_at(a.tensor, a.start)?;
    let mut args = args.read_at(b.tensor, b.start)?.read_if(bias)?;
    let strides = [a.strides, b.strides].concat();
    for number in [m, n, k].into_iter().chain(strides).chain(c_strides).chain([count]) {
        args = args.value(number as u64);
    }
    let args = if accumulate { args.reading_outputs() } else { args };
    let args = args.with_traffic(|t| Traffic { flops: 2 * (count * m * n * k) as u64, ..t });
    gpu.kernel(op, &program, "gemm")?.launch(grid, args.value(u32::from(accumulate)))
}

/// How a factor is copied in boxes: rows (of B columns) by k.
struct Side {
    /// Whether neighbours in memory are neighbours along k; else they are along the rows.
    along_k: bool,
    /// The elements along both, and the number of matrices, of which a shared one counts as one.
    sizes: [u64; 3],
    /// Bytes from one row or step of k to the next, and from one matrix to the next.
    strides: [u64; 2],
}

impl Side {
    /// A factor of 16-bit elements whose rows can be copied: addresses and strides are multiples of 16 bytes.
    fn new(products: &Products<'_>, left: bool) -> Option<Side> {
        let Products { count, size: [m, n, k], a, b, .. } = products;
        let (Matrices { tensor, start, strides: [step, row, column] }, rows) =
            if left { (a, m) } else { (b, n) };
        let (across, along) = if left { (row, column) } else { (column, row) };
        let along_k = *along == 1 && (*across != 1 || *rows == 1);
        let (far, [near_size, far_size]) = if along_k { (across, [k, rows]) } else { (along, [rows, k]) };
        let near_is_one = if along_k { along } else { across } == &1;
        let is_packed = |stride: &usize| stride.is_multiple_of(8);
        let fits = tensor.dtype().size() == 2
            && near_is_one
            && near_size.is_multiple_of(8)
            && is_packed(&(tensor.offset() + start))
            && (*far_size == 1 || *far > 0 && is_packed(far))
            && (*count == 1 || is_packed(step))
            && [*m, *n, *k].iter().all(|&size| size > 0 && size <= i32::MAX as usize);
        let matrices = if *step == 0 { 1 } else { *count };
        let bytes = |stride: usize| 2 * stride.max(8).next_multiple_of(8) as u64;
        fits.then(|| Side {
            along_k,
            sizes: [*near_size, *far_size, matrices].map(|size| size as u64),
            strides: [bytes(*far), bytes(*step)],
        })
    }

    /// Boxes of 64 of k and so many rows, or of pieces of 64 rows.
    fn boxes(&self, rows: u32) -> Boxes {
        let ([near, far, matrices], [row, step]) = (self.sizes, self.strides);
        let window = [64, if self.along_k { rows } else { 64 }];
        Boxes { sizes: [near, far, matrices, 1], strides: [row, step, step], window }
    }
}

/// The same of 16-bit types by warpgroups.
fn multiply_by_warpgroups(op: &'static str, products: Products<'_>, [left, right]: [Side; 2]) -> Result<()> {
    let Products { count, size: [m, n, k], a, b, c: (c, c_start, c_strides), accumulate, bias, .. } =
        products;
    let gpu = c.device().gpu()?;
    // A processor makes one tile at a time. Two narrow ones take a tenth longer than a wide one, by their instructions
    // (tests/sass/kernels.jsonl). The bits are the same.
    let tiles = |columns: usize| m.div_ceil(128) * n.div_ceil(columns);
    let rounds = |columns: usize| (tiles(columns) * count).div_ceil(gpu.processors() as usize);
    let wide = 20 * rounds(256) <= 11 * rounds(128);
    let (columns, stages): (usize, usize) = if wide { (256, 4) } else { (128, 6) };
    let bytes = (stages * ((128 + columns) * 128 + 2 * size_of::<u64>())).next_multiple_of(1024);
    let flag = |on: bool| if on { "1" } else { "0" };
    let (columns_text, bytes_text) = (columns.to_string(), bytes.to_string());
    let defines = [
        ("ELEM", type_name(a.tensor.dtype())),
        ("OUT", type_name(c.dtype())),
        ("A_ALONG_K", flag(left.along_k)),
        ("B_ALONG_K", flag(right.along_k)),
        ("COLUMNS", columns_text.as_str()),
        ("BLOCK_BYTES", bytes_text.as_str()),
    ];
    let program = Program { name: "warpgroup.cu", files: WARPGROUP_FILES, defines: &defines };
    let kernel = gpu.kernel(op, &program, "gemm_warpgroup")?;
    // A grid has a bound along z.
    let most = usize::from(u16::MAX);
    for first in (0..count).step_by(most) {
        let items = (count - first).min(most);
        let args = Args::new(op, gpu).write_at(&mut *c, c_start + first * c_strides[0])?.read_if(bias)?;
        let args = c_strides.iter().fold(args, |args, stride| args.value(*stride as u64));
        let steps = [&left, &right].map(|side| usize::from(side.sizes[2] > 1));
        let args = [m, n, k].into_iter().chain(steps).fold(args, |args, size| args.value(size as i32));
        let args = args.value(u32::from(accumulate));
        let args = args.read_boxes(a.tensor, a.start + first * a.strides[0], &left.boxes(128))?;
        let args = args.read_boxes(b.tensor, b.start + first * b.strides[0], &right.boxes(columns as u32))?;
        let args = if accumulate { args.reading_outputs() } else { args };
        let args = args.with_traffic(|t| Traffic { flops: 2 * (items * m * n * k) as u64, ..t });
        kernel.launch(Grid::new(tiles(columns), 384).by(1, items).shared(bytes), args)?;
    }
    Ok(())
}
