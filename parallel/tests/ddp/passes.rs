//! Passes that find gradients of earlier ones; and what a user does by habit, in the wrong order or twice: it works, or is an
//! error at the first call that can know.

use std::sync::Arc;

use phalanx_kernels as kernels;
use phalanx_nn::autograd::{Slot, Var};
use phalanx_nn::{Linear, LinearConfig, Module, Parameter, Parameters, Scope, parameters};
use phalanx_parallel::comm::Comm;
use phalanx_parallel::data_parallel::{
    AllReduce, Average, Bucket, BucketHook, DataParallel, Ddp, DdpConfig, PendingBucket,
};
use phalanx_parallel::{Result, launch};
use phalanx_tensor::{DType, Device, Tensor};

use crate::Small;

fn flat(model: &Small) -> Vec<f32> {
    model.grads().into_iter().flatten().flatten().collect()
}

#[test]
fn a_pass_adds_to_what_an_earlier_pass_of_all_ranks_has_left() {
    for (ranks, average, micros) in
        [(1, Average::Sum, 1), (2, Average::Sum, 1), (3, Average::Sum, 2), (3, Average::Mean, 1)]
    {
        let all = launch::threads(ranks, |rank| -> Result<_> {
            let model = Small::new(rank.device());
            let config = DdpConfig { average, bucket_bytes: 64, ..DdpConfig::default() };
            let ddp = Ddp::new(&model, rank.comm().clone(), config)?;
            let pass = |seed: u64| -> Result<()> {
                for micro in 0..micros {
                    let _accumulate = (micro + 1 < micros).then(|| ddp.no_sync());
                    ddp.backward(&model.loss(seed * 10 + rank.rank() as u64 + 5 * micro as u64, 2, true)?)?;
                }
                Ok(())
            };
            let mut apart = Vec::new();
            for seed in 1..4 {
                pass(seed)?;
                apart.push(flat(&model));
                model.zero_grad()?;
            }
            (1..4).try_for_each(pass)?;
            let added = flat(&model);
            // One that was forgotten in between is not there any more.
            model.zero_grad()?;
            pass(2)?;
            assert_eq!(flat(&model), apart[1]);
            Ok((apart, added))
        });
        let all = all.unwrap();
        assert!(all.iter().all(|other| *other == all[0]), "ranks differ");
        let (apart, added) = &all[0];
        for (i, added) in added.iter().enumerate() {
            let wanted = apart[0][i] + apart[1][i] + apart[2][i];
            let size: f32 = apart.iter().map(|pass| pass[i].abs()).sum();
            assert!(
                (added - wanted).abs() <= 2e-6 * size,
                "{ranks} ranks, {average:?}: {added}, wanted {wanted}"
            );
        }
    }
}

#[test]
fn one_rank_adds_to_what_is_there_as_without_ddp() {
    let (model, plain) = (Small::new(phalanx_tensor::Device::CPU), Small::new(phalanx_tensor::Device::CPU));
    let all = launch::threads(1, |rank| -> Result<()> {
        let ddp = Ddp::new(&model, rank.comm().clone(), DdpConfig::default())?;
        (0..3).try_for_each(|seed| {
            plain.loss(seed, 3, true)?.backward()?;
            ddp.backward(&model.loss(seed, 3, true)?)
        })
    });
    all.unwrap();
    assert_eq!(model.grads(), plain.grads());
}

#[test]
fn a_gradient_of_before_stays_where_no_rank_has_a_new_one() {
    let all = launch::threads(2, |rank| -> Result<_> {
        let model = Small::new(rank.device());
        let ddp =
            Ddp::new(&model, rank.comm().clone(), DdpConfig { find_unused: true, ..DdpConfig::default() })?;
        ddp.backward(&model.loss(rank.rank() as u64, 2, true)?)?;
        let first = model.grads();
        ddp.backward(&model.loss(7, 2, false)?)?;
        let second = model.grads();
        // Only what was left behind was forgotten.
        model.parameters()[2..].iter().try_for_each(Parameter::zero_grad)?;
        ddp.backward(&model.loss(7, 2, false)?)?;
        Ok((first, second, model.grads()))
    });
    for (first, second, third) in all.unwrap() {
        assert_eq!(first[..2], second[..2]);
        assert_eq!(first[..2], third[..2]);
        assert_ne!(first[2..], second[2..]);
    }
}

#[test]
fn a_backward_pass_of_ones_own_is_announced() {
    let run = |rank: launch::Rank, begins: bool| -> Result<Vec<Option<Vec<f32>>>> {
        let model = Small::new(rank.device());
        let ddp = Ddp::new(&model, rank.comm().clone(), DdpConfig::default())?;
        for _ in 0..2 {
            if begins {
                ddp.begin()?;
            }
            let loss: Var = model.loss(1, 2, true)?;
            loss.backward()?;
            ddp.finish()?;
        }
        Ok(model.grads())
    };
    let all = launch::threads(2, |rank| run(rank, true)).unwrap();
    assert_eq!(all[0], all[1]);
    let error = launch::threads(2, |rank| run(rank, false)).unwrap_err().to_string();
    assert!(error.contains("begin"), "{error}");
}

/// Adds 1 to every sum, as a hook does that remembers what it has not sent.
#[derive(Debug)]
struct Remembers;

impl BucketHook for Remembers {
    fn start(&self, bucket: &Bucket<'_>, comm: &Comm) -> Result<PendingBucket> {
        let (rest, mut sums) = (AllReduce.start(bucket, comm)?, bucket.gradients.clone());
        Ok(Box::new(move || {
            rest()?;
            let more = kernels::add_scalar(&sums, 1.0.into())?;
            Ok(kernels::copy_(&mut sums, &more)?)
        }))
    }
}

#[test]
fn what_a_hook_leaves_for_an_unused_parameter_is_not_counted() {
    let all = launch::threads(2, |rank| -> Result<_> {
        let model = Small::new(rank.device());
        let config = DdpConfig { find_unused: true, hook: Arc::new(Remembers), ..DdpConfig::default() };
        let ddp = Ddp::new(&model, rank.comm().clone(), config)?;
        let mut seen = Vec::new();
        for used in [false, false, rank.rank() == 1] {
            ddp.backward(&model.loss(3, 2, used)?)?;
            seen.push(model.grads()[..2].to_vec());
            model.zero_grad()?;
        }
        let plain = Small::new(rank.device());
        plain.loss(3, 2, true)?.backward()?;
        assert_eq!(seen[..2], [[None, None], [None, None]]);
        for (got, alone) in seen[2].iter().zip(plain.grads()) {
            let wanted: Vec<f32> = alone.unwrap().iter().map(|g| g + 1.0).collect();
            assert_eq!(got.as_ref().unwrap(), &wanted);
        }
        Ok(())
    });
    all.unwrap();
}

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
