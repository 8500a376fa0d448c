//! The launches of `each.cu`.

use phalanx_tensor::cuda::{Args, Grid, Program, Scratch};
use phalanx_tensor::{DType, Result, Tensor};

use super::Frame;
use crate::cuda::{File, PRELUDE, type_name};
use crate::wide::wide_dtype;

/// Elements of any type as numbers.
pub(crate) const VALUE: File = ("value.cuh", include_str!("value.cuh"));
const FILES: &[File] = &[PRELUDE, VALUE, ("each.cu", include_str!("each.cu"))];
/// As many blocks as keep a large device busy, whatever the device.
const BLOCKS: usize = 1024;
/// Bytes of a part's result.
const BEST_BYTES: usize = 16;

/// What elements are merged to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// The sum of integers, in i64.
    Add,
    /// The product, in f64 or i64.
    Multiply,
    /// The largest, and the first place that it is at.
    Largest,
    /// The smallest.
    Smallest,
}

impl Kind {
    /// What elements of a dtype are compared or merged in.
    fn value(self, dtype: DType) -> DType {
        match self {
            _ if !dtype.is_float() => DType::I64,
            Kind::Add | Kind::Multiply => DType::F64,
            Kind::Largest | Kind::Smallest => wide_dtype(dtype),
        }
    }
}

/// The counterpart of [`super::fold_each`]: sets `values`, and `places` (i64) if they are wanted.
pub(crate) fn each(
    op: &'static str,
    frame: &Frame,
    kind: Kind,
    values: &mut Tensor,
    mut places: Option<&mut Tensor>,
) -> Result<()> {
    let (gpu, dtype) = (frame.view.device().gpu()?, frame.view.dtype());
    let (n, inner, outputs) = (frame.n, frame.inner, frame.outputs());
    let (entry, threads, blocks, least) = match inner {
        1 if n <= 256 => ("rows", 32, outputs, n),
        1 => ("rows", 256, outputs, 2048),
        _ => ("columns", 256, outputs.div_ceil(256), 64),
    };
    let parts = (BLOCKS / blocks.max(1)).clamp(1, n.div_ceil(least.max(1)).max(1));
    let part_len = n.div_ceil(parts).max(1);
    let parts = n.div_ceil(part_len).max(1);
    let name = format!("{kind:?}");
    let defines = [
        ("STORED", stored(dtype)),
        ("VALUE", type_name(kind.value(dtype))),
        ("KIND", &name),
        ("RESULT", stored(values.dtype())),
    ];
    let program = Program { name: "each.cu", files: FILES, defines: &defines };
    let merged = (parts > 1).then(|| gpu.scratch(op, outputs * parts * BEST_BYTES)).transpose()?;
    let gathered = (!frame.view.is_contiguous()).then(|| Scratch::of(op, &frame.view)).transpose()?;
    let args = Args::new(op, gpu).write(values)?.write_if(places.as_deref_mut())?;
    let args = match &merged {
        Some(merged) => args.scratch(merged),
        None => args.value(0u64),
    };
    let args = match &gathered {
        Some(gathered) => args.scratch(gathered),
        None => args.read(&frame.view)?,
    };
    let args = args.value(n as u64).value(part_len as u64);
    let args = if inner == 1 { args } else { args.value(inner as u64).value(outputs as u64) };
    gpu.kernel(op, &program, entry)?.launch(Grid::new(blocks, threads).by(parts, 1), args)?;
    let Some(merged) = merged else { return Ok(()) };
    let args = Args::new(op, gpu).write(values)?.write_if(places)?.value(0u64).scratch(&merged);
    let args = args.value(parts as u64).value(outputs as u64);
    gpu.kernel(op, &program, "finish")?.launch(Grid::new(outputs.div_ceil(4), 128), args)
}

/// The type that elements are stored in.
pub(crate) fn stored(dtype: DType) -> &'static str {
    if dtype == DType::Bool { "u8" } else { type_name(dtype) }
}
