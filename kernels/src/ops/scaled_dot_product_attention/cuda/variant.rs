//! [`Variant`]: what the kernels are compiled for, and how many rows their blocks then make.
//!
//! The sizes are the kernels' own, which assert them when they are compiled.

use phalanx_tensor::DType;

use crate::cuda::type_name;
use crate::real::wide_dtype;

/// What the kernels are compiled for.
#[derive(Clone, Copy)]
pub(super) struct Variant {
    pub(super) dtype: DType,
    /// The larger of depth and the values' depth.
    pub(super) depth: usize,
    /// 0 none, 1 bool, 2 floating-point, 3 first visible keys.
    pub(super) mask: u8,
    pub(super) dropout: bool,
    pub(super) slopes: bool,
    pub(super) packets: bool,
    /// Whether products are those of warpgroups, which devices of compute capability 9.0 have.
    pub(super) warpgroups: bool,
}

/// The blocks of a kernel: the rows that one makes, its threads, its shared memory.
#[derive(Clone, Copy)]
pub(super) struct BlockSize {
    pub(super) rows: usize,
    pub(super) threads: u32,
    pub(super) bytes: usize,
}

/// Depths that tensor cores take, and any kernel.
const TENSOR_CORES_MAX: usize = 128;
pub(in super::super) const DEPTH_MAX: usize = 256;

impl Variant {
    /// Whether tensor cores do it.
    pub(super) fn on_tensor_cores(&self) -> bool {
        self.dtype.size() == 2 && self.depth <= TENSOR_CORES_MAX
    }

    /// Whether there are kernels of warpgroups for it: their tiles are 64 or 128 elements deep. `sizes` are T, S, D and E.
    pub(super) fn goes_with_warpgroups(&self, [queries, keys, depth, value_depth]: [usize; 4]) -> bool {
        let is_plain = matches!(self.mask, 0 | 3) && !self.dropout && !self.slopes;
        let packs = |n: usize| n > 0 && n.is_multiple_of(8);
        let rows = queries > 0 && keys > 0;
        self.on_tensor_cores()
            && is_plain
            && rows
            && packs(depth)
            && packs(value_depth)
            && self.head().is_multiple_of(64)
    }

    /// One or the other, by whether warpgroups do it.
    pub(super) fn either<T>(&self, warps: T, warpgroups: T) -> T {
        if self.warpgroups { warpgroups } else { warps }
    }

    /// A block of warpgroups, with so many rows in tiles and so many words beside them.
    fn warpgroup_block(&self, rows: usize, words: usize) -> BlockSize {
        let bytes = (rows * self.head() * 2 + words * size_of::<u64>()).next_multiple_of(1024);
        BlockSize { rows: 128, threads: 384, bytes }
    }

    /// The depth that rows are padded to.
    fn head(&self) -> usize {
        if self.on_tensor_cores() {
            self.depth.next_multiple_of(16).max(32)
        } else {
            self.depth.next_multiple_of(64).max(64)
        }
    }

    /// Whether registers hold the larger tiles.
    fn is_plain(&self) -> bool {
        matches!(self.mask, 0 | 3) && !self.dropout && self.packets
    }

    /// Bytes of `rows` rows of 16-bit elements, and of as many rows of a bit for each of `bits` probabilities.
    fn tile_bytes(&self, rows: usize, kept_rows: usize, bits: usize) -> usize {
        let kept = if self.dropout { kept_rows * bits / 8 } else { 0 };
        rows * (self.head() * 2 + 16) + kept
    }

    /// The forward pass, which makes queries.
    pub(super) fn forward(&self) -> BlockSize {
        if !self.on_tensor_cores() {
            return self.general(3);
        }
        if self.warpgroups {
            let stages = 256 / self.head();
            return self.warpgroup_block(128 + 2 * stages * 128, 1 + 4 * stages);
        }
        let (head, plain) = (self.head(), self.is_plain());
        let limited = self.mask == 3 && head > 112;
        let rows = if (plain && !limited) || head <= 96 { 128 } else { 64 };
        let keys = if head <= if plain { 80 } else { 32 } { 64 } else { 32 };
        BlockSize { rows, threads: 128, bytes: self.tile_bytes(rows + 4 * keys, rows, keys) }
    }

    /// The backward pass that makes keys.
    pub(super) fn keys(&self) -> BlockSize {
        if !self.on_tensor_cores() {
            return self.general(4);
        }
        if self.warpgroups {
            return self.warpgroup_block(2 * 128 + 3 * 2 * 64, 3 * 64 + 1 + 3 * 2);
        }
        let threads = if self.head() <= 64 { 128 } else { 256 };
        let sums = 4 * 64 * size_of::<f32>();
        BlockSize { rows: 128, threads, bytes: self.tile_bytes(2 * 128 + 4 * 64, 64, 128) + sums }
    }

    /// The backward pass that makes queries.
    pub(super) fn queries(&self) -> BlockSize {
        if !self.on_tensor_cores() {
            return self.general(4);
        }
        if self.warpgroups {
            return self.warpgroup_block(2 * 128 + 3 * 2 * 64, 1 + 3 * 2);
        }
        let narrow = self.head() <= 64;
        let rows = if narrow || (self.is_plain() && !self.slopes) { 128 } else { 64 };
        let keys = if narrow { 64 } else { 32 };
        BlockSize { rows, threads: 128, bytes: self.tile_bytes(2 * rows + 4 * keys, rows, keys) }
    }

    /// Either pass by multiply-adds, with so many tiles of operands.
    fn general(&self, tiles: usize) -> BlockSize {
        let (head, size) = (self.head(), wide_dtype(self.dtype).size());
        let rows = 16 * (2048 / (head * size)).clamp(1, if size == 8 { 2 } else { 4 });
        let packet = 16 / size;
        let elements = tiles * rows * (head + packet) + rows * (rows + packet);
        BlockSize { rows, threads: 256, bytes: elements * size + rows * rows.div_ceil(32) * 4 }
    }

    /// The macros of a program whose blocks are these.
    pub(super) fn defines(&self, block: BlockSize) -> [(&'static str, String); 9] {
        let flag = |on: bool| u8::from(on).to_string();
        [
            ("ELEM", type_name(self.dtype).to_string()),
            ("HEAD", self.head().to_string()),
            ("MASK", self.mask.to_string()),
            ("DROPOUT", flag(self.dropout)),
            ("SLOPES", flag(self.slopes)),
            ("PACKETS", flag(self.packets)),
            ("BLOCK_ROWS", block.rows.to_string()),
            ("BLOCK_THREADS", block.threads.to_string()),
            ("BLOCK_BYTES", block.bytes.to_string()),
        ]
    }
}
