//! Gradients sent in bf16 or f16: the bits of a slow twin, and near those of f32 over many steps; f16's range is that of torch's hook, and
//! a gradient beyond it is reported.

use std::sync::Arc;

use phalanx_kernels as kernels;
use phalanx_nn::autograd::Var;
use phalanx_nn::{LinearConfig, Module, Parameters, Scope, grad_norm};
use phalanx_parallel::data_parallel::{AllReduce, Average, BucketHook, Compress, Ddp, DdpConfig};
use phalanx_parallel::{Result, launch};
use phalanx_tensor::{DType, Device, Tensor};

use crate::{Small, gpt};

/// The global losses of 20 steps over three ranks.
fn losses(hook: Arc<dyn BucketHook>, average: Average) -> Vec<f64> {
    let run = |rank: launch::Rank| -> Result<Vec<f64>> {
        let model = gpt::model(DType::F32, rank.device());
        let config = DdpConfig { hook: hook.clone(), average, ..DdpConfig::default() };
        let ddp = Ddp::new(&model, rank.comm().clone(), config)?;
        let mut optimizer = gpt::optimizer(model.parameters());
        let mut losses = Vec::new();
        for step in 0..20 {
            let rows = gpt::rows(3, rank.rank(), 1).swap_remove(0);
            let loss = gpt::loss(&model, step, rows)?;
            ddp.backward(&loss)?;
            gpt::update(&mut optimizer, grad_norm(&model.parameters())?)?;
            losses.push(f64::from(loss.item::<f32>()?));
        }
        Ok(losses)
    };
    let all = launch::threads(3, run).unwrap();
    (0..20).map(|step| all.iter().map(|losses| losses[step]).sum()).collect()
}

#[test]
fn the_losses_of_20_steps_stay_within_half_a_percent_of_those_in_f32() {
    for average in [Average::Sum, Average::Mean] {
        let wanted = losses(Arc::new(AllReduce), average);
        assert!(wanted[19] < wanted[0], "it learns: {wanted:?}");
        for dtype in [DType::BF16, DType::F16] {
            let got = losses(Arc::new(Compress(dtype)), average);
            assert_ne!(got, wanted, "{dtype} rounds");
            for (got, wanted) in got.iter().zip(&wanted) {
                assert!((got / wanted - 1.0).abs() < 0.005, "{dtype}, {average:?}: {got}, wanted {wanted}");
            }
        }
    }
}

/// The slow twin: each rank's number is rounded, the numbers are added in order of the ranks in f32, and the sum is rounded. A mean, and in f16
/// a sum too, is divided before; a sum is multiplied after.
fn sent(own: &[f32], dtype: DType, average: Average) -> f32 {
    let round = |x: f32| -> f32 {
        let narrow = kernels::cast(&Tensor::scalar(x, Device::CPU).unwrap(), dtype).unwrap();
        kernels::cast(&narrow, DType::F32).unwrap().item().unwrap()
    };
    let (ranks, divides) = (own.len() as f32, average == Average::Mean || dtype == DType::F16);
    let factor = if divides { 1.0 / ranks } else { 1.0 };
    let sum = own.iter().map(|x| round(x * factor)).reduce(|sum, x| sum + x).unwrap();
    let multiplies = divides && average == Average::Sum;
    round(sum) * if multiplies { ranks } else { 1.0 }
}

#[test]
fn gradients_are_rounded_where_the_twin_rounds_them_and_nowhere_else() {
    for (dtype, average) in
        [DType::BF16, DType::F16].into_iter().flat_map(|d| [(d, Average::Sum), (d, Average::Mean)])
    {
        for (ranks, bucket_bytes) in [(1, 1), (2, 60), (3, 1 << 20)] {
            let all = launch::threads(ranks, |rank| -> Result<_> {
                let (plain, model) = (Small::new(rank.device()), Small::new(rank.device()));
                let hook: Arc<dyn BucketHook> = Arc::new(Compress(dtype));
                let sizes =
                    DdpConfig { first_bucket_bytes: bucket_bytes, bucket_bytes, ..DdpConfig::default() };
                let ddp = Ddp::new(&model, rank.comm().clone(), DdpConfig { hook, average, ..sizes })?;
                let (mut own, mut got) = (Vec::new(), Vec::new());
                for pass in 0..3 {
                    let seed = 7 * pass + rank.rank() as u64;
                    plain.loss(seed, 4, true)?.backward()?;
                    ddp.backward(&model.loss(seed, 4, true)?)?;
                    own.extend(plain.grads().into_iter().flatten().flatten());
                    got.extend(model.grads().into_iter().flatten().flatten());
                    plain.zero_grad()?;
                    model.zero_grad()?;
                }
                Ok((own, got))
            });
            let all: Vec<(Vec<f32>, Vec<f32>)> = all.unwrap();
            let of_all = |at: usize| all.iter().map(|(own, _)| own[at]).collect::<Vec<f32>>();
            let wanted: Vec<f32> = (0..all[0].0.len()).map(|at| sent(&of_all(at), dtype, average)).collect();
            assert_ne!(wanted, all[0].0);
            all.iter().for_each(|(_, got)| assert_eq!(*got, wanted, "{dtype}, {average:?}, {ranks} ranks"));
        }
    }
}

/// Each rank's gradient, and norm, of one weight over ranks that each give `of` their number, sent in f16.
fn sum_of(of: impl Fn(usize) -> f32 + Sync, ranks: usize, average: Average) -> Vec<(f32, f64)> {
    let run = |rank: launch::Rank| -> Result<(f32, f64)> {
        let scope = Scope::new(7, DType::F32, rank.device());
        let model = LinearConfig::new(1, 1).with_bias(false).init(&scope)?;
        let config = DdpConfig { hook: Arc::new(Compress(DType::F16)), average, ..DdpConfig::default() };
        let ddp = Ddp::new(&model, rank.comm().clone(), config)?;
        let x = Var::from_slice(&[of(rank.rank())], &[1, 1], rank.device())?;
        ddp.backward(&model.forward(&x)?.sum_all()?)?;
        let grad = model.parameters()[0].grad()?.unwrap().to_vec::<f32>()?[0];
        Ok((grad, grad_norm(&model.parameters())?))
    };
    launch::threads(ranks, run).unwrap()
}

#[test]
fn sums_beyond_f16_arrive_where_their_mean_is_within_it() {
    // Each rank's gradient is within f16, the sum of four is not, their mean is.
    assert_eq!(sum_of(|_| 60_000.0, 4, Average::Sum), [(240_000.0, 240_000.0); 4]);
    // A rank's gradient alone is beyond it; divided by the ranks it is not.
    let one = |rank: usize| if rank == 2 { 196_608.0 } else { 0.0 };
    assert_eq!(sum_of(one, 4, Average::Sum), [(196_608.0, 196_608.0); 4]);
    assert_eq!(sum_of(one, 4, Average::Mean), [(49_152.0, 49_152.0); 4]);
    // A mean of small numbers is not divided twice: 2^-24 is the smallest that f16 has.
    let small = 2f32.powi(-22);
    assert_eq!(sum_of(|_| small, 4, Average::Mean), [(small, f64::from(small)); 4]);
}

#[test]
fn what_is_beyond_f16_is_infinite_on_every_rank_and_in_the_norm() {
    for (of, is_nan) in [(1e6f32, false), (f32::INFINITY, false), (f32::NAN, true)] {
        for average in [Average::Sum, Average::Mean] {
            let all = sum_of(|rank| if rank == 1 { of } else { 1.0 }, 3, average);
            let shows = |grad: f64| if is_nan { grad.is_nan() } else { grad == f64::INFINITY };
            assert!(all.iter().all(|&(grad, norm)| shows(grad.into()) && shows(norm)), "{of}: {all:?}");
        }
    }
}
