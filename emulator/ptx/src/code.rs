//! Decoded instructions: what the machine runs.
//!
//! An [`Instruction`] has an operation and up to five registers; constants and special registers are registers too.
//! Instructions with more operands (matrices, and what the asynchronous proxy does) have theirs in lists of the
//! [`Program`], by number.

use crate::Location;
use crate::lanes::Map;

/// A register's number. Constants and special registers are registers too, so operands are nothing else.
pub(crate) type Reg = u32;

/// The register that always holds zero.
pub(crate) const ZERO: Reg = 0;

/// A destination that is not wanted.
pub(crate) const NOWHERE: Reg = u32::MAX;

/// One instruction.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Instruction {
    pub(crate) op: Op,
    /// The predicate, and the value of it for which a lane takes part. Register `NOWHERE` for all.
    pub(crate) guard: Reg,
    pub(crate) wanted: bool,
    /// A `wgmma` uses one of its registers, too.
    pub(crate) watched: bool,
    pub(crate) d: Reg,
    pub(crate) a: Reg,
    pub(crate) b: Reg,
    pub(crate) c: Reg,
    pub(crate) e: Reg,
    /// Added to the address in `a`.
    pub(crate) offset: i64,
    /// The line of the PTX text.
    pub(crate) line: u32,
    /// The number of its source location in [`Program::locations`], plus one; 0 for none.
    pub(crate) location: u32,
}

/// The state spaces of an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Space {
    Generic,
    Global,
    Shared,
    Local,
    Parameter,
}

/// The memory order of an access (`.relaxed`, `.acquire`, ...). `Both` is `.acq_rel`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Order {
    Weak,
    Relaxed,
    Acquire,
    Release,
    Both,
}

/// The threads for whom a strong access or a fence counts (`.cta`, `.cluster`; `.gpu` and `.sys`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Scope {
    Block,
    Cluster,
    Device,
}

/// A load or a store.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Access {
    pub(crate) space: Space,
    /// Bytes of an element.
    pub(crate) size: u8,
    /// Elements of a vector.
    pub(crate) count: u8,
    /// Bits up to which a loaded element's sign is extended; 0 for none.
    pub(crate) extend: u8,
    pub(crate) order: Order,
    pub(crate) scope: Scope,
    /// `ld.global.nc`: nothing may write there as long as the kernel runs.
    pub(crate) constant: bool,
    /// Where the elements' registers are in the program's lists.
    pub(crate) list: u32,
}

/// What an atomic operation does to the value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Update {
    Add,
    Min,
    Max,
    And,
    Or,
    Xor,
    Exchange,
    Swap,
    Increment,
    Decrement,
}

/// The types of atomic operations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AtomicType {
    Bits,
    Signed,
    F16,
    F16x2,
    Bf16,
    Bf16x2,
    F32,
    F64,
}

/// An atomic operation. Its value is `b`, of a swap the new value `c`; of a vector both are in lists.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Atomic {
    pub(crate) space: Space,
    pub(crate) update: Update,
    pub(crate) kind: AtomicType,
    pub(crate) size: u8,
    pub(crate) order: Order,
    pub(crate) scope: Scope,
    pub(crate) count: u8,
    /// Values, then destinations, of a vector.
    pub(crate) list: u32,
}

/// Operations for which lanes of a warp wait for each other. The mask is in `e`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Collective {
    /// `a` of lane `b`, clamped by `c`; whether there was one goes to the list's register.
    Shuffle(Shuffle),
    VoteAll,
    VoteAny,
    VoteUniform,
    Ballot,
    MatchAny(u8),
    MatchAll(u8),
    ReduceAdd,
    ReduceMin(bool),
    ReduceMax(bool),
    ReduceAnd,
    ReduceOr,
    ReduceXor,
    Elect,
    Synchronize,
}

/// The ways of a shuffle.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Shuffle {
    Up,
    Down,
    Butterfly,
    Index,
}

/// Barriers of a block. The number is in `a`, the count in `b` (zero for all threads).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Barrier {
    pub(crate) kind: BarrierKind,
    /// All lanes of a warp must come together.
    pub(crate) aligned: bool,
}

/// What a thread does at a barrier.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum BarrierKind {
    Sync,
    Arrive,
    Count,
    All,
    Any,
    ClusterArrive,
    ClusterWait,
}

/// Clocks that can be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Clock {
    Low,
    High,
    Whole,
}

/// What an instruction does.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Op {
    /// Computes each lane's result from its sources.
    Map(Map),
    Nop,
    Branch(u32),
    /// Branches to the entry of the table of this number that `a` says.
    BranchTable(u32),
    /// The call of this number; the function of an indirect one is in `a`.
    Call(u32),
    Return,
    Exit,
    Trap,
    Load(Access),
    Store(Access),
    Atomic(Atomic),
    /// `isspacep`: whether the generic address in `a` is one of this space.
    IsSpace(Space),
    /// `mapa`: the address that the shared address in `a` has in the block of rank `b` of the cluster.
    MapShared {
        generic: bool,
    },
    /// `getctarank`: the rank of the block that the shared address in `a` is of.
    RankOfShared {
        generic: bool,
    },
    Collective(Collective, Reg),
    ActiveMask,
    ReadClock(Clock),
    Barrier(Barrier),
    Fence(Scope),
    /// `fence.proxy.async`: makes what threads wrote known to the asynchronous proxy, and the other way round.
    ProxyFence,
    /// `nanosleep`: other lanes and warps go first.
    Yield,
    /// The instruction of this number in [`Program::matrices`].
    Matrix(u32),
    /// The instruction of this number in [`Program::asynchronous`].
    Asynchronous(u32),
}

/// What a register holds before the first instruction.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Preset {
    Bits(u64),
    /// The address of a variable of the module.
    Variable(u32, u64),
    /// Where the dynamic shared memory begins.
    Dynamic(u64),
    /// Bytes of the kernel's parameters: offset, size, bits up to which the sign is extended.
    Parameter {
        offset: u32,
        size: u8,
        extend: u8,
    },
    /// What `mov` of a function gives.
    Function(u32),
    Special(Special),
}

/// Special registers that stay as they are while a block runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Special {
    Thread(u8),
    Threads(u8),
    Block(u8),
    Blocks(u8),
    Lane,
    Warp,
    Warps,
    MaskEqual,
    MaskBelow,
    MaskUpTo,
    MaskAbove,
    MaskFrom,
    Processor,
    Processors,
    Grid,
    DynamicShared,
    TotalShared,
    ClusterThreadBlock(u8),
    ClusterBlocks(u8),
    Cluster(u8),
    Clusters(u8),
    ClusterRank,
    ClusterSize,
    ExplicitCluster,
    /// What a driver hands over: in 1 and 2 the upper and lower half of the address of a cooperative launch's barrier.
    Environment(u8),
}

/// A function that a call can reach.
#[derive(Clone, Debug)]
pub(crate) struct Callee {
    pub(crate) name: String,
    pub(crate) kind: CalleeKind,
    /// Where its parameters lie in local memory, and their bytes.
    pub(crate) parameters: Vec<(u32, u32)>,
    pub(crate) returns: Vec<(u32, u32)>,
}

/// What carries a function out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CalleeKind {
    /// The instruction it begins at.
    Code(u32),
    Print,
    Assert,
    Missing,
}

/// A call: the function, or none for one whose number is in a register, and where the arguments lie.
#[derive(Clone, Debug)]
pub(crate) struct CallSite {
    pub(crate) callee: Option<u32>,
    pub(crate) arguments: Vec<(u32, u32)>,
    pub(crate) results: Vec<(u32, u32)>,
}

/// A kernel's instructions, with those of the functions it can call, and what they refer to.
#[derive(Debug, Default)]
pub(crate) struct Program {
    pub(crate) code: Vec<Instruction>,
    pub(crate) lists: Vec<Reg>,
    pub(crate) tables: Vec<Vec<u32>>,
    pub(crate) matrices: Vec<Matrix>,
    pub(crate) asynchronous: Vec<Asynchronous>,
    pub(crate) calls: Vec<CallSite>,
    pub(crate) callees: Vec<Callee>,
    pub(crate) presets: Vec<(Reg, Preset)>,
    pub(crate) registers: u32,
    /// Whether a register is read by anything but a store of it.
    pub(crate) computed: Vec<bool>,
    /// Local memory a thread, in bytes.
    pub(crate) local_bytes: u32,
    /// Where dynamic shared memory begins.
    pub(crate) dynamic_start: u32,
    /// Whether there are strong accesses or fences of a narrower scope than the device.
    pub(crate) narrow: bool,
    pub(crate) locations: Vec<Location>,
}

/// The offset of a map that is a plain move.
pub(crate) const MOVE: i64 = 1;

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

/// A bulk copy: destination in `a`, source in `b`, bytes in `c`, barrier in `e`. Of a tensor: shared memory in `a`,
/// the map in `b`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Bulk {
    pub(crate) to: Space,
    pub(crate) from: Space,
    /// Coordinates of a tensor; 0 for plain bytes.
    pub(crate) rank: u8,
    pub(crate) reduce: Option<(Update, AtomicType, u8)>,
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
    MbarrierInit {
        generic: bool,
    },
    MbarrierInvalidate {
        generic: bool,
    },
    MbarrierBytes {
        generic: bool,
        expect: bool,
    },
    MbarrierArrive(Arrival),
    MbarrierTest {
        generic: bool,
        parity: bool,
    },
    Bulk(Bulk),
}
