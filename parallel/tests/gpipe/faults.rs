//! Whatever fails first ends the pass, with its cause; no worker is left behind, and the pipeline can be used again.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use phalanx_nn::Error as NnError;
use phalanx_nn::autograd::{Function, Var};
use phalanx_parallel::pipeline::gpipe::{Batch, Checkpoint, GPipeConfig, Layer};
use phalanx_tensor::{Context, Tensor};

use crate::kit::*;

fn pass() -> Box<dyn Layer> {
    apply(|b| Ok(b.map(|x| x.mul_scalar(1.0))?))
}

fn refuse() -> Box<dyn Layer> {
    apply(|_| Err(NnError::invalid("layer", "got it, wanted it not").into()))
}

/// Whether this process has a thread of that name.
fn runs(name: &str) -> bool {
    let tasks = std::fs::read_dir("/proc/self/task").into_iter().flatten().flatten();
    let mut names = tasks.filter_map(|task| std::fs::read_to_string(task.path().join("comm")).ok());
    names.any(|found| found.trim() == name)
}

#[test]
fn an_error_names_the_stage_and_leaves_nothing_behind() {
    let own = devices(3);
    let bytes = || own.iter().map(|d| d.ledger().unwrap().total().now).collect::<Vec<_>>();
    for failing in 0..3 {
        let mut layers = vec![pass(), pass(), pass()];
        layers[failing] = refuse();
        let model = each(layers, &own, GPipeConfig::new(4));
        let x = constant(1, &[4, 100], own[0]);
        let before = bytes();
        let message = model.run(&x).unwrap_err().to_string();
        let cause = "micro-batch 0: layer: got it, wanted it not";
        assert_eq!(message, format!("gpipe: stage {failing} on {}, {cause}", own[failing]));
        // What is being copied yet goes when it has arrived.
        assert!(soon(|| bytes() == before), "{:?} {before:?}", bytes());
        drop(x);
    }
    // The system takes a moment to end a thread that has been joined.
    assert!(soon(|| own.iter().all(|device| !runs(&format!("gpipe {device}")))));
}

#[test]
fn a_panic_is_an_error_that_says_where() {
    let own = devices(2);
    let model = each(vec![pass(), apply(|_| panic!("on purpose"))], &own, GPipeConfig::new(3));
    let message = model.run(constant(1, &[3, 2], own[0])).unwrap_err().to_string();
    assert!(message.contains("stage 1") && message.contains("on purpose"), "{message}");
    assert!(message.contains("faults.rs"), "{message}");
}

#[test]
fn stages_before_the_one_that_failed_stop_early() {
    let own = devices(1);
    let count = Arc::new(AtomicUsize::new(0));
    let counted = count.clone();
    let counter = apply(move |b| {
        counted.fetch_add(1, Ordering::Relaxed);
        Ok(b)
    });
    let places = vec![own[0]; 4];
    let model = each(vec![pass(), pass(), counter, refuse()], &places, GPipeConfig::new(3));
    assert!(model.run(constant(1, &[3, 1], own[0])).is_err());
    // The last stage refuses in the tick after the one in which the counter has its first micro-batch.
    assert_eq!(count.load(Ordering::Relaxed), 2);
}

#[test]
fn other_devices_stop_before_their_next_cell() {
    let own = devices(2);
    let count = Arc::new(AtomicUsize::new(0));
    let counted = count.clone();
    let counter = apply(move |b| {
        std::thread::sleep(Duration::from_millis(20));
        counted.fetch_add(1, Ordering::Relaxed);
        Ok(b)
    });
    // So many that a stage which gets no core for a while does not count.
    let model = each(vec![counter, refuse()], &own, GPipeConfig::new(500));
    assert!(model.run(constant(1, &[500, 1], own[0])).is_err());
    assert!(count.load(Ordering::Relaxed) < 400);
}

#[test]
fn a_pipeline_that_failed_works_again() {
    let own = devices(2);
    let fail = Arc::new(AtomicUsize::new(1));
    let failing = fail.clone();
    let second = apply(move |b: Batch| match failing.fetch_sub(1, Ordering::Relaxed) {
        1 => Err(NnError::invalid("layer", "once").into()),
        _ => Ok(b.map(|x| x.tanh())?),
    });
    let model = each(vec![pass(), second], &own, GPipeConfig::new(1).with_checkpoint(Checkpoint::Never));
    let x = leaf(1, &[2, 2], own[0]);
    assert!(model.run(&x).is_err());
    model.run(&x).and_then(Batch::one).unwrap().sum_all().unwrap().backward().unwrap();
    assert!(x.grad().is_some());
}

#[test]
fn an_error_in_backward_ends_all_devices() {
    struct Bad(bool);
    impl Function for Bad {
        fn name(&self) -> &'static str {
            "bad"
        }
        fn forward(&self, inputs: &[&Tensor]) -> phalanx_nn::autograd::Result<Vec<Tensor>> {
            Ok(vec![inputs[0].copy()?])
        }
        fn backward(
            &self,
            cx: &phalanx_nn::autograd::Cx<'_>,
            _: &[phalanx_nn::autograd::Saved],
        ) -> phalanx_nn::autograd::Result<phalanx_nn::autograd::Grads> {
            assert!(!self.0, "on purpose");
            let _ = cx;
            Err(phalanx_nn::autograd::Error::Custom("refused".into()))
        }
    }
    let own = devices(3);
    for mode in MODES {
        for panics in [false, true] {
            for failing in 0..3 {
                let bad = move |b: Batch| {
                    let x: Var = b.one()?;
                    Ok(Batch::from(Bad(panics).apply(&[&x]).map_err(NnError::from)?))
                };
                let mut layers = vec![pass(), pass(), pass()];
                layers[failing] = apply(bad);
                let model = each(layers, &own, GPipeConfig::new(3).with_checkpoint(mode));
                let y = model.run(leaf(1, &[3, 2], own[0])).and_then(Batch::one).unwrap();
                let message = y.sum_all().unwrap().backward().unwrap_err().to_string();
                let wanted = if panics { "panicked in backward: on purpose" } else { "refused" };
                assert!(message.contains(wanted), "{message}");
            }
        }
    }
}

#[test]
fn workers_have_the_callers_context() {
    let own = devices(2);
    for (grad, train) in [(true, true), (true, false), (false, true), (false, false)] {
        let layer = || {
            apply(move |b: Batch| {
                let context = Context::current();
                assert_eq!((context.train, context.rng.step), (train, 7));
                assert!(!context.grad || grad);
                Ok(b)
            })
        };
        let model = each(vec![layer(), layer()], &own, GPipeConfig::new(2));
        let _context = Context::with(|c| {
            (c.grad, c.train, c.rng.step, c.batch_offset) = (grad, train, 7, 40);
        });
        model.run(constant(1, &[2, 1], own[0])).unwrap();
    }
}

#[test]
fn a_device_has_one_worker_whatever_its_stages() {
    let own = devices(2);
    let names = Arc::new(std::sync::Mutex::new(std::collections::BTreeSet::new()));
    let layer = || {
        let names = names.clone();
        apply(move |b: Batch| {
            let thread = std::thread::current();
            names.lock().unwrap().insert((format!("{:?}", thread.id()), thread.name().map(String::from)));
            Ok(b)
        })
    };
    let places = [own[0], own[1], own[0]];
    let model = each(vec![layer(), layer(), layer()], &places, GPipeConfig::new(3));
    model.run(constant(1, &[3, 1], own[0])).unwrap();
    let named: Vec<_> = names.lock().unwrap().iter().filter_map(|n| n.1.clone()).collect();
    let mut wanted: Vec<_> = own.iter().map(|d| format!("gpipe {d}")).collect();
    wanted.sort();
    let mut named = named;
    named.sort();
    assert_eq!(named, wanted);
}
