//! Stages of a pipeline, each with data parallelism of its own: saved by some, read by others.

use std::path::Path;
use std::sync::Arc;

use phalanx_kernels as kernels;
use phalanx_nn::models::{Decoder, GptConfig, ModelConfig, Stage};
use phalanx_nn::{AdamW, OneDevice, Optimizer, Parameter, Scope, cut};
use phalanx_parallel::checkpoint::{self, Checkpoint, Trained};
use phalanx_parallel::data_parallel::{Alone, DataParallel};
use phalanx_parallel::part::Part;
use phalanx_parallel::sharded::{self, Zero, ZeroConfig};
use phalanx_parallel::{Result, launch};
use phalanx_tensor::{DType, Device};

use crate::{Place, gpt, save, settings};

const LAYERS: usize = 4;

/// A stage of a model whose head is tied to its table.
fn model(stage: usize, stages: usize, seed: u64, device: Device) -> Decoder {
    let config = ModelConfig::Gpt(GptConfig::new(37, 8, LAYERS, 2, 16));
    let layers = cut(LAYERS, stages).swap_remove(stage);
    let stage = Stage { layers, first: stage == 0, last: stage + 1 == stages };
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
            1 => Box::new(Alone::new(&model)),
            _ => Box::new(Zero::new(&model, peers, ZeroConfig::new(sharded::Stage::Parameters))?),
        };
        let mut optimizer = gpt::optimizer(share.parameters());
        f(&rank, &[Trained { model: &model, share: &*share }], &mut optimizer)
    };
    launch::threads(stages * each, run).unwrap()
}

fn write(stages: usize, each: usize, folder: &Path) {
    over(stages, each, 1, |rank, trained, optimizer| {
        step(&trained[0].share.parameters(), optimizer)?;
        trained[0].share.updated()?;
        save(rank, folder, checkpoint::parts(trained, &[optimizer])?, &settings(1))
    });
}

/// Everything in a checkpoint, as one device reads it.
fn everything(folder: &Path) -> Vec<(String, Vec<u8>)> {
    over(1, 1, 2, |rank, trained, optimizer| {
        Checkpoint::open(folder)?.restore(rank.comm(), trained, &mut [optimizer])?;
        let parts: Vec<Part> = checkpoint::parts(trained, &[optimizer])?;
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
