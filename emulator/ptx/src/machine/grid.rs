//! A launch, and the blocks and warps that it is made of.

use std::sync::MutexGuard;

use super::clocks::Clocks;
use super::count::Count;
use super::schedule::Order;
use super::state::{Block, CachedAllocation, ClusterBarrier, Machine, Warp};
use crate::code::{Preset, Special};
use crate::lanes::LANES;
use crate::memory::{AddressSpace, Contents};
use crate::shared_variable::{self, DYNAMIC};
use crate::{Checks, Fault, Kernel, Launch, Loaded, Report, Schedule};

/// Records after which shadows are wiped, so that their numbers can begin anew.
const RECORDS_MAX: u32 = 3 << 30;

/// What registers of all lanes hold before a kernel writes them: no value that a program relies on by accident.
const GARBAGE: u64 = 0xfbfb_fbfb;

/// Runs a checked launch.
pub(crate) fn run(
    loaded: &Loaded,
    kernel: &Kernel,
    mut spaces: Vec<MutexGuard<'_, AddressSpace>>,
    launch: Launch,
    parameters: &[u8],
    checks: Checks,
    workspace: Option<u64>,
) -> Result<Report, Fault> {
    let mut first = spaces.iter().map(|s| s.record).max().unwrap_or(1);
    if first > RECORDS_MAX {
        spaces.iter_mut().for_each(|s| s.forget_shadows());
        first = 1;
    }
    let (program, schedule) = (&kernel.program, checks.schedule);
    let count = checks.counters.then(|| Count::new(program.code.len()));
    let mut machine = Machine {
        kernel,
        loaded,
        program,
        launch,
        checks,
        parameters,
        spaces,
        blocks: Vec::new(),
        clocks: Clocks::new(first, program.narrow, program.uses_async_proxy()),
        cache: vec![CachedAllocation::default(); program.code.len()],
        report: Report::default(),
        idle: 0,
        waited: 0,
        variables: Vec::new(),
        count,
        clusters: Vec::new(),
        order: Order::new(Schedule::Fixed, 1, 1),
        stores: Vec::new(),
        workspace,
    };
    let blocks: u32 = launch.grid.iter().product();
    machine.order = Order::new(schedule, blocks / machine.cluster_size() as u32, machine.room());
    let outcome = machine.grid();
    machine.stored(|_| true);
    let next = machine.clocks.next();
    machine.spaces.iter_mut().for_each(|s| s.record = next);
    outcome.map_err(|fault| match schedule {
        Schedule::Fixed => *fault,
        Schedule::Seeded(seed) => Fault { seed: Some(seed), ..*fault },
    })?;
    let touched = machine.spaces.iter().flat_map(|s| s.touched(first)).collect();
    let counters = machine.counters();
    Ok(Report { touched, counters, ..machine.report })
}

impl Machine<'_> {
    /// Makes the blocks and warps of one more slot, which holds a cluster.
    pub(crate) fn make_slot(&mut self) {
        let shared = match self.launch.shared_bytes {
            0 => self.kernel.shared_bytes,
            bytes => self.program.dynamic_start + bytes,
        };
        self.variables = shared_variable::ranges(&self.program.shared, self.program.dynamic_start, shared);
        let per_block = self.warps_a_block();
        let first = self.blocks.len();
        for rank in 0..self.cluster_size() {
            let shared = Contents::new(shared as usize);
            let warps = (0..per_block).map(|w| self.make_warp(first + rank, w, per_block)).collect();
            self.blocks.push(Block { shared, warps, rank: rank as u32, ..Block::default() });
        }
        for b in first..self.blocks.len() {
            for w in 0..per_block {
                let mut warp = std::mem::take(&mut self.blocks[b].warps[w]);
                for &(reg, preset) in &self.program.presets {
                    warp.registers[reg as usize] =
                        std::array::from_fn(|l| self.preset(&warp, preset, l, self.loaded));
                }
                self.blocks[b].warps[w] = warp;
            }
        }
        self.clusters.push(ClusterBarrier::default());
    }

    fn make_warp(&self, block: usize, number: usize, per_block: usize) -> Warp {
        let threads = self.threads() as usize - number * 32;
        let local = Contents::new(self.program.local_bytes as usize * LANES);
        Warp {
            number,
            block,
            resident: block * per_block + number,
            registers: vec![[GARBAGE; LANES]; self.program.registers as usize],
            calls: vec![Vec::new(); LANES],
            kept: vec![Vec::new(); LANES],
            lanes: if threads >= 32 { u32::MAX } else { (1 << threads) - 1 },
            local,
            ..Warp::default()
        }
    }

    fn preset(&self, warp: &Warp, preset: Preset, lane: usize, loaded: &Loaded) -> u64 {
        match preset {
            Preset::Bits(bits) => bits,
            Preset::Variable(number, added) => loaded.addresses()[number as usize].wrapping_add(added),
            Preset::Dynamic(added) => {
                (shared_variable::address(DYNAMIC, self.program.dynamic_start) as u64).wrapping_add(added)
            }
            Preset::Special(special) => self.special(warp, special, lane),
            Preset::Parameter { offset, size, extend } => {
                let (offset, size) = (offset as usize, size as usize);
                let mut bytes = [0; 8];
                bytes[..size].copy_from_slice(&self.parameters[offset..offset + size]);
                let value = u64::from_le_bytes(bytes);
                if extend == 0 {
                    return value;
                }
                let up = 64 - size as u32 * 8;
                ((value << up) as i64 >> up) as u64 & (u64::MAX >> (64 - extend as u32))
            }
        }
    }

    /// The cluster of a number comes into a slot.
    pub(crate) fn begin(&mut self, slot: usize, number: u32) {
        let Launch { grid, cluster, .. } = self.launch;
        let [x, y, _] = [0, 1, 2].map(|axis| grid[axis] / cluster[axis]);
        let start = [number % x * cluster[0], number / x % y * cluster[1], number / x / y * cluster[2]];
        let size = self.cluster_size();
        for b in slot * size..(slot + 1) * size {
            let place = (b - slot * size) as u32;
            let index = [
                start[0] + place % cluster[0],
                start[1] + place / cluster[0] % cluster[1],
                start[2] + place / cluster[0] / cluster[1],
            ];
            let block = &mut self.blocks[b];
            block.index = index;
            block.number = index[0] + grid[0] * (index[1] + grid[1] * index[2]);
            block.shared.forget();
            block.barriers = Default::default();
            block.mbarriers.clear();
            block.sources.clear();
            block.operands.clear();
            for w in 0..self.blocks[b].warps.len() {
                let mut warp = std::mem::take(&mut self.blocks[b].warps[w]);
                self.begin_warp(&mut warp);
                self.blocks[b].warps[w] = warp;
            }
        }
        self.clusters[slot].clear();
        let per_block = self.warps_a_block();
        let numbers = self.blocks[slot * size..(slot + 1) * size].iter().map(|b| b.number);
        self.clocks.begin(slot, numbers.flat_map(|n| std::iter::repeat_n(n, per_block)));
    }

    fn begin_warp(&self, warp: &mut Warp) {
        warp.pc = [0; LANES];
        warp.cluster_round = [0; LANES];
        warp.live = warp.lanes;
        (warp.at_warp_op, warp.at_barrier, warp.rested, warp.deep) = (0, 0, 0, false);
        warp.calls.iter_mut().for_each(Vec::clear);
        warp.kept.iter_mut().for_each(Vec::clear);
        warp.stack = [self.program.stack_start; LANES];
        warp.unwritten.clear();
        warp.copies.clear();
        warp.bulk_groups = [0; LANES];
        warp.held.clear();
        warp.operands.clear();
        warp.computed.clear();
        warp.fenced = false;
        (warp.groups, warp.held_groups, warp.worked) = ([0; LANES], 0, 0);
        if !warp.local.data.is_empty() {
            warp.local.forget();
        }
        for &(reg, preset) in &self.program.presets {
            if let Preset::Special(special) = preset
                && !matches!(
                    special,
                    Special::Thread(_) | Special::Threads(_) | Special::Blocks(_) | Special::Lane
                )
            {
                warp.registers[reg as usize] = std::array::from_fn(|l| self.special(warp, special, l));
            }
        }
    }
}
