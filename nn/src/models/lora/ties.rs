//! Where a model ties its head to the embedding: which tables it has beside adapters, and with what they add.

use super::modules::{Layer, in_model, is_within};
use super::{HEAD, LoraConfig, wrong};
use crate::Result;
use crate::models::ModelConfig;
use crate::models::fields::Parsed;
use crate::models::stored::Layout;

impl LoraConfig {
    /// Whether a head that is tied to the embedding has a table of its own: if one of them is trained apart from the other, or the head has an
    /// adapter.
    pub(super) fn unties(&self, embedding: &Layer, head: &Layer) -> Parsed<bool> {
        match self.trains(embedding) || self.trains(head) {
            true => Ok(!self.keeps_tie),
            false => self.is_target(head),
        }
    }

    /// Whether a layer's weight is trained as it is.
    pub(super) fn trains(&self, layer: &Layer) -> bool {
        [&layer.path, &layer.peft].iter().any(|path| is_within(&format!("{path}.weight"), &self.trained))
    }

    /// The configuration of the model that these adapters are beside: a head that is tied to the embedding has a table of its own if one of them is
    /// trained apart from the other, or if the head has an adapter. Layers with adapters make such a model of the tied configuration, too, and
    /// [`load_weights`](crate::models::load_weights) fills both tables from a folder that has one.
    ///
    /// # Errors
    /// If an expression is not supported.
    pub fn model_config(&self, config: &ModelConfig) -> Result<ModelConfig> {
        let Some([table, head]) = table_and_head(config) else { return Ok(config.clone()) };
        let unties = self.unties(&table, &head).map_err(wrong)?;
        Ok(if unties { config.clone().untied() } else { config.clone() })
    }

    /// The configuration of the model with what its adapters add in the weights ([`merged`](super::merged)): that of
    /// [`LoraConfig::model_config`]. An embedding that has an adapter is no longer the table of a head that was tied to it, either.
    ///
    /// # Errors
    /// If an expression is not supported.
    pub fn merged_config(&self, config: &ModelConfig) -> Result<ModelConfig> {
        let config = self.model_config(config)?;
        let Some([table, _]) = table_and_head(&config) else { return Ok(config) };
        let is_target = self.is_target(&table).map_err(wrong)?;
        Ok(if is_target && !self.trains(&table) { config.untied() } else { config })
    }
}

/// The embedding whose table the head shares, and the head.
fn table_and_head(config: &ModelConfig) -> Option<[Layer; 2]> {
    let layer = |path: &str| {
        let stored = in_model(&config.stored(&format!("{path}.weight")).names.concat());
        Layer::new(path, stored.strip_suffix(".weight").unwrap_or(&stored))
    };
    let table = config.tied_table()?;
    Some([layer(table.strip_suffix(".weight").unwrap_or(table)), layer(HEAD)])
}
