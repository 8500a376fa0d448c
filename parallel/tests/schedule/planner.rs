//! PipeDream's planner against trying everything.

use std::ops::Range;

use phalanx_parallel::pipeline::planner::{Layer, Level, Stage, plan};
use proptest::prelude::*;

/// The fastest partition of a range over all workers of the highest level, by trying all.
fn brute(layers: &[Layer], levels: &[Level], range: Range<usize>) -> f64 {
    let Some((level, beneath)) = levels.split_last() else {
        return layers[range].iter().map(|layer| layer.time).sum();
    };
    parts(layers, level, beneath, range, level.width)
}

/// Every first stage on every number of workers, and every partition of the rest on the others.
fn parts(layers: &[Layer], level: &Level, beneath: &[Level], range: Range<usize>, workers: usize) -> f64 {
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
fn cost(layers: &[Layer], levels: &[Level], stages: &[Stage], range: Range<usize>) -> f64 {
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

fn layer() -> impl Strategy<Value = Layer> {
    (1_u32..20, 0_u32..30, 0_u32..60).prop_map(|(time, activation, parameter)| Layer {
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

fn even(count: usize, activation_bytes: f64, parameter_bytes: f64) -> Vec<Layer> {
    vec![Layer { time: 1.0, activation_bytes, parameter_bytes }; count]
}

fn shape(stages: &[Stage]) -> Vec<(Range<usize>, usize)> {
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
    layers.push(Layer { time: 1.0, activation_bytes: 1.0, parameter_bytes: 1e6 });
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
    let refused = |layers: &[Layer], levels: &[Level]| plan(layers, levels).unwrap_err().to_string();
    assert_eq!(refused(&[], &[level]), "plan: got 0 layers, 1 levels, wanted at least one of each");
    assert_eq!(refused(&even(1, 1.0, 1.0), &[]), "plan: got 1 layers, 0 levels, wanted at least one of each");
    let wrong = refused(&even(1, f64::NAN, 1.0), &[level]);
    assert!(
        wrong.starts_with("plan: got layer 0: Layer {") && wrong.ends_with("wanted finite numbers from 0 up")
    );
    let wrong = refused(&even(1, 1.0, 1.0), &[level, Level { width: 2, bandwidth: 0.0 }]);
    assert_eq!(
        wrong,
        "plan: got level 1: Level { width: 2, bandwidth: 0.0 }, wanted a width and a bandwidth above 0"
    );
}
