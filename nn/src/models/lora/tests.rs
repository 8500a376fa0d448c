//! Adapters against their formulas, their files, and what they do to a model's weights.

use std::path::PathBuf;

use phalanx_autograd::{ContextMode, GradCheck, Result as GradResult, gradcheck};
use phalanx_kernels as kernels;
use phalanx_tensor::io::SafeTensors;
use phalanx_tensor::{Context, DType, Device, RngKey};

use super::*;
use crate::models::{
    DecoderStage, GptConfig, LlamaConfig, ModelConfig, RecomputeMode, load_weights, next_token_targets,
    save_model,
};

const INPUTS: usize = 5;
const OUTPUTS: usize = 4;
const ROWS: usize = 3;

fn values(count: usize, from: f64) -> Vec<f64> {
    (0..count).map(|i| (from + 0.7 * i as f64).sin()).collect()
}

pub(super) fn tensor(shape: &[usize], from: f64) -> Tensor {
    Tensor::from_slice(&values(shape.iter().product(), from), shape, Device::CPU).unwrap()
}

/// A layer `q` with a bias and an adapter that adds something, in f64.
fn layer(config: &LoraConfig) -> Adapted<OneDevice, Linear, Linear, Linear> {
    let lora = Lora::new(OneDevice, config.clone()).unwrap();
    let scope = Scope::new(1, DType::F64, Device::CPU).child("q");
    let (outputs, init) = ([OUTPUTS], Init::layer(INPUTS));
    let spec = LinearSpec { inputs: INPUTS, outputs: &outputs, bias: true, init, whole: false };
    let layer = lora.column(&scope, spec).unwrap();
    layer.bias().unwrap().load(&tensor(&[OUTPUTS], 0.4)).unwrap();
    lora.built(&layer.parameters()).unwrap();
    layer.adapter.as_ref().unwrap().lora_b.weight().load(&tensor(&[OUTPUTS, config.rank], 0.2)).unwrap();
    layer
}

fn dora(rank: usize) -> LoraConfig {
    LoraConfig { dora: true, ..LoraConfig::new(rank, &["q"]) }
}

fn matrix(parameter: &Parameter) -> Vec<Vec<f64>> {
    let tensor = parameter.tensor();
    let columns = tensor.shape()[1];
    tensor.to_vec::<f64>().unwrap().chunks(columns).map(<[f64]>::to_vec).collect()
}

fn close(what: &str, got: &[f64], wanted: &[f64]) {
    assert_eq!(got.len(), wanted.len(), "{what}");
    let is_close = |(a, b): (&f64, &f64)| (a - b).abs() <= 1e-13 * (1.0 + b.abs());
    assert!(got.iter().zip(wanted).all(is_close), "{what}: got {got:?}, wanted {wanted:?}");
}

#[test]
fn dora_is_its_formula_with_constant_norms_in_backward() {
    let config = dora(2);
    let layer = layer(&config);
    let adapter = layer.adapter.as_ref().unwrap();
    let magnitude = adapter.magnitude.as_ref().unwrap();
    magnitude.load(&tensor(&[OUTPUTS], 1.1)).unwrap();
    let (x, dy) = (values(ROWS * INPUTS, 0.9), values(ROWS * OUTPUTS, 0.3));
    let input = Var::leaf(Tensor::from_slice(&x, &[ROWS, INPUTS], Device::CPU).unwrap()).unwrap();
    let y = layer.forward(&input).unwrap();
    let weighted = y.mul(&Var::from_slice(&dy, &[ROWS, OUTPUTS], Device::CPU).unwrap()).unwrap();
    weighted.sum_all().unwrap().backward().unwrap();

    // The slow twin.
    let (w, a, b) =
        (matrix(layer.weight()), matrix(adapter.lora_a.weight()), matrix(adapter.lora_b.weight()));
    let (bias, m) = (values(OUTPUTS, 0.4), values(OUTPUTS, 1.1));
    let scale = config.scale();
    let v: Vec<Vec<f64>> = (0..OUTPUTS)
        .map(|o| (0..INPUTS).map(|i| w[o][i] + scale * (b[o][0] * a[0][i] + b[o][1] * a[1][i])).collect())
        .collect();
    let n: Vec<f64> = v.iter().map(|row| row.iter().map(|v| v * v).sum::<f64>().sqrt()).collect();
    let (mut wanted, mut dm, mut dx) = (vec![0.0; ROWS * OUTPUTS], vec![0.0; OUTPUTS], vec![0.0; x.len()]);
    let (mut da, mut db) = (vec![0.0; 2 * INPUTS], vec![0.0; OUTPUTS * 2]);
    for (t, o) in (0..ROWS).flat_map(|t| (0..OUTPUTS).map(move |o| (t, o))) {
        let x = &x[t * INPUTS..][..INPUTS];
        let product: f64 = v[o].iter().zip(x).map(|(v, x)| v * x).sum();
        let (dy, factor) = (dy[t * OUTPUTS + o], m[o] / n[o]);
        wanted[t * OUTPUTS + o] = factor * product + bias[o];
        dm[o] += dy * product / n[o];
        for i in 0..INPUTS {
            dx[t * INPUTS + i] += dy * factor * v[o][i];
            for r in 0..2 {
                da[r * INPUTS + i] += dy * factor * scale * b[o][r] * x[i];
                db[o * 2 + r] += dy * factor * scale * a[r][i] * x[i];
            }
        }
    }
    let grad = |p: &Parameter| p.grad().unwrap().unwrap().to_vec::<f64>().unwrap();
    close("y", &y.to_vec::<f64>().unwrap(), &wanted);
    close("dx", &input.as_leaf().unwrap().grad().unwrap().to_vec::<f64>().unwrap(), &dx);
    close("dA", &grad(adapter.lora_a.weight()), &da);
    close("dB", &grad(adapter.lora_b.weight()), &db);
    close("dm", &grad(magnitude), &dm);
    assert!(layer.weight().grad().unwrap().is_none() && layer.bias().unwrap().grad().unwrap().is_none());
    let merged = config.merge(
        &layer.weight().tensor(),
        &adapter.lora_a.weight().tensor(),
        &adapter.lora_b.weight().tensor(),
        Some(&magnitude.tensor()),
    );
    let of_rows: Vec<f64> =
        (0..OUTPUTS).flat_map(|o| v[o].iter().map(|v| m[o] / n[o] * v).collect::<Vec<_>>()).collect();
    close("merged", &merged.unwrap().to_vec::<f64>().unwrap(), &of_rows);
}

/// Of `x` and `m`, on which the norms do not depend.
#[test]
fn doras_derivatives_are_differences() {
    let layer = layer(&dora(2));
    let magnitude = layer.adapter.as_ref().unwrap().magnitude.clone().unwrap();
    let weighted = |y: Var| y.mul(&Var::new(tensor(&[ROWS, OUTPUTS], 0.3))).and_then(|y| y.sum_all());
    let forward = |x: &Var| -> GradResult<Var> { weighted(layer.forward(x).unwrap()) };
    gradcheck(|v| forward(&v[0]), &[tensor(&[ROWS, INPUTS], 0.9)], GradCheck::default()).unwrap();
    let (x, step) = (Var::new(tensor(&[ROWS, INPUTS], 0.9)), 1e-6);
    forward(&x).unwrap().backward().unwrap();
    let found = magnitude.grad().unwrap().unwrap().to_vec::<f64>().unwrap();
    for (row, found) in found.into_iter().enumerate() {
        let at = |by: f64| {
            let mut shifted = values(OUTPUTS, 1.1);
            shifted[row] += by;
            magnitude.load(&Tensor::from_slice(&shifted, &[OUTPUTS], Device::CPU).unwrap()).unwrap();
            forward(&x).unwrap().item::<f64>().unwrap()
        };
        let wanted = (at(step) - at(-step)) / (2.0 * step);
        assert!((found - wanted).abs() < 1e-8, "{found} {wanted}");
    }
}

/// PEFT drops what goes into both parts of what DoRA adds, and leaves the layer's own output alone.
#[test]
fn dropout_goes_into_all_that_dora_adds() {
    let config = LoraConfig { dropout: 0.5, ..dora(2) };
    let layer = layer(&config);
    let adapter = layer.adapter.as_ref().unwrap();
    let magnitude = adapter.magnitude.as_ref().unwrap();
    magnitude.load(&tensor(&[OUTPUTS], 1.1)).unwrap();
    let same = Dropout::new(0.5, &Scope::new(1, DType::F64, Device::CPU).child("q").child("lora_dropout"));
    let x = Var::new(tensor(&[ROWS, INPUTS], 0.9));
    let _training = Context::with(|c| {
        c.set_train(true);
        c.rng = RngKey { seed: 3, step: 1 };
    });
    let y = layer.forward(&x).unwrap();
    let dropped = same.unwrap().forward(&x).unwrap();
    assert!(dropped.to_vec::<f64>().unwrap().contains(&0.0));
    let factors = layer.factors(adapter, magnitude).unwrap();
    let plain = |x: &Var| x.linear(&layer.weight().var(), None).unwrap();
    let more = adapter.lora_b.forward(&adapter.lora_a.forward(&dropped).unwrap()).unwrap();
    let more = more.mul_scalar(config.scale()).unwrap().mul(&factors).unwrap();
    let changed = plain(&dropped).mul(&factors.add_scalar(-1.0).unwrap()).unwrap();
    let own = plain(&x).add(&layer.bias().unwrap().var()).unwrap();
    let wanted = own.add(&changed).unwrap().add(&more).unwrap();
    close("y", &y.to_vec::<f64>().unwrap(), &wanted.to_vec::<f64>().unwrap());
}

pub(super) fn folder(name: &str) -> PathBuf {
    let folder = std::env::temp_dir().join(format!("phalanx-adapters-{name}-{}", std::process::id()));
    let _ = std::fs::remove_dir_all(&folder);
    folder
}

pub(super) fn tokens() -> Var {
    let tokens: Vec<i64> = (0..2 * 8).map(|i| i * 7919 % 37).collect();
    Var::from_slice(&tokens, &[2, 8], Device::CPU).unwrap()
}

/// A GPT, whose linear layers have biases and whose joint ones have sections, and a Llama, with an adapter of its head.
fn models() -> [(ModelConfig, Vec<&'static str>); 2] {
    [
        (ModelConfig::Gpt(GptConfig::new(37, 12, 2, 2, 16)), vec!["c_attn", "mlp.c_proj"]),
        (ModelConfig::Llama(LlamaConfig::new(37, 12, 2, 2, 16)), vec!["q_proj", "down_proj", "lm_head"]),
    ]
}

#[test]
fn a_model_with_new_magnitudes_is_the_model_that_was_loaded() {
    for (config, targets) in models() {
        for dtype in [DType::F32, DType::BF16] {
            let folder = folder("same");
            let made = |seed| Scope::new(seed, dtype, Device::CPU);
            let base = config.init(&made(1)).unwrap();
            save_model(&base, &config, &folder).unwrap();
            let lora = LoraConfig { dora: true, ..LoraConfig::new(2, &targets) };
            for scope in [made(2), made(2).deferred()] {
                let stage = DecoderStage::whole(config.layers());
                let model = config.init_stage(&lora.layers().unwrap(), &scope, stage).unwrap();
                load_weights(&model, &config, &folder).unwrap();
                model.parameters().iter().try_for_each(Parameter::materialize).unwrap();
                let [wanted, got] =
                    [base.forward(&tokens()), model.forward(&tokens())].map(|y| y.unwrap().into_tensor());
                assert!(wanted.to_bytes().unwrap() == got.to_bytes().unwrap(), "{dtype}");
                for magnitude in adapters(&model).iter().filter(|p| p.name().ends_with(MAGNITUDE)) {
                    assert_eq!((magnitude.dtype(), magnitude.is_matrix()), (DType::F32, false));
                }
            }
            std::fs::remove_dir_all(&folder).unwrap();
        }
    }
}

#[test]
fn magnitudes_are_in_pefts_files_and_in_merged_weights() {
    for (config, targets) in models() {
        let folder = folder("peft");
        let lora = LoraConfig { dora: true, ..LoraConfig::new(2, &targets) };
        let build = |seed| {
            let scope = Scope::new(seed, DType::F64, Device::CPU);
            let stage = DecoderStage::whole(config.layers());
            config.init_stage(&lora.layers().unwrap(), &scope, stage).unwrap()
        };
        let model = build(1);
        for (i, adapter) in adapters(&model).iter().enumerate() {
            adapter.load(&tensor(adapter.tensor().shape(), i as f64)).unwrap();
        }
        save_adapter(&model, &config, &lora, &folder).unwrap();
        assert_eq!(LoraConfig::read(&folder).unwrap(), lora);
        let file = SafeTensors::open(folder.join("adapter_model.safetensors")).unwrap();
        let magnitudes: Vec<&str> = file.names().filter(|name| name.ends_with(MAGNITUDE)).collect();
        assert_eq!(magnitudes.len(), 2 * 2 + usize::from(targets.contains(&"lm_head")));
        assert!(magnitudes.iter().all(|name| file.shape(name).unwrap().len() == 1), "{magnitudes:?}");
        let again = build(1);
        load_adapter(&again, &config, &folder).unwrap();
        for (a, b) in adapters(&model).iter().zip(adapters(&again)) {
            assert!(a.tensor().to_bytes().unwrap() == b.tensor().to_bytes().unwrap(), "{}", a.name());
        }
        let plain = config.init(&Scope::new(3, DType::F64, Device::CPU)).unwrap();
        for ((name, tensor), parameter) in merged(&model, &lora).unwrap().iter().zip(plain.parameters()) {
            assert_eq!(name, parameter.name());
            parameter.load(tensor).unwrap();
        }
        let wanted = model.logits(&model.forward(&tokens()).unwrap()).unwrap().to_vec::<f64>().unwrap();
        let got = plain.logits(&plain.forward(&tokens()).unwrap()).unwrap().to_vec::<f64>().unwrap();
        assert!(wanted.iter().zip(&got).all(|(a, b)| (a - b).abs() < 1e-12));
        // Weights in panels: the same bits, in products and in files.
        crate::pack_weights(&model.parameters()).unwrap();
        assert!(model.parameters().iter().any(Parameter::is_packed));
        let packed = model.logits(&model.forward(&tokens()).unwrap()).unwrap().to_vec::<f64>().unwrap();
        assert_eq!(packed, wanted);
        for ((name, tensor), parameter) in merged(&model, &lora).unwrap().iter().zip(plain.parameters()) {
            assert!(tensor.to_bytes().unwrap() == parameter.values().unwrap().to_bytes().unwrap(), "{name}");
        }
        save_adapter(&model, &config, &lora, &folder).unwrap();
        load_adapter(&again, &config, &folder).unwrap();
        for (a, b) in adapters(&model).iter().zip(adapters(&again)) {
            assert!(
                a.values().unwrap().to_bytes().unwrap() == b.tensor().to_bytes().unwrap(),
                "{}",
                a.name()
            );
        }
        // Without DoRA the file has tensors that the model does not know.
        let without = LoraConfig { dora: false, ..lora.clone() };
        let stage = DecoderStage::whole(config.layers());
        let scope = Scope::new(1, DType::F64, Device::CPU);
        let model = config.init_stage(&without.layers().unwrap(), &scope, stage).unwrap();
        let said = load_adapter(&model, &config, &folder).unwrap_err().to_string();
        assert!(said.contains("unexpected") && said.contains(MAGNITUDE), "{said}");
        std::fs::remove_dir_all(&folder).unwrap();
    }
}

#[test]
fn merging_wants_a_magnitude_with_dora_alone() {
    let [w, a, b] = [[2, 3], [1, 3], [2, 1]].map(|shape| tensor(&shape, 0.5));
    let said = dora(1).merge(&w, &a, &b, None).unwrap_err().to_string();
    assert!(said.contains("got no magnitude with DoRA"), "{said}");
    let said =
        LoraConfig::new(1, &["q"]).merge(&w, &a, &b, Some(&tensor(&[2], 1.0))).unwrap_err().to_string();
    assert!(said.contains("got a magnitude without DoRA"), "{said}");
}

/// A row of zeros has no direction.
#[test]
fn rows_of_zeros_add_nothing() {
    let layer = layer(&dora(1));
    let adapter = layer.adapter.as_ref().unwrap();
    [layer.weight(), adapter.lora_b.weight()]
        .iter()
        .for_each(|p| kernels::fill_(&mut p.tensor(), 0.0).unwrap());
    let a = adapter.lora_a.weight();
    magnitude::reset(&OneDevice, &layer.parameters(), |_| Ok(Some((a.clone(), 2.0)))).unwrap();
    let y = layer.forward(&Var::new(tensor(&[1, INPUTS], 0.9))).unwrap();
    close("y", &y.to_vec::<f64>().unwrap(), &values(OUTPUTS, 0.4));
}

#[test]
fn settings_are_read_as_they_are_written() {
    for text in [
        "r=8,alpha=16,targets=q_proj,v_proj",
        "r=2,alpha=1,dropout=0.1,rslora=true,dora=true,base=int8,bias=lora_only,targets=q",
    ] {
        assert_eq!(text.parse::<LoraConfig>().unwrap().to_string(), text);
    }
    for wrong in ["dora=yes", "base=int4"] {
        let said = format!("r=2,{wrong},targets=q").parse::<LoraConfig>().unwrap_err().to_string();
        assert!(said.contains(wrong) && said.contains("base=int8"), "{said}");
    }
}

fn int8(targets: &[&str]) -> LoraConfig {
    LoraConfig { base: BaseWeights::Int8, ..LoraConfig::new(2, targets) }
}

/// A model's loss, and the gradients of its adapters.
pub(super) fn step<L: LayerFactory>(model: &Decoder<L>) -> (Vec<u8>, Vec<Vec<u8>>) {
    let (targets, counted) = next_token_targets(tokens().tensor()).unwrap();
    let x = model.forward(&tokens()).unwrap();
    let loss = model.loss(&x, &Var::new(targets), 1.0 / counted as f64).unwrap();
    loss.backward().unwrap();
    let grads = adapters(model).iter().map(|p| p.grad().unwrap().unwrap().to_bytes().unwrap()).collect();
    (loss.tensor().to_bytes().unwrap(), grads)
}

/// The slow twin has the floats of the blocks. Of DoRA too, whose lengths are those of the floats.
#[test]
fn weights_in_int8_train_adapters_as_their_floats_do() {
    for (config, targets) in models() {
        for (dtype, dora) in
            [(DType::F32, false), (DType::F32, true), (DType::BF16, false), (DType::F64, true)]
        {
            let folder = folder("int8");
            let scope = |seed| Scope::new(seed, dtype, Device::CPU);
            save_model(&config.init(&scope(1)).unwrap(), &config, &folder).unwrap();
            let build = |lora: &LoraConfig| {
                let stage = DecoderStage::whole(config.layers());
                let model = config.init_stage(&lora.layers().unwrap(), &scope(2), stage).unwrap();
                load_weights(&model, &config, &folder).unwrap();
                for (i, b) in adapters(&model).iter().filter(|p| p.name().contains("lora_B")).enumerate() {
                    b.load(&tensor(b.tensor().shape(), i as f64)).unwrap();
                }
                model
            };
            let lora = LoraConfig { dora, ..int8(&targets) };
            let held = build(&lora);
            let floats = build(&LoraConfig { base: BaseWeights::Float, ..lora.clone() });
            let mut in_int8 = 0;
            for (parameter, float) in held.parameters().iter().zip(floats.parameters()) {
                let name = parameter.name();
                let is_linear = float.is_matrix() && name.contains('.') && !is_adapter(name);
                let is_linear =
                    is_linear && !["wte", "wpe", "embed", "lm_head"].iter().any(|n| name.contains(n));
                assert_eq!(parameter.is_in_int8(), is_linear, "{name}");
                if is_linear {
                    in_int8 += 1;
                    assert!(parameter.tensor().to_bytes().unwrap_err().to_string().contains("8-bit blocks"));
                    assert!(
                        parameter.values().unwrap().to_bytes().unwrap() != float.tensor().to_bytes().unwrap()
                    );
                    float.load(&parameter.values().unwrap()).unwrap();
                }
            }
            assert!(in_int8 >= 8, "{in_int8}");
            reset_magnitudes(&floats).unwrap();
            reset_magnitudes(&held).unwrap();
            let in_floats = LoraConfig { base: BaseWeights::Float, ..lora.clone() };
            let merged_of = |model: &Decoder<Lora>, lora: &LoraConfig| -> Vec<Vec<u8>> {
                merged(model, lora).unwrap().iter().map(|(_, t)| t.to_bytes().unwrap()).collect()
            };
            assert!(step(&held) == step(&floats), "{dtype}, {lora}");
            assert!(merged_of(&held, &lora) == merged_of(&floats, &in_floats));
            std::fs::remove_dir_all(&folder).unwrap();
        }
    }
}

/// Beside the blocks a step has one layer's floats at a time; loading has one tensor's.
#[test]
fn weights_in_int8_take_a_quarter_of_f32_and_no_graph_keeps_their_floats() {
    let config = ModelConfig::Llama(LlamaConfig::new(37, 12, 4, 4, 128));
    let folder = folder("int8-bytes");
    save_model(&config.init(&Scope::new(1, DType::F32, Device::CPU)).unwrap(), &config, &folder).unwrap();
    let peaks = |lora: &LoraConfig, device: Device| {
        let ledger = device.ledger().unwrap();
        let (before, stage) = (ledger.total().now, DecoderStage::whole(config.layers()));
        let model =
            config.init_stage(&lora.layers().unwrap(), &Scope::new(2, DType::F32, device), stage).unwrap();
        ledger.reset_peak();
        load_weights(&model, &config, &folder).unwrap();
        let (held, loading) = (ledger.total().now - before, ledger.total().peak - before);
        let [x, targets] = [(); 2].map(|()| Var::new(Tensor::zeros(&[1, 8], DType::I64, device).unwrap()));
        ledger.reset_peak();
        let loss = model.loss(&model.forward(&x).unwrap(), &targets, 1.0).unwrap();
        let graph = ledger.total().now - before - held;
        loss.backward().unwrap();
        (held, loading, graph, ledger.total().peak - before)
    };
    let targets = ["q_proj", "down_proj"];
    let linear: usize = config
        .init(&Scope::new(1, DType::F32, Device::Meta(0)))
        .unwrap()
        .parameters()
        .iter()
        .filter(|p| p.is_matrix() && p.name().contains("proj"))
        .map(|p| p.tensor().numel())
        .sum();
    let floats = LoraConfig { base: BaseWeights::Float, ..int8(&targets) };
    for device in [Device::Cpu(811), Device::Meta(811)] {
        let (held, loading, graph, step) = peaks(&int8(&targets), device);
        let (held_floats, _, graph_of_floats, step_of_floats) = peaks(&floats, device);
        assert_eq!(held_floats - held, 4 * linear - linear - linear / 16, "{device}");
        let layer = 4 * 128 * 352;
        assert!(
            loading - held < 5 * layer && loading - held < 4 * linear / 3,
            "{device}: {}",
            loading - held
        );
        assert_eq!(graph, graph_of_floats, "{device}");
        assert!(step + 2 * linear < step_of_floats, "{device}: {step} {step_of_floats}");
    }
    std::fs::remove_dir_all(&folder).unwrap();
}

#[test]
fn a_parameter_in_int8_says_so() {
    let scope = Scope::new(1, DType::F32, Device::CPU);
    let weight = scope.parameter("w", &[3, 70], Init::layer(70)).unwrap();
    let before = weight.tensor();
    weight.hold_in_int8().unwrap();
    weight.hold_in_int8().unwrap();
    weight.unfreeze();
    assert!(weight.is_in_int8() && !weight.is_trained() && !weight.var().requires_grad());
    assert_eq!((weight.tensor().shape(), weight.dtype()), (&[3, 70][..], DType::F32));
    let near = weight.values().unwrap().to_vec::<f32>().unwrap();
    assert_eq!(near, weight.var().to_vec::<f32>().unwrap());
    assert!(near.iter().zip(before.to_vec::<f32>().unwrap()).all(|(a, b)| (a - b).abs() < 1e-3));
    weight.load(&Tensor::zeros(&[3, 70], DType::F32, Device::CPU).unwrap()).unwrap();
    assert_eq!(weight.values().unwrap().to_vec::<f32>().unwrap(), [0.0; 210]);
    let said =
        weight.load(&Tensor::zeros(&[70, 3], DType::F32, Device::CPU).unwrap()).unwrap_err().to_string();
    assert!(said.contains("got values of shape [70, 3], wanted [3, 70]"), "{said}");
    let refused = |p: &Parameter| p.hold_in_int8().unwrap_err().to_string();
    let bias = scope.parameter("b", &[3], Init::ZEROS).unwrap();
    assert!(refused(&bias).contains("b: got a tensor of shape [3], wanted a matrix"));
    let tied = scope.parameter("t", &[3, 4], Init::ZEROS).unwrap().with_sites(2).unwrap();
    assert!(refused(&tied).contains("several sites"));
    assert!(tied.values().unwrap().to_vec::<f32>().unwrap() == [0.0; 12]);
    let part = |from: usize, count: usize| {
        let mut part = crate::Shard::whole(&[2, 128]);
        (part.window.offset[1], part.extent[1]) = (from, count);
        scope.shard("p", &[2, count], part, Init::ZEROS).unwrap()
    };
    part(64, 64).hold_in_int8().unwrap();
    assert!(
        refused(&part(0, 48))
            .contains("got columns 0..48 of 128, wanted ranks to cut columns at multiples of 64")
    );
}

/// What docs/guide/fine_tuning.md says of a Llama of 1.1 billion parameters.
#[test]
fn a_llama_of_a_billion_parameters_takes_what_the_guide_says() {
    let size = LlamaConfig { key_heads: 4, inner: 5632, ..LlamaConfig::new(32000, 2048, 22, 32, 2048) };
    let config = ModelConfig::Llama(size);
    let bytes = |base: BaseWeights, dtype: DType, device: Device| {
        let lora = LoraConfig { base, ..LoraConfig::new(8, &["q_proj", "v_proj"]) };
        let stage = DecoderStage::whole(config.layers());
        let mut model =
            config.init_stage(&lora.layers().unwrap(), &Scope::new(1, dtype, device), stage).unwrap();
        model.set_recompute(RecomputeMode::Always);
        let ledger = device.ledger().unwrap();
        let held = ledger.total().now;
        ledger.reset_peak();
        let [x, targets] = [(); 2].map(|()| Var::new(Tensor::zeros(&[1, 2048], DType::I64, device).unwrap()));
        let loss = model.loss(&model.forward(&x).unwrap(), &targets, 1.0).unwrap();
        loss.backward().unwrap();
        [held, ledger.total().peak]
    };
    let mb = |bytes: [usize; 2]| bytes.map(|bytes| bytes.div_ceil(1_000_000));
    let found = [
        (BaseWeights::Float, DType::F32),
        (BaseWeights::Float, DType::BF16),
        (BaseWeights::Int8, DType::BF16),
    ]
    .map(|(base, dtype)| mb(bytes(base, dtype, Device::Meta(812))));
    assert_eq!(found, [[4405, 5077], [2203, 2539], [1295, 1631]]);
}
