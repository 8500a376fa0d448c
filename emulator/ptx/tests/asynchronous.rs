//! Copies beside the threads, barriers in memory, tensor maps, clusters.

mod common;
use common::{bytes, kernel, load, read_bytes, read_words, run, shape, words};
use phalanx_ptx::{Checks, FaultKind, Fill, Launch, Memory, Swizzle, TensorMap, TensorType, launch};

#[test]
fn copies_arrive_at_the_wait_and_not_before() {
    let memory = Memory::new(1 << 20);
    let source = words(&memory, &(0..128).collect::<Vec<_>>());
    let out = words(&memory, &[0; 128]);
    let body = |wait: &str| {
        format!(
            ".shared .align 16 .b8 s[1024]; mad.lo.u32 %r1, %t, 16, 0; mov.u32 %r2, s; add.u32 %r3, %r2, %r1; cvt.u64.u32 %d0, %r1; add.u64 %d1, %p0, %d0; add.u64 %d2, %p1, %d0;
            cp.async.cg.shared.global [%r3], [%d1], 16; cp.async.commit_group; cp.async.ca.shared.global [%r3+512], [%d1], 4, 0; cp.async.commit_group; {wait} bar.warp.sync -1; xor.b32 %r4, %r3, 16; \n.loc 1 5 1\n ld.shared.v4.u32 {{%r5, %r6, %r7, %r8}}, [%r4]; ld.shared.u32 %r9, [%r4+512];
            add.u32 %r8, %r8, %r9; st.global.v4.u32 [%d2], {{%r5, %r6, %r7, %r8}};"
        )
    };
    let text = |wait: &str| format!(".file 1 \"a.cu\"\n{}", kernel(2, &body(wait)));
    run(&text("cp.async.wait_all;"), &memory, shape(1, 32), &[source, out]).unwrap();
    let wanted: Vec<u32> = (0..128).map(|i| ((i / 4 * 4) ^ 4) + i % 4).collect();
    assert_eq!(read_words(&memory, out, 128), wanted, "and what was not read is zero");
    run(&text("cp.async.wait_group 0;"), &memory, shape(1, 32), &[source, out]).unwrap();
    for wait in ["", "cp.async.wait_group 2;"] {
        let fault = run(&text(wait), &memory, shape(1, 32), &[source, out]).unwrap_err();
        assert_eq!((fault.kind, fault.at.as_ref().unwrap().line), (FaultKind::Pending, 5), "{fault}");
    }
    // The first group only.
    let fault = run(&text("cp.async.wait_group 1;"), &memory, shape(1, 32), &[source, out]).unwrap_err();
    assert!(fault.kind == FaultKind::Pending && fault.message.contains("read of 4 bytes"), "{fault}");
}

#[test]
fn a_copy_that_one_thread_waits_for_is_not_yet_there_for_others() {
    let memory = Memory::new(1 << 20);
    let source = words(&memory, &[7; 256]);
    let body = |sync: &str| {
        format!(
            ".shared .align 16 .b8 s[1024]; mul.lo.u32 %r1, %t, 16; mov.u32 %r2, s; add.u32 %r3, %r2, %r1; cvt.u64.u32 %d0, %r1; add.u64 %d1, %p0, %d0; cp.async.ca.shared.global [%r3], [%d1], 16; cp.async.wait_all; {sync} xor.b32 %r4, %r3, 512; ld.shared.u32 %r5, [%r4];"
        )
    };
    run(&kernel(1, &body("bar.sync 0;")), &memory, shape(1, 64), &[source]).unwrap();
    let fault = run(&kernel(1, &body("")), &memory, shape(1, 64), &[source]).unwrap_err();
    assert!(
        matches!(fault.kind, FaultKind::SharedRace | FaultKind::Uninitialised | FaultKind::Pending),
        "{fault}"
    );
}

#[test]
fn a_barrier_in_memory_counts_arrivals_and_phases() {
    let memory = Memory::new(1 << 20);
    let out = words(&memory, &[0; 64]);
    // Warp 0 writes, warp 1 waits by parity, twice; the state of the phase before is tested too.
    let body = ".shared .align 8 .b64 m; .shared .b32 s[32]; setp.eq.u32 %q0, %t, 0; @%q0 mbarrier.init.shared::cta.b64 [m], 32; bar.sync 0; and.b32 %r1, %t, 31; shl.b32 %r2, %r1, 2; mov.u32 %r3, s; add.u32 %r3, %r3, %r2; setp.ge.u32 %q1, %t, 32; @%q1 bra READ;
        st.shared.u32 [%r3], %r1; mbarrier.arrive.shared::cta.b64 %d1, [m]; bar.sync 1, 64; add.u32 %r4, %r1, 100; st.shared.u32 [%r3], %r4; mbarrier.arrive.release.cta.shared::cta.b64 %d1, [m], 1; bra DONE;
        READ: WAIT0: mbarrier.try_wait.parity.shared::cta.b64 %q2, [m], 0; @!%q2 bra WAIT0; xor.b32 %r5, %r3, 4; ld.shared.u32 %r6, [%r5]; bar.sync 1, 64;
        WAIT1: mbarrier.test_wait.shared::cta.b64 %q2, [m], 1; @!%q2 bra WAIT1; ld.shared.u32 %r7, [%r5]; mul.wide.u32 %d2, %r1, 8; add.u64 %d2, %p0, %d2; st.global.v2.u32 [%d2], {%r6, %r7}; DONE:";
    run(&kernel(1, body), &memory, shape(1, 64), &[out]).unwrap();
    for (l, pair) in read_words(&memory, out, 64).chunks_exact(2).enumerate() {
        assert_eq!(pair, [l as u32 ^ 1, (l as u32 ^ 1) + 100]);
    }
    let fault = run(
        &kernel(0, ".shared .align 8 .b64 m; mbarrier.arrive.shared::cta.b64 %d1, [m];"),
        &memory,
        shape(1, 1),
        &[],
    )
    .unwrap_err();
    assert!(fault.message.contains("no barrier was initialised"), "{fault}");
    let twice = ".shared .align 8 .b64 m; mbarrier.init.shared::cta.b64 [m], 1; mbarrier.arrive.shared::cta.b64 %d1, [m], 2;";
    let fault = run(&kernel(0, twice), &memory, shape(1, 1), &[]).unwrap_err();
    assert!(fault.message.contains("more arrivals"), "{fault}");
    // Its bytes are its own until it is invalidated.
    let init = ".shared .align 8 .b64 m; mbarrier.init.shared::cta.b64 [m], 1;";
    let arrive = "mbarrier.arrive.shared::cta.b64 %d1, [m];";
    for (between, wrong) in [
        ("mov.u32 %r1, 0; st.shared.u32 [m+4], %r1;", "was overwritten after its initialisation"),
        ("mbarrier.init.shared::cta.b64 [m], 1;", "one is that was not invalidated"),
    ] {
        let text = kernel(0, &format!("{init} {between} {arrive}"));
        let fault = run(&text, &memory, shape(1, 1), &[]).unwrap_err();
        assert!(fault.message.contains(wrong), "{fault}");
    }
    let again = "mbarrier.inval.shared::cta.b64 [m]; mov.u32 %r1, 0; st.shared.u32 [m], %r1; mbarrier.init.shared::cta.b64 [m], 1;";
    run(&kernel(0, &format!("{init} {arrive} {again} {arrive}")), &memory, shape(1, 1), &[]).unwrap();
}

#[test]
fn an_arrival_that_never_comes_is_a_deadlock() {
    let memory = Memory::new(1 << 20);
    let body = ".shared .align 8 .b64 m; setp.eq.u32 %q0, %t, 0; @%q0 mbarrier.init.shared::cta.b64 [m], 2; bar.sync 0; @%q0 mbarrier.arrive.shared::cta.b64 %d1, [m]; \n.loc 1 9 1\n W: mbarrier.try_wait.parity.shared::cta.b64 %q1, [m], 0; @!%q1 bra W;";
    let loaded = load(&format!(".file 1 \"a.cu\"\n{}", kernel(0, body)), &memory);
    let checks = Checks { stuck_after: 1 << 20, ..Checks::default() };
    let fault = launch(&loaded, "k", &[&memory], &shape(1, 64), &[], &checks).unwrap_err();
    assert_eq!((fault.kind, fault.at.as_ref().unwrap().line), (FaultKind::Deadlock, 9), "{fault}");
    assert!(fault.message.contains("thread (32, 0, 0)"), "{fault}");
}

/// One thread starts what `start` says, which brings 1024 bytes under the barrier; then all read and store them.
fn brought(start: &str, wait: &str) -> String {
    format!(
        ".shared .align 1024 .b8 s[1024]; .shared .align 8 .b64 m; setp.eq.u32 %q0, %t, 0; @%q0 mbarrier.init.shared::cta.b64 [m], 1; fence.proxy.async.shared::cta; bar.sync 0; @!%q0 bra OVER;
        mbarrier.arrive.expect_tx.shared::cta.b64 %d1, [m], 1024; {start} OVER: {wait} mad.lo.u32 %r1, %t, 16, 0; mov.u32 %r2, s; add.u32 %r2, %r2, %r1; cvt.u64.u32 %d2, %r1; add.u64 %d2, %p1, %d2; \n.loc 1 6 1\n ld.shared.v4.u32 {{%r4, %r5, %r6, %r7}}, [%r2]; add.u32 %r8, %r4, 0; st.global.v4.u32 [%d2], {{%r8, %r5, %r6, %r7}};"
    )
}

const WAIT: &str = "W: mbarrier.try_wait.parity.shared::cta.b64 %q1, [m], 0; @!%q1 bra W;";

#[test]
fn a_bulk_copy_arrives_with_its_barrier() {
    let memory = Memory::new(1 << 20);
    let data: Vec<u8> = (0..1024).map(|i| (i * 13) as u8).collect();
    let (source, out) = (bytes(&memory, &data), memory.allocate(1024).unwrap());
    let start = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [s], [%p0], 1024, [m];";
    run(&kernel(2, &brought(start, WAIT)), &memory, shape(1, 64), &[source, out]).unwrap();
    assert_eq!(read_bytes(&memory, out, 1024), data);
    // In parts, of which the last is missing: the phase does not end.
    let half = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [s], [%p0], 512, [m];";
    let loaded = load(&kernel(2, &brought(half, WAIT)), &memory);
    let parameters: Vec<u8> = [source, out].iter().flat_map(|p| p.to_le_bytes()).collect();
    let checks = Checks { stuck_after: 1 << 20, ..Checks::default() };
    assert_eq!(
        launch(&loaded, "k", &[&memory], &shape(1, 64), &parameters, &checks).unwrap_err().kind,
        FaultKind::Deadlock
    );
    let fault =
        run(&kernel(2, &brought(start, "bar.sync 0;")), &memory, shape(1, 64), &[source, out]).unwrap_err();
    assert!(matches!(fault.kind, FaultKind::Pending | FaultKind::SharedRace), "{fault}");
}

#[test]
fn bulk_copies_and_reductions_to_global_memory() {
    let memory = Memory::new(1 << 20);
    let (out, sums) = (memory.allocate(512).unwrap(), words(&memory, &[1000; 128]));
    let body = ".shared .align 16 .b32 s[128]; shl.b32 %r1, %t, 2; mov.u32 %r2, s; add.u32 %r2, %r2, %r1; st.shared.u32 [%r2], %t; fence.proxy.async.shared::cta; bar.sync 0; setp.ne.u32 %q0, %t, 0; @%q0 ret;
        cp.async.bulk.global.shared::cta.bulk_group [%p0], [s], 512; cp.reduce.async.bulk.global.shared::cta.bulk_group.add.u32 [%p1], [s], 512; cp.async.bulk.commit_group; cp.async.bulk.wait_group.read 0;";
    run(&kernel(2, body), &memory, shape(1, 128), &[out, sums]).unwrap();
    assert_eq!(read_words(&memory, out, 128), (0..128).collect::<Vec<_>>());
    assert_eq!(read_words(&memory, sums, 128), (1000..1128).collect::<Vec<_>>());
}

fn tensor(address: u64, sides: &[u64], window: &[u32], swizzle: Swizzle) -> TensorMap {
    let strides = sides
        .iter()
        .take(sides.len() - 1)
        .scan(2, |bytes, side| {
            *bytes *= side;
            Some(*bytes)
        })
        .collect();
    TensorMap {
        kind: TensorType::Bf16,
        address,
        sides: sides.to_vec(),
        strides,
        window: window.to_vec(),
        steps: vec![1; sides.len()],
        swizzle,
        fill: Fill::Zero,
    }
}

#[test]
fn a_box_of_a_tensor_is_copied_with_its_swizzle_and_zeros_outside() {
    for (swizzle, width) in
        [(Swizzle::None, 64u32), (Swizzle::Bytes32, 16), (Swizzle::Bytes64, 32), (Swizzle::Bytes128, 64)]
    {
        let memory = Memory::new(1 << 20);
        let rows = 512 / width;
        let values: Vec<u8> = (0..100 * 96 * 2).map(|i: u32| (i * 7 + i / 256) as u8).collect();
        let (source, out) = (bytes(&memory, &values), memory.allocate(1024).unwrap());
        let map = bytes(&memory, &tensor(source, &[96, 100], &[width, rows], swizzle).encode().unwrap());
        let (x, y) = (72i64, 95i64);
        let start = format!(
            "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [s], [%p0, {{{x}, {y}}}], [m];"
        );
        run(&kernel(2, &brought(&start, WAIT)), &memory, shape(1, 64), &[map, out]).unwrap();
        let found = read_bytes(&memory, out, 1024);
        for r in 0..rows as i64 {
            for c in 0..width as i64 {
                for byte in 0..2 {
                    let inside = x + c < 96 && y + r < 100;
                    let wanted =
                        if inside { values[((y + r) * 192 + (x + c) * 2 + byte) as usize] } else { 0 };
                    let linear = (r * width as i64 + c) * 2 + byte;
                    // Pieces of 16 bytes within 128 bytes are exchanged by the number of the row of 128 bytes.
                    let exchange = linear >> 7
                        & match swizzle {
                            Swizzle::None => 0,
                            Swizzle::Bytes32 => 1,
                            Swizzle::Bytes64 => 3,
                            Swizzle::Bytes128 => 7,
                        };
                    assert_eq!(
                        found[(linear ^ exchange << 4) as usize],
                        wanted,
                        "{swizzle:?} row {r} column {c}"
                    );
                }
            }
        }
    }
}

#[test]
fn a_box_is_stored_and_added_where_it_is_inside() {
    let memory = Memory::new(1 << 20);
    let out = bytes(&memory, &[0; 16 * 24 * 2]);
    let map = bytes(&memory, &tensor(out, &[16, 24], &[16, 32], Swizzle::None).encode().unwrap());
    let body = ".shared .align 128 .b8 s[1024]; mul.lo.u32 %r1, %t, 16; mov.u32 %r2, s; add.u32 %r2, %r2, %r1; st.shared.v4.u32 [%r2], {0x3f803f80, 0x40003f80, 0x3f803f80, 0x3f803f80}; fence.proxy.async.shared::cta; bar.sync 0; setp.ne.u32 %q0, %t, 0; @%q0 ret;
        cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%p0, {0, 4}], [s]; cp.async.bulk.commit_group; cp.async.bulk.wait_group 0; cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.tile.bulk_group [%p0, {0, 8}], [s]; cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;";
    run(&kernel(1, body), &memory, shape(1, 64), &[map]).unwrap();
    let found = read_words(&memory, out, 16 * 24 / 2);
    for (i, pair) in found.iter().enumerate() {
        let (row, one) = (i / 8, if i % 4 == 1 { 0x40003f80 } else { 0x3f803f80u32 });
        let wanted = match row {
            0..4 => 0,
            4..8 => one,
            _ => one + 0x0080_0080,
        };
        assert_eq!(*pair, wanted, "row {row}");
    }
}

#[test]
fn maps_that_a_device_refuses() {
    let good = tensor(256, &[64, 8], &[64, 8], Swizzle::Bytes128);
    assert!(good.encode().is_ok());
    let refused = |change: fn(&mut TensorMap), text: &str| {
        let mut map = good.clone();
        change(&mut map);
        let error = map.encode().unwrap_err().to_string();
        assert!(error.contains(text), "{error}");
    };
    refused(|m| m.address = 8, "multiple of 16");
    refused(|m| m.strides[0] = 100, "stride");
    refused(|m| m.window[0] = 128, "above the swizzle's 128");
    refused(|m| m.window[1] = 257, "257");
    refused(|m| m.sides[1] = 0, "side of 0");
    refused(|m| m.steps = vec![1], "sides");
    let memory = Memory::new(1 << 20);
    let junk = bytes(&memory, &[1; 128]);
    let start = "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [s], [%p0, {0, 0}], [m];";
    let fault = run(&kernel(2, &brought(start, WAIT)), &memory, shape(1, 64), &[junk, junk]).unwrap_err();
    assert!(fault.kind == FaultKind::InvalidOperand && fault.message.contains("no tensor map"), "{fault}");
}

fn cluster(blocks: u32, size: u32, threads: u32) -> Launch {
    Launch { cluster: [size, 1, 1], ..shape(blocks, threads) }
}

#[test]
fn blocks_of_a_cluster_read_each_others_shared_memory() {
    let memory = Memory::new(1 << 20);
    let out = words(&memory, &[0; 8 * 32]);
    let body = |sync: &str| {
        format!(
            ".shared .b32 s[32]; mov.u32 %r1, %cluster_ctarank; mov.u32 %r2, %cluster_nctarank; shl.b32 %r3, %t, 2; mov.u32 %r4, s; add.u32 %r4, %r4, %r3; mad.lo.u32 %r5, %c, 100, %t; st.shared.u32 [%r4], %r5; {sync}
            add.u32 %r6, %r1, 1; rem.u32 %r6, %r6, %r2; mapa.shared::cluster.u32 %r7, %r4, %r6; ld.shared::cluster.u32 %r8, [%r7]; barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned; mad.lo.u32 %r9, %c, 32, %t; mul.wide.u32 %d0, %r9, 4; add.u64 %d0, %p0, %d0; st.global.u32 [%d0], %r8;"
        )
    };
    let meet = "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;";
    run(&kernel(1, &body(meet)), &memory, cluster(8, 4, 32), &[out]).unwrap();
    let wanted: Vec<u32> = (0..256)
        .map(|i| {
            let b = i / 32;
            (b / 4 * 4 + (b + 1) % 4) * 100 + i % 32
        })
        .collect();
    assert_eq!(read_words(&memory, out, 256), wanted);
    let fault = run(&kernel(1, &body("")), &memory, cluster(8, 4, 32), &[out]).unwrap_err();
    assert!(matches!(fault.kind, FaultKind::SharedRace | FaultKind::Uninitialised), "{fault}");
}

#[test]
fn a_relaxed_arrival_passes_on_what_was_fenced_and_nothing_else() {
    let memory = Memory::new(1 << 20);
    let body = |fence: &str| {
        format!(
            ".shared .b32 s; setp.eq.u32 %q0, %c, 0; mov.u32 %r1, s; mapa.shared::cluster.u32 %r2, %r1, 1; \n.loc 1 3 1\n @!%q0 st.shared.u32 [s], 5; {fence} barrier.cluster.arrive.relaxed.aligned; barrier.cluster.wait.acquire.aligned;
            \n.loc 1 4 1\n @%q0 ld.shared::cluster.u32 %r3, [%r2]; barrier.cluster.arrive; barrier.cluster.wait;"
        )
    };
    let text = |fence| format!(".file 1 \"a.cu\"\n{}", kernel(0, &body(fence)));
    for fence in ["fence.acq_rel.cluster;", "fence.acq_rel.gpu;"] {
        run(&text(fence), &memory, cluster(2, 2, 1), &[]).unwrap();
    }
    for fence in ["", "fence.acq_rel.cta;"] {
        let fault = run(&text(fence), &memory, cluster(2, 2, 1), &[]).unwrap_err();
        let found = fault.to_string();
        assert!(fault.kind == FaultKind::SharedRace && found.contains("written at a.cu:3"), "{found}");
    }
}

#[test]
fn the_shared_memory_of_a_block_that_has_ended_is_gone() {
    let memory = Memory::new(1 << 20);
    let x = words(&memory, &[0]);
    // Block 0 counts before it reads; by then block 1 has ended, unless it waits.
    let body = |last: &str| {
        format!(
            ".shared .b32 s; st.shared.u32 [s], 7; mov.u32 %r1, s; mapa.shared::cluster.u32 %r2, %r1, 1; setp.eq.u32 %q0, %c, 0; barrier.cluster.arrive; barrier.cluster.wait; @!%q0 bra END;
            mov.u32 %r5, 0; L: add.u32 %r5, %r5, 1; setp.lt.u32 %q1, %r5, 5000; @%q1 bra L; \n.loc 1 8 1\n ld.shared::cluster.u32 %r3, [%r2]; st.global.u32 [%p0], %r3; END: {last}"
        )
    };
    let text = |last| format!(".file 1 \"a.cu\"\n{}", kernel(1, &body(last)));
    run(&text("barrier.cluster.arrive; barrier.cluster.wait;"), &memory, cluster(2, 2, 1), &[x]).unwrap();
    assert_eq!(read_words(&memory, x, 1), [7]);
    let fault = run(&text(""), &memory, cluster(2, 2, 1), &[x]).unwrap_err();
    let text = "read of 4 bytes of the shared memory of a block of the cluster that has ended";
    assert_eq!((fault.kind, fault.message.as_str()), (FaultKind::OutOfBounds, text), "{fault}");
    assert_eq!(fault.at.unwrap().line, 8);
}

#[test]
fn what_a_bulk_store_reads_may_change_after_its_wait() {
    let memory = Memory::new(1 << 20);
    let out = words(&memory, &[0; 256]);
    // Two stores from two halves, then a word of the first half is written by thread 0 or by another.
    let body = |wait: &str, write: &str| {
        format!(
            ".shared .align 16 .b32 s[256]; mov.u32 %r1, s; mad.lo.u32 %r1, %t, 4, %r1; st.shared.u32 [%r1], %t; st.shared.u32 [%r1+512], %t; fence.proxy.async; bar.sync 0; setp.eq.u32 %q0, %t, 0; setp.eq.u32 %q1, %t, 40; @!%q0 bra OVER;
            \n.loc 1 5 1\n cp.async.bulk.global.shared::cta.bulk_group [%p0], [s], 512; cp.async.bulk.commit_group; cp.async.bulk.global.shared::cta.bulk_group [%p0+512], [s+512], 512; cp.async.bulk.commit_group; {wait} OVER: \n.loc 1 6 1\n {write}"
        )
    };
    let outcome = |wait: &str, write: &str| {
        let text = format!(".file 1 \"a.cu\"\n{}", kernel(1, &body(wait, write)));
        run(&text, &memory, shape(1, 128), &[out])
    };
    let own = "@%q0 st.shared.u32 [s+4], 9;";
    let still = "which the bulk copy at a.cu:5 by thread (0, 0, 0) may still read: it has not waited (cp.async.bulk.wait_group)";
    for wait in ["", "cp.async.bulk.wait_group 2;", "cp.async.bulk.wait_group.read 2;"] {
        let fault = outcome(wait, own).unwrap_err();
        assert_eq!((fault.kind, fault.at.as_ref().unwrap().line), (FaultKind::SharedRace, 6), "{fault}");
        assert_eq!(fault.message, format!("writes 4 bytes at offset 4 of shared memory, {still}"));
    }
    for wait in ["cp.async.bulk.wait_group 1;", "cp.async.bulk.wait_group.read 0;"] {
        outcome(wait, own).unwrap();
        // Others have to hear of the wait.
        let other = |sync: &str| outcome(wait, &format!("{sync} @%q1 st.shared.u32 [s+4], 9;"));
        other("bar.sync 0;").unwrap();
        let fault = other("").unwrap_err();
        assert!(fault.kind == FaultKind::SharedRace && fault.message.contains("a.cu:5"), "{fault}");
    }
    // The second half is still read, by atomic operations and other copies too.
    for write in ["@%q0 st.shared.u32 [s+516], 9;", "@%q0 red.shared.add.u32 [s+512], 1;"] {
        let fault = outcome("cp.async.bulk.wait_group 1;", write).unwrap_err();
        assert!(fault.message.contains(still), "{fault}");
        outcome("cp.async.bulk.wait_group 0;", write).unwrap();
    }
}

#[test]
fn a_multicast_reaches_every_block_that_it_names() {
    let memory = Memory::new(1 << 20);
    let data: Vec<u32> = (0..64).map(|i| i * i).collect();
    let (source, out) = (words(&memory, &data), words(&memory, &[0; 128]));
    let body = ".shared .align 128 .b8 s[256]; .shared .align 8 .b64 m; setp.eq.u32 %q0, %t, 0; @%q0 mbarrier.init.shared::cta.b64 [m], 1; barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned; @%q0 mbarrier.arrive.expect_tx.shared::cta.b64 %d1, [m], 256; mov.u32 %r1, %cluster_ctarank; setp.eq.and.u32 %q1, %r1, 0, %q0; mov.u16 %h1, 3;
        @%q1 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [s], [%p0], 256, [m], %h1; W: mbarrier.try_wait.parity.shared::cta.b64 %q2, [m], 0; @!%q2 bra W;
        shl.b32 %r2, %t, 2; mov.u32 %r3, s; add.u32 %r3, %r3, %r2; ld.shared.u32 %r4, [%r3]; mad.lo.u32 %r5, %c, 64, %t; mul.wide.u32 %d2, %r5, 4; add.u64 %d2, %p1, %d2; st.global.u32 [%d2], %r4;";
    run(&kernel(2, body), &memory, cluster(2, 2, 64), &[source, out]).unwrap();
    assert_eq!(read_words(&memory, out, 128), [data.clone(), data].concat());
}

#[test]
fn a_state_says_how_many_arrivals_were_missing() {
    let memory = Memory::new(1 << 20);
    let out = words(&memory, &[0; 3]);
    let body = ".shared .align 8 .b64 m; mbarrier.init.shared::cta.b64 [m], 3;
        mbarrier.arrive.shared::cta.b64 %d1, [m]; mbarrier.pending_count.b64 %r1, %d1; mbarrier.arrive.noComplete.shared::cta.b64 %d1, [m], 1; mbarrier.pending_count.b64 %r2, %d1;
        mbarrier.arrive.shared::cta.b64 %d1, [m]; mbarrier.pending_count.b64 %r3, %d1; mbarrier.test_wait.shared::cta.b64 %q0, [m], %d1; @%q0 st.global.u32 [%p0], %r1; st.global.u32 [%p0+4], %r2; st.global.u32 [%p0+8], %r3;";
    run(&kernel(1, body), &memory, shape(1, 1), &[out]).unwrap();
    assert_eq!(read_words(&memory, out, 3), [3, 2, 1]);
}

#[test]
fn values_are_sent_to_another_block_with_its_barrier() {
    let memory = Memory::new(1 << 20);
    let out = words(&memory, &[0; 2 * 65]);
    // Each thread sends two words and adds its number to a sum in the other block, which waits for all bytes.
    let body = |wait: &str| {
        format!(
            ".shared .align 8 .b64 m; .shared .align 16 .b32 s[64]; .shared .b32 sum; setp.eq.u32 %q0, %t, 0; mov.u32 %r1, 0; @%q0 st.shared.u32 [sum], %r1; @%q0 mbarrier.init.shared::cta.b64 [m], 1;
            @%q0 mbarrier.arrive.expect_tx.shared::cta.b64 %d1, [m], 384; barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
            mov.u32 %r1, %cluster_ctarank; xor.b32 %r2, %r1, 1; mov.u32 %r3, s; mad.lo.u32 %r3, %t, 8, %r3; mapa.shared::cluster.u32 %r4, %r3, %r2; mov.u32 %r5, m; mapa.shared::cluster.u32 %r6, %r5, %r2; mov.u32 %r7, sum; mapa.shared::cluster.u32 %r8, %r7, %r2;
            mad.lo.u32 %r9, %c, 1000, %t; add.u32 %r10, %r9, 500; st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.b32 [%r4], {{%r9, %r10}}, [%r6];
            red.async.relaxed.cluster.shared::cluster.mbarrier::complete_tx::bytes.add.u32 [%r8], %t, [%r6];
            {wait} ld.shared.v2.u32 {{%r11, %r12}}, [%r3]; ld.shared.u32 %r13, [sum]; mul.lo.u32 %r14, %c, 65; mad.lo.u32 %r15, %t, 2, %r14; mul.wide.u32 %d0, %r15, 4; add.u64 %d0, %p0, %d0; st.global.u32 [%d0], %r11; st.global.u32 [%d0+4], %r12;
            mul.wide.u32 %d1, %r14, 4; add.u64 %d1, %p0, %d1; @%q0 st.global.u32 [%d1+256], %r13; barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;"
        )
    };
    let wait = "WAIT: mbarrier.try_wait.parity.shared::cta.b64 %q2, [m], 0; @!%q2 bra WAIT;";
    run(&kernel(1, &body(wait)), &memory, cluster(2, 2, 32), &[out]).unwrap();
    let found = read_words(&memory, out, 130);
    for (block, row) in found.chunks_exact(65).enumerate() {
        let other = 1000 * (1 - block as u32);
        for t in 0..32 {
            assert_eq!(
                row[2 * t..2 * t + 2],
                [other + t as u32, other + 500 + t as u32],
                "block {block} thread {t}"
            );
        }
        assert_eq!(row[64], 31 * 32 / 2);
    }
    let fault = run(&kernel(1, &body("")), &memory, cluster(2, 2, 32), &[out]).unwrap_err();
    assert!(
        matches!(fault.kind, FaultKind::Pending | FaultKind::SharedRace | FaultKind::Uninitialised),
        "{fault}"
    );
}

#[test]
fn a_predicate_says_that_a_copy_reads_nothing() {
    let memory = Memory::new(1 << 20);
    let (source, out) = (words(&memory, &[7; 32]), words(&memory, &[0; 64]));
    // Odd lanes read nothing, and get zeros; a policy of the cache is no number of bytes.
    let body = ".shared .b32 s[64]; and.b32 %r1, %t, 1; setp.eq.u32 %q0, %r1, 1; mul.wide.u32 %d0, %t, 4; add.u64 %d1, %p0, %d0; mov.u32 %r2, s; mad.lo.u32 %r2, %t, 4, %r2; mov.u64 %d3, 3;
        cp.async.ca.shared.global [%r2], [%d1], 4, %q0; cp.async.ca.shared.global.L2::cache_hint [%r2+128], [%d1], 4, %d3; cp.async.wait_all; ld.shared.u32 %r3, [%r2]; ld.shared.u32 %r4, [%r2+128];
        mul.wide.u32 %d0, %t, 8; add.u64 %d2, %p1, %d0; st.global.v2.u32 [%d2], {%r3, %r4};";
    run(&kernel(2, body), &memory, shape(1, 32), &[source, out]).unwrap();
    let wanted: Vec<u32> = (0..64).map(|i| if i % 4 == 2 { 0 } else { 7 }).collect();
    assert_eq!(read_words(&memory, out, 64), wanted);
}
