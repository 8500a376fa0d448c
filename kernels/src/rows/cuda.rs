//! Rows on a GPU: [`Team`], the threads that work on a row; [`Operand`], where the rows of a tensor lie; [`RowProgram`], the CUDA files of an
//! operation.

use phalanx_tensor::cuda::{Args, Gpu, Grid, Kernel, Program, Scratch};
use phalanx_tensor::{DType, Loops, Result, Tensor};

use crate::cuda::{File, type_name};

/// The CUDA file with teams of threads, a team for each row.
pub(crate) const ROWS: File = ("rows.cuh", include_str!("rows.cuh"));
/// The CUDA file with the standardisation of rows, for normalisations.
pub(crate) const STANDARD: File = ("standard.cuh", include_str!("standard.cuh"));

/// Bytes that a thread loads at once.
pub(crate) const PACKET_BYTES: usize = 16;
/// Warps of a block, where a team is a warp.
const WARPS: usize = 4;
/// The numbers of packets of a row that a thread can keep in registers.
const KEPT: [usize; 5] = [1, 2, 3, 4, 6];

/// A program of kernels over rows.
#[derive(Clone, Copy)]
pub(crate) struct RowProgram {
    /// The name of the operation's file.
    pub(crate) name: &'static str,
    /// The prelude, [`ROWS`], other files that it needs, and the operation's file.
    pub(crate) files: &'static [File],
}

/// A [`RowProgram`] of one file `$file`, beside the Rust file that names it, and what it needs besides.
macro_rules! row_program {
    ($file:literal $(, $more:expr)*) => {
        crate::rows::cuda::RowProgram {
            name: $file,
            files: &[
                crate::cuda::PRELUDE,
                crate::rows::cuda::ROWS,
                $($more,)*
                ($file, include_str!($file)),
            ],
        }
    };
}
pub(crate) use row_program;

/// The threads that work on rows of a width. Width and dtype alone decide, and so they decide the order of sums.
#[derive(Clone, Copy)]
pub(crate) struct Team {
    dtype: DType,
    pub(crate) rows: usize,
    threads: usize,
    /// Packets of its row that each thread keeps; 0 if rows are read again for every pass.
    pub(crate) packets: usize,
}

impl Team {
    pub(crate) fn new(dtype: DType, rows: usize, width: usize) -> Team {
        Team::keeping(dtype, rows, width, 32)
    }

    /// A team whose threads keep at most `elements` elements each.
    pub(crate) fn keeping(dtype: DType, rows: usize, width: usize, elements: usize) -> Team {
        let len = PACKET_BYTES / dtype.size();
        let packets = |threads: usize| {
            let needed = width.div_ceil(len).div_ceil(threads);
            KEPT.into_iter().find(|&kept| kept >= needed && kept * len <= elements)
        };
        let kept = [32, 256].into_iter().find_map(|threads| Some((threads, packets(threads)?)));
        let (threads, packets) = kept.unwrap_or((512, 0));
        Team { dtype, rows, threads, packets }
    }

    /// Rows that a block works on at a time.
    pub(crate) fn rows_a_block(&self) -> usize {
        if self.threads == 32 { WARPS } else { 1 }
    }

    /// A block for each of the rows, or for several.
    pub(crate) fn grid(&self) -> Grid {
        self.blocks(self.rows.div_ceil(self.rows_a_block()))
    }

    /// So many blocks.
    pub(crate) fn blocks(&self, blocks: usize) -> Grid {
        Grid::new(blocks, (self.threads * self.rows_a_block()) as u32)
    }

    /// A program's kernel for this team.
    pub(crate) fn kernel(
        &self,
        op: &'static str,
        gpu: &'static Gpu,
        program: RowProgram,
        entry: &str,
        own: &[(&str, &str)],
    ) -> Result<Kernel> {
        let (threads, packets) = (self.threads.to_string(), self.packets.to_string());
        let mut defines = vec![("ELEMENT", type_name(self.dtype)), ("TEAM", &threads), ("PACKETS", &packets)];
        defines.extend(own);
        gpu.kernel(op, &Program { name: program.name, files: program.files, defines: &defines }, entry)
    }
}

/// A tensor as contiguous rows: `rows.cuh`'s `Rows`.
pub(crate) enum Operand<'a> {
    Lying { tensor: &'a Tensor, stride: usize },
    Gathered { scratch: Scratch, width: usize },
}

impl<'a> Operand<'a> {
    /// The rows of `width` elements that the last dimensions make; a contiguous copy if they do not lie so.
    pub(crate) fn of(op: &'static str, tensor: &'a Tensor, width: usize) -> Result<Operand<'a>> {
        if tensor.is_contiguous() {
            return Ok(Operand::Lying { tensor, stride: width });
        }
        let loops = Loops::new(tensor.shape(), [tensor.strides()]);
        match (loops.sizes(), loops.strides()) {
            ([_, inner], [[stride], [1]]) if *inner == width => {
                Ok(Operand::Lying { tensor, stride: *stride })
            }
            _ => Ok(Operand::Gathered { scratch: Scratch::of(op, tensor)?, width }),
        }
    }

    /// The argument: a pointer and a stride.
    pub(crate) fn put<'b>(&'b self, args: Args<'b>) -> Result<Args<'b>> {
        match self {
            Operand::Lying { tensor, stride } => Ok(args.read(tensor)?.value(*stride as u64)),
            Operand::Gathered { scratch, width } => Ok(args.scratch(scratch).value(*width as u64)),
        }
    }
}

/// Sets the rows of `y`, which lie together, to `entry` of the inputs' rows.
pub(crate) fn map<const N: usize>(
    op: &'static str,
    (program, entry): (RowProgram, &str),
    inputs: [&Tensor; N],
    y: &mut Tensor,
) -> Result<()> {
    let gpu = y.device().gpu()?;
    let width = y.size(-1)?;
    let team = Team::new(y.dtype(), y.numel() / width.max(1), width);
    let operands = inputs.into_iter().map(|x| Operand::of(op, x, width)).collect::<Result<Vec<_>>>()?;
    let mut args = Args::new(op, gpu).write(y)?;
    for operand in &operands {
        args = operand.put(args)?;
    }
    let args = args.value(team.rows as u64).value(width as u64);
    team.kernel(op, gpu, program, entry, &[])?.launch(team.grid(), args)
}
