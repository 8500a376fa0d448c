//! Deferred batch normalisation in a pipeline: a mini-batch's statistics move once, whatever is recomputed.

use phalanx_nn::autograd::Var;
use phalanx_nn::{BatchNormConfig, Conv2dConfig, Parameters, Relu, Scope, Sequential, state_dict};
use phalanx_parallel::pipeline::MicroBatch;
use phalanx_parallel::pipeline::deferred_batch_norm::convert;
use phalanx_parallel::pipeline::gpipe::{Batch, GPipe, GPipeConfig, Partition, Sequence, scatter};
use phalanx_tensor::{Context, DType, Device, Tensor};

use crate::kit::*;

const LAYERS: usize = 5;

/// Two convolutions with a norm each, the norms deferred.
fn convolutions(place: impl Fn(usize) -> Device) -> Sequence {
    let scope = |i: usize| Scope::new(3, DType::F64, place(i)).child(i);
    let conv = |i, inputs, outputs| Conv2dConfig::new(inputs, outputs, [3, 3]).init(&scope(i)).unwrap();
    let norm = |i, momentum, channels| {
        BatchNormConfig::new(channels).with_momentum(momentum).init_2d(&scope(i)).unwrap()
    };
    let mut model = Sequential::new()
        .with(conv(0, 2, 4))
        .with(norm(1, None, 4))
        .with(Relu {})
        .with(conv(3, 4, 3))
        .with(norm(4, Some(0.1), 3));
    convert(&mut model);
    model.into()
}

/// Buffers and parameters.
fn state(model: &impl Parameters) -> Vec<(String, Vec<u8>)> {
    state_dict(model).into_iter().map(|(name, t)| (name, t.to_bytes().unwrap())).collect()
}

/// The plain model over the micro-batches one after the other, backward in the mirror's order.
fn plain(model: &Sequence, x: &Var, micro_batches: usize) {
    let parts = scatter(&x.into(), micro_batches).unwrap();
    let count = parts.len();
    let run = |(index, (part, _)): (usize, (Batch, _))| {
        let _part = MicroBatch { index, count }.enter();
        model.run(part).and_then(Batch::one).unwrap()
    };
    let ys: Vec<Var> = parts.into_iter().enumerate().map(run).collect();
    ys.iter().rev().for_each(backward);
}

fn backward(y: &Var) {
    let ones = Tensor::from_slice(&vec![0.5; y.numel()], y.shape(), y.device()).unwrap();
    y.backward_with(Var::new(ones)).unwrap();
}

#[test]
fn statistics_and_gradients_are_those_of_the_plain_model_over_the_same_micro_batches() {
    let own = devices(3);
    for balance in [&[5][..], &[2, 3], &[1, 1, 3]] {
        for mode in MODES {
            for micro_batches in [1, 2, 4] {
                let what = format!("{balance:?}, {micro_batches} micro-batches, {mode}");
                let partition = Partition::new(balance, &own).unwrap();
                let config = GPipeConfig::new(micro_batches).with_checkpoint(mode);
                let layers = convolutions(|layer| partition.device(layer).unwrap());
                let piped = GPipe::new(layers, partition, config).unwrap();
                let alone = convolutions(|_| Device::CPU);
                assert_eq!(alone.layers().len(), LAYERS);
                // The second batch has fewer micro-batches than are asked for.
                for (step, rows) in [9, 3, 7].into_iter().enumerate() {
                    let x = |device| constant(step as u64, &[rows, 2, 6, 5], device);
                    plain(&alone, &x(Device::CPU), micro_batches);
                    backward(&piped.run(x(own[0])).and_then(Batch::one).unwrap());
                    assert!(state(&piped) == state(&alone), "{what}, step {step}");
                    assert!(gradients(&piped) == gradients(&alone), "{what}, step {step}");
                }
                let before = state(&piped);
                let _evaluation = Context::with(|c| c.train = false);
                piped.run(constant(9, &[4, 2, 6, 5], own[0])).unwrap();
                assert!(state(&piped) == before, "{what}: evaluation");
            }
        }
    }
}

#[test]
fn statistics_behind_the_first_convolution_are_those_of_the_whole_batch() {
    let own = devices(2);
    let partition = Partition::new(&[3, 2], &own).unwrap();
    let layers = convolutions(|layer| partition.device(layer).unwrap());
    let piped = GPipe::new(layers, partition, GPipeConfig::new(4)).unwrap();
    let alone = convolutions(|_| Device::CPU);
    for (step, rows) in [9, 3, 7].into_iter().enumerate() {
        let x = |device| constant(step as u64, &[rows, 2, 6, 5], device);
        piped.run(x(own[0])).unwrap();
        alone.run(x(Device::CPU)).unwrap();
    }
    for name in ["1.running_mean", "1.running_var"] {
        let of = |model: &dyn Fn() -> Vec<(String, Tensor)>| {
            let (_, t) = model().into_iter().find(|(known, _)| known == name).unwrap();
            t.to_vec::<f64>().unwrap()
        };
        let (got, wanted) = (of(&|| state_dict(&piped)), of(&|| state_dict(&alone)));
        for (got, wanted) in got.iter().zip(&wanted) {
            assert!((got - wanted).abs() < 1e-13, "{name}: {got}, wanted {wanted}");
        }
    }
}
