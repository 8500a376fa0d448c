//! Shuffles, votes, matches and reductions, held against the pseudo-code of the PTX ISA; special registers.
#![allow(clippy::needless_range_loop)]

mod common;
use common::{Random, kernel, read_words, run, shape, words};
use phalanx_ptx::Memory;

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
