//! What FSDP adds to a plain split, against one device bit for bit: units inside units, gathers ahead, orders of use that change from
//! pass to pass.

use std::any::TypeId;

use phalanx_nn::autograd::{Var, no_grad};
use phalanx_nn::models::{
    Block as DecoderBlock, Decoder, GptConfig, LlamaConfig, ModelConfig, RecomputeMode,
};
use phalanx_nn::{
    AdamW, Init, Linear, LinearConfig, Module, Parameter, Scope, WrappedUnit, Wrapping, parameters, wrap_by,
    wrap_by_size,
};
use phalanx_parallel::sharded::{BackwardPrefetch, Prefetch, Reshard, Zero, ZeroConfig, ZeroStage};
use phalanx_parallel::{Result, launch};
use phalanx_tensor::{DType, Device, Tensor};

use crate::{Course, STAGES, Task, same};

const WIDTH: usize = 12;

/// `x + scale * second(tanh(first(x)))`: the maps are units inside the block's unit, which has the scale.
struct Block {
    first: WrappedUnit<Linear>,
    second: WrappedUnit<Linear>,
    scale: Parameter,
}
parameters!(Block { first, second, scale });

impl Module for Block {
    fn forward(&self, x: &Var) -> phalanx_nn::Result<Var> {
        let y = self.second.forward(&self.first.forward(x)?.tanh()?)?;
        Ok(x.add(&y.mul(&self.scale.var())?)?)
    }
}

/// Blocks, all of them in a unit or each in one, and a head in none.
struct Nest {
    blocks: WrappedUnit<Vec<WrappedUnit<Block>>>,
    head: Linear,
    recompute: bool,
    /// The blocks that a step uses.
    used: fn(u64) -> Vec<usize>,
}
parameters!(Nest { blocks, head });

impl Nest {
    fn new(device: Device, recompute: bool, used: fn(u64) -> Vec<usize>) -> Nest {
        let scope = Scope::new(6, DType::F32, device);
        let linear = |scope: Scope| WrappedUnit::of(LinearConfig::new(WIDTH, WIDTH).init(&scope).unwrap());
        let block = |i: usize| {
            let scope = scope.child(format!("blocks.{i}"));
            let scale = scope.parameter("scale", &[WIDTH], Init::Constant(0.5)).unwrap();
            let (first, second) = (linear(scope.child("first")), linear(scope.child("second")));
            WrappedUnit::of(Block { first, second, scale })
        };
        let head = LinearConfig::new(WIDTH, 3).init(&scope.child("head")).unwrap();
        Nest { blocks: WrappedUnit::of((0..3).map(block).collect()), head, recompute, used }
    }
}

impl Task for Nest {
    fn loss(&self, step: u64, row: usize) -> Result<Var> {
        let x: Vec<f32> = (0..2 * WIDTH)
            .map(|i| ((i * 31 + row * 7 + step as usize * 3) % 19) as f32 / 9.0 - 1.0)
            .collect();
        let x = Var::from_slice(&x, &[2, WIDTH], self.head.weight.device())?;
        let (used, recompute) = ((self.used)(step), self.recompute);
        let x = self.blocks.call(&x, false, move |blocks, x| {
            let call = |x, &i: &usize| blocks[i].call(&x, recompute, |block, x| block.forward(x));
            used.iter().try_fold(x.clone(), call)
        })?;
        Ok(self.head.forward(&x)?.square()?.sum_all()?)
    }
}

fn course(ranks: usize) -> Course {
    Course { rule: || Box::new(AdamW::default()), ranks, micros: 2, steps: 4, grads: None }
}

const PREFETCHES: [Prefetch; 5] = [
    Prefetch { forward: 1, backward: BackwardPrefetch::Pre, limit: 2 },
    Prefetch { forward: 0, backward: BackwardPrefetch::None, limit: 1 },
    Prefetch { forward: 2, backward: BackwardPrefetch::Post, limit: 9 },
    Prefetch { forward: 9, backward: BackwardPrefetch::Pre, limit: 9 },
    Prefetch { forward: 1, backward: BackwardPrefetch::Post, limit: 3 },
];

#[test]
fn units_inside_units_have_the_bits_of_one_device_whatever_is_gathered_ahead() {
    for ranks in 1..=4 {
        let wanted = course(ranks).alone(|device| Nest::new(device, false, |_| vec![0, 1, 2]));
        let stages = [(ZeroStage::Optimizer, 1), (ZeroStage::Gradients, 1), (ZeroStage::Parameters, 5)];
        for (stage, prefetches) in stages {
            for (number, &prefetch) in PREFETCHES[..prefetches].iter().enumerate() {
                for recompute in [false, true] {
                    let reshard =
                        [Reshard::ExceptLast, Reshard::Always, Reshard::Never][(ranks + number) % 3];
                    let config = ZeroConfig { prefetch, reshard, ..ZeroConfig::new(stage) };
                    let what = format!("{ranks} ranks, recompute {recompute}, {config:?}");
                    let build = |device| Nest::new(device, recompute, |_| vec![0, 1, 2]);
                    let got = course(ranks).together(&config, build);
                    same(&got.unwrap_or_else(|e| panic!("{what}: {e}")), &wanted, &what);
                }
            }
        }
    }
}

#[test]
fn blocks_used_in_another_order_twice_or_not_at_all_have_the_bits_of_one_device() {
    /// Another order in each step; block 1 is left out of one, block 0 used twice in another.
    fn used(step: u64) -> Vec<usize> {
        [vec![2, 0, 1], vec![1, 0, 2], vec![2, 0], vec![0, 1, 0, 2]][step as usize % 4].clone()
    }
    for (ranks, stage) in (1..=4).flat_map(|ranks| STAGES.map(|stage| (ranks, stage))) {
        let build = |device| Nest::new(device, ranks == 3, used);
        let wanted = course(ranks).alone(|device| Nest::new(device, false, used));
        for (number, prefetch) in PREFETCHES.into_iter().enumerate() {
            let reshard = [Reshard::ExceptLast, Reshard::Always][number % 2];
            let config = ZeroConfig { prefetch, find_unused: true, reshard, ..ZeroConfig::new(stage) };
            let what = format!("{ranks} ranks, {config:?}");
            let got = course(ranks).together(&config, build);
            same(&got.unwrap_or_else(|e| panic!("{what}: {e}")), &wanted, &what);
        }
    }
}

#[test]
fn gradients_are_sent_in_the_order_of_the_pass_before_whatever_that_was() {
    fn used(step: u64) -> Vec<usize> {
        [[2, 0, 1], [1, 0, 2], [1, 0, 2], [0, 2, 1]][step as usize % 4].to_vec()
    }
    for (ranks, stage) in (1..=4).flat_map(|ranks| STAGES.map(|stage| (ranks, stage))) {
        let wanted = course(ranks).alone(|device| Nest::new(device, false, used));
        let got =
            course(ranks).together(&ZeroConfig::new(stage), |device| Nest::new(device, ranks > 2, used));
        same(&got.unwrap(), &wanted, &format!("{ranks} ranks, {stage:?}"));
    }
}

#[test]
fn forward_passes_of_some_ranks_alone_under_gathered_change_nothing_of_the_passes_of_all() {
    let run = |samples: bool| {
        let run = |rank: launch::Rank| -> Result<Vec<Vec<f32>>> {
            let model = Nest::new(rank.device(), false, |_| vec![0, 1, 2]);
            let config = ZeroConfig { reshard: Reshard::Always, ..ZeroConfig::new(ZeroStage::Parameters) };
            let zero = Zero::new(&model, rank.comm().clone(), config)?;
            for step in 0..4 {
                let all = zero.gathered()?;
                // Rank 0 samples from a part of the model, and other ranks evaluate unlike shares.
                for block in [2, 0, 2, 1].iter().cycle().take(if samples { rank.rank() + 2 } else { 0 }) {
                    let _evaluate = (step < 3).then(no_grad);
                    let x = Var::new(Tensor::zeros(&[2, WIDTH], DType::F32, rank.device())?);
                    model.blocks.module()[*block].forward(&x)?;
                }
                drop(all);
                zero.backward(&model.loss(step, rank.rank())?)?;
            }
            zero.parameters().iter().map(|p| Ok(p.grad()?.unwrap().to_vec()?)).collect()
        };
        launch::threads(3, run).unwrap()
    };
    assert_eq!(run(true), run(false));
}

type Wrap = fn(&mut Decoder);

#[test]
fn a_decoder_has_the_bits_of_one_device_however_finely_it_is_wrapped() {
    let gpt = |tied, stream| {
        let config = GptConfig { tied, stream, ..GptConfig::new(37, 8, 2, 2, 16).with_dropout(0.1) };
        ModelConfig::Gpt(config)
    };
    let llama = ModelConfig::Llama(LlamaConfig { key_heads: 1, ..LlamaConfig::new(37, 8, 2, 2, 16) });
    let wraps: [Wrap; 5] = [
        |model| model.set_wrapping(Wrapping::Halves),
        |model| model.set_wrapping(Wrapping::Maps),
        |model| wrap_by_size(model, 600),
        |model| wrap_by(model, |unit| unit.module_type() == TypeId::of::<dyn DecoderBlock>()),
        |model| wrap_by(model, |unit| unit.module_type() == TypeId::of::<Linear>()),
    ];
    for (config, dtype) in
        [(gpt(true, None), DType::F32), (gpt(false, Some(DType::F32)), DType::BF16), (llama, DType::F32)]
    {
        for ranks in 1..=4 {
            let course = Course { grads: Some(DType::F32), steps: 2, ..course(ranks) };
            let build = |device, mode, wrap: Wrap| {
                let mut model = config.init(&Scope::new(3, dtype, device)).unwrap();
                model.set_recompute(mode);
                wrap(&mut model);
                model
            };
            let wanted = course.alone(|device| build(device, RecomputeMode::Never, |_| ()));
            for (number, &wrap) in wraps.iter().enumerate() {
                let mode = [RecomputeMode::Always, RecomputeMode::Never, RecomputeMode::ExceptLast];
                let mode = mode[(number + ranks) % 3];
                for stage in [STAGES[number % 2], ZeroStage::Parameters] {
                    let config = ZeroConfig { prefetch: PREFETCHES[number], ..ZeroConfig::new(stage) };
                    let what = format!("{ranks} ranks, wrapping {number}, {mode:?}, {config:?}");
                    let got = course.together(&config, |device| build(device, mode, wrap));
                    same(&got.unwrap_or_else(|e| panic!("{what}: {e}")), &wanted, &what);
                }
            }
        }
    }
}
