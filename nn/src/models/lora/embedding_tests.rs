//! Adapters of embeddings, and adapters with biases.

use phalanx_tensor::io::SafeTensors;
use phalanx_tensor::{DType, Device};
use serde_json::json;

use super::peft_tests::{build, read};
use super::tests::{folder, tensor, tokens};
use super::trained_tests::of;
use super::*;
use crate::models::{Family, GptConfig, LlamaConfig, ModelConfig, load_model, read_config, save_tensors};

pub(super) fn llama(tied: bool) -> ModelConfig {
    ModelConfig::Llama(LlamaConfig { tied, ..LlamaConfig::new(37, 12, 2, 2, 16) })
}

pub(super) fn gpt() -> ModelConfig {
    ModelConfig::Gpt(GptConfig::new(37, 12, 2, 2, 16))
}

/// A model whose adapters add something.
fn adapted(config: &ModelConfig, lora: &LoraConfig) -> Decoder<Lora> {
    lora.check(config).unwrap();
    let model = build(config, lora);
    for (i, p) in adapters(&model).iter().enumerate() {
        p.load(&tensor(p.tensor().shape(), i as f64)).unwrap();
    }
    model
}

pub(super) fn logits(model: &Decoder<impl LayerFactory>) -> Vec<f64> {
    let x = model.forward(&tokens()).unwrap();
    model.logits(&x).unwrap().to_vec().unwrap()
}

/// `y = W[i] + scale B A[i]`, with an index that comes twice and one of padding, whose rows get no gradient.
#[test]
fn an_embeddings_adapter_is_its_formula() {
    let config = LoraConfig::new(2, &["embed_tokens"]);
    let (count, width, scale) = (5, 3, config.scale());
    let lora = Lora::new(OneDevice, config).unwrap();
    let scope = Scope::new(1, DType::F64, Device::CPU).child("embed_tokens");
    let init = Init::layer(width);
    let layer =
        lora.embedding(&scope, EmbeddingSpec { count, width, init, tied: false, padding: Some(1) }).unwrap();
    lora.built(&layer.parameters()).unwrap();
    let adapter = layer.adapter.as_ref().unwrap();
    let begun = adapter.lora_a.weight.tensor().to_vec::<f64>().unwrap();
    assert!(begun.iter().all(|a| *a == 0.0), "a model begins as it was");
    adapter.lora_a.weight.load(&tensor(&[count, 2], 0.3)).unwrap();
    let indices = [4, 0, 1, 4];
    let y =
        layer.forward(&Var::from_slice(&indices.map(|i| i as i64), &[2, 2], Device::CPU).unwrap()).unwrap();
    let dy = tensor(&[2, 2, width], 0.8);
    y.mul(&Var::new(dy.clone())).unwrap().sum_all().unwrap().backward().unwrap();

    let values = |p: &Parameter| p.tensor().to_vec::<f64>().unwrap();
    let grad = |p: &Parameter| p.grad().unwrap().unwrap().to_vec::<f64>().unwrap();
    let (w, a, b) =
        (values(&layer.table.weight), values(&adapter.lora_a.weight), values(&adapter.lora_b.weight));
    let (mut wanted, mut da, mut db) = (Vec::new(), vec![0.0; count * 2], vec![0.0; width * 2]);
    let dy = dy.to_vec::<f64>().unwrap();
    for (t, i) in indices.into_iter().enumerate() {
        for o in 0..width {
            let more: f64 = (0..2).map(|r| b[o * 2 + r] * a[i * 2 + r]).sum();
            wanted.push(w[i * width + o] + scale * more);
            for r in 0..2 {
                let dy = dy[t * width + o] * scale;
                db[o * 2 + r] += dy * a[i * 2 + r];
                da[i * 2 + r] += if i == 1 { 0.0 } else { dy * b[o * 2 + r] };
            }
        }
    }
    let close = |got: &[f64], wanted: &[f64]| got.iter().zip(wanted).all(|(a, b)| (a - b).abs() < 1e-14);
    assert!(close(&y.to_vec::<f64>().unwrap(), &wanted));
    assert!(close(&grad(&adapter.lora_a.weight), &da) && close(&grad(&adapter.lora_b.weight), &db));
    assert!(layer.table.weight.grad().unwrap().is_none());
}

/// Under the names and in the shapes of PEFT's, whether the head is tied or not, and where the embedding is multiplied.
#[test]
fn they_are_in_pefts_files_and_in_merged_models() {
    let cases = [
        (llama(false), "embed_tokens", "model.embed_tokens"),
        (llama(true), "embed_tokens", "model.embed_tokens"),
        (gpt(), "wte", "transformer.wte"),
        (of(Family::GptNeoX), "embed_in", "gpt_neox.embed_in"),
        (of(Family::Gemma2), "embed_tokens", "model.embed_tokens"),
    ];
    for (config, target, path) in cases {
        let lora = LoraConfig { alpha: 3.0, ..LoraConfig::new(2, &[target]) };
        let (model, folder) = (adapted(&config, &lora), folder("embedding"));
        assert_eq!(adapters(&model).len(), 2);
        save_adapter(&model, &config, &lora, &folder).unwrap();
        let file = SafeTensors::open(folder.join("adapter_model.safetensors")).unwrap();
        let name = |end: &str| format!("base_model.model.{path}.lora_embedding_{end}");
        let width = model.parameters()[0].tensor().shape()[1];
        assert_eq!(file.shape(&name("A")).unwrap(), [2, config.vocabulary()]);
        assert_eq!(file.shape(&name("B")).unwrap(), [width, 2]);
        let again = build(&config, &LoraConfig::read(&folder).unwrap());
        load_adapter(&again, &config, &folder).unwrap();
        let wanted = logits(&model);
        assert_eq!(logits(&again), wanted);
        assert_ne!(logits(&build(&config, &lora)), wanted);
        // The head stays as it was, so that it has a table of its own if it was tied.
        let of_merged = lora.merged_config(&config).unwrap();
        assert_eq!(of_merged.tied_table(), None);
        if config.tied_table().is_some() {
            let said =
                save_tensors(merged(&model, &lora).unwrap(), &config, &folder).unwrap_err().to_string();
            assert!(said.contains("wanted LoraConfig::merged_config"), "{said}");
        }
        save_tensors(merged(&model, &lora).unwrap(), &of_merged, &folder).unwrap();
        assert_eq!(read_config(&folder).unwrap().tied_table(), None);
        let (_, plain) = load_model(&folder, &Scope::new(3, DType::F64, Device::CPU)).unwrap();
        let close = |(a, b): (&f64, &f64)| (a - b).abs() < 1e-12 * (1.0 + b.abs());
        assert!(logits(&plain).iter().zip(&wanted).all(close), "{path}");
        std::fs::remove_dir_all(&folder).unwrap();
    }
    // Other adapters leave a tied head tied, and so does an embedding that is trained as it is.
    let lora = LoraConfig {
        trained: vec!["embed_tokens".into()],
        ..LoraConfig::new(2, &["embed_tokens", "q_proj"])
    };
    for lora in [LoraConfig::new(2, &["q_proj"]), lora] {
        assert_eq!(lora.merged_config(&llama(true)).unwrap(), llama(true));
    }
}

/// Also those of layers that a family's files join.
#[test]
fn biases_of_adapters_are_in_files_and_in_merged_models() {
    let cases = [(gpt(), &["c_attn", "c_fc"][..]), (of(Family::GptNeoX), &["query_key_value", "dense"][..])];
    for (config, targets) in cases {
        let lora = LoraConfig { biased: true, alpha: 3.0, ..LoraConfig::new(2, targets) };
        assert_eq!(lora.to_string().parse::<LoraConfig>().unwrap(), lora);
        let (model, folder) = (adapted(&config, &lora), folder("biased"));
        save_adapter(&model, &config, &lora, &folder).unwrap();
        let file = SafeTensors::open(folder.join("adapter_model.safetensors")).unwrap();
        let biases = || file.names().filter(|name| name.ends_with(".lora_B.bias"));
        assert_eq!(biases().count(), 4);
        for bias in biases() {
            let weight = bias.replace(".bias", ".weight");
            assert_eq!(file.shape(bias).unwrap(), &file.shape(&weight).unwrap()[..1]);
        }
        let read = LoraConfig::read(&folder).unwrap();
        assert_eq!(read, lora);
        let again = build(&config, &read);
        load_adapter(&again, &config, &folder).unwrap();
        std::fs::remove_dir_all(&folder).unwrap();
        let wanted = logits(&model);
        assert_eq!(logits(&again), wanted);
        let plain = config.init(&Scope::new(3, DType::F64, Device::CPU)).unwrap();
        for ((name, tensor), parameter) in merged(&model, &lora).unwrap().iter().zip(plain.parameters()) {
            assert_eq!(name, parameter.name());
            parameter.load(tensor).unwrap();
        }
        let close = |(a, b): (&f64, &f64)| (a - b).abs() < 1e-12 * (1.0 + b.abs());
        assert!(logits(&plain).iter().zip(&wanted).all(close));
        // A bias is scaled as the rest of what an adapter adds.
        let all = model.parameters();
        let of = |name: &str| all.iter().find(|p| p.name().ends_with(name)).unwrap().tensor();
        let layer = if config == gpt() { "h.0.mlp.c_fc" } else { "layers.0.self_attn.o_proj" };
        let [before, more] =
            ["bias", "lora_B.bias"].map(|end| of(&format!("{layer}.{end}")).to_vec::<f64>().unwrap());
        let made = merged(&model, &lora).unwrap();
        let (_, made) = made.iter().find(|(name, _)| *name == format!("{layer}.bias")).unwrap();
        let sums: Vec<f64> = before.iter().zip(&more).map(|(b, m)| b + 1.5 * m).collect();
        assert_eq!(made.to_vec::<f64>().unwrap(), sums);
    }
}

/// A layer without a bias, and a head: forward, backward and files work; nothing can be merged.
#[test]
fn biases_beside_layers_without_one_are_not_merged() {
    let config = llama(false);
    let lora = LoraConfig { biased: true, ..LoraConfig::new(2, &["q_proj", "lm_head"]) };
    let said = lora.check(&config).unwrap_err().to_string();
    assert!(said.contains("layers.0.self_attn.q_proj has no bias into which"), "{said}");
    let model = build(&config, &lora);
    let before = logits(&model);
    for p in adapters(&model).iter().filter(|p| p.name().ends_with(".lora_B.bias")) {
        p.load(&tensor(p.tensor().shape(), 0.5)).unwrap();
    }
    let (after, vocabulary) = (logits(&model), config.vocabulary());
    let of_head = tensor(&[vocabulary], 0.5).to_vec::<f64>().unwrap();
    let only_head = build(&config, &LoraConfig { biased: true, ..LoraConfig::new(2, &["lm_head"]) });
    let bias = adapters(&only_head).into_iter().find(|p| p.name() == "lm_head.lora_B.bias").unwrap();
    bias.load(&tensor(&[vocabulary], 0.5)).unwrap();
    for (i, (got, before)) in logits(&only_head).iter().zip(&before).enumerate() {
        assert!((got - before - lora.scale() * of_head[i % vocabulary]).abs() < 1e-12);
    }
    assert_ne!(before, after);
    let x = model.forward(&tokens()).unwrap();
    model.loss(&x, &tokens(), 1.0).unwrap().backward().unwrap();
    assert!(adapters(&model).iter().all(|p| p.grad().unwrap().is_some()));
    assert!(merged(&model, &lora).unwrap_err().to_string().contains("lora_bias is true, and "));
    let folder = folder("no-bias");
    save_adapter(&model, &config, &lora, &folder).unwrap();
    let again = build(&config, &LoraConfig::read(&folder).unwrap());
    load_adapter(&again, &config, &folder).unwrap();
    assert_eq!(logits(&again), after);
    std::fs::remove_dir_all(&folder).unwrap();
}

#[test]
fn what_embeddings_have_no_adapter_for_is_refused() {
    for (fields, wanted) in [
        (json!({"use_dora": true}), "embed_tokens is an embedding, for whose adapter use_dora is not"),
        (json!({"lora_bias": true}), "embed_tokens is an embedding, for whose adapter lora_bias is not"),
    ] {
        let mut all = json!({"target_modules": ["embed_tokens"]});
        all.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
        let said = read(all).unwrap().check(&llama(false)).unwrap_err().to_string();
        assert!(said.contains(wanted), "{said}");
    }
    for (fields, wanted) in [
        (json!({"lora_bias": true, "use_dora": true}), "lora_bias is true beside use_dora"),
        (json!({"lora_bias": 1}), "lora_bias"),
        (json!({"target_modules": ["wte"], "ensure_weight_tying": true}), "the embedding and the head share"),
    ] {
        let said = read(fields).unwrap_err().to_string();
        assert!(said.contains(wanted), "{said}");
    }
    let said = LoraConfig::new(2, &["wpe"]).check(&gpt()).unwrap_err().to_string();
    assert!(said.contains("is called \"wpe\"; those of this model are c_attn, c_fc, c_proj, wte"), "{said}");
}
