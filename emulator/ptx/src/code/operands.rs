//! Instructions with many operands: matrices, and what runs beside the threads.

use super::{Kind, Space, Update};

/// The elements of matrices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Element {
    F16,
    Bf16,
    Tf32,
    F32,
    S8,
    U8,
    S32,
    E4m3,
    E5m2,
}

impl Element {
    /// Bits of an element.
    pub(crate) fn bits(self) -> u32 {
        match self {
            Element::S8 | Element::U8 | Element::E4m3 | Element::E5m2 => 8,
            Element::F16 | Element::Bf16 => 16,
            Element::Tf32 | Element::F32 | Element::S32 => 32,
        }
    }
}

/// `ldmatrix` and `stmatrix`: rows of 16 bytes, whose addresses lanes have in `a`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Fragment {
    pub(crate) list: u32,
    pub(crate) count: u32,
    pub(crate) transposed: bool,
    pub(crate) space: Space,
    pub(crate) loads: bool,
}

/// `mma.sync` of 16 by 8 by `k`; the fragments' registers are in lists.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Product {
    pub(crate) k: u32,
    pub(crate) a_kind: Element,
    pub(crate) b_kind: Element,
    pub(crate) c_kind: Element,
    pub(crate) d_kind: Element,
    pub(crate) a: u32,
    pub(crate) b: u32,
    pub(crate) c: u32,
    pub(crate) d: u32,
}

/// `wgmma.mma_async` of 64 by `n` by `k`: A's descriptor in `a` or its fragment in a list, B's in `b`, whether to add in `c`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct WarpgroupProduct {
    pub(crate) n: u32,
    pub(crate) k: u32,
    pub(crate) kind: Element,
    pub(crate) b_kind: Element,
    pub(crate) d_kind: Element,
    pub(crate) d: u32,
    pub(crate) d_count: u32,
    pub(crate) a: u32,
    pub(crate) a_count: u32,
    pub(crate) negate_a: bool,
    pub(crate) negate_b: bool,
    pub(crate) transpose_a: bool,
    pub(crate) transpose_b: bool,
}

/// `wmma.load` and `wmma.store`: a matrix in memory, at the address in `a`, whose lines are as many elements apart as `b` says.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Tile {
    pub(crate) kind: Element,
    pub(crate) rows: u32,
    pub(crate) columns: u32,
    /// Neighbours of a row are neighbours in memory.
    pub(crate) by_rows: bool,
    pub(crate) space: Space,
    pub(crate) list: u32,
    pub(crate) count: u32,
    pub(crate) loads: bool,
}

/// `wmma.mma` of `m` by `n` by `k`: the types and the registers of A, B, C and D.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TileProduct {
    pub(crate) shape: [u32; 3],
    pub(crate) kinds: [Element; 4],
    pub(crate) lists: [u32; 4],
    pub(crate) counts: [u32; 4],
}

/// Instructions for which all lanes of a warp come together.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Matrix {
    Fragment(Fragment),
    /// `movmatrix`
    Transpose,
    Product(Product),
    Tile(Tile),
    TileProduct(TileProduct),
    Warpgroup(WarpgroupProduct),
    WarpgroupFence,
    WarpgroupCommit,
    WarpgroupWait,
}

/// An arrival at a barrier in memory.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Arrival {
    pub(crate) generic: bool,
    pub(crate) expect: bool,
    pub(crate) drop: bool,
}

/// A bulk copy: destination in `a`, source in `b`, bytes in `c`, barrier in `e`. Of a tensor: shared memory in `a`, the map in `b`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Bulk {
    pub(crate) to: Space,
    pub(crate) from: Space,
    /// Coordinates of a tensor; 0 for plain bytes.
    pub(crate) rank: u8,
    pub(crate) reduce: Option<(Update, Kind, u8)>,
    /// Coordinates, then the mask of a multicast.
    pub(crate) list: u32,
    pub(crate) barrier: bool,
    pub(crate) multicast: bool,
}

/// Asynchronous copies, and barriers in memory.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Asynchronous {
    /// To the shared address in `a` from the global one in `b`, of which `c` bytes are read.
    Copy {
        size: u8,
    },
    Commit,
    /// Until no more than `a` groups are under way.
    Wait,
    WaitAll,
    CopyArrive {
        noinc: bool,
    },
    BarrierInit {
        generic: bool,
    },
    BarrierInvalid {
        generic: bool,
    },
    BarrierBytes {
        generic: bool,
        expect: bool,
    },
    BarrierArrive(Arrival),
    BarrierTest {
        generic: bool,
        parity: bool,
    },
    Bulk(Bulk),
}
