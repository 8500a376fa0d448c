//! The first test of a stranger's kernels, as `docs/kernel_tests.md` shows it. `kernels.ptx` is what NVRTC makes of `kernels.cu`.

use std::sync::Arc;

use phalanx_ptx::{
    Checks, Fault, FaultKind, Launch, Loaded, Memory, Module, Schedule, for_each_seed, launch,
};

/// Launches a kernel over the numbers 0, 1, 2, ... in an order of threads. The sums that it leaves, or what it did wrong.
fn sums(kernel: &str, blocks: u32, threads: u32, n: i32, schedule: Schedule) -> Result<Vec<i32>, Fault> {
    let memory = Memory::new(1 << 20);
    let module = Module::parse(include_str!("kernels.ptx")).expect("PTX");
    let loaded = Loaded::new(Arc::new(module), &memory).expect("room");
    // What a host would do: two allocations, a copy, a launch, a copy back.
    let x = memory.allocate(4 * n as u64).expect("room");
    let sums = memory.allocate(4 * blocks as u64).expect("room");
    let numbers: Vec<u8> = (0..n).flat_map(i32::to_le_bytes).collect();
    memory.write(x, &numbers)?;
    let shape = Launch { grid: [blocks, 1, 1], block: [threads, 1, 1], shared_bytes: 0, cluster: [1, 1, 1] };
    let parameters = [&x.to_le_bytes()[..], &sums.to_le_bytes(), &n.to_le_bytes()].concat();
    let checks = Checks { schedule, ..Checks::default() };
    launch(&loaded, kernel, &[&memory], &shape, &parameters, &checks)?;
    memory.check_written(sums, 4 * blocks as u64)?;
    let mut bytes = vec![0; 4 * blocks as usize];
    memory.read(sums, &mut bytes)?;
    Ok(bytes.chunks_exact(4).map(|word| i32::from_le_bytes(word.try_into().unwrap())).collect())
}

#[test]
fn sums_are_right_in_every_order_of_threads() {
    let wanted: Vec<i32> = (0..3).map(|block| (128 * block..300.min(128 * (block + 1))).sum()).collect();
    assert_eq!(sums("block_sums", 3, 128, 300, Schedule::Fixed).unwrap(), wanted);
    let run = |seed| sums("block_sums", 3, 128, 300, Schedule::Seeded(seed));
    for_each_seed(1..=64, |seed| run(seed).map(|found| assert_eq!(found, wanted))).unwrap();
}

#[test]
fn a_missing_barrier_is_a_race() {
    let fault = sums("without_barrier", 3, 128, 300, Schedule::Fixed).unwrap_err();
    assert_eq!(fault.kind, FaultKind::SharedRace);
    assert_eq!(
        fault.to_string(),
        "race in shared memory: writes 4 bytes at offset 256 of shared memory, read at kernels.cu:22 by thread (0, 0, 0), \
         with no barrier between, kernel \"without_barrier\" at kernels.cu:20, block (0, 0, 0), thread (64, 0, 0)"
    );
}

#[test]
fn a_missing_bound_is_an_illegal_access() {
    let fault = sums("without_bound", 3, 128, 300, Schedule::Fixed).unwrap_err();
    assert_eq!(fault.kind, FaultKind::OutOfBounds);
    assert!(fault.message.ends_with("at offset 1200 of an allocation of 1200 bytes"), "{fault}");
    assert_eq!((fault.at.unwrap().line, fault.block), (32, [2, 0, 0]));
}

#[test]
fn a_result_that_is_not_there_is_found_by_the_host() {
    let fault = sums("odd_blocks_forgotten", 3, 128, 300, Schedule::Fixed).unwrap_err();
    assert_eq!(
        fault.to_string(),
        "uninitialised read: read of 12 bytes at offset 0 of an allocation of 12 bytes, of which nothing has written 4 at offset 4"
    );
}

#[test]
fn what_relies_on_an_order_is_wrong_in_another() {
    // The fixed order hides it.
    assert_eq!(sums("in_step", 1, 32, 32, Schedule::Fixed).unwrap(), [496]);
    let outcome = for_each_seed(1..=64, |seed| match sums("in_step", 1, 32, 32, Schedule::Seeded(seed)) {
        Ok(found) if found == [496] => Ok(()),
        other => Err(format!("{other:?}")),
    });
    assert!(outcome.unwrap_err().starts_with("under the seed "));
}

mod page {
    /// A code block of the page that begins with this text.
    fn shown(page: &str, begin: &str) -> bool {
        let mut blocks = page.split("```").skip(1).step_by(2);
        blocks
            .any(|block| block.split_once('\n').is_some_and(|(_, text)| text.trim_end() == begin.trim_end()))
    }

    #[test]
    fn it_shows_what_runs_here() {
        let (page, here) = (include_str!("../../../docs/kernel_tests.md"), include_str!("kernels.rs"));
        let start = here.find("use std::sync::Arc;").unwrap();
        let tests = &here[start..here.rfind("\nmod page {").unwrap()];
        assert!(shown(page, tests), "the page's file is not the tests here");
        assert!(shown(page, include_str!("kernels.cu")), "the page's kernels are not kernels.cu");
    }
}
