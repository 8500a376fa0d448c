//! Heads that are tied to the embedding until adapters, or what is trained beside them, part the two.

use phalanx_tensor::io::SafeTensors;
use phalanx_tensor::{DType, Device};
use serde_json::json;

use super::embedding_tests::{gpt, llama, logits};
use super::peft_tests::{build, read};
use super::tests::{folder, tensor, tokens};
use super::*;
use crate::models::{load_model, load_weights, save_model, save_tensors};

/// Settings of which the head has a table of its own, and what is trained of the two tables.
fn apart() -> Vec<(LoraConfig, &'static [&'static str])> {
    let q_proj = |trained: &[&str]| LoraConfig {
        trained: trained.iter().map(ToString::to_string).collect(),
        keeps_tie: false,
        ..LoraConfig::new(2, &["q_proj"])
    };
    vec![
        (q_proj(&["embed_tokens", "lm_head"]), &["embed_tokens.weight", "lm_head.weight"]),
        (q_proj(&["embed_tokens"]), &["embed_tokens.weight"]),
        (q_proj(&["lm_head"]), &["lm_head.weight"]),
        (LoraConfig::new(2, &["q_proj", "lm_head"]), &["lm_head.lora_A.weight", "lm_head.lora_B.weight"]),
        (
            LoraConfig { dora: true, ..LoraConfig::new(2, &["lm_head"]) },
            &["lm_head.lora_A.weight", "lm_head.lora_B.weight", "lm_head.lora_magnitude_vector"],
        ),
    ]
}

#[test]
fn a_head_that_is_trained_apart_begins_with_the_table_that_it_shared() {
    let (config, base) = (llama(true), folder("tied-base"));
    let plain = config.init(&Scope::new(9, DType::F64, Device::CPU)).unwrap();
    save_model(&plain, &config, &base).unwrap();
    for (lora, wanted) in apart() {
        lora.check(&config).unwrap();
        assert_eq!(lora.model_config(&config).unwrap(), llama(false));
        assert_eq!(lora.to_string().parse::<LoraConfig>().unwrap(), lora);
        // Of the tied configuration and of the model's own.
        for config in [&config, &llama(false)] {
            let model = build(config, &lora);
            load_weights(&model, config, &base).unwrap();
            assert_eq!(logits(&model), logits(&plain), "{lora}");
            let x = model.forward(&tokens()).unwrap();
            model.loss(&x, &tokens(), 1.0).unwrap().backward().unwrap();
            let of_tables =
                |p: &Parameter| ["embed_tokens.", "lm_head."].iter().any(|of| p.name().starts_with(of));
            let trained =
                model.parameters().into_iter().filter(|p| of_tables(p) && p.grad().unwrap().is_some());
            assert_eq!(trained.map(|p| p.name().to_string()).collect::<Vec<_>>(), wanted, "{lora}");
        }
    }
    // Other settings leave it tied, and a folder whose own model has two tables has to have both.
    for lora in [
        LoraConfig::new(2, &["q_proj", "embed_tokens"]),
        LoraConfig {
            trained: vec!["embed_tokens".into(), "lm_head".into()],
            ..LoraConfig::new(2, &["q_proj"])
        },
        LoraConfig { trained: vec!["norm".into()], keeps_tie: false, ..LoraConfig::new(2, &["q_proj"]) },
    ] {
        assert_eq!(lora.model_config(&config).unwrap(), config);
        assert!(build(&config, &lora).parameters().iter().all(|p| !p.name().starts_with(HEAD)));
    }
    let text = std::fs::read_to_string(base.join("config.json")).unwrap();
    let tied = "\"tie_word_embeddings\": true";
    assert!(text.contains(tied));
    std::fs::write(base.join("config.json"), text.replace(tied, "\"tie_word_embeddings\": false")).unwrap();
    let said = load_model(&base, &Scope::new(3, DType::F64, Device::CPU)).map(drop).unwrap_err().to_string();
    assert!(said.contains("lm_head.weight"), "{said}");
    std::fs::remove_dir_all(&base).unwrap();
}

#[test]
fn a_head_that_is_trained_apart_is_in_files_and_in_the_merged_model() {
    for (config, names) in
        [(llama(true), ["embed_tokens", "lm_head", "q_proj"]), (gpt(), ["wte", "lm_head", "c_attn"])]
    {
        for (lora, _) in apart() {
            let named = |text: &String| match &**text {
                "embed_tokens" => names[0].to_string(),
                "q_proj" => names[2].to_string(),
                other => other.to_string(),
            };
            let Modules::Names(targets) = &lora.targets else { unreachable!() };
            let targets = Modules::Names(targets.iter().map(named).collect());
            let lora = LoraConfig { trained: lora.trained.iter().map(named).collect(), targets, ..lora };
            let (model, folder) = (build(&config, &lora), folder("apart"));
            for (i, p) in adapters(&model).iter().enumerate() {
                p.load(&tensor(p.tensor().shape(), i as f64)).unwrap();
            }
            let wanted = logits(&model);
            save_adapter(&model, &config, &lora, &folder).unwrap();
            let file = SafeTensors::open(folder.join("adapter_model.safetensors")).unwrap();
            // Each once: nothing of what is trained has a copy.
            assert_eq!(file.names().count(), adapters(&model).len(), "{lora}");
            let read = LoraConfig::read(&folder).unwrap();
            let again = build(&config, &read);
            let own: Vec<Parameter> = again.parameters().into_iter().filter(|p| !p.is_trained()).collect();
            for p in model.parameters() {
                own.iter()
                    .filter(|own| own.name() == p.name())
                    .for_each(|own| own.load(&p.tensor()).unwrap());
            }
            load_adapter(&again, &config, &folder).unwrap();
            assert_eq!(logits(&again), wanted, "{lora}");
            let of_merged = lora.merged_config(&config).unwrap();
            assert_eq!(of_merged.tied_table(), None);
            save_tensors(merged(&model, &lora).unwrap(), &of_merged, &folder).unwrap();
            let (_, plain) = load_model(&folder, &Scope::new(3, DType::F64, Device::CPU)).unwrap();
            let close = |(a, b): (&f64, &f64)| (a - b).abs() < 1e-12 * (1.0 + b.abs());
            assert!(logits(&plain).iter().zip(&wanted).all(close), "{lora}");
            std::fs::remove_dir_all(&folder).unwrap();
        }
    }
}

/// PEFT writes `ensure_weight_tying` beside what is trained as it is.
#[test]
fn files_say_whether_the_two_are_apart() {
    let of = |fields| read(fields).unwrap().model_config(&llama(true)).unwrap();
    let modules = json!({"modules_to_save": ["embed_tokens", "lm_head"]});
    assert_eq!(of(modules), llama(false));
    assert_eq!(of(json!({"modules_to_save": ["lm_head"], "ensure_weight_tying": false})), llama(false));
    assert_eq!(of(json!({"modules_to_save": ["embed_tokens"], "ensure_weight_tying": true})), llama(true));
    assert_eq!(of(json!({"modules_to_save": ["norm"]})), llama(true));
    assert_eq!(of(json!({"target_modules": ["q_proj", "lm_head"]})), llama(false));
    assert_eq!(of(json!({"target_modules": "all-linear"})), llama(true));
}
