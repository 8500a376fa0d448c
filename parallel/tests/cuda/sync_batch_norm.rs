//! [`SyncBatchNorm`] on ranks with a GPU each: the numbers of ranks on CPUs, and a host that waits for no GPU.

use phalanx_kernels as kernels;
use phalanx_nn::autograd::{ContextMode, Var};
use phalanx_nn::{BatchNormConfig, LinearConfig, Module, Parameters, Scope, Sequential, state_dict};
use phalanx_parallel::Result;
use phalanx_parallel::comm::NcclConfig;
use phalanx_parallel::data_parallel::SyncBatchNorm;
use phalanx_parallel::launch::{Rank, Threads};
use phalanx_tensor::cuda::calls;
use phalanx_tensor::{Context, DType, Device, Tensor};

use crate::Test;

pub const TESTS: [Test; 2] = [
    ("a converted model waits for no GPU, forward and backward, and has the numbers of CPUs", converted),
    ("moments merge on a GPU to the bits of CPUs", merged),
];

const CHANNELS: usize = 5;

/// Numbers that are a function of their place and `seed`, on the rank's device.
fn numbers(shape: &[usize], seed: usize, device: Device) -> Result<Tensor> {
    let number = |i: usize| ((i * 7919 + seed * 104_729) % 1000) as f64 / 100.0 - 3.0;
    let values: Vec<f64> = (0..shape.iter().product()).map(number).collect();
    Ok(Tensor::from_slice(&values, shape, Device::CPU)?.to_device(device, false)?)
}

fn wide(t: &Tensor) -> Result<Vec<f64>> {
    Ok(kernels::cast(t, DType::F64)?.to_vec()?)
}

/// Three training passes of a converted model; what came out, and the waits for the GPU of each pass.
fn train(rank: &Rank, momentum: Option<f64>) -> Result<(Vec<Vec<f64>>, Vec<u64>)> {
    let device = rank.device();
    let scope = Scope::new(3, DType::F64, device);
    let norm =
        |name: &str| BatchNormConfig::new(CHANNELS).with_momentum(momentum).init_1d(&scope.child(name));
    let inner = Sequential::new()
        .with(LinearConfig::new(CHANNELS, CHANNELS).init(&scope.child("map"))?)
        .with(norm("b")?);
    let mut model = Sequential::new().with(norm("a")?).with(inner);
    assert_eq!(SyncBatchNorm::convert(&mut model, rank.comm())?, 2);
    let _train = Context::with(|c| c.set_train(true));
    let (mut seen, mut waits) = (Vec::new(), Vec::new());
    // Ranks have unlike numbers of rows.
    let shape = [2 + rank.rank(), CHANNELS];
    for pass in 0..3 {
        let x = Var::leaf(numbers(&shape, 10 * pass + rank.rank(), device)?)?;
        let dy = Var::new(numbers(&shape, 10 * pass + rank.rank() + 5, device)?);
        let before = calls().waits;
        let y = model.forward(&x)?;
        y.backward_with(dy)?;
        waits.push(calls().waits - before);
        let dx = x.grad().map(Var::into_tensor);
        seen.extend(
            [y.tensor(), &dx.expect("a gradient")].map(wide).into_iter().collect::<Result<Vec<_>>>()?,
        );
    }
    for parameter in model.parameters() {
        seen.extend(parameter.grad()?.map(|grad| wide(&grad)).transpose()?);
    }
    for (_, tensor) in state_dict(&model) {
        seen.push(wide(&tensor)?);
    }
    Ok((seen, waits))
}

fn over_nccl(ranks: usize) -> Threads {
    Threads::new(ranks).nccl(NcclConfig::default())
}

fn converted() -> std::result::Result<(), String> {
    for ranks in [1, 2, 3] {
        for momentum in [Some(0.1), None] {
            let run =
                |threads: Threads| threads.run(|rank| train(&rank, momentum)).map_err(|e| e.to_string());
            let (wanted, got) = (run(Threads::new(ranks))?, run(over_nccl(ranks))?);
            for ((got, waits), (wanted, _)) in got.iter().zip(&wanted) {
                // The first pass loads kernels.
                if waits[1..] != [0, 0] {
                    return Err(format!("{ranks} ranks, momentum {momentum:?}: {waits:?} waits"));
                }
                let close = |a: &f64, b: &f64| (a - b).abs() <= 1e-10 * b.abs().max(1.0);
                let same = |(a, b): (&Vec<f64>, &Vec<f64>)| a.iter().zip(b).all(|(a, b)| close(a, b));
                if got.len() != wanted.len() || !got.iter().zip(wanted).all(same) {
                    return Err(format!("{ranks} ranks: got {got:?}, wanted {wanted:?}"));
                }
            }
        }
    }
    Ok(())
}

fn merged() -> std::result::Result<(), String> {
    let statistics = |rank: Rank| -> Result<Vec<u64>> {
        let (device, scope) = (rank.device(), Scope::new(3, DType::F64, rank.device()));
        let norm = SyncBatchNorm::of(&BatchNormConfig::new(CHANNELS).init_1d(&scope)?, rank.comm())?;
        let _train = Context::with(|c| c.set_train(true));
        // One element a channel, whose mean is itself; the second rank has none.
        let rows = usize::from(rank.rank() != 1);
        norm.forward(&Var::new(numbers(&[rows, CHANNELS], rank.rank(), device)?))?;
        let running = [&norm.norm().running_mean, &norm.norm().running_var];
        let values = running.into_iter().flatten().map(|buffer| wide(&buffer.tensor()));
        Ok(values.collect::<Result<Vec<_>>>()?.concat().into_iter().map(f64::to_bits).collect())
    };
    let run = |threads: Threads| threads.run(statistics).map_err(|e| e.to_string());
    for ranks in [3, 4] {
        let (wanted, got) = (run(Threads::new(ranks))?, run(over_nccl(ranks))?);
        if got != wanted {
            return Err(format!("{ranks} ranks: got {got:?}, wanted {wanted:?}"));
        }
    }
    Ok(())
}
