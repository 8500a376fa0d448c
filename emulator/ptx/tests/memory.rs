//! Loads, stores and atomic operations, the host's ways to memory, and what a launch says it touched.

mod common;

use std::sync::Arc;

use common::{Random, bytes, kernel, load, read_bytes, read_words, run, shape, size, value, words};
use phalanx_ptx::{Checks, FaultKind, Launch, Loaded, Memory, Module, Touched, launch};

#[test]
fn loads_extend_their_sign_to_the_register() {
    let memory = Memory::new(1 << 20);
    let source = bytes(&memory, &[0x80, 0xff, 0x7f, 0x01, 0xfe, 0xca, 0x00, 0x90]);
    let out = memory.allocate(64).unwrap();
    let body = "ld.global.s8 %r1, [%p0]; st.global.u32 [%p1], %r1;
        ld.global.u8 %r1, [%p0]; st.global.u32 [%p1+4], %r1;
        ld.global.s16 %r1, [%p0+6]; st.global.u32 [%p1+8], %r1;
        ld.global.u16 %r1, [%p0+6]; st.global.u32 [%p1+12], %r1;
        ld.global.s8 %d0, [%p0+1]; st.global.u64 [%p1+16], %d0;
        ld.global.s32 %d0, [%p0+4]; st.global.u64 [%p1+24], %d0;
        ld.global.u32 %d0, [%p0+4]; st.global.u64 [%p1+32], %d0;";
    run(&kernel(2, body), &memory, shape(1, 1), &[source, out]).unwrap();
    let wanted = [
        0xffff_ff80,
        0x80,
        0xffff_9000,
        0x9000,
        0xffff_ffff,
        0xffff_ffff,
        0x9000_cafe,
        0xffff_ffff,
        0x9000_cafe,
        0,
    ];
    assert_eq!(read_words(&memory, out, 10), wanted);
}

#[test]
fn vectors_of_every_size_are_copied_through_shared_and_local_memory() {
    for (kind, count) in [
        ("b8", 1),
        ("b16", 1),
        ("b32", 1),
        ("b64", 1),
        ("b8", 2),
        ("b8", 4),
        ("b16", 2),
        ("b16", 4),
        ("b32", 2),
        ("b32", 4),
        ("b64", 2),
    ] {
        let bytes_each = size(kind) as usize * count;
        let (letter, bits) = match kind {
            "b8" | "b16" => ("%h", 16),
            "b32" => ("%r", 32),
            _ => ("%d", 64),
        };
        let _ = bits;
        let (vector, list) = match count {
            1 => (String::new(), format!("{letter}10")),
            n => (
                format!(".v{n}"),
                format!("{{{}}}", (10..10 + n).map(|i| format!("{letter}{i}")).collect::<Vec<_>>().join(",")),
            ),
        };
        let body = format!(
            ".shared .align 16 .b8 s[1024]; .local .align 16 .b8 l[64];
            mul.lo.u32 %r1, %t, {bytes_each}; cvt.u64.u32 %d0, %r1; add.u64 %d1, %p0, %d0; add.u64 %d2, %p1, %d0;
            mov.u32 %r2, s; add.u32 %r2, %r2, %r1; mov.u64 %d4, l; cvta.local.u64 %d5, %d4;
            ld.global{vector}.{kind} {list}, [%d1];
            st.shared{vector}.{kind} [%r2], {list};
            ld.shared{vector}.{kind} {list}, [%r2];
            st.local{vector}.{kind} [l+16], {list};
            ld{vector}.{kind} {list}, [%d5+16];
            st{vector}.{kind} [%d2], {list};"
        );
        let memory = Memory::new(1 << 20);
        let data: Vec<u8> = (0..bytes_each * 40).map(|i| (i * 7 + 3) as u8).collect();
        let (source, out) = (bytes(&memory, &data), memory.allocate(data.len() as u64).unwrap());
        run(&kernel(2, &body), &memory, shape(1, 40), &[source, out]).unwrap();
        assert_eq!(read_bytes(&memory, out, data.len()), data, "{kind} x {count}");
    }
}

#[test]
fn strided_reversed_broadcast_and_masked_accesses_reach_the_right_lanes() {
    let memory = Memory::new(1 << 20);
    let data: Vec<u32> = (0..256).map(|i| i * 3 + 1).collect();
    let source = words(&memory, &data);
    type Pattern = (&'static str, fn(u32) -> u32);
    let patterns: [Pattern; 5] = [
        ("mov.u32 %r1, %t;", |t| t),
        ("mul.lo.u32 %r1, %t, 7;", |t| t * 7),
        ("sub.u32 %r1, 31, %t;", |t| 31 - t),
        ("mov.u32 %r1, 9;", |_| 9),
        ("shr.u32 %r1, %t, 2; xor.b32 %r1, %r1, 5;", |t| t >> 2 ^ 5),
    ];
    for (code, place) in patterns {
        for guard in ["", "and.b32 %r5, %t, 5; setp.ne.u32 %q0, %r5, 4;"] {
            let on = if guard.is_empty() { "" } else { "@%q0" };
            let out = words(&memory, &[777; 32]);
            let body = format!(
                "{code} {guard} mul.wide.u32 %d0, %r1, 4; add.u64 %d0, %p0, %d0; mul.wide.u32 %d1, %t, 4; add.u64 %d1, %p1, %d1;
                mov.u32 %r3, 55; {on} ld.global.u32 %r3, [%d0]; {on} st.global.u32 [%d1], %r3;"
            );
            run(&kernel(2, &body), &memory, shape(1, 32), &[source, out]).unwrap();
            let wanted: Vec<u32> = (0..32)
                .map(|t| if guard.is_empty() || t & 5 != 4 { data[place(t) as usize] } else { 777 })
                .collect();
            assert_eq!(read_words(&memory, out, 32), wanted, "{code} {guard}");
        }
    }
}

#[test]
fn addresses_know_their_space() {
    let memory = Memory::new(1 << 20);
    let out = words(&memory, &[9; 8]);
    let body = ".shared .b32 s; .local .b32 l;
        mov.u64 %d0, s; cvta.shared.u64 %d1, %d0; mov.u64 %d2, l; cvta.local.u64 %d3, %d2;
        isspacep.shared %q0, %d1; selp.u32 %r1, 1, 0, %q0; st.global.u32 [%p0], %r1;
        isspacep.local %q0, %d1; selp.u32 %r1, 1, 0, %q0; st.global.u32 [%p0+4], %r1;
        isspacep.local %q0, %d3; selp.u32 %r1, 1, 0, %q0; st.global.u32 [%p0+8], %r1;
        isspacep.global %q0, %p0; selp.u32 %r1, 1, 0, %q0; st.global.u32 [%p0+12], %r1;
        cvta.to.shared.u64 %d4, %d1; sub.u64 %d4, %d4, %d0; st.global.u32 [%p0+16], %d4;
        st.u32 [%d1], 41; ld.shared.u32 %r2, [s]; st.global.u32 [%p0+20], %r2;
        st.u32 [%d3], 42; ld.local.u32 %r2, [l]; st.global.u32 [%p0+24], %r2;";
    let body =
        body.replace("st.global.u32 [%p0+16], %d4", "cvt.u32.u64 %r3, %d4; st.global.u32 [%p0+16], %r3");
    run(&kernel(1, &body), &memory, shape(1, 1), &[out]).unwrap();
    assert_eq!(read_words(&memory, out, 7), [1, 0, 1, 1, 0, 41, 42]);
}

#[test]
fn module_variables_have_their_values_and_addresses() {
    let memory = Memory::new(1 << 20);
    let text = ".visible .global .align 4 .u32 counter = 5; .visible .const .align 4 .b8 table[8] = {1, 0, 0, 0, 0xff, 0xff, 0xff, 0xff};
        .global .align 8 .u64 link = counter; .global .align 4 .f32 values[3] = {0f3F800000, 2.5, -1.0};\n"
        .to_string()
        + &kernel(
            1,
            "ld.const.u32 %r1, [table]; ld.const.u32 %r2, [table+4]; ld.global.u32 %r3, [counter]; ld.global.u64 %d0, [link]; ld.global.u32 %r4, [%d0];
            ld.global.f32 %f1, [values+4]; ld.global.f32 %f2, [values+8];
            st.global.u32 [%p0], %r1; st.global.u32 [%p0+4], %r2; st.global.u32 [%p0+8], %r3; st.global.u32 [%p0+12], %r4; st.global.f32 [%p0+16], %f1; st.global.f32 [%p0+20], %f2;
            add.u32 %r3, %r3, 1; st.global.u32 [counter], %r3;",
        );
    let loaded = load(&text, &memory);
    let out = words(&memory, &[0; 6]);
    launch(&loaded, "k", &[&memory], &shape(1, 1), &out.to_le_bytes(), &Checks::default()).unwrap();
    assert_eq!(read_words(&memory, out, 6), [1, u32::MAX, 5, 5, 2.5f32.to_bits(), (-1f32).to_bits()]);
    let (address, size) = loaded.variable("counter").unwrap();
    assert_eq!((size, read_words(&memory, address, 1)), (4, vec![6]));
    assert!(loaded.variable("nothing").is_none());
    let used = memory.used();
    loaded.unload(&memory);
    assert!(memory.used() < used);
}

#[test]
fn parameters_of_every_size_are_read() {
    let memory = Memory::new(1 << 20);
    let text = ".visible .entry k(.param .u64 out, .param .s8 a, .param .u16 b, .param .align 8 .b8 c[24], .param .f32 d) {
        .reg .b32 %r<9>; .reg .b64 %d<9>; .reg .f32 %f<3>;
        ld.param.u64 %d1, [out]; ld.param.s8 %r1, [a]; ld.param.u16 %r2, [b]; ld.param.u64 %d2, [c+8]; ld.param.f32 %f1, [d]; ld.param.v2.u32 {%r3, %r4}, [c+16];
        st.global.u32 [%d1], %r1; st.global.u32 [%d1+4], %r2; st.global.u64 [%d1+8], %d2; st.global.f32 [%d1+16], %f1; st.global.v2.u32 [%d1+24], {%r3, %r4};
        mov.u64 %d3, c; ld.param.u32 %r5, [%d3+20]; st.global.u32 [%d1+32], %r5; ret; }";
    let loaded = load(text, &memory);
    let kernel = loaded.module().kernel("k").unwrap();
    let offsets: Vec<_> = kernel.parameters().iter().map(|p| (p.offset, p.bytes, p.align)).collect();
    assert_eq!(offsets, [(0, 8, 8), (8, 1, 1), (10, 2, 2), (16, 24, 8), (40, 4, 4)]);
    let out = words(&memory, &[0; 9]);
    let mut bytes = vec![0u8; kernel.parameter_bytes() as usize];
    bytes[..8].copy_from_slice(&out.to_le_bytes());
    bytes[8] = 0xfd;
    bytes[10..12].copy_from_slice(&65535u16.to_le_bytes());
    bytes[24..40].copy_from_slice(&[1, 0, 0, 0, 2, 0, 0, 0, 3, 0, 0, 0, 4, 0, 0, 0]);
    bytes[40..44].copy_from_slice(&1.5f32.to_le_bytes());
    launch(&loaded, "k", &[&memory], &shape(1, 1), &bytes, &Checks::default()).unwrap();
    assert_eq!(read_words(&memory, out, 9), [0xffff_fffd, 65535, 1, 2, 1.5f32.to_bits(), 0, 3, 4, 4]);
}

/// Applies an atomic operation as the ISA defines it.
fn applied(op: &str, kind: &str, old: u64, b: u64) -> u64 {
    let width = u64::MAX >> (64 - size(kind) * 8);
    let (x, y) = (value(old, kind), value(b, kind));
    let pick = |f: fn(i128, i128) -> i128| f(x, y) as u64 & width;
    match op {
        "add" => old.wrapping_add(b) & width,
        "min" => pick(i128::min),
        "max" => pick(i128::max),
        "and" => old & b,
        "or" => old | b,
        "xor" => old ^ b,
        "exch" => b,
        "inc" => {
            if old >= b {
                0
            } else {
                old + 1
            }
        }
        _ => {
            if old == 0 || old > b {
                b
            } else {
                old - 1
            }
        }
    }
}

#[test]
fn atomic_operations_apply_in_order_of_lanes_and_return_what_was_there() {
    let cases = [
        ("add", "u32"),
        ("add", "s32"),
        ("add", "u64"),
        ("min", "u32"),
        ("min", "s32"),
        ("min", "u64"),
        ("min", "s64"),
        ("max", "u32"),
        ("max", "s32"),
        ("max", "s64"),
        ("and", "b32"),
        ("or", "b32"),
        ("xor", "b32"),
        ("and", "b64"),
        ("exch", "b32"),
        ("exch", "b64"),
        ("inc", "u32"),
        ("dec", "u32"),
    ];
    for (op, kind) in cases {
        for space in ["global", "shared"] {
            let memory = Memory::new(1 << 20);
            let mut random = Random(11);
            let values: Vec<u64> = (0..32)
                .map(|i| (random.next() >> (i % 7 * 9)) & (u64::MAX >> (64 - size(kind) * 8)))
                .collect();
            let bytes_of = |v: &[u64]| v.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<_>>();
            let (source, out, place) = (
                bytes(&memory, &bytes_of(&values)),
                bytes(&memory, &[0; 256]),
                bytes(&memory, &bytes_of(&[100])),
            );
            let letter = if size(kind) == 8 { "%d" } else { "%r" };
            let bits = size(kind) * 8;
            let (at, begin, end) = match space {
                "global" => ("[%p2]".to_string(), String::new(), String::new()),
                _ => (
                    "[s]".to_string(),
                    format!("setp.eq.u32 %q0, %t, 0; @%q0 st.shared.u{bits} [s], 100; bar.sync 0;"),
                    format!(
                        "bar.sync 0; @%q0 ld.shared.u{bits} {letter}7, [s]; @%q0 st.global.u{bits} [%p2], {letter}7;"
                    ),
                ),
            };
            let body = format!(
                ".shared .align 8 .b64 s; {begin} mul.wide.u32 %d0, %t, 8; add.u64 %d1, %p0, %d0; add.u64 %d2, %p1, %d0; ld.global.u{bits} {letter}5, [%d1];
                atom.{space}.{op}.{kind} {letter}6, {at}, {letter}5; st.global.u{bits} [%d2], {letter}6; {end}"
            );
            run(&kernel(3, &body), &memory, shape(1, 32), &[source, out, place]).unwrap();
            let mut old = 100;
            let found = read_bytes(&memory, out, 256);
            for (i, b) in values.iter().enumerate() {
                let there = u64::from_le_bytes(found[i * 8..i * 8 + 8].try_into().unwrap());
                assert_eq!(there, old, "atom.{space}.{op}.{kind}, lane {i}");
                old = applied(op, kind, old, *b);
            }
            let last = u64::from_le_bytes(read_bytes(&memory, place, 8).try_into().unwrap());
            assert_eq!(last, old, "atom.{space}.{op}.{kind} at last");
        }
    }
}

#[test]
fn atomic_sums_of_floats() {
    let memory = Memory::new(1 << 20);
    let place = words(&memory, &[0; 12]);
    let body = "cvt.rn.f32.u32 %f1, %t; red.global.add.f32 [%p0], %f1; cvt.f64.f32 %g1, %f1; red.global.add.f64 [%p0+8], %g1;
        cvt.rn.f16.f32 %h1, %f1; red.global.add.noftz.f16 [%p0+16], %h1; mov.b32 %r1, {%h1, %h1}; atom.global.add.noftz.f16x2 %r2, [%p0+20], %r1;
        cvt.rn.bf16.f32 %h2, %f1; red.global.add.noftz.bf16 [%p0+24], %h2; mov.b32 %r3, {%h2, %h2}; red.global.add.noftz.bf16x2 [%p0+28], %r3;
        red.global.add.v2.f32 [%p0+32], {%f1, 0f3F800000};";
    run(&kernel(1, body), &memory, shape(1, 16), &[place]).unwrap();
    let found = read_words(&memory, place, 12);
    assert_eq!(f32::from_bits(found[0]), 120.0);
    assert_eq!(f64::from_bits(found[2] as u64 | (found[3] as u64) << 32), 120.0);
    let (half, brain) =
        (half::f16::from_f32(120.0).to_bits() as u32, half::bf16::from_f32(120.0).to_bits() as u32);
    assert_eq!(
        [found[4], found[5], found[6], found[7]],
        [half, half << 16 | half, brain, brain << 16 | brain]
    );
    assert_eq!([found[8], found[9]].map(f32::from_bits), [120.0, 16.0]);
}

#[test]
fn compare_and_swap_takes_one_lane() {
    let memory = Memory::new(1 << 20);
    let (place, out) = (words(&memory, &[7]), words(&memory, &[0; 32]));
    let body = "add.u32 %r1, %t, 100; atom.global.cas.b32 %r2, [%p0], 7, %r1; mul.wide.u32 %d0, %t, 4; add.u64 %d0, %p1, %d0; st.global.u32 [%d0], %r2;";
    run(&kernel(2, body), &memory, shape(1, 32), &[place, out]).unwrap();
    assert_eq!(read_words(&memory, place, 1), [100]);
    let wanted: Vec<u32> = (0..32).map(|t| if t == 0 { 7 } else { 100 }).collect();
    assert_eq!(read_words(&memory, out, 32), wanted);
}

#[test]
fn memory_allocates_frees_copies_and_fills() {
    let memory = Memory::new(1000);
    let a = memory.allocate(600).unwrap();
    let refused = memory.allocate(401).unwrap_err();
    assert_eq!((refused.wanted, refused.left, refused.capacity), (401, 400, 1000));
    let b = memory.allocate(400).unwrap();
    assert!(a.is_multiple_of(256) && b.is_multiple_of(256) && b >= a + 600 + 256, "{a:#x} {b:#x}");
    memory.fill(a, &[1, 2, 3, 4], 10).unwrap();
    memory.copy(b, a + 30, 20).unwrap();
    let mut bytes = [0; 20];
    memory.read(b, &mut bytes).unwrap();
    assert_eq!(bytes[..10], [3, 4, 1, 2, 3, 4, 1, 2, 3, 4]);
    assert_eq!(bytes[10..], [Memory::POISON; 10], "what was never written stays so when it is copied");
    memory.copy(a + 2, a, 8).unwrap();
    assert_eq!(read_bytes(&memory, a, 12), [1, 2, 1, 2, 3, 4, 1, 2, 3, 4, 3, 4]);
    assert_eq!(memory.allocation(b + 399), Some((b, 400)));
    assert_eq!(memory.allocation(b + 400), None);
    assert_eq!(memory.used(), 1000);
    memory.free(a).unwrap();
    assert_eq!(memory.used(), 400);
    let double = memory.free(a).unwrap_err();
    assert!(double.to_string().contains("freed"), "{double}");
    let inside = memory.free(b + 4).unwrap_err();
    assert!(inside.to_string().contains("offset 4 of an allocation of 400 bytes"), "{inside}");
    let past = memory.write(b + 390, &[0; 11]).unwrap_err();
    assert_eq!(
        past.to_string(),
        "illegal access: write of 11 bytes at offset 390 of an allocation of 400 bytes"
    );
}

#[test]
fn a_peer_reaches_both_memories() {
    let (own, peer) = (Memory::new(1 << 16), Memory::new(1 << 16));
    let (x, y) = (words(&own, &[11]), words(&peer, &[22]));
    let text = kernel(
        2,
        "ld.global.u32 %r1, [%p0]; ld.global.u32 %r2, [%p1]; st.global.u32 [%p0], %r2; st.global.u32 [%p1], %r1;",
    );
    let loaded = load(&text, &own);
    let parameters: Vec<u8> = [x, y].iter().flat_map(|p| p.to_le_bytes()).collect();
    launch(&loaded, "k", &[&own, &peer, &own], &shape(1, 1), &parameters, &Checks::default()).unwrap();
    assert_eq!((read_words(&own, x, 1), read_words(&peer, y, 1)), (vec![22], vec![11]));
    let alone = launch(&loaded, "k", &[&own], &shape(1, 1), &parameters, &Checks::default());
    assert!(alone.is_err(), "a memory that is not handed over is out of reach");
}

/// Thread i copies word i of `from` to word 2i of `to`.
const SPREAD: &str = r#"
.version 9.0
.target sm_90
.address_size 64
.visible .entry spread(.param .u64 from, .param .u64 to) {
    .reg .b32 %r<4>; .reg .b64 %rd<8>;
    ld.param.u64 %rd1, [from];
    ld.param.u64 %rd2, [to];
    mov.u32 %r1, %tid.x;
    mul.wide.u32 %rd3, %r1, 4;
    add.s64 %rd4, %rd1, %rd3;
    ld.global.u32 %r2, [%rd4];
    mul.wide.u32 %rd5, %r1, 8;
    add.s64 %rd6, %rd2, %rd5;
    st.global.u32 [%rd6], %r2;
    ret;
}"#;

#[test]
fn ranges_are_exact_and_only_those_of_the_launch() {
    let memory = Memory::new(1 << 20);
    let module = Loaded::new(Arc::new(Module::parse(SPREAD).unwrap()), &memory).unwrap();
    let (from, to) = (memory.allocate(64).unwrap(), memory.allocate(64).unwrap());
    memory.write(from, &[1; 64]).unwrap();
    let run = |threads: u32| {
        let shape = Launch { grid: [1; 3], block: [threads, 1, 1], shared_bytes: 0, cluster: [1; 3] };
        let parameters = [from.to_le_bytes(), to.to_le_bytes()].concat();
        launch(&module, "spread", &[&memory], &shape, &parameters, &Checks::default()).unwrap().touched
    };
    run(8);
    let read = Touched { start: from, end: from + 12, written: false };
    let wrote = |i: u64| Touched { start: to + 8 * i, end: to + 8 * i + 4, written: true };
    assert_eq!(run(3), [read, wrote(0), wrote(1), wrote(2)]);
}

#[test]
fn a_memory_without_contents_counts_and_checks_and_reads_as_zeros() {
    let memory = Memory::without_contents(1 << 43);
    let (large, small) = (memory.allocate(1 << 42).unwrap(), memory.allocate(100).unwrap());
    assert!(memory.allocate(1 << 42).is_err());
    memory.write(large + (1 << 42) - 4, &[1, 2, 3, 4]).unwrap();
    let mut read = [9; 4];
    memory.read(large + (1 << 42) - 4, &mut read).unwrap();
    assert_eq!(read, [0; 4]);
    assert!(memory.write(small + 98, &[0; 4]).is_err() && memory.fill(small, &[1, 2], 51).is_err());
    assert!(memory.copy(small, large, 100).is_ok() && memory.copy(small, large, 101).is_err());
    memory.free(large).unwrap();
    assert_eq!((memory.used(), memory.peak()), (100, (1 << 42) + 100));
    memory.restart_peak();
    assert_eq!(memory.peak(), 100);
}

#[test]
fn reserved_bytes_are_counted_once_for_all_that_share_them() {
    let memory = Memory::new(1000);
    memory.reserve(600).unwrap();
    let (first, second) = (memory.allocate_reserved(600).unwrap(), memory.allocate_reserved(500).unwrap());
    assert_eq!(memory.used(), 600);
    assert!(memory.reserve(401).is_err() && memory.allocate(401).is_err());
    memory.free(first).unwrap();
    assert_eq!(memory.used(), 600);
    memory.release(600);
    memory.count(second);
    assert_eq!(memory.used(), 500);
    memory.free(second).unwrap();
    assert_eq!(memory.used(), 0);
}

#[test]
fn elements_of_128_bits_are_moved_stored_and_swapped() {
    let memory = Memory::new(1 << 20);
    let data = words(&memory, &[1, 2, 3, 4, 0, 0, 0, 0]);
    let out = words(&memory, &[0; 16]);
    let body = ".reg .b128 %x<3>; .reg .b128 y; ld.global.b128 %x1, [%p0]; mov.b128 {%d1, %d2}, %x1; add.u64 %d1, %d1, 10; mov.b128 y, {%d2, %d1};
        st.global.b128 [%p1], y; ld.relaxed.gpu.global.b128 %x2, [%p1]; mov.b128 %x0, %x2; st.global.v2.b64 [%p1+16], {%d1, %d2}; st.relaxed.gpu.global.b128 [%p1+32], %x0;";
    run(&kernel(2, body), &memory, shape(1, 1), &[data, out]).unwrap();
    assert_eq!(read_words(&memory, out, 12), [3, 4, 11, 2, 11, 2, 3, 4, 3, 4, 11, 2]);
    // All threads add 1 to the lower and 3 to the upper half, which is only right if both are swapped at once.
    let body = ".reg .b128 %x<4>; ld.relaxed.gpu.global.v2.b64 {%d1, %d2}, [%p0];
        AGAIN: mov.b128 %x1, {%d1, %d2}; add.u64 %d3, %d1, 1; add.u64 %d4, %d2, 3; mov.b128 %x2, {%d3, %d4}; atom.global.cas.b128 %x3, [%p0], %x1, %x2; mov.b128 {%d5, %d6}, %x3;
        setp.ne.u64 %q0, %d5, %d1; setp.ne.u64 %q1, %d6, %d2; or.pred %q0, %q0, %q1; mov.u64 %d1, %d5; mov.u64 %d2, %d6; @%q0 bra AGAIN;";
    let both = words(&memory, &[5, 0, 7, 0]);
    run(&kernel(1, body), &memory, shape(2, 64), &[both]).unwrap();
    assert_eq!(read_words(&memory, both, 4), [5 + 128, 0, 7 + 3 * 128, 0]);
    // Where only one half is as expected nothing is changed.
    for (low, high) in [(133, 0), (0, 391)] {
        let body = format!(
            ".reg .b128 %x<3>; mov.u64 %d1, {low}; mov.u64 %d2, {high}; mov.b128 %x1, {{%d1, %d2}}; atom.global.cas.b128 %x2, [%p0], %x1, %x1; mov.b128 {{%d3, %d4}}, %x2; st.global.v2.u64 [%p1], {{%d3, %d4}};"
        );
        run(&kernel(2, &body), &memory, shape(1, 1), &[both, out]).unwrap();
        assert_eq!(read_words(&memory, both, 4), [133, 0, 391, 0]);
        assert_eq!(read_words(&memory, out, 4), [133, 0, 391, 0]);
    }
    let body = ".reg .b128 %x<2>; mov.u64 %d1, 8; mov.u64 %d2, 9; mov.b128 %x0, {%d1, %d2}; atom.global.exch.b128 %x1, [%p0], %x0; st.global.b128 [%p0+16], %x1;";
    run(&kernel(1, body), &memory, shape(1, 1), &[data]).unwrap();
    assert_eq!(read_words(&memory, data, 8), [8, 0, 9, 0, 1, 2, 3, 4]);
    let fault = run(&kernel(1, ".reg .b128 %x; ld.global.b128 %x, [%p0+8];"), &memory, shape(1, 1), &[data]);
    assert_eq!(fault.unwrap_err().kind, FaultKind::Misaligned);
}
