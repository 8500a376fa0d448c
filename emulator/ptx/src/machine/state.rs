//! What there is while a launch runs: the machine, its resident blocks with their barriers and warps, and addresses.
//!
//! ```text
//! Machine ── spaces: the devices' memories, locked
//!    │   └── clocks: which warp knows of which accesses
//!    └── Block ── shared memory, barriers, mbarriers
//!           └── Warp ── 32 lanes: registers, where each lane is, local memory
//!
//! generic address   bits 56..: 0 global (an allocation of a memory), 1 shared, 2 local, 3 parameters
//! shared address    the number of its variable and an offset (see `shared_variable`); of another block of the
//!                   cluster, (its rank + 1) << RANK_SHIFT | these
//! ```

use std::collections::HashMap;
use std::sync::MutexGuard;

use super::clocks::{Clocks, Gathering};
use super::count::Count;
use super::schedule::Order;
use crate::code::{APPROXIMATE, BarrierKind, Instruction, NOWHERE, Program, Reg, Space};
use crate::lanes::{LANES, Lanes, Map, approximate, lanes};
use crate::memory::{AddressSpace, Contents};
use crate::{Checks, Fault, Kernel, Launch, Loaded, Report};

pub(crate) type Outcome<T> = Result<T, Box<Fault>>;

/// What a group of lanes does after an instruction.
pub(crate) enum Next {
    /// The next instruction.
    On,
    /// Each lane's next instruction is set already.
    Apart,
    /// The next instruction, after other lanes and warps have had their turn.
    Yield,
}

/// A launch under way.
pub(crate) struct Machine<'a> {
    pub(crate) kernel: &'a Kernel,
    pub(crate) loaded: &'a Loaded,
    pub(crate) program: &'a Program,
    pub(crate) launch: Launch,
    pub(crate) checks: Checks,
    pub(crate) parameters: &'a [u8],
    pub(crate) spaces: Vec<MutexGuard<'a, AddressSpace>>,
    pub(crate) blocks: Vec<Block>,
    pub(crate) clocks: Clocks,
    /// For each instruction, the allocation that it met last.
    pub(crate) cache: Vec<CachedAllocation>,
    pub(crate) report: Report,
    /// Instructions since anything was written or any thread got past a barrier.
    pub(crate) idle: u64,
    /// For how many instructions tests of barriers and sleeps have counted.
    pub(crate) waited: u64,
    /// Where each variable of shared memory begins and ends, by its number.
    pub(crate) variables: Vec<(u64, u64)>,
    /// What is counted, if anything is.
    pub(crate) count: Option<Box<Count>>,
    /// The barrier of the cluster in each slot: the blocks there, which come and go together.
    pub(crate) clusters: Vec<ClusterBarrier>,
    pub(crate) order: Order,
    /// Bulk copies to global memory that their threads have not waited for.
    pub(crate) stores: Vec<PendingStore>,
    /// Of a cooperative launch, whose blocks are all resident: where its barrier is.
    pub(crate) workspace: Option<u64>,
}

/// Barriers that a block has.
pub(crate) const BARRIERS: usize = 16;

/// A block that is resident.
#[derive(Debug, Default)]
pub(crate) struct Block {
    pub(crate) index: [u32; 3],
    /// Its number in the grid, and in its cluster.
    pub(crate) number: u32,
    pub(crate) rank: u32,
    pub(crate) shared: Contents,
    pub(crate) warps: Vec<Warp>,
    /// Barriers in shared memory (`mbarrier`), by their offset.
    pub(crate) mbarriers: HashMap<u64, Mbarrier>,
    pub(crate) barriers: [BarrierState; BARRIERS],
    /// Shared memory that bulk copies to global memory still read.
    pub(crate) sources: Vec<Source>,
    /// How many products of warpgroups still read each 16 bytes of shared memory; nothing if none ever did.
    pub(crate) operands: Vec<u32>,
}

/// What has come to a barrier and what waits there.
#[derive(Clone, Debug, Default)]
pub(crate) struct BarrierState {
    pub(crate) expected: u32,
    pub(crate) arrived: u32,
    pub(crate) waiting: Vec<Waiting>,
    pub(crate) gathering: Gathering,
    /// Threads that came with a true predicate.
    pub(crate) yes: u32,
    /// A thread has come without waiting.
    pub(crate) passed: bool,
    /// It is for all threads of the block, without a count.
    pub(crate) of_all: bool,
}

/// Lanes that wait.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Waiting {
    pub(crate) block: usize,
    pub(crate) warp: usize,
    pub(crate) lanes: u32,
    pub(crate) pc: u32,
    pub(crate) kind: BarrierKind,
}

/// The barrier of a cluster, whose arriving and waiting are two instructions.
#[derive(Debug, Default)]
pub(crate) struct ClusterBarrier {
    pub(crate) state: BarrierState,
    pub(crate) round: u32,
    /// What the last round passed on.
    pub(crate) last: Gathering,
}

impl ClusterBarrier {
    /// As before the first round.
    pub(crate) fn clear(&mut self) {
        *self = ClusterBarrier::default();
    }
}

/// A barrier in shared memory (`mbarrier`).
#[derive(Debug, Default)]
pub(crate) struct Mbarrier {
    /// Arrivals of a phase, and those that are still to come.
    pub(crate) count: i64,
    pub(crate) left: i64,
    /// Bytes that are still to arrive.
    pub(crate) bytes: i64,
    /// Phases that are over.
    pub(crate) phase: u64,
    /// What arrives with the end of the phase.
    pub(crate) landing: Vec<Landing>,
    /// What has arrived in phases that are over, and whose end no thread has waited for yet.
    pub(crate) landed: Vec<Landing>,
}

/// Bytes that a bulk copy brings.
#[derive(Debug)]
pub(crate) struct Landing {
    pub(crate) range: ByteRange,
    pub(crate) data: Vec<u8>,
    pub(crate) written: Vec<bool>,
}

/// Where shared memory begins among generic addresses.
pub(crate) const SHARED_WINDOW: u64 = 1 << 56;
/// Where a thread's local memory begins.
pub(crate) const LOCAL_WINDOW: u64 = 2 << 56;
/// Where the kernel's parameters begin.
pub(crate) const PARAMETER_WINDOW: u64 = 3 << 56;
/// Bits of a shared address below the block's rank in its cluster, plus one.
pub(crate) const RANK_SHIFT: u32 = 24;

/// The allocation that an instruction met last.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct CachedAllocation {
    pub(crate) space: u32,
    pub(crate) slot: u32,
}

/// What an address is of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Region {
    /// An allocation of one of the memories.
    Global {
        space: usize,
        slot: usize,
    },
    /// A block's shared memory.
    Shared {
        block: usize,
    },
    Local,
    Parameter,
}

/// The space of a generic address.
#[inline(always)]
pub(crate) fn space_of(address: u64) -> Space {
    match address >> 56 {
        1 => Space::Shared,
        2 => Space::Local,
        3 => Space::Parameter,
        _ => Space::Global,
    }
}

/// An address of a space from a generic one.
#[inline(always)]
pub(crate) fn within(space: Space, address: u64) -> u64 {
    match space {
        Space::Shared => address.wrapping_sub(SHARED_WINDOW),
        Space::Local => address.wrapping_sub(LOCAL_WINDOW),
        Space::Parameter => address.wrapping_sub(PARAMETER_WINDOW),
        Space::Global | Space::Generic => address,
    }
}

/// A range of bytes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ByteRange {
    pub(crate) region: Region,
    pub(crate) offset: usize,
    pub(crate) bytes: usize,
}

/// Every lane.
pub(crate) const ALL: u32 = u32::MAX;

/// Lanes that run together: at one instruction and one depth of calls.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Group {
    pub(crate) pc: u32,
    pub(crate) lanes: u32,
    /// The next instruction at which other lanes wait for these.
    pub(crate) join: u32,
}

/// A copy under way.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PendingCopy {
    pub(crate) lane: u8,
    pub(crate) size: u8,
    /// The lane's group that it belongs to.
    pub(crate) group: u32,
    pub(crate) region: Region,
    pub(crate) offset: usize,
    pub(crate) data: [u8; 16],
    pub(crate) written: u16,
}

/// A thread's group of bulk copies: the warp among the resident ones, the lane, and the group's number.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BulkGroup {
    pub(crate) resident: usize,
    pub(crate) lane: usize,
    pub(crate) number: u32,
}

/// What a bulk copy to global memory reads, until its thread has waited for it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Source {
    pub(crate) range: ByteRange,
    pub(crate) group: BulkGroup,
    /// The copy.
    pub(crate) pc: u32,
}

/// What a bulk copy writes to global memory, until its thread has waited for it.
#[derive(Debug)]
pub(crate) struct PendingStore {
    pub(crate) landing: Landing,
    pub(crate) group: BulkGroup,
}

/// What a register has of bytes that nothing has written.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Unwritten {
    /// Of each lane the bytes that depend on them.
    pub(crate) bytes: [u8; LANES],
    /// The instruction that they came by.
    pub(crate) pc: u32,
    pub(crate) origin: Origin,
}

/// Where bytes come from that nothing has written.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Origin {
    /// A load.
    Memory(ByteRange),
    /// A shuffle of lane `to`, which reads from a lane that does not take part: what it gets is undefined.
    Lane { to: usize, from: usize },
}

/// A warp of a block.
#[derive(Debug, Default)]
pub(crate) struct Warp {
    /// Its number in the block, and among all that are resident.
    pub(crate) number: usize,
    pub(crate) resident: usize,
    pub(crate) block: usize,
    pub(crate) registers: Vec<Lanes>,
    pub(crate) pc: [u32; LANES],
    /// The calls that each lane is in: for each the function's number and the instruction of the call.
    pub(crate) calls: Vec<Vec<u32>>,
    /// Where the free part of each lane's stack begins; of each frame, where it began before and what the function's
    /// registers held for an outer call.
    pub(crate) stack: [u32; LANES],
    pub(crate) kept: Vec<Vec<u64>>,
    /// Lanes that there are: fewer than 32 in the last warp of some blocks.
    pub(crate) lanes: u32,
    /// Lanes that have not exited.
    pub(crate) live: u32,
    /// Lanes that wait for other lanes at an operation of the warp: a shuffle, a vote, `__syncwarp`, a matrix product.
    pub(crate) at_warp_op: u32,
    /// Lanes that wait at a barrier of the block or the cluster.
    pub(crate) at_barrier: u32,
    /// Lanes that have run long enough for others to have their turn.
    pub(crate) rested: u32,
    /// Lanes that have touched memory since others began to wait for them at an operation of the warp.
    pub(crate) worked: u32,
    /// Copies to shared memory (`cp.async`) that no lane has waited for.
    pub(crate) copies: Vec<PendingCopy>,
    /// How many groups of copies each lane has committed.
    pub(crate) groups: [u32; LANES],
    /// How many groups of bulk copies.
    pub(crate) bulk_groups: [u32; LANES],
    /// Accumulators of matrix products under way: register and group.
    pub(crate) held: HashMap<Reg, u32>,
    pub(crate) held_groups: u32,
    /// Shared memory that they read: of which group, of which block, and which 16 bytes.
    pub(crate) operands: Vec<(u32, usize, usize)>,
    /// Registers of matrix products that were computed since the last `wgmma.fence`, with the instruction.
    pub(crate) computed: HashMap<Reg, u32>,
    /// Whether there was a `wgmma.fence`.
    pub(crate) fenced: bool,
    /// Whether any lane is in a called function.
    pub(crate) deep: bool,
    /// The round of the cluster's barrier that each lane has come to.
    pub(crate) cluster_round: [u32; LANES],
    /// Local memory, that of lane 0 first.
    pub(crate) local: Contents,
    /// Instructions of each lane, if they are counted.
    pub(crate) executed: [u64; LANES],
    /// Registers that depend on bytes that nothing has written.
    pub(crate) unwritten: HashMap<Reg, Unwritten>,
    pub(super) scratch: Box<Scratch>,
}

#[derive(Debug)]
pub(super) struct Scratch(Lanes);

impl Default for Scratch {
    fn default() -> Scratch {
        Scratch([0; LANES])
    }
}

impl Warp {
    /// A warp that belongs to no block.
    pub(crate) fn detached() -> Warp {
        Warp { number: usize::MAX, ..Warp::default() }
    }

    /// The group that a lane's next bulk copy is of.
    pub(crate) fn bulk_group(&self, lane: usize) -> BulkGroup {
        BulkGroup { resident: self.resident, lane, number: self.bulk_groups[lane] }
    }

    /// Lanes that have ended.
    pub(crate) fn exited(&self) -> u32 {
        self.lanes & !self.live
    }

    /// Lanes that can go on.
    pub(crate) fn runnable(&self) -> u32 {
        self.live & !(self.at_warp_op | self.at_barrier)
    }

    /// The lanes to run: the deepest in calls, of those the ones at the lowest instruction, so that the others are met.
    #[inline]
    pub(crate) fn choose(&mut self) -> Option<Group> {
        let mut candidates = self.runnable() & !self.rested;
        if candidates == 0 {
            self.rested = 0;
            candidates = self.runnable();
        }
        if candidates == 0 {
            return None;
        }
        if self.deep {
            let depth = lanes(candidates).map(|l| self.calls[l].len()).max().unwrap_or(0);
            candidates =
                lanes(candidates).filter(|&l| self.calls[l].len() == depth).fold(0, |m, l| m | 1 << l);
        }
        let first = self.pc[candidates.trailing_zeros() as usize];
        if candidates == ALL && self.pc.iter().all(|&pc| pc == first) {
            return Some(Group { pc: first, lanes: ALL, join: u32::MAX });
        }
        let pc = lanes(candidates).map(|l| self.pc[l]).min()?;
        let mut group = Group { pc, lanes: 0, join: u32::MAX };
        for l in lanes(candidates) {
            if self.pc[l] == pc {
                group.lanes |= 1 << l;
            } else {
                group.join = group.join.min(self.pc[l]);
            }
        }
        Some(group)
    }

    /// Lets lanes go on at an instruction.
    #[inline(always)]
    pub(crate) fn move_to(&mut self, mask: u32, pc: u32) {
        if mask == ALL {
            self.pc = [pc; LANES];
            return;
        }
        for l in lanes(mask) {
            self.pc[l] = pc;
        }
    }

    /// The lanes for which a predicate has the wanted value.
    #[inline(always)]
    pub(crate) fn holds(&self, predicate: Reg, wanted: bool) -> u32 {
        let bits = self.registers[predicate as usize].iter().rev().fold(0, |m, &p| m << 1 | (p & 1) as u32);
        if wanted { bits } else { !bits }
    }

    /// A register of all lanes.
    #[inline(always)]
    pub(crate) fn get(&self, reg: Reg) -> &Lanes {
        &self.registers[reg as usize]
    }

    /// Sets a register of some lanes.
    #[inline(always)]
    pub(crate) fn set(&mut self, reg: Reg, mask: u32, values: &Lanes) {
        if reg == NOWHERE {
            return;
        }
        let register = &mut self.registers[reg as usize];
        if mask == ALL {
            *register = *values;
            return;
        }
        for l in 0..LANES {
            if mask >> l & 1 == 1 {
                register[l] = values[l];
            }
        }
    }

    /// Gives an approximate instruction's results the errors that a seed says.
    #[cold]
    pub(crate) fn perturb(&mut self, seed: u64, i: &Instruction, operands: &[Lanes; 2], mask: u32) {
        if let Some(results) = self.registers.get_mut(i.d as usize) {
            approximate::perturb(results, (i.offset - APPROXIMATE) as usize, seed, operands, mask);
        }
    }

    /// Carries out a map: where all lanes take part and no source is the destination, straight into that.
    #[inline(always)]
    pub(crate) fn map(&mut self, map: Map, d: Reg, sources: [Reg; 4], mask: u32) {
        let [a, b, c, e] = sources.map(|reg| reg as usize);
        if mask == ALL && d != NOWHERE && !sources.contains(&d) {
            let d = d as usize;
            let (left, rest) = self.registers.split_at_mut(d);
            if let Some((to, right)) = rest.split_first_mut() {
                let source = |i: usize| if i < d { &left[i] } else { &right[i - d - 1] };
                map(source(a), source(b), source(c), source(e), to);
            }
            return;
        }
        let r = &self.registers;
        map(&r[a], &r[b], &r[c], &r[e], &mut self.scratch.0);
        if d == NOWHERE {
            return;
        }
        let register = &mut self.registers[d as usize];
        if mask == ALL {
            *register = self.scratch.0;
            return;
        }
        for l in 0..LANES {
            if mask >> l & 1 == 1 {
                register[l] = self.scratch.0[l];
            }
        }
    }
}
