//! Functions: their addresses in memory, wrong pointers to them, calls of themselves, the stack; and instructions that
//! are refused when a thread comes to them.

mod common;

use common::{kernel, load, read_words, run, shape, words};
use phalanx_ptx::{Checks, Fault, FaultKind, Memory, Module, Report, launch};

/// Two functions of an integer, and tables of them as NVRTC writes those.
const TABLES: &str = ".func (.param .b32 r) inc(.param .b32 x);
    .func (.param .b32 r) sq(.param .b32 x);
    .global .align 8 .u64 plain[2] = {inc, sq};
    .const .align 8 .u64 constant[2] = {sq, inc};
    .global .align 4 .b8 numbers[16] = {1, 0, 0, 0, 20, 0, 0, 0, 44, 1};
    .global .align 8 .u64 mixed[4] = {7, generic(numbers)+4, sq, generic(numbers)};
    .global .align 1 .u8 packed[9] = {3, 0XFF(sq), 0xFF00(sq), 0xFF0000(sq), 0xFF000000(sq), 0xFF00000000(sq), 0xFF0000000000(sq), 0xFF000000000000(sq), 0xFF00000000000000(sq)};
    .func (.param .b32 r) inc(.param .b32 x) { .reg .b32 %a; ld.param.b32 %a, [x]; add.u32 %a, %a, 1; st.param.b32 [r], %a; ret; }
    .func (.param .b32 r) sq(.param .b32 x) { .reg .b32 %a; ld.param.b32 %a, [x]; mul.lo.u32 %a, %a, %a; st.param.b32 [r], %a; ret; }\n";

/// Calls the function whose address is in `%d1` with `%r1`; the result is in `%r2`.
const CALL: &str = "{ .param .b32 a; .param .b32 b; P: .callprototype (.param .b32 _) _ (.param .b32 _); st.param.b32 [a], %r1; call (b), %d1, (a), P; ld.param.b32 %r2, [b]; }";

fn calls(body: &str, parameters: &[u64], memory: &Memory) -> Result<Report, Fault> {
    let text = TABLES.to_string() + &kernel(parameters.len(), &body.replace("CALL", CALL));
    run(&text, memory, shape(1, 32), parameters)
}

#[test]
fn addresses_of_functions_stand_in_tables() {
    let memory = Memory::new(1 << 20);
    let out = words(&memory, &[0; 64]);
    // Odd lanes take `sq` from the plain table, even lanes take `inc`; the constant table has them the other way round.
    let body = "and.b32 %r3, %t, 1; mov.u32 %r1, %t; mul.wide.u32 %d2, %r3, 8;
        mov.u64 %d3, plain; add.u64 %d3, %d3, %d2; ld.global.u64 %d1, [%d3]; CALL mov.u32 %r4, %r2;
        mov.u64 %d3, constant; add.u64 %d3, %d3, %d2; ld.const.u64 %d1, [%d3]; CALL
        mad.lo.u32 %r4, %r4, 1000, %r2;
        ld.global.u64 %d1, [mixed+16]; CALL ld.global.u64 %d4, [mixed+8]; ld.u32 %r5, [%d4]; ld.u32 %r6, [%d4+4]; ld.global.u64 %d4, [mixed]; cvt.u32.u64 %r7, %d4;
        add.u32 %r2, %r2, %r5; add.u32 %r2, %r2, %r6; add.u32 %r2, %r2, %r7;
        mul.wide.u32 %d5, %t, 8; add.u64 %d5, %p0, %d5; st.global.v2.u32 [%d5], {%r4, %r2};";
    calls(body, &[out], &memory).unwrap();
    for (t, pair) in read_words(&memory, out, 64).chunks_exact(2).enumerate() {
        let t = t as u32;
        let (plain, constant) = if t % 2 == 1 { (t * t, t + 1) } else { (t + 1, t * t) };
        assert_eq!(pair, [plain * 1000 + constant, t * t + 20 + 300 + 7], "thread {t}");
    }
}

#[test]
fn bytes_of_an_address_may_lie_anywhere() {
    let memory = Memory::new(1 << 20);
    let out = words(&memory, &[0; 2]);
    let mut body = "mov.u64 %d1, 0; ".to_string();
    for byte in 0..8 {
        body += &format!(
            "ld.global.u8 %d2, [packed+{}]; shl.b64 %d2, %d2, {}; or.b64 %d1, %d1, %d2; ",
            byte + 1,
            byte * 8
        );
    }
    body += "mov.u32 %r1, 12; CALL setp.ne.u32 %q0, %t, 0; @%q0 bra END; ld.global.u8 %r3, [packed]; st.global.v2.u32 [%p0], {%r2, %r3}; END:";
    calls(&body, &[out], &memory).unwrap();
    assert_eq!(read_words(&memory, out, 2), [144, 3]);
}

#[test]
fn a_pointer_that_one_kernel_stored_is_called_by_another() {
    let memory = Memory::new(1 << 20);
    let out = words(&memory, &[0; 4]);
    let other = |body: &str| kernel(1, body).replace(".entry k(", ".entry other(");
    let text = TABLES.to_string()
        + &other("mov.u64 %d1, sq; st.global.u64 [%p0], %d1;")
        + &kernel(
            1,
            &format!("ld.global.u64 %d1, [%p0]; mov.u32 %r1, 9; {CALL} st.global.u32 [%p0+8], %r2;"),
        );
    let loaded = load(&text, &memory);
    for name in ["other", "k"] {
        launch(&loaded, name, &[&memory], &shape(1, 1), &out.to_le_bytes(), &Checks::default()).unwrap();
    }
    assert_eq!(read_words(&memory, out, 3)[2], 81);
}

#[test]
fn calls_through_wrong_pointers_are_faults() {
    let memory = Memory::new(1 << 20);
    let wrong = |from: &str| {
        let fault =
            calls(&format!("mov.u32 %r1, 1; {from} CALL"), &[words(&memory, &[0; 2])], &memory).unwrap_err();
        assert_eq!((fault.kind, fault.ptx_line > 0), (FaultKind::InvalidCall, true), "{fault}");
        fault.message
    };
    assert!(wrong("ld.global.u64 %d1, [%p0];").contains("null pointer to a function"));
    assert!(wrong("mov.u64 %d1, %p0;").contains("no address of a function"));
    assert!(wrong("mov.u64 %d1, sq; add.u64 %d1, %d1, 4;").contains("no address of a function"));
    assert!(wrong("mov.u64 %d1, sq; add.u64 %d1, %d1, 1024;").contains("no address of a function"));
    let wide = CALL
        .replace(".param .b32 a;", ".param .b64 a;")
        .replace("st.param.b32 [a], %r1", "st.param.b64 [a], %d1");
    let text = TABLES.to_string() + &kernel(0, &format!("mov.u64 %d1, sq; {wide}"));
    let fault = run(&text, &memory, shape(1, 1), &[]).unwrap_err();
    assert_eq!(fault.kind, FaultKind::InvalidCall);
    assert!(
        fault.message.contains("`sq`") && fault.message.contains("[4]") && fault.message.contains("[8]"),
        "{fault}"
    );
}

/// Fibonacci numbers by a function that calls itself twice and keeps its argument in local memory, whose address it
/// hands to the inner calls: these add one to it.
const FIB: &str = ".func (.param .b32 r) fib(.param .b32 x, .param .b64 counter) {
    .reg .b32 %a<6>; .reg .b64 %l<4>; .reg .pred %p; .local .align 8 .b32 mine[2];
    ld.param.b32 %a1, [x]; ld.param.b64 %l1, [counter]; ld.u32 %a5, [%l1]; add.u32 %a5, %a5, 1; st.u32 [%l1], %a5;
    mov.u64 %l2, mine; cvta.local.u64 %l3, %l2; mov.u32 %a5, 0; st.local.u32 [mine], %a5; st.local.u32 [mine+4], %a1;
    mov.u32 %a4, %a1; setp.lt.u32 %p, %a1, 2; @%p bra DONE;
    sub.u32 %a2, %a1, 1;
    { .param .b32 a; .param .b64 c; .param .b32 b; st.param.b32 [a], %a2; st.param.b64 [c], %l3; call.uni (b), fib, (a, c); ld.param.b32 %a3, [b]; }
    ld.local.u32 %a2, [%l2+4]; sub.u32 %a2, %a2, 2;
    { .param .b32 a; .param .b64 c; .param .b32 b; st.param.b32 [a], %a2; st.param.b64 [c], %l3; call.uni (b), fib, (a, c); ld.param.b32 %a4, [b]; }
    add.u32 %a4, %a3, %a4;
    ld.local.u32 %a5, [mine]; setp.eq.u32 %p, %a5, 2; @%p bra DONE; trap;
    DONE: st.param.b32 [r], %a4; ret; }\n";

#[test]
fn functions_call_themselves_and_keep_their_variables() {
    let memory = Memory::new(1 << 20);
    let out = words(&memory, &[0; 64]);
    let body = ".local .align 8 .b32 n; mov.u32 %r3, 0; st.local.u32 [n], %r3; mov.u64 %d1, n; cvta.local.u64 %d1, %d1; and.b32 %r4, %t, 7;
        { .param .b32 a; .param .b64 c; .param .b32 b; st.param.b32 [a], %r4; st.param.b64 [c], %d1; call.uni (b), fib, (a, c); ld.param.b32 %r2, [b]; }
        ld.local.u32 %r3, [n]; mul.wide.u32 %d5, %t, 8; add.u64 %d5, %p0, %d5; st.global.v2.u32 [%d5], {%r2, %r3};";
    run(&(FIB.to_string() + &kernel(1, body)), &memory, shape(1, 32), &[out]).unwrap();
    let fib = [0, 1, 1, 2, 3, 5, 8, 13];
    for (t, pair) in read_words(&memory, out, 64).chunks_exact(2).enumerate() {
        assert_eq!(pair, [fib[t % 8], 1], "thread {t}");
    }
}

#[test]
fn functions_that_call_each_other_and_themselves_through_pointers_have_frames() {
    let memory = Memory::new(1 << 20);
    let out = words(&memory, &[0; 32]);
    // `even(n) = n == 0 or odd(n - 1)`, `odd(n) = n != 0 and even(n - 1)`; `odd` calls through the table.
    let function = |name: &str, at_zero: u32, call: &str| {
        format!(".func (.param .b32 r) {name}(.param .b32 x) {{ .reg .b32 %a<3>; .reg .b64 %l; .reg .pred %p; .local .align 64 .b32 kept;
            ld.param.b32 %a1, [x]; st.local.b32 [kept], %a1; mov.u64 %l, kept; and.b64 %l, %l, 63; setp.ne.u64 %p, %l, 0; @%p trap; mov.u32 %a2, {at_zero}; setp.eq.u32 %p, %a1, 0; @%p bra DONE; sub.u32 %a1, %a1, 1;
            {{ .param .b32 a; .param .b32 b; st.param.b32 [a], %a1; {call} ld.param.b32 %a2, [b]; }}
            add.u32 %a1, %a1, 1; ld.local.b32 %a0, [kept]; setp.eq.u32 %p, %a0, %a1; @%p bra DONE; trap; DONE: st.param.b32 [r], %a2; ret; }}\n")
    };
    let text = ".func (.param .b32 r) even(.param .b32 x);\n.global .u64 table[1] = {even};\n".to_string()
        + &function("odd", 0, "P: .callprototype (.param .b32 _) _ (.param .b32 _); ld.global.u64 %l, [table]; call (b), %l, (a), P;")
        + &function("even", 1, "call (b), odd, (a);")
        + &kernel(1, "{ .param .b32 a; .param .b32 b; st.param.b32 [a], %t; call (b), even, (a); ld.param.b32 %r2, [b]; }
            mul.wide.u32 %d5, %t, 4; add.u64 %d5, %p0, %d5; st.global.u32 [%d5], %r2;");
    run(&text, &memory, shape(1, 32), &[out]).unwrap();
    let wanted: Vec<u32> = (0..32).map(|t| (t + 1) % 2).collect();
    assert_eq!(read_words(&memory, out, 32), wanted);
}

#[test]
fn a_stack_that_is_used_up_is_a_fault() {
    let memory = Memory::new(1 << 20);
    let text = ".func deeper() { call deeper; ret; }\n".to_string()
        + &kernel(0, "setp.lt.u32 %q0, %t, 3; @%q0 bra END; call deeper; END:");
    let fault = run(&text, &memory, shape(1, 32), &[]).unwrap_err();
    assert_eq!((fault.kind, fault.thread), (FaultKind::OutOfBounds, [3, 0, 0]), "{fault}");
    assert!(fault.message.contains("`deeper`") && fault.message.contains("2048 calls deep"), "{fault}");
}

#[test]
fn the_stack_is_allocated_and_given_back() {
    let memory = Memory::new(1 << 20);
    let out = words(&memory, &[0; 32]);
    // The function sums up 0 .. n from an array of its own; it is called often, so it must give its memory back.
    let text = ".func (.param .b32 r) total(.param .b32 x) { .reg .b32 %a<6>; .reg .b64 %l<4>; .reg .pred %p;
            ld.param.b32 %a1, [x]; mul.wide.u32 %l1, %a1, 4; add.u64 %l1, %l1, 4; alloca.u64 %l2, %l1, 16; mov.u32 %a2, 0;
            FILL: mul.wide.u32 %l3, %a2, 4; add.u64 %l3, %l2, %l3; st.local.u32 [%l3], %a2; add.u32 %a2, %a2, 1; setp.le.u32 %p, %a2, %a1; @%p bra FILL;
            mov.u32 %a3, 0; mov.u32 %a2, 0;
            ADD: mul.wide.u32 %l3, %a2, 4; add.u64 %l3, %l2, %l3; ld.local.u32 %a4, [%l3]; add.u32 %a3, %a3, %a4; add.u32 %a2, %a2, 1; setp.le.u32 %p, %a2, %a1; @%p bra ADD;
            st.param.b32 [r], %a3; ret; }\n"
        .to_string()
        + &kernel(1, "mov.u32 %r3, 0; mov.u32 %r4, 0; stacksave.u64 %d1; mov.u64 %d2, 4096;
            AGAIN: { .param .b32 a; .param .b32 b; st.param.b32 [a], %t; call (b), total, (a); ld.param.b32 %r2, [b]; } add.u32 %r3, %r3, %r2;
            alloca.u64 %d3, %d2; st.local.u64 [%d3+4088], %d2; stackrestore.u64 %d1;
            add.u32 %r4, %r4, 1; setp.lt.u32 %q0, %r4, 400; @%q0 bra AGAIN;
            mul.wide.u32 %d5, %t, 4; add.u64 %d5, %p0, %d5; st.global.u32 [%d5], %r3;");
    run(&text, &memory, shape(1, 32), &[out]).unwrap();
    let wanted: Vec<u32> = (0..32).map(|t| 400 * t * (t + 1) / 2).collect();
    assert_eq!(read_words(&memory, out, 32), wanted);
    let bodies = [
        ("mov.u64 %d2, 40000; alloca.u64 %d3, %d2;", FaultKind::OutOfBounds, "40000"),
        (
            "mov.u64 %d2, 8; alloca.u64 %d3, %d2; ld.local.u64 %d4, [%d3]; setp.ne.u64 %q0, %d4, 1; @%q0 exit;",
            FaultKind::Uninitialised,
            "8 bytes",
        ),
        ("mov.u64 %d2, 3; stackrestore.u64 %d2;", FaultKind::InvalidOperand, "cannot go back"),
    ];
    for (body, kind, text) in bodies {
        let fault = run(&kernel(0, body), &memory, shape(1, 1), &[]).unwrap_err();
        assert!(fault.kind == kind && fault.message.contains(text), "{fault}");
    }
}

#[test]
fn what_is_not_supported_is_refused_when_a_thread_reaches_it() {
    let memory = Memory::new(1 << 20);
    let out = words(&memory, &[0; 1]);
    let other = |name: &str, body: &str| kernel(1, body).replace(".entry k(", &format!(".entry {name}("));
    let text = ".global .texref tex;\n".to_string()
        + &other("fine", "mov.u32 %r1, 5; st.global.u32 [%p0], %r1;")
        + &other(
            "around",
            "setp.eq.u32 %q0, %t, 5; @%q0 frobnicate.f32 %f1, {%f2, %f3}, [tex, {%f2}]; bra END; mov.u32 %r1, %pm3; .unknown 3, 4; END:",
        )
        + &other("texture", "\ntex.2d.v4.f32.f32 {%f1, %f2, %f3, %f4}, [tex, {%f5, %f6}];")
        + &other("operand", "\nmov.u32 %r1, %pm3;")
        + &other("form", "\nadd.rn.f8 %f1, %f2, %f3;")
        + &other("directive", "\n.unknown 3, 4;");
    let loaded = load(&text, &memory);
    let run = |name: &str| {
        launch(
            &loaded,
            name,
            &[&memory],
            &shape(1, 4),
            &out.to_le_bytes(),
            &Checks { global_races: false, ..Checks::default() },
        )
    };
    run("fine").unwrap();
    assert_eq!(read_words(&memory, out, 1), [5]);
    run("around").unwrap();
    for (name, what) in [
        ("texture", "instruction `tex.2d.v4.f32.f32`"),
        ("operand", "special register `%pm3`"),
        ("form", "instruction `add.rn.f8`"),
        ("directive", "directive `.unknown`"),
    ] {
        let fault = run(name).unwrap_err();
        let line = text.lines().take_while(|line| !line.contains(&format!(".entry {name}("))).count() as u32;
        assert_eq!((fault.kind, fault.kernel.as_str()), (FaultKind::Unsupported, name));
        assert!(fault.message.contains(what) && fault.ptx_line > line, "{fault} (line {line})");
    }
    // What names what there is not is an error of the text.
    let parse = |body: &str| Module::parse(&kernel(0, body)).unwrap_err();
    assert!(parse("\nadd.u32 %r1, %nothing, 2;").what.contains("%nothing"));
    assert_eq!(parse("add.u32 %r1, %r2, 3;\n@%nothing bra NOWHERE;").line, 7);
}

#[test]
fn kernels_allocate_and_free() {
    let memory = Memory::new(1 << 20);
    let out = words(&memory, &[0; 32]);
    let heap =
        ".extern .func (.param .b64 r) malloc(.param .b64 bytes);\n.extern .func free(.param .b64 at);\n";
    let allocate = "{ .param .b64 a; .param .b64 b; st.param.b64 [a], %d1; call (b), malloc, (a); ld.param.b64 %d2, [b]; }";
    let free = "{ .param .b64 a; st.param.b64 [a], %d2; call free, (a); }";
    let body = format!("mov.u64 %d1, 8; {allocate} st.u32 [%d2+4], %t; ld.u32 %r1, [%d2+4]; {free} mul.wide.u32 %d5, %t, 4; add.u64 %d5, %p0, %d5; st.global.u32 [%d5], %r1;
        mov.u64 %d1, 9000000; {allocate} setp.eq.u64 %q0, %d2, 0; @%q0 bra END; trap; END: {free}");
    run(&(heap.to_string() + &kernel(1, &body)), &memory, shape(1, 32), &[out]).unwrap();
    assert_eq!(read_words(&memory, out, 32), (0..32).collect::<Vec<_>>());
    for (body, kind, text) in [
        (
            format!("mov.u64 %d1, 8; {allocate} st.u32 [%d2+8], %t;"),
            FaultKind::OutOfBounds,
            "offset 8 of an allocation of 8",
        ),
        (
            format!("mov.u64 %d1, 8; {allocate} {free} ld.u32 %r1, [%d2]; add.u32 %r1, %r1, 1;"),
            FaultKind::OutOfBounds,
            "freed",
        ),
        (
            format!("mov.u64 %d1, 8; {allocate} add.u64 %d2, %d2, 4; {free}"),
            FaultKind::InvalidFree,
            "no allocation's start",
        ),
    ] {
        let fault = run(&(heap.to_string() + &kernel(0, &body)), &memory, shape(1, 1), &[]).unwrap_err();
        assert!(fault.kind == kind && fault.message.contains(text) && fault.ptx_line > 0, "{fault}");
    }
}

#[test]
fn a_texture_is_told_from_other_variables() {
    let memory = Memory::new(1 << 20);
    let out = words(&memory, &[0; 3]);
    let is = |kind: &str, name: &str, at: usize| {
        format!(
            "mov.u64 %d1, {name}; istypep.{kind} %q0, %d1; selp.u32 %r1, 1, 0, %q0; st.global.u32 [%p0+{at}], %r1;"
        )
    };
    let body = is("texref", "tex", 0) + &is("surfref", "tex", 4) + &is("texref", "plain", 8);
    let text = ".global .texref tex;\n.global .u64 plain;\n".to_string() + &kernel(1, &body);
    run(&text, &memory, shape(1, 1), &[out]).unwrap();
    assert_eq!(read_words(&memory, out, 3), [1, 0, 0]);
}

#[test]
fn a_trap_where_a_launch_is_not_cooperative_has_a_hint() {
    let memory = Memory::new(1 << 20);
    let trap = |body: &str| run(&kernel(0, body), &memory, shape(1, 1), &[]).unwrap_err().message;
    assert!(
        trap("mov.u32 %r1, %envreg2; setp.ne.u32 %q0, %r1, 0; @%q0 bra END; trap; END:")
            .contains("not cooperative")
    );
    assert!(!trap("trap;").contains("cooperative"));
}

/// Instructions of all families.
const FORMS: &str = "add.u32 add.cc.u32 subc.cc.u64 mad.lo.cc.u32 madc.hi.u32 mul.f32 max.s16x2 dp4a.u32.u32 vadd.u32.u32.u32 vset4.u32.u32.lt setp.lt.u32 setp.eq.f16x2 set.lt.u32.f32
    slct.f32.s32 testp.nan.f32 cvt.u8.f32 cvt.pack.sat.u8.s32.b32 mov.u32 mov.b64 mov.b128 lop3.b32 lop3.or.b32 prmt.b32 fns.b32 selp.b32 ld.global.u32 ld.global.v2.u32 ld.global.b128 ld.param.u64 st.global.v4.u32
    st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 red.async.shared::cluster.mbarrier::complete_tx::bytes.add.u32 atom.global.add.u32 atom.global.cas.b128 red.global.add.f32 cvta.shared.u64 isspacep.global
    istypep.texref mapa.u64 getctarank.u64 fence.proxy.async prefetch.global.L2 createpolicy.fractional.L2.b64 cp.async.ca.shared.global cp.async.commit_group cp.async.wait_group cp.async.wait_all
    cp.async.mbarrier.arrive.b64 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes cp.async.bulk.global.shared::cta.bulk_group cp.async.bulk.wait_group cp.reduce.async.bulk.global.shared::cta.bulk_group.add.u32
    cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster cp.async.bulk.tensor.1d.global.shared::cta.bulk_group
    cp.async.bulk.prefetch.L2.global mbarrier.init.b64 mbarrier.inval.b64 mbarrier.expect_tx.b64 mbarrier.arrive.b64 mbarrier.arrive_drop.b64 mbarrier.test_wait.b64 mbarrier.try_wait.parity.b64 mbarrier.pending_count.b64 mbarrier
    bra brx.idx call ret exit trap nanosleep.u32 alloca.u64 stacksave.u64 stackrestore.u64 shfl.sync.up.b32 vote.sync.all.pred match.any.sync.b32 redux.sync.add.u32 redux activemask.b32 elect.sync bar.sync bar.red.popc.u32 bar.warp.sync
    barrier.cluster.arrive barrier.sync ldmatrix.sync.aligned.m8n8.x1.shared.b16 stmatrix.sync.aligned.m8n8.x1.shared.b16 movmatrix.sync.aligned.m8n8.trans.b16 mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32
    mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 wgmma.fence wgmma.wait_group.sync.aligned wmma wmma.load.a.sync.aligned.row.m16n16k16.f16 wmma.store.d.sync.aligned.row.m16n16k16.f32
    wmma.mma.sync.aligned.row.col.m16n16k16.f32.f32 setp testp set wgmma tex.2d.v4.f32.f32 unknown";

#[test]
fn no_operands_make_the_parser_panic() {
    let operands = [
        "%r1",
        "%d1",
        "[%d1]",
        "[%d1, {%r1, %r2}]",
        "{}",
        "{%r1, %r2}",
        "{%r1, %r2, %r3}",
        "7",
        "%q1",
        "%r1|%q1",
        "!%q1",
        "(%r1)",
        "_",
        "0f3F800000",
        "%r1.b",
        "%r1.h9",
        "%r1.b3210",
        "k",
    ];
    let mut random = common::Random(1);
    for form in FORMS.split_whitespace() {
        for count in 0..7 {
            for _ in 0..12 {
                let picked: Vec<_> =
                    (0..count).map(|_| operands[random.next() as usize % operands.len()]).collect();
                let text = kernel(0, &format!("{form} {};", picked.join(", ")));
                // An error or a refusal; both are right.
                let _ = Module::parse(&text).map_err(|error| assert!(error.line > 0, "{text}"));
            }
        }
    }
}
