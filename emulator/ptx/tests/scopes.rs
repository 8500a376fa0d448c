//! Scopes and other terms of PTX's memory model: what is atomic or fenced for a block says nothing to other blocks; what
//! `ld.global.nc` reads stays as it is; barriers that threads skip by exiting; and races that are allowed.

mod common;

use common::{kernel, load, read_words, shape, words};
use phalanx_ptx::{AllowedRace, Checks, Fault, FaultKind, Launch, Memory, Report, launch};

/// Runs a kernel over words; `#n` begins a statement of line `n` of `a.cu`.
fn run(body: &str, shape: Launch, x: &[u32], checks: &Checks) -> (Result<Report, Fault>, Vec<u32>) {
    let mut text = String::new();
    for (i, part) in body.split('#').enumerate() {
        let line = part.split_once(' ').filter(|_| i > 0);
        text += &line.map_or(part.to_string(), |(line, rest)| format!("\n.loc 1 {line} 1\n {rest}"));
    }
    let memory = Memory::new(1 << 20);
    let place = words(&memory, x);
    let loaded = load(&format!(".file 1 \"src/a.cu\"\n{}", kernel(1, &text)), &memory);
    let outcome = launch(&loaded, "k", &[&memory], &shape, &place.to_le_bytes(), checks);
    (outcome, read_words(&memory, place, x.len()))
}

fn plain(body: &str, shape: Launch, x: &[u32]) -> Result<Report, Fault> {
    run(body, shape, x, &Checks::default()).0
}

fn expect(outcome: Result<Report, Fault>, kind: FaultKind, text: &str) {
    let fault = outcome.expect_err(text);
    assert_eq!(fault.kind, kind, "{fault}");
    assert!(fault.to_string().contains(text), "`{text}` is not in `{fault}`");
}

#[test]
fn an_atomic_operation_of_block_scope_is_none_between_blocks() {
    for (scope, blocks) in [("gpu", 2), ("sys", 2), ("cta", 1), ("cluster", 1)] {
        let (outcome, x) = run(
            &format!("red.{scope}.global.add.u32 [%p0], 1;"),
            shape(blocks, 64),
            &[0],
            &Checks::default(),
        );
        outcome.unwrap();
        assert_eq!(x, [64 * blocks]);
    }
    let pair = Launch { cluster: [2, 1, 1], ..shape(2, 64) };
    plain("red.cluster.global.add.u32 [%p0], 1;", pair, &[0]).unwrap();
    for (scope, shape) in [("cta", shape(2, 64)), ("cluster", shape(2, 64)), ("cta", pair)] {
        let body = format!("#4 red.{scope}.global.add.u32 [%p0], 1;");
        expect(plain(&body, shape, &[0]), FaultKind::GlobalRace, "written at src/a.cu:4");
        expect(
            plain(&body, shape, &[0]),
            FaultKind::GlobalRace,
            "atomically, but only for its own block or cluster",
        );
    }
    // One of the two is enough.
    let mixed = "setp.eq.u32 %q0, %c, 0; @%q0 red.cta.global.add.u32 [%p0], 1; @!%q0 red.gpu.global.add.u32 [%p0], 1;";
    expect(plain(mixed, shape(2, 1), &[0]), FaultKind::GlobalRace, "only for its own block");
}

/// Thread 0 writes and raises a flag; another, of the same or of another block, waits for the flag and reads.
fn message(reader: &str, write: &str, read: &str) -> String {
    format!(
        "setp.eq.u32 %q0, %t, 0; setp.eq.u32 %q1, %c, 0; and.pred %q2, %q0, %q1; @%q2 bra WRITER; {reader} @!%q3 exit;
        SPIN: {read} setp.eq.u32 %q4, %r1, 0; @%q4 bra SPIN; {{READ}} #9 ld.global.u32 %r2, [%p0+4]; exit;
        WRITER: #7 st.global.u32 [%p0+4], 5; {write}"
    )
}

#[test]
fn fences_and_releases_count_in_their_scope() {
    let here = ("setp.eq.u32 %q3, %t, 32;", shape(1, 64));
    let there = ("setp.eq.u32 %q3, %c, 1;", shape(2, 1));
    let cases = |scope: &str| {
        let fences = (
            format!("fence.acq_rel.{scope}; st.relaxed.gpu.global.u32 [%p0], 1;"),
            "ld.relaxed.gpu.global.u32 %r1, [%p0];".to_string(),
            format!("fence.acq_rel.{scope};"),
        );
        let orders = (
            format!("st.release.{scope}.global.u32 [%p0], 1;"),
            format!("ld.acquire.{scope}.global.u32 %r1, [%p0];"),
            String::new(),
        );
        [fences, orders]
    };
    for ((reader, shape), scope, ordered) in [
        (here, "cta", true),
        (here, "gpu", true),
        (there, "gpu", true),
        (there, "cta", false),
        (there, "cluster", false),
    ] {
        for (write, read, after) in cases(scope) {
            let body = message(reader, &write, &read).replace("{READ}", &after);
            let outcome = plain(&body, shape, &[0, 0]);
            match ordered {
                true => drop(outcome.unwrap_or_else(|fault| panic!("{scope} {write}: {fault}"))),
                false => assert_eq!(outcome.unwrap_err().kind, FaultKind::GlobalRace, "{scope} {write}"),
            }
        }
    }
}

#[test]
fn a_reader_that_does_not_fence_is_found_in_another_block_too() {
    let write = "membar.gl; st.volatile.global.u32 [%p0], 1;";
    let body = message("setp.eq.u32 %q3, %c, 1;", write, "ld.volatile.global.u32 %r1, [%p0];");
    plain(&body.replace("{READ}", "membar.gl;"), shape(2, 1), &[0, 0]).unwrap();
    for fence in ["", "membar.cta;"] {
        let outcome = plain(&body.replace("{READ}", fence), shape(2, 1), &[0, 0]);
        expect(
            outcome,
            FaultKind::GlobalRace,
            "of which a flag was read, but with no acquire or fence behind that read",
        );
    }
}

#[test]
fn constant_loads_of_what_the_launch_has_written() {
    let body = |load: &str| {
        format!(
            "mul.wide.u32 %d0, %t, 4; add.u64 %d0, %p0, %d0; #3 st.global.u32 [%d0], %t; bar.sync 0; #4 {load} %r1, [%d0];"
        )
    };
    plain(&body("ld.global.u32"), shape(1, 32), &[0; 32]).unwrap();
    let text = "as constant (ld.global.nc: __ldg, or a const __restrict__ pointer), which the same launch has written at src/a.cu:3";
    expect(plain(&body("ld.global.nc.u32"), shape(1, 32), &[0; 32]), FaultKind::GlobalRace, text);
    // What earlier launches wrote is constant.
    plain("ld.global.nc.u32 %r1, [%p0]; add.u32 %r1, %r1, 1; bar.sync 0; setp.eq.u32 %q0, %t, 0; @%q0 st.global.u32 [%p0], %r1;", shape(1, 32), &[0]).unwrap();
}

#[test]
fn a_barrier_that_others_skip_by_exiting_is_a_fault_if_checks_are_strict() {
    let body = "setp.ge.u32 %q0, %t, 40; @%q0 exit; #6 bar.sync 0;";
    let strict = Checks { strict_barriers: true, ..Checks::default() };
    plain(body, shape(1, 64), &[0]).unwrap();
    let found = run(body, shape(1, 64), &[0], &strict).0;
    expect(
        found,
        FaultKind::DivergentBarrier,
        "waits at a barrier that 24 threads of the block skip by exiting",
    );
    run(body, shape(1, 40), &[0], &strict).0.unwrap();
}

/// Checks that allow what a text says.
fn allowing(text: &str) -> Checks {
    Checks { allowed: AllowedRace::list(text).unwrap(), ..Checks::default() }
}

#[test]
fn equal_values_are_allowed_where_that_is_asked_for() {
    let found = "setp.ge.u32 %q0, %t, 3; #8 @%q0 st.global.u32 [%p0], 1;";
    let outcome = plain(found, shape(2, 64), &[0]);
    expect(
        outcome,
        FaultKind::GlobalRace,
        "both write the same value, which `equal@k` in `Checks::allowed` or PHALANX_EMULATOR_ALLOW_RACES allows",
    );
    for text in ["equal", "equal@k", "equal@a.cu:8", "equal@src/a.cu:8", "k", "a.cu:8", "other, equal@k"] {
        let (outcome, x) = run(found, shape(2, 64), &[0], &allowing(text));
        outcome.unwrap_or_else(|fault| panic!("{text}: {fault}"));
        assert_eq!(x, [1]);
    }
    for text in ["equal@other", "equal@a.cu:9", "equal@b.cu:8", "other", "a.cu:9"] {
        run(found, shape(2, 64), &[0], &allowing(text)).0.expect_err(text);
    }
    // Other values, and other lines, are found as before.
    let differ = "#8 st.global.u32 [%p0], %c;";
    expect(
        run(differ, shape(2, 1), &[0], &allowing("equal")).0,
        FaultKind::GlobalRace,
        "written at src/a.cu:8",
    );
    let reader = "setp.eq.u32 %q0, %c, 2; @%q0 bra READ; #8 st.global.u32 [%p0], 1; exit; READ: #9 ld.global.u32 %r1, [%p0];";
    expect(
        run(reader, shape(3, 1), &[0], &allowing("equal")).0,
        FaultKind::GlobalRace,
        "written at src/a.cu:8",
    );
}

#[test]
fn races_of_a_line_are_allowed_and_those_of_other_lines_found() {
    // Block 0 writes two words, block 1 reads both.
    let body = "setp.eq.u32 %q0, %c, 1; @%q0 bra READ; #3 st.global.u32 [%p0], 1; #4 st.global.u32 [%p0+4], 1; exit; READ: #5 ld.global.u32 %r1, [%p0]; #6 ld.global.u32 %r2, [%p0+4];";
    let found = |text: &str| run(body, shape(2, 1), &[0, 0], &allowing(text)).0;
    expect(found("a.cu:5"), FaultKind::GlobalRace, "a.cu:6");
    expect(found("a.cu:4"), FaultKind::GlobalRace, "a.cu:5");
    found("a.cu:3, a.cu:4").unwrap();
    found("a.cu:5,a.cu:6").unwrap();
    found("k").unwrap();
    assert!(AllowedRace::list("a.cu:x").unwrap_err().contains("FILE:LINE"));
}
