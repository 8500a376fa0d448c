//! Bytes that nothing has written: a kernel may copy them and compute with them, as long as nothing depends on the
//! result.

mod common;

use common::{kernel, read_words, run, shape};
use phalanx_ptx::{Fault, FaultKind, Memory};

/// Runs a kernel whose parameters are an allocation of 32 words, of which the first seven are 1 to 7 and nothing has written
/// the others, and an output of 32 words. Then the host reads the output's first `read` words.
fn host_reads(body: &str, read: u64) -> Result<Vec<u32>, Fault> {
    let memory = Memory::new(1 << 20);
    let (x, out) = (memory.allocate(128).unwrap(), memory.allocate(128).unwrap());
    memory.write(x, &[1, 2, 3, 4, 5, 6, 7].map(u32::to_le_bytes).concat()).unwrap();
    run(&kernel(2, body), &memory, shape(1, 1), &[x, out])?;
    memory.check_written(out, read * 4)?;
    Ok(read_words(&memory, out, read as usize))
}

#[test]
fn a_result_that_the_host_reads_names_the_load_and_the_store() {
    let sum = "ld.global.u32 %r1, [%p0+28]; add.u32 %r2, %r1, 5; mul.lo.u32 %r3, %r2, 3; st.global.u32 [%p1+4], %r3; st.global.u32 [%p1], 1;";
    assert_eq!(host_reads(sum, 1).unwrap(), [1], "the other word is left alone");
    let fault = host_reads(sum, 2).unwrap_err();
    assert_eq!(fault.kind, FaultKind::Uninitialised);
    for part in [
        "nothing has written 4 at offset 4",
        "kernel \"k\" at PTX line",
        "thread (0, 0, 0), stored what depends on a read of 4 bytes at offset 28 of an allocation of 128 bytes",
    ] {
        assert!(fault.message.contains(part), "{fault}");
    }
}

#[test]
fn results_that_do_not_depend_on_unwritten_bytes_are_written() {
    let cases = [
        // A padded vector of which only the written part is used.
        (
            "ld.global.v4.u32 {%r1, %r2, %r3, %r4}, [%p0+16]; add.u32 %r5, %r1, %r2; st.global.u32 [%p1], %r5;",
            11,
        ),
        // A selection: the compiler has made a load of what was to be loaded only sometimes.
        (
            "ld.global.u32 %r1, [%p0+64]; add.u32 %r2, %r1, 1; setp.ne.u32 %q0, %t, 0; selp.u32 %r3, %r2, 9, %q0; st.global.u32 [%p1], %r3;",
            9,
        ),
        // Masks, shifts and halves.
        (
            "ld.global.u32 %r1, [%p0+64]; and.b32 %r2, %r1, 0; or.b32 %r3, %r2, 6; st.global.u32 [%p1], %r3;",
            6,
        ),
        ("ld.global.u64 %d0, [%p0+24]; mov.b64 {%r1, %r2}, %d0; st.global.u32 [%p1], %r1;", 7),
        // Joined with a condition that decides alone.
        (
            "ld.global.u32 %r1, [%p0+64]; setp.gt.u32 %q0, %r1, 3; setp.ne.u32 %q1, %t, 0; and.pred %q2, %q0, %q1; selp.u32 %r3, 1, 2, %q2; @!%q2 st.global.u32 [%p1], %r3;",
            2,
        ),
    ];
    for (body, wanted) in cases {
        assert_eq!(host_reads(body, 1).unwrap_or_else(|fault| panic!("{body}: {fault}")), [wanted], "{body}");
    }
}

#[test]
fn each_kind_of_use_is_found() {
    let load = "ld.global.u32 %r1, [%p0+64];";
    for (what, rest) in [
        ("a branch", "add.u32 %r2, %r1, 1; setp.eq.u32 %q0, %r2, 77; @%q0 trap;"),
        ("equality with a far number", "setp.eq.u32 %q0, %r1, 123456789; @%q0 trap;"),
        ("an address", "mul.wide.u32 %d0, %r1, 4; add.u64 %d1, %p1, %d0; st.global.u32 [%d1], 1;"),
        ("a vote", "xor.b32 %r2, %r1, 1; redux.sync.or.b32 %r3, %r2, 1;"),
        (
            "a branch of another lane",
            "shfl.sync.idx.b32 %r3, %r1, 0, 31, 1; setp.eq.u32 %q0, %r3, 77; @%q0 trap;",
        ),
        ("an atomic operation", "xor.b32 %r2, %r1, 1; atom.global.exch.b32 %r3, [%p1], %r2;"),
        (
            "a selection's condition",
            "setp.lt.u32 %q0, %r1, 9; selp.u32 %r2, 1, 2, %q0; setp.eq.u32 %q1, %r2, 1; @%q1 trap;",
        ),
    ] {
        let fault = host_reads(&format!("{load} {rest}"), 0).unwrap_err();
        assert_eq!(fault.kind, FaultKind::Uninitialised, "{what}: {fault}");
        assert!(fault.message.contains("offset 64 of an allocation of 128 bytes"), "{what}: {fault}");
    }
}

#[test]
fn a_sum_keeps_its_unwritten_part_through_memory_and_registers() {
    // Through shared memory, and by a copy on the device.
    let body = ".shared .b32 s[2]; ld.global.f32 %f1, [%p0+64]; mul.f32 %f2, %f1, 0f40000000; st.shared.f32 [s], %f2;
        ld.shared.f32 %f3, [s]; add.f32 %f4, %f3, 0f3f800000; st.global.f32 [%p1], %f4;";
    let fault = host_reads(body, 1).unwrap_err();
    assert!(fault.message.contains("offset 0 of shared memory"), "the last load is named: {fault}");
    // A register that is written again is no longer what it was.
    let body = "ld.global.u32 %r1, [%p0+64]; add.u32 %r2, %r1, 1; mov.u32 %r2, 8; st.global.u32 [%p1], %r2;";
    assert_eq!(host_reads(body, 1).unwrap(), [8]);
    let memory = Memory::new(1 << 20);
    let (x, out) = (memory.allocate(128).unwrap(), memory.allocate(128).unwrap());
    let body = "ld.global.u32 %r1, [%p0+64]; add.u32 %r2, %r1, 1; st.global.u32 [%p0+64], %r2;";
    run(&kernel(2, body), &memory, shape(1, 1), &[x, out]).unwrap();
    memory.copy(out, x + 64, 4).unwrap();
    let fault = memory.check_written(out, 4).unwrap_err();
    assert!(fault.message.contains("stored what depends on a read"), "{fault}");
}

#[test]
fn signs_that_were_extended_from_unwritten_bytes_are_unwritten() {
    let body = "ld.global.s8 %r1, [%p0+64]; shr.u32 %r2, %r1, 24; st.global.u32 [%p1], %r2;";
    host_reads(body, 1).unwrap_err();
    let body = "ld.global.u8 %r1, [%p0+64]; shr.u32 %r2, %r1, 24; st.global.u32 [%p1], %r2;";
    assert_eq!(host_reads(body, 1).unwrap(), [0]);
}
