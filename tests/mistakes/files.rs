//! Files that are damaged, missing or hold something else.

use std::collections::BTreeMap;
use std::path::PathBuf;

use phalanx::nn::models::{ModelConfig, load_model};
use phalanx::tensor::io::{
    SafeTensors, load_npy, load_npy_as, read_npy, save_npy, save_safetensors, write_npy,
};
use phalanx::{DType, Device, Tensor};

use crate::{Mistake, mistakes, scope, zeros};

/// A file of these bytes.
fn file(name: &str, bytes: &[u8]) -> PathBuf {
    let folder = std::env::temp_dir().join(format!("phalanx-mistakes-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let path = folder.join(name);
    std::fs::write(&path, bytes).unwrap();
    path
}

/// A safetensors file with this header and as many bytes of data.
fn safetensors(name: &str, header: &str, data: usize) -> PathBuf {
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header.as_bytes());
    bytes.resize(bytes.len() + data, 0);
    file(name, &bytes)
}

/// The bytes of an npy file of zeros.
fn npy(shape: &[usize]) -> Vec<u8> {
    let mut bytes = Vec::new();
    write_npy(&mut bytes, &zeros(shape, DType::F32)).unwrap();
    bytes
}

fn saved() -> SafeTensors {
    SafeTensors::open(safetensors("good", r#"{"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}"#, 8))
        .unwrap()
}

fn config(text: &str) -> phalanx::nn::Result<ModelConfig> {
    ModelConfig::parse(text, &PathBuf::from("config.json"))
}

fn npy_of(change: impl Fn(&mut Vec<u8>)) -> phalanx::tensor::Result<Tensor> {
    let mut bytes = npy(&[2, 3]);
    change(&mut bytes);
    read_npy(&bytes, Device::CPU)
}

pub fn mistakes() -> Vec<Mistake> {
    mistakes! {
        "/no/such/file" => SafeTensors::open("/no/such/file").map(drop);
        "/no/such/file" => load_npy("/no/such/file", Device::CPU);
        "/ | too few for a header" => SafeTensors::open(file("short", b"abc")).map(drop);
        "/ | header of 18446744073709551615 bytes" => SafeTensors::open(file("huge", &[255; 16])).map(drop);
        "/ | header of 100 bytes" => SafeTensors::open(file("cut", &[100, 0, 0, 0, 0, 0, 0, 0, b'{'])).map(drop);
        "/ | not JSON" => SafeTensors::open(safetensors("garbage", "garbage!", 0)).map(drop);
        "/ | \"w\" | dtype" => SafeTensors::open(safetensors("no", r#"{"w":{"shape":[2]}}"#, 8)).map(drop);
        "/ | \"w\" | 8 bytes | [3]" => {
            SafeTensors::open(safetensors("size", r#"{"w":{"dtype":"F32","shape":[3],"data_offsets":[0,8]}}"#, 8)).map(drop)
        };
        "/ | \"w\" | [0, 8]" => {
            SafeTensors::open(safetensors("end", r#"{"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}"#, 4)).map(drop)
        };
        "/ | 8 of 12 bytes" => {
            SafeTensors::open(safetensors("rest", r#"{"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}"#, 12)).map(drop)
        };
        "/ | \"v\"" => saved().tensor("v", Device::CPU);
        "/ | F7 | supported" => {
            let header = r#"{"w":{"dtype":"F7","shape":[2],"data_offsets":[0,8]}}"#;
            SafeTensors::open(safetensors("dtype", header, 8)).unwrap().tensor("w", Device::CPU)
        };
        "/ | \"w\" is taken" => {
            let w = zeros(&[2], DType::F32);
            save_safetensors(file("twice", b""), [("w", &w), ("w", &w)], &BTreeMap::new())
        };
        "/ | meta" => {
            let w = Tensor::zeros(&[2], DType::F32, Device::Meta(0)).unwrap();
            save_safetensors(file("meta", b""), [("w", &w)], &BTreeMap::new())
        };
        "/no/such/folder" => save_safetensors("/no/such/folder/x", [("w", &zeros(&[2], DType::F32))], &BTreeMap::new());
        "/ | holds dtype f32, wanted i64" => load_npy_as(file("f32.npy", &npy(&[2])), DType::I64, Device::CPU);
        "save_npy: | bf16 | all but bf16" => save_npy(file("bf16.npy", b""), &zeros(&[2], DType::BF16));
        "read_npy: | NUMPY" => read_npy(b"garbage", Device::CPU);
        "read_npy: | inside the header" => npy_of(|bytes| bytes.truncate(20));
        "read_npy: | 20 bytes of data | [2, 3]" => npy_of(|bytes| bytes.truncate(bytes.len() - 4));
        "read_npy: | version 9" => npy_of(|bytes| bytes[6] = 9);
        "read_npy: | header" => npy_of(|bytes| bytes[11] = b'!');
        "config.json: | JSON" => config("{");
        "config.json: | wanted gpt2, llama | bert, vit and resnet" => config(r#"{"model_type": "bert"}"#);
        "config.json: " => config(r#"{"model_type": "gpt2", "n_head": 5, "n_embd": 7}"#);
        "/no/such/folder" => load_model("/no/such/folder", &scope());
    }
}
