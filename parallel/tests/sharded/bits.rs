//! Models, dtypes and rules out of the ordinary have the bits of one device too.

use std::sync::Arc;

use phalanx_nn::autograd::Var;
use phalanx_nn::models::{Decoder, GptConfig, LlamaConfig, ModelConfig, RecomputeMode};
use phalanx_nn::{Adagrad, AdamW, Init, Lion, Module, Parameter, Rmsprop, Scope, Sgd, Unit, parameters};
use phalanx_parallel::Result;
use phalanx_parallel::sharded::{Ownership, Reshard, Stage, ZeroConfig};
use phalanx_tensor::{DType, Device};

use crate::kit::{Course, Rules, Task};
use crate::{STAGES, same};

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
    empty: Unit<Odds>,
    odd: Unit<Odds>,
    outer: Unit<Outer>,
    again: Unit<Odds>,
    free: Odds,
    recompute: bool,
}
parameters!(Many { empty, odd, outer, again, free });

struct Outer {
    inner: Unit<Odds>,
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
        let inner = Unit::new(of("inner", &[&[130], &[1]]));
        let own = Odds::new(&scope.child("own"), &mixed);
        Many {
            empty: Unit::new(of("empty", &[])),
            again: Unit::new(odd.clone()),
            odd: Unit::new(odd),
            outer: Unit::new(Arc::new(Outer { inner, own })),
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

const RULES: [(&str, Rules); 6] = [
    ("sgd", || Box::new(Sgd::default())),
    ("momentum", || Box::new(Sgd { momentum: 0.9, ..Sgd::default() })),
    ("lion", || Box::new(Lion::default())),
    ("adagrad", || Box::new(Adagrad { initial_accumulator_value: 0.1, ..Adagrad::default() })),
    ("rmsprop", || Box::new(Rmsprop { momentum: 0.9, centered: true, ..Rmsprop::default() })),
    ("adamw", || Box::new(AdamW::default())),
];

#[test]
fn odd_units_and_every_rule() {
    for (number, (name, rule)) in RULES.into_iter().enumerate() {
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
            for (stage, reshard) in [(STAGES[number % 2], reshard), (Stage::Parameters, reshard)] {
                let config = ZeroConfig { reshard, ..ZeroConfig::new(stage) };
                let what = format!("{name}, {mode:?}, {stage:?}, {reshard:?}");
                let got = course.together(&config, |device| build(device, mode));
                same(&got.unwrap_or_else(|e| panic!("{what}: {e}")), &wanted, &what);
            }
        }
    }
}
