//! Sectors, bank conflicts and the balance of threads, each against what can be worked out by hand; and the errors of
//! approximate instructions.

mod common;

use common::{kernel, load, read_words, shape, words};
use phalanx_ptx::{Checks, Counters, Launch, Memory, Traffic, launch};

/// What one block of so many threads counts. The kernel has 64 KiB of words at `%p0`, and 32 KiB of shared memory at `s`;
/// `%d0` is `%p0` plus `%r1` bytes and `%r2` is `s` plus `%r1`, where the body begins with `%r1` from `%t`.
fn counted(offset: &str, body: &str, threads: u32) -> Counters {
    let memory = Memory::new(1 << 20);
    let x = words(&memory, &(0..16384).collect::<Vec<u32>>());
    let text = kernel(
        1,
        &format!(
            ".shared .align 16 .b8 s[32768]; {offset}
            cvt.u64.u32 %d0, %r1; add.u64 %d0, %p0, %d0; mov.u32 %r2, s; add.u32 %r2, %r2, %r1; {body}"
        ),
    );
    let checks = Checks { counters: true, ..Checks::default() };
    launch(&load(&text, &memory), "k", &[&memory], &shape(1, threads), &x.to_le_bytes(), &checks)
        .unwrap()
        .counters
}

fn traffic(offset: &str, body: &str) -> Traffic {
    counted(offset, body, 32).traffic()
}

#[test]
fn a_row_costs_four_sectors_and_a_column_thirty_two() {
    let load = "ld.global.u32 %r3, [%d0];";
    for (offset, sectors, sectors_min) in [
        ("shl.b32 %r1, %t, 2;", 4, 4),
        ("shl.b32 %r1, %t, 7;", 32, 4),
        // Beside a sector's begin there is one more; the same word for all lanes is one.
        ("shl.b32 %r1, %t, 2; add.u32 %r1, %r1, 4;", 5, 4),
        ("mov.u32 %r1, 8;", 1, 1),
        ("shl.b32 %r1, %t, 3;", 8, 4),
    ] {
        let found = traffic(offset, load);
        assert_eq!(
            (found.global_requests, found.sectors, found.sectors_min),
            (1, sectors, sectors_min),
            "{offset}"
        );
    }
    let vector = traffic("shl.b32 %r1, %t, 4;", "ld.global.v4.u32 {%r3, %r4, %r5, %r6}, [%d0];");
    assert_eq!((vector.sectors, vector.sectors_min), (16, 16));
    let masked = traffic("shl.b32 %r1, %t, 2;", "setp.lt.u32 %q0, %t, 8; @%q0 ld.global.u32 %r3, [%d0];");
    assert_eq!((masked.global_requests, masked.sectors), (1, 1));
    let atomic = traffic("shl.b32 %r1, %t, 6;", "atom.global.add.u32 %r3, [%d0], 1;");
    assert_eq!((atomic.global_requests, atomic.sectors), (1, 32));
}

#[test]
fn words_of_one_bank_are_wavefronts_of_their_own() {
    let store = "st.shared.u32 [%r2], %t;";
    for (offset, wavefronts) in [
        ("shl.b32 %r1, %t, 2;", 1),
        ("shl.b32 %r1, %t, 3;", 2),
        ("shl.b32 %r1, %t, 7;", 32),
        // A row of 33 words has no conflicts in its columns.
        ("mul.lo.u32 %r1, %t, 132;", 1),
    ] {
        let found = traffic(offset, store);
        assert_eq!((found.shared_requests, found.phases, found.wavefronts), (1, 1, wavefronts), "{offset}");
    }
    let same = traffic("mov.u32 %r1, 0;", "st.shared.u32 [%r2], 1; ld.shared.u32 %r3, [%r2];");
    assert_eq!((same.shared_requests, same.wavefronts), (2, 2), "one word for all lanes");
}

#[test]
fn wide_accesses_are_served_in_halves_and_quarters_of_the_warp() {
    let eight = "st.shared.v2.u32 [%r2], {%t, %t};";
    let found = traffic("shl.b32 %r1, %t, 3;", eight);
    assert_eq!((found.phases, found.wavefronts), (2, 2));
    let sixteen = "st.shared.v4.u32 [%r2], {%t, %t, %t, %t};";
    let found = traffic("shl.b32 %r1, %t, 4;", sixteen);
    assert_eq!((found.phases, found.wavefronts), (4, 4));
    // Rows of 128 bytes, a lane a row: all eight lanes of a quarter want the same four banks.
    let found = traffic("shl.b32 %r1, %t, 7;", sixteen);
    assert_eq!((found.phases, found.wavefronts), (4, 32));
    let found = traffic("mul.lo.u32 %r1, %t, 144;", sixteen);
    assert_eq!((found.phases, found.wavefronts), (4, 4));
}

#[test]
fn lines_are_counted_by_themselves_and_add_up() {
    let text = format!(
        ".file 1 \"a.cu\"\n{}",
        kernel(
            1,
            ".loc 1 3 0\nld.global.u32 %r1, [%p0]; ld.global.u32 %r2, [%p0+64];\n.loc 1 4 0\nld.global.u32 %r3, [%p0+128];"
        )
    );
    let memory = Memory::new(1 << 20);
    let (x, checks) = (words(&memory, &[1; 64]), Checks { counters: true, ..Checks::default() });
    let loaded = load(&text, &memory);
    let run = |blocks| {
        launch(&loaded, "k", &[&memory], &shape(blocks, 64), &x.to_le_bytes(), &checks).unwrap().counters
    };
    let mut found = run(1);
    let lines: Vec<(&str, u64)> =
        found.lines.iter().map(|(line, t)| (line.as_str(), t.global_requests)).collect();
    assert_eq!(lines, [("a.cu:3", 4), ("a.cu:4", 2)]);
    found.add(&run(3));
    assert_eq!((found.launches, found.traffic().global_requests), (2, 24));
    let text = found.to_string();
    assert!(text.contains("a.cu:3: global: 16 requests, 1.00 sectors each"), "{text}");
}

#[test]
fn the_longest_thread_is_held_against_the_mean() {
    let even = counted("mov.u32 %r1, 0;", "", 64).balance;
    assert_eq!((even.threads, even.instructions), (64, 64 * even.longest));
    assert_eq!(even.ratio(), 1.0);
    // Thread 5 of 64 goes 1000 times through a loop of three instructions.
    let body = "setp.ne.u32 %q0, %t, 5; @%q0 bra END; mov.u32 %r3, 0;
        LOOP: add.u32 %r3, %r3, 1; setp.lt.u32 %q1, %r3, 1000; @%q1 bra LOOP; END:";
    let uneven = counted("mov.u32 %r1, 0;", body, 64).balance;
    assert_eq!(uneven.longest, even.longest + 3 + 3000);
    assert!(uneven.ratio() > 45.0, "{uneven:?}");
}

#[test]
fn nothing_is_counted_unless_it_is_wanted() {
    let memory = Memory::new(1 << 20);
    let x = words(&memory, &[1; 64]);
    let text = kernel(1, "ld.global.u32 %r1, [%p0];");
    let report = common::run(&text, &memory, shape(1, 64), &[x]).unwrap();
    assert_eq!(report.counters, Counters::default());
}

#[test]
fn approximate_instructions_err_as_a_seed_says_and_exact_ones_do_not() {
    let body = "mul.wide.u32 %d0, %t, 4; add.u64 %d0, %p0, %d0; ld.global.f32 %f1, [%d0];
        ex2.approx.f32 %f2, %f1; st.global.f32 [%d0], %f2; div.approx.f32 %f3, %f1, 0f40400000; st.global.f32 [%d0+256], %f3;
        div.rn.f32 %f4, %f1, 0f40400000; st.global.f32 [%d0+512], %f4; div.full.f32 %f5, %f1, 0f40400000; st.global.f32 [%d0+768], %f5;";
    let values: Vec<u32> = (0..64).map(|i| (0.37f32 + i as f32 * 0.11).to_bits()).collect();
    let run = |approximate| {
        let memory = Memory::new(1 << 20);
        let x = words(&memory, &[values.clone(), vec![0; 192]].concat());
        let checks = Checks { approximate, ..Checks::default() };
        let shape: Launch = shape(1, 64);
        launch(&load(&kernel(1, body), &memory), "k", &[&memory], &shape, &x.to_le_bytes(), &checks).unwrap();
        read_words(&memory, x, 256)
    };
    let (exact, one, other) = (run(None), run(Some(1)), run(Some(2)));
    assert_eq!(one, run(Some(1)));
    let apart = |a: &[u32], b: &[u32]| a.iter().zip(b).map(|(a, b)| a.abs_diff(*b)).max().unwrap();
    for (part, most) in [(0..64, 4), (64..128, 2), (192..256, 2)] {
        let found = apart(&exact[part.clone()], &one[part.clone()]);
        assert!((1..=most).contains(&found), "{found} units in the last place");
        assert_ne!(one[part.clone()], other[part]);
    }
    assert_eq!(exact[128..192], one[128..192], "a rounded division is what it is");
}
