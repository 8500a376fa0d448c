//! Branches, loops, calls, barriers, printing: where threads go.

mod common;
use common::{kernel, read_words, run, shape, words};
use phalanx_ptx::{FaultKind, Memory};

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
}

#[test]
fn text_that_is_no_ptx_is_refused_with_its_line() {
    let parse = |text: &str| phalanx_ptx::Module::parse(text).unwrap_err();
    let error = parse(&format!(".version 9.0\n{}", kernel(0, "\nfrobnicate.f32 %f1, %f2;")));
    assert_eq!(error.to_string(), "ptx line 8: unsupported instruction `frobnicate.f32`");
    assert!(parse(&kernel(0, "add.u32 %r1, %nothing, 2;")).what.contains("%nothing"));
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
