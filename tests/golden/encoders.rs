//! BERT, ViT and ResNet: their folders, logits, losses and gradients.

use std::path::Path;

use phalanx::nn::models::{Bert, BertConfig, BertInput, Pretrained, ResNetConfig, VitConfig};
use phalanx::nn::{CrossEntropyLoss, Loss, Module, Scope};
use phalanx::tensor::io::SafeTensors;
use phalanx::{DType, Device, Tensor, Var};

use crate::Outcome;
use crate::case::compare;
use crate::models::{check_gradients, gradients, same_folder};

/// A family, and what its models get from a case.
pub trait Family: Pretrained + PartialEq {
    fn logits(model: &Self::Model, input: &dyn Fn(&str) -> Result<Var, String>) -> Result<Var, String>;
}

impl Family for BertConfig {
    fn logits(model: &Bert, input: &dyn Fn(&str) -> Result<Var, String>) -> Result<Var, String> {
        let (tokens, visible) = (input("input_ids")?, input("attention_mask")?);
        let types = input("token_type_ids").ok();
        let input = BertInput { tokens: &tokens, types: types.as_ref(), visible: Some(&visible) };
        model.logits(input).map_err(|e| e.to_string())
    }
}

impl Family for VitConfig {
    fn logits(model: &Self::Model, input: &dyn Fn(&str) -> Result<Var, String>) -> Result<Var, String> {
        model.forward(&input("pixel_values")?).map_err(|e| e.to_string())
    }
}

impl Family for ResNetConfig {
    fn logits(model: &Self::Model, input: &dyn Fn(&str) -> Result<Var, String>) -> Result<Var, String> {
        model.forward(&input("pixel_values")?).map_err(|e| e.to_string())
    }
}

/// Runs a folder's case.
pub fn run<C: Family>(folder: &Path, device: Device, saved: &Path) -> Outcome {
    match C::read(folder) {
        Ok(_) => check::<C>(folder, device, saved).map_or_else(Outcome::Failed, |()| Outcome::Passed),
        Err(error) => Outcome::Unsupported(error.to_string()),
    }
}

fn check<C: Family>(folder: &Path, device: Device, saved: &Path) -> Result<(), String> {
    let text = |error: &dyn std::fmt::Display| error.to_string();
    let io = SafeTensors::open(folder.join("io.safetensors")).map_err(|e| text(&e))?;
    let stored = |name: &str| io.tensor(name, device).map_err(|e| e.to_string());
    let (config, model) = C::load(folder, &Scope::new(1, DType::F32, device)).map_err(|e| text(&e))?;
    let logits = C::logits(&model, &|name| Ok(Var::new(stored(name)?)))?;
    compare("logits", logits.tensor(), &stored("logits")?, 1e-4, 1e-5)?;
    let loss = CrossEntropyLoss::default().classes_last();
    let loss = loss.forward(&logits, &Var::new(stored("labels")?)).map_err(|e| text(&e))?;
    compare("loss", loss.tensor(), &stored("loss")?, 1e-4, 1e-5)?;
    loss.backward().map_err(|e| text(&e))?;
    let grads: Vec<(String, Tensor)> = config.file_tensors(gradients(&model)?).map_err(|e| text(&e))?;
    check_gradients(&io, device, &grads, |name| vec![in_file(name)])?;
    config.save(&model, saved).map_err(|e| text(&e))?;
    let same_config = C::read(saved).map_err(|e| text(&e))? == config;
    same_folder(folder, saved, same_config)
}

/// What files call a parameter of transformers: ViT's have other names.
fn in_file(name: &str) -> String {
    let parts = [
        ("vit.layers.", "vit.encoder.layer."),
        (".q_proj.", ".attention.query."),
        (".k_proj.", ".attention.key."),
        (".v_proj.", ".attention.value."),
        (".o_proj.", ".output.dense."),
        (".mlp.fc1.", ".intermediate.dense."),
        (".mlp.fc2.", ".output.dense."),
    ];
    match name.starts_with("vit.") {
        true => parts.iter().fold(name.to_string(), |name, (model, file)| name.replace(model, file)),
        false => name.to_string(),
    }
}
