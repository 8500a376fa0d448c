//! Which micro-batches are recomputed, and what layers see of it.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use phalanx_nn::autograd::{Var, is_checkpointing, is_recomputing};
use phalanx_parallel::pipeline::MicroBatch;
use phalanx_parallel::pipeline::gpipe::{Batch, Checkpoint, GPipeConfig};
use phalanx_tensor::Context;

use crate::kit::*;

/// How often layers ran: checkpointing, recomputing, as usual.
fn runs(rows: usize, micro_batches: usize, mode: Checkpoint, train: bool) -> [usize; 3] {
    let own = devices(2);
    let seen = Arc::new(Mutex::new([0; 3]));
    let layer = || {
        let seen = seen.clone();
        apply(move |batch| {
            let i = [is_checkpointing(), is_recomputing(), true].iter().position(|&x| x).unwrap();
            seen.lock().unwrap()[i] += 1;
            Ok(batch.map(|x| x.tanh())?)
        })
    };
    let model = each(vec![layer(), layer()], &own, GPipeConfig::new(micro_batches).with_checkpoint(mode));
    let _context = Context::with(|c| c.train = train);
    let y = model.run(leaf(1, &[rows, 2], own[0])).and_then(Batch::one).unwrap();
    y.sum_all().unwrap().backward().unwrap();
    *seen.lock().unwrap()
}

#[test]
fn the_micro_batches_that_there_are_decide_what_is_recomputed() {
    // Two stages: everything counts twice.
    assert_eq!(runs(2, 2, Checkpoint::Always, true), [4, 4, 0]);
    assert_eq!(runs(2, 2, Checkpoint::ExceptLast, true), [2, 2, 2]);
    assert_eq!(runs(2, 2, Checkpoint::Never, true), [0, 0, 4]);
    // 5 rows in 4 micro-batches make 3 of 2, 2, 1; the last one of those is kept.
    assert_eq!(runs(5, 4, Checkpoint::ExceptLast, true), [4, 4, 2]);
    assert_eq!(runs(1, 4, Checkpoint::ExceptLast, true), [0, 0, 2]);
    assert_eq!(runs(1, 4, Checkpoint::Always, true), [2, 2, 0]);
}

#[test]
fn one_micro_batch_is_kept_unless_all_are_recomputed() {
    for (mode, wanted) in [(Checkpoint::Always, [2, 2, 0]), (Checkpoint::ExceptLast, [0, 0, 2])] {
        assert_eq!(runs(3, 1, mode, true), wanted);
    }
    assert_eq!(runs(3, 1, Checkpoint::Never, true), [0, 0, 2]);
}

#[test]
fn nothing_is_recomputed_in_evaluation() {
    for mode in MODES {
        assert_eq!(runs(4, 2, mode, false), [0, 0, 4], "{mode}");
    }
}

#[test]
fn layers_know_their_micro_batch_when_they_are_recomputed_too() {
    let own = devices(1);
    let seen: Arc<Mutex<BTreeMap<bool, Vec<MicroBatch>>>> = Arc::default();
    let kept = seen.clone();
    let note = move |batch: Batch| {
        kept.lock().unwrap().entry(is_recomputing()).or_default().push(MicroBatch::current());
        Ok(batch.map(|x| x.tanh())?)
    };
    let model = each(vec![apply(note)], &own, GPipeConfig::new(4).with_checkpoint(Checkpoint::Always));
    let y = model.run(leaf(1, &[5, 2], own[0])).and_then(Batch::one).unwrap();
    y.sum_all().unwrap().backward().unwrap();
    let part = |index| MicroBatch { index, count: 3 };
    let seen = seen.lock().unwrap();
    assert_eq!(seen[&false], [0, 1, 2].map(part));
    assert_eq!(seen[&true], [2, 1, 0].map(part));
    assert_eq!(MicroBatch::current(), MicroBatch::WHOLE);
}

#[test]
fn a_first_stage_without_inputs_that_need_gradients_is_recomputed_in_order() {
    let own = devices(2);
    let journal = Journal::default();
    let probe = |i: usize| {
        Box::new(Probe::new(i, own[i], &journal)) as Box<dyn phalanx_parallel::pipeline::gpipe::Layer>
    };
    let model = each(vec![probe(0), probe(1)], &own, GPipeConfig::new(3).with_checkpoint(Checkpoint::Always));
    let tokens = Var::from_slice(&[1i64, 2, 3], &[3, 1], own[0]).unwrap();
    let floats = tokens.to(phalanx_tensor::DType::F64).unwrap();
    assert!(!floats.requires_grad());
    model.run(&floats).and_then(Batch::one).unwrap().sum_all().unwrap().backward().unwrap();
    assert_eq!(done(&journal, own[0], "again"), [(2, 0), (1, 0), (0, 0)]);
}

#[test]
fn an_input_that_a_layer_modifies_in_place_is_found_where_it_would_be_added_twice() {
    let own = devices(1);
    for needs_grad in [false, true] {
        let add_one = |batch: Batch| {
            let [foo, bar] = batch.many()?;
            phalanx_kernels::fill_(&mut bar.tensor().clone(), 2.0)?;
            Ok(foo.mul(&bar)?.into())
        };
        let foo = leaf(1, &[1], own[0]);
        let bar = if needs_grad { leaf(2, &[1], own[0]) } else { constant(2, &[1], own[0]) };
        let config = GPipeConfig::new(1).with_checkpoint(Checkpoint::Always);
        let model = each(vec![apply(add_one)], &own, config);
        let y = model.run([foo, bar]).and_then(Batch::one).unwrap();
        let message = y.backward().unwrap_err().to_string();
        assert!(message.contains("checkpoint: input 1 was modified in place"), "{message}");
    }
}
