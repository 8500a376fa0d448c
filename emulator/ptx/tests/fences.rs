//! Fences between threads and what runs beside them: `fence.proxy.async` and `wgmma.fence`. Each that is missing is named with line,
//! block and thread; wherever one suffices it is enough.

mod common;
use common::{kernel, read_words, run, shape, words};
use phalanx_ptx::{Fault, FaultKind, Memory, Report};

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
    // The writers' own fences, or one of whoever starts the copy, who has heard of the writes.
    for (before, after) in [(FENCE, ""), ("", FENCE)] {
        let (outcome, words) = stored(before, after);
        outcome.unwrap();
        assert_eq!(words, (0..256).map(|i| i % 128 + 9).collect::<Vec<_>>());
    }
    // That of one writer counts for itself alone, and one of global memory for nobody.
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

/// A product of zeros, from what `cp.async` and threads bring to shared memory. The last warp to come to the barrier is the first to go on.
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
