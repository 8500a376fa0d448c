//! Folders of BERT, ViT and ResNet: saved and loaded bits, what is refused, new heads, training and evaluation.

use std::collections::BTreeMap;
use std::path::PathBuf;

use phalanx_autograd::Var;
use phalanx_tensor::io::{SafeTensors, save_safetensors};
use phalanx_tensor::{DType, Device, Tensor};
use serde_json::{Value, json};

use super::fields::numbered_labels;
use super::{Activation, BertConfig, BertInput, BertTask, Pretrained, ResNetConfig, VitConfig};
use crate::{CrossEntropyLoss, LoadOptions, Loss, Module, Parameters, Scope, state_dict};

fn bert(task: BertTask) -> BertConfig {
    BertConfig { types: 3, inner: 20, labels: numbered_labels(4), ..BertConfig::new(task, 37, 12, 2, 2, 16) }
}

fn vit() -> VitConfig {
    VitConfig { qkv_bias: false, channels: 1, dropout: 0.1, ..VitConfig::new([8, 12], [4, 4], 2, 2, 16, 3) }
}

fn resnet(bottleneck: bool) -> ResNetConfig {
    ResNetConfig { halves_first: true, ..ResNetConfig::new(bottleneck, 8, &[(8, 1), (16, 2)], 3) }
}

fn scope(seed: u64, dtype: DType) -> Scope {
    Scope::new(seed, dtype, Device::CPU)
}

/// A folder that is removed at the end.
struct Scratch(PathBuf);

impl Scratch {
    fn new(name: &str) -> Scratch {
        Scratch(std::env::temp_dir().join(format!("phalanx-pretrained-{name}-{}", std::process::id())))
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn bits(model: &impl Parameters) -> Vec<(String, Vec<u8>)> {
    state_dict(model).into_iter().map(|(name, tensor)| (name, tensor.to_bytes().unwrap())).collect()
}

fn comes_back<C: Pretrained + PartialEq + std::fmt::Debug>(name: &str, config: C) {
    let folder = Scratch::new(name);
    for dtype in [DType::F32, DType::BF16] {
        let model = config.init(&scope(1, dtype)).unwrap();
        config.save(&model, &folder.0).unwrap();
        let (read, loaded) = C::load(&folder.0, &scope(9, dtype)).unwrap();
        assert_eq!(read, config);
        assert_ne!(bits(&config.init(&scope(9, dtype)).unwrap()), bits(&model));
        assert_eq!(bits(&loaded), bits(&model), "{name} {dtype}");
        assert!(!C::mode(&loaded).is_training() && C::mode(&model).is_training());
    }
    let planned = C::load(&folder.0, &Scope::new(1, DType::F32, Device::Meta(0))).unwrap().1;
    assert_eq!(state_dict(&planned).len(), bits(&config.init(&scope(1, DType::F32)).unwrap()).len());
}

#[test]
fn saved_models_load_back_to_the_same_bits() {
    let words = bert(BertTask::MaskedLm);
    comes_back("untied", BertConfig { tied: false, padding: None, ..words.clone() });
    comes_back("words", words);
    let labels = ["yes", "no"].map(String::from).to_vec();
    let activation = Activation::Relu;
    comes_back("texts", BertConfig { labels, activation, ..bert(BertTask::Classification) });
    comes_back("patches", vit());
    comes_back("basic", resnet(false));
    comes_back("bottleneck", ResNetConfig { halves_early: true, ..resnet(true) });
}

#[test]
fn files_have_queries_keys_and_values_apart() {
    let folder = Scratch::new("apart");
    let config = vit();
    let model = config.init(&scope(1, DType::F32)).unwrap();
    config.save(&model, &folder.0).unwrap();
    let file = SafeTensors::open(folder.0.join("model.safetensors")).unwrap();
    let (_, joint) = state_dict(&model)
        .into_iter()
        .find(|(name, _)| name == "encoder.layer.1.self_attn.in_proj_weight")
        .unwrap();
    for (i, part) in ["query", "key", "value"].into_iter().enumerate() {
        let name = format!("vit.encoder.layer.1.attention.attention.{part}.weight");
        let stored = file.tensor(&name, Device::CPU).unwrap();
        let rows = joint.narrow(0, 16 * i, 16).unwrap();
        assert_eq!(stored.to_bytes().unwrap(), rows.to_bytes().unwrap(), "{part}");
        assert!(!file.contains(&name.replace("weight", "bias")), "qkv_bias is false");
    }
}

#[test]
fn settings_that_are_not_supported_are_refused_by_name() {
    fn with<C: Pretrained + std::fmt::Debug>(config: &C, name: &str, value: Value) -> String {
        let mut json = config.to_json(DType::F32);
        json[name] = value;
        C::from_json(json.as_object().unwrap()).unwrap_err()
    }
    let words = bert(BertTask::MaskedLm);
    for (name, value) in [
        ("model_type", json!("roberta")),
        ("architectures", json!(["BertForTokenClassification"])),
        ("architectures", json!(null)),
        ("position_embedding_type", json!("relative_key")),
        ("is_decoder", json!(true)),
        ("hidden_act", json!("laplace")),
        ("hidden_size", json!(-1)),
        ("embedding_size", json!(128)),
        ("type_vocab_size", json!("two")),
    ] {
        let message = with(&words, name, value);
        assert!(message.contains(name), "{name}: {message}");
    }
    assert!(with(&words, "num_hidden_layers", json!(0)).contains("layers is 0"));
    assert!(with(&words, "hidden_dropout_prob", json!(2)).contains("dropout is 2"));
    assert!(with(&words, "id2label", json!({"1": "a"})).contains("id2label has no name for 0"));
    assert!(with(&words, "num_labels", json!(1u64 << 40)).contains("num_labels"));
    assert!(with(&vit(), "image_size", json!([8, 8, 8])).contains("image_size"));
    assert!(with(&vit(), "patch_size", json!(100)).contains("no patch of [100, 100]"));
    assert!(with(&vit(), "patch_size", json!(0)).contains("patch height is 0"));
    assert!(with(&vit(), "mask_ratio", json!(0.5)).contains("mask_ratio"));
    assert!(with(&resnet(true), "layer_type", json!("wide")).contains("layer_type \"wide\""));
    assert!(with(&resnet(true), "depths", json!([1])).contains("hidden_sizes has 2 entries and depths 1"));
    assert!(with(&resnet(true), "hidden_sizes", json!([3, 8])).contains("hidden_sizes is 0"));
    assert!(with(&resnet(true), "depths", json!([1, 1u64 << 60])).contains("depths has more than"));
    let none = VitConfig { heads: 3, ..vit() };
    assert!(none.init(&scope(1, DType::F32)).err().unwrap().to_string().contains("3 heads of a width of 16"));
}

#[test]
fn weights_that_do_not_fit_are_refused_by_the_files_names() {
    let folder = Scratch::new("misfit");
    let config = vit();
    config.save(&config.init(&scope(1, DType::F32)).unwrap(), &folder.0).unwrap();
    let wider = VitConfig { layers: 3, labels: numbered_labels(5), ..config };
    let model = wider.init(&scope(2, DType::F32)).unwrap();
    let before = bits(&model);
    let message = wider.load_into(&model, &folder.0, LoadOptions::default()).unwrap_err().to_string();
    assert!(message.contains("missing: vit.encoder.layer.2.attention.attention.query.weight"), "{message}");
    assert!(message.contains("classifier.weight (got [3, 16], wanted [5, 16])"), "{message}");
    assert_eq!(bits(&model), before);
    // A config that asks for far more than the weights is refused before the model is allocated.
    let mut json = wider.to_json(DType::F32);
    json["hidden_size"] = json!(1u64 << 40);
    std::fs::write(folder.0.join("config.json"), json.to_string()).unwrap();
    let message = VitConfig::load(&folder.0, &scope(1, DType::F32)).err().unwrap().to_string();
    assert!(message.contains("the weights beside it"), "{message}");
    let message = ResNetConfig::read(&folder.0).unwrap_err().to_string();
    assert!(message.contains("config.json") && message.contains("model_type \"vit\""), "{message}");
}

#[test]
fn inputs_that_do_not_fit_are_refused() {
    let model = bert(BertTask::MaskedLm).init(&scope(1, DType::F32)).unwrap();
    let long = Var::new(Tensor::zeros(&[1, 13], DType::I64, Device::CPU).unwrap());
    let message = model.forward(&long).unwrap_err().to_string();
    assert!(message.contains("[1, 13]") && message.contains("up to 12"), "{message}");
    let (tokens, mask) = (long.narrow(1, 0, 12).unwrap(), long.narrow(1, 0, 11).unwrap());
    let input = BertInput { tokens: &tokens, types: None, visible: Some(&mask) };
    assert!(model.logits(input).unwrap_err().to_string().contains("[1, 11]"));
    let image = |shape: &[usize]| Var::new(Tensor::zeros(shape, DType::F32, Device::CPU).unwrap());
    let model = vit().init(&scope(1, DType::F32)).unwrap();
    for shape in [&[1, 1, 8, 8][..], &[1, 3, 8, 12], &[1, 8, 12]] {
        let message = model.forward(&image(shape)).unwrap_err().to_string();
        assert!(message.contains(&format!("{shape:?}")) && message.contains("[1, 8, 12]"), "{message}");
    }
    let message = resnet(false).init(&scope(1, DType::F32)).unwrap().forward(&image(&[1, 4, 32, 32]));
    assert!(message.unwrap_err().to_string().contains("[1, 4, 32, 32]"));
}

#[test]
fn a_new_head_comes_on_a_pretrained_encoder() {
    let folder = Scratch::new("head");
    let words = bert(BertTask::MaskedLm);
    let first = words.init(&scope(1, DType::F32)).unwrap();
    words.save(&first, &folder.0).unwrap();
    let config = BertConfig { task: BertTask::Classification, ..BertConfig::read(&folder.0).unwrap() };
    let model = config.init(&scope(2, DType::F32)).unwrap();
    let message = config.load_into(&model, &folder.0, LoadOptions::default()).unwrap_err().to_string();
    assert!(message.contains("classifier.weight") && message.contains("cls.predictions"), "{message}");
    let left = config.load_into(&model, &folder.0, LoadOptions { strict: false }).unwrap();
    assert_eq!(
        left.missing,
        ["bert.pooler.dense.weight", "bert.pooler.dense.bias", "classifier.weight", "classifier.bias"]
    );
    assert!(left.unexpected.len() == 5 && left.unexpected.iter().all(|name| name.starts_with("cls.")));
    let (loaded, from) = (bits(&model), bits(&first));
    let is_head = |name: &str| ["pooler.", "classifier."].iter().any(|head| name.starts_with(head));
    assert!(loaded.iter().filter(|(name, _)| !is_head(name)).all(|tensor| from.contains(tensor)));
}

/// Files of pretraining have more heads, and old ones other names of norms.
#[test]
fn files_of_older_versions_are_read() {
    let folder = Scratch::new("old");
    let config = BertConfig { labels: numbered_labels(2), ..bert(BertTask::MaskedLm) };
    let model = config.init(&scope(1, DType::F32)).unwrap();
    config.save(&model, &folder.0).unwrap();
    let path = folder.0.join("model.safetensors");
    let file = SafeTensors::open(&path).unwrap();
    let old = |name: &str| {
        let name = name.replace("LayerNorm.weight", "LayerNorm.gamma");
        name.replace("LayerNorm.bias", "LayerNorm.beta")
    };
    let mut tensors: Vec<(String, Tensor)> =
        file.names().map(|name| (old(name), file.tensor(name, Device::CPU).unwrap())).collect();
    let more = Tensor::zeros(&[2], DType::F32, Device::CPU).unwrap();
    for name in ["bert.pooler.dense.bias", "cls.seq_relationship.bias", "cls.predictions.decoder.bias"] {
        tensors.push((name.into(), more.clone()));
    }
    let write = |tensors: &[(String, Tensor)]| {
        let named = tensors.iter().map(|(name, tensor)| (name.as_str(), tensor));
        save_safetensors(&path, named, &BTreeMap::new()).unwrap();
    };
    write(&tensors);
    let (_, loaded) = BertConfig::load(&folder.0, &scope(2, DType::F32)).unwrap();
    assert_eq!(bits(&loaded), bits(&model));
    tensors.push(("bert.encoder.layer.2.output.LayerNorm.gamma".into(), more));
    write(&tensors);
    let message = BertConfig::load(&folder.0, &scope(2, DType::F32)).err().unwrap().to_string();
    assert!(message.contains("unexpected: bert.encoder.layer.2.output.LayerNorm.gamma"), "{message}");
}

#[test]
fn each_dropout_of_the_config_acts_in_training_alone() {
    let none = BertConfig { dropout: 0.0, attention_dropout: 0.0, ..bert(BertTask::Classification) };
    let tokens = Var::from_slice(&[3i64, 4, 5, 6, 7, 8], &[2, 3], Device::CPU).unwrap();
    let logits = |config: &BertConfig, train: bool| {
        let model = config.init(&scope(1, DType::F32)).unwrap();
        if !train {
            model.eval();
        }
        model.forward(&tokens).unwrap().to_vec::<f32>().unwrap()
    };
    let plain = logits(&none, false);
    assert_eq!(logits(&none, true), plain);
    for (config, what) in [
        (BertConfig { dropout: 0.5, classifier_dropout: Some(0.0), ..none.clone() }, "of branches"),
        (BertConfig { attention_dropout: 0.5, ..none.clone() }, "of probabilities"),
        (BertConfig { classifier_dropout: Some(0.5), ..none.clone() }, "before the classifier"),
    ] {
        assert_ne!(logits(&config, true), plain, "{what}");
        assert_eq!(logits(&config, false), plain, "{what}");
    }
}

#[test]
fn running_statistics_move_in_training_alone() {
    let model = resnet(true).init(&scope(1, DType::F32)).unwrap();
    let pixels: Vec<f32> = (0..2 * 3 * 32 * 32).map(|i| (i % 17) as f32 / 8.0 - 1.0).collect();
    let images = Var::from_slice(&pixels, &[2, 3, 32, 32], Device::CPU).unwrap();
    let before = bits(&model);
    model.eval();
    model.forward(&images).unwrap();
    assert_eq!(bits(&model), before);
    model.train();
    model.forward(&images).unwrap();
    let after = bits(&model);
    let moved: Vec<&str> =
        before.iter().zip(&after).filter(|(a, b)| a != b).map(|((name, _), _)| name.as_str()).collect();
    let buffers = ["running_mean", "running_var", "num_batches_tracked"];
    assert!(moved.len() == 3 * 12 && moved.iter().all(|name| buffers.iter().any(|b| name.ends_with(b))));
}

/// The embedding's row of padding gets no gradient; a tied head's part of it stays.
#[test]
fn padding_is_not_trained_and_not_seen() {
    for task in [BertTask::Classification, BertTask::MaskedLm] {
        let config = bert(task);
        let model = config.init(&scope(1, DType::F64)).unwrap();
        model.eval();
        let tokens = Var::from_slice(&[3i64, 4, 0, 5, 6, 7], &[2, 3], Device::CPU).unwrap();
        let visible = Var::from_slice(&[1i64, 1, 0, 1, 1, 1], &[2, 3], Device::CPU).unwrap();
        let logits =
            |tokens: &Var| model.logits(BertInput { tokens, types: None, visible: Some(&visible) }).unwrap();
        let other = Var::from_slice(&[3i64, 4, 9, 5, 6, 7], &[2, 3], Device::CPU).unwrap();
        let first = |logits: Var| logits.narrow(0, 0, 1).unwrap().narrow(1, 0, 2).unwrap();
        let seen = [&tokens, &other].map(|tokens| first(logits(tokens)).contiguous().unwrap());
        assert_eq!(seen[0].to_vec::<f64>().unwrap(), seen[1].to_vec::<f64>().unwrap());
        let y = model.forward(&tokens).unwrap();
        let targets = vec![1i64; y.numel() / y.shape()[y.rank() - 1]];
        let targets = Var::from_slice(&targets, &y.shape()[..y.rank() - 1], Device::CPU).unwrap();
        CrossEntropyLoss::default().classes_last().forward(&y, &targets).unwrap().backward().unwrap();
        let table = model.parameters().into_iter().find(|p| p.name().contains("word_embeddings")).unwrap();
        let grad = table.finish_grad().unwrap().unwrap().to_vec::<f64>().unwrap();
        assert_eq!(grad[..16].iter().all(|g| *g == 0.0), task == BertTask::Classification);
        assert!(grad[3 * 16..4 * 16].iter().any(|g| *g != 0.0));
    }
}
