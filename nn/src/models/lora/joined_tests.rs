//! Adapters of families whose files join weights, or call them otherwise than their models do.

use std::collections::BTreeMap;
use std::path::Path;

use phalanx_tensor::io::{SafeTensors, save_safetensors};
use phalanx_tensor::{DType, Device};
use serde_json::json;

use super::peft_tests::{build, read, read_from};
use super::tests::{folder, tensor, tokens};
use super::*;
use crate::models::{Experts, Family, ModelConfig, TransformerConfig, file_tensors};

const NEOX: [&str; 4] =
    ["attention.query_key_value", "attention.dense", "mlp.dense_h_to_4h", "mlp.dense_4h_to_h"];
const PHI: [&str; 4] = ["self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj"];

/// A layer's name in files, its outputs and its inputs.
type Shaped = (&'static str, [usize; 2]);

/// Models, where their files have blocks, and the layers there.
fn models() -> [(ModelConfig, &'static str, [Shaped; 4]); 2] {
    let config = |family| TransformerConfig::new(family, 37, 12, 2, 2, 16);
    let phi = TransformerConfig { heads: 4, key_heads: 2, head_dim: 4, inner: 10, ..config(Family::Phi3) };
    let neox = TransformerConfig { inner: 10, ..config(Family::GptNeoX) };
    let of =
        |names: [&'static str; 4], shapes: [[usize; 2]; 4]| std::array::from_fn(|i| (names[i], shapes[i]));
    [
        (neox.into(), "gpt_neox.layers", of(NEOX, [[48, 16], [16, 16], [10, 16], [16, 10]])),
        (phi.into(), "model.layers", of(PHI, [[32, 16], [16, 16], [20, 16], [16, 10]])),
    ]
}

/// What PEFT would write: each layer's `A`, `B`, and magnitude.
fn files(folder: &Path, blocks: &str, layers: &[(&str, [usize; 2])], dora: bool) -> Vec<(String, Tensor)> {
    let mut tensors = Vec::new();
    for (i, (layer, [outputs, inputs])) in [0, 1].iter().flat_map(|i| layers.iter().map(move |l| (i, l))) {
        let mut add = |end: &str, shape: &[usize]| {
            let values = tensor(shape, tensors.len() as f64);
            tensors.push((format!("base_model.model.{blocks}.{i}.{layer}.{end}"), values));
        };
        add("lora_A.weight", &[3, *inputs]);
        add("lora_B.weight", &[*outputs, 3]);
        if dora {
            add("lora_magnitude_vector", &[*outputs]);
        }
    }
    let named = tensors.iter().map(|(name, tensor)| (name.as_str(), tensor));
    save_safetensors(folder.join("adapter_model.safetensors"), named, &BTreeMap::new()).unwrap();
    tensors
}

fn same(saved: &SafeTensors, wanted: &[(String, Tensor)]) {
    assert_eq!(saved.names().count(), wanted.len());
    for (name, tensor) in wanted {
        assert_eq!(saved.shape(name).unwrap(), tensor.shape(), "{name}");
        let saved = saved.tensor(name, Device::CPU).unwrap();
        assert!(saved.to_bytes().unwrap() == tensor.to_bytes().unwrap(), "{name}");
    }
}

/// As files have them, the merged weights are the files' weights with what PEFT adds: `W + scale B A`, with the joint `A` and `B`.
#[test]
fn an_adapter_of_joined_layers_is_read_merged_and_written_back() {
    for ((config, blocks, layers), dora) in models().into_iter().flat_map(|m| [(m.clone(), false), (m, true)])
    {
        let folder = folder("joined");
        let targets: Vec<&str> = layers.iter().map(|(name, _)| name.rsplit('.').next().unwrap()).collect();
        let fields = json!({"target_modules": targets, "r": 3, "lora_alpha": 6, "use_dora": dora});
        let lora = read_from(&folder, fields).unwrap();
        let tensors = files(&folder, blocks, &layers, dora);
        let model = build(&config, &lora);
        load_adapter(&model, &config, &folder).unwrap();
        save_adapter(&model, &config, &lora, folder.join("again")).unwrap();
        same(&SafeTensors::open(folder.join("again/adapter_model.safetensors")).unwrap(), &tensors);
        assert_eq!(LoraConfig::read(folder.join("again")).unwrap(), lora);

        let mut weights = model.parameters();
        weights.retain(|p| !is_adapter(p.name()));
        let weights = weights.iter().map(|p| (p.name().to_string(), p.tensor())).collect();
        let before = file_tensors(weights, &config).unwrap();
        let after = file_tensors(merged(&model, &lora).unwrap(), &config).unwrap();
        let find = |name: String| tensors.iter().find(|(other, _)| *other == name).map(|(_, tensor)| tensor);
        let mut changed = 0;
        for ((name, before), (_, after)) in before.iter().zip(&after) {
            let beside =
                |end: &str| find(format!("base_model.model.{}.{end}", name.strip_suffix(".weight")?));
            let wanted = match (beside("lora_A.weight"), beside("lora_B.weight")) {
                (Some(a), Some(b)) => lora.merge(before, a, b, beside(MAGNITUDE)).unwrap(),
                _ => before.clone(),
            };
            changed += usize::from(wanted.to_bytes().unwrap() != before.to_bytes().unwrap());
            let (wanted, after) = (wanted.to_vec::<f64>().unwrap(), after.to_vec::<f64>().unwrap());
            assert!(after.iter().zip(wanted).all(|(a, b)| (a - b).abs() < 1e-12), "{name}");
        }
        assert_eq!(changed, 8);
        let plain = config.init(&Scope::new(1, DType::F64, Device::CPU)).unwrap();
        for ((_, tensor), parameter) in merged(&model, &lora).unwrap().iter().zip(plain.parameters()) {
            parameter.load(tensor).unwrap();
        }
        let [got, wanted] =
            [model.forward(&tokens()), plain.forward(&tokens())].map(|y| y.unwrap().to_vec::<f64>().unwrap());
        let worst = got.iter().zip(wanted).map(|(a, b)| (a - b).abs() / (1.0 + b.abs())).fold(0.0, f64::max);
        assert!(worst < 1e-12, "{blocks}, dora = {dora}: {worst}");
        std::fs::remove_dir_all(&folder).unwrap();
    }
}

#[test]
fn layers_with_other_names_in_files_are_trained() {
    for (config, _, layers) in models() {
        let is_joint = |name: &str| {
            ["query_key_value", "qkv_proj", "gate_up_proj"].iter().any(|joint| name.ends_with(joint))
        };
        let apart: Vec<&str> = layers.iter().map(|(name, _)| *name).filter(|name| !is_joint(name)).collect();
        let lora = read(json!({"target_modules": apart, "r": 3})).unwrap();
        lora.check(&config).unwrap();
        let folder = folder("apart");
        save_adapter(&build(&config, &lora), &config, &lora, &folder).unwrap();
        let saved = SafeTensors::open(folder.join("adapter_model.safetensors")).unwrap();
        assert_eq!(saved.names().count(), 2 * 2 * apart.len());
        assert!(
            saved.names().all(|name| apart.iter().any(|apart| name.contains(&format!(".{apart}.lora_"))))
        );
        std::fs::remove_dir_all(&folder).unwrap();
    }
    let (config, ..) = models()[0].clone();
    // What the model calls otherwise is called in the file as files do.
    let (lora, folder) =
        (LoraConfig::new(2, &["o_proj", "mlp.down_proj", "dense_h_to_4h"]), folder("called"));
    save_adapter(&build(&config, &lora), &config, &lora, &folder).unwrap();
    let named = ["dense", "dense_4h_to_h", "dense_h_to_4h"].map(String::from).to_vec();
    assert_eq!(LoraConfig::read(&folder).unwrap().targets, Modules::Names(named));
    std::fs::remove_dir_all(&folder).unwrap();
    let ranks = json!({"target_modules": r"gpt_neox\..*dense.*", "rank_pattern": {"attention.dense": 2}});
    let lora = read(ranks).unwrap();
    lora.check(&config).unwrap();
    let shapes = |model: &Decoder<Lora>| -> Vec<usize> {
        let is_a = |p: &&Parameter| p.name().contains("lora_A");
        adapters(model).iter().filter(is_a).map(|p| p.tensor().shape()[0]).collect()
    };
    assert_eq!(shapes(&build(&config, &lora)), [2, 4, 4, 2, 4, 4]);
}

#[test]
fn joined_layers_train_one_a_and_are_not_taken_apart() {
    for (config, blocks, layers) in models() {
        let folder = folder("joint");
        let (joint, ..) = layers[0];
        let lora = read_from(&folder, json!({"target_modules": [joint], "r": 3})).unwrap();
        lora.check(&config).unwrap();
        files(&folder, blocks, &layers[..1], false);
        let model = build(&config, &lora);
        load_adapter(&model, &config, &folder).unwrap();
        let names: Vec<String> =
            adapters(&model).iter().map(|p| p.name().replace("layers.0.self_attn.", "")).collect();
        assert_eq!(
            names[..4],
            ["q_proj.lora_A.weight", "q_proj.lora_B.weight", "k_proj.lora_B.weight", "v_proj.lora_B.weight"]
        );
        let (_, grads) = super::tests::step(&model);
        assert_eq!(grads.len(), 8);
        assert!(grads.iter().all(|grad| grad.iter().any(|byte| *byte != 0)));
        // Some of the layers alone have no place in files; nor have the files of all a place in some.
        let some = LoraConfig::new(3, &["q_proj", "k_proj"]);
        let said = some.check(&config).unwrap_err().to_string();
        assert!(said.contains("join layers.0.self_attn.q_proj.lora_B.weight with others"), "{said}");
        let model = build(&config, &some);
        load_adapter(&model, &config, &folder).unwrap();
        let said = save_adapter(&model, &config, &some, folder.join("again")).unwrap_err().to_string();
        assert!(said.contains("of the elements of base_model.model."), "{said}");
        assert!(!folder.join("again").exists());
        // A file of other rows.
        let (name, [outputs, inputs]) = layers[0];
        files(&folder, blocks, &[(name, [outputs + 3, inputs])], false);
        let said = load_adapter(&build(&config, &lora), &config, &folder).unwrap_err().to_string();
        assert!(said.contains(&format!("[{}, 3]", outputs + 3)), "{said}");
        std::fs::remove_dir_all(&folder).unwrap();
    }
}

/// Biases of a layer with an adapter are inside another module in PEFT's model.
#[test]
fn trained_biases_are_in_pefts_files() {
    for ((config, blocks, layers), bias) in
        models().into_iter().flat_map(|m| [(m.clone(), "all"), (m, "lora_only")])
    {
        let folder = folder("biases");
        let (joint, _) = layers[0];
        let lora = read(json!({"target_modules": [joint], "r": 3, "bias": bias})).unwrap();
        lora.check(&config).unwrap();
        let model = build(&config, &lora);
        let trained = adapters(&model);
        for (i, parameter) in trained.iter().enumerate() {
            parameter.load(&tensor(parameter.tensor().shape(), i as f64)).unwrap();
        }
        save_adapter(&model, &config, &lora, &folder).unwrap();
        assert_eq!(LoraConfig::read(&folder).unwrap(), lora);
        let saved = SafeTensors::open(folder.join("adapter_model.safetensors")).unwrap();
        let biases: Vec<&str> = saved.names().filter(|name| name.ends_with(".bias")).collect();
        // Phi-3 has none. Of a GPT-NeoX all are four of linear layers and two of norms in each block, and the last norm's.
        let has = matches!(&config, ModelConfig::Transformer(c) if c.qkv_bias);
        assert_eq!(
            biases.len(),
            if !has {
                0
            } else if bias == "all" {
                13
            } else {
                2
            },
            "{biases:?}"
        );
        let inside = format!("base_model.model.{blocks}.1.{joint}.base_layer.bias");
        assert_eq!(biases.contains(&&*inside), has);
        let again = build(&config, &lora);
        load_adapter(&again, &config, &folder).unwrap();
        for (a, b) in trained.iter().zip(adapters(&again)) {
            assert!(a.tensor().to_bytes().unwrap() == b.tensor().to_bytes().unwrap(), "{}", a.name());
        }
        std::fs::remove_dir_all(&folder).unwrap();
    }
}

/// What PEFT writes with transformers 5, whose models join experts: `A` `[experts rank, in]` and `B` `[out, rank experts]`, and of both joined
/// weights the first inside the second.
#[test]
fn adapters_of_joined_experts_are_read_merged_and_written_back() {
    let (count, inner, rank) = (3, 5, 2);
    for (family, weights) in
        [(Family::Mixtral, &ALL[..]), (Family::Qwen3Moe, &ALL[1..]), (Family::OlmoE, &ALL[..1])]
    {
        let size = TransformerConfig::new(family, 37, 12, 1, 2, 16);
        let experts = size.experts.clone().map(|experts| Experts { count, inner, chosen: 2, ..experts });
        let config = ModelConfig::from(TransformerConfig { experts, inner: 10, ..size });
        let fields = json!({
            "target_modules": [], "target_parameters": weights, "r": rank, "lora_alpha": 6,
            "rank_pattern": {".*\\.gate_up_proj": 2 * rank}, "alpha_pattern": {".*\\.gate_up_proj": 20},
        });
        let (folder, has) = (folder("experts"), |name| weights.contains(&name));
        let lora = read_from(&folder, fields).unwrap();
        lora.check(&config).unwrap();
        let inside = if has("down_proj") { "experts.base_layer" } else { "experts" };
        let shapes = [
            ("down_proj", "experts", [count * rank, inner], [16, rank * count]),
            ("gate.weight", "gate", [rank, 16], [count, rank]),
            ("gate_up_proj", inside, [count * 2 * rank, 16], [2 * inner, 2 * rank * count]),
        ];
        let mut tensors = Vec::new();
        for (_, place, a, b) in shapes.into_iter().filter(|(weight, ..)| has(weight)) {
            let path = format!("base_model.model.model.layers.0.mlp.{place}");
            tensors.push((format!("{path}.lora_A.weight"), tensor(&a, tensors.len() as f64)));
            tensors.push((format!("{path}.lora_B.weight"), tensor(&b, tensors.len() as f64)));
        }
        let named = tensors.iter().map(|(name, tensor)| (name.as_str(), tensor));
        save_safetensors(folder.join("adapter_model.safetensors"), named, &BTreeMap::new()).unwrap();
        let model = build(&config, &lora);
        load_adapter(&model, &config, &folder).unwrap();
        save_adapter(&model, &config, &lora, folder.join("again")).unwrap();
        same(&SafeTensors::open(folder.join("again/adapter_model.safetensors")).unwrap(), &tensors);
        assert_eq!(LoraConfig::read(folder.join("again")).unwrap(), lora);

        // Of expert 1: `W[o, i] + scale (sum over r of B[o, r count + 1] A[rank + r, i])`, the gate's rows before those of up.
        let merged = merged(&model, &lora).unwrap();
        let value = |tensor: &Tensor, at: usize| tensor.to_vec::<f64>().unwrap()[at];
        for (layer, first, weight) in [("gate_proj", 0, 2), ("up_proj", inner, 2), ("down_proj", 0, 0)] {
            let (weight, place, a_shape, b_shape) = shapes[weight];
            let name = format!("layers.0.mlp.experts.1.{layer}.weight");
            let find =
                |end| tensors.iter().find(|(name, _)| name.ends_with(&format!("{place}.{end}.weight")));
            let before = model.parameters().into_iter().find(|p| p.name() == name).unwrap().tensor();
            let after = &merged.iter().find(|(other, _)| *other == name).unwrap().1;
            let (out, input, ranks) = (4, 3, a_shape[0] / count);
            let more = match (has(weight), find("lora_A"), find("lora_B")) {
                (true, Some((_, a)), Some((_, b))) => (0..ranks)
                    .map(|r| {
                        let b = value(b, (first + out) * b_shape[1] + r * count + 1);
                        b * value(a, (ranks + r) * a_shape[1] + input)
                    })
                    .sum(),
                _ => 0.0,
            };
            let scale = if layer == "down_proj" { 3.0 } else { 5.0 };
            let at = out * a_shape[1] + input;
            assert!(
                (value(after, at) - value(&before, at) - scale * more).abs() < 1e-12,
                "{family:?} {name}"
            );
        }
        let plain = config.init(&Scope::new(1, DType::F64, Device::CPU)).unwrap();
        for ((_, tensor), parameter) in merged.iter().zip(plain.parameters()) {
            parameter.load(tensor).unwrap();
        }
        let [got, wanted] =
            [model.forward(&tokens()), plain.forward(&tokens())].map(|y| y.unwrap().to_vec::<f64>().unwrap());
        let close = |(a, b): (&f64, &f64)| (a - b).abs() < 1e-12 * (1.0 + b.abs());
        assert!(got.iter().zip(&wanted).all(close), "{family:?}");
        std::fs::remove_dir_all(&folder).unwrap();
    }
}

/// The weights of a mixture that may have adapters of their own.
const ALL: [&str; 3] = ["down_proj", "gate.weight", "gate_up_proj"];

#[test]
fn weights_that_cannot_have_adapters_are_refused() {
    let config = ModelConfig::from(TransformerConfig::new(Family::Qwen2, 37, 12, 2, 2, 16));
    let said = |fields| match read(fields) {
        Ok(lora) => lora.check(&config).unwrap_err().to_string(),
        Err(why) => why.to_string(),
    };
    let of = |weights: &[&str]| json!({"target_modules": [], "target_parameters": weights});
    assert!(read(of(&["q_proj.weight"])).unwrap().check(&config).is_ok());
    assert!(said(of(&["gate_up_proj"])).contains("target_parameters = [\"gate_up_proj\"]"));
    assert!(said(of(&["q_proj.weight", "gate.weight"])).contains("target_parameters has \"gate.weight\""));
    assert!(said(of(&["embed_tokens.weight"])).contains("target_parameters is not supported"));
    assert!(said(json!({"target_parameters": "q_proj.weight"})).contains("wanted a list of names"));
    for beside in ["use_dora", "lora_bias"] {
        let fields = json!({"target_modules": [], "target_parameters": ["q_proj.weight"], beside: true});
        assert!(said(fields).contains(beside));
    }
}
