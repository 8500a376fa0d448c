//! Instructions on matrices that a warp, or four, hold together.

use super::Space;

/// The elements of matrices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Element {
    F16,
    Bf16,
    Tf32,
    F32,
    F64,
    B1,
    S4,
    U4,
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
            Element::B1 => 1,
            Element::S4 | Element::U4 => 4,
            Element::S8 | Element::U8 | Element::E4m3 | Element::E5m2 => 8,
            Element::F16 | Element::Bf16 => 16,
            Element::Tf32 | Element::F32 | Element::S32 => 32,
            Element::F64 => 64,
        }
    }

    /// Whether products of it are made of whole numbers.
    pub(crate) fn is_whole(self) -> bool {
        matches!(self, Element::B1 | Element::S4 | Element::U4 | Element::S8 | Element::U8 | Element::S32)
    }
}

/// How elements of A and B are joined before they are added up: multiplied, or single bits of both.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Pairing {
    Product,
    And,
    Xor,
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

/// `mma.sync` of `m` by 8 by `k`; the fragments' registers are in lists.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Product {
    pub(crate) m: u32,
    pub(crate) k: u32,
    pub(crate) pairing: Pairing,
    /// Sums of whole numbers stay at the ends of their type.
    pub(crate) saturate: bool,
    pub(crate) a_kind: Element,
    pub(crate) b_kind: Element,
    pub(crate) c_kind: Element,
    pub(crate) d_kind: Element,
    pub(crate) a: u32,
    pub(crate) b: u32,
    pub(crate) c: u32,
    pub(crate) d: u32,
}

impl Product {
    /// Registers of the fragments of A, B, C and D.
    pub(crate) fn counts(&self) -> [u32; 4] {
        let operand = |lines: u32, kind: Element| lines * self.k * kind.bits() / 32 / kind.bits().max(32);
        let sums = |kind: Element| self.m / 4 * kind.bits() / kind.bits().max(32);
        [operand(self.m, self.a_kind), operand(8, self.b_kind), sums(self.c_kind), sums(self.d_kind)]
    }
}

/// `mma.sp.sync` of 16 by 8 by `k`, half of whose A is there: which half says the register `metadata` of those lanes that the
/// number `selector` chooses. The fragments' registers are in lists.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SparseProduct {
    /// The product of what is there of A: half as deep.
    pub(crate) half: Product,
    pub(crate) metadata: u32,
    pub(crate) selector: u32,
    /// The columns that metadata name ascend.
    pub(crate) ordered: bool,
}

impl SparseProduct {
    /// Columns of A, and rows of B.
    pub(crate) fn k(&self) -> u32 {
        2 * self.half.k
    }

    /// Registers of the fragments of A, B, C and D.
    pub(crate) fn counts(&self) -> [u32; 4] {
        let [a, b, c, d] = self.half.counts();
        [a, 2 * b, c, d]
    }

    /// Lanes of each four that hold metadata.
    pub(crate) fn holders(&self) -> u32 {
        // Each has 16 bits for each of two rows.
        let bits = match self.half.a_kind {
            Element::Tf32 => 4 * self.half.k,
            Element::S4 | Element::U4 => self.half.k,
            _ => 2 * self.half.k,
        };
        bits / 16
    }
}

/// `wgmma.mma_async` of 64 by `n` by `k`: A's descriptor in `a` or its fragment in a list, B's in `b`, whether to add
/// in `c`.
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

/// `wmma.load` and `wmma.store`: a matrix in memory, at the address in `a`, whose lines are as many elements apart as
/// `b` says.
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
    pub(crate) pairing: Pairing,
    /// Sums of whole numbers stay at the ends of their type.
    pub(crate) saturate: bool,
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
    SparseProduct(SparseProduct),
    Tile(Tile),
    TileProduct(TileProduct),
    Warpgroup(WarpgroupProduct),
    WarpgroupFence,
    WarpgroupCommit,
    WarpgroupWait,
}
