//! The order in which blocks, warps and lanes run: programs that only a lucky order makes right are found under some
//! seeds, right ones are right under all; and grids whose blocks wait for each other.

mod common;

use common::{kernel, load, read_words, shape, words};
use phalanx_ptx::{Checks, Fault, FaultKind, Launch, Memory, Report, Schedule, launch};

fn run(
    memory: &Memory,
    body: &str,
    shape: Launch,
    parameters: &[u64],
    checks: &Checks,
) -> Result<Report, Fault> {
    let bytes: Vec<u8> = parameters.iter().flat_map(|p| p.to_le_bytes()).collect();
    launch(&load(&kernel(parameters.len(), body), memory), "k", &[memory], &shape, &bytes, checks)
}

/// The words that a kernel leaves in its one parameter, of zeros, under a schedule.
fn outcome(body: &str, shape: Launch, n: usize, schedule: Schedule) -> Result<Vec<u32>, Fault> {
    let memory = Memory::new(1 << 20);
    let out = words(&memory, &vec![0; n]);
    run(&memory, body, shape, &[out], &Checks { schedule, ..Checks::default() })?;
    Ok(read_words(&memory, out, n))
}

const SEEDS: std::ops::Range<u64> = 0..24;

/// A program that is right in the fixed order is wrong under some seeds.
fn lucky(body: &str, shape: Launch, right: &[u32]) {
    assert_eq!(outcome(body, shape, right.len(), Schedule::Fixed).unwrap(), right);
    let wrong = SEEDS.filter(|&seed| {
        outcome(body, shape, right.len(), Schedule::Seeded(seed)).is_ok_and(|found| found != right)
    });
    assert!(wrong.count() > 0, "no seed makes it wrong");
}

/// A program is right in every order.
fn right(body: &str, shape: Launch, right: &[u32]) {
    for schedule in SEEDS.map(Schedule::Seeded).chain([Schedule::Fixed]) {
        let found = outcome(body, shape, right.len(), schedule).unwrap_or_else(|fault| panic!("{fault}"));
        assert_eq!(found, right, "{schedule:?}");
    }
}

/// A row of words in shared memory: a thread's own at `%r3`.
const ROW: &str = ".shared .b32 s[64]; shl.b32 %r1, %t, 2; mov.u32 %r2, s; add.u32 %r3, %r2, %r1; st.volatile.shared.u32 [%r3], 0; bar.sync 0;";

/// Each thread of two warps reads what the thread opposite wrote: `s[t] = t + 1; o[t] = s[t ^ 32]`.
fn opposite(sync: &str) -> String {
    format!(
        "{ROW} add.u32 %r4, %t, 1; xor.b32 %r5, %t, 32; shl.b32 %r6, %r5, 2; add.u32 %r6, %r2, %r6;
        st.volatile.shared.u32 [%r3], %r4; {sync} ld.volatile.shared.u32 %r7, [%r6]; setp.ge.u32 %q0, %t, 32; @%q0 exit;
        mul.wide.u32 %d0, %t, 4; add.u64 %d0, %p0, %d0; st.global.u32 [%d0], %r7;"
    )
}

#[test]
fn volatile_shared_memory_without_a_barrier_is_found() {
    let wanted: Vec<u32> = (33..65).collect();
    lucky(&opposite(""), shape(1, 64), &wanted);
    right(&opposite("bar.sync 0;"), shape(1, 64), &wanted);
}

/// The sum of 0..64 by the last warp alone, as it was written before lanes could part: `sync` stands where
/// `__syncwarp()` belongs.
fn warp_sum(sync: &str) -> String {
    let step = |n: u32| {
        format!(
            "ld.volatile.shared.u32 %r4, [%r3]; ld.volatile.shared.u32 %r5, [%r3+{}]; {sync} add.u32 %r4, %r4, %r5; st.volatile.shared.u32 [%r3], %r4; {sync}",
            n * 4
        )
    };
    let steps: String = [16, 8, 4, 2, 1].map(step).concat();
    format!(
        "{ROW} st.volatile.shared.u32 [%r3], %t; bar.sync 0; setp.ge.u32 %q0, %t, 32; @%q0 exit;
        ld.volatile.shared.u32 %r4, [%r3]; ld.volatile.shared.u32 %r5, [%r3+128]; add.u32 %r4, %r4, %r5; st.volatile.shared.u32 [%r3], %r4; {sync} {steps}
        setp.ne.u32 %q1, %t, 0; @%q1 exit; st.global.u32 [%p0], %r4;"
    )
}

#[test]
fn a_sum_of_a_warp_that_relies_on_lanes_in_step_is_found() {
    lucky(&warp_sum(""), shape(1, 64), &[64 * 63 / 2]);
    right(&warp_sum("bar.warp.sync -1;"), shape(1, 64), &[64 * 63 / 2]);
}

#[test]
fn a_volatile_counter_is_no_atomic_one() {
    let counter =
        "ld.volatile.global.u32 %r1, [%p0]; add.u32 %r1, %r1, 1; st.volatile.global.u32 [%p0], %r1;";
    lucky(counter, shape(8, 1), &[8]);
    right("red.global.add.u32 [%p0], 1;", shape(8, 64), &[512]);
}

#[test]
fn a_shuffle_among_lanes_of_a_stale_mask_is_found() {
    // The mask of the lanes that happen to be here names others than those that come.
    let body = |mask: &str| {
        format!(
            "{mask} redux.sync.add.s32 %r2, 1, %r1; setp.ne.u32 %q0, %t, 0; @%q0 exit; st.global.u32 [%p0], %r2;"
        )
    };
    lucky(&body("activemask.b32 %r1;"), shape(1, 32), &[32]);
    right(&body("mov.u32 %r1, -1;"), shape(1, 32), &[32]);
}

#[test]
fn a_seed_repeats_its_order_and_a_fault_names_it() {
    let body = "st.global.u32 [%p0], %c;";
    let fault = |seed| outcome(body, shape(4, 1), 1, Schedule::Seeded(seed)).unwrap_err();
    let mut seen = std::collections::HashSet::new();
    for seed in SEEDS {
        let found = fault(seed);
        assert_eq!((found.kind, found.seed), (FaultKind::GlobalRace, Some(seed)));
        assert!(found.to_string().ends_with(&format!(", in the order of seed {seed}")), "{found}");
        assert_eq!(found, fault(seed));
        seen.insert((found.block, found.message));
    }
    assert!(seen.len() > 3, "{seen:?}");
}

/// Blocks count themselves, wait until all `n` have, and write what the block opposite wrote.
fn meeting(n: u32, arrive: &str) -> String {
    format!(
        "mul.wide.u32 %d0, %c, 4; add.u64 %d1, %p0, %d0; setp.ne.u32 %q0, %t, 0; @%q0 bra MEET; add.u32 %r1, %c, 100; st.global.u32 [%d1+4], %r1;
        {arrive} red.global.add.u32 [%p0], 1; WAIT: ld.volatile.global.u32 %r2, [%p0]; setp.lt.u32 %q1, %r2, {n}; @%q1 bra WAIT; membar.gl;
        MEET: bar.sync 0; setp.ne.u32 %q0, %t, 1; @%q0 exit; sub.u32 %r3, {}, %c; mul.wide.u32 %d2, %r3, 4; add.u64 %d2, %p0, %d2; ld.global.u32 %r4, [%d2+4];
        st.global.u32 [%d1+{}], %r4;",
        n - 1,
        n * 4 + 4
    )
}

#[test]
fn a_grid_meets_at_a_barrier_of_its_own_making_if_its_blocks_fit() {
    let n = 12u32;
    let wanted: Vec<u32> = [n].into_iter().chain(100..100 + n).chain((100..100 + n).rev()).collect();
    right(&meeting(n, "membar.gl;"), shape(n, 64), &wanted);
    let fault = outcome(&meeting(n, ""), shape(n, 64), wanted.len(), Schedule::Fixed).unwrap_err();
    assert_eq!(fault.kind, FaultKind::GlobalRace, "{fault}");
}

#[test]
fn a_grid_that_does_not_fit_waits_forever_for_its_last_blocks() {
    // One block of 1024 threads with so many registers is on each of four multiprocessors.
    let memory = Memory::new(1 << 20);
    for (n, schedule) in [(4, Schedule::Fixed), (5, Schedule::Fixed), (5, Schedule::Seeded(3))] {
        let x = words(&memory, &[0; 32]);
        let checks = Checks { stuck_after: 1 << 18, schedule, ..Checks::default() };
        let outcome = run(&memory, &meeting(n, "membar.gl;"), shape(n, 1024), &[x], &checks);
        if n == 4 {
            outcome.unwrap();
            continue;
        }
        let fault = outcome.unwrap_err();
        assert_eq!(fault.kind, FaultKind::Deadlock, "{fault}");
        assert!(
            fault.message.contains("4 of the grid's 5 blocks are on the device, which is all that fit"),
            "{fault}"
        );
    }
}

#[test]
fn blocks_of_clusters_keep_to_their_own_cluster() {
    // Each block reads a word of the other block of its cluster, four clusters are under way together.
    let body = ".shared .b32 s; st.shared.u32 [s], %c; barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned; mov.u32 %r1, %cluster_ctarank; xor.b32 %r1, %r1, 1; mov.u32 %r2, s; mapa.shared::cluster.u32 %r3, %r2, %r1;
        ld.shared::cluster.u32 %r4, [%r3]; ld.shared.u32 %r5, [s]; mul.wide.u32 %d0, %c, 4; add.u64 %d0, %p0, %d0; setp.eq.u32 %q0, %t, 0; @%q0 st.global.u32 [%d0], %r4; barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;";
    let wanted: Vec<u32> = (0..16).map(|block| block ^ 1).collect();
    right(
        &body.replace("st.shared.u32 [s], %c;", "setp.eq.u32 %q1, %t, 0; @%q1 st.shared.u32 [s], %c;"),
        Launch { cluster: [2, 1, 1], ..shape(16, 64) },
        &wanted,
    );
}
