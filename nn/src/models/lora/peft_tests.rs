//! What PEFT's `adapter_config.json` says of some layers alone.

use std::path::Path;

use phalanx_tensor::{DType, Device};
use serde_json::{Value, json};

use super::tests::{folder, tensor, tokens};
use super::*;
use crate::models::{DecoderStage, GptConfig, LlamaConfig, ModelConfig};

fn llama() -> ModelConfig {
    ModelConfig::Llama(LlamaConfig::new(37, 12, 3, 2, 16))
}

fn gpt() -> ModelConfig {
    ModelConfig::Gpt(GptConfig::new(37, 12, 2, 2, 16))
}

/// Reads these fields beside those that are always there.
pub(super) fn read_from(folder: &Path, fields: Value) -> Result<LoraConfig> {
    let mut all = json!({"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]});
    let Value::Object(fields) = fields else { panic!("{fields}") };
    all.as_object_mut().unwrap().extend(fields);
    std::fs::create_dir_all(folder).unwrap();
    std::fs::write(folder.join("adapter_config.json"), all.to_string()).unwrap();
    LoraConfig::read(folder)
}

pub(super) fn read(fields: Value) -> Result<LoraConfig> {
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

pub(super) fn build(config: &ModelConfig, lora: &LoraConfig) -> Decoder<Lora> {
    let (scope, stage) = (Scope::new(1, DType::F64, Device::CPU), DecoderStage::whole(config.layers()));
    config.init_stage(&lora.layers().unwrap(), &scope, stage).unwrap()
}

/// The layers with adapters, without what is before their number.
fn adapted(config: &ModelConfig, fields: Value) -> Vec<String> {
    let model = build(config, &read(fields).unwrap());
    let layer = |p: &Parameter| p.name().strip_suffix(".lora_A.weight").map(String::from);
    let number = |layer: String| layer.split_once('.').map_or(&*layer, |(_, rest)| rest).to_string();
    adapters(&model).iter().filter_map(layer).map(number).collect()
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
    assert!(said.contains("no linear layer or embedding is called \"layers.3.self_attn.q_proj\""), "{said}");
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
        assert!(said.contains(&format!("no linear layer or embedding is called {pattern:?}")), "{said}");
    }
    let said = refused(json!({"target_modules": ".*(?!q)_proj"}));
    assert!(said.contains("target_modules: got the regular expression \".*(?!q)_proj\""), "{said}");
    assert!(said.contains("wanted one without look-around"), "{said}");
    for (wrong, wanted) in
        [(json!(1), "is 1, wanted a list of names or a regular expression"), (json!(null), "missing")]
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

#[test]
fn settings_of_some_layers() {
    let all = json!({
        "target_modules": ["q_proj", "v_proj", "down_proj"],
        "exclude_modules": ["layers.1.self_attn.q_proj", "mlp.down_proj"],
        "rank_pattern": {
            "^model\\.layers\\.0\\..*q_proj": 7, "layers.1.self_attn.v_proj": 6, "proj": 3, "v_proj": 2,
        },
        "alpha_pattern": {"[qv]_proj": 16, "0.self_attn.v_proj": 2.5},
    });
    let lora = read(all).unwrap();
    lora.check(&llama()).unwrap();
    let model = build(&llama(), &lora);
    let ranks: Vec<(String, usize)> = adapters(&model)
        .iter()
        .filter_map(|p| Some((p.name().strip_suffix(".lora_A.weight")?.to_string(), p.tensor().shape()[0])))
        .collect();
    let wanted = [
        ("layers.0.self_attn.q_proj", 7),
        ("layers.0.self_attn.v_proj", 2),
        ("layers.1.self_attn.v_proj", 6),
        ("layers.2.self_attn.q_proj", 4),
        ("layers.2.self_attn.v_proj", 2),
    ];
    assert_eq!(ranks, wanted.map(|(path, rank)| (path.to_string(), rank)));
    let scale = |path: &str| lora.of_layer(&format!("model.{path}")).unwrap().scale();
    assert_eq!(scale("layers.0.self_attn.q_proj"), 16.0 / 7.0);
    assert_eq!(scale("layers.0.self_attn.v_proj"), 1.25);
    assert_eq!(scale("layers.2.self_attn.v_proj"), 8.0);
    assert_eq!(scale("layers.2.mlp.up_proj"), 2.0);
    let text = lora.to_string();
    assert!(text.parse::<LoraConfig>().unwrap_err().to_string().contains("exclude_modules"), "{text}");
}

/// Each layer's adapter is scaled by its own factor in forward, in merged weights and in the lengths of DoRA.
#[test]
fn layers_with_ranks_of_their_own_are_saved_merged_and_read() {
    for dora in [false, true] {
        let lora = read(json!({
            "target_modules": ".*(q|down)_proj", "exclude_modules": ".*0.*down_proj", "use_dora": dora,
            "use_rslora": true, "rank_pattern": {"q_proj": 2}, "alpha_pattern": {"1.mlp.down_proj": 3},
        }));
        let (lora, config) = (lora.unwrap(), llama());
        let (model, folder) = (build(&config, &lora), folder("own-ranks"));
        let trained = adapters(&model);
        for (i, adapter) in trained.iter().filter(|p| !p.name().ends_with(MAGNITUDE)).enumerate() {
            adapter.load(&tensor(adapter.tensor().shape(), i as f64)).unwrap();
        }
        reset_magnitudes(&model).unwrap();
        save_adapter(&model, &config, &lora, &folder).unwrap();
        let again = build(&config, &LoraConfig::read(&folder).unwrap());
        load_adapter(&again, &config, &folder).unwrap();
        let plain = config.init(&Scope::new(1, DType::F64, Device::CPU)).unwrap();
        for ((_, tensor), parameter) in merged(&model, &lora).unwrap().iter().zip(plain.parameters()) {
            parameter.load(tensor).unwrap();
        }
        let logits = |x: Var| x.to_vec::<f64>().unwrap();
        let wanted = logits(model.forward(&tokens()).unwrap());
        assert_eq!(logits(again.forward(&tokens()).unwrap()), wanted);
        let close = |(a, b): (&f64, &f64)| (a - b).abs() < 1e-12;
        assert!(logits(plain.forward(&tokens()).unwrap()).iter().zip(&wanted).all(close));
        // Lengths that are those of the rows leave W + scale B A as it is.
        let scale = |path: &str| lora.of_layer(path).unwrap().scale();
        assert_eq!(scale("model.layers.0.self_attn.q_proj"), 8.0 / 2.0_f64.sqrt());
        assert_eq!(scale("model.layers.1.mlp.down_proj"), 1.5);
        let all = model.parameters();
        let of = |name: &str| all.iter().find(|p| p.name() == name).unwrap().tensor();
        let path = "layers.1.mlp.down_proj";
        let [w, a, b] = ["weight", "lora_A.weight", "lora_B.weight"].map(|end| of(&format!("{path}.{end}")));
        let more = phalanx_kernels::matmul(&b, &a).unwrap();
        let more = phalanx_kernels::mul_scalar(&more, 1.5.into()).unwrap();
        let sum = phalanx_kernels::add(&w, &more).unwrap().to_vec::<f64>().unwrap();
        let made = merged(&model, &lora).unwrap();
        let (_, made) = made.iter().find(|(name, _)| *name == format!("{path}.weight")).unwrap();
        assert!(made.to_vec::<f64>().unwrap().iter().zip(&sum).all(close), "dora = {dora}");
        std::fs::remove_dir_all(&folder).unwrap();
    }
}

#[test]
fn names_may_be_meant_in_some_blocks_alone() {
    let of = |fields: Value| adapted(&llama(), fields);
    let both = ["0.self_attn.q_proj", "2.self_attn.q_proj"];
    assert_eq!(of(json!({"layers_to_transform": [0, 2]})), both);
    assert_eq!(of(json!({"layers_to_transform": [2, 0], "layers_pattern": ["h", "layers"]})), both);
    assert_eq!(of(json!({"layers_to_transform": 1, "layers_pattern": "layers"})), ["1.self_attn.q_proj"]);
    // Whole paths are in no need of a block.
    let path = "model.layers.1.mlp.up_proj";
    assert_eq!(
        of(
            json!({"layers_to_transform": [0], "target_modules": ["q_proj", path, "embed_tokens", "lm_head"]})
        ),
        ["0.self_attn.q_proj", "1.mlp.up_proj", "lm_head"]
    );
    for every in [json!({"layers_to_transform": []}), json!({"layers_pattern": ""})] {
        assert_eq!(of(every).len(), 3);
    }
    let of_gpt = json!({"target_modules": ["c_fc"], "layers_to_transform": 1, "layers_pattern": "h"});
    assert_eq!(adapted(&gpt(), of_gpt), ["1.mlp.c_fc"]);
    let lora = read(json!({"layers_to_transform": [0], "layers_pattern": ["h"]})).unwrap();
    let said = lora.check(&llama()).unwrap_err().to_string();
    assert!(
        said.contains("is called \"q_proj\", layers_to_transform = [0], layers_pattern = [\"h\"]; those"),
        "{said}"
    );
    let cases = [
        (
            json!({"layers_to_transform": [0], "target_modules": ".*"}),
            "is [0] and target_modules an expression",
        ),
        (json!({"layers_pattern": "h"}), "layers_pattern is [\"h\"], wanted layers_to_transform"),
        (json!({"layers_to_transform": -1}), "layers_to_transform is -1, wanted a number"),
        (json!({"layers_to_transform": 0, "layers_pattern": "(?=h)"}), "layers_pattern: got the regular"),
        (json!({"rank_pattern": {"q_proj": 0}}), "rank_pattern has a rank of 0 for \"q_proj\""),
        (json!({"rank_pattern": {"q_proj": "4"}}), "wanted ranks by name"),
        (json!({"alpha_pattern": {"(?<=a)b": 4}}), "alpha_pattern: got the regular expression"),
        (json!({"exclude_modules": {"q": 1}}), "exclude_modules is {\"q\":1}, wanted a list of names"),
        (json!({"r": 0}), "rank of 0"),
    ];
    for (fields, wanted) in cases {
        let said = refused(fields);
        assert!(said.contains("adapter_config.json") && said.contains(wanted), "{said}");
    }
}

#[test]
fn what_is_more_than_adapters_and_whole_modules_is_refused() {
    let alone = "wanted null, as it is not supported";
    let cases = [
        (json!({"bias": "some"}), "bias is \"some\", wanted none, all or lora_only"),
        (json!({"modules_to_save": "lm_head"}), "modules_to_save is \"lm_head\", wanted a list of names"),
        (json!({"trainable_token_indices": [1, 5]}), "trainable_token_indices is [1,5], "),
        (json!({"kasa_config": {"beta": 1}}), "kasa_config = {\"beta\":1} is not supported"),
    ];
    for (fields, wanted) in cases {
        let said = refused(fields);
        let is_alone = wanted.ends_with(", ");
        assert!(said.contains(wanted) && said.contains(alone) == is_alone, "{said}");
    }
    let none = json!({
        "bias": "none", "lora_bias": false, "modules_to_save": [], "trainable_token_indices": null,
        "target_parameters": [], "exclude_modules": null, "rank_pattern": {}, "alpha_pattern": {},
        "layers_to_transform": null, "layers_pattern": null, "loftq_config": {}, "lora_dropout": 0.0,
    });
    assert_eq!(read(none).unwrap(), LoraConfig::new(4, &["q_proj"]));
}
