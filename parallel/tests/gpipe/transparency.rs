//! A pipeline computes what the plain model computes over the same micro-batches. With deferred batch normalisation a
//! mini-batch's statistics move once, whatever is recomputed.

use phalanx_nn::autograd::ContextMode;
use phalanx_nn::autograd::Var;
use phalanx_nn::models::RecomputeMode;
use phalanx_nn::{
    BatchNormConfig, Conv2dConfig, EmbeddingConfig, LinearConfig, Parameters, Relu, Scope, Sequential,
    TransformerEncoderLayerConfig, state_dict,
};
use phalanx_parallel::pipeline::MicroBatch;
use phalanx_parallel::pipeline::deferred_batch_norm::convert;
use phalanx_parallel::pipeline::gpipe::{
    Batch, GPipe, GPipeConfig, Partition, Phase, Sequence, Timeline, scatter,
};
use phalanx_tensor::{Context, DType, Device, Tensor};

use crate::kit::*;

type Outcome = (Vec<u64>, Vec<u64>, Vec<(String, Vec<u64>)>);

/// The plain model: micro-batches forward in order, then backward in the mirror's, the last first. Returns the outputs,
/// the input's gradient and the parameters'.
fn plain(rows: usize, micro_batches: usize) -> Outcome {
    let model = net(|_| plain_device());
    let (x, c) = (leaf(1, &[rows, WIDTH], plain_device()), constant(2, &[rows, WIDTH], plain_device()));
    let size = rows.div_ceil(micro_batches);
    let (mut output, mut losses) = (Vec::new(), Vec::new());
    let pieces = x.split(size, 0).unwrap().into_iter().zip(c.split(size, 0).unwrap());
    for (i, (x, c)) in pieces.enumerate() {
        let _context = Context::with(|context| {
            key(context);
            context.batch_offset = (i * size) as u64;
        });
        let y = model.run(&x).and_then(Batch::one).unwrap();
        output.extend(bits(&y));
        losses.push(y.mul(&c).unwrap().sum_all().unwrap());
    }
    let retain = phalanx_nn::autograd::Options { retain_graph: true, ..Default::default() };
    for loss in losses.into_iter().rev() {
        phalanx_nn::autograd::backward(&[(loss, None)], retain).unwrap();
    }
    (output, bits(&x.grad().unwrap()), gradients(&model))
}

fn piped(rows: usize, balance: &[usize], devices: &[Device], config: GPipeConfig) -> Outcome {
    let model = pipe(balance, devices, config);
    let (first, last) = (devices[0], devices[balance.len() - 1]);
    let (x, c) = (leaf(1, &[rows, WIDTH], first), constant(2, &[rows, WIDTH], last));
    let mut outcome = None;
    for _ in 0..2 {
        let _context = Context::with(key);
        let y = model.run(&x).and_then(Batch::one).unwrap();
        let output = bits(&y);
        y.mul(&c).unwrap().sum_all().unwrap().backward().unwrap();
        let now = (output, bits(&x.grad().unwrap()), gradients(&model));
        assert!(outcome.is_none_or(|before| before == now), "a second step is as the first");
        outcome = Some(now);
        model.parameters().iter().for_each(|p| p.zero_grad().unwrap());
        x.as_leaf().unwrap().zero_grad().unwrap();
    }
    outcome.unwrap()
}

#[test]
fn gradients_are_the_plain_models_bit_for_bit() {
    let own = devices(4);
    for (rows, micro_batches) in [(9, 4), (5, 4), (8, 8), (7, 1), (3, 8)] {
        let wanted = plain(rows, micro_batches);
        assert!(wanted.2.iter().all(|(_, grad)| !grad.is_empty()));
        for balance in [&[8][..], &[3, 5], &[1, 2, 5], &[2, 3, 1, 2]] {
            for mode in MODES {
                let config = GPipeConfig::new(micro_batches).with_recompute(mode);
                let got = piped(rows, balance, &own, config);
                assert!(got == wanted, "{rows} rows, {micro_batches} micro-batches, {balance:?}, {mode}");
            }
        }
    }
}

/// Rows, micro-batches, stages, devices and modes without a pattern, more of one than of the other and fewer.
#[test]
fn random_pipelines_have_the_plain_models_bits() {
    let own = devices(3);
    let mut draws = numbers(17, 1000).into_iter().map(|x| ((x + 1.0) * 500.0) as usize);
    let mut draw = |range: std::ops::RangeInclusive<usize>| {
        range.start() + draws.next().unwrap() % (range.end() + 1 - range.start())
    };
    for trial in 0..12 {
        let (rows, micro_batches, stages) = (draw(1..=11), draw(1..=9), draw(1..=5));
        // Each stage has a layer, and each other layer is some stage's.
        let mut balance = vec![1; stages];
        (stages..8).for_each(|_| balance[draw(0..=stages - 1)] += 1);
        let places: Vec<Device> = balance.iter().map(|_| own[draw(0..=2)]).collect();
        let mode = MODES[draw(0..=2)];
        let got = piped(rows, &balance, &places, GPipeConfig::new(micro_batches).with_recompute(mode));
        let what = format!(
            "trial {trial}: {rows} rows, {micro_batches} micro-batches, {balance:?} on {places:?}, {mode}"
        );
        assert!(got == plain(rows, micro_batches), "{what}");
    }
}

#[test]
fn stages_that_share_devices_compute_the_same() {
    let own = devices(2);
    let wanted = plain(9, 4);
    for places in [[0, 0, 0], [0, 1, 0], [0, 0, 1], [1, 0, 0]] {
        let places = places.map(|i| own[i]);
        for mode in MODES {
            let got = piped(9, &[3, 3, 2], &places, GPipeConfig::new(4).with_recompute(mode));
            assert!(got == wanted, "{places:?}, {mode}");
        }
    }
}

#[test]
fn dropout_draws_what_the_whole_batch_draws() {
    let own = devices(2);
    let whole = plain(9, 1).0;
    for micro_batches in [1, 2, 4, 9] {
        let got = piped(9, &[4, 4], &own, GPipeConfig::new(micro_batches));
        assert_eq!(got.0, whole, "{micro_batches} micro-batches");
    }
}

#[test]
fn evaluation_computes_the_same_and_records_no_recomputation() {
    let own = devices(2);
    let timeline = Timeline::new();
    let config = GPipeConfig::new(4).with_recompute(RecomputeMode::Always);
    let model = pipe(&[4, 4], &own, config.with_observer(timeline.observer()));
    let _context = Context::with(|c| c.set_train(false));
    let x = constant(1, &[6, WIDTH], own[0]);
    let got = model.run(&x).and_then(Batch::one).unwrap();
    let twin = net(|_| plain_device());
    let wanted = twin.run(constant(1, &[6, WIDTH], plain_device())).and_then(Batch::one).unwrap();
    assert_eq!(bits(&got), bits(&wanted));
    got.sum_all().unwrap().backward().unwrap();
    wanted.sum_all().unwrap().backward().unwrap();
    let close = |a: u64, b: u64| (f64::from_bits(a) - f64::from_bits(b)).abs() < 1e-12;
    let phases: Vec<Phase> = timeline.take().iter().map(|span| span.phase).collect();
    assert!(phases.contains(&Phase::Backward) && !phases.contains(&Phase::Recompute), "{phases:?}");
    let (got, wanted) = (gradients(&model), gradients(&twin));
    assert_eq!(got.len(), wanted.len());
    for (got, wanted) in got.into_iter().zip(wanted) {
        assert!(!got.1.is_empty() && got.1.len() == wanted.1.len(), "{}", got.0);
        assert!(got.1.iter().zip(&wanted.1).all(|(&a, &b)| close(a, b)), "{}", got.0);
    }
}

#[test]
fn without_gradients_nothing_is_recorded_and_no_memory_stays() {
    let own = devices(2);
    let model = pipe(&[4, 4], &own, GPipeConfig::new(3));
    let x = constant(1, &[6, WIDTH], own[0]);
    let bytes = || own.iter().map(|d| d.ledger().unwrap().total().now).collect::<Vec<_>>();
    let before = bytes();
    let _plain = phalanx_nn::autograd::no_grad();
    let y = model.run(&x).and_then(Batch::one).unwrap();
    assert_eq!((y.op(), y.requires_grad()), (None, false));
    assert_eq!(bytes(), [before[0], before[1] + 6 * WIDTH * 8], "only the output");
}

/// Tokens (rows, 6) to logits; layers built where `place` says.
fn transformer(place: impl Fn(usize) -> Device) -> Sequence {
    let scope = |i: usize| Scope::new(4, DType::F32, place(i)).child(i);
    let block = |i| TransformerEncoderLayerConfig::new(8, 2).init(&scope(i)).unwrap();
    Sequence::new()
        .with(EmbeddingConfig::new(17, 8).init(&scope(0)).unwrap())
        .with(block(1))
        .with(block(2))
        .with(LinearConfig::new(8, 17).init(&scope(3)).unwrap())
}

#[test]
fn a_transformer_over_tokens_has_the_plain_models_gradients() {
    let (rows, micro_batches, own) = (7, 3, devices(3));
    let tokens: Vec<i64> = (0..rows as i64 * 6).map(|i| i * 7919 % 17).collect();
    let tokens = |device| Var::from_slice(&tokens, &[rows, 6], device).unwrap();
    let c = |device| constant(2, &[rows, 6, 17], device).to(DType::F32).unwrap();
    let gradients = |model: &dyn Parameters| -> Vec<Vec<f32>> {
        let grads = model.parameters().into_iter().map(|p| p.grad().unwrap().unwrap());
        grads.map(|grad| grad.to_vec().unwrap()).collect()
    };
    let plain = transformer(|_| plain_device());
    let pieces =
        tokens(plain_device()).split(3, 0).unwrap().into_iter().zip(c(plain_device()).split(3, 0).unwrap());
    let losses: Vec<Var> = pieces
        .enumerate()
        .map(|(i, (x, c))| {
            let _context = Context::with(|context| {
                key(context);
                context.batch_offset = 3 * i as u64;
            });
            let y = plain.run(&x).and_then(Batch::one).unwrap();
            y.mul(&c).unwrap().sum_all().unwrap()
        })
        .collect();
    losses.into_iter().rev().for_each(|loss| loss.backward().unwrap());
    let wanted = gradients(&plain);
    for balance in [&[2, 2][..], &[1, 2, 1]] {
        for mode in MODES {
            let partition = Partition::new(balance, &own).unwrap();
            let model = transformer(|layer| partition.device(layer).unwrap());
            let config = GPipeConfig::new(micro_batches).with_recompute(mode);
            let model = GPipe::new(model, partition, config).unwrap();
            let _context = Context::with(key);
            let y = model.run(tokens(own[0])).and_then(Batch::one).unwrap();
            let loss = y.mul(&c(own[balance.len() - 1])).unwrap().sum_all().unwrap();
            loss.backward().unwrap();
            assert!(gradients(&model) == wanted, "{balance:?}, {mode}");
        }
    }
}

#[test]
fn a_retained_graph_is_run_by_two_threads_at_once() {
    let own = devices(2);
    let x = leaf(1, &[4, WIDTH], own[0]);
    let model = pipe(&[4, 4], &own, GPipeConfig::new(4));
    let y = model.run(&x).and_then(Batch::one).unwrap().sum_all().unwrap();
    let options = phalanx_nn::autograd::Options { retain_graph: true, ..Default::default() };
    let dx = || {
        let grads = phalanx_nn::autograd::grad(&[(y.clone(), None)], &[&x], options).unwrap();
        bits(grads[0].as_ref().unwrap())
    };
    let wanted = dx();
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| (0..20).for_each(|_| assert_eq!(dx(), wanted)));
        }
    });
}

#[test]
fn batches_of_several_values_pass_through_stages() {
    let own = devices(2);
    let halves = |batch: Batch| -> phalanx_parallel::Result<Batch> {
        let [x, mask] = batch.many()?;
        Ok([x.mul(&mask.to(x.dtype())?)?, x.tanh()?].into())
    };
    let sum = |batch: Batch| -> phalanx_parallel::Result<Batch> {
        let [a, b] = batch.many()?;
        Ok(a.mul(&b)?.into())
    };
    let x = leaf(1, &[5, 3], own[0]);
    let mask = Var::from_slice(&(0..15).map(|i| i % 2).collect::<Vec<i64>>(), &[5, 3], own[0]).unwrap();
    for mode in MODES {
        let model = each(vec![apply(halves), apply(sum)], &own, GPipeConfig::new(2).with_recompute(mode));
        let y = model.run([x.clone(), mask.clone()]).and_then(Batch::one).unwrap();
        y.sum_all().unwrap().backward().unwrap();
        let got = (bits(&y), bits(&x.grad().unwrap()));
        x.as_leaf().unwrap().zero_grad().unwrap();
        let model = Sequence::from(vec![apply(halves), apply(sum)]);
        let y = model.run([x.clone(), mask.clone()]).and_then(Batch::one).unwrap();
        y.sum_all().unwrap().backward().unwrap();
        assert_eq!(got, (bits(&y), bits(&x.grad().unwrap())), "{mode}");
        x.as_leaf().unwrap().zero_grad().unwrap();
    }
}

#[test]
fn gradients_of_gradients_pass_through_copies() {
    let own = devices(2);
    let model = each(
        vec![apply(|b| Ok(b.map(|x| x.tanh()?.mul(&x))?)), apply(|b| Ok(b.map(|x| x.mul(&x))?))],
        &own,
        GPipeConfig::new(2),
    );
    let options = phalanx_nn::autograd::Options { create_graph: true, ..Default::default() };
    let second = |run: &dyn Fn(&Var) -> Var, x: &Var| {
        let y = run(x).sum_all().unwrap();
        let dx = phalanx_nn::autograd::grad(&[(y, None)], &[x], options).unwrap()[0].clone().unwrap();
        let ddx = phalanx_nn::autograd::grad(&[(dx.sum_all().unwrap(), None)], &[x], Default::default());
        ddx.unwrap()[0].as_ref().unwrap().to_vec::<f64>().unwrap()
    };
    let x = leaf(4, &[4, 2], own[0]);
    let got = second(&|x| model.run(x).and_then(Batch::one).unwrap(), &x);
    let plain = |x: &Var| {
        let y = x.tanh().unwrap().mul(x).unwrap();
        y.mul(&y).unwrap()
    };
    let wanted = second(&plain, &x);
    assert_eq!((got.len(), wanted.len()), (8, 8));
    for (got, wanted) in got.into_iter().zip(wanted) {
        assert!((got - wanted).abs() < 1e-12);
    }
}

#[test]
fn a_pipeline_is_driven_by_several_threads_at_once() {
    let own = devices(2);
    let wanted = plain(9, 4);
    std::thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| assert!(piped(9, &[3, 5], &own, GPipeConfig::new(4)) == wanted));
        }
    });
}

const LAYERS: usize = 5;

/// Momenta of two norms: of one the mean of all batches.
const MOMENTA: [Option<f64>; 2] = [None, Some(0.1)];

/// Two convolutions with a norm each, the norms deferred.
fn convolutions(momenta: [Option<f64>; 2], place: impl Fn(usize) -> Device) -> Sequence {
    let scope = |i: usize| Scope::new(3, DType::F64, place(i)).child(i);
    let conv = |i, inputs, outputs| Conv2dConfig::new(inputs, outputs, [3, 3]).init(&scope(i)).unwrap();
    let norm = |i, momentum, channels| {
        BatchNormConfig::new(channels).with_momentum(momentum).init_2d(&scope(i)).unwrap()
    };
    let mut model = Sequential::new()
        .with(conv(0, 2, 4))
        .with(norm(1, momenta[0], 4))
        .with(Relu {})
        .with(conv(3, 4, 3))
        .with(norm(4, momenta[1], 3));
    convert(&mut model);
    model.into()
}

/// Buffers and parameters.
fn state(model: &impl Parameters) -> Vec<(String, Vec<u8>)> {
    state_dict(model).into_iter().map(|(name, t)| (name, t.to_bytes().unwrap())).collect()
}

/// The plain model over the micro-batches one after the other, backward in the mirror's order.
fn run_plain(model: &Sequence, x: &Var, micro_batches: usize) {
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
                let config = GPipeConfig::new(micro_batches).with_recompute(mode);
                let layers = convolutions(MOMENTA, |layer| partition.device(layer).unwrap());
                let piped = GPipe::new(layers, partition, config).unwrap();
                let alone = convolutions(MOMENTA, |_| plain_device());
                assert_eq!(alone.layers().len(), LAYERS);
                // The second batch has fewer micro-batches than are asked for.
                for (step, rows) in [9, 3, 7].into_iter().enumerate() {
                    let x = |device| constant(step as u64, &[rows, 2, 6, 5], device);
                    run_plain(&alone, &x(plain_device()), micro_batches);
                    backward(&piped.run(x(own[0])).and_then(Batch::one).unwrap());
                    assert!(state(&piped) == state(&alone), "{what}, step {step}");
                    assert!(gradients(&piped) == gradients(&alone), "{what}, step {step}");
                }
                let before = state(&piped);
                let _evaluation = Context::with(|c| c.set_train(false));
                piped.run(constant(9, &[4, 2, 6, 5], own[0])).unwrap();
                assert!(state(&piped) == before, "{what}: evaluation");
            }
        }
    }
}

/// Statistics behind the second convolution differ: its input depends on how each micro-batch was normalised.
#[test]
fn statistics_behind_the_first_convolution_are_those_of_the_whole_batch() {
    let own = devices(2);
    for momenta in [MOMENTA, [MOMENTA[1], MOMENTA[0]]] {
        let partition = Partition::new(&[3, 2], &own).unwrap();
        let layers = convolutions(momenta, |layer| partition.device(layer).unwrap());
        let piped = GPipe::new(layers, partition, GPipeConfig::new(4)).unwrap();
        let alone = convolutions(momenta, |_| plain_device());
        for (step, rows) in [9, 3, 7].into_iter().enumerate() {
            let x = |device| constant(step as u64, &[rows, 2, 6, 5], device);
            piped.run(x(own[0])).unwrap();
            alone.run(x(plain_device())).unwrap();
        }
        for name in ["1.running_mean", "1.running_var"] {
            let of = |model: &dyn Fn() -> Vec<(String, Tensor)>| {
                let (_, t) = model().into_iter().find(|(known, _)| known == name).unwrap();
                t.to_vec::<f64>().unwrap()
            };
            let (got, wanted) = (of(&|| state_dict(&piped)), of(&|| state_dict(&alone)));
            assert_eq!((got.len(), wanted.len()), (4, 4), "{name}");
            for (got, wanted) in got.iter().zip(&wanted) {
                assert!((got - wanted).abs() < 1e-13, "{name}, {momenta:?}: {got}, wanted {wanted}");
            }
        }
    }
}
