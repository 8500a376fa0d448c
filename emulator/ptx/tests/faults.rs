//! One test for each fault but races: its kind, its message, and that it names the right line, block and thread.

mod common;
use common::{kernel, load, run, shape, words};
use phalanx_ptx::{Checks, Fault, FaultKind, Launch, Memory, launch};

/// Files and a place: the next statement is at line `line` of `a.cu`.
fn at(line: u32) -> String {
    format!("\n.loc 1 {line} 3\n")
}

/// Runs a body with source lines.
fn faults(memory: &Memory, body: &str, shape: Launch, parameters: &[u64]) -> Fault {
    let text = format!(".file 1 \"a.cu\"\n.file 2 \"b.cuh\"\n{}", kernel(parameters.len(), body));
    run(&text, memory, shape, parameters).unwrap_err()
}

fn expect(fault: Fault, kind: FaultKind, line: u32, thread: u32, text: &str) {
    let found = fault.to_string();
    assert_eq!(fault.kind, kind, "{found}");
    let at = fault.at.as_ref().unwrap_or_else(|| panic!("no line: {found}"));
    assert_eq!((at.file.as_str(), at.line), ("a.cu", line), "{found}");
    assert_eq!(fault.thread, [thread, 0, 0], "{found}");
    assert!(found.contains(text), "`{text}` is not in `{found}`");
    assert!(found.contains(&format!("kernel \"k\" at a.cu:{line}")), "{found}");
}

#[test]
fn an_access_past_the_end_names_the_allocation() {
    let memory = Memory::new(1 << 20);
    let x = words(&memory, &[0; 1024]);
    let body = format!(
        "mad.lo.u32 %r1, %c, 256, %t; mul.wide.u32 %d0, %r1, 4; add.u64 %d0, %p0, %d0; {} ld.global.u32 %r2, [%d0]; {} ret;",
        at(17),
        at(18)
    );
    let fault = faults(&memory, &body, shape(5, 256), &[x]);
    assert_eq!(
        fault.to_string(),
        "illegal access: read of 4 bytes at offset 4096 of an allocation of 4096 bytes, kernel \"k\" at a.cu:17, block (4, 0, 0), thread (0, 0, 0)"
    );
    let body =
        format!("mul.wide.u32 %d0, %t, 4; add.u64 %d0, %p0, %d0; {} st.global.u32 [%d0+4000], %t;", at(21));
    expect(
        faults(&memory, &body, shape(1, 32), &[x]),
        FaultKind::OutOfBounds,
        21,
        24,
        "write of 4 bytes at offset 4096",
    );
    let body = format!("{} st.global.u32 [%p0+-4], %t;", at(22));
    expect(
        faults(&memory, &body, shape(1, 1), &[x]),
        FaultKind::OutOfBounds,
        22,
        0,
        "4 bytes before an allocation",
    );
    let body = format!("{} atom.global.add.u32 %r1, [%p0+4096], 1;", at(23));
    expect(
        faults(&memory, &body, shape(1, 1), &[x]),
        FaultKind::OutOfBounds,
        23,
        0,
        "atomic operation of 4 bytes",
    );
    let body = format!("mov.u64 %d0, 0; {} ld.global.u32 %r1, [%d0];", at(24));
    expect(
        faults(&memory, &body, shape(1, 1), &[x]),
        FaultKind::OutOfBounds,
        24,
        0,
        "at 0x0 outside every allocation",
    );
}

#[test]
fn a_freed_allocation_is_named_as_such() {
    let memory = Memory::new(1 << 20);
    let x = words(&memory, &[0; 4]);
    memory.free(x).unwrap();
    let fault = faults(&memory, &format!("{} ld.global.u32 %r1, [%p0+8];", at(3)), shape(1, 1), &[x]);
    expect(fault, FaultKind::OutOfBounds, 3, 0, "offset 8 of an allocation of 16 bytes that was freed");
}

#[test]
fn shared_and_local_memory_have_ends() {
    let memory = Memory::new(1 << 20);
    let body = format!(".shared .b8 s[128]; mul.lo.u32 %r1, %t, 4; {} st.shared.u32 [%r1+4], %t;", at(5));
    expect(
        faults(&memory, &body, shape(1, 32), &[]),
        FaultKind::OutOfBounds,
        5,
        31,
        "at offset 128 of 128 bytes of shared memory",
    );
    let body = format!(
        ".local .b8 l[16]; mov.u32 %r1, 0; cvt.u64.u32 %d0, %t; mul.lo.u64 %d0, %d0, 4; {} st.local.u32 [%d0], %t;",
        at(6)
    );
    expect(
        faults(&memory, &body, shape(1, 32), &[]),
        FaultKind::OutOfBounds,
        6,
        4,
        "at offset 16 of 16 bytes of local memory",
    );
}

#[test]
fn an_address_must_be_a_multiple_of_the_access() {
    let memory = Memory::new(1 << 20);
    let x = words(&memory, &[0; 64]);
    let body = format!("{} ld.global.u32 %r1, [%p0+2];", at(7));
    expect(faults(&memory, &body, shape(1, 32), &[x]), FaultKind::Misaligned, 7, 0, "2 past a multiple of 4");
    let body = format!("{} ld.global.v4.u32 {{%r1, %r2, %r3, %r4}}, [%p0+8];", at(8));
    expect(
        faults(&memory, &body, shape(1, 32), &[x]),
        FaultKind::Misaligned,
        8,
        0,
        "8 past a multiple of 16",
    );
    let body =
        format!(".shared .align 8 .b8 s[256]; shl.b32 %r1, %t, 2; {} st.shared.u64 [%r1], %p0;", at(9));
    expect(faults(&memory, &body, shape(1, 32), &[x]), FaultKind::Misaligned, 9, 1, "write of 8 bytes");
}

#[test]
fn bytes_that_nothing_has_written_are_not_computed_with() {
    let memory = Memory::new(1 << 20);
    let x = memory.allocate(256).unwrap();
    memory.write(x, &[0; 100]).unwrap();
    let body = format!(
        "mul.wide.u32 %d0, %t, 4; add.u64 %d0, %p0, %d0; {} ld.global.u32 %r1, [%d0]; bar.sync %r1;",
        at(11)
    );
    expect(
        faults(&memory, &body, shape(1, 32), &[x]),
        FaultKind::Uninitialised,
        11,
        25,
        "read of 4 bytes at offset 100 of an allocation of 256 bytes that nothing has written",
    );
    let body = format!(
        ".shared .b32 s[32]; shl.b32 %r1, %t, 2; setp.lt.u32 %q0, %t, 31; @%q0 st.shared.u32 [%r1], %t; bar.sync 0; {} ld.shared.u32 %r2, [%r1]; redux.sync.add.u32 %r3, %r2, -1;",
        at(12)
    );
    expect(
        faults(&memory, &body, shape(1, 32), &[]),
        FaultKind::Uninitialised,
        12,
        31,
        "offset 124 of shared memory",
    );
    let body = format!(
        ".local .b32 l[2]; st.local.u32 [l], %t; {} ld.local.u32 %r1, [l+4]; setp.eq.u32 %q0, %r1, 0; @%q0 exit;",
        at(13)
    );
    expect(
        faults(&memory, &body, shape(1, 32), &[]),
        FaultKind::Uninitialised,
        13,
        0,
        "offset 4 of local memory",
    );
    let body = format!("{} atom.global.add.u32 %r1, [%p0+200], 1;", at(14));
    expect(faults(&memory, &body, shape(1, 1), &[x]), FaultKind::Uninitialised, 14, 0, "atomic operation");
}

#[test]
fn shared_memory_of_an_earlier_block_counts_as_unwritten() {
    let memory = Memory::new(1 << 20);
    let body = format!(
        ".shared .b32 s; setp.eq.u32 %q0, %c, 0; @%q0 st.shared.u32 [s], 1; {} ld.shared.u32 %r1, [s]; setp.eq.u32 %q1, %r1, 7; @%q1 st.shared.u32 [s], 2;",
        at(15)
    );
    let fault = faults(&memory, &body, shape(2, 1), &[]);
    assert_eq!(fault.block, [1, 0, 0]);
    expect(fault, FaultKind::Uninitialised, 15, 0, "shared memory");
}

#[test]
fn padding_may_be_copied_and_stays_unwritten() {
    let memory = Memory::new(1 << 20);
    let x = memory.allocate(32).unwrap();
    memory.write(x, &[1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12]).unwrap();
    let y = memory.allocate(32).unwrap();
    // The fourth element was never written: it is copied, or not used at all.
    let copy = "ld.global.v4.u32 {%r1, %r2, %r3, %r4}, [%p0]; st.global.v4.u32 [%p1], {%r1, %r2, %r3, %r4};
        ld.global.v4.f32 {%f1, %f2, %f3, %f4}, [%p0]; add.f32 %f5, %f1, %f2; add.f32 %f5, %f5, %f3; st.global.f32 [%p1+16], %f5;";
    run(&kernel(2, copy), &memory, shape(1, 1), &[x, y]).unwrap();
    let mut bytes = [0; 16];
    memory.read(y, &mut bytes).unwrap();
    assert_eq!(bytes[..13], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, Memory::POISON]);
    let body = format!("{} ld.global.u32 %r1, [%p0+12]; setp.gt.u32 %q0, %r1, 5; @%q0 trap;", at(16));
    expect(faults(&memory, &body, shape(1, 1), &[y]), FaultKind::Uninitialised, 16, 0, "nothing has written");
}

#[test]
fn checks_can_be_turned_off() {
    let memory = Memory::new(1 << 20);
    let x = memory.allocate(256).unwrap();
    let text = kernel(1, "ld.global.u32 %r1, [%p0]; add.u32 %r1, %r1, 1; st.global.u32 [%p0], %r1;");
    let loaded = load(&text, &memory);
    let off = Checks { uninitialised: false, shared_races: false, global_races: false, ..Checks::default() };
    launch(&loaded, "k", &[&memory], &shape(2, 64), &x.to_le_bytes(), &off).unwrap();
    let on = launch(&loaded, "k", &[&memory], &shape(2, 64), &x.to_le_bytes(), &Checks::default());
    assert_eq!(on.unwrap_err().kind, FaultKind::GlobalRace);
}

#[test]
fn a_barrier_that_some_lanes_pass_by() {
    let memory = Memory::new(1 << 20);
    let body = format!(
        "setp.lt.u32 %q0, %t, 7; {} @!%q0 bra OVER; {} bar.sync 0; OVER: {} bar.sync 0;",
        at(1),
        at(2),
        at(3)
    );
    let fault = faults(&memory, &body, shape(1, 32), &[]);
    assert!(fault.message.contains("a.cu:2"), "{fault}");
    expect(fault, FaultKind::DivergentBarrier, 3, 7, "thread (0, 0, 0) waits at another one");
}

#[test]
fn a_barrier_with_a_count_that_exited_threads_leave_short() {
    let memory = Memory::new(1 << 20);
    let body = format!("setp.ge.u32 %q0, %t, 40; @%q0 exit; {} bar.sync 0, 96;", at(4));
    expect(
        faults(&memory, &body, shape(1, 96), &[]),
        FaultKind::DivergentBarrier,
        4,
        0,
        "56 threads of the block have exited",
    );
}

#[test]
fn barriers_of_two_numbers_wait_for_each_other() {
    let memory = Memory::new(1 << 20);
    let body = format!(
        "setp.ge.u32 %q0, %t, 32; @%q0 bra OTHER; {} bar.sync 1; ret; OTHER: {} bar.sync 2;",
        at(5),
        at(6)
    );
    let fault = faults(&memory, &body, shape(1, 64), &[]);
    assert!(fault.message.contains("thread (32, 0, 0) waits at a.cu:6"), "{fault}");
    expect(fault, FaultKind::DivergentBarrier, 5, 0, "do not reach");
}

#[test]
fn a_barrier_that_too_few_threads_come_to_is_a_deadlock() {
    let memory = Memory::new(1 << 20);
    let body = format!("{} bar.sync 3, 96;", at(7));
    expect(faults(&memory, &body, shape(1, 64), &[]), FaultKind::Deadlock, 7, 0, "do not reach");
    let body = format!("{} bar.sync 3, 33;", at(8));
    expect(faults(&memory, &body, shape(1, 64), &[]), FaultKind::InvalidOperand, 8, 0, "no multiple of 32");
}

#[test]
fn a_shuffle_that_a_named_lane_does_not_reach() {
    let memory = Memory::new(1 << 20);
    let x = words(&memory, &[0; 32]);
    let body = format!(
        "setp.ge.u32 %q0, %t, 16; @%q0 bra OVER; {} shfl.sync.bfly.b32 %r1, %t, 1, 31, -1; OVER: mul.wide.u32 %d0, %t, 4; add.u64 %d0, %p0, %d0; {} st.global.u32 [%d0], %t;",
        at(9),
        at(10)
    );
    expect(
        faults(&memory, &body, shape(1, 32), &[x]),
        FaultKind::DivergentShuffle,
        9,
        0,
        "lane 16 is named in the mask and ends without coming here",
    );
    let body = format!(
        "setp.ge.u32 %q0, %t, 16; @%q0 bra OVER; {} vote.sync.ballot.b32 %r1, %q0, -1; ret; OVER: {} bar.sync 0;",
        at(11),
        at(12)
    );
    expect(
        faults(&memory, &body, shape(1, 32), &[]),
        FaultKind::DivergentShuffle,
        11,
        0,
        "lane 16 waits at a.cu:12",
    );
}

#[test]
fn a_shuffle_from_a_lane_that_is_not_there() {
    let memory = Memory::new(1 << 20);
    let body = format!(
        "setp.ge.u32 %q0, %t, 16; @%q0 exit; {} shfl.sync.down.b32 %r1, %t, 8, 31, 0xffff; setp.eq.u32 %q1, %r1, 0; @%q1 exit;",
        at(12)
    );
    expect(
        faults(&memory, &body, shape(1, 32), &[]),
        FaultKind::DivergentShuffle,
        12,
        8,
        "lane 8 reads from lane 16",
    );
    // What it gets is undefined, and nothing depends on it.
    let body = "setp.ge.u32 %q0, %t, 16; @%q0 exit; shfl.sync.down.b32 %r1, %t, 8, 31, 0xffff;";
    run(&kernel(0, body), &memory, shape(1, 32), &[]).unwrap();
    let body = format!("{} shfl.sync.down.b32 %r1, %t, 1, 31, 0xfffe;", at(13));
    expect(faults(&memory, &body, shape(1, 32), &[]), FaultKind::DivergentShuffle, 13, 0, "does not name it");
    // A lane that left early is not waited for.
    let body = "setp.ge.u32 %q0, %t, 16; @%q0 exit; shfl.sync.bfly.b32 %r1, %t, 8, 31, -1; bar.warp.sync -1;";
    run(&kernel(0, body), &memory, shape(1, 32), &[]).unwrap();
}

#[test]
fn a_matrix_instruction_wants_the_whole_warp() {
    let memory = Memory::new(1 << 20);
    let body = format!("{} movmatrix.sync.aligned.m8n8.trans.b16 %r1, %t;", at(14));
    expect(faults(&memory, &body, shape(1, 31), &[]), FaultKind::DivergentShuffle, 14, 0, "lane 31");
}

#[test]
fn threads_that_wait_for_nothing_are_found() {
    let memory = Memory::new(1 << 20);
    let x = words(&memory, &[0]);
    let text = format!(
        ".file 1 \"a.cu\"\n{}",
        kernel(
            1,
            &format!(
                "{} SPIN: ld.volatile.global.u32 %r1, [%p0]; setp.eq.u32 %q0, %r1, 0; @%q0 bra SPIN;",
                at(15)
            )
        )
    );
    let loaded = load(&text, &memory);
    let checks = Checks { stuck_after: 100_000, ..Checks::default() };
    let fault = launch(&loaded, "k", &[&memory], &shape(1, 64), &x.to_le_bytes(), &checks).unwrap_err();
    expect(fault, FaultKind::Deadlock, 15, 0, "no thread has written anything");
}

#[test]
fn a_loop_without_end_is_named_though_it_writes() {
    let memory = Memory::new(1 << 20);
    let x = words(&memory, &[0; 64]);
    let body = format!(
        "mul.wide.u32 %d0, %t, 4; add.u64 %d0, %p0, %d0; mov.u32 %r1, 0; setp.ne.u32 %q0, %c, 1; @%q0 ret; {} L: add.u32 %r1, %r1, 1; st.global.u32 [%d0], %r1; bra L;",
        at(16)
    );
    let loaded = load(&format!(".file 1 \"a.cu\"\n{}", kernel(1, &body)), &memory);
    let checks = Checks { instructions_max: 100_000, ..Checks::default() };
    let fault = launch(&loaded, "k", &[&memory], &shape(3, 64), &x.to_le_bytes(), &checks).unwrap_err();
    assert_eq!(fault.block, [1, 0, 0]);
    expect(fault, FaultKind::Endless, 16, 0, "the block is not over after 100000 instructions of warps");
}

#[test]
fn traps_and_missing_functions() {
    let memory = Memory::new(1 << 20);
    let body = format!("setp.eq.u32 %q0, %t, 3; {} @%q0 trap;", at(16));
    expect(faults(&memory, &body, shape(1, 32), &[]), FaultKind::Trap, 16, 3, "trap");
    let text = ".file 1 \"a.cu\"\n.extern .func nothing();\n".to_string()
        + &kernel(0, &format!("{} call.uni nothing;", at(17)));
    let fault = run(&text, &memory, shape(1, 1), &[]).unwrap_err();
    expect(fault, FaultKind::Unsupported, 17, 0, "`nothing`");
}

#[test]
fn a_line_of_an_inlined_function_says_where_it_was_inlined() {
    let memory = Memory::new(1 << 20);
    let body = "\n.loc 2 4 1, function_name $L__info_string0, inlined_at 1 30 7\n trap;";
    let fault = faults(&memory, body, shape(1, 1), &[]);
    let at = fault.at.clone().unwrap();
    assert_eq!((at.file.as_str(), at.line), ("b.cuh", 4));
    assert!(fault.to_string().contains("at b.cuh:4 (inlined at a.cu:30)"), "{fault}");
}

#[test]
fn launches_that_a_device_refuses() {
    let memory = Memory::new(1 << 20);
    let text = ".visible .entry k(.param .u64 x) .maxntid 128, 1, 1 { .shared .b8 s[1024]; ret; }";
    let loaded = load(text, &memory);
    assert_eq!(loaded.module().kernel("k").unwrap().max_threads(), Some(128));
    let refused = |shape: Launch, parameters: &[u8], text: &str| {
        let fault = launch(&loaded, "k", &[&memory], &shape, parameters, &Checks::default()).unwrap_err();
        assert_eq!(fault.kind, FaultKind::BadLaunch);
        assert!(fault.to_string().contains(text) && fault.to_string().contains("kernel \"k\""), "{fault}");
    };
    refused(shape(1, 129), &[0; 8], "1 to 128");
    refused(shape(0, 32), &[0; 8], "grid");
    refused(shape(1, 32), &[0; 7], "7 bytes of parameters where 8");
    refused(Launch { shared_bytes: 232_000, ..shape(1, 32) }, &[0; 8], "shared memory");
    refused(Launch { cluster: [2, 1, 1], ..shape(3, 32) }, &[0; 8], "clusters");
    launch(&loaded, "k", &[&memory], &shape(3, 128), &[0; 8], &Checks::default()).unwrap();
    let missing = launch(&loaded, "no", &[&memory], &shape(1, 1), &[], &Checks::default()).unwrap_err();
    assert!(missing.to_string().contains("no such kernel"), "{missing}");
}
