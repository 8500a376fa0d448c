//! A launch: what is asked for, what is checked, and what is reported.

use std::sync::MutexGuard;

use crate::device::SHARED_BYTES_OPTIN;
use crate::memory::AddressSpace;
use crate::{AllowedRace, Counters, Fault, FaultKind, Kernel, Loaded, Memory, machine};

/// The shape of a launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Launch {
    /// Blocks along x, y and z.
    pub grid: [u32; 3],
    /// Threads of a block along x, y and z.
    pub block: [u32; 3],
    /// Dynamic shared memory a block, in bytes.
    pub shared_bytes: u32,
    /// Blocks of a cluster along x, y and z; all 1 for none.
    pub cluster: [u32; 3],
}

/// Which of the checks that cost time are made. Bounds, alignment, barriers and shuffles are always checked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Checks {
    /// Reads of bytes that nothing has written.
    pub uninitialised: bool,
    /// Races in shared memory.
    pub shared_races: bool,
    /// Races in global memory.
    pub global_races: bool,
    /// How many instructions of a warp may be executed while no thread writes anything or gets past a barrier, before
    /// the launch counts as stuck.
    pub stuck_after: u64,
    /// How many instructions of a warp a block (of a cluster: all its blocks) may execute before the launch counts as
    /// endless.
    pub instructions_max: u64,
    /// Counts accesses by line, and how evenly threads work ([`Report::counters`]).
    pub counters: bool,
    /// Perturbs results of approximate instructions of f32 (`ex2.approx` and the like) within the error that PTX allows
    /// them, as this seed says: the same operand has the same error.
    pub approximate: Option<u64>,
    /// The order in which blocks, warps and lanes run.
    pub schedule: Schedule,
    /// Races that are not reported.
    pub allowed: Vec<AllowedRace>,
    /// A barrier of all threads of a block that some of them skip by exiting is a fault. CUDA lets the others pass since
    /// compute capability 7.0, but only where the condition to exit is meant.
    pub strict_barriers: bool,
}

/// The order in which the blocks of a grid, the warps of a block, and lanes of a warp run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Schedule {
    /// The fast one, the same for all launches: blocks one after the other, warps in turn, lanes of a warp together.
    #[default]
    Fixed,
    /// Drawn from a seed: several blocks at once, a warp for a few instructions at a time, lanes of a warp at different
    /// instructions. The same seed gives the same order.
    Seeded(u64),
}

impl Default for Checks {
    fn default() -> Checks {
        let (uninitialised, shared_races, global_races) = (true, true, true);
        Checks {
            uninitialised,
            shared_races,
            global_races,
            stuck_after: 1 << 28,
            instructions_max: 1 << 29,
            counters: false,
            approximate: None,
            schedule: Schedule::Fixed,
            allowed: Vec::new(),
            strict_barriers: false,
        }
    }
}

/// Runs a test once for each seed, with the seed as its argument.
///
/// # Errors
/// The first error of the test, with the seed before it. A panic of the test passes through, after the seed was printed.
pub fn for_each_seed<E: std::fmt::Display>(
    seeds: impl IntoIterator<Item = u64>,
    mut test: impl FnMut(u64) -> Result<(), E>,
) -> Result<(), String> {
    struct Running(u64);
    impl Drop for Running {
        fn drop(&mut self) {
            if std::thread::panicking() {
                eprintln!("this was under the seed {}", self.0);
            }
        }
    }
    for seed in seeds {
        let running = Running(seed);
        test(running.0).map_err(|error| format!("under the seed {seed}: {error}"))?;
    }
    Ok(())
}

/// What a launch did.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// Instructions executed by warps, whatever the number of their active lanes.
    pub warp_instructions: u64,
    /// Instructions executed by threads.
    pub lane_instructions: u64,
    /// Bytes read from global memory.
    pub global_bytes_read: u64,
    /// Bytes written to global memory.
    pub global_bytes_written: u64,
    /// Barriers that a block passed together.
    pub barriers: u64,
    /// What the kernel printed.
    pub output: String,
    /// Which bytes of global memory it read and wrote, in ascending order in each allocation; those of an allocation
    /// that it touches in very many places are not all there. Empty if races in global memory are not looked for.
    pub touched: Vec<Touched>,
    /// What [`Checks::counters`] asks for; empty without.
    pub counters: Counters,
}

/// Bytes of global memory that a launch touched: `start .. end`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Touched {
    /// The first byte's address.
    pub start: u64,
    /// The address behind the last byte.
    pub end: u64,
    /// Whether they were written; if so they may have been read as well.
    pub written: bool,
}

/// Runs a kernel to its end, in the order that `checks` says.
///
/// `memory` is the module's own device, then those whose memory the kernel may reach too. `parameters` are the bytes
/// of the kernel's parameters as [`crate::Kernel::parameters`] lays them out.
///
/// # Errors
/// The first fault. What the kernel has written until then stays written.
pub fn launch(
    loaded: &Loaded,
    kernel: &str,
    memory: &[&Memory],
    launch: &Launch,
    parameters: &[u8],
    checks: &Checks,
) -> Result<Report, Fault> {
    run(loaded, kernel, memory, launch, parameters, checks, None)
}

/// The same with all blocks on the device at once, so that they may wait for each other
/// (`cooperative_groups::this_grid().sync()`). How many blocks a device would take is not looked at.
///
/// # Errors
/// The first fault; a launch with clusters is refused.
pub fn launch_cooperative(
    loaded: &Loaded,
    kernel: &str,
    memory: &[&Memory],
    launch: &Launch,
    parameters: &[u8],
    checks: &Checks,
) -> Result<Report, Fault> {
    let refused = |why: String| Fault { kernel: kernel.into(), ..Fault::outside(FaultKind::BadLaunch, why) };
    if launch.cluster != [1, 1, 1] {
        return Err(refused("clusters in a cooperative launch".into()));
    }
    let own = memory.first().ok_or_else(|| refused("no memory".into()))?;
    let workspace = own.allocate(WORKSPACE_BYTES).map_err(|error| refused(error.to_string()))?;
    own.fill(workspace, &[0], WORKSPACE_BYTES)?;
    let outcome = run(loaded, kernel, memory, launch, parameters, checks, Some(workspace));
    own.free(workspace)?;
    let mut report = outcome?;
    // No other code has its address.
    report.touched.retain(|touched| touched.start >> 8 != workspace >> 8);
    Ok(report)
}

/// What a kernel finds at the address in `%envreg1` and `%envreg2`: four bytes that it leaves alone, then the grid's
/// barrier.
const WORKSPACE_BYTES: u64 = 8;

fn run(
    loaded: &Loaded,
    kernel: &str,
    memory: &[&Memory],
    launch: &Launch,
    parameters: &[u8],
    checks: &Checks,
    workspace: Option<u64>,
) -> Result<Report, Fault> {
    let refused = |why: String| Fault { kernel: kernel.into(), ..Fault::outside(FaultKind::BadLaunch, why) };
    let Some(found) = loaded.module().kernel(kernel) else { return Err(refused("no such kernel".into())) };
    let mut launch = *launch;
    if let (Some(cluster), [1, 1, 1]) = (found.cluster, launch.cluster) {
        launch.cluster = cluster;
    }
    fits(found, &launch, parameters).map_err(refused)?;
    machine::run(loaded, found, lock(memory), launch, parameters, checks.clone(), workspace)
}

/// Locks memories, each once, in one order for all threads; the first stays first.
fn lock<'m>(memory: &[&'m Memory]) -> Vec<MutexGuard<'m, AddressSpace>> {
    let mut order: Vec<usize> = (0..memory.len()).collect();
    order.sort_by_key(|&i| memory[i].order());
    order.dedup_by_key(|i| memory[*i].order());
    let mut locked: Vec<_> = order.into_iter().map(|i| (i, memory[i].lock())).collect();
    locked.sort_by_key(|(i, _)| *i);
    locked.into_iter().map(|(_, space)| space).collect()
}

/// Whether a device would take the launch, or why not.
fn fits(kernel: &Kernel, launch: &Launch, parameters: &[u8]) -> Result<(), String> {
    let Launch { grid, block, shared_bytes, cluster } = *launch;
    let product = |[x, y, z]: [u32; 3]| x as u64 * y as u64 * z as u64;
    let threads = product(block);
    let limit = kernel.block_threads_max() as u64;
    if threads == 0 || threads > limit || block[2] > 64 {
        return Err(format!("a block of {block:?} threads, where 1 to {limit} can be"));
    }
    if product(grid) == 0 || product(grid) > u32::MAX as u64 || grid[1] > 65535 || grid[2] > 65535 {
        return Err(format!("a grid of {grid:?} blocks"));
    }
    let aligned = product(cluster) > 0 && (0..3).all(|axis| grid[axis] % cluster[axis] == 0);
    if !aligned || product(cluster) > 16 {
        return Err(format!("clusters of {cluster:?} blocks in a grid of {grid:?}"));
    }
    let shared = kernel.shared_bytes() as u64 + shared_bytes as u64;
    if shared > SHARED_BYTES_OPTIN as u64 {
        return Err(format!("{shared} bytes of shared memory, where {SHARED_BYTES_OPTIN} can be"));
    }
    if parameters.len() != kernel.parameter_bytes() as usize {
        return Err(format!(
            "{} bytes of parameters where {} are wanted",
            parameters.len(),
            kernel.parameter_bytes()
        ));
    }
    Ok(())
}
