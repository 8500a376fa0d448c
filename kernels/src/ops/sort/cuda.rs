//! The launches of `sort.cu`.

use phalanx_tensor::cuda::{Args, Grid, Program};
use phalanx_tensor::{Result, Tensor};

use crate::cuda::{File, PRELUDE};
use crate::reduce::stored;

const FILES: &[File] = &[PRELUDE, ("sort.cu", include_str!("sort.cu"))];
/// Pairs of a tile at most; half as many threads sort it.
const TILE_MAX: usize = 1024;
/// Bytes of a pair.
const ITEM_BYTES: usize = 16;

/// The first `k` of each line of `n`, which are the last dimension and lie together; there are elements.
pub(super) fn arrange(
    op: &'static str,
    lines: &Tensor,
    [n, k]: [usize; 2],
    descending: bool,
    [values, indices]: [&mut Tensor; 2],
) -> Result<()> {
    let gpu = lines.device().gpu()?;
    let defines = [("STORED", stored(lines.dtype()))];
    let program = Program { name: "sort.cu", files: FILES, defines: &defines };
    let kernel = |entry| gpu.kernel(op, &program, entry);
    let (count, padded) = (lines.numel() / n, n.next_power_of_two().max(2));
    let tile = padded.min(TILE_MAX);
    let items = gpu.scratch(op, count * padded * ITEM_BYTES)?;
    let tiles = Grid::new(count * (padded / tile), tile as u32 / 2);
    let args = Args::new(op, gpu).scratch(&items).read(lines)?.value([
        n as u64,
        padded as u64,
        u64::from(descending),
    ]);
    kernel("sort_tiles")?.launch(tiles, args)?;
    let pairs = count * padded / 2;
    let mut size = 2 * tile;
    while size <= padded {
        let mut step = size / 2;
        while step >= tile {
            let sizes = [padded, size, step, pairs].map(|x| x as u64);
            let args = Args::new(op, gpu).scratch(&items).value(sizes);
            kernel("exchange")?.launch(Grid::new(pairs.div_ceil(256), 256), args)?;
            step /= 2;
        }
        let args = Args::new(op, gpu).scratch(&items).value([padded as u64, size as u64]);
        kernel("merge_tiles")?.launch(tiles, args)?;
        size *= 2;
    }
    let sizes = [n, padded, k, count * k].map(|x| x as u64);
    let args = Args::new(op, gpu).write(values)?.write(indices)?.scratch(&items).read(lines)?.value(sizes);
    kernel("take")?.launch(Grid::new((count * k).div_ceil(256), 256), args)
}
