//! The examples of the emulator's README: they run here, and are the text that stands there.
#![allow(unsafe_code, clippy::undocumented_unsafe_blocks)]

mod with_cudarc {
    use cudarc::driver::{CudaContext, LaunchConfig, PushKernelArg};

    #[test]
    fn saxpy_adds_three_times_x_to_y() -> Result<(), Box<dyn std::error::Error>> {
        let driver = phalanx_emulated_driver::library().expect("it is built with this test");
        std::mem::forget(unsafe { libloading::Library::new(driver) }?);

        let stream = CudaContext::new(0)?.default_stream();
        let saxpy = stream.context().load_module(include_str!("saxpy.ptx").into())?.load_function("saxpy")?;
        let (x, mut y) = (stream.clone_htod(&[1_f32; 1000])?, stream.clone_htod(&[2_f32; 1000])?);
        let mut launch = stream.launch_builder(&saxpy);
        launch.arg(&3_f32).arg(&x).arg(&mut y).arg(&1000_u32);
        unsafe { launch.launch(LaunchConfig::for_num_elems(1000)) }?;
        assert_eq!(stream.clone_dtoh(&y)?, [5.0; 1000]);
        Ok(())
    }
}

mod with_the_interpreter {
    use phalanx_ptx::{Checks, Launch, Loaded, Memory, Module, launch};

    #[test]
    fn saxpy_adds_three_times_x_to_y() -> Result<(), Box<dyn std::error::Error>> {
        let memory = Memory::new(1 << 20);
        let module = Loaded::new(Module::parse(include_str!("saxpy.ptx"))?.into(), &memory)?;
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
