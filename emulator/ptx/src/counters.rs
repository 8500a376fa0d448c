//! What a launch asks of memory, and how evenly its threads work: counted only where [`Checks::counters`] says so.
//!
//! Global memory comes in sectors of 32 bytes: a request, which is one instruction of a warp, costs as many as its lanes
//! touch. Shared memory has 32 banks of 4 bytes: lanes that want different words of one bank are served one after
//! another, in *wavefronts*. An access of 4 bytes a lane is served at once (a *phase*), one of 8 bytes in two halves of
//! the warp, one of 16 in four quarters; without conflicts a phase takes one wavefront (NVIDIA, CUDA C++ Best Practices
//! Guide, "Coalesced Access to Global Memory", "Shared Memory and Memory Banks"; Nsight Compute counts the same).
//!
//! [`Checks::counters`]: crate::Checks

use std::collections::BTreeMap;
use std::fmt;

/// Bytes of a sector of global memory.
pub const SECTOR_BYTES: u64 = 32;
/// Banks of shared memory, each 4 bytes wide.
const BANKS: usize = 32;
/// Bytes that shared memory gives in a phase.
const PHASE_BYTES: usize = 128;

/// What was counted, of one launch or of several.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// The launches.
    pub launches: u64,
    /// What each line of the source did, by its name: a place in a `.cu` file, or a line of PTX.
    pub lines: BTreeMap<String, Traffic>,
    /// How evenly the threads worked in the launch where they did so least.
    pub balance: Balance,
}

/// Accesses of global and of shared memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    /// Instructions of warps that read or wrote global memory.
    pub global_requests: u64,
    /// Sectors that these touched.
    pub sectors: u64,
    /// The fewest sectors that the bytes which they asked for can lie in.
    pub sectors_min: u64,
    /// Instructions of warps that read or wrote shared memory.
    pub shared_requests: u64,
    /// Phases of these.
    pub phases: u64,
    /// Wavefronts of these: as many as phases without bank conflicts.
    pub wavefronts: u64,
}

/// How evenly threads work.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Balance {
    /// Instructions of the thread that executed most.
    pub longest: u64,
    /// Instructions of all threads.
    pub instructions: u64,
    /// The threads.
    pub threads: u64,
}

impl Balance {
    /// Instructions of the longest thread for each one that a thread executed on average.
    pub fn ratio(self) -> f64 {
        self.longest as f64 * self.threads as f64 / self.instructions.max(1) as f64
    }
}

impl Traffic {
    /// Sectors touched for each one that was needed at least; 1 without global accesses.
    pub fn excess(self) -> f64 {
        if self.sectors_min == 0 { 1.0 } else { self.sectors as f64 / self.sectors_min as f64 }
    }

    /// Sectors of an instruction of a warp.
    pub fn sectors_a_request(self) -> f64 {
        self.sectors as f64 / self.global_requests.max(1) as f64
    }

    /// Wavefronts of a phase: 1 without bank conflicts, or without shared memory.
    pub fn ways(self) -> f64 {
        if self.phases == 0 { 1.0 } else { self.wavefronts as f64 / self.phases as f64 }
    }

    /// Adds other accesses.
    pub fn add(&mut self, other: Traffic) {
        self.global_requests += other.global_requests;
        self.sectors += other.sectors;
        self.sectors_min += other.sectors_min;
        self.shared_requests += other.shared_requests;
        self.phases += other.phases;
        self.wavefronts += other.wavefronts;
    }

    /// Counts an instruction of a warp on global memory: the addresses of its lanes, `bytes` at each.
    pub(crate) fn global(&mut self, addresses: impl Iterator<Item = u64>, bytes: u64) {
        let mut all: Vec<u64> = addresses.collect();
        all.sort_unstable();
        all.dedup();
        let Some(last) = bytes.checked_sub(1).filter(|_| !all.is_empty()) else { return };
        let mut sectors: Vec<u64> =
            all.iter().flat_map(|a| a / SECTOR_BYTES..=(a + last) / SECTOR_BYTES).collect();
        sectors.sort_unstable();
        sectors.dedup();
        self.global_requests += 1;
        self.sectors += sectors.len() as u64;
        self.sectors_min += (all.len() as u64 * bytes).div_ceil(SECTOR_BYTES);
    }

    /// Counts an instruction of a warp on shared memory: each lane's address, if it takes part, and `bytes` at each.
    pub(crate) fn shared(&mut self, lanes: &[Option<u64>], bytes: usize) {
        self.shared_requests += 1;
        let lanes_a_phase = (PHASE_BYTES / bytes.max(1)).min(lanes.len()).max(1);
        for phase in lanes.chunks(lanes_a_phase) {
            let mut words: Vec<u64> =
                phase.iter().flatten().flat_map(|a| a / 4..=(a + bytes as u64 - 1) / 4).collect();
            words.sort_unstable();
            words.dedup();
            let mut banks = [0; BANKS];
            words.iter().for_each(|word| banks[*word as usize % BANKS] += 1);
            let most = banks.into_iter().max().unwrap_or(0);
            if most > 0 {
                self.phases += 1;
                self.wavefronts += most;
            }
        }
    }
}

impl Counters {
    /// Adds those of another launch.
    pub fn add(&mut self, other: &Counters) {
        self.launches += other.launches;
        for (line, traffic) in &other.lines {
            self.lines.entry(line.clone()).or_default().add(*traffic);
        }
        if other.balance.ratio() > self.balance.ratio() {
            self.balance = other.balance;
        }
    }

    /// What all lines did.
    pub fn traffic(&self) -> Traffic {
        let mut all = Traffic::default();
        self.lines.values().for_each(|traffic| all.add(*traffic));
        all
    }
}

impl fmt::Display for Traffic {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "global: {} requests, {:.2} sectors each, {:.2} of what is needed; shared: {} requests, {:.2} wavefronts a phase",
            self.global_requests,
            self.sectors_a_request(),
            self.excess(),
            self.shared_requests,
            self.ways()
        )
    }
}

impl fmt::Display for Counters {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "{} launches; {}; the longest thread executes {} instructions, {:.2} of the mean",
            self.launches,
            self.traffic(),
            self.balance.longest,
            self.balance.ratio()
        )?;
        self.lines.iter().try_for_each(|(line, traffic)| writeln!(f, "    {line}: {traffic}"))
    }
}
