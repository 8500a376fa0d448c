//! Decoded instructions: what the machine runs.
//!
//! An [`Instruction`] has an operation and up to five registers; constants and special registers are registers too.
//! Instructions with more operands (matrices, and what the asynchronous proxy does) have theirs in lists of the
//! [`Program`], by number.

use crate::Location;
use crate::lanes::Map;
use crate::shared_variable::SharedVariable;

mod calls;
mod matrix;

pub(crate) use calls::{
    CallSite, Callee, CalleeKind, FRAME_ALIGN, Frame, STACK_BYTES, Slot, StackOp, function_address,
    function_number,
};
pub(crate) use matrix::{
    Element, Fragment, Matrix, Pairing, Product, SparseProduct, Tile, TileProduct, WarpgroupProduct,
};

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

/// An atomic operation. Its value is `b`, of a swap the new value `c`; all of a vector are in lists.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Atomic {
    pub(crate) space: Space,
    pub(crate) update: Update,
    pub(crate) kind: AtomicType,
    pub(crate) size: u8,
    pub(crate) order: Order,
    pub(crate) scope: Scope,
    pub(crate) count: u8,
    /// Values, then destinations, then the new values of a swap.
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
    /// It passes on what was fenced before, and nothing else.
    ClusterArriveRelaxed,
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
    Stack(StackOp),
    /// What the interpreter does not do, for the reason of this number in [`Program::refusals`].
    Refused(u32),
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
    /// The callee that each function of the module is; `NOWHERE` for those that are not called.
    pub(crate) functions: Vec<u32>,
    /// Why instructions are refused.
    pub(crate) refusals: Vec<String>,
    pub(crate) presets: Vec<(Reg, Preset)>,
    pub(crate) registers: u32,
    /// Whether a register decides something or goes to other lanes: a guard, an address, an operand of anything but
    /// arithmetic and stores.
    pub(crate) sinks: Vec<bool>,
    /// The variables in shared memory; addresses of the first have the number 1.
    pub(crate) shared: Vec<SharedVariable>,
    /// Local memory a thread, in bytes; with its stack at the end.
    pub(crate) local_bytes: u32,
    /// Whether there is a stack, and where it begins.
    pub(crate) stacked: bool,
    pub(crate) stack_start: u32,
    /// Where dynamic shared memory begins.
    pub(crate) dynamic_start: u32,
    /// Whether there are strong accesses or fences of a narrower scope than the device.
    pub(crate) narrow: bool,
    pub(crate) locations: Vec<Location>,
}

/// The offset of a map that is a plain move.
pub(crate) const MOVE: i64 = 1;
/// The offset of a map that is the first of [`APPROXIMATIONS`](crate::lanes::approximate::APPROXIMATIONS).
pub(crate) const APPROXIMATE: i64 = 2;

/// An arrival at a barrier in memory.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Arrival {
    pub(crate) generic: bool,
    pub(crate) expect: bool,
    pub(crate) drop: bool,
    /// It passes on only what is fenced.
    pub(crate) relaxed: bool,
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

/// `st.async` and `red.async`: the list's registers to the shared address in `a`, and their bytes to the barrier in `e`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Send {
    pub(crate) size: u8,
    pub(crate) count: u8,
    pub(crate) list: u32,
    pub(crate) reduce: Option<(Update, AtomicType, u8)>,
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
        relaxed: bool,
    },
    /// How many arrivals were missing before the one that gave the state in `a`.
    MbarrierPending,
    Bulk(Bulk),
    BulkCommit,
    /// Until no more than `a` groups of bulk copies are under way, or have not `read` yet.
    BulkWait {
        read: bool,
    },
    Send(Send),
}
