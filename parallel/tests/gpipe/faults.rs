//! What a pipeline is made of, shows and refuses. The first error ends the pass, with its cause, after all workers have
//! ended, and the pipeline can be used again.

use phalanx_nn::autograd::ContextMode;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use phalanx_nn::autograd::{Function, Var};
use phalanx_nn::models::RecomputeMode;
use phalanx_nn::{
    Error as NnError, Linear, LinearConfig, Module, Parameters, Scope, Sequential, SequentialConfig,
    state_dict,
};
use phalanx_parallel::pipeline::MicroBatch;
use phalanx_parallel::pipeline::gpipe::{
    Batch, GPipe, GPipeConfig, Layer, Partition, Sequence, gather, scatter,
};
use phalanx_tensor::{Context, DType, Device, Tensor};

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
        // Memory of a copy that is still under way is free when the copy is done.
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
    let error = model.run(constant(1, &[3, 1], own[0])).unwrap_err().to_string();
    assert!(error.contains("stage 3") && error.contains("micro-batch 0: layer: got it"), "{error}");
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
    let error = model.run(constant(1, &[500, 1], own[0])).unwrap_err().to_string();
    assert!(error.contains("stage 1") && error.contains("micro-batch 0: layer: got it"), "{error}");
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
    let model = each(vec![pass(), second], &own, GPipeConfig::new(1).with_recompute(RecomputeMode::Never));
    let x = leaf(1, &[2, 2], own[0]);
    assert!(model.run(&x).unwrap_err().to_string().contains("micro-batch 0: layer: once"));
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
            _: &[phalanx_nn::autograd::SavedVariable],
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
                let model = each(layers, &own, GPipeConfig::new(3).with_recompute(mode));
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
                // Rows 40 and 41 of the caller's batch.
                let row = 40 + MicroBatch::current().index as u64;
                assert_eq!((context.train(), context.rng.step, context.batch_offset), (train, 7, row));
                assert_eq!(context.grad(), grad);
                Ok(b)
            })
        };
        let config = GPipeConfig::new(2).with_recompute(RecomputeMode::Never);
        let model = each(vec![layer(), layer()], &own, config);
        let _context = Context::with(|c| {
            c.set_grad(grad);
            c.set_train(train);
            (c.rng.step, c.batch_offset) = (7, 40);
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

fn linear(i: usize, device: Device) -> Linear {
    LinearConfig::new(2, 2).init(&Scope::new(1, DType::F64, device).child(i)).unwrap()
}

fn refused(model: Sequence, balance: &[usize], devices: &[Device], micro_batches: usize) -> String {
    let partition = Partition::new(balance, devices).unwrap();
    let made = GPipe::new(model, partition, GPipeConfig::new(micro_batches));
    made.err().map(|e| e.to_string()).unwrap_or_default()
}

#[test]
fn parameters_have_the_plain_models_names_whatever_the_balance() {
    let own = devices(3);
    let names =
        |model: &dyn Parameters| state_dict(model).into_iter().map(|(name, _)| name).collect::<Vec<_>>();
    let wanted = names(&net(|_| plain_device()));
    assert_eq!(wanted[..2], ["0.weight", "0.bias"]);
    for balance in [&[8][..], &[3, 5], &[1, 1, 6]] {
        let model = pipe(balance, &own, GPipeConfig::new(2));
        assert_eq!(names(&model), wanted);
        assert_eq!((model.len(), model.layers().len(), model.is_empty()), (8, 8, false));
        assert_eq!(model.devices(), own[..balance.len()], "devices beyond the stages are not used");
        let first = model.layers()[0].parameters();
        assert!(first[0].is(&model.parameters()[0]));
    }
}

#[test]
fn initial_values_do_not_depend_on_the_balance() {
    let own = devices(2);
    let values = |model: &dyn Parameters| -> Vec<Vec<f64>> {
        model.parameters().iter().map(|p| p.tensor().to_vec().unwrap()).collect()
    };
    assert_eq!(values(&pipe(&[3, 5], &own, GPipeConfig::new(2))), values(&net(|_| plain_device())));
}

#[test]
fn a_model_of_modules_becomes_a_pipeline() {
    let own = devices(1);
    let model = Sequential::new().with(linear(0, own[0])).with(linear(1, own[0]));
    let twin = Sequential::new().with(linear(0, own[0])).with(linear(1, own[0]));
    let model = GPipe::new(model.into(), Partition::new(&[2], &own).unwrap(), GPipeConfig::new(3)).unwrap();
    let x = constant(1, &[4, 2], own[0]);
    assert_eq!(bits(&model.forward(&x).unwrap()), bits(&twin.forward(&x).unwrap()));
}

#[test]
fn a_slice_of_modules_keeps_its_numbers_in_a_pipeline() {
    let own = devices(1);
    let scope = Scope::new(1, DType::F64, own[0]);
    let layers = SequentialConfig::new().with(LinearConfig::new(2, 2)).with(LinearConfig::new(2, 2));
    let slice = layers.slice(1..).unwrap().init(&scope).unwrap();
    let model = GPipe::new(slice.into(), Partition::new(&[1], &own).unwrap(), GPipeConfig::new(1)).unwrap();
    let names: Vec<String> = state_dict(&model).into_iter().map(|(name, _)| name).collect();
    assert_eq!(names, ["1.weight", "1.bias"]);
}

#[test]
fn a_balance_that_does_not_fit_is_refused() {
    let own = devices(2);
    let model = || Sequence::new().with(linear(0, own[0])).with(linear(1, own[0])).with(linear(2, own[0]));
    assert_eq!(
        refused(model(), &[2], &own, 1),
        "gpipe: got a balance of [2], which is 2 layers, wanted the model's 3"
    );
    assert!(refused(model(), &[2, 2], &own, 1).contains("[2, 2], which is 4 layers, wanted the model's 3"));
    assert_eq!(refused(model(), &[3], &own, 0), "gpipe: got 0 micro-batches, wanted at least 1");
    assert_eq!(refused(model(), &[3], &own, 1), "");
}

#[test]
fn recomputation_of_attention_is_refused() {
    let own = devices(1);
    let config = GPipeConfig::new(2).with_recompute(RecomputeMode::Attention);
    let model = Sequence::new().with(linear(0, own[0]));
    let error = GPipe::new(model, Partition::new(&[1], &own).unwrap(), config).err().unwrap();
    let wanted = "which is a mode of transformer models; wanted never, except-last or always";
    assert_eq!(error.to_string(), format!("gpipe: got recomputation of attention, {wanted}"));
}

#[test]
fn a_parameter_on_another_device_than_its_layer_is_refused() {
    let own = devices(2);
    let model = Sequence::new().with(linear(0, own[0])).with(linear(1, own[0]));
    let message = refused(model, &[1, 1], &own, 1);
    let wanted = format!("gpipe: got 1.bias on {}, wanted it on {}, where its layer is", own[0], own[1]);
    assert_eq!(message, wanted);
}

#[test]
fn a_parameter_of_two_stages_is_refused_and_of_one_stage_is_not() {
    let own = devices(1);
    let shared = std::sync::Arc::new(linear(0, own[0]));
    let model = || Sequence::new().with(shared.clone()).with(shared.clone());
    let message = refused(model(), &[1, 1], &[own[0]; 2], 1);
    assert_eq!(message, "gpipe: 1.bias of stage 1 is 0.bias of stage 0; wanted one stage");
    assert_eq!(refused(model(), &[2], &own, 1), "");
}

#[test]
fn a_pipeline_without_layers_is_the_identity() {
    let model = GPipe::new(Sequence::new(), Partition::new(&[], &[]).unwrap(), GPipeConfig::new(4)).unwrap();
    let x = Var::scalar(42.0f64, plain_device()).unwrap();
    assert_eq!(model.forward(&x).unwrap().item::<f64>().unwrap(), 42.0);
    assert!(model.is_empty());
}

#[test]
fn inputs_that_lie_elsewhere_or_do_not_fit_are_refused() {
    let own = devices(2);
    let model = each(vec![apply(Ok), apply(Ok)], &own, GPipeConfig::new(2));
    let message = |batch: Batch| model.run(batch).unwrap_err().to_string();
    let elsewhere = constant(1, &[2, 2], own[1]);
    let wanted = format!("gpipe: batch: got a value on {}, wanted it on {}", own[1], own[0]);
    assert_eq!(message(elsewhere.into()), wanted);
    let (x, y) = (constant(1, &[4, 2], own[0]), constant(1, &[3, 2], own[0]));
    assert_eq!(
        message([x, y].into()),
        "gpipe: batch: got values of shapes [[4, 2], [3, 2]], wanted the same number of rows in each"
    );
    assert!(message(Var::scalar(1.0f64, own[0]).unwrap().into()).contains("shapes [[]]"));
    assert!(message(Vec::new().into()).contains("shapes []"));
}

#[test]
fn a_layer_that_gets_or_makes_what_it_cannot_is_an_error() {
    let own = devices(2);
    let model = Sequence::new().with(linear(0, own[0]));
    let pipe = GPipe::new(model, Partition::new(&[1], &own).unwrap(), GPipeConfig::new(1)).unwrap();
    let x = constant(1, &[4, 2], own[0]);
    let message = pipe.run([x.clone(), x.clone()]).unwrap_err().to_string();
    assert!(message.ends_with("gpipe: batch: got 2 values, wanted one"), "{message}");
    let other = own[1];
    let strays = apply(move |b| Ok(b.map(|x| x.to_device(other))?));
    let message = each(vec![strays], &own, GPipeConfig::new(1)).run(&x).unwrap_err().to_string();
    assert!(message.contains(&format!("got a value on {}, wanted it on {}", own[1], own[0])), "{message}");
    let uneven = apply(|b: Batch| {
        let x = b.one()?;
        Ok(if x.shape()[0] == 1 { Batch::from(x) } else { Batch::from([x.clone(), x]) })
    });
    let message =
        each(vec![uneven], &own, GPipeConfig::new(2)).run(constant(1, &[3, 2], own[0])).unwrap_err();
    assert!(message.to_string().contains("micro-batches of [2, 1] values"), "{message}");
}

#[test]
fn indivisible_and_small_batches_are_cut_as_they_can_be() {
    let device = devices(1)[0];
    let sizes = |rows: usize, count| -> Vec<usize> {
        let pieces = scatter(&constant(1, &[rows, 2], device).into(), count).unwrap();
        pieces.iter().for_each(|(batch, rows)| assert_eq!(batch.rows().unwrap(), rows.len()));
        pieces.into_iter().map(|(_, rows)| rows.len()).collect()
    };
    assert_eq!(sizes(9, 8), [2, 2, 2, 2, 1]);
    assert_eq!(sizes(5, 4), [2, 2, 1]);
    assert_eq!(sizes(2, 4), [1, 1]);
    assert_eq!(sizes(8, 4), [2; 4]);
    assert_eq!(sizes(7, 1), [7]);
    assert_eq!(sizes(0, 3), [0]);
    let own = devices(2);
    for (rows, micro_batches) in [(7, 4), (2, 4), (1, 3)] {
        let model = each(vec![apply(Ok), apply(Ok)], &own, GPipeConfig::new(micro_batches));
        let x = constant(1, &[rows, 2], own[0]);
        assert_eq!(bits(&model.run(&x).and_then(Batch::one).unwrap()), bits(&x));
    }
}

#[test]
fn several_values_are_cut_and_joined_in_step() {
    let device = devices(1)[0];
    let (a, b) = (constant(1, &[5, 2], device), constant(2, &[5], device));
    let pieces = scatter(&[a.clone(), b.clone()].into(), 2).unwrap();
    let shapes: Vec<_> = pieces.iter().map(|(p, _)| (p[0].shape().to_vec(), p[1].shape().to_vec())).collect();
    assert_eq!(shapes, [(vec![3, 2], vec![3]), (vec![2, 2], vec![2])]);
    let [a2, b2] = gather(pieces.into_iter().map(|(p, _)| p).collect()).unwrap().many().unwrap();
    assert_eq!((bits(&a2), bits(&b2)), (bits(&a), bits(&b)));
}

#[test]
fn a_batch_is_one_value_or_several() {
    let device = devices(1)[0];
    let (x, y) = (constant(1, &[2], device), constant(2, &[2], device));
    let mut batch = Batch::from([x.clone(), y.clone()]);
    assert_eq!((batch.values().len(), bits(&batch[1])), (2, bits(&y)));
    batch[1] = x.clone();
    assert_eq!(bits(&batch[1]), bits(&x));
    let twice = batch.clone().map(|v| v.mul_scalar(2.0)).unwrap();
    assert_eq!(bits(&twice[0]), bits(&x.mul_scalar(2.0).unwrap()));
    assert!(batch.clone().one().unwrap_err().to_string().ends_with("got 2 values, wanted one"));
    assert!(batch.many::<3>().unwrap_err().to_string().ends_with("got 2 values, wanted 3"));
    assert_eq!(bits(&Batch::from(&y).one().unwrap()), bits(&y));
}

#[test]
fn the_settings_can_be_read() {
    let config = GPipeConfig::new(4).with_recompute(RecomputeMode::Always);
    assert_eq!(format!("{config:?}"), "4 micro-batches, recomputed always, observed false");
    assert_eq!(GPipeConfig::new(4).recompute(), RecomputeMode::ExceptLast);
}
