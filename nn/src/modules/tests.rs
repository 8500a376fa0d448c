//! What all layers promise: PyTorch's names and shapes, its initial values, modes, errors.

use phalanx_autograd::{
    BagMode, ContextMode, FoldOptions, Interpolate, InterpolateMode, Pool1dOptions, Pool3dOptions, Var,
};
use phalanx_kernels::{Conv1dOptions, ConvOptions, PoolOptions};
use phalanx_tensor::{Context, DType, Device};

use super::*;
use crate::{Module, Parameters, Scope, state_dict};

fn scope() -> Scope {
    Scope::new(7, DType::F64, Device::CPU)
}

fn wave(shape: &[usize]) -> Var {
    let count: usize = shape.iter().product();
    let values: Vec<f64> = (0..count).map(|i| (i as f64 * 0.731).sin() * 1.5 + 0.2).collect();
    Var::from_slice(&values, shape, Device::CPU).unwrap()
}

fn values(x: &Var) -> Vec<f64> {
    x.to_vec().unwrap()
}

fn close(a: &Var, b: &Var) {
    assert_eq!(a.shape(), b.shape());
    let off = values(a).iter().zip(values(b)).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
    assert!(off < 1e-12, "off by {off}");
}

/// The entries, such as `weight[3, 4]`.
fn entries(module: &impl Parameters) -> Vec<String> {
    state_dict(module).iter().map(|(name, tensor)| format!("{name}{:?}", tensor.shape())).collect()
}

#[test]
fn names_and_shapes_are_pytorchs() {
    let s = &scope();
    let check = |got: Vec<String>, want: &[&str]| assert_eq!(got, want);
    let grouped = ConvOptions { groups: 2, ..ConvOptions::default() };
    check(entries(&LinearConfig::new(3, 5).init(s).unwrap()), &["weight[5, 3]", "bias[5]"]);
    let conv = Conv2dConfig::new(4, 6, [3, 2]).with_options(grouped).init(s).unwrap();
    check(entries(&conv), &["weight[6, 2, 3, 2]", "bias[6]"]);
    let conv = Conv1dConfig::new(4, 6, 3).with_bias(false).init(s).unwrap();
    check(entries(&conv), &["weight[6, 4, 3]"]);
    let conv = Conv2dConfig::new(4, 6, [3, 3]).with_options(grouped).init_transposed(s).unwrap();
    check(entries(&conv), &["weight[4, 3, 3, 3]", "bias[6]"]);
    let conv = Conv1dConfig::new(4, 6, 3).with_output_padding(1).init_transposed(s).unwrap();
    check(entries(&conv), &["weight[4, 6, 3]", "bias[6]"]);
    let conv = Conv3dConfig::new(4, 6, [3, 2, 1]);
    check(entries(&conv.init(s).unwrap()), &["weight[6, 4, 3, 2, 1]", "bias[6]"]);
    check(entries(&conv.with_bias(false).init_transposed(s).unwrap()), &["weight[4, 6, 3, 2, 1]"]);
    let instance = InstanceNormConfig::new(3);
    assert!(entries(&instance.init_2d(s).unwrap()).is_empty());
    check(entries(&instance.with_affine(true).init_1d(s).unwrap()), &["weight[3]", "bias[3]"]);
    check(entries(&EmbeddingBagConfig::new(5, 2).init(s).unwrap()), &["weight[5, 2]"]);
    let norm = BatchNormConfig::new(3);
    let running = ["running_mean[3]", "running_var[3]", "num_batches_tracked[]"];
    let all = [&["weight[3]", "bias[3]"][..], &running].concat();
    check(entries(&norm.init_1d(s).unwrap()), &all);
    check(entries(&norm.with_affine(false).init_2d(s).unwrap()), &running);
    check(entries(&norm.with_tracking(false).init_2d(s).unwrap()), &["weight[3]", "bias[3]"]);
    check(entries(&GroupNormConfig::new(2, 4).init(s).unwrap()), &["weight[4]", "bias[4]"]);
    check(entries(&RmsNormConfig::new(&[2, 3]).init(s).unwrap()), &["weight[2, 3]"]);
    let attention =
        ["in_proj_weight[12, 4]", "in_proj_bias[12]", "out_proj.weight[4, 4]", "out_proj.bias[4]"];
    check(entries(&MultiheadAttentionConfig::new(4, 2).init(s).unwrap()), &attention);
    let gates = |n: usize| {
        [format!("weight_ih_l0[{n}, 3]"), format!("weight_hh_l0[{n}, 4]")]
            .into_iter()
            .chain([format!("bias_ih_l0[{n}]"), format!("bias_hh_l0[{n}]")])
            .collect::<Vec<_>>()
    };
    assert_eq!(entries(&RecurrentConfig::new(3, 4).init_lstm(s).unwrap()), gates(16));
    assert_eq!(entries(&RecurrentConfig::new(3, 4).init_gru(s).unwrap()), gates(12));
    let config = TransformerEncoderLayerConfig { inner: 6, ..TransformerEncoderLayerConfig::new(4, 2) };
    let names: Vec<String> = state_dict(&config.init(s).unwrap()).into_iter().map(|(name, _)| name).collect();
    let parts = ["self_attn.in_proj_weight", "self_attn.in_proj_bias"].map(String::from).into_iter();
    let maps = ["self_attn.out_proj", "linear1", "linear2", "norm1", "norm2"];
    let maps = maps.iter().flat_map(|map| [format!("{map}.weight"), format!("{map}.bias")]);
    assert_eq!(names, parts.chain(maps).collect::<Vec<_>>());
}

#[test]
fn initial_values_lie_within_pytorchs_bounds_and_depend_on_the_seed_alone() {
    let make =
        |seed| Conv2dConfig::new(4, 64, [3, 3]).init(&Scope::new(seed, DType::F64, Device::CPU)).unwrap();
    let (one, again, other) = (make(1), make(1), make(2));
    let weights = |conv: &Conv2d| values(&conv.weight.var());
    assert_eq!(weights(&one), weights(&again));
    assert_ne!(weights(&one), weights(&other));
    let largest = weights(&one).into_iter().map(f64::abs).fold(0.0, f64::max);
    assert!((0.99 / 6.0..=1.0 / 6.0).contains(&largest), "{largest}");
    let attention = MultiheadAttentionConfig::new(16, 2).init(&scope()).unwrap();
    let largest = values(&attention.in_proj_weight.var()).into_iter().map(f64::abs).fold(0.0, f64::max);
    let bound = (6.0f64 / 64.0).sqrt();
    assert!((0.97 * bound..=bound).contains(&largest), "{largest}");
}

#[test]
fn batch_norm_uses_the_batch_in_training_and_running_statistics_otherwise() {
    let norm = BatchNormConfig::new(2).with_momentum(Some(0.5)).init_1d(&scope()).unwrap();
    let x = Var::from_slice(&[1.0, 10.0, 3.0, 30.0], &[2, 2], Device::CPU).unwrap();
    let y = values(&norm.forward(&x).unwrap());
    let near = |y: &[f64], want: [f64; 4]| {
        // Beside the epsilon of 1e-5 under the root of a variance of 1 or more.
        assert!(y.len() == 4 && y.iter().zip(want).all(|(a, b)| (a - b).abs() < 1e-5), "{y:?}");
    };
    near(&y, [-1.0, -1.0, 1.0, 1.0]);
    let running = || {
        let state = state_dict(&norm);
        let get = |i: usize| phalanx_kernels::cast(&state[i].1, DType::F64).unwrap().to_vec::<f64>().unwrap();
        [get(2), get(3), get(4)]
    };
    let once = [vec![1.0, 10.0], vec![1.5, 100.5], vec![1.0]];
    assert_eq!(running(), once);
    {
        let _repeated = Context::with(|c| c.set_recomputing(true));
        norm.forward(&x).unwrap();
        assert_eq!(running(), once, "a recomputation is no further batch");
    }
    let _eval = Context::with(|c| c.set_train(false));
    let y = values(&norm.forward(&x).unwrap());
    let want = [0.0, 0.0, 2.0 / 1.5f64.sqrt(), 20.0 / 100.5f64.sqrt()];
    near(&y, want);
    assert_eq!(running(), once);
}

#[test]
fn batch_norm_without_running_statistics_uses_the_batch_always() {
    let norm = BatchNormConfig::new(3).with_tracking(false).init_2d(&scope()).unwrap();
    let x = wave(&[2, 3, 4, 2]);
    let trained = norm.forward(&x).unwrap();
    let _eval = Context::with(|c| c.set_train(false));
    close(&norm.forward(&x).unwrap(), &trained);
}

#[test]
fn recurrent_layers_continue_from_the_states_they_returned() {
    let x = wave(&[2, 5, 3]);
    let (head, tail) = (x.narrow(1, 0, 2).unwrap(), x.narrow(1, 2, 3).unwrap());
    let lstm = RecurrentConfig::new(3, 4).with_layers(2).init_lstm(&scope()).unwrap();
    let whole = lstm.forward(&x, None, None).unwrap();
    let first = lstm.forward(&head, None, None).unwrap();
    let second = lstm.forward(&tail, Some(&first.hidden), Some(&first.cell)).unwrap();
    close(&Var::cat(&[first.output, second.output], 1).unwrap(), &whole.output);
    close(&second.cell, &whole.cell);
    let gru = RecurrentConfig::new(3, 4).init_gru(&scope()).unwrap();
    let (whole, last) = gru.forward(&x, None).unwrap();
    let (first, state) = gru.forward(&head, None).unwrap();
    let (second, state) = gru.forward(&tail, Some(&state)).unwrap();
    close(&Var::cat(&[first, second], 1).unwrap(), &whole);
    close(&state, &last);
    close(&whole.select(1, 4).unwrap(), &last.select(0, 0).unwrap());
}

#[test]
fn hidden_keys_are_as_if_absent_and_one_input_thrice_as_three_alike() {
    let attention = MultiheadAttentionConfig::new(4, 2).init(&scope()).unwrap();
    let (q, k) = (wave(&[1, 3, 4]), wave(&[1, 5, 4]));
    let hidden = Var::from_slice(&[false, false, false, true, true], &[1, 5], Device::CPU).unwrap();
    let masked = attention.forward(&q, &k, &k, AttentionMasks { keys: Some(&hidden), mask: None }).unwrap();
    let short = k.narrow(1, 0, 3).unwrap();
    close(&masked, &attention.forward(&q, &short, &short, AttentionMasks::default()).unwrap());
    let apart = attention.forward(&q, &q.clone(), &q.clone(), AttentionMasks::default()).unwrap();
    assert_eq!(values(&attention.forward(&q, &q, &q, AttentionMasks::default()).unwrap()), values(&apart));
    let (y, p) = attention.forward_with_weights(&q, &q, &q, AttentionMasks::default()).unwrap();
    close(&y, &apart);
    assert_eq!(p.shape(), [1, 2, 3, 3]);
}

#[test]
fn pooling_modules_cover_the_image() {
    let x = wave(&[1, 2, 4, 6]);
    let windows = PoolOptions::new([2, 3]);
    assert_eq!(MaxPool2d(windows).forward(&x).unwrap().shape(), [1, 2, 2, 2]);
    let mean = AvgPool2d { options: windows, count_include_pad: true }.forward(&x).unwrap();
    close(&AdaptiveAvgPool2d([2, 2]).forward(&x).unwrap(), &mean);
}

#[test]
fn layers_of_sequences_and_volumes_give_the_shapes_that_they_say() {
    let s = &scope();
    let shape = |module: &dyn Module, x: &Var| module.forward(x).unwrap().shape().to_vec();
    let (signal, volume) = (wave(&[2, 4, 7]), wave(&[2, 4, 5, 4, 6]));
    let stretched = Conv1dOptions { stride: 2, ..Conv1dOptions::default() };
    let conv = Conv1dConfig::new(4, 3, 3).with_options(stretched).with_output_padding(1);
    assert_eq!(shape(&conv.init_transposed(s).unwrap(), &signal), [2, 3, 16]);
    let conv = Conv3dConfig::new(4, 3, [3, 2, 1]);
    assert_eq!(shape(&conv.init(s).unwrap(), &volume), [2, 3, 3, 3, 6]);
    assert_eq!(shape(&conv.init_transposed(s).unwrap(), &volume), [2, 3, 7, 5, 6]);
    let options = Pool1dOptions::new(2);
    assert_eq!(shape(&MaxPool1d(options), &signal), [2, 4, 3]);
    assert_eq!(shape(&AvgPool1d { options, count_include_pad: true }, &signal), [2, 4, 3]);
    assert_eq!(shape(&AdaptiveAvgPool1d(5), &signal), [2, 4, 5]);
    let options = Pool3dOptions::new([2, 2, 3]);
    assert_eq!(shape(&MaxPool3d(options), &volume), [2, 4, 2, 2, 2]);
    assert_eq!(shape(&AvgPool3d { options, count_include_pad: false }, &volume), [2, 4, 2, 2, 2]);
    let image = wave(&[2, 4, 5, 6]);
    assert_eq!(shape(&AdaptiveMaxPool2d([3, 1]), &image), [2, 4, 3, 1]);
    assert_eq!(shape(&PixelShuffle { factor: 2 }, &image), [2, 1, 10, 12]);
    assert_eq!(shape(&PixelUnshuffle { factor: 1 }, &image), [2, 4, 5, 6]);
    let options = Interpolate::by_scale(&[2.0], InterpolateMode::Bilinear);
    assert_eq!(shape(&Upsample { options }, &image), [2, 4, 10, 12]);
    let options = FoldOptions::new([2, 3]);
    let columns = Unfold { options }.forward(&image).unwrap();
    assert_eq!(columns.shape(), [2, 24, 16]);
    assert_eq!(shape(&Fold { size: [5, 6], options }, &columns), [2, 4, 5, 6]);
    let margins = vec![(1, 2), (0, 3)];
    for pad in [
        &ZeroPad { margins: margins.clone() } as &dyn Module,
        &ConstantPad { margins: margins.clone(), value: 2.0 },
        &ReflectionPad { margins: margins.clone() },
        &ReplicationPad { margins: margins.clone() },
        &CircularPad { margins },
    ] {
        assert_eq!(shape(pad, &image), [2, 4, 8, 9]);
    }
    assert_eq!(shape(&LocalResponseNorm { size: 3, alpha: 1e-4, beta: 0.75, k: 1.0 }, &image), [2, 4, 5, 6]);
    assert_eq!(shape(&BatchNormConfig::new(4).init_3d(s).unwrap(), &volume), volume.shape());
    let bag = EmbeddingBagConfig::new(5, 2).with_mode(BagMode::Sum).init(s).unwrap();
    let indices = Var::from_slice(&[0i64, 4, 4, 1], &[2, 2], Device::CPU).unwrap();
    let starts = Var::from_slice(&[0i64, 2], &[2], Device::CPU).unwrap();
    close(
        &bag.forward(&indices).unwrap(),
        &bag.forward_from(&indices.reshape(&[-1]).unwrap(), &starts).unwrap(),
    );
}

#[test]
fn instance_norm_takes_one_item_or_many_of_its_own_rank_only() {
    let norm = InstanceNormConfig::new(3).with_affine(true).init_1d(&scope()).unwrap();
    let x = wave(&[2, 3, 5]);
    let y = norm.forward(&x).unwrap();
    close(&norm.forward(&x.select(0, 1).unwrap()).unwrap(), &y.select(0, 1).unwrap());
    close(&y.mean(&[2], false).unwrap(), &Var::from_slice(&[0.0; 6], &[2, 3], Device::CPU).unwrap());
    for shape in [&[2, 3, 5, 1][..], &[5], &[2, 4, 5], &[4, 5]] {
        assert!(norm.forward(&wave(shape)).unwrap_err().to_string().starts_with("InstanceNorm: got"));
    }
}

#[test]
fn errors_say_what_came_and_what_was_wanted() {
    let s = &scope();
    let grouped = ConvOptions { groups: 2, ..ConvOptions::default() };
    let said = |error: crate::Error, parts: &[&str]| {
        let text = error.to_string();
        assert!(parts.iter().all(|part| text.contains(part)), "{text:?} lacks one of {parts:?}");
    };
    said(
        Conv2dConfig::new(3, 4, [3, 3]).with_options(grouped).init(s).err().unwrap(),
        &["Conv2d", "2 groups", "3"],
    );
    said(GroupNormConfig::new(2, 3).init(s).err().unwrap(), &["GroupNorm", "2 groups", "3"]);
    said(MultiheadAttentionConfig::new(5, 2).init(s).err().unwrap(), &["MultiheadAttention", "2", "5"]);
    let attention = MultiheadAttentionConfig::new(4, 2).init(s).unwrap();
    let x = wave(&[3, 4]);
    said(attention.forward(&x, &x, &x, AttentionMasks::default()).err().unwrap(), &["[3, 4]", "[B, T, 4]"]);
    let lstm = RecurrentConfig::new(3, 4).init_lstm(s).unwrap();
    said(lstm.forward(&x, None, None).err().unwrap(), &["[3, 4]", "[B, T, 3]"]);
    let (x, state) = (wave(&[2, 5, 3]), wave(&[1, 3, 4]));
    said(lstm.forward(&x, Some(&state), Some(&state)).err().unwrap(), &["[1, 3, 4]", "[1, 2, 4]"]);
    said(lstm.forward(&x, Some(&state), None).err().unwrap(), &["Lstm", "hidden", "without a cell"]);
    let norm = BatchNormConfig::new(3);
    said(norm.init_2d(s).unwrap().forward(&x).err().unwrap(), &["BatchNorm", "[2, 5, 3]", "4"]);
    let x = wave(&[2, 4]);
    said(norm.init_1d(s).unwrap().forward(&x).err().unwrap(), &["batch_norm", "[4]", "[3]"]);
}

#[test]
fn sizes_that_make_no_heads_or_cannot_be_counted_are_refused() {
    let gqa = GroupedQueryAttentionConfig::new;
    for (width, heads, key_heads) in [(8, 4, 3), (8, 0, 1), (8, 4, 0)] {
        let refused = gqa(width, heads, key_heads).init(&scope()).err().unwrap().to_string();
        assert!(refused.contains("GroupedQueryAttention: got "), "{refused}");
    }
    let wide = GroupedQueryAttentionConfig { head_dim: usize::MAX, ..gqa(8, 2, 1) };
    let refused = wide.init(&scope()).err().unwrap().to_string();
    assert!(refused.contains("got 2 heads of 18446744073709551615 features"), "{refused}");
    let attention = gqa(8, 2, 1).init(&scope()).unwrap();
    for shape in [&[8][..], &[3, 8], &[1, 2, 3, 8]] {
        let message = attention.forward(&wave(shape)).unwrap_err().to_string();
        assert!(message.contains("[B, T, features]"), "{message}");
    }
    for (width, heads) in [(0, 1), (usize::MAX, 1), (4, 0)] {
        let message = MultiheadAttentionConfig::new(width, heads).init(&scope()).err().unwrap().to_string();
        assert!(message.contains("MultiheadAttention"), "{message}");
    }
    let refused = RecurrentConfig::new(1, 1 << 62).init_lstm(&scope()).err().unwrap().to_string();
    assert!(refused.contains("got 4611686018427387904 hidden features"), "{refused}");
}

#[test]
fn activations_are_the_operations_of_their_names_with_pytorchs_defaults() {
    let x = wave(&[3, 4]);
    let same = |module: &dyn Module, want: phalanx_autograd::Result<Var>| {
        close(&module.forward(&x).unwrap(), &want.unwrap());
    };
    same(&Hardtanh::default(), x.hardtanh(-1.0, 1.0));
    same(&Relu6, x.relu6());
    same(&Hardsigmoid, x.hardsigmoid());
    same(&Hardswish, x.hardswish());
    same(&Mish, x.mish());
    same(&Selu, x.selu());
    same(&Celu { alpha: 0.5 }, x.celu(0.5));
    same(&LogSigmoid, x.logsigmoid());
    same(&Softsign, x.softsign());
    same(&Tanhshrink, x.tanhshrink());
    same(&Glu::default(), x.glu(-1));
    let one = PreluConfig::default().init(&scope()).unwrap();
    assert_eq!(entries(&one), ["weight[1]"]);
    same(&one, x.leaky_relu(0.25));
    let each = PreluConfig::new(4).with_initial(0.5).init(&scope()).unwrap();
    same(&each, x.leaky_relu(0.5));
    let refused = PreluConfig::new(3).init(&scope()).unwrap().forward(&x).err().unwrap().to_string();
    assert!(refused.contains("prelu: got a weight of shape [3] for [3, 4]"), "{refused}");
}

#[test]
fn an_encoder_layer_has_dropouts_of_its_own_for_probabilities_and_between_its_layers() {
    let plain = TransformerEncoderLayerConfig { dropout: 0.0, ..TransformerEncoderLayerConfig::new(4, 2) };
    let x = wave(&[2, 5, 4]);
    let run =
        |config: TransformerEncoderLayerConfig| values(&config.init(&scope()).unwrap().forward(&x).unwrap());
    let without = run(plain);
    for config in [
        TransformerEncoderLayerConfig { attention_dropout: Some(0.5), ..plain },
        TransformerEncoderLayerConfig { inner_dropout: Some(0.5), ..plain },
    ] {
        assert_ne!(run(config), without);
    }
    // An absent one is as `dropout`.
    let all = TransformerEncoderLayerConfig { dropout: 0.5, ..plain };
    for config in [
        TransformerEncoderLayerConfig { attention_dropout: Some(0.0), ..all },
        TransformerEncoderLayerConfig { inner_dropout: Some(0.0), ..all },
    ] {
        assert_ne!(run(config), run(all));
    }
}
