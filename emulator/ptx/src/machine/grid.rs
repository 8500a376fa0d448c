//! A launch from its first block to its last.

use std::sync::MutexGuard;

use super::clocks::Clocks;
use super::count::Count;
use super::state::{Block, CachedAllocation, Machine, Outcome, Warp};
use crate::code::{Preset, Special};
use crate::lanes::LANES;
use crate::memory::{AddressSpace, Contents};
use crate::shared_variable::{self, DYNAMIC};
use crate::{Checks, Fault, Kernel, Launch, Loaded, Report};

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
    let program = &kernel.program;
    let mut machine = Machine {
        kernel,
        program,
        launch,
        checks,
        parameters,
        spaces,
        blocks: Vec::new(),
        clocks: Clocks::new(first, program.uses_async_proxy()),
        cache: vec![CachedAllocation::default(); program.code.len()],
        report: Report::default(),
        idle: 0,
        cluster: Default::default(),
        variables: Vec::new(),
        count: checks.counters.then(|| Count::new(program.code.len())),
        workspace,
    };
    let outcome = machine.grid(loaded);
    let next = machine.clocks.next();
    machine.spaces.iter_mut().for_each(|s| s.record = next);
    outcome.map_err(|fault| *fault)?;
    let touched = machine.spaces.iter().flat_map(|s| s.touched(first)).collect();
    let counters = machine.counters();
    Ok(Report { touched, counters, ..machine.report })
}

impl Machine<'_> {
    /// Blocks along x, y and z that are resident together.
    fn resident(&self) -> [u32; 3] {
        if self.workspace.is_some() { self.launch.grid } else { self.launch.cluster }
    }

    fn grid(&mut self, loaded: &Loaded) -> Outcome<()> {
        let (grid, resident) = (self.launch.grid, self.resident());
        self.make_blocks(resident.iter().product::<u32>() as usize, loaded);
        for z in (0..grid[2]).step_by(resident[2] as usize) {
            for y in (0..grid[1]).step_by(resident[1] as usize) {
                for x in (0..grid[0]).step_by(resident[0] as usize) {
                    self.begin([x, y, z]);
                    self.cluster_runs()?;
                    self.count_threads();
                }
            }
        }
        Ok(())
    }

    fn make_blocks(&mut self, blocks: usize, loaded: &Loaded) {
        let shared = match self.launch.shared_bytes {
            0 => self.kernel.shared_bytes,
            bytes => self.program.dynamic_start + bytes,
        };
        self.variables = shared_variable::ranges(&self.program.shared, self.program.dynamic_start, shared);
        let per_block = self.warps_a_block();
        for b in 0..blocks {
            let shared = Contents::new(shared as usize);
            let warps = (0..per_block).map(|w| self.make_warp(b, w, per_block)).collect();
            let rank = if self.workspace.is_some() { 0 } else { b as u32 };
            self.blocks.push(Block { shared, warps, rank, ..Block::default() });
        }
        for b in 0..blocks {
            for w in 0..per_block {
                let mut warp = std::mem::take(&mut self.blocks[b].warps[w]);
                for &(reg, preset) in &self.program.presets {
                    warp.registers[reg as usize] =
                        std::array::from_fn(|l| self.preset(&warp, preset, l, loaded));
                }
                self.blocks[b].warps[w] = warp;
            }
        }
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

    /// The next blocks come in.
    fn begin(&mut self, start: [u32; 3]) {
        let (grid, resident) = (self.launch.grid, self.resident());
        for b in 0..self.blocks.len() {
            let place = b as u32;
            let index = [
                start[0] + place % resident[0],
                start[1] + place / resident[0] % resident[1],
                start[2] + place / resident[0] / resident[1],
            ];
            let block = &mut self.blocks[b];
            block.index = index;
            block.number = index[0] + grid[0] * (index[1] + grid[1] * index[2]);
            block.shared.forget();
            block.barriers = Default::default();
            block.mbarriers.clear();
            for w in 0..self.blocks[b].warps.len() {
                let mut warp = std::mem::take(&mut self.blocks[b].warps[w]);
                self.begin_warp(&mut warp);
                self.blocks[b].warps[w] = warp;
            }
        }
        self.cluster.clear();
        let per_block = self.warps_a_block();
        let numbers: Vec<u32> = self.blocks.iter().map(|b| b.number).collect();
        self.clocks.begin(numbers.into_iter().flat_map(|n| std::iter::repeat_n(n, per_block)));
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
        warp.held.clear();
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

    /// Runs the resident blocks to their ends.
    fn cluster_runs(&mut self) -> Outcome<()> {
        let start = self.report.warp_instructions;
        loop {
            let (mut ran, mut left) = (false, false);
            for b in 0..self.blocks.len() {
                for w in 0..self.blocks[b].warps.len() {
                    if self.blocks[b].warps[w].runnable() == 0 {
                        left |= self.blocks[b].warps[w].live != 0;
                        continue;
                    }
                    let mut warp = std::mem::take(&mut self.blocks[b].warps[w]);
                    let outcome = self.run_warp(&mut warp).and_then(|()| self.finish_warp_ops(&mut warp));
                    left |= warp.live != 0;
                    ran = true;
                    self.blocks[b].warps[w] = warp;
                    outcome?;
                }
            }
            if !left {
                return Ok(());
            }
            self.pass_without_exited();
            if !ran {
                return self.stuck();
            }
            if self.idle > self.checks.stuck_after {
                return self.spinning();
            }
            if self.report.warp_instructions - start > self.checks.instructions_max {
                return self.endless();
            }
        }
    }
}
