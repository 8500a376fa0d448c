//! Data parallelism: the bits of one device, whatever the ranks, on the default engine and on one with threads. A small model,
//! and runs of it on one device in the order of additions of several ranks.

mod compress;
#[path = "../gpt/mod.rs"]
mod gpt;
mod join;
mod overlap;
mod passes;
#[path = "../comm/port.rs"]
mod port;
mod power_sgd;
mod power_sgd_twin;
mod sync_batch_norm;
mod unused;

use phalanx_nn::autograd::ContextMode;
use std::sync::Arc;

use phalanx_kernels as kernels;
use phalanx_nn::autograd::Var;
use phalanx_nn::{
    AdamW, BatchNorm, BatchNormConfig, Group, Linear, LinearConfig, Module, Optimizer, Parameter, Parameters,
    Rule, Scope, grad_norm, parameters,
};
use phalanx_parallel::comm::Comm;
use phalanx_parallel::data_parallel::{
    AllReduce, Average, Bucket, BucketHook, Ddp, DdpConfig, PendingBucket,
};
use phalanx_parallel::engine::{Engine, EngineConfig, Lane};
use phalanx_parallel::{Result, launch};
use phalanx_tensor::{Context, DType, Device, Tensor};

use crate::gpt::Trained;

/// The same over ranks.
fn together(dtype: DType, ranks: usize, micros: usize, steps: u64, config: &DdpConfig) -> Trained {
    let run = |rank: launch::Rank| -> Result<Trained> {
        let model = gpt::model(dtype, rank.device());
        let config = DdpConfig { grad_dtype: Some(DType::F32), ..config.clone() };
        let ddp = Ddp::new(&model, rank.comm().clone(), config)?;
        let mut optimizer = gpt::optimizer(model.parameters());
        let mut norms = Vec::new();
        for step in 0..steps {
            for (number, rows) in gpt::rows(ranks, rank.rank(), micros).into_iter().enumerate() {
                let loss = gpt::loss(&model, step, rows)?;
                let _accumulate = (number + 1 < micros).then(|| ddp.no_sync());
                ddp.backward(&loss)?;
            }
            norms.push(gpt::update(&mut optimizer, grad_norm(&model.parameters())?)?);
        }
        let mut state = gpt::bytes(&optimizer.state_dict()?);
        state.sort();
        Ok((norms, gpt::bytes(&phalanx_nn::state_dict(&model)), state))
    };
    let mut all = launch::threads(ranks, run).unwrap();
    let first = all.swap_remove(0);
    assert!(all.iter().all(|other| *other == first), "ranks differ");
    first
}

#[test]
fn every_number_of_ranks_and_micro_batches_has_the_bits_of_one_device() {
    for (dtype, micros) in [(DType::F32, 1), (DType::F32, 2), (DType::BF16, 1)] {
        for ranks in [1, 2, 3, 4] {
            let wanted = gpt::alone(dtype, ranks, micros, 4);
            assert!(wanted.0.iter().all(|&norm| norm > gpt::CLIP), "clipping has to act");
            for bucket_bytes in [1, 1 << 12, 1 << 25] {
                let config =
                    DdpConfig { bucket_bytes, first_bucket_bytes: bucket_bytes, ..DdpConfig::default() };
                let got = together(dtype, ranks, micros, 4, &config);
                assert_eq!(got.0, wanted.0, "{dtype}, {ranks} ranks, {micros} micro-batches");
                assert!(got == wanted, "{dtype}, {ranks} ranks, {micros} micro-batches");
            }
        }
    }
}

/// Two maps, of which a rank may use one.
struct Branches {
    a: phalanx_nn::Linear,
    b: phalanx_nn::Linear,
}
phalanx_nn::parameters!(Branches { a, b });

fn branches(rank: &launch::Rank) -> Branches {
    let scope = Scope::new(1, DType::F32, rank.device());
    let linear = |name: &str| LinearConfig::new(2, 1).with_bias(false).init(&scope.child(name)).unwrap();
    Branches { a: linear("a"), b: linear("b") }
}

fn ones(rank: &launch::Rank) -> Var {
    Var::from_slice(&[1f32, 1.0], &[1, 2], rank.device()).unwrap()
}

fn grads(model: &Branches) -> Vec<Option<Vec<f32>>> {
    model.parameters().iter().map(|p| p.grad().unwrap().map(|g| g.to_vec().unwrap())).collect()
}

#[test]
fn a_gradient_that_no_rank_has_stays_away_and_comes_back() {
    let config = DdpConfig { find_unused: true, average: Average::Mean, ..DdpConfig::default() };
    let all = launch::threads(2, |rank| -> Result<_> {
        let (model, x) = (branches(&rank), ones(&rank));
        let ddp = Ddp::new(&model, rank.comm().clone(), config.clone())?;
        let mut seen = Vec::new();
        // Both use a; rank 1 uses b; no rank uses a.
        for uses in [[true, false], [true, rank.rank() == 1], [false, true]] {
            let mut y = x.sum_all()?;
            y = if uses[0] { y.add(&model.a.forward(&x)?.sum_all()?)? } else { y };
            y = if uses[1] { y.add(&model.b.forward(&x)?.sum_all()?)? } else { y };
            ddp.backward(&y)?;
            seen.push(grads(&model));
            model.parameters().iter().try_for_each(Parameter::zero_grad)?;
        }
        Ok(seen)
    });
    let (one, half) = (Some(vec![1.0, 1.0]), Some(vec![0.5, 0.5]));
    let wanted = vec![vec![one.clone(), None], vec![one.clone(), half], vec![None, one]];
    assert_eq!(all.unwrap(), [wanted.clone(), wanted]);
}

#[test]
fn a_missing_gradient_is_named_on_every_rank() {
    let run = |rank: launch::Rank| -> Result<()> {
        let (model, x) = (branches(&rank), ones(&rank));
        let ddp = Ddp::new(&model, rank.comm().clone(), DdpConfig::default())?;
        let used = if rank.rank() == 1 { &model.a } else { &model.b };
        ddp.backward(&used.forward(&x)?.sum_all()?)
    };
    let error = launch::threads(3, run).unwrap_err().to_string();
    assert!(error.contains("weight") && error.contains("find_unused"), "{error}");
}

#[test]
fn different_models_are_refused() {
    let run = |rank: launch::Rank| -> Result<()> {
        let width = if rank.rank() == 2 { 3 } else { 2 };
        let model = LinearConfig::new(width, 1).init(&Scope::new(1, DType::F32, rank.device()))?;
        Ddp::new(&model, rank.comm().clone(), DdpConfig::default()).map(|_| ())
    };
    let error = launch::threads(3, run).unwrap_err().to_string();
    assert!(error.contains("[2]") && error.contains("weight"), "{error}");
}

#[test]
fn values_and_running_statistics_are_rank_0s_after_a_pass_and_buckets_follow_arrival() {
    let all = launch::threads(2, |rank| -> Result<_> {
        let scope = Scope::new(rank.rank() as u64, DType::F32, rank.device());
        let model: BatchNorm = BatchNormConfig::new(2).init_1d(&scope.child("n"))?;
        let comm: Comm = rank.comm().clone();
        let first = LinearConfig::new(2, 2).init(&scope.child("l"))?;
        let net = Net { linear: first, norm: model };
        let config = DdpConfig { first_bucket_bytes: 1, bucket_bytes: 1, ..DdpConfig::default() };
        let ddp = Ddp::new(&net, comm, config)?;
        let before = ddp.buckets();
        let x = Var::from_slice(&[1f32, 2.0, 3.0, 5.0 + rank.rank() as f32], &[2, 2], rank.device())?;
        let train = Context::with(|c| c.set_train(true));
        ddp.backward(&net.norm.forward(&net.linear.forward(&x)?)?.sum_all()?)?;
        drop(train);
        let state: Vec<Vec<u8>> =
            phalanx_nn::state_dict(&net).iter().map(|(_, t)| t.to_bytes().unwrap()).collect();
        Ok((state, before, ddp.buckets()))
    });
    let all = all.unwrap();
    assert_eq!(all[0], all[1]);
    // The map is registered last and computes first, so its gradients come last.
    let of_map = |buckets: &[Vec<String>]| buckets.iter().map(|b| b[0].starts_with("l.")).collect::<Vec<_>>();
    assert_eq!(of_map(&all[0].1), [true, true, false, false], "against the order of registration");
    assert_eq!(of_map(&all[0].2), [false, false, true, true], "in the order of arrival");
}

/// A norm behind a map.
struct Net {
    linear: phalanx_nn::Linear,
    norm: BatchNorm,
}
phalanx_nn::parameters!(Net { norm, linear });

/// Two maps with a bend between them, and one that is seldom used.
struct Small {
    a: Linear,
    b: Linear,
    spare: Linear,
}
parameters!(Small { spare, a, b });

impl Small {
    pub fn new(device: Device) -> Small {
        let scope = Scope::new(11, DType::F32, device);
        let linear = |name: &str, from, to| LinearConfig::new(from, to).init(&scope.child(name)).unwrap();
        Small { a: linear("a", 3, 8), b: linear("b", 8, 2), spare: linear("spare", 3, 2) }
    }

    /// The loss over `rows` rows of data that are a function of `seed`; `spare` says whether that part is used too.
    pub fn loss(&self, seed: u64, rows: usize, spare: bool) -> Result<Var> {
        let number = |i: usize| (((i as u64 + 1) * 7919 + seed * 104_729) % 1000) as f32 / 500.0 - 1.0;
        let device = self.parameters()[0].device();
        let x: Vec<f32> = (0..rows * 3).map(number).collect();
        let x = Var::from_slice(&x, &[rows, 3], device)?;
        let mut y = self.b.forward(&self.a.forward(&x)?.tanh()?)?;
        if spare {
            y = y.add(&self.spare.forward(&x)?)?;
        }
        let target: Vec<f32> = (0..rows * 2).map(|i| number(i * 31 + 5)).collect();
        let error = y.sub(&Var::from_slice(&target, &[rows, 2], device)?)?;
        Ok(error.mul(&error)?.sum_all()?)
    }

    pub fn optimizer(&self) -> Optimizer<AdamW> {
        AdamW::default().init(Group::decay_matrices(self.parameters(), 1e-2, 0.1)).unwrap()
    }

    /// The values' bytes.
    pub fn bytes(&self) -> Vec<Vec<u8>> {
        self.parameters().iter().map(|p| p.tensor().to_bytes().unwrap()).collect()
    }

    pub fn grads(&self) -> Vec<Option<Vec<f32>>> {
        self.parameters().iter().map(|p| p.grad().unwrap().map(|g| g.to_vec().unwrap())).collect()
    }

    pub fn zero_grad(&self) -> Result<()> {
        Ok(self.parameters().iter().try_for_each(Parameter::zero_grad)?)
    }
}

/// Runs `shares` backward one after the other, adds their gradients in order, each times `scale`, and leaves the sums.
fn add_shares(model: &Small, scale: f64, shares: impl IntoIterator<Item = impl FnOnce() -> Result<()>>) {
    let parameters = model.parameters();
    let mut sums: Vec<Option<Tensor>> = vec![None; parameters.len()];
    for share in shares {
        share().unwrap();
        for (sum, parameter) in sums.iter_mut().zip(&parameters) {
            let Some(mut grad) = parameter.take_grad().unwrap() else { continue };
            if scale != 1.0 {
                kernels::scale_(&mut grad, scale).unwrap();
            }
            match sum {
                Some(sum) => kernels::accumulate_(sum, &grad).unwrap(),
                None => *sum = Some(grad),
            }
        }
    }
    parameters.iter().zip(sums).for_each(|(parameter, sum)| parameter.set_grad(sum));
}

/// With threads for communication.
fn threaded() -> Option<Arc<Engine>> {
    let config = EngineConfig::new().lane(Lane::Priority, 2);
    Some(Arc::new(Engine::threaded(&config).unwrap()))
}

#[test]
fn an_engine_with_threads_gives_the_same_bits() {
    let run = |engine: fn() -> Option<Arc<Engine>>| {
        let body = |rank: launch::Rank| -> Result<_> {
            let model = Small::new(rank.device());
            let config = DdpConfig {
                first_bucket_bytes: 1,
                bucket_bytes: 40,
                average: Average::Mean,
                find_unused: true,
                engine: engine(),
                ..DdpConfig::default()
            };
            let ddp = Ddp::new(&model, rank.comm().clone(), config)?;
            let mut optimizer = model.optimizer();
            for step in 0..6 {
                ddp.backward(&model.loss(step * 3 + rank.rank() as u64, 2, step % 2 == 0)?)?;
                optimizer.step()?;
                optimizer.zero_grad()?;
            }
            Ok(model.bytes())
        };
        launch::threads(3, body).unwrap()
    };
    let plain = run(|| None);
    assert!(plain.iter().all(|bytes| *bytes == plain[0]));
    assert_eq!(run(threaded), plain);
    assert_eq!(run(|| Some(Arc::new(Engine::serial()))), plain);
}

/// Refuses the second bucket of rank 1.
#[derive(Debug)]
struct Refuses;

impl BucketHook for Refuses {
    fn start(&self, bucket: &Bucket<'_>, comm: &Comm) -> Result<PendingBucket> {
        if bucket.index == 1 && comm.rank() == 1 {
            return Err(phalanx_nn::Error::invalid("hook", "not this one").into());
        }
        AllReduce.start(bucket, comm)
    }
}

#[test]
fn a_bucket_that_fails_is_named_with_its_cause() {
    for engine in [threaded, || None] {
        let body = |rank: launch::Rank| -> Result<()> {
            let model = Small::new(rank.device());
            let config = DdpConfig {
                first_bucket_bytes: 1,
                bucket_bytes: 1,
                hook: Arc::new(Refuses),
                engine: engine(),
                ..DdpConfig::default()
            };
            assert!(model.parameters().len() > 3);
            let ddp = Ddp::new(&model, rank.comm().clone(), config)?;
            let outcome = ddp.backward(&model.loss(1, 2, true)?);
            let error = outcome.as_ref().unwrap_err().to_string();
            if rank.rank() == 1 {
                assert!(error.contains("`bucket 1` failed") && error.contains("not this one"), "{error}");
            }
            outcome
        };
        let error = launch::threads(2, body).unwrap_err().to_string();
        assert!(error.contains("rank 1") && error.contains("not this one"), "{error}");
    }
}

#[test]
fn an_engine_without_the_lane_is_refused() {
    let engine = Engine::threaded(&EngineConfig::new().lane(Device::CPU, 1)).unwrap();
    let config = DdpConfig { engine: Some(Arc::new(engine)), ..DdpConfig::default() };
    let body = |rank: launch::Rank| -> Result<()> {
        let model = Small::new(rank.device());
        Ddp::new(&model, rank.comm().clone(), config.clone()).map(|_| ())
    };
    let error = launch::threads(1, body).unwrap_err().to_string();
    assert!(error.contains("priority lane"), "{error}");
}
