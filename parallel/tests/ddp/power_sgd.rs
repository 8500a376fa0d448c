//! Gradients as thin factors.

use std::sync::Arc;

use phalanx_kernels as kernels;
use phalanx_parallel::data_parallel::{
    Average, Bucket, BucketHook, Ddp, DdpConfig, JoinConfig, PowerSgd, PowerSgdConfig,
};
use phalanx_parallel::engine::{Engine, EngineConfig, Lane};
use phalanx_parallel::{Result, launch};
use phalanx_tensor::{DType, Device, Dims, RngKey, Tensor, Window};

use crate::Small;

/// From the first pass on, whatever it saves.
pub const ALL: PowerSgdConfig = PowerSgdConfig {
    rank: 2,
    start_after: 0,
    min_rate: 0.0,
    feedback: true,
    warm_start: true,
    epsilon: 0.0,
    seed: 3,
};

/// A gradient of a [12, 3, 3] and a vector of 5, different for each rank and pass.
pub fn gradients(rank: usize, pass: u64, dtype: DType) -> Tensor {
    let window = Window::whole(&[113]);
    let stream = RngKey { seed: 9, step: pass }.site(rank as u64);
    kernels::random::normal(&[113], &window, stream, [0.0, 1.0], dtype, Device::CPU).unwrap()
}

pub fn send(hook: &PowerSgd, gradients: &Tensor, comm: &phalanx_parallel::comm::Comm) -> Result<Vec<f64>> {
    let shapes = [Dims::from_slice(&[12, 3, 3]), Dims::from_slice(&[5])];
    let bucket = Bucket { index: 0, gradients, parameters: &[4, 2], shapes: &shapes, divisor: None };
    hook.start(&bucket, comm)?()?;
    values(gradients)
}

pub fn values(t: &Tensor) -> Result<Vec<f64>> {
    Ok(kernels::cast(t, DType::F64)?.to_vec()?)
}

pub fn close(got: &[f64], wanted: &[f64], tolerance: f64) {
    let worst = got.iter().zip(wanted).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
    assert!(got.len() == wanted.len() && worst <= tolerance, "off by {worst}, allowed {tolerance}");
}

#[test]
fn factors_of_full_rank_give_the_sum() {
    for (dtype, tolerance) in [(DType::F64, 1e-13), (DType::F32, 1e-5), (DType::BF16, 5e-2)] {
        for ranks in [1, 2, 3] {
            let all = launch::threads(ranks, |rank| -> Result<_> {
                let hook = PowerSgd::new(PowerSgdConfig { rank: 9, ..ALL })?;
                let mut seen = Vec::new();
                for pass in 0..3 {
                    seen.push(send(&hook, &gradients(rank.rank(), pass, dtype), rank.comm())?);
                }
                Ok((seen, values(&hook.residual(4).unwrap())?))
            });
            let (all, residuals): (Vec<_>, Vec<_>) = all.unwrap().into_iter().unzip();
            // A rank's own gradient may point where the sum does not.
            let left: Vec<f64> = (0..108).map(|i| residuals.iter().map(|r| r[i]).sum()).collect();
            close(&left, &[0.0; 108], 10.0 * tolerance);
            assert!(all.iter().all(|seen| *seen == all[0]), "ranks differ");
            for (pass, seen) in all[0].iter().enumerate() {
                let each: Vec<_> =
                    (0..ranks).map(|r| values(&gradients(r, pass as u64, dtype)).unwrap()).collect();
                let sums: Vec<f64> = (0..113).map(|i| each.iter().map(|g| g[i]).sum()).collect();
                close(seen, &sums, 4.0 * tolerance);
            }
        }
    }
}

#[test]
fn what_was_sent_and_the_residuals_are_the_gradients() {
    for warm_start in [true, false] {
        let all = launch::threads(3, |rank| -> Result<_> {
            let hook = PowerSgd::new(PowerSgdConfig { warm_start, ..ALL })?;
            let (mut sent, mut given) = (vec![0.0; 113], vec![0.0; 113]);
            for pass in 0..6 {
                let own = gradients(rank.rank(), pass, DType::F64);
                given.iter_mut().zip(values(&own)?).for_each(|(sum, x)| *sum += x);
                sent.iter_mut().zip(send(&hook, &own, rank.comm())?).for_each(|(sum, x)| *sum += x);
            }
            assert!(hook.residual(2).is_none(), "a vector is sent whole");
            Ok((sent, given, values(&hook.residual(4).unwrap())?))
        });
        let all = all.unwrap();
        // The vector has no residual.
        let sum = |i: usize| all.iter().map(|rank| rank.2.get(i).copied().unwrap_or(0.0)).sum::<f64>();
        let both: Vec<f64> = (0..113).map(|i| all[0].0[i] + sum(i)).collect();
        let given: Vec<f64> = (0..113).map(|i| all.iter().map(|rank| rank.1[i]).sum()).collect();
        close(&both, &given, 1e-12);
        let left = (0..113).map(|i| sum(i).abs()).fold(0.0, f64::max);
        assert!(left > 0.1, "factors of rank 2 leave something out");
    }
}

#[test]
fn a_gradient_that_is_no_number_is_seen_and_forgotten() {
    let all = launch::threads(2, |rank| -> Result<_> {
        let hook = PowerSgd::new(ALL)?;
        let mut bad = values(&gradients(rank.rank(), 0, DType::F64))?;
        bad[7] = if rank.rank() == 1 { f64::NAN } else { bad[7] };
        let first = send(&hook, &Tensor::from_slice(&bad, &[113], Device::CPU)?, rank.comm())?;
        assert!(first[..108].iter().any(|x| x.is_nan()));
        let second = send(&hook, &gradients(rank.rank(), 1, DType::F64), rank.comm())?;
        assert!(second.iter().all(|x| x.is_finite()));
        Ok(second)
    });
    let all = all.unwrap();
    assert_eq!(all[0], all[1]);
}

/// Trains; the losses, the bytes of the values and those sent by a pass at the end.
fn train(config: &DdpConfig, engine: bool) -> (Vec<f64>, Vec<Vec<u8>>, u64) {
    let body = |rank: launch::Rank| -> Result<_> {
        let model = Small::new(rank.device());
        let engine = engine.then(|| Engine::threaded(&EngineConfig::new().lane(Lane::Priority, 1)));
        let engine = engine.transpose()?.map(Arc::new);
        let ddp = Ddp::new(&model, rank.comm().clone(), DdpConfig { engine, ..config.clone() })?;
        let mut optimizer = model.optimizer();
        let (mut losses, mut sent) = (Vec::new(), 0);
        for _ in 0..150 {
            let loss = model.loss(rank.rank() as u64, 4, true)?;
            losses.push(f64::from(loss.item::<f32>()?));
            let before = rank.comm().traffic().bytes;
            ddp.backward(&loss)?;
            sent = rank.comm().traffic().bytes - before;
            optimizer.step()?;
            optimizer.zero_grad()?;
        }
        Ok((losses, model.bytes(), sent))
    };
    let all = launch::threads(2, body).unwrap();
    assert_eq!(all[0].1, all[1].1, "ranks differ");
    let losses = (0..all[0].0.len()).map(|i| all.iter().map(|rank| rank.0[i]).sum()).collect();
    (losses, all[0].1.clone(), all[0].2)
}

#[test]
fn training_comes_as_far_with_fewer_bytes_and_through_filling_buckets_anew() {
    let plain = DdpConfig { first_bucket_bytes: 1, bucket_bytes: 60, ..DdpConfig::default() };
    let thin = PowerSgdConfig { rank: 1, start_after: 3, min_rate: 1.0, ..ALL };
    let hook = Arc::new(PowerSgd::new(thin).unwrap());
    let config = DdpConfig { hook: hook.clone(), ..plain.clone() };
    let (wanted, _, whole) = train(&plain, false);
    let (losses, bytes, sent) = train(&config, false);
    let (first, end, wanted_end) = (losses[0], losses[149], wanted[149]);
    assert!(wanted_end < 0.5 * first, "{wanted_end} of {first}");
    assert!(end < wanted_end + 0.05 * (first - wanted_end), "{end}, wanted near {wanted_end} from {first}");
    assert_eq!(losses[..4], wanted[..4], "the first passes are whole");
    assert_ne!(losses[5..], wanted[5..]);
    // 24 + 16 + 6 elements of matrices, of which [8, 3] and [2, 8] go as 11 and 10; 12 of vectors.
    assert_eq!((whole, sent), (4 * (46 + 12), 4 * (11 + 10 + 5 + 12)));
    assert_eq!(train(&config, true).1, bytes, "an engine with threads gives the same bits");
    assert_eq!(train(&config, false).1, bytes, "a second wrapper begins without memory");
    assert!(hook.residual(0).is_none(), "the memory is the wrapper's");
}

#[test]
fn ranks_without_batches_and_unused_parameters_go_along() {
    let hook = Arc::new(PowerSgd::new(ALL).unwrap());
    let config = DdpConfig { hook, find_unused: true, average: Average::Mean, ..DdpConfig::default() };
    let all = launch::threads(3, |rank| -> Result<_> {
        let model = Small::new(rank.device());
        let ddp = Ddp::new(&model, rank.comm().clone(), config.clone())?;
        let mut optimizer = model.optimizer();
        ddp.join(0..2 * rank.rank(), JoinConfig::default(), |number| {
            if let Some(number) = number {
                ddp.backward(&model.loss(number as u64, 2, number == 1)?)?;
            }
            optimizer.step()?;
            Ok(optimizer.zero_grad()?)
        })?;
        ddp.backward(&model.loss(1, 2, false)?)?;
        Ok((model.bytes(), model.grads()))
    });
    let all = all.unwrap();
    assert!(all.iter().all(|rank| *rank == all[0]));
    assert!(
        all[0].1[..2].iter().all(Option::is_none),
        "what a residual says of an unused one is not a gradient"
    );
}

#[test]
fn ranks_without_elements_count_the_same_bytes() {
    let bytes = |ranks: launch::Threads| {
        let body = |rank: launch::Rank| -> Result<u64> {
            let model = Small::new(rank.device());
            let hook = Arc::new(PowerSgd::new(PowerSgdConfig { rank: 1, min_rate: 1.0, ..ALL })?);
            let ddp = Ddp::new(&model, rank.comm().clone(), DdpConfig { hook, ..DdpConfig::default() })?;
            let before = rank.comm().traffic().bytes;
            for seed in 0..3 {
                ddp.backward(&model.loss(seed, 2, true)?)?;
                model.zero_grad()?;
            }
            Ok(rank.comm().traffic().bytes - before)
        };
        ranks.run(body).unwrap()
    };
    assert_eq!(bytes(launch::Threads::new(3).meta()), bytes(launch::Threads::new(3)));
}

#[test]
fn rank_0_is_refused() {
    assert!(PowerSgd::new(PowerSgdConfig { rank: 0, ..ALL }).unwrap_err().to_string().contains("rank 0"));
}
