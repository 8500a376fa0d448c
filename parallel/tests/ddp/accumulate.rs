//! Passes that find gradients of earlier ones.

use std::sync::Arc;

use phalanx_kernels as kernels;
use phalanx_nn::autograd::Var;
use phalanx_nn::{Parameter, Parameters};
use phalanx_parallel::comm::Comm;
use phalanx_parallel::data_parallel::{AllReduce, Average, Bucket, BucketHook, Ddp, DdpConfig, Rest};
use phalanx_parallel::{Result, launch};

use super::small::Small;

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
    fn start(&self, bucket: &Bucket<'_>, comm: &Comm) -> Result<Rest> {
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
