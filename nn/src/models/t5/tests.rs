//! A T5 beside its formula, its stages beside the whole, and what is refused.

use std::sync::Arc;

use phalanx_autograd::{Options, Var, grad};
use phalanx_kernels as kernels;
use phalanx_tensor::{Context, DType, Device, Tensor};

use super::super::RecomputeMode;
use super::{T5, T5Config, T5Stage};
use crate::{OneDevice, Parameters, Scope, eval};

const ROWS: usize = 3;
const LENGTHS: [usize; 2] = [7, 5];

fn config(shared_bias: bool, dropout: f64) -> T5Config {
    let config = T5Config { decoder_layers: 3, inner: 20, ..T5Config::new(31, 2, 2, 5, 12) };
    T5Config { shared_bias, dropout, buckets: 8, max_distance: 9, ..config }
}

fn build(config: &T5Config) -> T5 {
    config.init(&Scope::new(5, DType::F32, Device::CPU)).unwrap()
}

/// Tokens of the encoder and the decoder, and the decoder's labels.
fn batch(device: Device) -> [Var; 3] {
    let tokens = |length: usize, by: usize| {
        let numbers: Vec<i64> = (0..ROWS * length).map(|i| ((i * by + i / 4) % 31) as i64).collect();
        Var::from_slice(&numbers, &[ROWS, length], device).unwrap()
    };
    [tokens(LENGTHS[0], 5), tokens(LENGTHS[1], 7), tokens(LENGTHS[1], 11)]
}

fn context() -> phalanx_tensor::ContextGuard {
    Context::with(|c| (c.rng.seed, c.rng.step) = (3, 2))
}

fn bits(x: &Tensor) -> Vec<u8> {
    x.to_bytes().unwrap()
}

/// The loss and the gradients by name of stages that are called one after the other.
fn train(stages: &[T5]) -> (Vec<u8>, Vec<(String, Vec<u8>)>) {
    let _context = context();
    let [source, target, labels] = batch(Device::CPU);
    let mut passed: Vec<(Option<Var>, Var)> = Vec::new();
    for stage in stages {
        let input = passed.last().map(|(_, y)| Var::leaf(y.tensor().clone()).unwrap());
        let y = stage.forward(input.as_ref(), &source, &target).unwrap();
        passed.push((input, y));
    }
    let loss = stages.last().unwrap().loss(&passed.last().unwrap().1, &labels, 1.0 / 15.0).unwrap();
    let mut output_grad: Option<Var> = None;
    for (i, (input, y)) in passed.iter().enumerate().rev() {
        match output_grad.take() {
            None => loss.backward().unwrap(),
            Some(grad) => y.backward_with(grad).unwrap(),
        }
        assert_eq!(input.is_none(), i == 0);
        output_grad = input.as_ref().map(|input| input.grad().unwrap());
    }
    let grads = stages.iter().flat_map(|stage| stage.parameters());
    let mut grads: Vec<_> =
        grads.map(|p| (p.name().to_string(), bits(&p.finish_grad().unwrap().unwrap()))).collect();
    grads.sort();
    (bits(loss.tensor()), grads)
}

#[test]
fn stages_have_the_bits_of_the_whole_model_and_recomputation_too() {
    for (shared_bias, stages, encoder_stages) in
        [(true, 2, 1), (false, 2, 1), (false, 4, 2), (false, 3, 2), (false, 7, 3)]
    {
        let config = config(shared_bias, 0.2);
        let wanted = train(&[build(&config)]);
        let scope = Scope::new(5, DType::F32, Device::CPU);
        for mode in [RecomputeMode::Never, RecomputeMode::ExceptLast, RecomputeMode::Always] {
            let build = |stage: T5Stage| {
                let mut stage = config.init_stage(&Arc::new(OneDevice), &scope, stage).unwrap();
                stage.set_recompute(mode);
                stage
            };
            let split = config.split(stages, encoder_stages).unwrap();
            let got = train(&split.into_iter().map(build).collect::<Vec<_>>());
            assert!(got == wanted, "{shared_bias} {stages} {encoder_stages} {mode}");
        }
    }
}

#[test]
fn the_decoder_sees_the_source_and_no_later_target() {
    let model = build(&config(true, 0.0));
    let _evaluation = eval();
    let [source, target, _] = batch(Device::CPU);
    let logits = |source: &Var, target: &Var| {
        model.logits(&model.forward(None, source, target).unwrap()).unwrap().into_tensor()
    };
    let plain = logits(&source, &target);
    let changed = |tokens: &Var, at: usize| {
        let mut numbers = tokens.to_vec::<i64>().unwrap();
        numbers[at] = (numbers[at] + 1) % 31;
        Var::from_slice(&numbers, tokens.shape(), Device::CPU).unwrap()
    };
    let row = |logits: &Tensor, row: usize, positions: std::ops::Range<usize>| {
        bits(&logits.narrow(0, row, 1).unwrap().narrow(1, positions.start, positions.len()).unwrap())
    };
    // The last source token of row 1 changes every position of that row, and no other row.
    let other = logits(&changed(&source, 2 * LENGTHS[0] - 1), &target);
    assert_eq!(row(&other, 0, 0..5), row(&plain, 0, 0..5));
    for position in 0..5 {
        assert_ne!(row(&other, 1, position..position + 1), row(&plain, 1, position..position + 1));
    }
    // Target token 3 of row 0 changes positions from 3 on.
    let other = logits(&source, &changed(&target, 3));
    assert_eq!(row(&other, 0, 0..3), row(&plain, 0, 0..3));
    assert_ne!(row(&other, 0, 3..4), row(&plain, 0, 3..4));
}

/// A block of the encoder and one of the decoder from the formulas, with scores and probabilities as whole matrices.
#[test]
fn the_model_is_the_formula() {
    let config = T5Config { encoder_layers: 1, decoder_layers: 1, ..config(true, 0.0) };
    let model = config.init(&Scope::new(5, DType::F64, Device::CPU)).unwrap();
    let [source, target, _] = batch(Device::CPU);
    let named = model.named_parameters();
    let weight = |name: &str| {
        let found = named.iter().find(|(path, _)| path == &format!("{name}.weight"));
        found
            .unwrap_or_else(|| panic!("{name} in {:?}", named.iter().map(|(n, _)| n).collect::<Vec<_>>()))
            .1
            .var()
    };
    let norm = |x: &Var, name: &str| {
        let scale = x.square().unwrap().mean(&[-1], true).unwrap().add_scalar(1e-6).unwrap().rsqrt().unwrap();
        x.mul(&scale).unwrap().mul(&weight(name)).unwrap()
    };
    let linear = |x: &Var, name: &str| x.linear(&weight(name), None).unwrap();
    let heads = |x: Var| {
        let shape = [x.shape()[0], x.shape()[1], 2, 5];
        x.reshape_to(&shape).unwrap().transpose(1, 2).unwrap()
    };
    // Buckets of 8: both ways 4 each, of which 2 are exact; one way 8, of which 4 are exact.
    let bucket = |distance: i64, both: bool| -> i64 {
        let (count, first) = if both { (4, if distance > 0 { 4 } else { 0 }) } else { (8, 0) };
        let far = if both { distance.abs() } else { (-distance).max(0) };
        let exact = count / 2;
        if far < exact {
            return first + far;
        }
        let grown = (far as f64 / exact as f64).ln() / (9.0 / exact as f64).ln() * (count - exact) as f64;
        first + (exact + grown as i64).min(count - 1)
    };
    let bias = |name: &str, length: usize, both: bool| {
        let rows: Vec<i64> =
            (0..length * length).map(|i| bucket((i % length) as i64 - (i / length) as i64, both)).collect();
        let rows = Var::from_slice(&rows, &[length * length], Device::CPU).unwrap();
        let table = weight(&format!("{name}.relative_attention_bias"));
        let bias = table.index_select(0, &rows).unwrap().reshape_to(&[length, length, 2]).unwrap();
        bias.permute(&[2, 0, 1]).unwrap()
    };
    let attend = |x: &Var, memory: &Var, name: &str, bias: Option<Var>, causal: bool| {
        let [q, k, v] = [(x, "q"), (memory, "k"), (memory, "v")]
            .map(|(x, part)| heads(linear(x, &format!("{name}.{part}"))));
        let mut scores = q.matmul(&k.transpose(2, 3).unwrap()).unwrap();
        if let Some(bias) = bias {
            scores = scores.add(&bias).unwrap();
        }
        if causal {
            let shape = &scores.shape()[2..];
            let hidden = kernels::full(shape, f64::NEG_INFINITY, DType::F64, Device::CPU).unwrap();
            let hidden = Var::new(kernels::triu(&hidden, 1).unwrap());
            scores = scores.add(&hidden).unwrap();
        }
        let y = scores.softmax(-1).unwrap().matmul(&v).unwrap().transpose(1, 2).unwrap();
        let shape = [y.shape()[0], y.shape()[1], 10];
        linear(&y.reshape_to(&shape).unwrap(), &format!("{name}.o"))
    };
    let mlp = |x: &Var, name: &str| {
        let gate = linear(x, &format!("{name}.wi_0")).gelu(kernels::Gelu::Tanh).unwrap();
        linear(&gate.mul(&linear(x, &format!("{name}.wi_1"))).unwrap(), &format!("{name}.wo"))
    };
    let table = weight("shared");
    let [mut x, mut y] = [&source, &target].map(|tokens| table.embedding(tokens, None).unwrap());
    let at = |side: &str, layer: usize, part: &str| format!("{side}.block.0.layer.{layer}.{part}");
    let n = norm(&x, &at("encoder", 0, "layer_norm"));
    let own = at("encoder", 0, "SelfAttention");
    x = x.add(&attend(&n, &n, &own, Some(bias(&own, 7, true)), false)).unwrap();
    x = x.add(&mlp(&norm(&x, &at("encoder", 1, "layer_norm")), &at("encoder", 1, "DenseReluDense"))).unwrap();
    let memory = norm(&x, "encoder.final_layer_norm");
    let n = norm(&y, &at("decoder", 0, "layer_norm"));
    let own = at("decoder", 0, "SelfAttention");
    y = y.add(&attend(&n, &n, &own, Some(bias(&own, 5, false)), true)).unwrap();
    let n = norm(&y, &at("decoder", 1, "layer_norm"));
    y = y.add(&attend(&n, &memory, &at("decoder", 1, "EncDecAttention"), None, false)).unwrap();
    y = y.add(&mlp(&norm(&y, &at("decoder", 2, "layer_norm")), &at("decoder", 2, "DenseReluDense"))).unwrap();
    let wanted = linear(&norm(&y, "decoder.final_layer_norm"), "lm_head");
    let got = model.logits(&model.forward(None, &source, &target).unwrap()).unwrap();
    let pairs = got.to_vec::<f64>().unwrap().into_iter().zip(wanted.to_vec::<f64>().unwrap());
    for (got, wanted) in pairs {
        assert!((got - wanted).abs() < 1e-10 * (1.0 + wanted.abs()), "{got} {wanted}");
    }
    let parameters: Vec<Var> = named.iter().map(|(_, p)| p.var()).collect();
    let of = |y: &Var| {
        let root = y.square().unwrap().sum_all().unwrap();
        let inputs: Vec<&Var> = parameters.iter().collect();
        let grads = grad(&[(root, None)], &inputs, Options::default()).unwrap();
        grads.into_iter().map(Option::unwrap).collect::<Vec<_>>()
    };
    for ((got, wanted), (name, _)) in of(&got).into_iter().zip(of(&wanted)).zip(&named) {
        let [got, wanted] = [got, wanted].map(|x| x.to_vec::<f64>().unwrap());
        let most = wanted.iter().fold(0.0, |most: f64, x| most.max(x.abs()));
        assert!(got.iter().zip(&wanted).all(|(a, b)| (a - b).abs() < 1e-9 * most), "{name}");
    }
}

#[test]
fn what_does_not_fit_is_named() {
    let refused = |shared_bias: bool, stages: usize, encoder_stages: usize| {
        config(shared_bias, 0.0).split(stages, encoder_stages).unwrap_err().to_string()
    };
    assert!(refused(false, 4, 0).contains("got 0 of 4 stages for the encoder"));
    assert!(refused(false, 4, 4).contains("got 4 of 4 stages for the encoder"));
    assert!(refused(true, 4, 2).contains("share relative positions"));
    let scope = Scope::new(1, DType::F32, Device::CPU);
    let odd = T5Config { buckets: 5, ..config(true, 0.0) };
    assert!(odd.init(&scope).map(drop).unwrap_err().to_string().contains("got 5 buckets"));
    let model = build(&config(true, 0.0));
    let [source, target, _] = batch(Device::CPU);
    let short = target.narrow(0, 0, 2).unwrap();
    let error = model.forward(None, &source, &short).unwrap_err().to_string();
    assert!(error.contains("got [3, 7] i64 and [2, 5] i64"), "{error}");
    let error = model.forward(Some(&source), &source, &target).unwrap_err().to_string();
    assert!(error.contains("input for the first stage"), "{error}");
}
