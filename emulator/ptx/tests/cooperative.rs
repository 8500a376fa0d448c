//! Cooperative launches: all blocks are there at once, and wait for each other at the barrier whose address the launch hands over.

mod common;
use common::{kernel, load, read_words, shape, words};
use phalanx_ptx::{Checks, Fault, FaultKind, Launch, Memory, Report, launch, launch_cooperative};

/// Each thread writes a word, all blocks meet, each reads the word of its opposite. `order` is that of the arrival.
fn body(order: &str) -> String {
    format!(
        "mov.u32 %r1, %envreg1; mov.u32 %r2, %envreg2; mov.b64 %d0, {{%r2, %r1}}; mad.lo.u32 %r3, %c, 64, %t; mul.wide.u32 %d1, %r3, 4; add.u64 %d2, %p0, %d1;
        st.global.u32 [%d2], %r3; bar.sync 0; setp.ne.u32 %q0, %t, 0; @%q0 bra MEET; atom.add.{order}.gpu.u32 %r4, [%d0+4], 1; WAIT: ld.acquire.gpu.u32 %r5, [%d0+4]; mov.u32 %r6, %nctaid.x; setp.lt.u32 %q1, %r5, %r6; @%q1 bra WAIT;
        MEET: bar.sync 0; mov.u32 %r7, %nctaid.x; mul.lo.u32 %r7, %r7, 64; sub.u32 %r7, %r7, 1; sub.u32 %r7, %r7, %r3; mul.wide.u32 %d3, %r7, 4; add.u64 %d4, %p0, %d3; ld.global.u32 %r8, [%d4]; add.u64 %d5, %p1, %d1; st.global.u32 [%d5], %r8;"
    )
}

fn run(order: &str, shape: Launch) -> (Result<Report, Fault>, Vec<u32>, u64) {
    let memory = Memory::new(1 << 20);
    let (x, y) = (memory.allocate(256 * 4).unwrap(), words(&memory, &[0; 256]));
    let before = memory.used();
    let parameters = [x.to_le_bytes(), y.to_le_bytes()].concat();
    let outcome = launch_cooperative(
        &load(&kernel(2, &body(order)), &memory),
        "k",
        &[&memory],
        &shape,
        &parameters,
        &Checks::default(),
    );
    (outcome, read_words(&memory, y, 256), memory.used() - before)
}

#[test]
fn blocks_meet_at_the_barrier_of_the_grid() {
    let (outcome, words, left) = run("acq_rel", shape(4, 64));
    let report = outcome.unwrap();
    assert_eq!(words, (0..256).rev().collect::<Vec<_>>());
    assert_eq!(left, 0, "the barrier's memory is free again");
    assert_eq!(report.touched.len(), 2, "and nobody hears of it: {:?}", report.touched);
}

#[test]
fn an_arrival_that_releases_nothing_orders_nothing() {
    let fault = run("relaxed", shape(4, 64)).0.unwrap_err();
    assert_eq!(fault.kind, FaultKind::GlobalRace, "{fault}");
}

#[test]
fn clusters_and_plain_launches_have_no_such_barrier() {
    let fault = run("acq_rel", Launch { cluster: [2, 1, 1], ..shape(4, 64) }).0.unwrap_err();
    assert_eq!(fault.kind, FaultKind::BadLaunch, "{fault}");
    let memory = Memory::new(1 << 20);
    let x = words(&memory, &[0; 256]);
    let parameters = [x.to_le_bytes(); 2].concat();
    let loaded = load(&kernel(2, &body("acq_rel")), &memory);
    let fault = launch(&loaded, "k", &[&memory], &shape(4, 64), &parameters, &Checks::default()).unwrap_err();
    assert_eq!((fault.kind, fault.thread), (FaultKind::OutOfBounds, [0; 3]), "at address 4: {fault}");
}
