//! Barriers after some threads have exited: the others pass, and what those that exited did has happened before.

mod common;
use common::{kernel, read_words, run, shape, words};
use phalanx_ptx::{FaultKind, Launch, Memory};

/// Each of 96 threads writes its number to shared memory; those that `leave` names exit, and each of the 24 others adds what the two
/// threads 24 and 32 further on wrote.
fn neighbours(leave: &str, sync: &str) -> String {
    let body = format!(
        ".shared .b32 s[96]; mov.u32 %r2, s; mad.lo.u32 %r3, %t, 4, %r2; st.shared.u32 [%r3], %t; {leave} @%q0 exit; {sync}
        add.u32 %r4, %t, 24; rem.u32 %r4, %r4, 96; mad.lo.u32 %r4, %r4, 4, %r2; ld.shared.u32 %r5, [%r4];
        add.u32 %r6, %t, 32; rem.u32 %r6, %r6, 96; mad.lo.u32 %r6, %r6, 4, %r2; ld.shared.u32 %r7, [%r6];
        add.u32 %r5, %r5, %r7; mul.wide.u32 %d0, %t, 4; add.u64 %d0, %p0, %d0; st.global.u32 [%d0], %r5;"
    );
    kernel(1, &body)
}

#[test]
fn the_threads_that_are_left_pass_a_barrier_of_all_and_see_what_the_others_wrote() {
    let memory = Memory::new(1 << 20);
    for (leave, left) in [("setp.ge.u32 %q0, %t, 24;", 0..24), ("setp.lt.u32 %q0, %t, 72;", 72..96)] {
        for sync in ["bar.sync 0;", "bar.sync 0; bar.sync 0; barrier.sync 3;"] {
            let out = words(&memory, &[0; 96]);
            run(&neighbours(leave, sync), &memory, shape(1, 96), &[out]).unwrap();
            let found = read_words(&memory, out, 96);
            for t in 0..96 {
                let wanted = if left.contains(&t) { (t + 24) % 96 + (t + 32) % 96 } else { 0 };
                assert_eq!(found[t as usize], wanted, "{leave} {sync} thread {t}");
            }
        }
    }
}

#[test]
fn without_the_barrier_what_exited_threads_wrote_is_a_race() {
    let memory = Memory::new(1 << 20);
    let out = words(&memory, &[0; 96]);
    let fault = run(&neighbours("setp.lt.u32 %q0, %t, 72;", ""), &memory, shape(1, 96), &[out]).unwrap_err();
    assert_eq!(fault.kind, FaultKind::SharedRace, "{fault}");
}

#[test]
fn a_barrier_counts_the_votes_of_those_that_are_left() {
    let memory = Memory::new(1 << 20);
    let out = words(&memory, &[0; 40 * 4]);
    let body = "setp.ge.u32 %q0, %t, 40; @%q0 exit; setp.lt.u32 %q1, %t, 35; setp.lt.u32 %q2, %t, 40;
        bar.red.popc.u32 %r1, 0, %q1; bar.red.and.pred %q3, 0, %q2; bar.red.and.pred %q4, 0, %q1; bar.red.or.pred %q5, 0, %q1;
        selp.u32 %r2, 1, 0, %q3; selp.u32 %r3, 1, 0, %q4; selp.u32 %r4, 1, 0, %q5;
        mul.wide.u32 %d0, %t, 16; add.u64 %d0, %p0, %d0; st.global.v4.u32 [%d0], {%r1, %r2, %r3, %r4};";
    run(&kernel(1, body), &memory, shape(1, 64), &[out]).unwrap();
    assert_eq!(read_words(&memory, out, 160), [35, 1, 0, 1].repeat(40));
}

#[test]
fn a_barrier_of_a_cluster_is_one_of_the_threads_that_are_left() {
    let memory = Memory::new(1 << 20);
    let out = words(&memory, &[0; 32]);
    let body = |sync: &str| {
        let body = format!(
            ".shared .b32 s[32]; mov.u32 %r2, s; mad.lo.u32 %r3, %t, 4, %r2; mad.lo.u32 %r4, %c, 100, %t; st.shared.u32 [%r3], %r4;
            setp.ge.u32 %q0, %t, 16; @%q0 exit; {sync} xor.b32 %r5, %c, 1; mapa.shared::cluster.u32 %r6, %r3, %r5;
            ld.shared::cluster.u32 %r7, [%r6+64]; mad.lo.u32 %r8, %c, 16, %t; mul.wide.u32 %d0, %r8, 4; add.u64 %d0, %p0, %d0;
            st.global.u32 [%d0], %r7; {sync}"
        );
        kernel(1, &body)
    };
    let cluster = Launch { cluster: [2, 1, 1], ..shape(2, 32) };
    let meet = "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;";
    run(&body(meet), &memory, cluster, &[out]).unwrap();
    let wanted: Vec<u32> = (0..32).map(|i| (1 - i / 16) * 100 + 16 + i % 16).collect();
    assert_eq!(read_words(&memory, out, 32), wanted);
    run(&body(""), &memory, cluster, &[out]).unwrap_err();
}
