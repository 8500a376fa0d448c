//! Products on a GPU by our own kernel (`gemm.cu`): those that cuBLASLt does not support, and all if it is not
//! installed.

use phalanx_tensor::cuda::{Args, Grid, Products, Program, Traffic};
use phalanx_tensor::{DType, Result};

use crate::cuda::{File, PRELUDE, type_name};

const FILES: &[File] = &[PRELUDE, ("gemm.cu", include_str!("gemm.cu"))];
const THREADS: u32 = 256;

/// Computes products of any strides, whose [`phalanx_tensor::cuda::Epilogue`] is plain.
pub(crate) fn multiply_on_gpu(op: &'static str, products: Products<'_>) -> Result<()> {
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
