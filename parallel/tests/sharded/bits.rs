//! The bits of one device: under models, dtypes and rules out of the ordinary, under every choice of the configuration, and with
//! running statistics.

use phalanx_nn::autograd::ContextMode;
use std::sync::Arc;

use phalanx_nn::autograd::Var;
use phalanx_nn::models::{Decoder, GptConfig, LlamaConfig, ModelConfig, RecomputeMode};
use phalanx_nn::{
    Adadelta, Adafactor, Adagrad, AdamW, Adamax, BatchNormConfig, Clip, Conv2dConfig, Group, Init, Lamb,
    Lion, Module, Parameter, Rmsprop, Rule, Scope, Sequential, Sgd, WrappedUnit, parameters,
};
use phalanx_parallel::data_parallel::{Average, DataParallel, Ddp, DdpConfig};
use phalanx_parallel::sharded::{Ownership, Prefetch, Reshard, Zero, ZeroConfig, ZeroStage};
use phalanx_parallel::{Result, launch};
use phalanx_tensor::{Context, DType, Device};

use crate::gpt::{Trained, alone, alone_in_groups, bytes};
use crate::{Course, Rules, STAGES, Task, config, same, together};

/// Elementwise maps: `x + tanh(w s)` for each of its parameters; of a shape, a dtype.
struct Odds {
    w: Vec<Parameter>,
}
parameters!(Odds { w });

impl Odds {
    fn new(scope: &Scope, shapes: &[(&[usize], DType)]) -> Odds {
        let w = shapes.iter().enumerate().map(|(i, (shape, dtype))| {
            let init = Init::Normal { mean: 0.0, std: 0.5 };
            scope.with_dtype(*dtype).parameter(&format!("w{i}"), shape, init).unwrap()
        });
        Odds { w: w.collect() }
    }
}

impl Module for Odds {
    fn forward(&self, x: &Var) -> phalanx_nn::Result<Var> {
        let mut x = x.clone();
        for w in &self.w {
            let part = w.var().mul(&x.to(w.dtype())?)?.tanh()?.sum_all()?.to(x.dtype())?;
            x = x.add(&part.mul_scalar(0.1)?)?;
        }
        Ok(x)
    }
}

/// Units of many kinds, one of them inside another, one twice, some parameters in none.
struct Many {
    empty: WrappedUnit<Odds>,
    odd: WrappedUnit<Odds>,
    outer: WrappedUnit<Outer>,
    again: WrappedUnit<Odds>,
    free: Odds,
    recompute: bool,
}
parameters!(Many { empty, odd, outer, again, free });

struct Outer {
    inner: WrappedUnit<Odds>,
    own: Odds,
}
parameters!(Outer { inner, own });

impl Module for Outer {
    fn forward(&self, x: &Var) -> phalanx_nn::Result<Var> {
        self.own.forward(&self.inner.forward(x)?)
    }
}

impl Many {
    fn new(device: Device, dtype: DType, recompute: bool) -> Many {
        let scope = Scope::new(4, dtype, device);
        let of = |name: &str, shapes: &[&[usize]]| {
            Arc::new(Odds::new(&scope.child(name), &shapes.iter().map(|&s| (s, dtype)).collect::<Vec<_>>()))
        };
        let odd = of("odd", &[&[1], &[7], &[63], &[8, 8], &[65], &[]]);
        let mixed = [(&[3usize, 5][..], DType::F32), (&[64], dtype), (&[129], DType::F64), (&[2], dtype)];
        let inner = WrappedUnit::new(of("inner", &[&[130], &[1]]));
        let own = Odds::new(&scope.child("own"), &mixed);
        Many {
            empty: WrappedUnit::new(of("empty", &[])),
            again: WrappedUnit::new(odd.clone()),
            odd: WrappedUnit::new(odd),
            outer: WrappedUnit::new(Arc::new(Outer { inner, own })),
            free: Odds::new(&scope.child("free"), &[(&[33], dtype), (&[2, 2], DType::F32)]),
            recompute,
        }
    }
}

impl Task for Many {
    fn loss(&self, step: u64, row: usize) -> Result<Var> {
        // At step 0 there are gradients of -0.
        let x = if step == 0 { 0.0 } else { ((row * 5 + step as usize * 3) % 7) as f32 - 2.5 };
        let x = Var::from_slice(&[x], &[], self.free.w[0].device())?;
        let x = self.empty.call(&x, false, |m, x| m.forward(x))?;
        let x = self.odd.call(&x, self.recompute, |m, x| m.forward(x))?;
        let x = self.outer.call(&x, self.recompute, |m, x| m.forward(x))?;
        let x = self.again.call(&x, false, |m, x| m.forward(x))?;
        Ok(self.free.forward(&x)?.mul_scalar(-1.0)?.sum_all()?)
    }
}

const RULES: &[(&str, Rules)] = &[
    ("sgd", || Box::new(Sgd::default())),
    ("momentum", || Box::new(Sgd { momentum: 0.9, ..Sgd::default() })),
    ("lion", || Box::new(Lion::default())),
    ("adagrad", || Box::new(Adagrad { initial_accumulator_value: 0.1, ..Adagrad::default() })),
    ("rmsprop", || Box::new(Rmsprop { momentum: 0.9, centered: true, ..Rmsprop::default() })),
    ("adamw", || Box::new(AdamW::default())),
    ("adadelta", || Box::new(Adadelta::default())),
    ("lamb", || Box::new(Lamb::default())),
    ("adafactor", || Box::new(Adafactor::default())),
    ("adamax", || Box::new(Adamax::default())),
];

#[test]
fn odd_units_and_every_rule() {
    for (number, &(name, rule)) in RULES.iter().enumerate() {
        for (place, (dtype, grads, ranks, micros)) in [
            (DType::F32, None, 3, 1),
            (DType::F64, None, 5, 2),
            (DType::BF16, Some(DType::F32), 8, 1),
            // Of two bf16 numbers the sum is rounded once, of more once at the end.
            (DType::BF16, None, 2, 2),
            (DType::F16, Some(DType::F32), 3, 2),
        ]
        .into_iter()
        .enumerate()
        {
            let stage = STAGES[(number + place) % 3];
            let ownership = [Ownership::Even, Ownership::Whole][(number / 3 + place) % 2];
            for steps in [1, 3] {
                let course = Course { rule, ranks, micros, steps, grads };
                let wanted = course.alone(|device| Many::new(device, dtype, false));
                let config = ZeroConfig { ownership, ..ZeroConfig::new(stage) };
                let what =
                    format!("{name}, {dtype}, {ranks} ranks, {micros} micros, {steps} steps, {config:?}");
                let got = course.together(&config, |device| Many::new(device, dtype, micros == 2));
                same(&got.unwrap_or_else(|e| panic!("{what}: {e}")), &wanted, &what);
            }
        }
    }
}

/// A decoder over a small batch.
impl Task for Decoder {
    fn loss(&self, step: u64, row: usize) -> Result<Var> {
        crate::gpt::loss(self, step, row..row + 1)
    }
}

#[test]
fn decoders_tied_and_not_with_every_recomputation() {
    let gpt =
        |tied| ModelConfig::Gpt(GptConfig { tied, ..GptConfig::new(37, 8, 3, 2, 16).with_dropout(0.1) });
    let llama =
        |tied| ModelConfig::Llama(LlamaConfig { tied, key_heads: 1, ..LlamaConfig::new(37, 8, 3, 2, 16) });
    let stream = |config: GptConfig| ModelConfig::Gpt(GptConfig { stream: Some(DType::F32), ..config });
    for (name, config, dtype) in [
        ("gpt", gpt(false), DType::F32),
        ("tied gpt", gpt(true), DType::F64),
        ("llama", llama(false), DType::F32),
        ("tied llama", llama(true), DType::BF16),
        ("f32 stream", stream(GptConfig::new(37, 8, 3, 2, 16)), DType::BF16),
    ] {
        let grads = (dtype == DType::BF16).then_some(DType::F32);
        let course = Course { rule: || Box::new(AdamW::default()), ranks: 3, micros: 2, steps: 2, grads };
        let build = |device, mode| {
            let mut model = config.init(&Scope::new(3, dtype, device)).unwrap();
            model.set_recompute(mode);
            model
        };
        let wanted = course.alone(|device| build(device, RecomputeMode::Never));
        let modes = [RecomputeMode::Never, RecomputeMode::ExceptLast, RecomputeMode::Always];
        for (number, mode) in modes.into_iter().enumerate() {
            let reshard = [Reshard::Always, Reshard::ExceptLast, Reshard::Never][number];
            for (stage, reshard) in [(STAGES[number % 2], reshard), (ZeroStage::Parameters, reshard)] {
                let config = ZeroConfig { reshard, ..ZeroConfig::new(stage) };
                let what = format!("{name}, {mode:?}, {stage:?}, {reshard:?}");
                let got = course.together(&config, |device| build(device, mode));
                same(&got.unwrap_or_else(|e| panic!("{what}: {e}")), &wanted, &what);
            }
        }
    }
}

#[test]
fn choices_change_no_bit() {
    let wanted = alone(DType::F32, 3, 2, 3);
    for stage in STAGES {
        for (ownership, reshard, ahead, offload) in [
            (Ownership::Whole, Reshard::ExceptLast, true, None),
            (Ownership::Even, Reshard::Always, false, None),
            (Ownership::Even, Reshard::Never, true, None),
            (Ownership::Whole, Reshard::Always, true, Some(Device::Cpu(9))),
        ] {
            let prefetch = Prefetch::from(ahead);
            let config = ZeroConfig { ownership, reshard, prefetch, offload, ..config(stage) };
            same(&together(DType::F32, 3, 2, 3, &config), &wanted, &format!("{config:?}"));
        }
    }
    let offload = Some(Device::Cpu(9));
    let config = ZeroConfig { offload, offload_parameters: false, ..config(ZeroStage::Parameters) };
    same(&together(DType::F32, 3, 2, 3, &config), &wanted, "device shards stay");
}

#[test]
fn f32_shares_of_a_bf16_model_are_its_master_weights() {
    let wanted = alone(DType::BF16, 3, 1, 3);
    for stage in STAGES {
        let config = ZeroConfig { shard_dtype: Some(DType::F32), ..config(stage) };
        let got = together(DType::BF16, 3, 1, 3, &config);
        assert_eq!(got.0, wanted.0, "{stage:?}");
        assert!(got.2 == wanted.2, "{stage:?}: optimizer state differs");
        let shares: Vec<_> =
            got.1.into_iter().map(|(name, values)| (format!("{name}.master"), values)).collect();
        let masters = wanted.2.iter().filter(|(name, _)| name.ends_with(".master"));
        assert!(masters.clone().count() == shares.len() && masters.clone().all(|m| shares.contains(m)));
    }
}

#[test]
fn groups_that_share_a_copy_add_their_ranks_first() {
    for (dtype, grads, ranks, sharing) in [
        (DType::F64, DType::F64, 4, 2),
        (DType::F32, DType::F32, 6, 3),
        (DType::BF16, DType::F32, 6, 2),
        (DType::F32, DType::F32, 3, 1),
    ] {
        let wanted = alone_in_groups(dtype, [ranks / sharing, sharing], 2, 2, grads);
        for stage in STAGES {
            let (shard_ranks, grad_dtype) = (Some(sharing), Some(grads));
            let config = ZeroConfig { shard_ranks, grad_dtype, ..config(stage) };
            same(&together(dtype, ranks, 2, 2, &config), &wanted, &format!("{ranks} ranks, {config:?}"));
        }
    }
}

#[test]
fn a_mean_is_the_sum_divided_by_the_ranks() {
    let sum = alone(DType::F32, 4, 1, 1);
    for stage in STAGES {
        let config = ZeroConfig { average: Average::Mean, ..config(stage) };
        // Four is a power of two, so nothing is rounded.
        assert_eq!(together(DType::F32, 4, 1, 1, &config).0[0] * 4.0, sum.0[0], "{stage:?}");
    }
}

#[test]
fn settings_that_do_not_fit_are_refused() {
    let try_it = |config: ZeroConfig| {
        let run = |rank: launch::Rank| {
            let model = crate::gpt::model(DType::F32, rank.device());
            phalanx_parallel::sharded::Zero::new(&model, rank.comm().clone(), config.clone()).map(drop)
        };
        launch::threads(3, run).unwrap_err().to_string()
    };
    let shards = try_it(ZeroConfig { shard_ranks: Some(2), ..config(ZeroStage::Parameters) });
    assert!(shards.contains("shard_ranks 2") && shards.contains("3 ranks"), "{shards}");
    let dtype = try_it(ZeroConfig { shard_dtype: Some(DType::I64), ..config(ZeroStage::Parameters) });
    assert!(dtype.contains("shard_dtype i64"), "{dtype}");
    let narrow = try_it(ZeroConfig { shard_dtype: Some(DType::BF16), ..config(ZeroStage::Parameters) });
    assert!(narrow.contains("wte.weight") && narrow.contains("shard_dtype bf16"), "{narrow}");
    let prefetch = Prefetch { limit: 0, ..Prefetch::default() };
    let none = try_it(ZeroConfig { prefetch, ..config(ZeroStage::Parameters) });
    assert!(none.contains("prefetch limit of 0"), "{none}");
    let grads = try_it(ZeroConfig { grad_dtype: Some(DType::Bool), ..config(ZeroStage::Parameters) });
    assert!(grads.contains("grad_dtype bool"), "{grads}");
}

/// A wrapper for a rank's model.
type Wrap<'a> = &'a (dyn Fn(&launch::Rank, &Sequential) -> Result<Box<dyn DataParallel>> + Sync);

/// Convolutions with running statistics, trained by ranks that share the batch, whatever they keep.
fn train(rank: &launch::Rank, wrap: Wrap<'_>) -> Result<Trained> {
    let scope = Scope::new(9, DType::F32, rank.device());
    let layer = |i: usize, inputs: usize| {
        let scope = scope.child(i);
        let conv = Conv2dConfig::new(inputs, 5, [3, 3]).init(&scope.child("conv")).unwrap();
        let norm = BatchNormConfig::new(5).init_2d(&scope.child("norm")).unwrap();
        Sequential::new().with(conv).with(norm)
    };
    let model = Sequential::new()
        .with(WrappedUnit::new(Arc::new(layer(0, 2))))
        .with(WrappedUnit::new(Arc::new(layer(1, 5))));
    let share = wrap(rank, &model)?;
    let _train = Context::with(|c| c.set_train(true));
    let mut optimizer = AdamW::default().init(vec![Group::new(share.parameters(), 1e-2)])?;
    let mut norms = Vec::new();
    for step in 0..3 {
        for micro in 0..2 {
            let values: Vec<f32> = (0..2 * 2 * 7 * 7)
                .map(|i| ((i * 37 + rank.rank() * 11 + step * 5 + micro) % 19) as f32 / 9.0)
                .collect();
            let x = Var::from_slice(&values, &[2, 2, 7, 7], rank.device())?;
            let _accumulate = (micro == 0).then(|| share.no_sync());
            share.backward(&model.forward(&x)?.square()?.sum_all()?)?;
        }
        let norm = share.grad_norm()?;
        optimizer.step_scaled(Clip::new(norm, 1.0).scale)?;
        share.zero_grad()?;
        share.updated()?;
        norms.push(norm);
    }
    let mut state = bytes(&share.full_optimizer_state(optimizer.state_dict()?, &optimizer.kinds())?);
    state.sort();
    let values = bytes(&share.full_state_dict(&model)?);
    // An evaluation of everything, outside of the units.
    let all = share.gathered()?;
    let here = bytes(&phalanx_nn::state_dict(&model));
    assert!(rank.rank() > 0 || here == values);
    drop(all);
    Ok((norms, here, state))
}

#[test]
fn convolutions_with_running_statistics_under_every_wrapper() {
    let all = |wrap: Wrap<'_>| launch::threads(3, |rank| train(&rank, wrap)).unwrap();
    let ddp = all(&|rank, model| Ok(Box::new(Ddp::new(model, rank.comm().clone(), DdpConfig::default())?)));
    for stage in STAGES {
        let zero =
            all(&|rank, model| Ok(Box::new(Zero::new(model, rank.comm().clone(), ZeroConfig::new(stage))?)));
        for (got, wanted) in zero.iter().zip(&ddp) {
            assert!((&got.0, &got.1) == (&wanted.0, &wanted.1), "{stage:?}");
        }
        assert!(zero[0].2 == ddp[0].2, "{stage:?}");
    }
}
