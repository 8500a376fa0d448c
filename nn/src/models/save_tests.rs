//! Folders of several files, and copies of folders in other dtypes.

use std::path::{Path, PathBuf};

use phalanx_kernels as kernels;
use phalanx_tensor::io::SafeTensors;
use phalanx_tensor::{DType, Device, Tensor};

use super::tests::{all, build};
use super::*;
use crate::{Parameters, Scope};

struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Folder {
        let folder = std::env::temp_dir().join(format!("phalanx-save-{name}-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&folder);
        Folder(folder)
    }

    /// Its files, sorted.
    fn names(&self) -> Vec<String> {
        let entries = std::fs::read_dir(&self.0).unwrap();
        let mut names: Vec<String> =
            entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn tensors(model: &Decoder) -> Vec<(String, Tensor)> {
    model.parameters().iter().map(|p| (p.name().into(), p.tensor())).collect()
}

fn assert_same(folder: &Path, dtype: DType, wanted: &[(String, Tensor)]) {
    let (_, model) = load_model(folder, &Scope::new(99, dtype, Device::CPU)).unwrap();
    for ((name, wanted), (other, got)) in wanted.iter().zip(tensors(&model)) {
        let wanted = kernels::cast(wanted, dtype).unwrap();
        assert!(*name == other && got.to_bytes().unwrap() == wanted.to_bytes().unwrap(), "{name}");
    }
}

#[test]
fn folders_of_several_files_load_back_to_the_same_bits() {
    for config in all(0.0) {
        let (folder, wanted) = (Folder::new("shards"), tensors(&build(&config, DType::F32, Device::CPU)));
        let options = SaveOptions { dtype: None, shard_bytes: 8000 };
        save_from(&wanted[..], &config, &folder.0, &options).unwrap();
        let names = folder.names();
        assert!(names.len() > 4 && names.contains(&"model.safetensors.index.json".into()), "{names:?}");
        for name in names.iter().filter(|name| name.ends_with(".safetensors")) {
            let file = SafeTensors::open(folder.0.join(name)).unwrap();
            let bytes = |name: &str| 4 * file.shape(name).unwrap().iter().product::<usize>();
            assert!(file.names().len() == 1 || file.names().map(bytes).sum::<usize>() <= 8000, "{name}");
        }
        assert_same(&folder.0, DType::F32, &wanted);
        // The index has the size of all, and no file of a former save is left.
        let index = std::fs::read_to_string(folder.0.join("model.safetensors.index.json")).unwrap();
        let index: serde_json::Value = serde_json::from_str(&index).unwrap();
        let sum: usize = wanted.iter().map(|(_, tensor)| 4 * tensor.numel()).sum();
        assert_eq!(index["metadata"]["total_size"], sum);
        save_from(&wanted[..], &config, &folder.0, &SaveOptions { shard_bytes: 16_000, ..options }).unwrap();
        assert!(folder.names().len() < names.len());
        assert_same(&folder.0, DType::F32, &wanted);
        save_from(&wanted[..], &config, &folder.0, &SaveOptions::default()).unwrap();
        assert_eq!(folder.names(), ["config.json", "model.safetensors"]);
        save_from(&wanted[..], &config, &folder.0, &options).unwrap();
        assert_eq!(folder.names(), names);
    }
}

#[test]
fn a_folder_is_converted_without_a_change_but_the_dtype() {
    for config in all(0.0) {
        let [from, to, back] = ["from", "to", "back"].map(Folder::new);
        let wanted = tensors(&build(&config, DType::F32, Device::CPU));
        save_from(&wanted[..], &config, &from.0, &SaveOptions { dtype: None, shard_bytes: 8000 }).unwrap();
        std::fs::write(from.0.join("tokenizer.json"), "{}").unwrap();
        std::fs::write(from.0.join("pytorch_model.bin"), "others' weights").unwrap();
        let text = std::fs::read_to_string(from.0.join("config.json")).unwrap();
        let half = SaveOptions { dtype: Some(DType::BF16), ..SaveOptions::default() };
        convert_folder(&from.0, &to.0, &half).unwrap();
        assert_eq!(to.names(), ["config.json", "model.safetensors", "tokenizer.json"]);
        let file = SafeTensors::open(to.0.join("model.safetensors")).unwrap();
        assert!(file.names().all(|name| file.dtype(name).unwrap() == DType::BF16));
        let converted = std::fs::read_to_string(to.0.join("config.json")).unwrap();
        assert_ne!(converted, text);
        assert_eq!(converted.replace("bfloat16", "float32"), text);
        assert_same(&to.0, DType::BF16, &wanted);
        // And from it, as from a save in that dtype.
        let rounded: Vec<(String, Tensor)> =
            wanted.iter().map(|(name, t)| (name.clone(), kernels::cast(t, DType::BF16).unwrap())).collect();
        save_from(&rounded[..], &config, &back.0, &SaveOptions::default()).unwrap();
        let weights = |folder: &Folder| std::fs::read(folder.0.join("model.safetensors")).unwrap();
        assert!(weights(&to) == weights(&back));
    }
}

#[test]
fn what_cannot_be_written_is_refused() {
    let (folder, other) = (Folder::new("refused"), Folder::new("refused-to"));
    let config = all(0.0).remove(0);
    let model = tensors(&build(&config, DType::F32, Device::CPU));
    let integers = SaveOptions { dtype: Some(DType::I64), ..SaveOptions::default() };
    let refused = |done: crate::Result<()>, why: &str| {
        let error = done.unwrap_err().to_string();
        assert!(error.contains(why), "{error}");
    };
    refused(save_from(&model[..], &config, &folder.0, &integers), "wanted a floating-point one");
    save_from(&model[..], &config, &folder.0, &SaveOptions::default()).unwrap();
    refused(convert_folder(&folder.0, &folder.0, &SaveOptions::default()), "wanted two folders");
    refused(convert_folder(&folder.0, &other.0, &integers), "wanted a floating-point one");
    refused(convert_folder(&other.0, &folder.0, &SaveOptions::default()), "config.json");
    assert_same(&folder.0, DType::F32, &model);
}

#[test]
fn a_trained_model_keeps_what_the_config_of_the_first_one_says() {
    let (from, to) = (Folder::new("kept-from"), Folder::new("kept-to"));
    let config = ModelConfig::Llama(LlamaConfig::new(50, 16, 2, 2, 8));
    let write = |folder: &Path, config: &ModelConfig, more: serde_json::Value| {
        std::fs::create_dir_all(folder).unwrap();
        let mut json = config.to_json(DType::F32);
        for (name, value) in more.as_object().unwrap() {
            json[name] = value.clone();
        }
        std::fs::write(folder.join("config.json"), json.to_string()).unwrap();
    };
    let read = || -> serde_json::Value {
        serde_json::from_slice(&std::fs::read(to.0.join("config.json")).unwrap()).unwrap()
    };
    let said = serde_json::json!({"bos_token_id": 1, "eos_token_id": [2, 3], "hidden_act": "swish", "dtype": null,
        "torch_dtype": "bfloat16", "max_length": 20});
    write(&from.0, &config, said.clone());
    write(&to.0, &config, serde_json::json!({}));
    keep_settings(&from.0, &to.0).unwrap();
    let kept = read();
    let named = ["bos_token_id", "hidden_act", "dtype", "max_length"].map(|name| kept[name].to_string());
    assert_eq!(named, ["1", "\"swish\"", "\"float32\"", "20"]);
    assert!(kept.get("torch_dtype").is_none());
    assert_eq!(read_config(&to.0).unwrap(), config);

    // Files without a dtype are no mistake.
    write(&from.0, &config, serde_json::json!({"eos_token_id": 9}));
    let mut json = config.to_json(DType::F32);
    json.as_object_mut().unwrap().remove("dtype");
    std::fs::write(to.0.join("config.json"), json.to_string()).unwrap();
    keep_settings(&from.0, &to.0).unwrap();
    assert_eq!((read()["eos_token_id"].as_u64(), read().get("dtype").cloned()), (Some(9), None));

    // Another dropout is another model: what this one says goes before.
    let mut other = config.clone();
    other.set_dropout(0.25);
    write(&from.0, &config, said);
    write(&to.0, &other, serde_json::json!({}));
    keep_settings(&from.0, &to.0).unwrap();
    let kept = read();
    assert_eq!((kept["attention_dropout"].as_f64(), kept["bos_token_id"].as_u64()), (Some(0.25), Some(1)));
    assert_eq!(read_config(&to.0).unwrap(), other);
}
