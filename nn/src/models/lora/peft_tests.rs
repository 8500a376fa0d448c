//! What PEFT's `adapter_config.json` says of some layers alone.

use std::path::Path;

use serde_json::{Value, json};

use super::tests::folder;
use super::*;
use crate::models::{GptConfig, LlamaConfig};

fn llama() -> ModelConfig {
    ModelConfig::Llama(LlamaConfig::new(37, 12, 3, 2, 16))
}

fn gpt() -> ModelConfig {
    ModelConfig::Gpt(GptConfig::new(37, 12, 2, 2, 16))
}

/// Reads these fields beside those that are always there.
fn read_from(folder: &Path, fields: Value) -> Result<LoraConfig> {
    let mut all = json!({"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]});
    let Value::Object(fields) = fields else { panic!("{fields}") };
    all.as_object_mut().unwrap().extend(fields);
    std::fs::create_dir_all(folder).unwrap();
    std::fs::write(folder.join("adapter_config.json"), all.to_string()).unwrap();
    LoraConfig::read(folder)
}

fn read(fields: Value) -> Result<LoraConfig> {
    let folder = folder(&format!("read-{:?}", std::thread::current().id()));
    let read = read_from(&folder, fields);
    if let Ok(read) = &read {
        read.write(&folder).unwrap();
        assert_eq!(LoraConfig::read(&folder).unwrap(), *read);
    }
    std::fs::remove_dir_all(&folder).unwrap();
    read
}

fn refused(fields: Value) -> String {
    read(fields).unwrap_err().to_string()
}

fn build(config: &ModelConfig, lora: &LoraConfig) -> Decoder<Lora> {
    let (scope, stage) = (Scope::new(1, DType::F64, Device::CPU), DecoderStage::whole(config.layers()));
    config.init_stage(&lora.layers().unwrap(), &scope, stage).unwrap()
}

/// The layers with adapters, without what is before their number.
fn adapted(config: &ModelConfig, fields: Value) -> Vec<String> {
    let model = build(config, &read(fields).unwrap());
    let layer = |p: &Parameter| p.name().strip_suffix(".lora_A.weight").map(String::from);
    let number = |layer: String| layer.split_once('.').map(|(_, rest)| rest.to_string());
    adapters(&model).iter().filter_map(layer).filter_map(number).collect()
}

#[test]
fn names_may_be_whole_paths_and_ends_of_paths() {
    let targets = ["self_attn.q_proj", "layers.1.mlp.up_proj", "model.layers.2.self_attn.v_proj"];
    let fields = json!({"target_modules": targets});
    let wanted = [
        "0.self_attn.q_proj",
        "1.self_attn.q_proj",
        "1.mlp.up_proj",
        "2.self_attn.q_proj",
        "2.self_attn.v_proj",
    ];
    assert_eq!(adapted(&llama(), fields.clone()), wanted);
    read(fields).unwrap().check(&llama()).unwrap();
    let of_gpt = json!({"target_modules": ["transformer.h.1.attn.c_attn", "h.0.mlp.c_fc"]});
    assert_eq!(adapted(&gpt(), of_gpt), ["0.mlp.c_fc", "1.attn.c_attn"]);
    let unknown = json!({"target_modules": ["q_proj", "layers.3.self_attn.q_proj"]});
    let said = read(unknown).unwrap().check(&llama()).unwrap_err().to_string();
    assert!(said.contains("no linear layer is called \"layers.3.self_attn.q_proj\""), "{said}");
}

#[test]
fn an_expression_matches_whole_paths() {
    let of = |pattern: &str| adapted(&llama(), json!({"target_modules": pattern}));
    assert_eq!(of(r"model\.layers\.[02]\.mlp\.(up|down)_proj").len(), 4);
    assert_eq!(of("q_proj|.*v_proj"), ["0.self_attn.v_proj", "1.self_attn.v_proj", "2.self_attn.v_proj"]);
    assert_eq!(of(r"(?P<any>.*)\.2\.self_attn\.k_proj"), ["2.self_attn.k_proj"]);
    // It is not a name, and a path has the prefix of transformers' model.
    for pattern in ["q_proj", r"layers\.0\.self_attn\.q_proj", ".*self_attn", "all-linear"] {
        let lora = read(json!({"target_modules": pattern})).unwrap();
        let said = lora.check(&llama()).unwrap_err().to_string();
        assert!(said.contains(&format!("no linear layer is called {pattern:?}")), "{said}");
    }
    let said = refused(json!({"target_modules": ".*(?!q)_proj"}));
    assert!(said.contains("target_modules: got the regular expression \".*(?!q)_proj\""), "{said}");
    assert!(said.contains("wanted one without look-around"), "{said}");
    for (wrong, wanted) in
        [(json!(1), "is 1, wanted names or a regular expression"), (json!(null), "missing")]
    {
        let said = refused(json!({"target_modules": wrong}));
        assert!(said.contains("target_modules") && said.contains(wanted), "{said}");
    }
    let made = LoraConfig { targets: Modules::Pattern("a)|(b".into()), ..LoraConfig::new(1, &[]) };
    assert!(made.layers().unwrap_err().to_string().contains("a)|(b"));
    // A text has no place for it.
    let text = read(json!({"target_modules": "a=1,.*"})).unwrap().to_string();
    assert!(text.parse::<LoraConfig>().unwrap_err().to_string().contains("target_modules="), "{text}");
}

/// Of a model that is whole a stage may have no adapters.
#[test]
fn stages_without_the_layers_of_adapters_have_none() {
    let (config, scope) = (llama(), Scope::new(1, DType::F32, Device::Meta(0)));
    let lora = read(json!({"target_modules": ["model.layers.2.mlp.up_proj"]})).unwrap();
    let layers = lora.layers().unwrap();
    let count = |blocks: std::ops::Range<usize>| {
        let stage = DecoderStage { first: blocks.start == 0, last: blocks.end == 3, layers: blocks };
        adapters(&config.init_stage(&layers, &scope, stage).unwrap()).len()
    };
    assert_eq!([count(0..2), count(2..3)], [0, 2]);
}
