//! Small models over real text, trained by one device and by ranks that share every layer.

use phalanx_nn::autograd::ContextMode;
use std::ops::Range;
use std::sync::Arc;

use phalanx_nn::autograd::Var;
use phalanx_nn::models::{Decoder, DecoderStage, GptConfig, LlamaConfig, ModelConfig, next_token_targets};
use phalanx_nn::{AdamW, Clip, Group, LayerFactory, OneDevice, Parameter, Parameters, Rule, Scope, cut};
use phalanx_parallel::comm::Comm;
use phalanx_parallel::tensor_parallel::{TensorParallel, grad_norm};
use phalanx_parallel::{Result, launch};
use phalanx_tensor::{Context, DType, Device, RngKey, Tensor};

/// Steps that losses are compared over; few without optimisation, which takes a hundred times as long.
pub const STEPS: u64 = if cfg!(debug_assertions) { 2 } else { 20 };
/// Sequences of a batch.
pub const ROWS: usize = 4;
/// Their length, which divides by 2, 3 and 4.
pub const LENGTH: usize = 12;
/// What the models are trained on. With another text a run in f32 may be less stable than the tolerance of its losses.
const TEXT: &[u8] = include_bytes!("text.txt");

/// A GPT of 4 layers whose vocabulary divides by nothing that is tried here but 2 and 4.
pub fn gpt(heads: usize, dropout: f64) -> ModelConfig {
    ModelConfig::Gpt(GptConfig::new(256, LENGTH, 4, heads, 48).with_dropout(dropout))
}

/// A Llama of 4 layers with these key heads and inner features that divide by 2 and 4, but not by 3.
pub fn llama(heads: usize, key_heads: usize, dropout: f64) -> ModelConfig {
    let config = LlamaConfig::new(256, LENGTH, 4, heads, 48);
    ModelConfig::Llama(LlamaConfig { key_heads, dropout, ..config })
}

/// A whole model of these layers.
pub fn build<L: LayerFactory>(
    config: &ModelConfig,
    layers: L,
    dtype: DType,
    device: Device,
) -> Result<Decoder<L>> {
    let scope = Scope::new(3, dtype, device);
    Ok(config.init_stage(&Arc::new(layers), &scope, DecoderStage::whole(config.layers()))?)
}

/// Adds the gradients of some rows of a step's batch; their part of the mean loss.
pub fn backward<L: LayerFactory>(model: &Decoder<L>, step: u64, rows: Range<usize>) -> Result<f64> {
    let loss = loss(model, step, rows)?;
    loss.backward()?;
    Ok(if loss.dtype() == DType::F64 { loss.item::<f64>()? } else { f64::from(loss.item::<f32>()?) })
}

/// The part of the mean loss of a step's batch that is due to some rows.
pub fn loss<L: LayerFactory>(model: &Decoder<L>, step: u64, rows: Range<usize>) -> Result<Var> {
    let _context = Context::with(|c| {
        c.set_train(true);
        c.rng = RngKey { seed: 5, step };
        c.batch_offset = rows.start as u64;
    });
    let device = model.device();
    let (tokens, targets) = if device.is_meta() {
        let empty = || Tensor::empty(&[rows.len(), LENGTH], DType::I64, device);
        (empty()?, empty()?)
    } else {
        let text = |row: usize| &TEXT[(step as usize * ROWS + row) * LENGTH..][..LENGTH];
        let bytes: Vec<i64> = rows.clone().flat_map(text).map(|&byte| i64::from(byte)).collect();
        let tokens = Tensor::from_slice(&bytes, &[rows.len(), LENGTH], device)?;
        let targets = next_token_targets(&tokens)?.0;
        (tokens, targets)
    };
    let x = model.forward(&Var::new(tokens))?;
    Ok(model.loss(&x, &Var::new(targets), 1.0 / (ROWS * (LENGTH - 1)) as f64)?)
}

/// The losses of some steps of AdamW with clipping, the batch cut into micro-batches.
pub fn train<L: LayerFactory>(
    model: &Decoder<L>,
    comm: Option<&Comm>,
    steps: u64,
    micros: usize,
) -> Result<Vec<f64>> {
    let parameters = model.parameters();
    let groups = Group::decay_matrices(parameters.clone(), 3e-3, 0.1);
    let mut optimizer = AdamW::default().init(groups)?;
    let step = |step: u64| {
        let losses = cut(ROWS, micros).into_iter().map(|rows| backward(model, step, rows));
        let loss = losses.sum::<Result<f64>>()?;
        let norm = match comm {
            Some(comm) => grad_norm(&parameters, comm)?,
            None => phalanx_nn::grad_norm(&parameters)?,
        };
        optimizer.step_scaled(Clip::new(norm, 1.0).scale)?;
        optimizer.zero_grad()?;
        Ok(loss)
    };
    (0..steps).map(step).collect()
}

/// One device's losses.
pub fn train_alone(config: &ModelConfig, dtype: DType, steps: u64, micros: usize) -> Vec<f64> {
    train(&build(config, OneDevice, dtype, Device::CPU).unwrap(), None, steps, micros).unwrap()
}

/// Every rank's losses.
pub fn train_cut(config: &ModelConfig, dtype: DType, cut: Cut, steps: u64, micros: usize) -> Vec<Vec<f64>> {
    let run = |rank: launch::Rank| -> Result<Vec<f64>> {
        let model = build(config, cut.layers(rank.comm()), dtype, rank.device())?;
        train(&model, Some(rank.comm()), steps, micros)
    };
    launch::threads(cut.ranks, run).unwrap()
}

/// How a model is cut.
#[derive(Clone, Copy, Debug)]
pub struct Cut {
    pub ranks: usize,
    pub sequence: bool,
}

impl Cut {
    pub fn layers(self, comm: &Comm) -> TensorParallel {
        TensorParallel::new(comm).with_sequence_parallel(self.sequence)
    }

    /// These ranks with the stream whole and with it cut.
    pub fn both(ranks: usize) -> [Cut; 2] {
        [false, true].map(|sequence| Cut { ranks, sequence })
    }
}

/// A parameter's part of a whole tensor of that name.
pub fn part_of(parameter: &Parameter, whole: &[(String, Tensor)]) -> Vec<f64> {
    let whole = &whole.iter().find(|(name, _)| name == parameter.name()).unwrap().1;
    parameter.part().of(whole).unwrap().to_vec().unwrap()
}

/// Holds two lists of numbers against each other, relative to the largest.
pub fn assert_close(what: &str, got: &[f64], wanted: &[f64], tolerance: f64) {
    assert_eq!(got.len(), wanted.len(), "{what}");
    let largest = wanted.iter().fold(0.0f64, |max, x| max.max(x.abs()));
    for (i, (a, b)) in got.iter().zip(wanted).enumerate() {
        assert!(
            (a - b).abs() <= tolerance * largest,
            "{what}: element {i} is {a}, wanted {b} (of {largest})"
        );
    }
}
