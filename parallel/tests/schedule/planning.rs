//! PipeDream's dynamic program against trying everything; the formulas of transformers against the tables of the papers and
//! against our own models.

use std::ops::Range;

use phalanx_nn::models::{GptConfig, ModelConfig};
use phalanx_nn::{Parameters, Scope};
use phalanx_parallel::planning::{
    Degrees, LayerProfile, Level, PlannedStage, RecomputeGranularity, Transformer, plan,
};
use phalanx_tensor::{DType, Device};
use proptest::prelude::*;

/// The fastest partition of a range over all workers of the highest level, by trying all.
fn brute(layers: &[LayerProfile], levels: &[Level], range: Range<usize>) -> f64 {
    let Some((level, beneath)) = levels.split_last() else {
        return layers[range].iter().map(|layer| layer.time).sum();
    };
    parts(layers, level, beneath, range, level.width)
}

/// Every first stage on every number of workers, and every partition of the rest on the others.
fn parts(
    layers: &[LayerProfile],
    level: &Level,
    beneath: &[Level],
    range: Range<usize>,
    workers: usize,
) -> f64 {
    let stage = |part: Range<usize>, m: usize| {
        let bytes: f64 = layers[part.clone()].iter().map(|layer| layer.parameter_bytes).sum();
        brute(layers, beneath, part).max(2.0 * (m as f64 - 1.0) * bytes / level.bandwidth) / m as f64
    };
    let mut best = stage(range.clone(), workers);
    for cut in range.start + 1..range.end {
        for m in 1..workers {
            let rest = parts(layers, level, beneath, cut..range.end, workers - m);
            let transfer = 2.0 * layers[cut - 1].activation_bytes / level.bandwidth;
            best = best.min(stage(range.start..cut, m).max(transfer).max(rest));
        }
    }
    best
}

/// What a plan takes by its own stages.
fn cost(layers: &[LayerProfile], levels: &[Level], stages: &[PlannedStage], range: Range<usize>) -> f64 {
    let Some((level, beneath)) = levels.split_last() else {
        assert!(stages.is_empty());
        return layers[range].iter().map(|layer| layer.time).sum();
    };
    assert_eq!(stages.iter().map(|stage| stage.replicas).sum::<usize>(), level.width);
    assert_eq!((stages[0].layers.start, stages[stages.len() - 1].layers.end), (range.start, range.end));
    assert!(stages.windows(2).all(|pair| pair[0].layers.end == pair[1].layers.start));
    let mut slowest = 0.0_f64;
    for stage in stages {
        let m = stage.replicas as f64;
        let bytes: f64 = layers[stage.layers.clone()].iter().map(|layer| layer.parameter_bytes).sum();
        let alone = cost(layers, beneath, &stage.inside, stage.layers.clone());
        slowest = slowest.max(alone.max(2.0 * (m - 1.0) * bytes / level.bandwidth) / m);
        if stage.layers.end < range.end {
            slowest = slowest.max(2.0 * layers[stage.layers.end - 1].activation_bytes / level.bandwidth);
        }
    }
    slowest
}

fn layer() -> impl Strategy<Value = LayerProfile> {
    (1_u32..20, 0_u32..30, 0_u32..60).prop_map(|(time, activation, parameter)| LayerProfile {
        time: time.into(),
        activation_bytes: activation.into(),
        parameter_bytes: parameter.into(),
    })
}

proptest! {
    #[test]
    fn the_plan_is_as_fast_as_any(
        layers in prop::collection::vec(layer(), 1..7),
        widths in prop::collection::vec(1_usize..5, 1..3),
        bandwidth in 1_u32..20,
    ) {
        let level = |(i, &width): (usize, &usize)| Level { width, bandwidth: f64::from(bandwidth) / (i + 1) as f64 };
        let levels: Vec<Level> = widths.iter().enumerate().map(level).collect();
        let found = plan(&layers, &levels).unwrap();
        let best = brute(&layers, &levels, 0..layers.len());
        prop_assert!((found.time - best).abs() <= 1e-12 * best, "{} and {best}", found.time);
        prop_assert_eq!(found.time, cost(&layers, &levels, &found.stages, 0..layers.len()));
    }
}

fn even(count: usize, activation_bytes: f64, parameter_bytes: f64) -> Vec<LayerProfile> {
    vec![LayerProfile { time: 1.0, activation_bytes, parameter_bytes }; count]
}

fn shape(stages: &[PlannedStage]) -> Vec<(Range<usize>, usize)> {
    stages.iter().map(|stage| (stage.layers.clone(), stage.replicas)).collect()
}

#[test]
fn equal_layers_over_a_fast_network_are_cut_evenly_or_replicated() {
    let level = |bandwidth| [Level { width: 4, bandwidth }];
    let found = plan(&even(8, 1.0, 1000.0), &level(10.0)).unwrap();
    assert_eq!(shape(&found.stages), [(0..2, 1), (2..4, 1), (4..6, 1), (6..8, 1)]);
    assert_eq!((found.time, found.in_flight()), (2.0, 4));
    let found = plan(&even(8, 1000.0, 1.0), &level(10.0)).unwrap();
    assert_eq!(shape(&found.stages), [(0..8, 4)], "activations are large, parameters small");
    assert_eq!((found.time, found.in_flight()), (2.0, 1));
}

/// As VGG-16 in the paper, whose plan on 16 workers is 15-1: convolutions with little to synchronise, then one layer with most
/// parameters.
#[test]
fn one_worker_keeps_the_layer_with_most_parameters() {
    let mut layers = even(15, 1.0, 1.0);
    layers.push(LayerProfile { time: 1.0, activation_bytes: 1.0, parameter_bytes: 1e6 });
    let found = plan(&layers, &[Level { width: 16, bandwidth: 100.0 }]).unwrap();
    assert_eq!(shape(&found.stages), [(0..15, 15), (15..16, 1)]);
    assert_eq!((found.time, found.in_flight()), (1.0, 2));
}

#[test]
fn each_group_is_cut_in_itself() {
    let levels = [Level { width: 2, bandwidth: 100.0 }, Level { width: 2, bandwidth: 4.0 }];
    let found = plan(&even(4, 1.0, 1e6), &levels).unwrap();
    assert_eq!(shape(&found.stages), [(0..2, 1), (2..4, 1)]);
    assert_eq!(shape(&found.stages[1].inside), [(2..3, 1), (3..4, 1)]);
    assert_eq!(found.time, 1.0);
}

#[test]
fn what_cannot_be_planned_is_refused() {
    let level = Level { width: 2, bandwidth: 1.0 };
    let refused = |layers: &[LayerProfile], levels: &[Level]| plan(layers, levels).unwrap_err().to_string();
    assert_eq!(refused(&[], &[level]), "plan: got 0 layers, 1 levels, wanted at least one of each");
    assert_eq!(refused(&even(1, 1.0, 1.0), &[]), "plan: got 1 layers, 0 levels, wanted at least one of each");
    let wrong = refused(&even(1, f64::NAN, 1.0), &[level]);
    assert!(
        wrong.starts_with("plan: got layer 0: LayerProfile {")
            && wrong.ends_with("wanted finite numbers from 0 up")
    );
    let wrong = refused(&even(1, 1.0, 1.0), &[level, Level { width: 2, bandwidth: 0.0 }]);
    assert_eq!(
        wrong,
        "plan: got level 1: Level { width: 2, bandwidth: 0.0 }, wanted a width and a bandwidth above 0"
    );
}

fn gpt(hidden: usize, layers: usize) -> Transformer {
    Transformer { layers, hidden, heads: hidden / 128, vocabulary: 51200, sequence: 2048 }
}

/// Narayanan et al. (arXiv:2104.04473), table 1: hidden, layers, ranks, batch, teraFLOP/s a rank, billions of parameters.
const TABLE: [(usize, usize, usize, usize, f64, &str); 10] = [
    (2304, 24, 32, 512, 137.0, "1.7"),
    (3072, 30, 64, 512, 138.0, "3.6"),
    (4096, 36, 128, 512, 142.0, "7.5"),
    (6144, 40, 256, 1024, 135.0, "18.4"),
    (8192, 48, 512, 1536, 138.0, "39.1"),
    (10240, 60, 1024, 1792, 140.0, "76.1"),
    (12288, 80, 1536, 2304, 148.0, "145.6"),
    (16384, 96, 1920, 2160, 155.0, "310.1"),
    (20480, 105, 2520, 2520, 163.0, "529.6"),
    (25600, 128, 3072, 3072, 163.0, "1008.0"),
];

#[test]
fn megatrons_ten_models_have_their_parameters() {
    for (hidden, layers, .., wanted) in TABLE {
        assert_eq!(format!("{:.1}", gpt(hidden, layers).parameters() / 1e9), wanted);
    }
}

#[test]
fn our_models_have_the_parameters_of_the_formula_and_a_last_norm() {
    for (hidden, layers, ..) in TABLE {
        let model = gpt(hidden, layers);
        let config = GptConfig::new(model.vocabulary, model.sequence, layers, model.heads, hidden);
        let built = ModelConfig::Gpt(config).init(&Scope::new(0, DType::BF16, Device::Meta(9))).unwrap();
        let elements: usize = built.parameters().iter().map(|p| p.tensor().numel()).sum();
        assert_eq!(elements as f64, model.parameters() + 2.0 * hidden as f64, "{layers} layers of {hidden}");
    }
}

#[test]
fn megatrons_throughput_implies_its_iteration_times() {
    let seconds = |(hidden, layers, ranks, batch, rate, _): (usize, usize, usize, usize, f64, &str)| {
        gpt(hidden, layers).flops_recomputed(batch) / (ranks as f64 * rate * 1e12)
    };
    assert_eq!(format!("{:.2}", seconds(TABLE[0])), "3.53");
    assert_eq!(format!("{:.2}", seconds(TABLE[9])), "102.63");
}

#[test]
fn arithmetic_is_the_papers_formula() {
    let (l, h, s, v, b) = (80.0, 12288.0, 2048.0, 51200.0, 7.0);
    let close = |got: f64, wanted: f64| assert!((got / wanted - 1.0).abs() < 1e-14, "{got} and {wanted}");
    let base = b * s * l * h * h;
    close(gpt(12288, 80).flops_recomputed(7), 96.0 * base * (1.0 + s / (6.0 * h) + v / (16.0 * l * h)));
    close(gpt(12288, 80).flops(7), 72.0 * base * (1.0 + s / (6.0 * h) + v / (12.0 * l * h)));
}

#[test]
fn activations_of_a_block_are_the_papers_table() {
    let model = Transformer { layers: 96, hidden: 12288, heads: 96, vocabulary: 51200, sequence: 2048 };
    let sbh = 2048.0 * 2.0 * 12288.0;
    let scores = 5.0 * 96.0 * 2048.0 / 12288.0;
    assert_eq!(scores, 80.0, "of GPT-3, as the paper says");
    let bytes = |tensor, sequence_parallel, recompute| {
        let layout = Degrees { tensor, sequence_parallel, recompute, ..Degrees::default() };
        model.block_activation_bytes(&layout, 2) / sbh
    };
    use RecomputeGranularity::{Attention, Block, Nothing};
    assert_eq!(bytes(1, false, Nothing), 34.0 + scores);
    assert_eq!(bytes(8, false, Nothing), 10.0 + 24.0 / 8.0 + scores / 8.0);
    assert_eq!(bytes(8, true, Nothing), (34.0 + scores) / 8.0);
    assert_eq!(bytes(1, false, Attention), 34.0);
    assert_eq!(bytes(8, false, Attention), 10.0 + 24.0 / 8.0);
    assert_eq!(bytes(8, true, Attention), 34.0 / 8.0);
    assert_eq!(bytes(8, true, Block), 2.0);
}

#[test]
fn activations_of_the_first_stage_are_those_of_all_blocks() {
    let model = gpt(6144, 48);
    let sbh = 2048.0 * 4.0 * 6144.0;
    let total = |pipeline, chunks| {
        let layout = Degrees {
            tensor: 8,
            sequence_parallel: true,
            pipeline,
            chunks,
            recompute: RecomputeGranularity::Attention,
        };
        model.activation_bytes(&layout, 4) / sbh
    };
    let blocks = 48.0 * 34.0 / 8.0;
    assert_eq!(total(8, 1), blocks + 8.0 / 8.0);
    assert_eq!(total(8, 3), blocks * (1.0 + 7.0 / 24.0) + 8.0 / 8.0);
    assert_eq!(total(1, 1), blocks + 1.0 / 8.0 + 4.0 / 8.0 * (1.0 + 51200.0 / 6144.0));
}
