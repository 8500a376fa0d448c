//! Modules that are trained as they are beside adapters (PEFT's `modules_to_save`).

use phalanx_tensor::{DType, Device};
use serde_json::json;

use super::peft_tests::{build, read};
use super::tests::{folder, tensor, tokens};
use super::*;
use crate::models::{Family, GptConfig, LlamaConfig, ModelConfig, TransformerConfig};

fn llama(tied: bool) -> ModelConfig {
    ModelConfig::Llama(LlamaConfig { tied, ..LlamaConfig::new(37, 12, 2, 2, 16) })
}

pub(super) fn of(family: Family) -> ModelConfig {
    let size = TransformerConfig { key_heads: 2, ..TransformerConfig::new(Family::Llama, 37, 12, 2, 2, 16) };
    Family::samples(&size).into_iter().find(|config| config.family == family).unwrap().into()
}

fn lora(targets: &[&str], modules: &[&str]) -> LoraConfig {
    LoraConfig { trained: modules.iter().map(ToString::to_string).collect(), ..LoraConfig::new(2, targets) }
}

/// The names of the trained parameters that are not an adapter's.
fn trained(model: &impl Parameters) -> Vec<String> {
    let names = adapters(model).iter().map(|p| p.name().to_string()).collect::<Vec<_>>();
    names.into_iter().filter(|name| !is_adapter(name)).collect()
}

#[test]
fn modules_of_these_ends_are_trained_and_have_no_adapters() {
    let lora =
        lora(&["q_proj", "up_proj"], &["embed_tokens", "lm_head", "1.mlp.up_proj", "attention_layernorm"]);
    lora.check(&llama(false)).unwrap();
    for base in [BaseWeights::Float, BaseWeights::Int8] {
        let model = build(&llama(false), &LoraConfig { base, ..lora.clone() });
        let norms = ["layers.0.post_attention_layernorm.weight", "layers.1.mlp.up_proj.weight"];
        let wanted = [
            "embed_tokens.weight",
            norms[0],
            norms[1],
            "layers.1.post_attention_layernorm.weight",
            "lm_head.weight",
        ];
        let mut found = trained(&model);
        found.sort();
        assert_eq!(found, wanted);
        let adapted: Vec<String> = model
            .parameters()
            .iter()
            .filter_map(|p| p.name().strip_suffix(".lora_A.weight").map(String::from))
            .collect();
        assert_eq!(
            adapted,
            ["layers.0.self_attn.q_proj", "layers.0.mlp.up_proj", "layers.1.self_attn.q_proj"]
        );
        for p in model.parameters() {
            let is_held = base == BaseWeights::Int8 && p.name().contains("_proj.weight") && !p.is_trained();
            assert_eq!(p.is_in_int8(), is_held, "{}", p.name());
        }
        let x = model.forward(&tokens()).unwrap();
        model.loss(&x, &tokens(), 1.0).unwrap().backward().unwrap();
        for p in model.parameters() {
            assert_eq!(p.grad().unwrap().is_some(), p.is_trained(), "{}", p.name());
        }
    }
}

/// Also where files have a weight's transpose, or several weights of the model as one.
#[test]
fn they_are_saved_read_and_in_the_merged_model() {
    let cases = [
        (llama(false), lora(&["q_proj"], &["lm_head", "down_proj"])),
        (llama(true), lora(&["q_proj"], &["embed_tokens", "lm_head"])),
        (
            ModelConfig::Gpt(GptConfig::new(37, 12, 2, 2, 16)),
            lora(&["c_fc"], &["c_attn", "ln_f", "wpe", "wte"]),
        ),
        (of(Family::Phi3), lora(&["down_proj"], &["0.self_attn.qkv_proj", "gate_up_proj", "norm"])),
        (of(Family::GptNeoX), lora(&["dense"], &["query_key_value", "lm_head", "embed_in"])),
        (of(Family::Mixtral), lora(&["q_proj"], &["mlp.gate"])),
    ];
    for (config, lora) in cases {
        lora.check(&config).unwrap();
        assert_eq!(lora.to_string().parse::<LoraConfig>().unwrap(), lora);
        let (model, folder) = (build(&config, &lora), folder("whole-modules"));
        for (i, p) in adapters(&model).iter().enumerate() {
            p.load(&tensor(p.tensor().shape(), i as f64)).unwrap();
        }
        assert!(!trained(&model).is_empty());
        save_adapter(&model, &config, &lora, &folder).unwrap();
        let read = LoraConfig::read(&folder).unwrap();
        assert_eq!(read.trained, lora.trained);
        let again = build(&config, &read);
        load_adapter(&again, &config, &folder).unwrap();
        std::fs::remove_dir_all(&folder).unwrap();
        let plain = config.init(&Scope::new(1, DType::F64, Device::CPU)).unwrap();
        for ((name, tensor), parameter) in merged(&model, &lora).unwrap().iter().zip(plain.parameters()) {
            assert_eq!(name, parameter.name());
            parameter.load(tensor).unwrap();
        }
        let logits = |x: Var| x.to_vec::<f64>().unwrap();
        let wanted = logits(model.forward(&tokens()).unwrap());
        assert_eq!(logits(again.forward(&tokens()).unwrap()), wanted, "{lora}");
        let close = |(a, b): (&f64, &f64)| (a - b).abs() < 1e-12 * (1.0 + b.abs());
        let plain = logits(plain.forward(&tokens()).unwrap());
        assert!(plain.iter().zip(&wanted).all(close), "{lora}");
    }
}

#[test]
fn what_has_no_place_in_files_is_refused() {
    let cases = [
        (
            llama(false),
            lora(&["q_proj"], &["head_lm"]),
            "has \"head_lm\", and this model has no such module; the names of those it has end with down_proj, embed_tokens",
        ),
        (llama(false), lora(&["q_proj"], &["q_proj"]), "no linear layer or embedding is called \"q_proj\""),
        (
            llama(true),
            lora(&["q_proj"], &["lm_head"]),
            "the head is tied to embed_tokens.weight, wanted that too or ensure_weight_tying = false",
        ),
        (
            of(Family::Phi3),
            lora(&["down_proj"], &["k_proj"]),
            "join layers.0.self_attn.k_proj.weight with others",
        ),
        (of(Family::Mixtral), lora(&["q_proj"], &["mlp"]), "experts have no place in PEFT's files"),
    ];
    for (config, lora, wanted) in cases {
        let said = lora.check(&config).unwrap_err().to_string();
        assert!(said.contains(wanted), "{said}");
    }
    let said = lora(&["q_proj"], &[""]).layers().unwrap_err().to_string();
    assert!(said.contains("a name without letters"), "{said}");
    read(json!({"modules_to_save": ["embed_tokens"], "ensure_weight_tying": true}))
        .unwrap()
        .check(&llama(true))
        .unwrap();
    for wrong in ["r=2,targets=q_proj,modules_to_save=", "r=2,modules_to_save=lm_head,,targets=q_proj"] {
        assert!(wrong.parse::<LoraConfig>().unwrap_err().to_string().contains("modules_to_save"), "{wrong}");
    }
}
