//! The memory that a tensor-parallel layer keeps for its backward pass, from the ledger. SingleDevice in this file, since no other
//! test may use its ledgers.

#[path = "tensor/kit.rs"]
#[allow(dead_code)]
mod kit;

use phalanx_nn::models::{GptConfig, LlamaConfig, ModelConfig};
use phalanx_nn::{LayerFactory, OneDevice};
use phalanx_parallel::comm;
use phalanx_parallel::launch;
use phalanx_tensor::{Category, DType, Device};

use kit::{Cut, LENGTH, ROWS, build, loss};

const LAYERS: usize = 4;
const WIDTH: usize = 48;

/// Bytes of activations that a forward pass of a model of some layers leaves behind.
fn kept<L: LayerFactory>(config: &ModelConfig, layers: L, device: Device) -> usize {
    let model = build(config, layers, DType::F32, device).unwrap();
    let ledger = device.ledger().unwrap();
    let before = ledger.category(Category::Activations).now;
    let loss = loss(&model, 0, 0..ROWS).unwrap();
    let kept = ledger.category(Category::Activations).now - before;
    drop(loss);
    kept
}

/// What one layer keeps: the difference between models of four layers and of two.
fn per_layer<L: LayerFactory>(config: &ModelConfig, layers: impl Fn() -> L, device: Device) -> usize {
    let of = |count: usize| {
        let mut config = config.clone();
        match &mut config {
            ModelConfig::Gpt(config) => config.layers = count,
            ModelConfig::Llama(config) => config.layers = count,
            ModelConfig::Transformer(_) => unreachable!("no such case"),
        }
        kept(&config, layers(), device)
    };
    (of(LAYERS) - of(LAYERS - 2)) / 2
}

/// Rank 0 of `ranks` on a device without elements.
fn cut_on_meta(config: &ModelConfig, cut: Cut, device: u16) -> usize {
    per_layer(config, || cut.layers(&comm::meta(0, cut.ranks).unwrap()), Device::Meta(device))
}

fn llama(dropout: f64) -> ModelConfig {
    // Inner features that divide by all ranks tried.
    let config = LlamaConfig::new(256, LENGTH, LAYERS, 12, WIDTH);
    ModelConfig::Llama(LlamaConfig { inner: 144, dropout, ..config })
}

fn gpt(dropout: f64) -> ModelConfig {
    ModelConfig::Gpt(GptConfig::new(256, LENGTH, LAYERS, 12, WIDTH).with_dropout(dropout))
}

/// With sequence parallelism all that a layer keeps is cut: `bytes(n) = bytes(1) / n`. Where attention's probabilities are
/// dropped, the causal mask, a bool for each pair of positions, stays: it is one for all heads.
#[test]
fn sequence_parallelism_divides_what_a_layer_keeps_by_the_ranks() {
    for (i, config) in [gpt(0.0), gpt(0.2), llama(0.0), llama(0.1)].into_iter().enumerate() {
        let device = 100 + 10 * i as u16;
        let alone = per_layer(&config, || OneDevice, Device::Meta(device));
        for ranks in [2, 3, 4] {
            let cut = cut_on_meta(&config, Cut { ranks, sequence: true }, device + ranks as u16);
            let mask = if i % 2 == 1 { LENGTH * LENGTH } else { 0 };
            assert_eq!(cut * ranks, alone + (ranks - 1) * mask, "{ranks} ranks, {config:?}");
        }
    }
}

/// Without it what lies in the stream stays: `bytes(n) = bytes(1) / n + (1 - 1 / n) stream`. The stream of a GPT layer
/// without dropout is two norms' inputs `[B, T, w]` and their three numbers a row, in f32; their outputs are made again.
#[test]
fn the_stream_stays_whole_without_it() {
    let alone = per_layer(&gpt(0.0), || OneDevice, Device::Meta(150));
    let stream = 4 * ROWS * LENGTH * (2 * WIDTH + 2 * 3);
    for ranks in [2, 3, 4] {
        let cut = cut_on_meta(&gpt(0.0), Cut { ranks, sequence: false }, 150 + ranks as u16);
        assert_eq!(cut * ranks, alone + (ranks - 1) * stream, "{ranks} ranks");
    }
}

#[test]
fn a_rank_on_meta_keeps_what_one_among_many_keeps() {
    for cut in Cut::both(3) {
        let config = llama(0.1);
        let meta = |rank| kept(&config, cut.layers(&comm::meta(rank, 3).unwrap()), Device::Meta(160));
        let ranks = launch::threads(3, |rank| -> phalanx_parallel::Result<usize> {
            Ok(kept(&config, cut.layers(rank.comm()), rank.device()))
        });
        assert_eq!(ranks.unwrap(), [0, 1, 2].map(meta), "{cut:?}");
    }
}
