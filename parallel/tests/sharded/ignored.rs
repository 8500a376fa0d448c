//! Parameters that `Zero` leaves alone: every rank trains its own, and the rest has the bits of one device.

use phalanx_kernels as kernels;
use phalanx_nn::Rule;
use phalanx_nn::autograd::Var;
use phalanx_nn::{
    AdamW, BatchNorm, BatchNormConfig, Clip, Group, Init, Linear, LinearConfig, Module, Optimizer, Parameter,
    Parameters, Scope, WrappedUnit, grad_norm, parameters, state_dict,
};
use phalanx_parallel::data_parallel::DataParallel;
use phalanx_parallel::sharded::{Zero, ZeroConfig};
use phalanx_parallel::{Result, launch};
use phalanx_tensor::{DType, Device, Tensor};

use crate::STAGES;
use crate::gpt::bytes;

/// A map and an adapter's scale in a unit, a map in another one, and a head in none. Ranks have scales and heads of their own.
struct Model {
    first: WrappedUnit<Scaled>,
    second: WrappedUnit<Linear>,
    head: Linear,
}
parameters!(Model { first, second, head });

struct Scaled {
    map: Linear,
    scale: Parameter,
}
parameters!(Scaled { map, scale });

impl Module for Scaled {
    fn forward(&self, x: &Var) -> phalanx_nn::Result<Var> {
        Ok(self.map.forward(x)?.mul(&self.scale.var())?)
    }
}

impl Model {
    fn new(device: Device, rank: usize) -> Model {
        let scope = Scope::new(8, DType::F32, device);
        let map = |name: &str, outputs| LinearConfig::new(9, outputs).init(&scope.child(name)).unwrap();
        let scale = scope.parameter("first.scale", &[9], Init::Constant(1.0 + rank as f64)).unwrap();
        let head = map("head", 3);
        kernels::fill_(&mut head.weight.tensor(), 0.1 * (1 + rank) as f64).unwrap();
        Model {
            first: WrappedUnit::of(Scaled { map: map("first.map", 9), scale }),
            second: WrappedUnit::of(map("second", 9)),
            head,
        }
    }

    fn loss(&self, step: usize, rank: usize) -> Result<Var> {
        let x: Vec<f32> = (0..18).map(|i| ((i * 31 + rank * 7 + step * 3) % 19) as f32 / 9.0 - 1.0).collect();
        let x = Var::from_slice(&x, &[2, 9], self.head.weight.device())?;
        let x = self.second.forward(&self.first.forward(&x)?.tanh()?)?;
        Ok(self.head.forward(&x)?.square()?.sum_all()?)
    }

    /// The parameters that are each rank's own, or those that are not.
    fn part(&self, own: bool) -> Vec<Parameter> {
        let is_own = |p: &Parameter| p.name().ends_with("scale") || p.name().starts_with("head");
        self.parameters().into_iter().filter(|p| is_own(p) == own).collect()
    }
}

fn optimizer(shared: Vec<Parameter>, own: Vec<Parameter>) -> Optimizer<AdamW> {
    AdamW::default().init(vec![Group::new(shared, 1e-2), Group::new(own, 2e-2)]).unwrap()
}

fn config(config: ZeroConfig) -> ZeroConfig {
    ZeroConfig { ignored: vec!["*.scale".into(), "head".into()], ..config }
}

type Bytes = Vec<(String, Vec<u8>)>;

fn sorted(mut bytes: Bytes) -> Bytes {
    bytes.sort();
    bytes
}

/// Every rank's norms and values, and rank 0's optimizer state, after three steps on one device: a model for each rank, whose shared
/// gradients are added in order of the ranks.
fn alone(ranks: usize) -> (Vec<(Vec<f64>, Bytes)>, Bytes) {
    let models: Vec<Model> = (0..ranks).map(|rank| Model::new(Device::CPU, rank)).collect();
    let mut optimizers: Vec<_> = models.iter().map(|m| optimizer(m.part(false), m.part(true))).collect();
    let mut norms = Vec::new();
    for step in 0..3 {
        for (rank, model) in models.iter().enumerate() {
            model.loss(step, rank).unwrap().backward().unwrap();
        }
        for (number, parameter) in models[0].part(false).into_iter().enumerate() {
            let mut sum = parameter.grad().unwrap().unwrap();
            for model in &models[1..] {
                kernels::accumulate_(&mut sum, &model.part(false)[number].grad().unwrap().unwrap()).unwrap();
            }
            for model in &models {
                model.part(false)[number].set_grad(Some(sum.copy().unwrap()));
            }
        }
        norms.push(grad_norm(&models[0].part(false)).unwrap());
        for optimizer in &mut optimizers {
            optimizer.step_scaled(Clip::new(norms[step], 1.0).scale).unwrap();
            optimizer.zero_grad().unwrap();
        }
    }
    let state = sorted(bytes(&optimizers[0].state_dict().unwrap()));
    (models.iter().map(|model| (norms.clone(), bytes(&state_dict(model)))).collect(), state)
}

type Entries = Vec<(String, Tensor)>;

#[test]
fn every_rank_trains_its_own_and_the_rest_has_the_bits_of_one_device() {
    for (ranks, stage) in (1..=4).flat_map(|ranks| STAGES.map(|stage| (ranks, stage))) {
        let run = |rank: launch::Rank| -> Result<(Vec<f64>, Bytes, [Entries; 2])> {
            let model = Model::new(rank.device(), rank.rank());
            let zero = Zero::new(&model, rank.comm().clone(), config(ZeroConfig::new(stage)))?;
            let mut optimizer = optimizer(zero.parameters(), model.part(true));
            let mut norms = Vec::new();
            for step in 0..3 {
                let sent = zero.traffic();
                zero.backward(&model.loss(step, rank.rank())?)?;
                assert!(ranks == 1 || zero.traffic().bytes > sent.bytes);
                norms.push(zero.grad_norm()?);
                optimizer.step_scaled(Clip::new(norms[step], 1.0).scale)?;
                zero.zero_grad()?;
                assert!(model.head.weight.grad()?.is_none());
                zero.updated()?;
            }
            let state = zero.full_optimizer_state(optimizer.state_dict()?, &optimizer.kinds())?;
            let full = DataParallel::full_state_dict(&zero, &model)?;
            let _whole = zero.gathered()?;
            Ok((norms, bytes(&state_dict(&model)), [full, state]))
        };
        let mut all = launch::threads(ranks, run).unwrap();
        let (wanted, state) = alone(ranks);
        for (rank, (got, wanted)) in all.iter().zip(&wanted).enumerate() {
            assert_eq!(got.0, wanted.0, "{stage:?}, rank {rank} of {ranks}");
            assert!(got.1 == wanted.1, "{stage:?}, rank {rank} of {ranks}");
        }
        let [full, full_state] = all.swap_remove(0).2;
        assert!(bytes(&full) == wanted[0].1, "a state dict has rank 0's");
        assert!(sorted(bytes(&full_state)) == state, "{stage:?} over {ranks}");
        // They are loaded by another number of ranks, which all have rank 0's then.
        let load = |rank: launch::Rank| -> Result<[Entries; 2]> {
            let model = Model::new(rank.device(), 7);
            let zero = Zero::new(&model, rank.comm().clone(), config(ZeroConfig::new(stage)))?;
            let mut optimizer = optimizer(zero.parameters(), model.part(true));
            zero.load_full_state_dict(full.clone())?;
            optimizer.load_state_dict(zero.part_of_optimizer_state(full_state.clone())?)?;
            let state = zero.full_optimizer_state(optimizer.state_dict()?, &optimizer.kinds())?;
            Ok([zero.full_state_dict()?, state])
        };
        let [again, again_state] = launch::threads(5 - ranks, load).unwrap().swap_remove(0);
        assert!(bytes(&again) == bytes(&full) && sorted(bytes(&again_state)) == state, "{stage:?}");
    }
}

#[test]
fn what_a_refused_pass_has_added_to_them_is_dropped_too_or_is_to_be_zeroed() {
    for stage in STAGES {
        let run = |rank: launch::Rank| -> Result<()> {
            let model = Model::new(rank.device(), rank.rank());
            let zero = Zero::new(&model, rank.comm().clone(), config(ZeroConfig::new(stage)))?;
            let grads = || -> Result<Vec<Vec<f32>>> {
                model.part(true).iter().map(|p| Ok(p.grad()?.unwrap().to_vec()?)).collect()
            };
            zero.backward(&model.loss(1, rank.rank())?)?;
            let wanted = grads()?;
            model.loss(2, rank.rank())?.backward().unwrap_err();
            let error = zero.begin().unwrap_err().to_string();
            assert!(error.contains("call `zero.zero_grad()` first"), "{error}");
            zero.zero_grad()?;
            model.loss(2, rank.rank())?.backward().unwrap_err();
            zero.backward(&model.loss(1, rank.rank())?)?;
            assert_eq!(grads()?, wanted);
            Ok(())
        };
        launch::threads(2, run).unwrap();
    }
}

/// A map, a batch norm, and a module that has one.
struct Normed {
    map: Linear,
    norm: BatchNorm,
    tail: Tail,
}
parameters!(Normed { map, norm, tail });

struct Tail {
    map: Linear,
    norm: BatchNorm,
}
parameters!(Tail { map, norm });

#[test]
fn buffers_of_modules_that_are_ignored_are_each_ranks_own() {
    for stage in STAGES {
        let run = |rank: launch::Rank| -> Result<Vec<f32>> {
            let scope = Scope::new(8, DType::F32, rank.device());
            let map = |name: &str| LinearConfig::new(4, 4).init(&scope.child(name));
            let norm = |name: &str| {
                BatchNormConfig::new(4).with_affine(name != "tail.norm").init(&scope.child(name))
            };
            let tail = Tail { map: map("tail.map")?, norm: norm("tail.norm")? };
            let model = Normed { map: map("map")?, norm: norm("norm")?, tail };
            let means = [&model.norm, &model.tail.norm].map(|norm| norm.running_mean.clone().unwrap());
            let fill = || means.iter().try_for_each(|m| kernels::fill_(&mut m.tensor(), rank.rank() as f64));
            fill()?;
            let zero = Zero::new(&model, rank.comm().clone(), ZeroConfig::new(stage).ignoring(&model.tail))?;
            let mut seen: Vec<f32> =
                means.iter().map(|m| Ok(m.tensor().to_vec()?[0])).collect::<Result<_>>()?;
            fill()?;
            let _evaluate = phalanx_nn::autograd::eval();
            let x = Var::new(Tensor::zeros(&[2, 4], DType::F32, rank.device())?);
            let x = model.norm.forward(&model.map.forward(&x)?)?;
            zero.backward(&model.tail.norm.forward(&model.tail.map.forward(&x)?)?.sum_all()?)?;
            seen.extend(
                means.iter().map(|m| Ok(m.tensor().to_vec::<f32>()?[0])).collect::<Result<Vec<_>>>()?,
            );
            Ok(seen)
        };
        assert_eq!(launch::threads(2, run).unwrap(), [[0.0; 4], [0.0, 1.0, 0.0, 1.0]], "{stage:?}");
    }
}

#[test]
fn they_are_named_by_modules_too_and_a_name_without_a_parameter_is_refused() {
    for stage in STAGES {
        let run = |rank: launch::Rank| -> Result<String> {
            let model = Model::new(rank.device(), rank.rank());
            let config = ZeroConfig::new(stage).ignoring(&model.head).ignoring(&model.first.module().scale);
            assert_eq!(config.ignored, ["head.weight", "head.bias", "first.scale"]);
            let zero = Zero::new(&model, rank.comm().clone(), config)?;
            let here = |p: &Parameter| p.tensor().why_withheld().is_none() && p.owner().is_none();
            assert!(model.part(true).iter().all(here));
            drop(zero);
            let model = Model::new(rank.device(), rank.rank());
            let config = ZeroConfig { ignored: vec!["heads".into()], ..ZeroConfig::new(stage) };
            Ok(Zero::new(&model, rank.comm().clone(), config).map(drop).unwrap_err().to_string())
        };
        for message in launch::threads(2, run).unwrap() {
            assert!(message.contains("no parameter called \"heads\""), "{message}");
        }
    }
}
