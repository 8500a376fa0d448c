//! What a run leaves for people and tools: the report's data, after a resume, a failure, a rollback; its profile.

use std::collections::BTreeSet;

use phalanx_nn::models::{FlopsPerToken, MegatronFlops, RecomputeMode};
use phalanx_train::report::{MarkKind, Pass, Profile, Report, SpanKind};

use super::*;

fn report(folder: &Folder) -> Report {
    serde_json::from_str(&std::fs::read_to_string(folder.path().join("report.json")).unwrap()).unwrap()
}

fn with_out(folder: &Folder, config: Config) -> Config {
    Config { out: Some(folder.path().into()), ..config }
}

/// Calls of a rank's kind and group.
fn calls(report: &Report, kind: &str, group: &str) -> u64 {
    let same =
        report.collectives.iter().filter(|call| call.rank == 0 && call.kind == kind && call.group == group);
    same.map(|call| call.calls).sum()
}

#[test]
fn a_resumed_runs_report_has_what_came_before() {
    let folder = Folder::new();
    let layout = Layout { dp: 2, ..Layout::default() };
    let config = |steps| Config { steps, save_every: 5, ..with_out(&folder, config(layout.clone(), 0)) };
    let go = |steps| {
        let [training, held_out] = data();
        let trainer = Trainer::new(config(steps)).data(training).validation(held_out).resume_if_there();
        trainer.every(2, |run| Ok(Some(format!("at {}", run.done())))).run_layers(layers, loss).unwrap()
    };
    let first = go(7);
    let before = report(&folder);
    let second = go(12);
    let after = report(&folder);
    assert_eq!(after.curves.loss.steps, (1..=12).collect::<Vec<u64>>());
    assert_eq!(after.curves.loss.values[..7], before.curves.loss.values);
    let samples: Vec<&str> = after.samples.iter().map(|sample| &sample.text[..]).collect();
    assert_eq!(samples, ["at 2", "at 4", "at 6", "at 7", "at 8", "at 10", "at 12"]);
    let marks: Vec<(u64, MarkKind)> = after.marks.iter().map(|mark| (mark.step, mark.kind)).collect();
    use MarkKind::{Checkpoint, Resumed};
    assert_eq!(marks, [(5, Checkpoint), (7, Checkpoint), (7, Resumed), (10, Checkpoint), (12, Checkpoint)]);
    // The step that is drawn is the fourth of its process, from 1.
    assert_eq!((before.timeline.as_ref().unwrap().step, after.timeline.as_ref().unwrap().step), (4, 11));
    assert_eq!(after.memory.len(), 2);
    // Steps and time are those of both.
    assert_eq!(after.summary.steps, 12);
    assert!((after.summary.seconds - first.seconds - second.seconds).abs() < 1e-9);
    // Each step adds the gradients of a bucket, so there are 12 / 7 as many calls.
    let [seven, twelve] = [&before, &after].map(|report| calls(report, "all_reduce", "dp"));
    assert!(seven > 0 && twelve > seven, "{seven}, {twelve}: {:?}", after.collectives);
}

#[test]
fn the_rate_of_flops_is_told_by_both_formulas() {
    let (folder, [training, held_out]) = (Folder::new(), data());
    let megatron = Some(MegatronFlops { model: 9e6, hardware: 12e6 });
    let trainer = Trainer::new(with_out(&folder, config(Layout::default(), 0)));
    let trainer = trainer.data(training).validation(held_out).flops(FlopsPerToken { palm: 6e6, megatron });
    trainer.run_layers(layers, loss).unwrap();
    let curves = report(&folder).curves;
    assert!(!curves.throughput.values.is_empty());
    let close = |got: &[f64], wanted: Vec<f64>| {
        assert!(!got.is_empty() && got.len() == wanted.len(), "{} of {}", got.len(), wanted.len());
        let near = |(got, wanted): (&f64, f64)| (got / wanted - 1.0).abs() < 1e-3;
        assert!(got.iter().zip(wanted.iter().copied()).all(near), "{got:?} {wanted:?}");
    };
    close(&curves.flops.values, curves.throughput.values.iter().map(|rate| rate * 12e6).collect());
    close(&curves.megatron_mfu.values, curves.mfu.values.iter().map(|mfu| mfu * 1.5).collect());
}

#[test]
fn a_run_that_fails_leaves_a_report_that_says_why() {
    let folder = Folder::new();
    let trainer = Trainer::new(with_out(&folder, config(Layout::default(), 0))).data(pictures(400, Some(77)));
    let error = trainer.validation(pictures(40, None)).run_layers(layers, loss).unwrap_err().to_string();
    let report = report(&folder);
    assert!(report.summary.outcome.contains(&error), "{:?}, wanted {error:?}", report.summary.outcome);
    let failed = report.marks.iter().find(|mark| mark.kind == MarkKind::Failed).expect("a mark");
    assert_eq!(failed.step, report.summary.steps + 1);
    assert!(error.contains(&format!("step {}", report.summary.steps)), "{error}");
}

#[test]
fn curves_end_where_a_run_has_gone_back_to() {
    let folder = Folder::new();
    let on_divergence = OnDivergence::Rollback { most: 1 };
    let config = Config { on_divergence, save_every: 1, ..with_out(&folder, config(Layout::default(), 0)) };
    let trainer = Trainer::new(config).data(pictures(400, Some(77))).validation(pictures(40, None));
    trainer.run_layers(layers, loss).unwrap();
    let report = report(&folder);
    assert!(report.marks.iter().any(|mark| mark.kind == MarkKind::RolledBack));
    assert_eq!(report.curves.loss.steps, (1..=12).collect::<Vec<u64>>());
    assert!(report.curves.loss.values.iter().all(|loss| loss.is_finite()));
}

#[test]
fn the_layout_says_what_each_rank_holds() {
    let folder = Folder::new();
    let layout = Layout { dp: 2, pp: 2, micro_batches: 2, ..Layout::default() };
    run(with_out(&folder, config(layout, 1)), &Told::default()).unwrap();
    let report = report(&folder);
    let layout = report.layout.unwrap();
    let held: BTreeSet<&str> = layout.ranks.iter().map(|rank| &rank.holds[..]).collect();
    // A convolution and a norm on one stage, the last map on the other; replicas hold the same.
    assert_eq!(held.into_iter().collect::<Vec<_>>(), ["layers 0-1", "layers 6"]);
    let stages: u64 = layout.ranks.iter().filter(|rank| rank.data == 0).map(|rank| rank.parameters).sum();
    assert_eq!(stages, report.summary.parameters);
    // Other tests of this process may have tensors on the same device.
    for rank in &layout.ranks {
        assert!(rank.parameters_bytes >= 4 * rank.parameters, "{rank:?}");
        assert!(rank.gradients_bytes > 0 && rank.device.starts_with("cpu"), "{rank:?}");
    }
    // The replicas share the optimizer's state: two numbers a parameter.
    let state: u64 = layout.ranks.iter().map(|rank| rank.optimizer_bytes).sum();
    assert!(state >= 8 * report.summary.parameters, "{state}");
}

#[test]
fn calls_are_told_by_group_without_the_runs_own() {
    let folder = Folder::new();
    let layout = Layout { dp: 2, pp: 2, micro_batches: 2, ..Layout::default() };
    run(with_out(&folder, config(layout, 0)), &Told::default()).unwrap();
    let report = report(&folder);
    let groups: BTreeSet<&str> = report.collectives.iter().map(|call| &call.group[..]).collect();
    assert!(groups.contains("dp") && groups.contains("pp"), "{groups:?}");
    assert!(groups.iter().all(|group| ["dp", "pp", "model", "tp"].contains(group)), "{groups:?}");
    // A micro-batch's activations are sent once in a step at least; validations send theirs, too.
    assert!(calls(&report, "send", "pp") >= 2 * 12, "{:?}", report.collectives);
}

/// Ranks of one process count a step's time from one moment, so a stage's forward pass ends before the next one's begins.
#[test]
fn a_step_is_drawn_in_the_order_of_its_dependencies() {
    let folder = Folder::new();
    let layout = Layout { pp: 2, micro_batches: 2, recompute: RecomputeMode::Always, ..Layout::default() };
    run(with_out(&folder, config(layout, 0)), &Told::default()).unwrap();
    let timeline = report(&folder).timeline.unwrap();
    let spans = |rank: usize, kind| {
        let lanes = timeline.lanes.iter().filter(move |lane| lane.rank == rank && lane.name == "compute");
        lanes.flat_map(|lane| &lane.spans).filter(move |span| span.kind == kind)
    };
    for batch in 0..2 {
        let of = |rank, kind| spans(rank, kind).find(|span| span.micro_batch == Some(batch)).expect("a span");
        let (first, second) = (of(0, SpanKind::Forward), of(1, SpanKind::Forward));
        assert!(first.start_ms + first.ms <= second.start_ms + 1e-6, "{first:?} {second:?}");
        let (last, before) = (of(1, SpanKind::Backward), of(0, SpanKind::Backward));
        assert!(last.start_ms < before.start_ms, "{last:?} {before:?}");
    }
    for rank in 0..2 {
        assert_eq!(spans(rank, SpanKind::Recompute).count(), 2, "rank {rank}");
    }
}

#[test]
fn memory_is_known_at_every_change() {
    let folder = Folder::new();
    run(with_out(&folder, config(Layout::default(), 0)), &Told::default()).unwrap();
    let memory = report(&folder).memory.swap_remove(0);
    assert!(memory.times_ms.len() > 20, "{} changes", memory.times_ms.len());
    assert!(memory.times_ms.is_sorted());
    assert!(memory.bytes.iter().all(|bytes| bytes.len() == memory.times_ms.len()));
    let of =
        |name: &str| &memory.bytes[memory.categories.iter().position(|category| category == name).unwrap()];
    // Activations come and go; other tests of this process may have tensors on the same device.
    assert!(of("activations").iter().max() > of("activations").iter().min());
    assert!(of("parameters").iter().all(|bytes| *bytes > 0));
}

#[test]
fn a_profile_has_the_arithmetic_of_each_rank_and_accounts_for_the_time() {
    for (layout, zero) in [
        (Layout::default(), 0),
        (Layout { dp: 2, ..Layout::default() }, 3),
        (Layout { pp: 2, micro_batches: 2, recompute: RecomputeMode::Always, ..Layout::default() }, 0),
    ] {
        let made: Arc<Mutex<Option<Profile>>> = Arc::default();
        let (kept, ranks) = (made.clone(), layout.dp * layout.pp);
        let recomputes = layout.pp > 1;
        let [training, _] = data();
        let config = Config { steps: 1, validate_every: 0, ..config(layout, zero) };
        let trainer = Trainer::new(config).data(training).at_end(move |run| {
            let profile = run.profile(3)?;
            if run.mesh_rank().is_first() {
                *kept.lock().unwrap() = Some(profile);
            }
            Ok(())
        });
        trainer.run_layers(layers, loss).unwrap();
        let profile = made.lock().unwrap().take().expect("a profile");
        assert_eq!((profile.steps, profile.ranks.len()), (3, ranks));
        let flops = |pass| {
            let of = profile.operations.iter().filter(|o| o.name == "conv2d" && o.pass == pass);
            of.map(|o| o.flops).sum::<f64>()
        };
        // Three steps of 16 pictures of 8 x 8 points, 4 channels of 3 x 3 numbers; the picture needs no gradient.
        let convolution = 3.0 * 2.0 * (16 * 64 * 4 * 9) as f64;
        assert_eq!((flops(Pass::Forward), flops(Pass::Backward)), (convolution, convolution), "{profile:?}");
        assert_eq!(flops(Pass::Recompute), if recomputes { convolution } else { 0.0 });
        for rank in &profile.ranks {
            let own = || profile.operations.iter().filter(|o| o.rank == rank.rank);
            let all: f64 = own().map(|o| o.ms).sum();
            assert!((all - rank.ms).abs() < 0.01 * rank.ms, "{all} of {}", rank.ms);
            assert!(own().any(|o| o.name == "optimizer") && own().any(|o| o.name == "other"));
            assert!(rank.peak_flops_per_s > 1e8 && rank.peak_bytes_per_s > 1e8);
        }
        assert!(profile.table().contains("conv2d"));
    }
}

#[test]
fn what_cannot_be_profiled_is_refused() {
    let [training, _] = data();
    let config = Config { steps: 1, validate_every: 0, ..config(Layout::default(), 0) };
    let trainer = Trainer::new(config).data(training).at_end(|run| run.profile(0).map(drop));
    let error = trainer.run_layers(layers, loss).unwrap_err().to_string();
    assert!(error.contains("profile: got 0 steps"), "{error}");
}
