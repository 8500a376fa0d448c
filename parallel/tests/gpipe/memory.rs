//! Memory, from the ledger: with recomputation a stage holds what enters it of every micro-batch, and the inner values of one.

use phalanx_nn::autograd::Var;
use phalanx_parallel::pipeline::gpipe::{Batch, Checkpoint, GPipeConfig, Layer};
use phalanx_tensor::{DType, Device, Tensor};

use crate::kit::*;

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
fn peaks(m: usize, devices: &[Device], mode: Checkpoint) -> Vec<[usize; 2]> {
    let model =
        each(devices.iter().map(|_| stage()).collect(), devices, GPipeConfig::new(m).with_checkpoint(mode));
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
        for mode in [Checkpoint::Always, Checkpoint::ExceptLast] {
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
        for [forward, _] in peaks(m, &own, Checkpoint::Never) {
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
        assert_eq!(of(Checkpoint::Always), [2 * m, INNER + 3 * m]);
        assert_eq!(of(Checkpoint::ExceptLast), [INNER + 2 * m - 1, INNER + 3 * m]);
        // m micro-batches' inner values, and beside the output and its gradient one value at work.
        assert_eq!(of(Checkpoint::Never), [m * INNER + m, m * INNER + 2 * m + 1]);
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
