//! What a user does by habit, in the wrong order or twice: right, or an error at the first call that can know.

use phalanx_nn::autograd::{Slot, Var};
use phalanx_nn::{Linear, LinearConfig, Module, Parameters, Scope, parameters};
use phalanx_parallel::data_parallel::{Average, DataParallel, Ddp, DdpConfig};
use phalanx_parallel::{Result, launch};
use phalanx_tensor::{DType, Device, Tensor};

use crate::small::Small;

fn wrap(model: &impl Parameters, rank: &launch::Rank) -> Result<Ddp> {
    Ddp::new(model, rank.comm().clone(), DdpConfig::default())
}

/// The gradients of a first pass over two ranks.
fn wanted(seed: u64) -> Vec<Option<Vec<f32>>> {
    let all = launch::threads(2, |rank| -> Result<_> {
        let model = Small::new(rank.device());
        let ddp = wrap(&model, &rank)?;
        ddp.backward(&model.loss(seed + rank.rank() as u64, 2, true)?)?;
        Ok(model.grads())
    });
    all.unwrap().swap_remove(0)
}

#[test]
fn a_backward_pass_that_ddp_does_not_know_of_is_refused_at_once_on_every_rank() {
    let all = launch::threads(2, |rank| -> Result<_> {
        let model = Small::new(rank.device());
        let ddp = wrap(&model, &rank)?;
        let loss = |seed: u64| model.loss(seed + rank.rank() as u64, 2, true);
        let mut messages = vec![loss(1)?.backward().unwrap_err().to_string()];
        let accumulate = ddp.no_sync();
        messages.push(loss(1)?.backward().unwrap_err().to_string());
        drop(accumulate);
        // Nothing of it is left.
        ddp.backward(&loss(3)?)?;
        Ok((messages, model.grads()))
    });
    let wanted = wanted(3);
    for (messages, grads) in all.unwrap() {
        assert!(messages.iter().all(|m| m.contains("`ddp.backward(&loss)`")), "{messages:?}");
        assert_eq!(grads, wanted);
    }
}

#[test]
fn what_a_refused_pass_has_added_to_earlier_gradients_is_to_be_zeroed_first() {
    let all = launch::threads(2, |rank| -> Result<_> {
        let model = Small::new(rank.device());
        let ddp = wrap(&model, &rank)?;
        let loss = |seed: u64| model.loss(seed + rank.rank() as u64, 2, true);
        ddp.backward(&loss(1)?)?;
        loss(2)?.backward().unwrap_err();
        let message = ddp.backward(&loss(3)?).unwrap_err().to_string();
        model.zero_grad()?;
        ddp.backward(&loss(3)?)?;
        Ok((message, model.grads()))
    });
    let wanted = wanted(3);
    for (message, grads) in all.unwrap() {
        assert!(message.contains("`zero_grad` first"), "{message}");
        assert_eq!(grads, wanted);
    }
}

/// What every rank is told by a pass after `change`.
fn told(change: impl Fn(&Small) + Sync) -> Vec<String> {
    let run = |rank: launch::Rank, announced: bool| -> Result<String> {
        let model = Small::new(rank.device());
        model.parameters()[5].freeze();
        let ddp = wrap(&model, &rank)?;
        ddp.backward(&model.loss(1, 2, true)?)?;
        ddp.zero_grad()?;
        change(&model);
        match announced {
            true => Ok(ddp.begin().unwrap_err().to_string()),
            false => ddp.backward(&model.loss(1, 2, true)?).map(|()| String::new()),
        }
    };
    let mut messages = launch::threads(2, |rank| run(rank, true)).unwrap();
    // Such an error of `backward` ends the run of all ranks.
    messages.push(launch::threads(2, |rank| run(rank, false)).unwrap_err().to_string());
    messages
}

#[test]
fn a_parameter_frozen_unfrozen_or_replaced_after_wrapping_is_an_error_of_the_next_pass() {
    let is = |messages: Vec<String>, words: [&str; 3]| {
        for message in messages {
            assert!(words.iter().all(|word| message.contains(word)), "{message}");
        }
    };
    is(told(|model| model.parameters()[5].unfreeze()), ["b.bias", "trained now", "make it anew"]);
    is(told(|model| model.parameters()[2].freeze()), ["a.weight", "frozen now", "make it anew"]);
    let owned = |model: &Small| model.parameters()[2].leaves()[0].set_slot(Slot::Owned(None)).unwrap();
    is(told(owned), ["a.weight", "gradients do not go", "make it anew"]);
}

#[test]
fn the_dtype_of_gradients_in_buckets_is_not_changed_behind_ddp() {
    let run = |rank: launch::Rank| -> Result<()> {
        let model = Small::new(rank.device());
        let _ddp = wrap(&model, &rank)?;
        Ok(model.parameters()[0].set_grad_dtype(DType::F64)?)
    };
    let error = launch::threads(2, run).unwrap_err().to_string();
    assert!(error.contains("spare.weight") && error.contains("`DdpConfig::grad_dtype`"), "{error}");
}

struct Larger {
    small: Small,
    head: Linear,
}
parameters!(Larger { small, head });

#[test]
fn a_parameter_added_after_wrapping_is_an_error_of_the_first_pass_and_state_dict_that_meet_it() {
    let all = launch::threads(2, |rank| -> Result<_> {
        let small = Small::new(rank.device());
        let ddp = wrap(&small, &rank)?;
        let scope = Scope::new(1, DType::F32, rank.device());
        let model = Larger { small, head: LinearConfig::new(1, 1).init(&scope.child("head"))? };
        let saved = ddp.full_state_dict(&model).map(drop).unwrap_err().to_string();
        let parts = ddp.parts(&model).map(drop).unwrap_err().to_string();
        Ok([saved, parts])
    });
    for [saved, parts] in all.unwrap() {
        assert!(saved.contains("head.weight is not among") && parts == saved, "{saved}, {parts}");
    }
    let run = |rank: launch::Rank| -> Result<()> {
        let small = Small::new(rank.device());
        let ddp = wrap(&small, &rank)?;
        let scope = Scope::new(1, DType::F32, rank.device());
        let head = LinearConfig::new(1, 1).init(&scope.child("head"))?;
        ddp.backward(&head.forward(&small.loss(1, 2, true)?.reshape(&[1, 1])?)?.sum_all()?)
    };
    let pass = launch::threads(2, run).unwrap_err().to_string();
    assert!(pass.contains("a parameter of shape") && pass.contains("make it anew"), "{pass}");
}

#[test]
fn an_optimizer_does_not_step_on_what_has_only_accumulated() {
    let run = |rank: launch::Rank, finishes: bool| -> Result<()> {
        let model = Small::new(rank.device());
        let ddp = wrap(&model, &rank)?;
        let mut optimizer = model.optimizer();
        if finishes {
            let _forgotten = ddp.no_sync();
            ddp.backward(&model.loss(1, 2, true)?)?;
            return Ok(optimizer.step()?);
        }
        ddp.begin()?;
        model.loss(1, 2, true)?.backward()?;
        Ok(optimizer.step()?)
    };
    for finishes in [true, false] {
        let error = launch::threads(2, |rank| run(rank, finishes)).unwrap_err().to_string();
        assert!(
            error.contains("optimizer.step") && error.contains("gradients of this rank alone"),
            "{error}"
        );
    }
}

#[test]
fn finish_without_begin_is_an_error() {
    let run = |rank: launch::Rank| wrap(&Small::new(rank.device()), &rank)?.finish();
    let error = launch::threads(2, run).unwrap_err().to_string();
    assert!(error.contains("`finish` came without the `begin`"), "{error}");
}

#[test]
fn a_model_that_is_wrapped_again_is_the_later_wrappers() {
    let all = launch::threads(2, |rank| -> Result<_> {
        let model = Small::new(rank.device());
        let first = wrap(&model, &rank)?;
        let second = wrap(&model, &rank)?;
        let message = first.begin().unwrap_err().to_string();
        drop(first);
        second.backward(&model.loss(3 + rank.rank() as u64, 2, true)?)?;
        Ok((message, model.grads()))
    });
    let wanted = wanted(3);
    for (message, grads) in all.unwrap() {
        assert!(message.contains("another wrapper, made later, has the model now"), "{message}");
        assert_eq!(grads, wanted);
    }
}

#[test]
fn settings_that_differ_between_ranks_are_an_error_when_it_is_made() {
    let run = |rank: launch::Rank| -> Result<()> {
        let average = if rank.rank() == 1 { Average::Mean } else { Average::Sum };
        let config = DdpConfig { average, ..DdpConfig::default() };
        Ddp::new(&Small::new(rank.device()), rank.comm().clone(), config).map(drop)
    };
    let error = launch::threads(3, run).unwrap_err().to_string();
    assert!(error.contains("ranks [1] have other settings than rank 0"), "{error}");
}

#[test]
fn a_gradient_set_to_none_is_forgotten_in_its_bucket_and_one_taken_is_a_copy() {
    let run = |rank: launch::Rank| -> Result<()> {
        let model = Small::new(rank.device());
        let ddp = wrap(&model, &rank)?;
        let pass = || ddp.backward(&model.loss(1 + rank.rank() as u64, 2, true)?);
        pass()?;
        let first = model.grads();
        model.parameters().iter().for_each(|p| p.set_grad(None));
        pass()?;
        assert_eq!(model.grads(), first);
        let taken: Vec<Tensor> = model.parameters().iter().map(|p| p.take_grad().unwrap().unwrap()).collect();
        pass()?;
        assert_eq!(model.grads(), first);
        assert!(taken.iter().zip(&first).all(|(t, first)| t.to_vec::<f32>().ok() == *first));
        Ok(())
    };
    launch::threads(2, run).unwrap();
}

#[test]
fn a_value_of_ones_own_that_the_loss_depends_on_is_no_parameter() {
    let run = |rank: launch::Rank| -> Result<Vec<f32>> {
        let model = Small::new(rank.device());
        let ddp = wrap(&model, &rank)?;
        let x = Var::leaf(Tensor::from_slice(&[2f32], &[], Device::Cpu(rank.rank() as u16))?)?;
        ddp.backward(&model.loss(1, 2, true)?.mul(&x)?)?;
        Ok(x.grad().unwrap().tensor().to_vec()?)
    };
    let grads = launch::threads(2, run).unwrap();
    assert_eq!(grads[0], grads[1]);
}

#[test]
fn a_wrapper_that_is_dropped_before_its_first_pass_leaves_no_ranks_that_train_apart() {
    let run = |rank: launch::Rank, again: bool| -> Result<()> {
        let model = Small::new(rank.device());
        let mut optimizer = model.optimizer();
        let _ = wrap(&model, &rank)?;
        if again {
            let ddp = wrap(&model, &rank)?;
            ddp.backward(&model.loss(1, 2, true)?)?;
        } else {
            model.loss(1, 2, true)?.backward()?;
        }
        Ok(optimizer.step()?)
    };
    launch::threads(2, |rank| run(rank, true)).unwrap();
    launch::threads(1, |rank| run(rank, false)).unwrap();
    let error = launch::threads(2, |rank| run(rank, false)).unwrap_err().to_string();
    assert!(
        error.contains("dropped before its first pass") && error.contains("bind it to a name"),
        "{error}"
    );
}
