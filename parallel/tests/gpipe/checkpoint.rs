//! Which micro-batches are recomputed, what layers see of it, and how much memory it saves, from the ledger: with
//! recomputation a stage holds its inputs of every micro-batch, and the inner values of one.

use phalanx_nn::autograd::ContextMode;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use phalanx_nn::autograd::{Var, is_checkpointing, is_recomputing};
use phalanx_nn::models::RecomputeMode;
use phalanx_parallel::pipeline::MicroBatch;
use phalanx_parallel::pipeline::gpipe::{Batch, GPipeConfig, Layer};
use phalanx_tensor::{Context, DType, Device, Tensor};

use crate::kit::*;

/// How often layers ran: checkpointing, recomputing, as usual.
fn runs(rows: usize, micro_batches: usize, mode: RecomputeMode, train: bool) -> [usize; 3] {
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
    let model = each(vec![layer(), layer()], &own, GPipeConfig::new(micro_batches).with_recompute(mode));
    let _context = Context::with(|c| c.set_train(train));
    let y = model.run(leaf(1, &[rows, 2], own[0])).and_then(Batch::one).unwrap();
    y.sum_all().unwrap().backward().unwrap();
    *seen.lock().unwrap()
}

#[test]
fn the_micro_batches_that_there_are_decide_what_is_recomputed() {
    // Two stages: everything counts twice.
    assert_eq!(runs(2, 2, RecomputeMode::Always, true), [4, 4, 0]);
    assert_eq!(runs(2, 2, RecomputeMode::ExceptLast, true), [2, 2, 2]);
    assert_eq!(runs(2, 2, RecomputeMode::Never, true), [0, 0, 4]);
    // 5 rows in 4 micro-batches make 3 of 2, 2, 1; the last one of those is kept.
    assert_eq!(runs(5, 4, RecomputeMode::ExceptLast, true), [4, 4, 2]);
    assert_eq!(runs(1, 4, RecomputeMode::ExceptLast, true), [0, 0, 2]);
    assert_eq!(runs(1, 4, RecomputeMode::Always, true), [2, 2, 0]);
}

#[test]
fn one_micro_batch_is_kept_unless_all_are_recomputed() {
    for (mode, wanted) in [(RecomputeMode::Always, [2, 2, 0]), (RecomputeMode::ExceptLast, [0, 0, 2])] {
        assert_eq!(runs(3, 1, mode, true), wanted);
    }
    assert_eq!(runs(3, 1, RecomputeMode::Never, true), [0, 0, 2]);
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
    let model = each(vec![apply(note)], &own, GPipeConfig::new(4).with_recompute(RecomputeMode::Always));
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
    let model =
        each(vec![probe(0), probe(1)], &own, GPipeConfig::new(3).with_recompute(RecomputeMode::Always));
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
        let config = GPipeConfig::new(1).with_recompute(RecomputeMode::Always);
        let model = each(vec![apply(add_one)], &own, config);
        let y = model.run([foo, bar]).and_then(Batch::one).unwrap();
        let message = y.backward().unwrap_err().to_string();
        assert!(message.contains("checkpoint: input 1 was modified in place"), "{message}");
    }
}

/// Rows of a micro-batch and their width.
const ROWS: usize = 3;
const WIDE: usize = 1000;
/// Bytes of what enters or leaves a stage, of one micro-batch, or of its gradient: I.
const VALUE: usize = ROWS * WIDE * 8;
/// Inner values that a stage's backward needs, in units of [`VALUE`]: A = 20 I.
const INNER: usize = 20;

/// A stage of [`INNER`] tanh, each of which saves its output.
fn stage() -> Box<dyn Layer> {
    apply(|b| Ok(b.map(|x| (0..INNER).try_fold(x, |x, _| x.tanh()))?))
}

/// Peaks of each device in forward and in backward, in units of [`VALUE`], beyond the input.
fn peaks(m: usize, devices: &[Device], mode: RecomputeMode) -> Vec<[usize; 2]> {
    let model =
        each(devices.iter().map(|_| stage()).collect(), devices, GPipeConfig::new(m).with_recompute(mode));
    let tensor = Tensor::zeros(&[m * ROWS, WIDE], DType::F64, devices[0]).unwrap();
    let x = Var::leaf(tensor).unwrap();
    let before: Vec<usize> = devices.iter().map(|d| d.ledger().unwrap().total().now).collect();
    let reset = || devices.iter().for_each(|d| d.ledger().unwrap().reset_peak());
    let read = || -> Vec<usize> {
        let beyond = |(d, before): (&Device, &usize)| d.ledger().unwrap().total().peak - before;
        devices.iter().zip(&before).map(beyond).map(|bytes| bytes.div_ceil(VALUE)).collect()
    };
    reset();
    let y = model.run(&x).and_then(Batch::one).unwrap();
    let forward = read();
    reset();
    let last = *devices.last().unwrap();
    let dy = Var::new(Tensor::zeros(y.shape(), DType::F64, last).unwrap());
    y.backward_with(dy).unwrap();
    drop(y);
    let now: Vec<usize> = devices.iter().map(|d| d.ledger().unwrap().total().now).collect();
    let mut left = before.clone();
    left[0] += m * VALUE;
    assert_eq!(now, left, "the gradient of x is left");
    forward.into_iter().zip(read()).map(|(f, b)| [f, b]).collect()
}

#[test]
fn recomputation_holds_inputs_of_all_micro_batches_and_inner_values_of_one() {
    let own = devices(3);
    for m in [2, 4, 7] {
        for mode in [RecomputeMode::Always, RecomputeMode::ExceptLast] {
            for (j, [forward, backward]) in peaks(m, &own, mode).into_iter().enumerate() {
                // The last device gathers the output: m values more, beside the m that it is made of.
                let gathered = if j == 2 { 2 * m } else { 0 };
                // Inputs of m micro-batches, inner values of one, and two values at work.
                let bound = m + INNER + 2 + gathered;
                assert!(forward <= bound, "forward, m {m}, {mode}, stage {j}: {forward} > {bound}");
                // In backward, the gradients of up to three micro-batches that the next stage is through with may wait.
                let bound = bound + 3;
                assert!(backward <= bound, "backward, m {m}, {mode}, stage {j}: {backward} > {bound}");
                assert!(backward >= INNER, "one micro-batch's inner values");
            }
        }
    }
}

#[test]
fn without_recomputation_inner_values_of_all_micro_batches_are_held() {
    let own = devices(2);
    for m in [1, 4] {
        for [forward, _] in peaks(m, &own, RecomputeMode::Never) {
            assert!(forward >= m * INNER, "{forward}");
        }
    }
}

#[test]
fn a_device_alone_has_exactly_the_formulas_peaks() {
    for m in [2, 3, 5] {
        let of = |mode| peaks(m, &devices(1), mode)[0];
        // Forward: m outputs and the m rows gathered of them; the last micro-batch's inner values, one of which is its
        // output, if they are kept. Backward: the output, its gradient and the input's, and one micro-batch's inner values.
        assert_eq!(of(RecomputeMode::Always), [2 * m, INNER + 3 * m]);
        assert_eq!(of(RecomputeMode::ExceptLast), [INNER + 2 * m - 1, INNER + 3 * m]);
        // m micro-batches' inner values, and beside the output and its gradient one value at work.
        assert_eq!(of(RecomputeMode::Never), [m * INNER + m, m * INNER + 2 * m + 1]);
    }
}

#[test]
fn a_meta_device_has_the_peaks_of_a_cpu() {
    for m in [1, 2, 5] {
        for mode in MODES {
            let meta = Device::Meta(700 + m as u16);
            assert_eq!(peaks(m, &[meta], mode), peaks(m, &devices(1), mode), "m {m}, {mode}");
        }
    }
}

#[test]
fn a_parameters_gradients_of_all_micro_batches_are_not_held_at_once() {
    let own = devices(2);
    let m = 8;
    let linear = |i: usize| {
        let scope = phalanx_nn::Scope::new(1, DType::F64, own[i]).child(i);
        Box::new(phalanx_nn::LinearConfig::new(200, 200).with_bias(false).init(&scope).unwrap())
            as Box<dyn Layer>
    };
    let model = each(vec![linear(0), linear(1)], &own, GPipeConfig::new(m));
    let y = model.run(constant(1, &[m, 200], own[0])).and_then(Batch::one).unwrap().sum_all().unwrap();
    let ledgers = own.iter().map(|d| d.ledger().unwrap());
    let before: Vec<usize> = ledgers.clone().map(|l| l.total().now).collect();
    ledgers.clone().for_each(|l| l.reset_peak());
    y.backward().unwrap();
    let weight = 200 * 200 * 8;
    for (ledger, before) in ledgers.zip(before) {
        let peak = ledger.total().peak - before;
        assert!(peak < 3 * weight, "the sum, and what is added to it: {peak} of {weight} each");
    }
}
