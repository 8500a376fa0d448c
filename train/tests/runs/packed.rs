//! Runs over text whose windows hold several documents: a language model takes them as the trainer finds them.

use std::sync::Arc;

use phalanx_nn::OneDevice;
use phalanx_nn::models::{GptConfig, LlamaConfig, ModelConfig};
use phalanx_parallel::hybrid::Layout;
use phalanx_parallel::mesh::Axis;
use phalanx_parallel::pipeline::ranks::Chunks;
use phalanx_parallel::tensor_parallel::TensorParallel;
use phalanx_train::data::{Dataset, Packed, Samples, Subset, TokenWindows, Tokens};
use phalanx_train::{Config, MeshRank, Result, Trainer};

use super::{Told, config};

pub const CONTEXT: usize = 12;

/// Documents of one to nine tokens, each of which ends in a 0.
fn tokens() -> impl Tokens + Clone {
    let document = |i: usize| (0..i % 9).map(move |at| 1 + ((i * i + at * 7) % 30) as u32).chain([0]);
    (0..200).flat_map(document).collect::<Vec<u32>>().with_end_of_text(0)
}

pub fn packed() -> Packed<impl Tokens + Clone> {
    Packed::new(tokens(), CONTEXT, 5).unwrap()
}

pub fn models() -> [ModelConfig; 2] {
    let llama = LlamaConfig { key_heads: 1, ..LlamaConfig::new(31, CONTEXT, 2, 2, 16) };
    [ModelConfig::Gpt(GptConfig::new(31, CONTEXT, 2, 2, 16)), ModelConfig::Llama(llama)]
}

/// Trains on windows. The configuration says whether it validates, on eight of them.
fn train(config: Config, model: &ModelConfig, data: impl Samples + 'static, told: &Told) -> Result<()> {
    let held_out = Subset::new(Arc::new(packed()), (0..8).collect())?;
    let trainer = Trainer::new(config.clone()).samples(data, CONTEXT).validation(held_out);
    let trainer = trainer.callback(told.clone());
    let how = config;
    if how.layout.tp > 1 {
        let layers = |rank: &MeshRank| {
            let tp = rank.groups.along(Axis::Tp);
            TensorParallel::new(tp).with_sequence_parallel(how.layout.sequence_parallel)
        };
        return trainer.run_parts(|rank| part(&how, model, Arc::new(layers(rank)), rank)).map(drop);
    }
    trainer.run_parts(|rank| part(&how, model, Arc::new(OneDevice), rank)).map(drop)
}

pub fn part<L: phalanx_nn::LayerFactory>(
    how: &Config,
    model: &ModelConfig,
    layers: Arc<L>,
    mesh_rank: &MeshRank,
) -> Result<Chunks<phalanx_nn::models::Decoder<L>>> {
    let rank = mesh_rank.groups.along(Axis::Pp).rank();
    Ok(Chunks::build(model, &layers, &mesh_rank.scope(how), &how.layout.schedule()?, rank)?)
}

#[test]
fn packed_windows_train_a_language_model_with_the_bits_of_one_rank_under_every_layout() {
    for model in models() {
        for (dp, pp, schedule, zero) in
            [(2, 1, "1f1b", 0), (2, 1, "1f1b", 1), (4, 1, "1f1b", 3), (2, 2, "1f1b", 2), (1, 2, "zb-v", 0)]
        {
            let one = Layout { micro_batches: 2, ..Layout::default() };
            let (plain, told) = (Told::default(), Told::default());
            train(Config { chains: dp, ..config(one.clone(), 0) }, &model, packed(), &plain).unwrap();
            let layout = Layout { dp, pp, schedule: schedule.into(), ..one };
            train(config(layout, zero), &model, packed(), &told).unwrap();
            assert_eq!(plain.losses().len(), 12);
            assert_eq!(told.losses(), plain.losses(), "dp {dp} x pp {pp}, {schedule}, ZeRO {zero}");
            assert_eq!(told.validations(), plain.validations(), "dp {dp} x pp {pp}, {schedule}, ZeRO {zero}");
        }
    }
}

#[test]
fn cut_layers_and_positions_train_on_packed_windows_as_one_rank_does() {
    for model in models() {
        let (plain, told) = (Told::default(), Told::default());
        train(config(Layout::default(), 0), &model, packed(), &plain).unwrap();
        let layout = Layout { tp: 2, sequence_parallel: true, ..Layout::default() };
        train(config(layout, 0), &model, packed(), &told).unwrap();
        assert_eq!([told.losses().len(), plain.losses().len()], [12; 2]);
        for (got, wanted) in told.losses().into_iter().zip(plain.losses()) {
            let (got, wanted) = (f64::from_bits(got), f64::from_bits(wanted));
            assert!((got - wanted).abs() < 1e-5 * wanted, "{got}, wanted {wanted}");
        }
    }
}

#[test]
fn documents_that_see_each_other_train_otherwise() {
    let [model, _] = models();
    let (apart, together) = (Told::default(), Told::default());
    let how = config(Layout::default(), 0);
    train(how.clone(), &model, packed(), &apart).unwrap();
    let config = Config { validate_every: 0, ..how };
    let windows = TokenWindows::new(tokens(), CONTEXT, 5).unwrap();
    let trainer = Trainer::new(config.clone()).samples(windows, CONTEXT).callback(together.clone());
    trainer.run_parts(|rank| part(&config, &model, Arc::new(OneDevice), rank)).unwrap();
    assert!(apart.losses() != together.losses());
    assert!(Dataset::len(&packed()) > 8);
}
