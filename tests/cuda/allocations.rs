//! Out of memory at every allocation of a training step in turn: each time the step ends with an error that says so, nothing
//! is left behind, and the next step trains.
#![allow(unsafe_code)]

use phalanx::Device;
use phalanx::nn::models::GptConfig;
use phalanx::nn::{AdamW, Clip, Group, Parameters, Result, Rule, Scope, grad_norm};
use phalanx::tensor::cuda::{self, Library};
use phalanx::{DType, Tensor, Var};

const GPU: Device = Device::Cuda(0);
const CONTEXT: usize = 8;
const VOCABULARY: usize = 17;

/// Lets the emulator's allocation of this number fail, from now on; none for 0. The number of allocations since the last call.
fn fail_allocation(number: u64) -> std::result::Result<u64, String> {
    // SAFETY: the emulated driver has a function of this name and type, and no other driver has one of this name.
    let choose: extern "C" fn(u64) -> u64 =
        unsafe { cuda::symbol(Library::Driver, "phalanx_emulated_driver_fail_allocation") }?;
    Ok(choose(number))
}

/// Bytes of the device that are allocated, by the driver's own count.
fn used() -> std::result::Result<usize, String> {
    GPU.synchronize().map_err(|error| error.to_string())?;
    type Info = unsafe extern "C" fn(*mut usize, *mut usize) -> i32;
    let (mut free, mut total) = (0, 0);
    // SAFETY: the driver's function of this name has this type; both places are there to be written.
    let status =
        unsafe { cuda::symbol::<Info>(Library::Driver, "cuMemGetInfo_v2")?(&raw mut free, &raw mut total) };
    if status == 0 { Ok(total - free) } else { Err(format!("cuMemGetInfo gives {status}")) }
}

/// The test; skipped on a GPU, where nothing can be made to fail.
pub fn each_one_that_fails_is_an_error_and_leaves_nothing() -> std::result::Result<(), String> {
    if !cuda::emulated() {
        println!("cuda: failing allocations skipped: a GPU's do not fail on demand");
        return Ok(());
    }
    let model = GptConfig::new(VOCABULARY, CONTEXT, 1, 1, 16).init(&Scope::new(1, DType::F32, GPU));
    let model = model.map_err(|error| error.to_string())?;
    let groups = Group::decay_matrices(model.parameters(), 1e-2, 0.1);
    let mut optimizer = AdamW::default().init(groups).map_err(|error| error.to_string())?;
    let ids = |from: usize| -> Result<Var> {
        let ids: Vec<i64> = (0..CONTEXT).map(|i| (3 * (i + from) % VOCABULARY) as i64).collect();
        Ok(Var::new(Tensor::from_slice(&ids, &[1, CONTEXT], GPU)?))
    };
    let mut step = |trains: bool| -> Result<f64> {
        optimizer.zero_grad()?;
        if !trains {
            return Ok(0.0);
        }
        let loss = model.loss(&model.forward(&ids(0)?)?, &ids(1)?, 1.0 / CONTEXT as f64)?;
        loss.backward()?;
        let norm = grad_norm(&optimizer.parameters())?;
        optimizer.step_scaled(Clip::new(norm, 1.0).scale)?;
        Ok(phalanx::kernels::cast(loss.tensor(), DType::F64)?.item()?)
    };
    let mut plain = |trains| step(trains).map_err(|error| error.to_string());
    // Kernels are compiled, and state is made, in the first steps.
    let first = plain(true)?;
    plain(true)?;
    fail_allocation(0)?;
    plain(true)?;
    let allocations = fail_allocation(0)?;
    plain(false)?;
    let before = used()?;
    let mut errors = 0;
    for number in 1..=allocations {
        fail_allocation(number)?;
        match plain(true) {
            Err(why) if why.contains("could not allocate") => errors += 1,
            other => return Err(format!("allocation {number} of {allocations} failed: {other:?}")),
        }
        fail_allocation(0)?;
        plain(false)?;
        let after = used()?;
        if after != before {
            return Err(format!("allocation {number}: {after} bytes are in use, and {before} were before"));
        }
    }
    let last = plain(true)?;
    println!("cuda: {errors} of {allocations} allocations failed in turn; losses from {first} to {last}");
    if last < first && allocations > 20 { Ok(()) } else { Err(format!("from {first} to {last}")) }
}
