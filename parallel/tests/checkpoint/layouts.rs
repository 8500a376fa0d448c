//! A run that stops under one layout goes on under any other, with the bits of one that was never stopped.

use phalanx_nn::{Parameters, grad_norm};
use phalanx_parallel::checkpoint::{self, Checkpoint, Saver, Trained};
use phalanx_parallel::data_parallel::{DataParallel, Ddp, DdpConfig};
use phalanx_parallel::sharded::{Ownership, Stage, Zero, ZeroConfig};
use phalanx_parallel::{Result, launch};
use phalanx_tensor::{DType, Device};

use crate::gpt::{self, Trained as Outcome, add_chains, bytes};
use crate::{Place, settings};

/// Steps before the save, and all.
const STEPS: (u64, u64) = (2, 3);

/// Ranks, and the stage of ZeRO, of which 0 is none.
pub type Layout = (usize, usize);

pub fn layouts() -> Vec<Layout> {
    (1..=4).flat_map(|ranks| (0..4).map(move |zero| (ranks, zero))).collect()
}

fn share(model: &dyn Parameters, rank: &launch::Rank, zero: usize) -> Result<Box<dyn DataParallel>> {
    let (comm, grad_dtype) = (rank.comm().clone(), Some(DType::F32));
    let stage = match zero {
        0 => return Ok(Box::new(Ddp::new(model, comm, DdpConfig { grad_dtype, ..DdpConfig::default() })?)),
        1 => Stage::Optimizer,
        2 => Stage::Gradients,
        _ => Stage::Parameters,
    };
    // Cuts of both kinds.
    let ownership = if rank.size().is_multiple_of(2) { Ownership::Even } else { Ownership::Whole };
    let config = ZeroConfig { grad_dtype, ownership, ..ZeroConfig::new(stage) };
    Ok(Box::new(Zero::new(model, comm, config)?))
}

/// Trains under a layout; from a checkpoint, if one is given; at [`STEPS`]`.0` to a checkpoint, if one is given, while the next
/// step's passes run. The state at the end.
fn train(
    (ranks, zero): Layout,
    dtype: DType,
    from: Option<&std::path::Path>,
    to: Option<&std::path::Path>,
    steps: std::ops::Range<u64>,
) -> Outcome {
    let run = |rank: launch::Rank| -> Result<Outcome> {
        let model = gpt::model(dtype, rank.device());
        let share = share(&model, &rank, zero)?;
        let mut optimizer = gpt::optimizer(share.parameters());
        let trained = [Trained { model: &model, share: &*share }];
        if let Some(folder) = from {
            // What is read must not be there already.
            share
                .parts(&model)?
                .iter_mut()
                .try_for_each(|part| phalanx_kernels::fill_(&mut part.values, 9.0))?;
            let saved = Checkpoint::open(folder)?;
            saved.verify()?;
            saved.restore(rank.comm(), &trained, &mut [&mut optimizer])?;
            assert_eq!(saved.settings(), &settings(steps.start));
        }
        let mut saver = Saver::new(rank.comm())?.with_block(64)?;
        let mut norms = Vec::new();
        for step in steps.clone() {
            if let Some(folder) = to.filter(|_| step == STEPS.0) {
                saver.save(folder, checkpoint::parts(&trained, &[&optimizer])?, &settings(step))?;
            }
            share.backward(&gpt::loss(&model, step, gpt::rows(ranks, rank.rank(), 1).remove(0))?)?;
            saver.wait()?;
            norms.push(gpt::update(&mut optimizer, share.grad_norm()?)?);
            share.updated()?;
        }
        let state = share.full_optimizer_state(optimizer.state_dict()?, &optimizer.kinds())?;
        let mut state = bytes(&state);
        state.sort();
        Ok((norms, bytes(&share.full_state_dict(&model)?), state))
    };
    launch::threads(ranks, run).unwrap().swap_remove(0)
}

/// One device, which does the additions of one layout and then, without a stop, those of another.
fn alone(dtype: DType, first: usize, then: usize) -> Outcome {
    let model = gpt::model(dtype, Device::CPU);
    let (mut optimizer, parameters) = (gpt::optimizer(model.parameters()), model.parameters());
    let mut norms = Vec::new();
    for step in 0..STEPS.1 {
        let ranks = if step < STEPS.0 { first } else { then };
        add_chains(&parameters, ranks, |rank| {
            gpt::loss(&model, step, gpt::rows(ranks, rank, 1).remove(0)).unwrap().backward().unwrap();
        });
        let norm = gpt::update(&mut optimizer, grad_norm(&parameters).unwrap()).unwrap();
        norms.push(norm);
    }
    let mut state = bytes(&optimizer.state_dict().unwrap());
    state.sort();
    (norms, bytes(&phalanx_nn::state_dict(&model)), state)
}

fn all_pairs(name: &str, dtype: DType, pairs: impl Fn(usize, usize) -> bool) {
    let place = Place::new(name);
    let wanted: Vec<Vec<Outcome>> =
        (1..=4).map(|first| (1..=4).map(|then| alone(dtype, first, then)).collect()).collect();
    for (i, from) in layouts().into_iter().enumerate() {
        let folder = place.join(&format!("{}-{}", from.0, from.1));
        let got = train(from, dtype, None, Some(&folder), 0..STEPS.1);
        assert!(got == wanted[from.0 - 1][from.0 - 1], "{from:?}, while it was saved");
        for (_, to) in layouts().into_iter().enumerate().filter(|(j, _)| pairs(i, *j)) {
            let got = train(to, dtype, Some(&folder), None, STEPS.0..STEPS.1);
            let wanted = &wanted[from.0 - 1][to.0 - 1];
            assert_eq!(got.0, wanted.0[STEPS.0 as usize..], "norms, {from:?} to {to:?}");
            assert!(got.1 == wanted.1, "values, {from:?} to {to:?}");
            assert!(got.2 == wanted.2, "optimizer, {from:?} to {to:?}");
        }
    }
}

#[test]
fn every_layout_goes_on_from_every_other() {
    all_pairs("layouts", DType::F32, |_, _| true);
}

#[test]
fn so_it_is_in_bf16_with_master_copies() {
    all_pairs("masters", DType::BF16, |i, j| (5 * i + j).is_multiple_of(7));
}
