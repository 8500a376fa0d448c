//! A run that stops under one layout goes on under any other, with the bits of one that was never stopped. Stages of a pipeline,
//! each with data parallelism of its own, read what others have saved.

use std::path::Path;
use std::sync::Arc;

use phalanx_kernels as kernels;
use phalanx_nn::models::{Decoder, DecoderStage, GptConfig, ModelConfig};
use phalanx_nn::{AdamW, OneDevice, Optimizer, Parameter, Parameters, Scope, cut, grad_norm};
use phalanx_parallel::checkpoint::{Checkpoint, Saver, Trained};
use phalanx_parallel::data_parallel::{DataParallel, Ddp, DdpConfig, SingleDevice};
use phalanx_parallel::sharded::{Ownership, Zero, ZeroConfig, ZeroStage};
use phalanx_parallel::sharded_tensor::ShardedTensor;
use phalanx_parallel::{Result, checkpoint, launch, sharded};
use phalanx_tensor::{DType, Device};

use crate::gpt::{Trained as Outcome, add_chains, bytes};
use crate::{Place, gpt, save, settings};

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
        1 => ZeroStage::Optimizer,
        2 => ZeroStage::Gradients,
        _ => ZeroStage::Parameters,
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
        let trained = [Trained::new(&model, &*share)];
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

const LAYERS: usize = 4;

/// A stage of a model whose head is tied to its table.
fn model(stage: usize, stages: usize, seed: u64, device: Device) -> Decoder {
    let config = ModelConfig::Gpt(GptConfig::new(37, 8, LAYERS, 2, 16));
    let layers = cut(LAYERS, stages).swap_remove(stage);
    let stage = DecoderStage { layers, first: stage == 0, last: stage + 1 == stages };
    config.init_stage(&Arc::new(OneDevice), &Scope::new(seed, DType::F32, device), stage).unwrap()
}

/// A step by gradients that a parameter's name gives, whatever rank has it.
fn step(parameters: &[Parameter], optimizer: &mut Optimizer<AdamW>) -> Result<()> {
    for p in parameters {
        let grad = p.name().bytes().map(f64::from).sum::<f64>().sin();
        p.set_grad(Some(kernels::full(p.tensor().shape(), grad, DType::F32, p.device())?));
    }
    optimizer.step()?;
    Ok(optimizer.zero_grad()?)
}

/// Runs `f` over stages of so many ranks each, with what a rank has.
fn over<T: Send>(
    stages: usize,
    each: usize,
    seed: u64,
    f: impl Fn(&launch::Rank, &[Trained<'_>], &mut Optimizer<AdamW>) -> Result<T> + Sync,
) -> Vec<T> {
    let run = |rank: launch::Rank| -> Result<T> {
        let stage = rank.rank() / each;
        let model = model(stage, stages, seed, rank.device());
        let peers = rank.comm().group(&Vec::from_iter(stage * each..(stage + 1) * each))?;
        let share: Box<dyn DataParallel> = match each {
            1 => Box::new(SingleDevice::new(&model)),
            _ => Box::new(Zero::new(&model, peers, ZeroConfig::new(sharded::ZeroStage::Parameters))?),
        };
        let mut optimizer = gpt::optimizer(share.parameters());
        f(&rank, &[Trained::new(&model, &*share)], &mut optimizer)
    };
    launch::threads(stages * each, run).unwrap()
}

fn write(stages: usize, each: usize, folder: &Path) {
    over(stages, each, 1, |rank, trained, optimizer| {
        step(&trained[0].wrapper.parameters(), optimizer)?;
        trained[0].wrapper.updated()?;
        save(rank, folder, checkpoint::parts(trained, &[optimizer])?, &settings(1))
    });
}

/// Everything in a checkpoint, as one device reads it.
fn everything(folder: &Path) -> Vec<(String, Vec<u8>)> {
    over(1, 1, 2, |rank, trained, optimizer| {
        Checkpoint::open(folder)?.restore(rank.comm(), trained, &mut [optimizer])?;
        let parts: Vec<ShardedTensor> = checkpoint::parts(trained, &[optimizer])?;
        parts.into_iter().map(|part| Ok((part.name, part.values.to_bytes()?))).collect::<Result<Vec<_>>>()
    })
    .swap_remove(0)
}

#[test]
fn stages_of_any_number_read_what_others_have_saved() {
    let place = Place::new("stages");
    let folder = place.join("alone");
    write(1, 1, &folder);
    let wanted = everything(&folder);
    assert!(wanted.iter().any(|(name, _)| name == "model.wte.weight"));
    for (stages, each) in [(2, 1), (3, 1), (4, 1), (2, 2), (1, 3), (2, 3)] {
        let folder = place.join(&format!("{stages}-{each}"));
        write(stages, each, &folder);
        assert!(everything(&folder) == wanted, "{stages} stages of {each}");
        // And on to another number of stages.
        let again = place.join("again");
        over(3, 2, 2, |rank, trained, optimizer| {
            Checkpoint::open(&folder)?.restore(rank.comm(), trained, &mut [optimizer])?;
            save(rank, &again, checkpoint::parts(trained, &[optimizer])?, &settings(1))
        });
        assert!(everything(&again) == wanted, "{stages} stages of {each}, by 3 of 2");
    }
}
