//! Passes that find gradients of earlier ones.

use phalanx_nn::autograd::Var;
use phalanx_nn::{Parameter, Parameters};
use phalanx_parallel::data_parallel::{Average, Ddp, DdpConfig};
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
