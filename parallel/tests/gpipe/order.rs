//! Each device computes its cells in the order of the clock cycles, and backward in its mirror; values and gradients cross
//! from device to device.

use std::sync::{Arc, Mutex};
use std::time::Instant;

use phalanx_nn::autograd::Var;
use phalanx_nn::models::RecomputeMode;
use phalanx_nn::{LinearConfig, Module, Scope};
use phalanx_parallel::pipeline::gpipe::{
    Batch, GPipe, GPipeConfig, Layer, Partition, Phase, Span, Timeline, bubble, device_orders,
};
use phalanx_tensor::{DType, Device};

use crate::kit::*;

/// Stages of one probe each, which take as long as `ms` says of the stage, forward and backward.
fn probes(
    places: &[Device],
    config: GPipeConfig,
    journal: &Journal,
    ms: impl Fn(usize) -> [u64; 2],
) -> GPipe {
    let probe = |(stage, &device): (usize, &Device)| {
        let [forward_ms, backward_ms] = ms(stage);
        let probe = Probe { forward_ms, backward_ms, ..Probe::new(stage, device, journal) };
        Box::new(probe) as Box<dyn Layer>
    };
    each(places.iter().enumerate().map(probe).collect(), places, config)
}

fn reversed(mut order: Vec<(usize, usize)>) -> Vec<(usize, usize)> {
    order.reverse();
    order
}

#[test]
fn every_device_follows_the_clock_cycles_and_their_mirror() {
    let own = devices(3);
    let placements = [vec![0], vec![0, 1], vec![0, 1, 2], vec![0, 0], vec![0, 1, 0], vec![0, 1, 0, 1]];
    for places in placements {
        let places: Vec<Device> = places.into_iter().map(|i| own[i]).collect();
        for (mode, micro_batches) in MODES.into_iter().zip([5, 4, 6]) {
            // Fast and slow stages in both orders, so that devices wait for each other in all ways.
            for slow in [0, 1] {
                let journal = Journal::default();
                let ms = |stage| [(stage as u64 + slow) % 2 * 2, (stage as u64 + slow + 1) % 2 * 3];
                let config = GPipeConfig::new(micro_batches).with_recompute(mode);
                let model = probes(&places, config, &journal, ms);
                let x = constant(1, &[micro_batches, 1], places[0]);
                model.forward(&x).unwrap().sum_all().unwrap().backward().unwrap();
                for (device, order) in device_orders(micro_batches, &places) {
                    let order: Vec<_> = order.into_iter().map(|c| (c.micro_batch, c.stage)).collect();
                    let kept = |cell: &(usize, usize)| cell.0 >= mode.recomputed(micro_batches);
                    let mirror = reversed(order.clone());
                    assert_eq!(done(&journal, device, "forward"), order, "{places:?} {mode}");
                    assert_eq!(done(&journal, device, "backward"), mirror, "{places:?} {mode}");
                    let again: Vec<_> = mirror.into_iter().filter(|cell| !kept(cell)).collect();
                    assert_eq!(done(&journal, device, "again"), again, "{places:?} {mode}");
                }
            }
        }
    }
}

#[test]
fn a_cell_is_recomputed_after_the_backward_of_the_one_before() {
    let own = devices(2);
    let journal = Journal::default();
    let config = GPipeConfig::new(3).with_recompute(RecomputeMode::Always);
    let model = probes(&own, config, &journal, |_| [0, 2]);
    model.forward(&constant(1, &[3, 1], own[0])).unwrap().sum_all().unwrap().backward().unwrap();
    for (stage, &device) in own.iter().enumerate() {
        let noted: Vec<_> = journal.lock().unwrap().iter().filter(|e| e.0 == device).copied().collect();
        let backward: Vec<_> = noted[3..].iter().map(|e| (e.1, e.2)).collect();
        let cell = |i| [("again", i), ("backward", i)];
        assert_eq!(backward, [cell(2), cell(1), cell(0)].concat(), "stage {stage}");
    }
}

#[test]
fn a_stage_recomputes_while_its_gradient_is_on_the_way() {
    let own = devices(2);
    let timeline = Timeline::new();
    let config = GPipeConfig::new(1).with_recompute(RecomputeMode::Always).with_observer(timeline.observer());
    let model = probes(&own, config, &Journal::default(), |stage| [20, if stage == 1 { 80 } else { 0 }]);
    let y = model.forward(&constant(1, &[1, 1], own[0])).unwrap().sum_all().unwrap();
    timeline.take();
    y.backward().unwrap();
    let spans = timeline.take();
    let find = |stage, phase| spans.iter().find(|s| s.cell.stage == stage && s.phase == phase).unwrap();
    assert!(find(0, Phase::Recompute).end < find(1, Phase::Backward).end);
}

#[test]
fn the_observer_hears_of_every_phase_of_every_cell_once() {
    let own = devices(2);
    let timeline = Timeline::new();
    let (m, n) = (4, 2);
    let config = GPipeConfig::new(m).with_observer(timeline.observer());
    let model = probes(&own, config, &Journal::default(), |_| [1, 1]);
    let begin = Instant::now();
    model.forward(&leaf(1, &[m, 1], own[0])).unwrap().sum_all().unwrap().backward().unwrap();
    let spans = timeline.take();
    let count = |phase| spans.iter().filter(|s| s.phase == phase).count();
    // Forward and backward, a copy of each micro-batch to the second stage, one of each gradient back.
    assert_eq!([count(Phase::Forward), count(Phase::Backward)], [m * n; 2]);
    assert_eq!([count(Phase::Recompute), count(Phase::Copy)], [(m - 1) * n, 2 * m * (n - 1)]);
    for span in &spans {
        assert_eq!(span.device, own[span.cell.stage]);
        assert!(begin <= span.begin && span.begin <= span.end && span.end <= Instant::now());
    }
    let computed = |device| {
        let spans = spans.iter().filter(move |s| s.device == device && s.phase != Phase::Copy);
        spans.collect::<Vec<_>>()
    };
    for device in own {
        let spans = computed(device);
        assert!(spans.windows(2).all(|pair| pair[0].end <= pair[1].begin), "one thing at a time");
        let backward = spans.iter().filter(|s| s.phase == Phase::Backward).map(|s| s.cell.micro_batch);
        assert_eq!(backward.collect::<Vec<_>>(), [3, 2, 1, 0]);
    }
    assert!(timeline.take().is_empty());
}

/// The bubble of forward and backward together, of a model that reports its spans to `timeline`.
fn measured_bubble(model: &GPipe, x: &Var, timeline: &Timeline) -> f64 {
    timeline.take();
    let y = model.run(x).and_then(Batch::one).unwrap();
    let forward = bubble(&timeline.take());
    let dy = phalanx_kernels::full(y.shape(), 1.0, y.dtype(), y.device()).unwrap();
    y.backward_with(Var::new(dy)).unwrap();
    (forward + bubble(&timeline.take())) / 2.0
}

/// The bubble of two stages, the mean of forward and backward passes. A forward pass of a micro-batch takes 1, a backward pass `b`, and
/// each micro-batch that is recomputed 1 more. The second stage begins with backward passes. The first stage recomputes while a gradient
/// is on its way, so it ends one backward pass later, and each stage is idle that long.
fn formula(m: usize, mode: RecomputeMode, b: f64) -> f64 {
    let recomputed = match mode {
        RecomputeMode::Always => m,
        RecomputeMode::ExceptLast => m - 1,
        RecomputeMode::Never | RecomputeMode::Attention => 0,
    };
    let forward = 1.0 / (m + 1) as f64;
    let backward = b / (m as f64 * b + recomputed as f64 + b);
    (forward + backward) / 2.0
}

/// Measures until the bubble is near the formula's: other work of the machine makes it larger for a while.
fn assert_bubble(m: usize, mode: RecomputeMode, formula: f64, tolerance: f64, measure: impl Fn() -> f64) {
    let mut measured = Vec::new();
    let is_near = (0..20).any(|_| {
        measured.push(measure());
        measured.iter().any(|bubble| (bubble - formula).abs() < tolerance)
    });
    println!("{m} micro-batches, recomputed {mode}: formula {formula:.3}, measured {measured:.3?}");
    assert!(is_near, "{m} micro-batches, recomputed {mode}: formula {formula:.3}, measured {measured:.3?}");
}

/// `cargo test --release -p phalanx-parallel --test gpipe bubble -- --ignored --nocapture`. With one stage after the other it would be
/// 1/2.
#[test]
#[ignore = "measures times: for an idle machine"]
fn the_bubble_of_two_equal_stages_is_that_of_the_formula() {
    let own = devices(2);
    let timeline = Timeline::new();
    for (m, mode) in [2, 8].into_iter().flat_map(|m| MODES.map(|mode| (m, mode))) {
        let config = GPipeConfig::new(m).with_recompute(mode).with_observer(timeline.observer());
        let model = probes(&own, config, &Journal::default(), |_| [20, 20]);
        let x = leaf(1, &[m, 1], own[0]);
        assert_bubble(m, mode, formula(m, mode, 1.0), 0.02, || measured_bubble(&model, &x, &timeline));
    }
}

/// The same of stages that compute; the two products of a backward pass take twice a forward pass.
#[test]
#[ignore = "measures times: for an idle machine of two cores"]
fn the_bubble_of_two_equal_stages_that_compute_is_that_of_the_formula() {
    let own = devices(2);
    let timeline = Timeline::new();
    for (m, mode) in [2, 4, 8].into_iter().flat_map(|m| MODES.map(|mode| (m, mode))) {
        let config = GPipeConfig::new(m).with_recompute(mode).with_observer(timeline.observer());
        let partition = Partition::new(&[4, 4], &own).unwrap();
        let linear = |i: usize| {
            let scope = Scope::new(1, DType::F32, partition.device(i).unwrap()).child(i);
            Box::new(LinearConfig::new(512, 512).init(&scope).unwrap()) as Box<dyn Layer>
        };
        let layers: Vec<_> = (0..8).map(linear).collect();
        let model = GPipe::new(layers.into(), partition, config).unwrap();
        let x = Var::leaf(phalanx_kernels::full(&[m * 512, 512], 0.5, DType::F32, own[0]).unwrap()).unwrap();
        assert_bubble(m, mode, formula(m, mode, 2.0), 0.05, || measured_bubble(&model, &x, &timeline));
    }
}

#[test]
fn a_copy_holds_up_only_who_needs_it() {
    let own = devices(2);
    let (told, over) = (Arc::new(Mutex::new(Vec::new())), Timeline::new());
    let (spans, observer) = (told.clone(), over.observer());
    let observer = Arc::new(move |span: Span| {
        spans.lock().unwrap().push((span.phase, span.cell.stage, span.cell.micro_batch));
        observer(span);
    });
    // All is copied while the second stage still computes the first micro-batch; the first stage does not wait.
    let second = apply(move |batch| {
        let is_over = |what| told.lock().unwrap().contains(&what);
        assert!(soon(|| is_over((Phase::Copy, 1, 2)) && is_over((Phase::Forward, 0, 2))));
        Ok(batch)
    });
    let model = each(vec![apply(Ok), second], &own, GPipeConfig::new(3).with_observer(observer));
    model.run(constant(1, &[3, 1], own[0])).unwrap();
    assert_eq!(over.take().iter().filter(|span| span.phase == Phase::Forward).count(), 6);
}

#[test]
fn no_stage_is_more_than_three_micro_batches_ahead_of_the_next() {
    let own = devices(2);
    let (m, ahead, timeline) = (8, 3, Timeline::new());
    for mode in MODES {
        let config = GPipeConfig::new(m).with_recompute(mode).with_observer(timeline.observer());
        // In each direction the stage that comes first is the faster one.
        let ms = |stage| if stage == 0 { [0, 10] } else { [10, 0] };
        let model = probes(&own, config, &Journal::default(), ms);
        model.forward(&leaf(1, &[m, 1], own[0])).unwrap().sum_all().unwrap().backward().unwrap();
        let spans = timeline.take();
        let find = |phase: Phase, stage: usize, i: usize| {
            let cell = |s: &&Span| (s.phase, s.cell.stage, s.cell.micro_batch) == (phase, stage, i);
            spans.iter().find(cell).unwrap()
        };
        for i in ahead..m {
            let [first, second] = [0, 1].map(|stage| find(Phase::Forward, stage, i - stage * ahead));
            assert!(second.end <= first.begin, "forward of {i}, {mode}");
            let [first, second] = [0, 1].map(|stage| find(Phase::Backward, stage, i - stage * ahead));
            assert!(first.end <= second.begin, "backward of {i}, {mode}");
        }
    }
}

fn identity() -> Box<dyn phalanx_parallel::pipeline::gpipe::Layer> {
    apply(Ok)
}

#[test]
fn values_and_gradients_of_every_layout_and_dtype_arrive() {
    let own = devices(2);
    for dtype in [DType::F64, DType::F32, DType::BF16, DType::F16] {
        // Columns of a larger tensor: rows do not lie one after the other.
        let x = leaf(1, &[6, 7], own[0]).to(dtype).unwrap();
        let model = each(vec![identity(), identity()], &own, GPipeConfig::new(3));
        let part = x.split_sizes(&[3, 4], 1).unwrap().remove(1);
        let y = model.run(&part).and_then(Batch::one).unwrap();
        assert_eq!((y.device(), y.dtype(), y.shape()), (own[1], dtype, &[6, 4][..]));
        let values = |v: &phalanx_nn::autograd::Var| v.to(DType::F64).unwrap().to_vec::<f64>().unwrap();
        assert_eq!(values(&y), values(&part));
        let c = constant(3, &[6, 4], own[1]).to(dtype).unwrap();
        x.retain_grad();
        y.mul(&c).unwrap().to(DType::F64).unwrap().sum_all().unwrap().backward().unwrap();
        let dx = values(&x.grad().unwrap());
        let wanted = values(&c);
        for row in 0..6 {
            assert_eq!(dx[row * 7..][..3], [0.0; 3]);
            assert_eq!(dx[row * 7 + 3..][..4], wanted[row * 4..][..4]);
        }
    }
}

#[test]
fn integers_and_bools_cross_without_gradients() {
    let own = devices(2);
    for mode in MODES {
        let model = each(vec![identity(), identity()], &own, GPipeConfig::new(2).with_recompute(mode));
        let x = leaf(1, &[3, 2], own[0]);
        let mask = x.to(DType::Bool).unwrap();
        let index = constant(2, &[3], own[0]).mul_scalar(10.0).unwrap().to(DType::I64).unwrap();
        let [y, mask2, index2] = model.run([x.clone(), mask.clone(), index.clone()]).unwrap().many().unwrap();
        assert_eq!(mask2.to_vec::<bool>().unwrap(), mask.to_vec::<bool>().unwrap());
        assert_eq!(index2.to_vec::<i64>().unwrap(), index.to_vec::<i64>().unwrap());
        assert_eq!([y.requires_grad(), mask2.requires_grad(), index2.requires_grad()], [true, false, false]);
        y.sum_all().unwrap().backward().unwrap();
        assert_eq!(x.grad().unwrap().to_vec::<f64>().unwrap(), [1.0; 6]);
    }
}

#[test]
fn what_needs_no_gradient_gets_none_behind_a_stage() {
    let own = devices(2);
    let model =
        each(vec![identity(), identity()], &own, GPipeConfig::new(2).with_recompute(RecomputeMode::Never));
    let (x, mask) = (leaf(1, &[3, 2], own[0]), constant(2, &[3, 2], own[0]));
    let [y, mask] = model.run([x, mask]).unwrap().many().unwrap();
    assert!(y.requires_grad() && !mask.requires_grad());
}

#[test]
fn all_values_of_a_cell_are_waited_for() {
    let own = devices(3);
    for _ in 0..20 {
        let x = leaf(1, &[4, 5000], own[0]);
        let model = each(
            vec![
                apply(|b: Batch| {
                    let x = b.one()?;
                    Ok([x.mul_scalar(2.0)?, x.mul_scalar(3.0)?, x.mul_scalar(5.0)?].into())
                }),
                identity(),
                apply(|b: Batch| {
                    let [a, b, c] = b.many()?;
                    Ok(a.add(&b)?.add(&c)?.into())
                }),
            ],
            &own,
            GPipeConfig::new(2).with_recompute(RecomputeMode::Never),
        );
        model.run(&x).and_then(Batch::one).unwrap().sum_all().unwrap().backward().unwrap();
        assert_eq!(x.grad().unwrap().to_vec::<f64>().unwrap(), [10.0; 20000]);
    }
}

#[test]
fn memory_leaves_a_device_when_the_value_has_arrived_at_the_next() {
    let own = devices(2);
    let bytes = |device: Device| device.ledger().unwrap().total().now;
    let x = constant(1, &[2, 1000], own[0]);
    let before = bytes(own[0]);
    let model = each(
        vec![apply(|b| Ok(b.map(|x| x.mul_scalar(2.0))?)), identity()],
        &own,
        GPipeConfig::new(2).with_recompute(RecomputeMode::Never),
    );
    let y = model.run(&x).unwrap();
    assert_eq!(bytes(own[0]), before, "products that no backward needs");
    drop(y);
    assert_eq!(bytes(own[1]), 0);
}

#[test]
fn anomaly_mode_sees_the_operations_of_every_device() {
    let own = devices(2);
    let _anomaly = phalanx_nn::autograd::detect_anomaly();
    let model = each(
        vec![apply(|b| Ok(b.map(|x| x.mul_scalar(0.0)?.sqrt()?.mul_scalar(0.0))?)), identity()],
        &own,
        GPipeConfig::new(2).with_recompute(RecomputeMode::Never),
    );
    let y = model.run(leaf(1, &[2, 3], own[0])).and_then(Batch::one).unwrap();
    let message = y.sum_all().unwrap().backward().unwrap_err().to_string();
    assert!(message.contains("made a NaN") && message.contains("sqrt"), "{message}");
}
