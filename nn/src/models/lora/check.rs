//! What of a [`LoraConfig`] a model has no place for.

use std::collections::BTreeSet;

use phalanx_tensor::{DType, Device};

use super::files::{check_biases, check_places};
use super::modules::{Layer, Modules};
use super::{EMBEDDING_B, HEAD, Lora, LoraConfig, adapters, is_adapter, wrong};
use crate::models::{Decoder, DecoderStage, ModelConfig};
use crate::{Error, Parameter, Parameters, Result, Scope};

impl LoraConfig {
    /// Refuses targets that are not the names of linear layers of the model, modules that it does not have, and what has no place in PEFT's
    /// files.
    ///
    /// # Errors
    /// If there is one of these, or the model's sizes do not fit each other.
    pub fn check(&self, config: &ModelConfig) -> Result<()> {
        let config = &self.model_config(config)?;
        let everywhere = LoraConfig {
            excluded: Modules::default(),
            blocks: Vec::new(),
            blocks_after: Vec::new(),
            ..self.clone()
        };
        let model = everywhere.planned(config)?;
        let path = |p: &Parameter| {
            let ends = [".lora_B.weight", EMBEDDING_B];
            ends.into_iter().find_map(|end| p.name().strip_suffix(end)).map(String::from)
        };
        let layers: Vec<Layer> =
            adapters(&model).iter().filter_map(path).map(|path| model.layers().layer(&path)).collect();
        if let Modules::Names(names) = &self.targets {
            let is_unused = |name: &&String| !layers.iter().any(|layer| layer.is_called(name));
            if let Some(name) = names.iter().find(is_unused) {
                return Err(no_layer(&format!("{name:?}"), &model.parameters()));
            }
        }
        let is_unused =
            |name: &&String| !layers.iter().any(|layer| layer.has_weight(std::slice::from_ref(name)));
        if let Some(name) = self.weights.iter().find(is_unused) {
            let has = "this model has no such weight of a linear layer, of a gate or of all experts";
            return Err(wrong(format!("target_parameters has {name:?}, and {has}")));
        }
        self.check_trained_modules(config, &model)?;
        let model = self.planned(config)?;
        check_biases(&model.parameters())?;
        check_places(config, &model.parameters())
    }

    /// Refuses names that no module has.
    fn check_trained_modules(&self, config: &ModelConfig, model: &Decoder<Lora>) -> Result<()> {
        let all = model.parameters();
        let has = |module: &String| {
            all.iter().any(|p| model.layers().is_of(p.name(), std::slice::from_ref(module)))
        };
        let table = config.tied_table().filter(|table| model.layers().is_of(table, &self.trained));
        let is_head = |module: &&String| table.is_some() && HEAD.ends_with(&***module);
        if let Some(module) = self.trained.iter().find(|module| !has(module) && !is_head(module)) {
            let why = match config.tied_table() {
                Some(table) if HEAD.ends_with(&**module) => {
                    format!("the head is tied to {table}, wanted that too or ensure_weight_tying = false")
                }
                _ => {
                    let last = |p: &Parameter| p.name().rsplit('.').nth(1).map(String::from);
                    let plain = all.iter().filter(|p| !is_adapter(p.name()));
                    let names: Vec<String> =
                        plain.filter_map(last).collect::<BTreeSet<_>>().into_iter().collect();
                    format!(
                        "this model has no such module; the names of those it has end with {}",
                        names.join(", ")
                    )
                }
            };
            return Err(wrong(format!("modules_to_save has {module:?}, and {why}")));
        }
        Ok(())
    }

    /// The whole model on a `meta` device.
    fn planned(&self, config: &ModelConfig) -> Result<Decoder<Lora>> {
        let scope = Scope::new(0, DType::F32, Device::Meta(0));
        config.init_stage(&self.layers()?, &scope, DecoderStage::whole(config.layers()))
    }
}

/// The error for a target that is not the name of a linear layer, nor of the embedding.
pub(super) fn no_layer(target: &str, parameters: &[Parameter]) -> Error {
    let is_number = |part: &str| part.bytes().all(|byte| byte.is_ascii_digit());
    let embedding = parameters.first().map(|p| p.name().to_string());
    let name = |p: &Parameter| {
        let layer = p.name().strip_suffix(".weight")?;
        let is_linear =
            layer.split('.').any(is_number) || layer == HEAD || embedding.as_deref() == Some(p.name());
        let is_linear = is_linear && p.tensor().rank() == 2 && !is_adapter(p.name());
        Some(layer.rsplit('.').next()?.to_string()).filter(|_| is_linear)
    };
    let names: BTreeSet<String> = parameters.iter().filter_map(name).collect();
    let names = names.into_iter().collect::<Vec<_>>().join(", ");
    wrong(format!("no linear layer or embedding is called {target}; those of this model are {names}"))
}
