//! What a launch says it touched.

use std::sync::Arc;

use phalanx_ptx::{Checks, Launch, Loaded, Memory, Module, Touched, launch};

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
