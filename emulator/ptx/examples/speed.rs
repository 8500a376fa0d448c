//! How fast the interpreter is: instructions of threads a second, with and without the checks that cost time, and the
//! time of a launch that does nearly nothing; and products of matrices a second.
//!
//! `cargo run --release -p phalanx-ptx --example speed`

use std::error::Error;
use std::sync::Arc;
use std::time::Instant;

use phalanx_ptx::{Checks, Launch, Loaded, Memory, Module, launch};

/// `y[i] = a x[i] + y[i]` sixteen times over for each element, then a sum over the block in shared memory.
const PTX: &str = r"
.version 9.0
.target sm_80
.address_size 64
.visible .entry axpy(.param .u64 x, .param .u64 y, .param .u32 n) {
    .reg .pred %p<4>; .reg .b32 %r<16>; .reg .b64 %rd<8>; .reg .f32 %f<4>;
    .shared .align 4 .b8 sums[1024];
    ld.param.u64 %rd1, [x]; ld.param.u64 %rd2, [y]; ld.param.u32 %r1, [n];
    mov.u32 %r2, %ctaid.x; mov.u32 %r3, %ntid.x; mov.u32 %r4, %tid.x; mov.u32 %r5, %nctaid.x;
    mad.lo.s32 %r6, %r2, %r3, %r4; mul.lo.s32 %r7, %r3, %r5;
LOOP:
    setp.ge.s32 %p1, %r6, %r1; @%p1 bra DONE;
    mul.wide.s32 %rd3, %r6, 4; add.s64 %rd4, %rd1, %rd3; add.s64 %rd5, %rd2, %rd3;
    ld.global.f32 %f1, [%rd4]; ld.global.f32 %f2, [%rd5];
    mov.u32 %r8, 0;
INNER:
    fma.rn.f32 %f2, %f1, 0f3F000000, %f2; add.s32 %r8, %r8, 1; setp.lt.s32 %p2, %r8, 4; @%p2 bra INNER;
    st.global.f32 [%rd5], %f2;
    add.s32 %r6, %r6, %r7; bra.uni LOOP;
DONE:
    shl.b32 %r9, %r4, 2; mov.u32 %r10, sums; add.s32 %r11, %r10, %r9; st.shared.f32 [%r11], %f2;
    bar.sync 0;
    ld.shared.f32 %f3, [%r11];
    ret;
}";

/// Each warp multiplies a tile of shared memory with itself, over and over: `ldmatrix` and `mma`.
const PRODUCTS: &str = r"
.version 9.0
.target sm_80
.address_size 64
.visible .entry products() {
    .reg .pred %p<2>; .reg .b32 %r<16>; .reg .f32 %f<4>;
    .shared .align 16 .b8 tile[512];
    mov.u32 %r1, %tid.x; and.b32 %r1, %r1, 31; shl.b32 %r2, %r1, 4; mov.u32 %r3, tile; add.u32 %r3, %r3, %r2;
    mov.u32 %r4, 0x3f803f80; st.shared.v4.b32 [%r3], {%r4, %r4, %r4, %r4}; bar.sync 0;
    mov.f32 %f0, 0f00000000; mov.f32 %f1, %f0; mov.f32 %f2, %f0; mov.f32 %f3, %f0; mov.u32 %r5, 0;
LOOP:
    ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r6, %r7, %r8, %r9}, [%r3];
    mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%f0, %f1, %f2, %f3}, {%r6, %r7, %r8, %r9}, {%r6, %r7}, {%f0, %f1, %f2, %f3};
    mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%f0, %f1, %f2, %f3}, {%r6, %r7, %r8, %r9}, {%r8, %r9}, {%f0, %f1, %f2, %f3};
    add.s32 %r5, %r5, 1; setp.lt.s32 %p1, %r5, 64; @%p1 bra LOOP;
    ret;
}";

fn main() -> Result<(), Box<dyn Error>> {
    let memory = Memory::new(1 << 30);
    let module = Loaded::new(Arc::new(Module::parse(PTX)?), &memory)?;
    let n = 1u32 << 20;
    let (x, y) = (memory.allocate(n as u64 * 4)?, memory.allocate(n as u64 * 4)?);
    memory.fill(x, &1f32.to_le_bytes(), n as u64)?;
    memory.fill(y, &2f32.to_le_bytes(), n as u64)?;
    let parameters = |n: u32| [&x.to_le_bytes()[..], &y.to_le_bytes(), &n.to_le_bytes()].concat();
    let shape = |blocks, threads| Launch {
        grid: [blocks, 1, 1],
        block: [threads, 1, 1],
        shared_bytes: 0,
        cluster: [1, 1, 1],
    };
    let off = Checks { uninitialised: false, shared_races: false, global_races: false, ..Checks::default() };
    for (name, checks) in [("all checks", Checks::default()), ("bounds only", off)] {
        let mut best = f64::INFINITY;
        let mut instructions = 0;
        for _ in 0..5 {
            let start = Instant::now();
            instructions = launch(&module, "axpy", &[&memory], &shape(128, 256), &parameters(n), &checks)?
                .lane_instructions;
            best = best.min(start.elapsed().as_secs_f64());
        }
        println!("{name}: {:.0} million instructions of threads a second", instructions as f64 / best / 1e6);
    }
    let products = Loaded::new(Arc::new(Module::parse(PRODUCTS)?), &memory)?;
    let mut best = f64::INFINITY;
    for _ in 0..20 {
        let start = Instant::now();
        launch(&products, "products", &[&memory], &shape(64, 32), &[], &Checks::default())?;
        best = best.min(start.elapsed().as_secs_f64());
    }
    println!("{:.2} million mma.m16n8k16 a second, with a ldmatrix for two", 64.0 * 64.0 * 2.0 / best / 1e6);
    let start = Instant::now();
    for _ in 0..1000 {
        launch(&module, "axpy", &[&memory], &shape(1, 128), &parameters(128), &Checks::default())?;
    }
    println!("a launch of one block of 128 threads: {:.0} microseconds", start.elapsed().as_secs_f64() * 1e3);
    Ok(())
}
