//! Offload from a GPU to the host: bits, memory, and what waits for what.

use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use phalanx_nn::autograd::{SaveOnCpu, Var, saved_hooks};
use phalanx_nn::{
    AdamW, Clip, Group, LinearConfig, Module, Parameter, Rule, Scope, Sequential, Tanh, WrappedUnit,
};
use phalanx_parallel::Result;
use phalanx_parallel::launch::{Rank, Threads};
use phalanx_parallel::sharded::{Reshard, Zero, ZeroConfig, ZeroStage};
use phalanx_tensor::cuda::{GpuEvent, calls, emulated};
use phalanx_tensor::{Category, Context, CopyStream, DType, Device, HostMemory, Tensor};

use crate::Test;

pub const TESTS: [Test; 4] = [
    ("offload: saved activations leave the device and come back with their bits", activations),
    ("offload: the update has the bits of the CPU's optimizer, and backward waits for no copy", shards),
    ("offload: a copy to the GPU stands behind no kernel", copies),
    ("offload in random orders of the emulator's streams", in_random_orders),
];

/// The variable that gives the emulator's streams a random order.
const STREAMS: &str = "PHALANX_EMULATOR_STREAMS";
/// Elements of a value: 128 KiB.
const N: usize = 1 << 15;
const BYTES: usize = 4 * N;
const LENGTH: usize = 10;

/// A chain's gradient, and the most activations on its device.
fn chain(host: Option<Device>) -> phalanx_nn::autograd::Result<(Vec<u8>, usize)> {
    let device = Device::Cuda(3);
    let values: Vec<f32> = (0..N).map(|i| (i % 89) as f32 / 89.0 - 0.4).collect();
    let x = Var::leaf(Tensor::from_slice(&values, &[N], device)?.tagged(Category::Parameters))?;
    device.synchronize()?;
    device.ledger()?.reset_peak();
    let y = {
        let _saved = host.map(|host| saved_hooks(Arc::new(SaveOnCpu::new(host))));
        (0..LENGTH).try_fold(x.clone(), |x, _| x.tanh())?
    };
    y.sum_all()?.backward()?;
    drop(y);
    let grad = x.grad().map(|grad| grad.tensor().to_bytes()).transpose()?.unwrap_or_default();
    Ok((grad, device.ledger()?.category(Category::Activations).peak))
}

fn activations() -> std::result::Result<(), String> {
    let host = Device::Cpu(303);
    let run = |host| chain(host).map_err(|error| error.to_string());
    let ((wanted, all), (got, few)) = (run(None)?, run(Some(host))?);
    let ledger = host.ledger().map_err(|error| error.to_string())?;
    let kept = ledger.category(Category::Activations);
    // Forward: two values, and two that are being copied. Backward: the result, a value, two that are ahead of it, two gradients.
    if got != wanted
        || all < LENGTH * BYTES
        || few > 6 * BYTES + 8
        || (kept.now, kept.peak) != (0, LENGTH * BYTES)
    {
        return Err(format!("bits {}, {all} bytes, {few} with offload; host {kept:?}", got == wanted));
    }
    Ok(())
}

/// Copies to a GPU whose compute stream has kernels to run. Where the emulator chooses what runs next, some copy is done before them.
fn copies() -> std::result::Result<(), String> {
    let (gpu, host) = (Device::Cuda(3), Device::Cpu(304));
    let run = || -> phalanx_tensor::Result<usize> {
        let up = CopyStream::new(host, gpu)?;
        let values: Vec<f32> = (0..N).map(|i| i as f32).collect();
        let (x, source) = {
            let memory = HostMemory::beside(gpu)?;
            let _memory = Context::with(|c| c.host_memory = memory);
            (Tensor::zeros(&[N], DType::F32, gpu)?, Tensor::from_slice(&values, &[N], host)?)
        };
        let mut first = 0;
        for _ in 0..20 {
            gpu.synchronize()?;
            let _kernels = (0..4).try_fold(x.clone(), |x, _| phalanx_kernels::tanh(&x))?;
            let computed = GpuEvent::record(gpu.gpu()?)?;
            let copy = up.start(&source)?.wait()?;
            let copied = {
                let _copies = up.enter()?;
                GpuEvent::record(gpu.gpu()?)?
            };
            copied.synchronize()?;
            first += usize::from(!computed.is_done()?);
            assert_eq!(copy.to_vec::<f32>()?, values);
        }
        Ok(first)
    };
    match run().map_err(|error| error.to_string())? {
        0 if std::env::var_os(STREAMS).is_some() => Err("every copy came after the kernels".into()),
        _ => Ok(()),
    }
}

const STEPS: usize = 3;
const WIDTH: usize = 32;
const UNITS: usize = 3;

struct Trained {
    losses: Vec<f32>,
    /// This rank's values.
    values: Vec<Vec<u8>>,
    /// Waits of this thread for the GPU inside each backward pass.
    waits: Vec<u64>,
    /// Bytes of optimizer state and gradients on the device after a backward pass.
    on_device: usize,
    /// Bytes of parameters there.
    values_on_device: usize,
}

fn model(dtype: DType, device: Device) -> Result<Sequential> {
    (0..UNITS).try_fold(Sequential::new(), |model, i| {
        let linear = LinearConfig::new(WIDTH, WIDTH).init(&Scope::new(7, dtype, device).child(i))?;
        Ok(model.with(WrappedUnit::new(Arc::new(linear))).with(Tanh))
    })
}

/// Trains. Without offload, the parts that the rank owns are copied to the CPU after each backward pass, updated there by an optimizer of
/// its own, and copied back: the slow twin of offload.
fn train(rank: &Rank, dtype: DType, config: &ZeroConfig) -> Result<Trained> {
    let device = rank.device();
    let model = model(dtype, device)?;
    let zero = Zero::new(&model, rank.comm().clone(), config.clone())?;
    let pieces = zero.parameters();
    let trained: Vec<Parameter> = match config.offload {
        Some(_) => pieces.clone(),
        None => pieces
            .iter()
            .map(|p| Parameter::new(p.name(), p.tensor().to_device(Device::CPU, true)?))
            .collect::<phalanx_nn::Result<_>>()?,
    };
    let mut optimizer = AdamW::default().init(vec![Group::new(trained.clone(), 1e-2)])?;
    let mut done =
        Trained { losses: vec![], values: vec![], waits: vec![], on_device: 0, values_on_device: 0 };
    for step in 0..STEPS {
        let values: Vec<f32> = (0..8 * WIDTH)
            .map(|i| ((i * 37 + rank.rank() * 11 + step * 5) % 19) as f32 / 9.0 - 1.0)
            .collect();
        let x = Tensor::from_slice(&values, &[8, WIDTH], device)?;
        let x = Var::new(phalanx_kernels::cast(&x, dtype)?);
        let loss = model.forward(&x)?.square()?.mean_all()?;
        zero.begin()?;
        let before = calls().waits;
        loss.backward()?;
        done.waits.push(calls().waits - before);
        zero.finish()?;
        done.losses.push(phalanx_kernels::cast(loss.tensor(), DType::F32)?.item()?);
        let of = |category| Ok::<_, phalanx_tensor::Error>(device.ledger()?.category(category).now);
        done.on_device = of(Category::Gradients)? + of(Category::OptimizerState)?;
        done.values_on_device = of(Category::Parameters)?;
        let clip = Clip::new(zero.grad_norm()?, 1.0).scale;
        if config.offload.is_none() {
            for (piece, own) in pieces.iter().zip(&trained) {
                own.set_grad(piece.finish_grad()?.map(|grad| grad.to_device(Device::CPU, true)).transpose()?);
            }
        }
        optimizer.step_scaled(clip)?;
        if config.offload.is_none() {
            for (piece, own) in pieces.iter().zip(&trained) {
                piece.tensor().copy_from(&own.tensor())?;
            }
        }
        zero.zero_grad()?;
        zero.updated()?;
    }
    done.values = trained.iter().map(|p| p.tensor().to_bytes()).collect::<phalanx_tensor::Result<_>>()?;
    Ok(done)
}

fn threads(ranks: usize) -> Threads {
    #[cfg(feature = "nccl")]
    let threads = Threads::new(ranks).nccl(phalanx_parallel::comm::NcclConfig::default());
    #[cfg(not(feature = "nccl"))]
    let threads = Threads::new(ranks).cuda();
    threads.timeout(Duration::from_secs(120))
}

/// Over one rank and over two. Waits count where no rank sends by way of the host.
fn shards() -> std::result::Result<(), String> {
    for (ranks, dtype, shard_dtype, stage, offload_parameters) in [
        (1, DType::F32, None, ZeroStage::Optimizer, true),
        (1, DType::BF16, Some(DType::F32), ZeroStage::Parameters, true),
        (1, DType::BF16, Some(DType::F32), ZeroStage::Parameters, false),
        (2, DType::F32, None, ZeroStage::Gradients, true),
        (2, DType::F32, None, ZeroStage::Parameters, true),
        (2, DType::BF16, Some(DType::F32), ZeroStage::Parameters, false),
    ] {
        let config = ZeroConfig {
            grad_dtype: Some(DType::F32),
            shard_dtype,
            reshard: Reshard::Always,
            offload_parameters,
            ..ZeroConfig::new(stage)
        };
        let run = |offload: bool| {
            let rank = |rank: Rank| {
                let offload = offload.then_some(Device::Cpu(310 + rank.rank() as u16));
                train(&rank, dtype, &ZeroConfig { offload, ..config.clone() })
            };
            threads(ranks).run(rank).map_err(|error| error.to_string())
        };
        let case = format!("{ranks} ranks, {dtype}, {stage:?}, parameters {offload_parameters}");
        let (wanted, got) = (run(false)?, run(true)?);
        for (got, wanted) in got.iter().zip(&wanted) {
            if got.losses != wanted.losses || got.values != wanted.values {
                return Err(format!("{case}: got losses {:?}, wanted {:?}", got.losses, wanted.losses));
            }
            if got.on_device != 0 || wanted.on_device == 0 {
                return Err(format!("{case}: {} bytes of gradients and state stay", got.on_device));
            }
            // What stays there is a copy of the shard, in the dtype of the computation.
            let own: usize = got.values.iter().map(Vec::len).sum();
            let kept = own / shard_dtype.map_or(1, |wide| wide.size() / dtype.size());
            let wanted = if offload_parameters { 0 } else { kept };
            if stage == ZeroStage::Parameters && got.values_on_device != wanted {
                let kept = got.values_on_device;
                return Err(format!("{case}: {kept} bytes of values stay, wanted {wanted}"));
            }
            let beside_the_host = ranks == 1 || cfg!(feature = "nccl");
            if beside_the_host && got.waits[1..].iter().any(|waits| *waits > 0) {
                return Err(format!("{case}: backward passes wait {:?} times for the GPU", got.waits));
            }
        }
    }
    Ok(())
}

/// The other tests once more, as processes of their own.
fn in_random_orders() -> std::result::Result<(), String> {
    if !emulated() || std::env::var_os(STREAMS).is_some() {
        return Ok(());
    }
    for order in ["deferred:1", "deferred:2"] {
        let again = std::env::current_exe()
            .and_then(|exe| Command::new(exe).arg("offload:").env(STREAMS, order).output())
            .map_err(|error| error.to_string())?;
        let text = String::from_utf8_lossy(&again.stdout);
        if !again.status.success() || text.matches("... ok").count() != 3 {
            return Err(format!("{order}: {text}{}", String::from_utf8_lossy(&again.stderr)));
        }
    }
    Ok(())
}
