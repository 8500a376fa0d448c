//! What torchgpipe asserts of its balance, and that models come out as they were.

use phalanx_nn::autograd::ContextMode;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::thread::sleep;
use std::time::Duration;

use phalanx_nn::autograd::Var;
use phalanx_nn::{
    BatchNormConfig, Conv2dConfig, Entry, Flatten, LinearConfig, Module, Parameters, Scope, Tanh, parameters,
    state_dict,
};
use phalanx_tensor::{Context, DType, Device, Tensor};

use super::*;
use crate::Result;
use crate::pipeline::gpipe::{Batch, Layer, Sequence, Skip, Skippable, Skips};

const SHORT: Duration = Duration::from_millis(20);
/// For several rounds, so that one in which the machine was busy with something else does not count.
const ROUNDS: Duration = Duration::from_millis(800);

fn var(shape: &[usize], device: Device) -> Var {
    let values: Vec<f32> = (0..shape.iter().product()).map(|i: usize| (i as f32 * 0.7).sin()).collect();
    Var::from_slice(&values, shape, device).unwrap()
}

/// A layer that only does something.
struct Does<F>(F);

impl<F> Parameters for Does<F> {
    fn visit(&self, _: &str, _: &mut dyn FnMut(&str, Entry<'_>)) {}
}

impl<F: Fn(&Var) -> phalanx_nn::Result<Var> + Send + Sync + 'static> Module for Does<F> {
    fn forward(&self, x: &Var) -> phalanx_nn::Result<Var> {
        (self.0)(x)
    }
}

fn add(model: Sequence, f: impl Fn(&Var) -> phalanx_nn::Result<Var> + Send + Sync + 'static) -> Sequence {
    model.with(Does(f))
}

/// `times` products, each of which keeps a factor of its own.
fn expand(x: &Var, times: usize) -> phalanx_nn::Result<Var> {
    (0..times).try_fold(x.clone(), |x, _| Ok(x.mul(&Var::leaf(x.tensor().copy()?)?)?))
}

#[test]
fn slow_layers_make_short_stages() {
    let delay = |model, ms| {
        add(model, move |x| {
            sleep(Duration::from_millis(ms));
            Ok(x.clone())
        })
    };
    let model = [10, 20, 30, 40, 50, 60].into_iter().fold(Sequence::new(), delay);
    let balance = balance_by_time(2, &model, var(&[1], Device::CPU), ROUNDS).unwrap();
    assert_eq!(balance, [4, 2]);
}

#[test]
fn the_time_of_backward_counts() {
    let slow = |x: &Var| -> phalanx_nn::Result<Var> {
        let y = x.tanh()?;
        y.on_backward(|_, _| {
            sleep(Duration::from_millis(30));
            Ok(())
        });
        Ok(y)
    };
    let fast = Sequence::new().with(Tanh {}).with(Tanh {});
    let model = add(add(fast, slow), slow);
    let leaf = Var::leaf(var(&[4], Device::CPU).into_tensor()).unwrap();
    assert_eq!(balance_by_time(2, &model, &leaf, ROUNDS).unwrap(), [3, 1]);
    assert!(leaf.grad().is_none(), "the sample's slot is left alone");
}

#[test]
fn every_round_begins_with_the_sample() {
    let scope = Scope::new(1, DType::F32, Device::CPU);
    let model = Sequence::new()
        .with(Conv2dConfig::new(3, 2, [1, 1]).init(&scope.child("conv")).unwrap())
        .with(Flatten::default())
        .with(LinearConfig::new(128, 10).init(&scope.child("linear")).unwrap());
    let balance = balance_by_time(2, &model, var(&[10, 3, 8, 8], Device::CPU), SHORT).unwrap();
    assert_eq!((balance.len(), balance.iter().sum::<usize>()), (2, 3));
    assert!(model.parameters().iter().all(|p| p.grad().unwrap().is_none()));
}

#[test]
fn layers_with_large_activations_make_short_stages() {
    for device in [Device::Cpu(60), Device::Meta(60)] {
        for (sizes, wanted) in [([1, 2, 3, 4, 5, 6], [4, 2]), ([6, 5, 4, 3, 2, 1], [2, 4])] {
            let layer = |model, times| add(model, move |x| expand(x, times));
            let model = sizes.into_iter().fold(Sequence::new(), layer);
            let sample = var(&[10, 100, 10], device);
            let balance = balance_by_size(2, &model, &sample, SizeConfig::default()).unwrap();
            assert_eq!(balance, wanted);
        }
    }
}

#[test]
fn layers_with_many_parameters_make_short_stages() {
    let scope = Scope::new(1, DType::F32, Device::Cpu(61));
    let config = SizeConfig { parameter_scale: 100.0, ..SizeConfig::default() };
    let linear = |model: Sequence, [i, o]: [usize; 2]| {
        model.with(LinearConfig::new(i, o).init(&scope.child(i)).unwrap())
    };
    let wider = (1..7).map(|i| [i, i + 1]).fold(Sequence::new(), linear);
    let sample = var(&[7, 1], Device::Cpu(61));
    assert_eq!(balance_by_size(2, &wider, &sample, config).unwrap(), [4, 2]);
    let narrower = (1..7).rev().map(|i| [i + 1, i]).fold(Sequence::new(), linear);
    let sample = var(&[1, 7], Device::Cpu(61));
    assert_eq!(balance_by_size(2, &narrower, &sample, config).unwrap(), [2, 4]);
}

/// Parameters that it does not use, and activations.
struct Tradeoff {
    fc: phalanx_nn::Linear,
    latent: usize,
}
parameters!(Tradeoff { fc });

impl Module for Tradeoff {
    fn forward(&self, x: &Var) -> phalanx_nn::Result<Var> {
        expand(x, self.latent)
    }
}

#[test]
fn the_scale_weighs_parameters_against_activations() {
    let device = Device::Cpu(62);
    let scope = Scope::new(1, DType::F32, device);
    let layer = |size: usize| {
        let fc = LinearConfig::new(size, size).init(&scope.child(size)).unwrap();
        Tradeoff { fc, latent: 7 - size }
    };
    let model = (1..7).map(layer).fold(Sequence::new(), Sequence::with);
    let balance = |parameter_scale| {
        let config = SizeConfig { parameter_scale, ..SizeConfig::default() };
        balance_by_size(2, &model, var(&[1], device), config).unwrap()
    };
    assert_eq!(balance(0.0), [2, 4]);
    assert_eq!(balance(100.0), [4, 2]);
}

#[test]
fn activations_count_as_those_of_a_micro_batch_in_bytes() {
    let device = Device::Meta(63);
    let linear = LinearConfig::new(3, 5).init(&Scope::new(1, DType::F32, device)).unwrap();
    let linear = Sequence::new().with(linear);
    for (rows, micro_batches, of_one) in [(8, 1, 8), (8, 4, 2), (9, 8, 2), (3, 8, 1)] {
        let config = SizeConfig { micro_batches, parameter_scale: 2.0 };
        let sizes = profile::sizes(&linear, &var(&[rows, 3], device).into(), config).unwrap();
        assert_eq!(sizes, [4 * (of_one * 5 + 2 * (3 * 5 + 5))], "{rows} rows, {micro_batches} micro-batches");
    }
}

/// Storage, version and values of every parameter and buffer.
fn state(model: &Sequence) -> Vec<(usize, u64, Vec<u8>)> {
    let of = |(_, t): (String, Tensor)| {
        (std::ptr::from_ref(t.storage()) as usize, t.version(), t.to_bytes().unwrap())
    };
    state_dict(model).into_iter().map(of).collect()
}

fn normalised(device: Device) -> Sequence {
    let scope = Scope::new(1, DType::F32, device);
    Sequence::new().with(BatchNormConfig::new(3).init_2d(&scope).unwrap())
}

#[test]
fn a_model_comes_out_as_it_was_though_a_layer_fails_or_panics() {
    let device = Device::Cpu(64);
    let sample = var(&[2, 3, 5, 5], device);
    let fails = |_: &Var| Err(phalanx_nn::Error::invalid("layer", "refuses"));
    let panics = |_: &Var| -> phalanx_nn::Result<Var> { panic!("layer") };
    let models = [normalised(device), add(normalised(device), fails), add(normalised(device), panics)];
    for (number, model) in models.iter().enumerate() {
        let before = state(model);
        let run = || {
            let by_time = balance_by_time(1, model, &sample, SHORT);
            by_time.and(balance_by_size(1, model, &sample, SizeConfig::default()))
        };
        let done = catch_unwind(AssertUnwindSafe(run));
        assert_eq!(done.is_err(), number == 2);
        assert!(done.is_err() || done.is_ok_and(|result| result.is_err() == (number == 1)));
        assert_eq!(state(model), before);
        assert!(model.parameters().iter().all(|p| p.grad().unwrap().is_none()));
    }
}

#[test]
fn layers_are_in_train_mode_and_the_caller_stays_in_its_own() {
    let train = |x: &Var| {
        assert!(Context::current().train() && Context::current().grad());
        Ok(x.clone())
    };
    let model = add(Sequence::new(), train);
    let mut before = Context::default();
    before.set_train(false);
    before.set_grad(false);
    let _evaluation = before.enter();
    balance_by_time(1, &model, var(&[1], Device::CPU), Duration::ZERO).unwrap();
    balance_by_size(1, &model, var(&[1], Device::CPU), SizeConfig::default()).unwrap();
    assert_eq!(Context::current(), before);
}

#[test]
fn a_model_with_gradients_a_sample_without_values_and_senseless_sizes_are_refused() {
    let model = normalised(Device::CPU);
    let sample = var(&[2, 3, 5, 5], Device::CPU);
    model.run(&sample).unwrap().one().unwrap().sum_all().unwrap().backward().unwrap();
    let by_time = balance_by_time(1, &model, &sample, SHORT).unwrap_err().to_string();
    let by_size = balance_by_size(1, &model, &sample, SizeConfig::default()).unwrap_err().to_string();
    assert!(by_time.contains("got a gradient of weight") && by_time == by_size, "{by_time}, {by_size}");
    let on_meta = var(&[2, 3, 5, 5], Device::Meta(65));
    let error = balance_by_time(1, &normalised(Device::Meta(65)), on_meta, SHORT).unwrap_err();
    assert!(error.to_string().contains("meta:65"), "{error}");
    for (rows, micro_batches, parameter_scale) in [(0, 1, 2.0), (1, 0, 2.0), (1, 1, -1.0), (1, 1, f64::NAN)] {
        let config = SizeConfig { micro_batches, parameter_scale };
        let sample = var(&[rows, 3, 5, 5], Device::CPU);
        let error = balance_by_size(1, &normalised(Device::CPU), &sample, config).unwrap_err();
        assert!(error.to_string().contains("balance_by_size: got "), "{error}");
    }
}

/// A layer of several values that passes its input on twice, or puts two together; with a skip over what lies between.
enum Twin {
    Split,
    Join,
}

impl Parameters for Twin {
    fn visit(&self, _: &str, _: &mut dyn FnMut(&str, Entry<'_>)) {}
}

impl Layer for Twin {
    fn run(&self, input: Batch, skips: &mut Skips) -> Result<Batch> {
        match self {
            Twin::Split => {
                let x = input.one()?;
                skips.stash(&Skip::new("x"), x.tanh()?)?;
                Ok([x.mul_scalar(2.0)?, x.detach()].into())
            }
            Twin::Join => {
                let [a, b] = input.many()?;
                let skipped = skips.pop(&Skip::new("x"))?;
                Ok(skipped.iter().try_fold(a.add(&b)?, |sum, skipped| sum.add(skipped))?.into())
            }
        }
    }

    fn skippable(&self) -> Skippable {
        match self {
            Twin::Split => Skippable::new().stash(Skip::new("x")),
            Twin::Join => Skippable::new().pop(Skip::new("x")),
        }
    }
}

#[test]
fn layers_of_several_values_and_skips_are_balanced_too() {
    let device = Device::Cpu(66);
    let sample = Var::leaf(var(&[8], device).into_tensor()).unwrap();
    let model = Sequence::new().with(Twin::Split).with(Twin::Join).with(Tanh {});
    assert_eq!(balance_by_time(1, &model, &sample, SHORT).unwrap(), [3]);
    let bytes = profile::sizes(&model, &(&sample).into(), SizeConfig::default()).unwrap();
    // The product and the skip; the sum of three, as that of two is gone; the output.
    assert_eq!(bytes, [64, 32, 32]);
    assert!(sample.grad().is_none());
    let alone = Sequence::new().with(Twin::Split);
    let error = balance_by_time(1, &alone, &sample, SHORT).unwrap_err().to_string();
    assert!(error.contains("no layer pops `x`"), "{error}");
}

#[test]
fn a_profile_has_the_bytes_of_outputs_and_parameters() {
    let scope = Scope::new(1, DType::F32, Device::CPU);
    let model = Sequence::new().with(LinearConfig::new(3, 5).init(&scope).unwrap()).with(Tanh {});
    let layers = profile(&model, var(&[7, 3], Device::CPU), SHORT).unwrap();
    let bytes: Vec<_> = layers.iter().map(|l| (l.activation_bytes, l.parameter_bytes)).collect();
    assert_eq!(bytes, [(140.0, 80.0), (140.0, 0.0)]);
    assert!(layers.iter().all(|layer| layer.time > 0.0 && layer.time < 10.0));
    assert!(plan(&layers, &[Level { width: 1, bandwidth: 1.0 }]).unwrap().stages.len() == 1);
    let meta = profile(&model, var(&[7, 3], Device::CPU).to_device(Device::Meta(0)).unwrap(), SHORT);
    let error = meta.unwrap_err().to_string();
    assert!(error.starts_with("profile: got a sample on"), "{error}");
}
