//! Seeded orders of kernels' threads through the driver: one for all launches of a process, so these tests are one.
#![allow(unsafe_code)]

mod common;

use common::{context, load};
use cudarc::driver::{CudaContext, LaunchConfig, PushKernelArg};
use cudarc::nvrtc::Ptx;
use phalanx_emulated_driver::for_each_seed;

/// Threads of many blocks count in a word: atomically, or by a read and a write.
const COUNT: &str = r"
    .version 9.0
    .target sm_90
    .address_size 64
    .visible .entry atomic(.param .u64 x) {
        .reg .b64 %d<2>;
        ld.param.u64 %d1, [x];
        red.global.add.u32 [%d1], 1;
        ret;
    }
    .visible .entry volatile(.param .u64 x) {
        .reg .b32 %r<2>; .reg .b64 %d<2>;
        ld.param.u64 %d1, [x];
        ld.volatile.global.u32 %r1, [%d1];
        add.u32 %r1, %r1, 1;
        st.volatile.global.u32 [%d1], %r1;
        ret;
    }
    .visible .entry plain(.param .u64 x) {
        .reg .b32 %r<2>; .reg .b64 %d<2>;
        ld.param.u64 %d1, [x];
        mov.u32 %r1, %ctaid.x;
        st.global.u32 [%d1], %r1;
        ret;
    }";

/// What three launches of 16 blocks of a thread count to.
fn count(context: &std::sync::Arc<CudaContext>, name: &str) -> Result<u32, String> {
    let run = || {
        let stream = context.default_stream();
        let kernel = context.load_module(Ptx::from_src(COUNT))?.load_function(name)?;
        let mut x = stream.clone_htod(&[0_u32])?;
        let shape = LaunchConfig { grid_dim: (16, 1, 1), block_dim: (1, 1, 1), shared_mem_bytes: 0 };
        for _ in 0..3 {
            let mut launch = stream.launch_builder(&kernel);
            launch.arg(&mut x);
            // SAFETY: the kernel has one parameter, a pointer to a word.
            unsafe { launch.launch(shape) }?;
        }
        Ok::<_, cudarc::driver::DriverError>(stream.clone_dtoh(&x)?[0])
    };
    run().map_err(|error| error.to_string())
}

fn counted(name: &str) -> Result<(), String> {
    match count(&context(0), name)? {
        48 => Ok(()),
        other => Err(format!("{other} of 48")),
    }
}

#[test]
fn seeds_find_what_the_fixed_order_hides_and_faults_name_the_order_that_repeats_them() {
    load();
    counted("volatile").unwrap();
    for_each_seed(0..16, || counted("atomic")).unwrap();
    let wrong = for_each_seed(0..16, || counted("volatile")).unwrap_err();
    assert!(wrong.starts_with("under the seed ") && wrong.ends_with(" of 48"), "{wrong}");
    // The environment's order is back.
    counted("volatile").unwrap();

    let driver = phalanx_emulator_link::driver::Driver::loaded().unwrap();
    let fault = |order: &str| {
        driver.schedule(order).unwrap();
        count(&context(0), "plain").unwrap_err()
    };
    let first = fault("5");
    let seed = first.split_once("in the order of seed ").expect(&first).1;
    let seed: String = seed.chars().take_while(char::is_ascii_digit).collect();
    let race = |text: &str| text.split_once("race in global memory").expect(text).1.to_string();
    assert_eq!(race(&fault(&format!("exactly:{seed}"))), race(&first));
    assert_ne!(race(&fault("6")), race(&first));
    driver.schedule("any").unwrap_err();
    driver.schedule("").unwrap();
    assert!(!fault("").contains("seed"));
}
