//! Control flow and what threads wait for: branches and calls, shuffles and votes, barriers after some threads have
//! exited, and cooperative launches, whose blocks wait for each other.
#![allow(clippy::needless_range_loop)]

mod common;

use common::{Random, kernel, load, read_words, run, shape, words};
use phalanx_ptx::{Checks, Fault, FaultKind, Launch, Memory, Report, launch, launch_cooperative};

#[test]
fn lanes_that_parted_join_again() {
    // Collatz steps: every lane leaves the loop at another time; afterwards all are together.
    let memory = Memory::new(1 << 20);
    let out = words(&memory, &[0; 64]);
    let body = "add.u32 %r1, %t, 1; mov.u32 %r2, 0;
        LOOP: setp.eq.u32 %q0, %r1, 1; @%q0 bra END; add.u32 %r2, %r2, 1; and.b32 %r3, %r1, 1; setp.eq.u32 %q1, %r3, 0; @%q1 bra EVEN;
        mad.lo.u32 %r1, %r1, 3, 1; bra.uni LOOP; EVEN: shr.u32 %r1, %r1, 1; bra LOOP;
        END: activemask.b32 %r4; mul.wide.u32 %d0, %t, 8; add.u64 %d0, %p0, %d0; st.global.v2.u32 [%d0], {%r2, %r4};";
    run(&kernel(1, body), &memory, shape(1, 32), &[out]).unwrap();
    for (t, pair) in read_words(&memory, out, 64).chunks_exact(2).enumerate() {
        let (mut n, mut steps) = (t as u64 + 1, 0);
        while n != 1 {
            n = if n % 2 == 0 { n / 2 } else { 3 * n + 1 };
            steps += 1;
        }
        assert_eq!(pair, [steps, u32::MAX], "thread {t}");
    }
}

#[test]
fn a_table_of_targets_is_followed() {
    let memory = Memory::new(1 << 20);
    let out = words(&memory, &[0; 32]);
    let body = "and.b32 %r1, %t, 3; TS: .branchtargets A, B, A, C; brx.idx %r1, TS;
        A: mov.u32 %r2, 10; bra JOIN; B: mov.u32 %r2, 20; bra JOIN; C: mov.u32 %r2, 30; JOIN: mul.wide.u32 %d0, %t, 4; add.u64 %d0, %p0, %d0; st.global.u32 [%d0], %r2;";
    run(&kernel(1, body), &memory, shape(1, 32), &[out]).unwrap();
    let wanted: Vec<u32> = (0..32).map(|t| [10, 20, 10, 30][t % 4]).collect();
    assert_eq!(read_words(&memory, out, 32), wanted);
}

#[test]
fn functions_are_called_directly_through_addresses_and_by_some_lanes_only() {
    let memory = Memory::new(1 << 20);
    let out = words(&memory, &[0; 64]);
    let text = ".func (.param .b32 result) square(.param .b32 x) { .reg .b32 %a<3>; .local .b32 l; ld.param.b32 %a1, [x]; st.local.b32 [l], %a1; ld.local.b32 %a2, [l]; mul.lo.s32 %a1, %a1, %a2; st.param.b32 [result], %a1; ret; }
        .func (.param .b32 result) other(.param .b32 x) { .reg .b32 %a<3>; .reg .pred %p; ld.param.b32 %a1, [x]; setp.gt.u32 %p, %a1, 20; @%p bra BIG; { .param .b32 y; .param .b32 r; st.param.b32 [y], %a1; call.uni (r), square, (y); ld.param.b32 %a1, [r]; } add.u32 %a1, %a1, 1; st.param.b32 [result], %a1; ret; BIG: st.param.b32 [result], 0; ret; }\n"
        .to_string()
        + &kernel(
            1,
            "mul.wide.u32 %d0, %t, 8; add.u64 %d0, %p0, %d0; mov.u32 %r3, 77;
            and.b32 %r1, %t, 1; setp.eq.u32 %q0, %r1, 1;
            @%q0 bra ODD; { .param .b32 a; .param .b32 r; st.param.b32 [a+0], %t; call.uni (r), square, (a); ld.param.b32 %r3, [r+0]; }
            ODD: selp.u64 %d1, 1, 0, %q0; mov.u64 %d2, square; mov.u64 %d3, other; selp.u64 %d4, %d3, %d2, %q0;
            { .param .b32 a; .param .b32 r; PROTO: .callprototype (.param .b32 _) _ (.param .b32 _); st.param.b32 [a], %t; call (r), %d4, (a), PROTO; ld.param.b32 %r4, [r]; }
            st.global.v2.u32 [%d0], {%r3, %r4};",
        );
    run(&text, &memory, shape(1, 32), &[out]).unwrap();
    for (t, pair) in read_words(&memory, out, 64).chunks_exact(2).enumerate() {
        let t = t as u32;
        let wanted =
            if t.is_multiple_of(2) { [t * t, t * t] } else { [77, if t > 20 { 0 } else { t * t + 1 }] };
        assert_eq!(pair, wanted, "thread {t}");
    }
}

#[test]
fn scopes_hide_names() {
    let memory = Memory::new(1 << 20);
    let out = words(&memory, &[0; 2]);
    let body = "mov.u32 %r1, 1; { .reg .b32 %r1; mov.u32 %r1, 2; { .reg .b32 x; mov.u32 x, %r1; st.global.u32 [%p0], x; } } st.global.u32 [%p0+4], %r1;";
    run(&kernel(1, body), &memory, shape(1, 1), &[out]).unwrap();
    assert_eq!(read_words(&memory, out, 2), [2, 1]);
}

#[test]
fn a_barrier_orders_and_reduces() {
    let memory = Memory::new(1 << 20);
    let out = words(&memory, &[0; 128 * 4]);
    let body = ".shared .b32 s[128]; shl.b32 %r1, %t, 2; mov.u32 %r2, s; add.u32 %r3, %r2, %r1; st.shared.u32 [%r3], %t; bar.sync 0;
        sub.u32 %r4, 508, %r1; add.u32 %r4, %r2, %r4; ld.shared.u32 %r5, [%r4];
        setp.lt.u32 %q0, %t, 50; bar.red.popc.u32 %r6, 0, %q0; bar.red.and.pred %q1, 0, %q0; bar.red.or.pred %q2, 0, %q0; selp.u32 %r7, 1, 0, %q1; selp.u32 %r8, 1, 0, %q2;
        mul.wide.u32 %d0, %t, 16; add.u64 %d0, %p0, %d0; st.global.v4.u32 [%d0], {%r5, %r6, %r7, %r8};";
    let report = run(&kernel(1, body), &memory, shape(1, 128), &[out]).unwrap();
    assert_eq!(report.barriers, 4);
    for (t, row) in read_words(&memory, out, 512).chunks_exact(4).enumerate() {
        assert_eq!(row, [127 - t as u32, 50, 0, 1]);
    }
}

#[test]
fn numbered_barriers_pass_from_producers_to_consumers() {
    // Warp 0 writes and arrives, warp 1 waits and reads, several times over; each direction has a barrier.
    let memory = Memory::new(1 << 20);
    let out = words(&memory, &[0; 32 * 4]);
    let body = ".shared .b32 s[32]; and.b32 %r1, %t, 31; shl.b32 %r2, %r1, 2; mov.u32 %r3, s; add.u32 %r3, %r3, %r2; mov.u32 %r4, 0; setp.ge.u32 %q0, %t, 32; @%q0 bra CONSUMER;
        PRODUCE: mad.lo.u32 %r5, %r4, 100, %r1; st.shared.u32 [%r3], %r5; bar.arrive 1, 64; bar.sync 2, 64; add.u32 %r4, %r4, 1; setp.lt.u32 %q1, %r4, 4; @%q1 bra PRODUCE; ret;
        CONSUMER: bar.sync 1, 64; xor.b32 %r6, %r3, 4; ld.shared.u32 %r7, [%r6]; bar.arrive 2, 64; mad.lo.u32 %r8, %r4, 32, %r1; mul.wide.u32 %d0, %r8, 4; add.u64 %d0, %p0, %d0; st.global.u32 [%d0], %r7; add.u32 %r4, %r4, 1; setp.lt.u32 %q1, %r4, 4; @%q1 bra CONSUMER;";
    run(&kernel(1, body), &memory, shape(1, 64), &[out]).unwrap();
    let wanted: Vec<u32> = (0..128).map(|i| i / 32 * 100 + ((i % 32) ^ 1)).collect();
    assert_eq!(read_words(&memory, out, 128), wanted);
}

#[test]
fn a_lock_between_lanes_of_a_warp_is_handed_on() {
    let memory = Memory::new(1 << 20);
    let place = words(&memory, &[0, 0]);
    let body = "SPIN: atom.global.acquire.gpu.cas.b32 %r1, [%p0], 0, 1; setp.ne.u32 %q0, %r1, 0; @%q0 bra SPIN;
        ld.global.u32 %r2, [%p0+4]; add.u32 %r2, %r2, 1; st.global.u32 [%p0+4], %r2; atom.global.release.gpu.exch.b32 %r3, [%p0], 0;";
    run(&kernel(1, body), &memory, shape(2, 64), &[place])
        .map(|_| ())
        .or_else(|f| if f.kind == FaultKind::GlobalRace { Ok(()) } else { Err(f) })
        .unwrap();
}

#[test]
fn printf_and_assert_speak() {
    let memory = Memory::new(1 << 20);
    let hex =
        |text: &str| format!("{{{}, 0}}", text.bytes().map(|b| b.to_string()).collect::<Vec<_>>().join(", "));
    let format = "t=%d %5.2f|%-4u|%s %% %llx %c\n";
    let text = format!(
        ".extern .func (.param .b32 r) vprintf(.param .b64 a, .param .b64 b); .extern .func __assertfail(.param .b64 a, .param .b64 b, .param .b32 c, .param .b64 d, .param .b64 e) .noreturn;
        .global .align 1 .b8 format[{}] = {}; .global .align 1 .b8 name[4] = {}; .global .align 1 .b8 what[6] = {};\n",
        format.len() + 1,
        hex(format),
        hex("abc"),
        hex("x < y")
    ) + &kernel(
        0,
        ".local .align 8 .b8 args[48]; mov.u64 %d0, args; cvta.local.u64 %d1, %d0; st.local.u32 [args], -5; st.local.f64 [args+8], 0d400921FB54442D18; st.local.u32 [args+16], 7; mov.u64 %d2, name; st.local.u64 [args+24], %d2; mov.u64 %d6, 0xdeadbeef1; st.local.u64 [args+32], %d6; st.local.u32 [args+40], 65;
        mov.u64 %d3, format; { .param .b64 a; .param .b64 b; .param .b32 r; st.param.b64 [a], %d3; st.param.b64 [b], %d1; call.uni (r), vprintf, (a, b); }
        setp.eq.u32 %q0, %t, 1; @!%q0 bra FINE; mov.u64 %d4, what; mov.u64 %d5, name; { .param .b64 a; .param .b64 b; .param .b32 c; .param .b64 d; .param .b64 e; st.param.b64 [a], %d4; st.param.b64 [b], %d5; st.param.b32 [c], 12; st.param.b64 [d], %d5; st.param.b64 [e], 1; call.uni __assertfail, (a, b, c, d, e); } FINE:",
    );
    let report = run(&text, &memory, shape(1, 1), &[]).unwrap();
    assert_eq!(report.output, "t=-5  3.14|7   |abc % deadbeef1 A\n");
    let fault = run(&text, &memory, shape(1, 2), &[]).unwrap_err();
    assert_eq!(
        (fault.kind, fault.message.as_str(), fault.thread),
        (FaultKind::Assert, "`x < y` in `abc` at abc:12", [1, 0, 0])
    );
    // What it is told comes to the host.
    let fault = run(&text.replace("st.local.u32 [args+16], 7;", ""), &memory, shape(1, 1), &[]).unwrap_err();
    assert_eq!(fault.kind, FaultKind::Uninitialised, "{fault}");
}

#[test]
fn text_that_is_no_ptx_is_refused_with_its_line() {
    let parse = |text: &str| phalanx_ptx::Module::parse(text).unwrap_err();
    let error = parse(&format!(".version 9.0\n{}", kernel(0, "\nadd.u32 %r1, %nothing, 2;")));
    assert_eq!(error.to_string(), "ptx line 8: no register, variable or function `%nothing` (as u32)");
    assert!(parse(&kernel(0, "bra NOWHERE;")).what.contains("NOWHERE"));
    assert!(parse(".visible .entry k( {").what.contains("wanted"));
    assert!(parse(&kernel(0, "add.u32 %r1;")).what.contains("operands"));
    for text in [
        "",
        "}",
        ".entry",
        ".visible .entry k() { ld.global.u32 ",
        "\"",
        "/*",
        ".visible .entry k() { mov.u32 %r1, ; }",
    ] {
        let _ = phalanx_ptx::Module::parse(text);
    }
}

/// Runs a body that computes `%r9` from `%r8`, a lane's value, for the lanes of a mask; others give 0.
fn lanes(body: &str, mask: u32, values: &[u32]) -> Vec<u32> {
    let memory = Memory::new(1 << 20);
    let (source, out) = (words(&memory, values), words(&memory, &[0; 32]));
    let text = format!(
        "mul.wide.u32 %d0, %t, 4; add.u64 %d1, %p0, %d0; add.u64 %d2, %p1, %d0; ld.global.u32 %r8, [%d1]; mov.u32 %r9, 0;
        shr.u32 %r1, {mask:#x}, %t; and.b32 %r1, %r1, 1; setp.eq.u32 %q0, %r1, 0; mov.u32 %r7, {mask:#x}; @%q0 bra DONE; {body} DONE: st.global.u32 [%d2], %r9;"
    );
    run(&kernel(2, &text), &memory, shape(1, 32), &[source, out]).unwrap_or_else(|f| panic!("{body}: {f}"));
    read_words(&memory, out, 32)
}

fn values() -> Vec<u32> {
    let mut random = Random(5);
    (0..32).map(|_| random.next() as u32).collect()
}

#[test]
fn shuffles_follow_the_pseudo_code() {
    let x = values();
    for (mode, clamp) in [("up", 0u32), ("down", 31), ("bfly", 31), ("idx", 31)] {
        for width in [32u32, 16, 8, 4] {
            for by in [0u32, 1, 2, 3, 7, 16, 31] {
                let c = (32 - width) << 8 | clamp;
                let body = format!(
                    "shfl.sync.{mode}.b32 %r9|%q1, %r8, {by}, {c:#x}, %r7; selp.u32 %r2, 0x80000000, 0, %q1; xor.b32 %r9, %r9, %r2;"
                );
                let found = lanes(&body, u32::MAX, &x);
                for lane in 0..32u32 {
                    let segment = c >> 8 & 31;
                    let most = lane & segment | clamp & !segment & 31;
                    let least = lane & segment;
                    let (j, valid) = match mode {
                        "up" => (lane.wrapping_sub(by), lane as i32 - by as i32 >= most as i32),
                        "down" => (lane + by, lane + by <= most),
                        "bfly" => (lane ^ by, (lane ^ by) <= most),
                        _ => (least | by & !segment & 31, (least | by & !segment & 31) <= most),
                    };
                    let wanted = if valid { x[j as usize] ^ 0x8000_0000 } else { x[lane as usize] };
                    assert_eq!(found[lane as usize], wanted, "{mode} by {by} in {width}, lane {lane}");
                }
            }
        }
    }
}

#[test]
fn votes_and_reductions_see_the_lanes_of_the_mask() {
    let x = values();
    for mask in [u32::MAX, 0xffff, 0x8001_0f10] {
        let inside = |l: usize| mask >> l & 1 == 1;
        let all = || (0..32).filter(|&l| inside(l)).map(|l| x[l]);
        let odd = (0..32).filter(|&l| inside(l) && x[l] & 1 == 1).fold(0u32, |m, l| m | 1 << l);
        let p = "and.b32 %r2, %r8, 1; setp.eq.u32 %q1, %r2, 1;";
        let expect = |body: &str, wanted: u32| {
            let found = lanes(body, mask, &x);
            for (l, found) in found.iter().enumerate() {
                assert_eq!(*found, if inside(l) { wanted } else { 0 }, "{body} mask {mask:#x} lane {l}");
            }
        };
        expect(&format!("{p} vote.sync.ballot.b32 %r9, %q1, %r7;"), odd);
        expect(&format!("{p} vote.sync.ballot.b32 %r9, !%q1, %r7;"), mask & !odd);
        expect(&format!("{p} vote.sync.any.pred %q2, %q1, %r7; selp.u32 %r9, 1, 0, %q2;"), (odd != 0) as u32);
        expect(
            &format!("{p} vote.sync.all.pred %q2, %q1, %r7; selp.u32 %r9, 1, 0, %q2;"),
            (odd == mask) as u32,
        );
        expect(
            &format!("{p} vote.sync.uni.pred %q2, %q1, %r7; selp.u32 %r9, 1, 0, %q2;"),
            (odd == mask || odd == 0) as u32,
        );
        expect("redux.sync.add.u32 %r9, %r8, %r7;", all().fold(0, u32::wrapping_add));
        expect("redux.sync.min.u32 %r9, %r8, %r7;", all().min().unwrap());
        expect("redux.sync.max.u32 %r9, %r8, %r7;", all().max().unwrap());
        expect("redux.sync.min.s32 %r9, %r8, %r7;", all().map(|v| v as i32).min().unwrap() as u32);
        expect("redux.sync.max.s32 %r9, %r8, %r7;", all().map(|v| v as i32).max().unwrap() as u32);
        expect("redux.sync.and.b32 %r9, %r8, %r7;", all().fold(u32::MAX, |a, b| a & b));
        expect("redux.sync.or.b32 %r9, %r8, %r7;", all().fold(0, |a, b| a | b));
        expect("redux.sync.xor.b32 %r9, %r8, %r7;", all().fold(0, |a, b| a ^ b));
        expect("activemask.b32 %r9;", mask);
        expect(
            "elect.sync %r9|%q1, %r7; selp.u32 %r2, 64, 0, %q1; vote.sync.ballot.b32 %r3, %q1, %r7; mov.u32 %r9, %r3;",
            mask & mask.wrapping_neg(),
        );
    }
}

#[test]
fn matches_find_lanes_with_the_same_value() {
    let x: Vec<u32> = (0..32).map(|i| i % 5).collect();
    for mask in [u32::MAX, 0x00ff_ff00] {
        let found = lanes("match.any.sync.b32 %r9, %r8, %r7;", mask, &x);
        for l in 0..32 {
            let wanted =
                (0..32).filter(|&o| mask >> o & 1 == 1 && x[o] == x[l]).fold(0u32, |m, o| m | 1 << o);
            assert_eq!(found[l], if mask >> l & 1 == 1 { wanted } else { 0 });
        }
        let body = "match.all.sync.b32 %r9|%q1, %r8, %r7; selp.u32 %r2, 1, 0, %q1; xor.b32 %r9, %r9, %r2;";
        assert!(lanes(body, mask, &x).iter().all(|&v| v == 0));
        let same = lanes(body, mask, &[9; 32]);
        assert!((0..32).all(|l| same[l] == if mask >> l & 1 == 1 { mask ^ 1 } else { 0 }));
    }
}

#[test]
fn lanes_of_two_branches_meet_in_one_shuffle() {
    // Each half comes by an instruction of its own, with the same mask.
    let x = values();
    let body = "setp.lt.u32 %q1, %t, 16; @%q1 bra LOW; add.u32 %r8, %r8, 5; shfl.sync.bfly.b32 %r9, %r8, 16, 31, %r7; bra JOIN;
        LOW: add.u32 %r8, %r8, 3; shfl.sync.bfly.b32 %r9, %r8, 16, 31, %r7; JOIN: add.u32 %r9, %r9, 1;";
    let found = lanes(body, u32::MAX, &x);
    for l in 0..32usize {
        let o = l ^ 16;
        assert_eq!(found[l], x[o].wrapping_add(if o < 16 { 4 } else { 6 }));
    }
}

#[test]
fn threads_know_where_they_are() {
    let memory = Memory::new(1 << 20);
    let names = [
        "%tid.x",
        "%tid.y",
        "%tid.z",
        "%ntid.x",
        "%ctaid.x",
        "%ctaid.y",
        "%nctaid.y",
        "%laneid",
        "%warpid",
        "%nwarpid",
        "%lanemask_eq",
        "%lanemask_lt",
        "%lanemask_le",
        "%lanemask_gt",
        "%lanemask_ge",
        "%dynamic_smem_size",
    ];
    let out = words(&memory, &vec![0; 16 * 48 * 4]);
    let mut body = "mov.u32 %r1, %tid.y; mov.u32 %r2, %tid.z; mad.lo.u32 %r3, %r1, 4, %t; mad.lo.u32 %r3, %r2, 12, %r3; mov.u32 %r4, %ctaid.y; mad.lo.u32 %r5, %r4, 2, %c; mad.lo.u32 %r3, %r5, 48, %r3; mul.wide.u32 %d0, %r3, 64; add.u64 %d0, %p0, %d0;\n".to_string();
    for (i, name) in names.iter().enumerate() {
        body += &format!("mov.u32 %r10, {name}; st.global.u32 [%d0+{}], %r10;\n", i * 4);
    }
    let launch =
        phalanx_ptx::Launch { grid: [2, 2, 1], block: [4, 3, 4], shared_bytes: 96, cluster: [1, 1, 1] };
    run(&kernel(1, &body), &memory, launch, &[out]).unwrap();
    let found = read_words(&memory, out, 16 * 48 * 4);
    for (thread, row) in found.chunks_exact(16).enumerate() {
        let (t, block) = (thread as u32 % 48, thread as u32 / 48);
        let lane = t % 32;
        let below = (1u32 << lane) - 1;
        let wanted = [
            t % 4,
            t / 4 % 3,
            t / 12,
            4,
            block % 2,
            block / 2,
            2,
            lane,
            t / 32,
            2,
            1 << lane,
            below,
            below | 1 << lane,
            !(below | 1 << lane),
            !below,
            96,
        ];
        assert_eq!(row, wanted, "thread {t} of block {block}");
    }
}

#[test]
fn clocks_go_forwards() {
    let memory = Memory::new(1 << 20);
    let out = words(&memory, &[0]);
    let body = "mov.u64 %d0, %clock64; mov.u32 %r1, %clock; mov.u64 %d1, %clock64; mov.u64 %d2, %globaltimer; setp.gt.u64 %q0, %d1, %d0; selp.u32 %r2, 1, 0, %q0; st.global.u32 [%p0], %r2;";
    run(&kernel(1, body), &memory, shape(1, 1), &[out]).unwrap();
    assert_eq!(read_words(&memory, out, 1), [1]);
}

/// Each of 96 threads writes its number to shared memory; those that `leave` names exit, and each of the 24 others
/// adds what the two threads 24 and 32 further on wrote.
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

/// Each thread writes a word, all blocks meet, each reads the word of its opposite. `order` is that of the arrival.
fn waiting_body(order: &str) -> String {
    format!(
        "mov.u32 %r1, %envreg1; mov.u32 %r2, %envreg2; mov.b64 %d0, {{%r2, %r1}}; mad.lo.u32 %r3, %c, 64, %t; mul.wide.u32 %d1, %r3, 4; add.u64 %d2, %p0, %d1;
        st.global.u32 [%d2], %r3; bar.sync 0; setp.ne.u32 %q0, %t, 0; @%q0 bra MEET; atom.add.{order}.gpu.u32 %r4, [%d0+4], 1; WAIT: ld.acquire.gpu.u32 %r5, [%d0+4]; mov.u32 %r6, %nctaid.x; setp.lt.u32 %q1, %r5, %r6; @%q1 bra WAIT;
        MEET: bar.sync 0; mov.u32 %r7, %nctaid.x; mul.lo.u32 %r7, %r7, 64; sub.u32 %r7, %r7, 1; sub.u32 %r7, %r7, %r3; mul.wide.u32 %d3, %r7, 4; add.u64 %d4, %p0, %d3; ld.global.u32 %r8, [%d4]; add.u64 %d5, %p1, %d1; st.global.u32 [%d5], %r8;"
    )
}

fn run_cooperative(order: &str, shape: Launch) -> (Result<Report, Fault>, Vec<u32>, u64) {
    let memory = Memory::new(1 << 20);
    let (x, y) = (memory.allocate(256 * 4).unwrap(), words(&memory, &[0; 256]));
    let before = memory.used();
    let parameters = [x.to_le_bytes(), y.to_le_bytes()].concat();
    let outcome = launch_cooperative(
        &load(&kernel(2, &waiting_body(order)), &memory),
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
    let (outcome, words, left) = run_cooperative("acq_rel", shape(4, 64));
    let report = outcome.unwrap();
    assert_eq!(words, (0..256).rev().collect::<Vec<_>>());
    assert_eq!(left, 0, "the barrier's memory is free again");
    assert_eq!(report.touched.len(), 2, "and nobody hears of it: {:?}", report.touched);
}

#[test]
fn an_arrival_that_releases_nothing_orders_nothing() {
    let fault = run_cooperative("relaxed", shape(4, 64)).0.unwrap_err();
    assert_eq!(fault.kind, FaultKind::GlobalRace, "{fault}");
}

#[test]
fn clusters_and_plain_launches_have_no_such_barrier() {
    let fault = run_cooperative("acq_rel", Launch { cluster: [2, 1, 1], ..shape(4, 64) }).0.unwrap_err();
    assert_eq!(fault.kind, FaultKind::BadLaunch, "{fault}");
    let memory = Memory::new(1 << 20);
    let x = words(&memory, &[0; 256]);
    let parameters = [x.to_le_bytes(); 2].concat();
    let loaded = load(&kernel(2, &waiting_body("acq_rel")), &memory);
    let fault = launch(&loaded, "k", &[&memory], &shape(4, 64), &parameters, &Checks::default()).unwrap_err();
    assert_eq!((fault.kind, fault.thread), (FaultKind::OutOfBounds, [0; 3]), "at address 4: {fault}");
}
