//! What holds of CUDA devices only; `gpus.rs` runs it there. Copies and workers hold nothing up, times are the devices'.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use phalanx_nn::BatchNormConfig;
use phalanx_nn::autograd::Var;
use phalanx_nn::models::RecomputeMode;
use phalanx_nn::{LinearConfig, Module, Scope};
use phalanx_parallel::pipeline::gpipe::{
    Batch, GPipe, GPipeConfig, Layer, Partition, Phase, Sequence, Span, Timeline,
};
use phalanx_parallel::pipeline::{DeferredBatchNorm, MicroBatch};
use phalanx_parallel::planning::{SizeConfig, balance_by_size, balance_by_time, profile};
use phalanx_tensor::cuda::{GpuEvent, calls, emulated};
use phalanx_tensor::{Context, DType, Device};

use crate::kit::*;

/// Computes something for a while that nothing needs.
fn toil(device: Device, times: usize) {
    let size = if emulated() { 2000 } else { 1 << 24 };
    let x = Var::new(phalanx_kernels::full(&[size], 0.5, DType::F32, device).unwrap());
    (0..times).for_each(|_| drop(x.tanh().unwrap()));
}

/// Whether the second GPU has computed micro-batch 0 while the first one still computes micro-batch 1, whose copy was queued before.
fn goes_on() -> bool {
    let own = devices(2);
    let (computed, sent, goes_on) =
        <(Arc<Mutex<Option<GpuEvent>>>, Arc<AtomicBool>, Arc<AtomicBool>)>::default();
    let (event, told) = (computed.clone(), sent.clone());
    let first = apply(move |b: Batch| {
        let x = b.one()?;
        match MicroBatch::current().index {
            1 => {
                toil(x.device(), if emulated() { 100 } else { 3000 });
                let y = x.mul_scalar(2.0)?;
                *event.lock().unwrap() = Some(GpuEvent::record(x.device().gpu()?)?);
                Ok(y.into())
            }
            index => {
                told.fetch_or(index == 2, Ordering::Relaxed);
                Ok(x.mul_scalar(2.0)?.into())
            }
        }
    });
    let found = goes_on.clone();
    let second = apply(move |b: Batch| {
        let y = b.one()?.mul_scalar(3.0)?;
        if MicroBatch::current().index == 0 {
            // The first stage has sent micro-batch 1 before it computes the next one; then the copy stream queues it.
            assert!(soon(|| sent.load(Ordering::Relaxed)));
            std::thread::sleep(Duration::from_millis(20));
            let y = y.mul_scalar(1.0)?;
            y.device().gpu()?.synchronize()?;
            let done = computed.lock().unwrap().as_ref().is_none_or(|event| event.is_done().unwrap());
            found.store(!done, Ordering::Relaxed);
            return Ok(y.into());
        }
        Ok(y.into())
    });
    let model = each(vec![first, second], &own, GPipeConfig::new(3).with_recompute(RecomputeMode::Never));
    let x = constant(1, &[3, 50], own[0]);
    let y = model.run(&x).and_then(Batch::one).unwrap();
    let wanted: Vec<f64> = x.to_vec::<f64>().unwrap().into_iter().map(|x| x * 2.0 * 3.0).collect();
    assert_eq!(y.to_vec::<f64>().unwrap(), wanted);
    goes_on.load(Ordering::Relaxed)
}

/// The emulator runs what a wait does not need before or after it, at random; so one of several passes shows that it did not need the
/// copy.
#[test]
#[ignore = "on CUDA devices"]
fn a_copy_that_waits_does_not_stand_before_another_micro_batchs_kernels() {
    assert!((0..12).any(|_| goes_on()));
}

#[test]
#[ignore = "on CUDA devices"]
fn workers_wait_for_no_gpu_not_even_for_the_statistics_of_a_batch() {
    let own = devices(2);
    for momentum in [Some(0.1), None] {
        // By device: the waits of its worker before its first cell and after its last one.
        let waits = Arc::new(Mutex::new(Vec::new()));
        let note = |first: bool| {
            let waits = waits.clone();
            apply(move |b: Batch| {
                let MicroBatch { index, count } = MicroBatch::current();
                if index == if first { 0 } else { count - 1 } {
                    waits.lock().unwrap().push((b[0].device(), calls().waits));
                }
                Ok(b)
            })
        };
        let stage = |stage: usize| -> Vec<Box<dyn Layer>> {
            let scope = Scope::new(5, DType::F32, own[stage]).child(stage);
            let norm = BatchNormConfig::new(4).with_momentum(momentum).init_1d(&scope.child("norm")).unwrap();
            let linear = LinearConfig::new(4, 4).init(&scope.child("linear")).unwrap();
            vec![note(true), Box::new(linear), Box::new(DeferredBatchNorm::of(&norm)), note(false)]
        };
        let partition = Partition::new(&[4, 4], &own).unwrap();
        let layers: Vec<Box<dyn Layer>> = stage(0).into_iter().chain(stage(1)).collect();
        let model = GPipe::new(layers.into(), partition, GPipeConfig::new(3)).unwrap();
        let _train = Context::with(key);
        for round in 0..2 {
            waits.lock().unwrap().clear();
            let x = leaf(1, &[6, 4], own[0]).to(DType::F32).unwrap();
            let y = model.run(&x).and_then(Batch::one).unwrap();
            let waits = waits.lock().unwrap().clone();
            for &device in &own {
                let own: Vec<u64> = waits.iter().filter(|(on, _)| *on == device).map(|w| w.1).collect();
                assert_eq!(own, [own[0]; 2], "{device}, round {round}, momentum {momentum:?}");
            }
            y.mul(&y).unwrap().sum_all().unwrap().backward().unwrap();
        }
    }
}

#[test]
#[ignore = "on CUDA devices"]
fn the_timeline_has_the_times_of_the_devices() {
    let own = devices(2);
    let timeline = Timeline::new();
    let events = Arc::new(Mutex::new(Vec::new()));
    let toiling = || {
        let events = events.clone();
        apply(move |b: Batch| {
            let (x, index) = (b.one()?, MicroBatch::current().index);
            let gpu = x.device().gpu()?;
            let begin = GpuEvent::timed(gpu)?;
            toil(x.device(), 5);
            events.lock().unwrap().push((x.device(), index, begin, GpuEvent::timed(gpu)?));
            Ok(x.mul_scalar(2.0)?.into())
        })
    };
    let config = GPipeConfig::new(3).with_recompute(RecomputeMode::Never).with_observer(timeline.observer());
    let model = each(vec![toiling(), toiling()], &own, config);
    model.run(constant(1, &[3, 4], own[0])).unwrap();
    let spans = timeline.take();
    let find = |phase, stage, micro_batch| {
        let is = |s: &&Span| (s.phase, s.cell.stage, s.cell.micro_batch) == (phase, stage, micro_batch);
        *spans.iter().find(is).unwrap()
    };
    for (device, index, begin, end) in events.lock().unwrap().iter() {
        let stage = own.iter().position(|d| d == device).unwrap();
        let span = find(Phase::Forward, stage, *index);
        let inside = Duration::from_secs_f32((begin.milliseconds_to(end).unwrap() / 1e3).max(0.0));
        let took = (span.end - span.begin) + Duration::from_micros(20);
        assert!(took >= inside, "stage {stage}, micro-batch {index}: {took:?}, inside {inside:?}");
    }
    // A GPU computes one cell after the other, and a copy is under way between the cells that it connects.
    let slack = Duration::from_millis(1);
    for stage in 0..2 {
        for i in 1..3 {
            assert!(find(Phase::Forward, stage, i - 1).end <= find(Phase::Forward, stage, i).begin + slack);
        }
    }
    for i in 0..3 {
        let [made, copied, used] = [(Phase::Forward, 0), (Phase::Copy, 1), (Phase::Forward, 1)]
            .map(|(phase, stage)| find(phase, stage, i));
        assert!(copied.begin <= copied.end && copied.end <= used.begin + slack, "micro-batch {i}");
        assert!(made.begin <= made.end && made.end <= copied.end + SAME_TIME, "micro-batch {i}");
    }
}

/// How far the host's times of two GPUs may be apart: a thread that reads both clocks may lose its core in between.
const SAME_TIME: Duration = Duration::from_millis(500);

#[test]
#[ignore = "on CUDA devices"]
fn layers_are_balanced_by_what_the_gpu_computes() {
    let device = devices(1)[0];
    let sizes: [usize; 2] = if emulated() { [100_000, 3] } else { [1 << 26, 3] };
    let layer = |model: Sequence, size: usize| {
        let held = Var::new(phalanx_kernels::full(&[size], 0.5, DType::F64, device).unwrap());
        model.with(Apply(move |b: Batch| {
            held.tanh()?;
            Ok(b)
        }))
    };
    let model = [0, 0, 0, 1, 1, 1, 1, 1].into_iter().fold(Sequence::new(), |model, i| layer(model, sizes[i]));
    let (x, budget) = (constant(1, &[2], device), Duration::from_secs(1));
    let measured: Vec<f64> = profile(&model, &x, budget).unwrap().iter().map(|layer| layer.time).collect();
    // Each layer has as many launches, but the first three have all the work.
    let least = measured[..3].iter().copied().fold(f64::INFINITY, f64::min);
    assert!(measured[3..].iter().all(|time| time * 4.0 < least), "{measured:?}");
    assert!(balance_by_time(2, &model, &x, budget).unwrap()[0] <= 3);
}

#[test]
#[ignore = "on CUDA devices"]
fn layers_are_balanced_by_what_they_keep_on_the_gpu() {
    for (times, wanted) in [([1, 2, 3, 4, 5, 6], [4, 2]), ([6, 5, 4, 3, 2, 1], [2, 4])] {
        let layer = |model: Sequence, times: usize| {
            model.with(Apply(move |b: Batch| {
                let product =
                    |x: Var, _| Ok::<Var, phalanx_parallel::Error>(x.mul(&Var::leaf(x.tensor().copy()?)?)?);
                Ok((0..times).try_fold(b.one()?, product)?.into())
            }))
        };
        let (model, device) = (times.into_iter().fold(Sequence::new(), layer), devices(1)[0]);
        let sample = constant(1, &[10, 100], device);
        assert_eq!(balance_by_size(2, &model, &sample, SizeConfig::default()).unwrap(), wanted);
    }
}

#[test]
#[ignore = "on CUDA devices"]
fn values_and_gradients_cross_between_a_cpu_and_a_gpu() {
    let gpu = devices(2);
    for places in [[Device::CPU, gpu[0], Device::CPU], [gpu[0], Device::CPU, gpu[1]]] {
        for mode in MODES {
            let layer = || apply(|b: Batch| Ok(b.map(|x| x.mul_scalar(-2.0))?));
            let model =
                each(vec![layer(), layer(), layer()], &places, GPipeConfig::new(3).with_recompute(mode));
            let (x, c) = (leaf(1, &[5, 4], places[0]), constant(2, &[5, 4], places[2]));
            let y = model.forward(&x).unwrap();
            y.mul(&c).unwrap().sum_all().unwrap().backward().unwrap();
            let times =
                |v: &Var| v.to_vec::<f64>().unwrap().into_iter().map(|x| x * -8.0).collect::<Vec<_>>();
            assert_eq!(y.to_vec::<f64>().unwrap(), times(&x), "{places:?} {mode}");
            assert_eq!(x.grad().unwrap().to_vec::<f64>().unwrap(), times(&c), "{places:?} {mode}");
        }
    }
}
