//! Accesses that leave what their address was derived from and land in something else that lives.

mod common;

use common::{kernel, load, run, shape, words};
use phalanx_ptx::{FaultKind, Launch, Memory, Placement, Report};

/// Two arrays of 16 words in shared memory, `a` before `b`, and dynamic shared memory behind them. `%r9` has the
/// address of `b`, `%r8` that of `a`.
fn shared(body: &str, threads: u32) -> Result<Report, phalanx_ptx::Fault> {
    let memory = Memory::new(1 << 20);
    let dynamic = ".extern .shared .align 16 .b8 more[];";
    let text = kernel(
        0,
        &format!(
            ".shared .align 4 .b8 a[64]; .shared .align 4 .b8 b[64];
            mov.u32 %r8, a; mov.u32 %r9, b; shl.b32 %r10, %t, 2; {body}"
        ),
    );
    let shape = Launch { shared_bytes: 64, ..shape(1, threads) };
    run(&format!("{dynamic}\n{text}"), &memory, shape, &[])
}

#[test]
fn a_shared_array_that_runs_over_does_not_reach_the_next_one() {
    let store = "add.u32 %r1, %r8, %r10; st.shared.u32 [%r1], %t;";
    shared(store, 16).unwrap();
    let fault = shared(store, 17).unwrap_err();
    assert_eq!((fault.kind, fault.thread), (FaultKind::OutOfBounds, [16, 0, 0]), "{fault}");
    assert!(
        fault.message.contains("write of 4 bytes at offset 64 of 64 bytes of shared memory, variable `a`"),
        "{fault}"
    );
    // The same through a generic address.
    let store =
        "cvt.u64.u32 %d0, %r8; cvta.shared.u64 %d0, %d0; mul.wide.u32 %d1, %t, 4; add.u64 %d0, %d0, %d1;
        st.u32 [%d0], %t;";
    shared(store, 16).unwrap();
    assert!(shared(store, 17).unwrap_err().message.contains("variable `a`"));
}

#[test]
fn a_shared_array_does_not_reach_the_one_before_nor_the_dynamic_part() {
    let fault = shared("sub.u32 %r1, %r9, %r10; st.shared.u32 [%r1], %t;", 2).unwrap_err();
    assert!(fault.message.contains("at offset -4 of 64 bytes of shared memory, variable `b`"), "{fault}");
    let fault = shared("sub.u32 %r1, %r8, %r10; st.shared.u32 [%r1], %t;", 2).unwrap_err();
    assert!(fault.message.contains("at offset -4 of 64 bytes of shared memory, variable `a`"), "{fault}");
    let fault = shared("st.shared.u32 [%r9+64], %t;", 1).unwrap_err();
    assert!(fault.message.contains("variable `b`"), "{fault}");
    shared("mov.u32 %r1, more; st.shared.u32 [%r1+60], %t; ld.shared.u32 %r2, [%r1+60];", 1).unwrap();
    let fault = shared("mov.u32 %r1, more; st.shared.u32 [%r1-4], %t;", 1).unwrap_err();
    assert!(fault.message.contains("at offset -4 of 64 bytes of shared memory, the dynamic part"), "{fault}");
}

/// Writes behind `distance` bytes from the start of the first of two allocations of `bytes` bytes.
fn reaches(memory: &Memory, bytes: u64, distance: u64) -> Result<Report, phalanx_ptx::Fault> {
    let first = memory.allocate(bytes).unwrap();
    let second = memory.allocate(bytes).unwrap();
    let outcome = run(&kernel(1, "st.global.u32 [%p0], %t;"), memory, shape(1, 1), &[first + distance]);
    [first, second].iter().for_each(|&address| memory.free(address).unwrap());
    outcome
}

#[test]
fn an_overrun_of_up_to_its_own_size_or_a_mebibyte_reaches_no_other_allocation() {
    let memory = Memory::new(1 << 30);
    for (bytes, distance) in
        [(64, 64), (64, 320), (64, 1 << 20), (4 << 20, 4 << 20), (4 << 20, (8 << 20) - 4)]
    {
        let fault = reaches(&memory, bytes, distance).unwrap_err();
        assert_eq!(fault.kind, FaultKind::OutOfBounds, "{bytes} bytes, {distance} from the start: {fault}");
    }
}

#[test]
fn random_addresses_leave_no_distance_at_which_another_allocation_lies() {
    let placed = |seed| {
        let memory = Memory::placed(1 << 30, Placement::Random { seed });
        (0..1000).map(|i| memory.allocate(1 + i * 100).unwrap()).collect::<Vec<_>>()
    };
    let (one, other) = (placed(1), placed(2));
    let relative = |all: &[u64]| all.iter().map(|a| a.wrapping_sub(all[0])).collect::<Vec<_>>();
    assert_eq!(relative(&one), relative(&placed(1)), "the same seed");
    assert_ne!(relative(&one), relative(&other), "another seed");
    let mut distances: Vec<u64> = one.windows(2).map(|pair| pair[1].wrapping_sub(pair[0])).collect();
    distances.sort_unstable();
    distances.dedup();
    assert_eq!(distances.len(), 999, "no two neighbours are equally far apart");
    assert!(one.iter().all(|address| address % 256 == 0));
}

#[test]
fn a_small_memory_with_random_addresses_can_be_filled_to_its_end() {
    let memory = Memory::placed(1 << 20, Placement::Random { seed: 3 });
    for _ in 0..3 {
        let all: Vec<u64> = (0..16).map(|_| memory.allocate(1 << 16).unwrap()).collect();
        memory.allocate(1).unwrap_err();
        all.iter().for_each(|&address| memory.free(address).unwrap());
    }
}

#[test]
fn a_variable_of_the_module_does_not_reach_the_next_one() {
    let memory = Memory::new(1 << 20);
    let text = format!(
        ".global .align 4 .b8 a[16]; .global .align 4 .b8 b[16];\n{}",
        kernel(0, "mov.u64 %d0, a; st.global.u32 [%d0+16], %t;")
    );
    let _ = (load(&text, &memory), words(&memory, &[1]));
    let fault = run(&text, &memory, shape(1, 1), &[]).unwrap_err();
    assert!(fault.message.contains("offset 16 of an allocation of 16 bytes"), "{fault}");
}
