//! Races: each that is missing an order is named with line, block and thread, and what orders two accesses is enough.
//! The fences between threads and the asynchronous proxy (`fence.proxy.async`, `wgmma.fence`) likewise.

mod common;

use common::{kernel, read_words, run, shape, words};
use phalanx_ptx::{Fault, FaultKind, Launch, Memory, Report};

fn at(line: u32) -> String {
    format!("\n.loc 1 {line} 3\n")
}

fn outcome(memory: &Memory, body: &str, shape: Launch, parameters: &[u64]) -> Result<Report, Fault> {
    run(&format!(".file 1 \"a.cu\"\n{}", kernel(parameters.len(), body)), memory, shape, parameters)
}

/// Expects a race at a line, with the other party's line and thread in its message.
fn expect(fault: Result<Report, Fault>, kind: FaultKind, line: u32, other: &[&str]) {
    let fault = fault.expect_err("no race was found");
    let found = fault.to_string();
    assert_eq!(fault.kind, kind, "{found}");
    assert_eq!(fault.at.as_ref().map(|at| at.line), Some(line), "{found}");
    for text in other {
        assert!(found.contains(text), "`{text}` is not in `{found}`");
    }
}

const ROW: &str = ".shared .b32 s[1024]; shl.b32 %r1, %t, 2; mov.u32 %r2, s; add.u32 %r3, %r2, %r1;";

#[test]
fn a_missing_barrier_between_warps() {
    let memory = Memory::new(1 << 20);
    let body = |sync: &str| {
        format!(
            "{ROW} {} st.shared.u32 [%r3], %t; {sync} xor.b32 %r4, %r3, 128; {} ld.shared.u32 %r5, [%r4];",
            at(1),
            at(2)
        )
    };
    // Warp 0 reads what warp 1 has still to write: the writer finds the read, or the read finds nothing written.
    let init = format!("{ROW} st.shared.u32 [%r3], 0; bar.sync 0; {}", &body("")[ROW.len()..]);
    expect(
        outcome(&memory, &init, shape(1, 64), &[]),
        FaultKind::SharedRace,
        1,
        &["read at a.cu:2 by thread (32, 0, 0)", "thread (0, 0, 0)", "no barrier between"],
    );
    outcome(&memory, &body("bar.sync 0;"), shape(1, 64), &[]).unwrap();
}

#[test]
fn a_missing_barrier_before_the_next_write() {
    let memory = Memory::new(1 << 20);
    let body = |sync: &str| {
        format!(
            "{ROW} st.shared.u32 [%r3], %t; bar.sync 0; xor.b32 %r4, %r3, 128; {} ld.shared.u32 %r5, [%r4]; {sync} {} st.shared.u32 [%r3], %r5;",
            at(3),
            at(4)
        )
    };
    expect(
        outcome(&memory, &body(""), shape(1, 64), &[]),
        FaultKind::SharedRace,
        3,
        &["written at a.cu:4 by thread (32, 0, 0)", "thread (0, 0, 0)"],
    );
    outcome(&memory, &body("bar.sync 0;"), shape(1, 64), &[]).unwrap();
}

#[test]
fn a_missing_syncwarp_between_lanes() {
    let memory = Memory::new(1 << 20);
    let body = |sync: &str| {
        format!(
            "{ROW} {} st.shared.u32 [%r3], %t; {sync} xor.b32 %r4, %r3, 4; {} ld.shared.u32 %r5, [%r4];",
            at(5),
            at(6)
        )
    };
    expect(
        outcome(&memory, &body(""), shape(1, 32), &[]),
        FaultKind::SharedRace,
        6,
        &["written at a.cu:5 by thread (1, 0, 0)", "no __syncwarp or barrier between"],
    );
    outcome(&memory, &body("bar.warp.sync -1;"), shape(1, 32), &[]).unwrap();
    // A shuffle is no barrier for memory.
    expect(
        outcome(&memory, &body("shfl.sync.idx.b32 %r9, %r3, 0, 31, -1;"), shape(1, 32), &[]),
        FaultKind::SharedRace,
        6,
        &[],
    );
}

#[test]
fn parts_of_a_warp_synchronize_among_themselves() {
    let memory = Memory::new(1 << 20);
    let body = |by: u32| {
        format!(
            "{ROW} setp.lt.u32 %q0, %t, 16; selp.b32 %r6, 0x0000ffff, 0xffff0000, %q0; st.shared.u32 [%r3], %t; {} @%q0 bra LOW; bar.warp.sync %r6; bra JOIN; LOW: bar.warp.sync %r6; JOIN: xor.b32 %r4, %r3, {by}; {} ld.shared.u32 %r5, [%r4];",
            at(7),
            at(8)
        )
    };
    outcome(&memory, &body(4), shape(1, 32), &[]).unwrap();
    expect(outcome(&memory, &body(64), shape(1, 32), &[]), FaultKind::SharedRace, 8, &[]);
}

#[test]
fn lanes_that_write_one_place_at_once_must_agree() {
    let memory = Memory::new(1 << 20);
    let same = format!(".shared .b32 s; {} st.shared.u32 [s], 5; ld.shared.u32 %r1, [s];", at(9));
    outcome(&memory, &same, shape(1, 32), &[]).unwrap();
    let differ = format!(".shared .b32 s; {} st.shared.u32 [s], %t;", at(10));
    expect(
        outcome(&memory, &differ, shape(1, 32), &[]),
        FaultKind::SharedRace,
        10,
        &["another value in the same instruction"],
    );
    // The same value from two warps is a race all the same.
    expect(outcome(&memory, &same, shape(1, 64), &[]), FaultKind::SharedRace, 9, &["by thread (31, 0, 0)"]);
}

#[test]
fn atomic_operations_race_only_with_others() {
    let memory = Memory::new(1 << 20);
    let start = ".shared .b32 s; setp.eq.u32 %q0, %t, 0; @%q0 st.shared.u32 [s], 0; bar.sync 0;";
    outcome(
        &memory,
        &format!("{start} red.shared.add.u32 [s], 1; bar.sync 0; ld.shared.u32 %r1, [s];"),
        shape(1, 128),
        &[],
    )
    .unwrap();
    let body = format!("{start} {} red.shared.add.u32 [s], 1; {} ld.shared.u32 %r1, [s];", at(11), at(12));
    expect(outcome(&memory, &body, shape(1, 128), &[]), FaultKind::SharedRace, 12, &["written at a.cu:11"]);
}

#[test]
fn neighbouring_bytes_and_halves_do_not_race() {
    let memory = Memory::new(1 << 20);
    let out = words(&memory, &[0; 128]);
    let body = "cvt.u64.u32 %d0, %t; add.u64 %d1, %p0, %d0; mul.lo.u64 %d2, %d0, 2; add.u64 %d2, %p0, %d2; cvt.u16.u32 %h1, %t; mad.lo.u32 %r1, %c, 32, %t; cvt.u64.u32 %d3, %r1; add.u64 %d3, %p0, %d3; st.global.u8 [%d3], %h1; mul.wide.u32 %d4, %r1, 2; add.u64 %d4, %p0, %d4; st.global.u16 [%d4+128], %h1;";
    outcome(&memory, body, shape(4, 32), &[out]).unwrap();
    let shared = ".shared .b8 s[256]; mov.u32 %r1, s; add.u32 %r1, %r1, %t; cvt.u16.u32 %h1, %t; st.shared.u8 [%r1], %h1; bar.sync 0; xor.b32 %r2, %r1, 4; ld.shared.u8 %r3, [%r2];";
    outcome(&memory, shared, shape(1, 256), &[]).unwrap();
}

#[test]
fn threads_of_a_block_race_in_global_memory() {
    let memory = Memory::new(1 << 20);
    let x = words(&memory, &[0; 64]);
    let body = |sync: &str| {
        format!(
            "mul.wide.u32 %d0, %t, 4; add.u64 %d0, %p0, %d0; {} st.global.u32 [%d0], %t; {sync} xor.b64 %d1, %d0, 128; {} ld.global.u32 %r1, [%d1];",
            at(13),
            at(14)
        )
    };
    expect(
        outcome(&memory, &body(""), shape(1, 64), &[x]),
        FaultKind::GlobalRace,
        13,
        &["a.cu:14 by thread (0, 0, 0)"],
    );
    outcome(&memory, &body("bar.sync 0;"), shape(1, 64), &[x]).unwrap();
    // What an earlier launch wrote is there.
    outcome(
        &memory,
        "mul.wide.u32 %d0, %t, 4; add.u64 %d0, %p0, %d0; xor.b64 %d1, %d0, 128; ld.global.u32 %r1, [%d1];",
        shape(1, 64),
        &[x],
    )
    .unwrap();
}

#[test]
fn blocks_race_in_global_memory() {
    let memory = Memory::new(1 << 20);
    let x = words(&memory, &[0; 64]);
    let body = format!("mul.wide.u32 %d0, %t, 4; add.u64 %d0, %p0, %d0; {} st.global.u32 [%d0], %c;", at(15));
    expect(
        outcome(&memory, &body, shape(2, 32), &[x]),
        FaultKind::GlobalRace,
        15,
        &[
            "written at a.cu:15 by thread (0, 0, 0) of block (0, 0, 0)",
            "nothing orders the two blocks",
            "block (1, 0, 0)",
        ],
    );
    let body = format!(
        "{} ld.global.u32 %r1, [%p0]; setp.eq.u32 %q0, %c, 3; {} @%q0 st.global.u32 [%p0], 1;",
        at(16),
        at(17)
    );
    expect(outcome(&memory, &body, shape(4, 1), &[x]), FaultKind::GlobalRace, 17, &["read at a.cu:16"]);
    outcome(&memory, "red.global.add.u32 [%p0], 1;", shape(4, 32), &[x]).unwrap();
}

/// Every block writes a sum, the last one reads all: the pattern of CUDA's threadFenceReduction sample.
fn last_block(fence: &str, barrier: &str) -> String {
    format!(
        ".shared .b32 last; mul.wide.u32 %d0, %c, 4; add.u64 %d1, %p0, %d0; setp.ne.u32 %q0, %t, 0; @%q0 bra WAIT; {} add.u32 %r1, %c, 100; st.global.u32 [%d1], %r1; {fence}
        atom.global.inc.u32 %r2, [%p1], 7; setp.eq.u32 %q1, %r2, 7; selp.u32 %r3, 1, 0, %q1; st.shared.u32 [last], %r3; WAIT: {barrier} ld.shared.u32 %r4, [last]; setp.eq.u32 %q2, %r4, 0; @%q2 exit;
        setp.ge.u32 %q3, %t, 8; @%q3 exit; mul.wide.u32 %d2, %t, 4; add.u64 %d3, %p0, %d2; {} ld.global.u32 %r5, [%d3]; add.u64 %d4, %p2, %d2; st.global.u32 [%d4], %r5;",
        at(18),
        at(19)
    )
}

#[test]
fn the_last_block_may_read_what_others_wrote_before_a_fence() {
    let memory = Memory::new(1 << 20);
    let (x, counter, out) =
        (memory.allocate(32).unwrap(), words(&memory, &[0]), memory.allocate(32).unwrap());
    outcome(&memory, &last_block("membar.gl;", "bar.sync 0;"), shape(8, 64), &[x, counter, out]).unwrap();
    assert_eq!(read_words(&memory, out, 8), (100..108).collect::<Vec<_>>());
    let missing = outcome(&memory, &last_block("", "bar.sync 0;"), shape(8, 64), &[x, counter, out]);
    expect(
        missing,
        FaultKind::GlobalRace,
        19,
        &["written at a.cu:18 by thread (0, 0, 0) of block (0, 0, 0)"],
    );
}

#[test]
fn a_fence_of_every_thread_before_the_barrier_is_enough() {
    // All threads write and fence, then one of them counts the block.
    let memory = Memory::new(1 << 20);
    let (x, counter, out) =
        (memory.allocate(1024).unwrap(), words(&memory, &[0]), memory.allocate(1024).unwrap());
    let body = ".shared .b32 last; mad.lo.u32 %r1, %c, 64, %t; mul.wide.u32 %d0, %r1, 4; add.u64 %d1, %p0, %d0; st.global.u32 [%d1], %r1; fence.acq_rel.gpu; bar.sync 0;
        setp.ne.u32 %q0, %t, 0; @%q0 bra WAIT; atom.global.add.u32 %r2, [%p1], 1; st.shared.u32 [last], %r2; WAIT: bar.sync 0; ld.shared.u32 %r3, [last]; setp.ne.u32 %q1, %r3, 3; @%q1 exit;
        mov.u32 %r4, 0; LOOP: mad.lo.u32 %r5, %r4, 64, %t; mul.wide.u32 %d2, %r5, 4; add.u64 %d3, %p0, %d2; ld.global.u32 %r6, [%d3]; add.u64 %d4, %p2, %d2; st.global.u32 [%d4], %r6; add.u32 %r4, %r4, 1; setp.lt.u32 %q2, %r4, 4; @%q2 bra LOOP;";
    outcome(&memory, body, shape(4, 64), &[x, counter, out]).unwrap();
    assert_eq!(read_words(&memory, out, 256), (0..256).collect::<Vec<_>>());
}

#[test]
fn release_and_acquire_order_two_warps() {
    let memory = Memory::new(1 << 20);
    let x = words(&memory, &[0, 0]);
    let body = |store: &str, load: &str| {
        format!(
            "setp.ge.u32 %q0, %t, 32; @%q0 bra READER; setp.ne.u32 %q1, %t, 0; @%q1 exit; {} st.global.u32 [%p0+4], 7; {store} [%p0], 1; ret;
            READER: setp.ne.u32 %q1, %t, 32; @%q1 exit; SPIN: {load} %r1, [%p0]; setp.eq.u32 %q2, %r1, 0; @%q2 bra SPIN; {} ld.global.u32 %r2, [%p0+4];",
            at(20),
            at(21)
        )
    };
    outcome(&memory, &body("st.release.gpu.global.u32", "ld.acquire.gpu.global.u32"), shape(1, 64), &[x])
        .unwrap();
    memory.write(x, &[0; 8]).unwrap();
    let relaxed =
        outcome(&memory, &body("st.relaxed.gpu.global.u32", "ld.relaxed.gpu.global.u32"), shape(1, 64), &[x]);
    expect(relaxed, FaultKind::GlobalRace, 21, &["written at a.cu:20"]);
    memory.write(x, &[0; 8]).unwrap();
    let body = |fence: &str| {
        body("membar.gl; st.volatile.global.u32", "ld.volatile.global.u32")
            .replace("@%q2 bra SPIN;", &format!("@%q2 bra SPIN; {fence}"))
    };
    outcome(&memory, &body("membar.gl;"), shape(1, 64), &[x]).unwrap();
    memory.write(x, &[0; 8]).unwrap();
    let unfenced = outcome(&memory, &body(""), shape(1, 64), &[x]);
    expect(unfenced, FaultKind::GlobalRace, 21, &["a flag was read", "no acquire or fence behind"]);
}

#[test]
fn reading_alone_is_no_race() {
    let memory = Memory::new(1 << 20);
    let x = words(&memory, &[1; 64]);
    let out = memory.allocate(4 * 8 * 64).unwrap();
    let body = "mul.wide.u32 %d0, %t, 4; add.u64 %d1, %p0, %d0; ld.global.u32 %r1, [%d1]; ld.global.u32 %r2, [%p0]; mad.lo.u32 %r3, %c, 64, %t; mul.wide.u32 %d2, %r3, 4; add.u64 %d2, %p1, %d2; add.u32 %r1, %r1, %r2; st.global.u32 [%d2], %r1;";
    outcome(&memory, body, shape(8, 64), &[x, out]).unwrap();
}

#[test]
fn a_loop_of_compare_and_swap_may_begin_with_a_plain_read() {
    let memory = Memory::new(1 << 20);
    let x = words(&memory, &[0]);
    let body = |update: &str| {
        format!(
            "{} ld.global.u32 %r1, [%p0]; AGAIN: mov.u32 %r2, %r1; add.u32 %r3, %r2, 3; {} {update} setp.ne.u32 %q0, %r1, %r2; @%q0 bra AGAIN;",
            at(20),
            at(21)
        )
    };
    outcome(&memory, &body("atom.global.cas.b32 %r1, [%p0], %r2, %r3;"), shape(4, 64), &[x]).unwrap();
    assert_eq!(read_words(&memory, x, 1), [3 * 256]);
    // Of other operations the value that was read says nothing.
    let added =
        outcome(&memory, &body("atom.global.add.u32 %r2, [%p0], 3; mov.u32 %r1, %r2;"), shape(4, 64), &[x]);
    expect(added, FaultKind::GlobalRace, 21, &["read at a.cu:20"]);
}

/// Runs a body over two blocks of 128 threads; `#n` begins a statement of line `n` of `a.cu`.
fn lines(body: &str, memory: &Memory, parameters: &[u64]) -> Result<Report, Fault> {
    let mut text = String::new();
    for (i, part) in body.split('#').enumerate() {
        let line = part.split_once(' ').filter(|_| i > 0);
        text += &line.map_or(part.to_string(), |(line, rest)| format!("\n.loc 1 {line} 1\n {rest}"));
    }
    let text = format!(".file 1 \"a.cu\"\n{}", kernel(parameters.len(), &text));
    run(&text, memory, shape(2, 128), parameters)
}

fn missing(outcome: Result<Report, Fault>, line: u32, thread: u32, text: &str) {
    let fault = outcome.unwrap_err();
    let at = fault.at.as_ref().map(|at| (at.file.as_str(), at.line));
    assert_eq!((fault.kind, at), (FaultKind::MissingFence, Some(("a.cu", line))), "{fault}");
    assert_eq!((fault.block, fault.thread), ([0; 3], [thread, 0, 0]), "{fault}");
    assert!(fault.message.contains(text), "`{text}` is not in `{fault}`");
}

const FENCE: &str = "fence.proxy.async.shared::cta;";

/// Each thread writes a word, thread 64 stores all of them as one bulk copy.
fn stored(before: &str, after: &str) -> (Result<Report, Fault>, Vec<u32>) {
    let memory = Memory::new(1 << 20);
    let out = words(&memory, &[0; 256]);
    let body = format!(
        ".shared .align 16 .b32 s[128]; shl.b32 %r1, %t, 2; mov.u32 %r2, s; add.u32 %r2, %r2, %r1; setp.eq.u32 %q1, %t, 0; add.u32 %r3, %t, 9;
        #5 st.shared.u32 [%r2], %r3; {before} #6 bar.sync 0; setp.ne.u32 %q0, %t, 64; @%q0 ret; {after} mul.wide.u32 %d2, %c, 512; add.u64 %d2, %p0, %d2;
        #7 cp.async.bulk.global.shared::cta.bulk_group [%d2], [s], 512; cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;"
    );
    (lines(&body, &memory, &[out]), read_words(&memory, out, 256))
}

#[test]
fn a_bulk_store_needs_a_fence_behind_what_threads_wrote() {
    let text = "reads 512 bytes at offset 0 of shared memory beside the threads, written at a.cu:5 by thread (0, 0, 0), with no fence.proxy.async between";
    missing(stored("", "").0, 7, 64, text);
    // The writers' own fences, or one of the thread that starts the copy, if it has heard of the writes.
    for (before, after) in [(FENCE, ""), ("", FENCE)] {
        let (outcome, words) = stored(before, after);
        outcome.unwrap();
        assert_eq!(words, (0..256).map(|i| i % 128 + 9).collect::<Vec<_>>());
    }
    // That of one writer counts for itself alone, and one of global memory for none.
    missing(stored(&format!("@%q1 {FENCE}"), "").0, 7, 64, "by thread (1, 0, 0)");
    missing(stored("fence.proxy.async.global;", "").0, 7, 64, "by thread (0, 0, 0)");
    missing(stored("membar.cta;", "fence.acq_rel.cta;").0, 7, 64, "by thread (0, 0, 0)");
    // A write behind the fence.
    missing(stored(&format!("{FENCE} @%q1 st.shared.u32 [%r2], %r1;"), "").0, 7, 64, "by thread (0, 0, 0)");
}

#[test]
fn a_fence_is_passed_on_by_a_barrier_in_memory() {
    let memory = Memory::new(1 << 20);
    let body = |fence: &str| {
        format!(
            ".shared .align 16 .b32 s[128]; .shared .align 8 .b64 m; shl.b32 %r1, %t, 2; mov.u32 %r2, s; add.u32 %r2, %r2, %r1; setp.eq.u32 %q0, %t, 0; @%q0 mbarrier.init.shared::cta.b64 [m], 128; bar.sync 0;
            #3 st.shared.u32 [%r2], %t; {fence} mbarrier.arrive.shared::cta.b64 %d1, [m]; @!%q0 ret; W: mbarrier.try_wait.parity.shared::cta.b64 %q1, [m], 0; @!%q1 bra W;
            mul.wide.u32 %d2, %c, 512; add.u64 %d2, %p0, %d2; #4 cp.async.bulk.global.shared::cta.bulk_group [%d2], [s], 512;"
        )
    };
    let out = words(&memory, &[0; 256]);
    lines(&body(FENCE), &memory, &[out]).unwrap();
    assert_eq!(read_words(&memory, out, 256), (0..256).map(|i| i % 128).collect::<Vec<_>>());
    missing(lines(&body(""), &memory, &[out]), 4, 0, "written at a.cu:3 by thread (0, 0, 0)");
}

#[test]
fn a_bulk_load_over_what_threads_wrote_needs_a_fence() {
    let memory = Memory::new(1 << 20);
    let source = words(&memory, &[7; 128]);
    let body = |fence: &str| {
        format!(
            ".shared .align 16 .b32 s[128]; .shared .align 8 .b64 m; shl.b32 %r1, %t, 2; mov.u32 %r2, s; add.u32 %r2, %r2, %r1; setp.eq.u32 %q0, %t, 0; @%q0 mbarrier.init.shared::cta.b64 [m], 1;
            #3 st.shared.u32 [%r2], 0; {fence} bar.sync 0; @%q0 mbarrier.arrive.expect_tx.shared::cta.b64 %d1, [m], 512;
            #4 @%q0 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [s], [%p0], 512, [m]; W: mbarrier.try_wait.parity.shared::cta.b64 %q1, [m], 0; @!%q1 bra W; ld.shared.u32 %r5, [%r2]; add.u32 %r6, %r5, 1;"
        )
    };
    lines(&body(FENCE), &memory, &[source]).unwrap();
    missing(lines(&body(""), &memory, &[source]), 4, 0, "writes 512 bytes");
}

/// A product of zeros, from what `cp.async` and threads bring to shared memory. The last warp to come to the barrier
/// is the first to go on.
fn product(proxy: &str, before: &str, fence: &str, between: &str) -> Result<Report, Fault> {
    let memory = Memory::new(1 << 20);
    let source = words(&memory, &[0; 1024]);
    let body = format!(
        ".shared .align 1024 .b8 s[4096]; shl.b32 %r1, %t, 5; mov.u32 %r2, s; add.u32 %r2, %r1, %r2; cvt.u64.u32 %d0, %r1; add.u64 %d0, %p0, %d0;
        #3 cp.async.cg.shared.global [%r2], [%d0], 16; st.shared.v4.u32 [%r2+16], {{0, 0, 0, 0}}; cp.async.wait_all; {proxy} bar.sync 0;
        mov.u64 %d1, 0x0000001000080000; mov.f32 %f0, 0f00000000; mov.f32 %f1, 0f00000000; mov.f32 %f2, 0f00000000; setp.eq.u32 %q1, 0, 0; cvt.rn.f32.u32 %f4, %t; {before} mov.f32 %f3, %f4; {fence}
        #8 wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {{%f0, %f1, %f2, %f3}}, %d1, %d1, %q1, 1, 1, 0, 0;
        wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0; {between}
        #9 wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {{%f0, %f1, %f2, %f3}}, %d1, %d1, %q1, 1, 1, 0, 0; wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;"
    );
    lines(&body, &memory, &[source])
}

#[test]
fn operands_of_wgmma_need_a_fence_behind_what_threads_wrote() {
    const REGISTERS: &str = "wgmma.fence.sync.aligned;";
    product(FENCE, "", REGISTERS, "").unwrap();
    missing(product("", "", REGISTERS, ""), 8, 96, "written at a.cu:3 by thread (48, 0, 0)");
    missing(
        product("setp.lt.u32 %q0, %t, 5; @%q0 fence.proxy.async;", "", REGISTERS, ""),
        8,
        96,
        "reads 16 bytes",
    );
}

#[test]
fn registers_of_wgmma_need_a_fence_behind_what_computed_them() {
    const REGISTERS: &str = "wgmma.fence.sync.aligned;";
    missing(product(FENCE, "", "", REGISTERS), 8, 96, "the first wgmma");
    missing(
        product(FENCE, REGISTERS, "#7 add.f32 %f3, %f3, %f4;", ""),
        8,
        96,
        "an accumulator of the wgmma was computed at a.cu:7",
    );
    // A constant may be moved there at any time, by a compiler too; so may what was computed before.
    product(FENCE, REGISTERS, "mov.f32 %f2, 0f3F800000; mov.f32 %f9, %f3; mov.f32 %f3, %f9;", "").unwrap();
    // Products of one shape may follow each other, but not over what a thread computes in between.
    missing(product(FENCE, "", REGISTERS, "#7 mul.f32 %f1, %f1, %f4;"), 9, 96, "computed at a.cu:7");
    missing(
        product(FENCE, "", REGISTERS, "#7 mul.f32 %f9, %f1, %f4; mov.f32 %f1, %f9;"),
        9,
        96,
        "computed at a.cu:7",
    );
    missing(product(FENCE, "", REGISTERS, "#7 ld.shared.f32 %f2, [s];"), 9, 96, "computed at a.cu:7");
    product(FENCE, "", REGISTERS, &format!("mul.f32 %f1, %f1, %f4; {REGISTERS}")).unwrap();
}

#[test]
fn a_weak_access_is_not_forgotten_for_a_strong_one_of_the_same_thread() {
    let memory = Memory::new(1 << 20);
    let x = words(&memory, &[0; 2]);
    // Lane 0 clears the sum, or looks at it, and adds; the others add alone.
    let body = |first: &str, sync: &str| {
        format!("setp.eq.u32 %q0, %t, 0; {} {first} {sync} {} red.global.add.u32 [%p0], 1;", at(1), at(2))
    };
    let (clears, looks) = ("@%q0 st.global.u32 [%p0], 0;", "@%q0 ld.global.u32 %r1, [%p0];");
    expect(
        outcome(&memory, &body(clears, ""), shape(1, 32), &[x]),
        FaultKind::GlobalRace,
        2,
        &["written at a.cu:1 by thread (0, 0, 0)", "no __syncwarp or barrier between"],
    );
    expect(
        outcome(&memory, &body(looks, ""), shape(1, 32), &[x]),
        FaultKind::GlobalRace,
        2,
        &["read at a.cu:1 by thread (0, 0, 0)"],
    );
    for first in [clears, looks] {
        outcome(&memory, &body(first, "bar.warp.sync -1;"), shape(1, 32), &[x]).unwrap();
    }
    assert_eq!(read_words(&memory, x, 1), [64], "32 of them cleared, then 32 more");
}
