//! The examples of the emulator's README: they run here, and are the text that stands there.
#![allow(unsafe_code, clippy::undocumented_unsafe_blocks)]

use cudarc::driver::{CudaContext, LaunchConfig, PushKernelArg};
use cudarc::nvrtc::Ptx;

/// y[i] = a x[i] + y[i] for i < n
const SAXPY: &str = r#"
    .version 9.0
    .target sm_90
    .address_size 64
    .visible .entry saxpy(.param .f32 a, .param .u64 x, .param .u64 y, .param .u32 n) {
        .reg .pred %p<2>; .reg .b32 %r<6>; .reg .f32 %f<4>; .reg .b64 %rd<6>;
        ld.param.f32 %f1, [a];
        ld.param.u64 %rd1, [x];
        ld.param.u64 %rd2, [y];
        ld.param.u32 %r1, [n];
        mov.u32 %r2, %ctaid.x;
        mov.u32 %r3, %ntid.x;
        mov.u32 %r4, %tid.x;
        mad.lo.s32 %r5, %r2, %r3, %r4;
        setp.ge.u32 %p1, %r5, %r1;
        @%p1 bra DONE;
        mul.wide.u32 %rd3, %r5, 4;
        add.s64 %rd4, %rd1, %rd3;
        add.s64 %rd5, %rd2, %rd3;
        ld.global.f32 %f2, [%rd4];
        ld.global.f32 %f3, [%rd5];
        fma.rn.f32 %f3, %f1, %f2, %f3;
        st.global.f32 [%rd5], %f3;
    DONE:
        ret;
    }"#;

#[test]
fn saxpy_adds_three_times_x_to_y() -> Result<(), Box<dyn std::error::Error>> {
    let driver = phalanx_emulated_driver::library().expect("it is built with this test");
    std::mem::forget(unsafe { libloading::Library::new(driver) }?);

    let stream = CudaContext::new(0)?.default_stream();
    let saxpy = stream.context().load_module(Ptx::from_src(SAXPY))?.load_function("saxpy")?;
    let (x, mut y) = (stream.clone_htod(&[1_f32; 1000])?, stream.clone_htod(&[2_f32; 1000])?);
    let mut launch = stream.launch_builder(&saxpy);
    launch.arg(&3_f32).arg(&x).arg(&mut y).arg(&1000_u32);
    unsafe { launch.launch(LaunchConfig::for_num_elems(1000)) }?;
    assert_eq!(stream.clone_dtoh(&y)?, [5.0; 1000]);
    Ok(())
}

mod with_the_interpreter {
    use super::SAXPY;

    use phalanx_ptx::{Checks, Launch, Loaded, Memory, Module, launch};

    #[test]
    fn saxpy_adds_three_times_x_to_y() -> Result<(), Box<dyn std::error::Error>> {
        let memory = Memory::new(1 << 20);
        let module = Loaded::new(Module::parse(SAXPY)?.into(), &memory)?;
        let (x, y) = (memory.allocate(4000)?, memory.allocate(4000)?);
        memory.fill(x, &1_f32.to_le_bytes(), 1000)?;
        memory.fill(y, &2_f32.to_le_bytes(), 1000)?;
        let (a, n, [x, y]) = (3_f32.to_le_bytes(), 1000_u32.to_le_bytes(), [x, y].map(u64::to_le_bytes));
        let parameters = [&a[..], &[0; 4], &x, &y, &n].concat();
        let shape = Launch { grid: [4, 1, 1], block: [256, 1, 1], shared_bytes: 0, cluster: [1, 1, 1] };
        launch(&module, "saxpy", &[&memory], &shape, &parameters, &Checks::default())?;
        let mut result = [0; 4];
        memory.read(u64::from_le_bytes(y) + 3996, &mut result)?;
        assert_eq!(f32::from_le_bytes(result), 5.0);
        Ok(())
    }
}

#[test]
fn the_readme_shows_what_runs_here() {
    let (readme, here) = (include_str!("../../README.md"), include_str!("readme.rs"));
    let lines: Vec<&str> = here.lines().map(str::trim).collect();
    let blocks: Vec<&str> = readme.split("```rust\n").skip(1).filter_map(|b| b.split("```").next()).collect();
    assert_eq!(blocks.len(), 2);
    for block in blocks {
        let shown: Vec<&str> = block.lines().map(str::trim).collect();
        let found = lines.windows(shown.len()).any(|window| window == shown);
        assert!(found, "not here as it stands in the README:\n{block}");
    }
}
