//! A small GPT, its batches, and how one device trains it: what parallel runs are held against.
#![allow(dead_code)]

use phalanx_nn::autograd::ContextMode;
use std::ops::Range;

use phalanx_kernels as kernels;
use phalanx_nn::autograd::Var;
use phalanx_nn::models::{Decoder, GptConfig, ModelConfig};
use phalanx_nn::{AdamW, Clip, Group, Optimizer, Parameter, Parameters, Rule, Scope, cut, grad_norm};
use phalanx_parallel::Result;
use phalanx_tensor::{Context, DType, Device, RngKey, Tensor};

/// Sequences of a global batch.
pub const ROWS: usize = 12;
/// Their length.
pub const LENGTH: usize = 8;
/// The bound of the gradients' norm, which clipping has to meet.
pub const CLIP: f64 = 0.05;

pub fn model(dtype: DType, device: Device) -> Decoder {
    let config = ModelConfig::Gpt(GptConfig::new(37, LENGTH, 2, 2, 16).with_dropout(0.2));
    let model = config.init(&Scope::new(3, dtype, device)).unwrap();
    model.parameters().iter().for_each(|p| p.set_grad_dtype(DType::F32).unwrap());
    model
}

pub fn optimizer(parameters: Vec<Parameter>) -> Optimizer<AdamW> {
    AdamW::default().init(Group::decay_matrices(parameters, 1e-2, 0.1)).unwrap()
}

/// Runs forward over some rows of a step's batch; the loss is their part of the global mean.
pub fn loss(model: &Decoder, step: u64, rows: Range<usize>) -> Result<Var> {
    let _context = Context::with(|c| {
        c.set_train(true);
        c.rng = RngKey { seed: 5, step };
        c.batch_offset = rows.start as u64;
    });
    let device = model.device();
    let tokens = |skip: usize| {
        if device.is_meta() {
            return Ok(Var::new(Tensor::empty(&[rows.len(), LENGTH], DType::I64, device)?));
        }
        let places = rows.start * LENGTH..rows.end * LENGTH;
        let tokens: Vec<i64> = places.map(|i| ((i + skip) * 7919 + step as usize * 31) as i64 % 37).collect();
        Var::from_slice(&tokens, &[rows.len(), LENGTH], device)
    };
    let x = model.forward(&tokens(0)?)?;
    Ok(model.loss(&x, &tokens(1)?, 1.0 / (ROWS * LENGTH) as f64)?)
}

/// Clips by the norm and takes a step.
pub fn update(optimizer: &mut Optimizer<AdamW>, norm: f64) -> Result<f64> {
    optimizer.step_scaled(Clip::new(norm, CLIP).scale)?;
    optimizer.zero_grad()?;
    Ok(norm)
}

/// The rows of each of a rank's micro-batches.
pub fn rows(ranks: usize, rank: usize, micros: usize) -> Vec<Range<usize>> {
    let share = cut(ROWS, ranks).swap_remove(rank);
    cut(share.len(), micros).into_iter().map(|r| share.start + r.start..share.start + r.end).collect()
}

pub fn bytes(tensors: &[(String, Tensor)]) -> Vec<(String, Vec<u8>)> {
    tensors.iter().map(|(name, t)| (name.clone(), t.to_bytes().unwrap())).collect()
}

/// One device in the place of ranks: `backward` adds a rank's gradients; each rank's are a chain of its own for each
/// site, the chains are added in order, and sites are added last.
pub fn add_chains(parameters: &[Parameter], ranks: usize, mut backward: impl FnMut(usize)) {
    let leaves: Vec<_> = parameters.iter().flat_map(|p| p.leaves().to_vec()).collect();
    let mut sums: Vec<Option<Tensor>> = vec![None; leaves.len()];
    for rank in 0..ranks {
        backward(rank);
        for (sum, leaf) in sums.iter_mut().zip(&leaves) {
            let Some(grad) = leaf.grad().map(Var::into_tensor) else { continue };
            leaf.set_grad(None);
            match sum {
                Some(sum) => kernels::accumulate_(sum, &grad).unwrap(),
                None => *sum = Some(grad),
            }
        }
    }
    leaves.iter().zip(sums).for_each(|(leaf, sum)| leaf.set_grad(sum.map(Var::new)));
}

/// The norms of the steps, and the state at the end: values, optimizer.
pub type Trained = (Vec<f64>, Vec<(String, Vec<u8>)>, Vec<(String, Vec<u8>)>);

/// One device: a chain of micro-batches for each of `ranks`, added in order.
pub fn alone(dtype: DType, ranks: usize, micros: usize, steps: u64) -> Trained {
    alone_in_groups(dtype, [1, ranks], micros, steps, DType::F32)
}

/// The same for `groups` of so many ranks each: ranks are added in their group, then groups, in order.
pub fn alone_in_groups(
    dtype: DType,
    [groups, ranks]: [usize; 2],
    micros: usize,
    steps: u64,
    grads: DType,
) -> Trained {
    let model = model(dtype, Device::CPU);
    model.parameters().iter().for_each(|p| p.set_grad_dtype(grads).unwrap());
    let (mut optimizer, parameters) = (optimizer(model.parameters()), model.parameters());
    let mut norms = Vec::new();
    for step in 0..steps {
        add_chains(&parameters, groups, |group| {
            add_chains(&parameters, ranks, |rank| {
                for rows in rows(groups * ranks, group * ranks + rank, micros) {
                    loss(&model, step, rows).unwrap().backward().unwrap();
                }
            });
        });
        let norm = grad_norm(&parameters).unwrap();
        norms.push(update(&mut optimizer, norm).unwrap());
    }
    let mut state = bytes(&optimizer.state_dict().unwrap());
    state.sort();
    (norms, bytes(&phalanx_nn::state_dict(&model)), state)
}
