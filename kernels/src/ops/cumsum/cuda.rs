//! The launches of `cumsum.cu`.

use phalanx_tensor::cuda::{Args, Grid, Program};
use phalanx_tensor::{Result, Tensor};

use super::{Merge, Scan};
use crate::cuda::{File, PRELUDE};
use crate::reduce::{VALUE, stored};

const FILES: &[File] = &[PRELUDE, VALUE, ("cumsum.cu", include_str!("cumsum.cu"))];

/// `x` lies together, and has elements.
pub(super) fn run(scan: &Scan, merge: Merge, x: &Tensor, out: &mut Tensor) -> Result<()> {
    let (gpu, Scan { op, n, inner, reversed }) = (x.device().gpu()?, *scan);
    let value = if x.dtype().is_float() { "f64" } else { "i64" };
    let types = [("STORED", stored(x.dtype())), ("VALUE", value), ("RESULT", stored(out.dtype()))];
    let defines = [types[0], types[1], types[2], ("MERGE", merge.text), ("FIRST", merge.first)];
    let program = Program { name: "cumsum.cu", files: FILES, defines: &defines };
    let lines = x.numel() / n;
    let args = Args::new(op, gpu).write(out)?.read(x)?.value(n as u64).value(u64::from(reversed));
    match inner {
        1 => gpu.kernel(op, &program, "rows")?.launch(Grid::new(lines, 256), args),
        _ => {
            let args = args.value(inner as u64).value(lines as u64);
            gpu.kernel(op, &program, "columns")?.launch(Grid::new(lines.div_ceil(256), 256), args)
        }
    }
}
