//! What a user does by habit, in the wrong order or twice: it works, or is an error at the first call that can know.

use std::sync::Arc;

use phalanx_nn::autograd::Var;
use phalanx_nn::{
    AdamW, Group, Linear, LinearConfig, Module, Parameters, Rule, Scope, Sequential, Sgd, WrappedUnit,
    grad_norm, load_state_dict, parameters, state_dict,
};
use phalanx_parallel::data_parallel::{DataParallel, Ddp, DdpConfig};
use phalanx_parallel::sharded::{Zero, ZeroConfig, ZeroStage};
use phalanx_parallel::{Result, launch};
use phalanx_tensor::io::save_safetensors;
use phalanx_tensor::{DType, Device};

use crate::STAGES;

/// Two maps, the second of which is a unit.
fn model(device: Device) -> Sequential {
    let scope = Scope::new(5, DType::F32, device);
    let linear = |name: &str| LinearConfig::new(70, 3).init(&scope.child(name)).unwrap();
    let back = LinearConfig::new(3, 70).init(&scope.child("1")).unwrap();
    Sequential::new().with(linear("0")).with(WrappedUnit::new(Arc::new(back)))
}

fn loss(model: &Sequential, seed: usize) -> Result<Var> {
    let device = model.parameters()[0].device();
    let x: Vec<f32> = (0..140).map(|i| ((i * 31 + seed * 17) % 23) as f32 / 11.0 - 1.0).collect();
    Ok(model.forward(&Var::from_slice(&x, &[2, 70], device)?)?.square()?.sum_all()?)
}

fn wrap(model: &impl Parameters, rank: &launch::Rank, stage: ZeroStage) -> Result<Zero> {
    Zero::new(model, rank.comm().clone(), ZeroConfig::new(stage))
}

fn grads(zero: &Zero) -> Vec<Option<Vec<f32>>> {
    zero.parameters().iter().map(|p| p.grad().unwrap().map(|g| g.to_vec().unwrap())).collect()
}

/// What every rank of two is told by `f`, in every stage.
fn told(f: impl Fn(&launch::Rank, ZeroStage) -> Result<String> + Sync, words: &[&str]) {
    for stage in STAGES {
        for message in launch::threads(2, |rank| f(&rank, stage)).unwrap() {
            assert!(words.iter().all(|word| message.contains(word)), "{stage:?}: {message}");
        }
    }
}

#[test]
fn a_backward_pass_that_zero_does_not_know_of_is_refused_at_once_on_every_rank() {
    for stage in STAGES {
        let all = launch::threads(2, |rank| -> Result<_> {
            let model = model(rank.device());
            let zero = wrap(&model, &rank, stage)?;
            let mut messages = vec![loss(&model, rank.rank())?.backward().unwrap_err().to_string()];
            let accumulate = zero.no_sync();
            messages.push(loss(&model, rank.rank())?.backward().unwrap_err().to_string());
            drop(accumulate);
            // Nothing of it is left.
            zero.backward(&loss(&model, rank.rank())?)?;
            let first = grads(&zero);
            zero.zero_grad()?;
            zero.backward(&loss(&model, rank.rank())?)?;
            assert_eq!(grads(&zero), first);
            Ok(messages)
        });
        for messages in all.unwrap() {
            assert!(messages.iter().all(|m| m.contains("`zero.backward(&loss)`")), "{messages:?}");
        }
    }
}

#[test]
fn what_a_refused_pass_has_added_to_earlier_gradients_is_to_be_zeroed_first() {
    let run = |rank: &launch::Rank, stage: ZeroStage| -> Result<String> {
        let model = model(rank.device());
        let zero = wrap(&model, rank, stage)?;
        let accumulate = zero.no_sync();
        zero.backward(&loss(&model, 1)?)?;
        drop(accumulate);
        loss(&model, 2)?.backward().unwrap_err();
        let message = zero.backward(&loss(&model, 3)?).unwrap_err().to_string();
        zero.zero_grad()?;
        zero.backward(&loss(&model, 3)?)?;
        Ok(message)
    };
    told(run, &["call `zero.zero_grad()` first"]);
}

#[test]
fn an_optimizer_over_the_models_own_parameters_is_refused_before_and_after_wrapping() {
    let after = |rank: &launch::Rank, stage: ZeroStage| -> Result<String> {
        let model = model(rank.device());
        let _zero = wrap(&model, rank, stage)?;
        let made = AdamW::default().init(vec![Group::new(model.parameters(), 1e-3)]);
        Ok(made.map(drop).unwrap_err().to_string())
    };
    told(
        after,
        &["optimizer", "\"0.weight\" is sharded by Zero", "build the optimizer over `zero.parameters()`"],
    );
    let before = |rank: &launch::Rank, stage: ZeroStage| -> Result<String> {
        let model = model(rank.device());
        let mut optimizer = AdamW::default().init(vec![Group::new(model.parameters(), 1e-3)])?;
        let zero = wrap(&model, rank, stage)?;
        zero.backward(&loss(&model, 1)?)?;
        Ok(optimizer.step().unwrap_err().to_string())
    };
    told(before, &["optimizer.step", "\"0.weight\" is sharded by Zero", "`zero.parameters()`"]);
}

#[test]
fn norms_and_gradients_of_the_models_own_parameters_are_not_taken_for_all() {
    let model_norm = |rank: &launch::Rank, stage: ZeroStage| -> Result<String> {
        let model = model(rank.device());
        let zero = wrap(&model, rank, stage)?;
        zero.backward(&loss(&model, 1)?)?;
        Ok(grad_norm(&model.parameters()).unwrap_err().to_string())
    };
    told(model_norm, &["is sharded by Zero", "`zero.grad_norm()`"]);
    let share_norm = |rank: &launch::Rank, stage: ZeroStage| -> Result<String> {
        let model = model(rank.device());
        let zero = wrap(&model, rank, stage)?;
        zero.backward(&loss(&model, 1)?)?;
        Ok(phalanx_nn::clip_grad_norm(&zero.parameters(), 1.0).unwrap_err().to_string())
    };
    told(share_norm, &["this rank's share alone", "`zero.clip_grad_norm(..)`"]);
    let zeroed = |rank: &launch::Rank, stage: ZeroStage| -> Result<String> {
        let model = model(rank.device());
        let _zero = wrap(&model, rank, stage)?;
        Ok(model.parameters()[1].zero_grad().unwrap_err().to_string())
    };
    told(zeroed, &["\"0.bias\" is sharded by Zero", "`zero.zero_grad()`"]);
}

#[test]
fn a_state_dict_of_spread_values_is_not_read_saved_or_loaded() {
    let run = |rank: launch::Rank| -> Result<()> {
        let model = model(rank.device());
        let plain = state_dict(&model).into_iter().map(|(name, t)| Ok((name, t.copy()?)));
        let plain = plain.collect::<Result<Vec<_>>>()?;
        let zero = wrap(&model, &rank, ZeroStage::Parameters)?;
        let entries = state_dict(&model);
        let remedy = |error: String| {
            assert!(
                error.contains("`zero.full_state_dict()`") && error.contains("`zero.gathered()`"),
                "{error}"
            );
        };
        for ((name, spread), (wanted, values)) in entries.iter().zip(&plain) {
            assert_eq!((name, spread.shape()), (wanted, values.shape()));
            remedy(spread.to_vec::<f32>().unwrap_err().to_string());
            remedy(spread.copy().map(drop).unwrap_err().to_string());
        }
        let path =
            std::env::temp_dir().join(format!("phalanx-spread-{}-{}", std::process::id(), rank.rank()));
        let tensors = entries.iter().map(|(name, t)| (name.clone(), t));
        remedy(save_safetensors(&path, tensors, &Default::default()).unwrap_err().to_string());
        assert!(!path.exists());
        remedy(load_state_dict(&model, plain.clone()).unwrap_err().to_string());
        // Inside `gathered` they are the model's.
        let all = zero.gathered()?;
        let here = state_dict(&model);
        assert_eq!([here.len(), entries.len()], [plain.len(); 2]);
        for ((_, here), (_, values)) in here.iter().zip(&plain) {
            assert_eq!(here.to_vec::<f32>()?, values.to_vec::<f32>()?);
        }
        drop(all);
        Ok(())
    };
    launch::threads(2, run).unwrap();
}

#[test]
fn what_computes_with_spread_values_says_where_they_are() {
    let run = |rank: launch::Rank| -> Result<String> {
        let model = model(rank.device());
        let _zero = wrap(&model, &rank, ZeroStage::Parameters)?;
        let weight = Var::new(model.parameters()[0].tensor());
        Ok(weight.mul(&weight).map(drop).unwrap_err().to_string())
    };
    for message in launch::threads(2, run).unwrap() {
        assert!(message.starts_with("mul: ") && message.contains("`zero.gathered()`"), "{message}");
    }
}

#[test]
fn a_parameter_frozen_unfrozen_or_replaced_after_wrapping_is_an_error_of_the_next_pass() {
    let frozen = |rank: &launch::Rank, stage: ZeroStage| -> Result<String> {
        let model = model(rank.device());
        let zero = wrap(&model, rank, stage)?;
        model.parameters()[2].freeze();
        Ok(zero.begin().unwrap_err().to_string())
    };
    told(frozen, &["1.weight", "frozen now", "make it anew"]);
    let unfrozen = |rank: &launch::Rank, stage: ZeroStage| -> Result<String> {
        let model = model(rank.device());
        model.parameters()[2].freeze();
        let zero = wrap(&model, rank, stage)?;
        model.parameters()[2].unfreeze();
        Ok(zero.begin().unwrap_err().to_string())
    };
    told(unfrozen, &["1.weight", "trained now", "make it anew"]);
    let replaced = |rank: &launch::Rank, stage: ZeroStage| -> Result<String> {
        let model = model(rank.device());
        let zero = wrap(&model, rank, stage)?;
        let _all = zero.gathered()?;
        let weight = model.parameters().swap_remove(2);
        weight.set_tensor(weight.tensor().copy()?)?;
        Ok(zero.begin().unwrap_err().to_string())
    };
    told(replaced, &["1.weight", "another tensor", "make it anew"]);
}

struct Larger {
    inner: Sequential,
    head: Linear,
}
parameters!(Larger { inner, head });

#[test]
fn a_parameter_added_after_wrapping_is_an_error_of_the_first_pass_and_state_dict_that_meet_it() {
    let larger = |rank: &launch::Rank, stage: ZeroStage| -> Result<(Zero, Larger)> {
        let inner = model(rank.device());
        let zero = wrap(&inner, rank, stage)?;
        let head = LinearConfig::new(1, 1).init(&Scope::new(1, DType::F32, rank.device()).child("head"))?;
        Ok((zero, Larger { inner, head }))
    };
    let saved = |rank: &launch::Rank, stage: ZeroStage| -> Result<String> {
        let (zero, model) = larger(rank, stage)?;
        let share: &dyn DataParallel = &zero;
        Ok(share.full_state_dict(&model).map(drop).unwrap_err().to_string())
    };
    told(saved, &["head.weight is not among"]);
    for stage in STAGES {
        let run = |rank: launch::Rank| -> Result<()> {
            let (zero, model) = larger(&rank, stage)?;
            zero.backward(&model.head.forward(&loss(&model.inner, 1)?.reshape(&[1, 1])?)?.sum_all()?)
        };
        let pass = launch::threads(2, run).unwrap_err().to_string();
        assert!(pass.contains("a parameter of shape") && pass.contains("make it anew"), "{pass}");
    }
}

#[test]
fn an_optimizer_does_not_step_on_what_has_only_accumulated_nor_for_a_zero_that_is_gone() {
    let accumulated = |rank: &launch::Rank, stage: ZeroStage| -> Result<String> {
        let model = model(rank.device());
        let zero = wrap(&model, rank, stage)?;
        let mut optimizer = Sgd::default().init(vec![Group::new(zero.parameters(), 0.1)])?;
        let _forgotten = zero.no_sync();
        zero.backward(&loss(&model, 1)?)?;
        Ok(optimizer.step().unwrap_err().to_string())
    };
    told(accumulated, &["gradients of this rank alone"]);
    let gone = |rank: &launch::Rank, stage: ZeroStage| -> Result<String> {
        let model = model(rank.device());
        let zero = wrap(&model, rank, stage)?;
        let mut optimizer = Sgd::default().init(vec![Group::new(zero.parameters(), 0.1)])?;
        drop(zero);
        Ok(optimizer.step().unwrap_err().to_string())
    };
    told(gone, &["`Zero` was dropped"]);
    let unbegun = |rank: &launch::Rank, stage: ZeroStage| -> Result<String> {
        Ok(wrap(&model(rank.device()), rank, stage)?.finish().unwrap_err().to_string())
    };
    told(unbegun, &["`finish` came without the `begin`"]);
}

#[test]
fn a_model_that_is_wrapped_again_is_the_later_wrappers() {
    for stage in [ZeroStage::Optimizer, ZeroStage::Gradients] {
        let run = |rank: launch::Rank| -> Result<()> {
            let model = model(rank.device());
            let zero = wrap(&model, &rank, stage)?;
            let ddp = Ddp::new(&model, rank.comm().clone(), DdpConfig::default())?;
            for message in [zero.begin(), zero.updated()].map(|done| done.unwrap_err().to_string()) {
                assert!(message.contains("another wrapper, made later, has the model now"), "{message}");
            }
            ddp.backward(&loss(&model, 1)?)?;
            let first = model.parameters()[0].grad()?.unwrap().to_vec::<f32>()?;
            drop(zero);
            assert_eq!(model.parameters()[0].grad()?.unwrap().to_vec::<f32>()?, first);
            let again = wrap(&model, &rank, stage)?;
            assert!(ddp.begin().is_err());
            again.backward(&loss(&model, 1)?)
        };
        launch::threads(2, run).unwrap();
    }
    let run = |rank: launch::Rank| -> Result<String> {
        let model = model(rank.device());
        let _zero = wrap(&model, &rank, ZeroStage::Parameters)?;
        Ok(Ddp::new(&model, rank.comm().clone(), DdpConfig::default()).map(drop).unwrap_err().to_string())
    };
    for message in launch::threads(2, run).unwrap() {
        assert!(message.contains("0.weight has no values here: another `Zero`"), "{message}");
    }
}

#[test]
fn values_that_are_new_in_part_are_not_computed_with_until_updated_is_called() {
    for (stage, held) in
        [(ZeroStage::Optimizer, false), (ZeroStage::Gradients, false), (ZeroStage::Parameters, true)]
    {
        let run = |rank: launch::Rank| -> Result<Vec<f32>> {
            let model = model(rank.device());
            let zero = wrap(&model, &rank, stage)?;
            let all = held.then(|| zero.gathered()).transpose()?;
            let mut optimizer = Sgd::default().init(vec![Group::new(zero.parameters(), 1e-3)])?;
            zero.backward(&loss(&model, 1)?)?;
            optimizer.step()?;
            let error = loss(&model, 1).map(drop).unwrap_err().to_string();
            assert!(
                error.contains("call `updated` of the `Zero` after the optimizer's step"),
                "{stage:?}: {error}"
            );
            zero.updated()?;
            let value = loss(&model, 1)?.tensor().to_vec()?;
            zero.zero_grad()?;
            zero.backward(&loss(&model, 1)?)?;
            drop(all);
            Ok(value)
        };
        let values = launch::threads(2, run).unwrap();
        assert_eq!(values[0], values[1], "{stage:?}");
    }
}
