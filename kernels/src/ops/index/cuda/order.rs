//! [`Order`]: positions sorted by key on a GPU, equal keys in ascending order (`order.cu`).

use phalanx_tensor::cuda::{Args, Gpu, Grid, Program, Scratch};
use phalanx_tensor::{Error, Result};

use crate::cuda::{File, PRELUDE};

const FILES: &[File] = &[PRELUDE, ("order.cu", include_str!("order.cu"))];
const PROGRAM: Program<'static> = Program { name: "order.cu", files: FILES, defines: &[] };

/// Values of a digit, as in `order.cu`; so many threads has a block, too.
const DIGITS: usize = 256;
/// Keys of a tile and tiles of a block.
const TILE: usize = 1024;
const WARPS: usize = 8;

/// Keys, ascending, and the position that each had: u32 both.
pub(super) struct Order {
    pub(super) keys: Scratch,
    pub(super) positions: Scratch,
}

/// Room for `count` keys.
///
/// # Errors
/// If they are too many for 32 bits, or there is no more memory.
pub(super) fn room(op: &'static str, gpu: &'static Gpu, count: usize) -> Result<Scratch> {
    if u32::try_from(count).is_err() {
        return Err(Error::invalid(op, format!("{count} indices; a GPU takes less than 2^32")));
    }
    gpu.scratch(op, count * size_of::<u32>())
}

impl Order {
    /// Of `count` keys, none of which exceeds `largest`.
    pub(super) fn new(
        op: &'static str,
        gpu: &'static Gpu,
        mut keys: Scratch,
        count: usize,
        largest: usize,
    ) -> Result<Order> {
        let tiles = count.div_ceil(TILE);
        let counts = gpu.scratch(op, DIGITS * tiles * size_of::<u32>())?;
        let totals = gpu.scratch(op, DIGITS * size_of::<u32>())?;
        let grid = Grid::new(tiles.div_ceil(WARPS), (32 * WARPS) as u32);
        let (n, tiles) = (count as u32, tiles as u32);
        let mut positions: Option<Scratch> = None;
        let bits = usize::BITS - largest.leading_zeros();
        for shift in (0..bits.max(1)).step_by(8) {
            let args = Args::new(op, gpu).scratch(&counts).scratch(&keys).value(n).value(shift).value(tiles);
            gpu.kernel(op, &PROGRAM, "count_digits")?.launch(grid, args)?;
            let args = Args::new(op, gpu).scratch(&counts).scratch(&totals).value(tiles);
            gpu.kernel(op, &PROGRAM, "scan_digits")?.launch(Grid::new(DIGITS, DIGITS as u32), args)?;
            let (next_keys, next) = (room(op, gpu, count)?, room(op, gpu, count)?);
            let args = Args::new(op, gpu).scratch(&next_keys).scratch(&next).scratch(&keys);
            let args = match &positions {
                Some(positions) => args.scratch(positions),
                None => args.value(0u64),
            };
            let args = args.scratch(&counts).scratch(&totals).value(n).value(shift).value(tiles);
            gpu.kernel(op, &PROGRAM, "place")?.launch(grid, args)?;
            (keys, positions) = (next_keys, Some(next));
        }
        let positions = positions.ok_or_else(|| Error::invalid(op, "keys of no bits"))?;
        Ok(Order { keys, positions })
    }
}
