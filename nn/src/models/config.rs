//! [`ModelConfig`]: the settings of a decoder, read from and written as the `config.json` of Hugging Face's transformers.

use std::path::Path;
use std::sync::Arc;

use phalanx_tensor::DType;
use serde_json::{Value, json};

use super::fields::{Fields, Parsed, activation_name, dtype_name, parse_fields};
use super::hugging_face::HEAD_TABLE;
use super::stored::{Layout, Rows, Stored};
use super::{Decoder, DecoderStage, Experts, Family, GptConfig, LlamaConfig, TransformerConfig};
use crate::{Error, LayerFactory, Result, Rotary, Scope};

/// A model's settings, of any family.
#[derive(Clone, Debug, PartialEq)]
pub enum ModelConfig {
    /// GPT-2.
    Gpt(GptConfig),
    /// Llama.
    Llama(LlamaConfig),
    /// Another family, or parts of one's own choice.
    Transformer(TransformerConfig),
}

impl ModelConfig {
    /// A stage of the model; see [`GptConfig::init_stage`].
    ///
    /// # Errors
    /// If the sizes do not fit each other, or it cannot be allocated.
    pub fn init_stage<L: LayerFactory>(
        &self,
        layers: &Arc<L>,
        scope: &Scope,
        stage: DecoderStage,
    ) -> Result<Decoder<L>> {
        self.init_stage_beside(layers, scope, stage, None)
    }

    /// A stage beside the first one; see [`GptConfig::init_stage_beside`].
    ///
    /// # Errors
    /// If the sizes do not fit each other, or it cannot be allocated.
    pub fn init_stage_beside<L: LayerFactory>(
        &self,
        layers: &Arc<L>,
        scope: &Scope,
        stage: DecoderStage,
        first: Option<&Decoder<L>>,
    ) -> Result<Decoder<L>> {
        match self {
            ModelConfig::Gpt(config) => config.init_stage_beside(layers, scope, stage, first),
            ModelConfig::Llama(config) => config.init_stage_beside(layers, scope, stage, first),
            ModelConfig::Transformer(config) => config.init_stage_beside(layers, scope, stage, first),
        }
    }

    /// The whole model on one device.
    ///
    /// # Errors
    /// If the sizes do not fit each other, or it cannot be allocated.
    pub fn init(&self, scope: &Scope) -> Result<Decoder> {
        self.init_stage(&Arc::new(crate::OneDevice), scope, DecoderStage::whole(self.layers()))
    }

    /// Blocks.
    pub fn layers(&self) -> usize {
        match self {
            ModelConfig::Gpt(config) => config.layers,
            ModelConfig::Llama(config) => config.layers,
            ModelConfig::Transformer(config) => config.layers.len(),
        }
    }

    /// Attention heads of a block.
    pub fn heads(&self) -> usize {
        match self {
            ModelConfig::Gpt(config) => config.heads,
            ModelConfig::Llama(config) => config.heads,
            ModelConfig::Transformer(config) => config.heads,
        }
    }

    /// Width of the residual stream.
    pub fn width(&self) -> usize {
        match self {
            ModelConfig::Gpt(config) => config.width,
            ModelConfig::Llama(config) => config.width,
            ModelConfig::Transformer(config) => config.width,
        }
    }

    /// Features inside a block's perceptron.
    pub fn inner(&self) -> usize {
        match self {
            ModelConfig::Gpt(config) => config.inner,
            ModelConfig::Llama(config) => config.inner,
            ModelConfig::Transformer(config) => config.inner,
        }
    }

    /// The largest number of positions of a sequence.
    pub fn context(&self) -> usize {
        match self {
            ModelConfig::Gpt(config) => config.context,
            ModelConfig::Llama(config) => config.context,
            ModelConfig::Transformer(config) => config.context,
        }
    }

    /// The number of tokens.
    pub fn vocabulary(&self) -> usize {
        match self {
            ModelConfig::Gpt(config) => config.vocabulary,
            ModelConfig::Llama(config) => config.vocabulary,
            ModelConfig::Transformer(config) => config.vocabulary,
        }
    }

    /// The name of the table of the embedding and of the head, if they are tied.
    pub fn tied_table(&self) -> Option<&'static str> {
        let (is_tied, name) = match self {
            ModelConfig::Gpt(config) => (config.tied, "wte.weight"),
            ModelConfig::Llama(config) => (config.tied, "embed_tokens.weight"),
            ModelConfig::Transformer(config) => (config.tied, "embed_tokens.weight"),
        };
        is_tied.then_some(name)
    }

    /// The same model with a head that has a table of its own.
    pub(super) fn untied(mut self) -> ModelConfig {
        match &mut self {
            ModelConfig::Gpt(config) => config.tied = false,
            ModelConfig::Llama(config) => config.tied = false,
            ModelConfig::Transformer(config) => config.tied = false,
        }
        self
    }

    /// The mixture of experts, if it has any.
    pub fn experts(&self) -> Option<&Experts> {
        match self {
            ModelConfig::Transformer(config) => config.experts.as_ref(),
            ModelConfig::Gpt(_) | ModelConfig::Llama(_) => None,
        }
    }

    /// Sets every dropout to `p`.
    pub fn set_dropout(&mut self, p: f64) {
        match self {
            ModelConfig::Gpt(config) => config.dropout = [p; 3],
            ModelConfig::Llama(config) => config.dropout = p,
            ModelConfig::Transformer(config) => config.dropout = p,
        }
    }

    /// Elements of the matrices, which are nearly all of a model's parameters. It is a float, since a config may ask for any size.
    pub fn matrix_elements(&self) -> f64 {
        let f = |n: usize| n as f64;
        match self {
            ModelConfig::Gpt(c) => {
                let width = f(c.width);
                let block = 4.0 * width * width + 2.0 * width * f(c.inner);
                f(c.layers) * block + (f(c.vocabulary) + f(c.context)) * width
            }
            ModelConfig::Llama(c) => {
                let attention = 2.0 * (f(c.heads) + f(c.key_heads)) * f(c.head_dim);
                f(c.layers) * (attention + 3.0 * f(c.inner)) * f(c.width) + f(c.vocabulary) * f(c.width)
            }
            ModelConfig::Transformer(c) => c.matrix_elements(),
        }
    }

    /// From the text of a `config.json`; `path` names it in errors.
    ///
    /// # Errors
    /// If it is not valid, its sizes do not fit each other, or a setting is not supported.
    pub fn parse(text: &str, path: &Path) -> Result<ModelConfig> {
        let wrong = |why: String| Error::invalid(path.display().to_string(), why);
        let fields = parse_fields(text, path)?;
        let fields = Fields::new(&fields);
        let others = "bert, vit and resnet are read by configs of their own (`Pretrained`)";
        let wanted = || format!("wanted gpt2, {}; {others}", Family::names());
        let config = match fields.text("model_type").map_err(wrong)? {
            Some("gpt2") => fields.gpt().map(ModelConfig::Gpt),
            Some(other) => match Family::of(other) {
                Some(family) => family.parse(&fields).map(ModelConfig::from),
                None => Err(format!("model_type {other:?} is not supported, {}", wanted())),
            },
            None => Err(format!("model_type is missing, {}", wanted())),
        };
        let config = config.map_err(wrong)?;
        match &config {
            ModelConfig::Gpt(c) => c.check(),
            ModelConfig::Llama(c) => c.transformer().check(),
            ModelConfig::Transformer(c) => c.check(),
        }
        .map_err(wrong)?;
        Ok(config)
    }

    /// The `config.json` that transformers reads.
    pub fn to_json(&self, dtype: DType) -> Value {
        let dtype = dtype_name(dtype);
        match self {
            ModelConfig::Gpt(c) => gpt_json(c, dtype),
            ModelConfig::Llama(c) => Family::Llama.json(&c.transformer(), dtype),
            ModelConfig::Transformer(c) => c.family.json(c, dtype),
        }
    }
}

impl Layout for ModelConfig {
    fn stored(&self, name: &str) -> Stored {
        let stored = match self {
            ModelConfig::Llama(c) => c.transformer().stored(name),
            ModelConfig::Transformer(c) => c.stored(name),
            ModelConfig::Gpt(_) if name.starts_with("lm_head.") => Stored::whole(name),
            ModelConfig::Gpt(_) => {
                let maps = ["c_attn.weight", "c_proj.weight", "c_fc.weight"];
                let transposed = maps.iter().any(|map| name.ends_with(map));
                Stored { transposed, ..Stored::whole(format!("transformer.{name}")) }
            }
        };
        // Layers whose weights files join share the A of their adapter.
        let rows = if name.contains(".lora_A.") { Rows::All } else { stored.rows };
        Stored { rows, ..stored }
    }

    /// Old files have masks and frequencies, and a tied head's table twice.
    fn is_known(&self, stored: &str) -> bool {
        let masks = [
            ".attn.bias",
            ".attn.masked_bias",
            ".attention.masked_bias",
            ".attention.bias",
            ".rotary_emb.inv_freq",
        ];
        masks.iter().any(|mask| stored.ends_with(mask)) || stored == HEAD_TABLE
    }
}

fn gpt_json(c: &GptConfig, dtype: &str) -> Value {
    json!({
        "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "dtype": dtype,
        "vocab_size": c.vocabulary, "n_positions": c.context, "n_ctx": c.context, "n_layer": c.layers,
        "n_head": c.heads, "n_embd": c.width, "n_inner": c.inner,
        "activation_function": activation_name(c.activation), "layer_norm_epsilon": c.eps,
        "initializer_range": c.init_std, "tie_word_embeddings": c.tied,
        "embd_pdrop": c.dropout[0], "attn_pdrop": c.dropout[1], "resid_pdrop": c.dropout[2],
        "bos_token_id": null, "eos_token_id": null,
        "scale_attn_weights": true, "scale_attn_by_inverse_layer_idx": false, "reorder_and_upcast_attn": false,
    })
}

/// GPT-2's settings.
impl Fields<'_> {
    fn gpt(&self) -> Parsed<GptConfig> {
        self.must_be("scale_attn_weights", true)?;
        for name in ["scale_attn_by_inverse_layer_idx", "reorder_and_upcast_attn", "add_cross_attention"] {
            self.must_be(name, false)?;
        }
        let sizes = [self.needed("vocab_size")?, self.needed("n_positions")?, self.needed("n_layer")?];
        let (heads, width) = (self.needed("n_head")?, self.needed("n_embd")?);
        let config = GptConfig::new(sizes[0], sizes[1], sizes[2], heads, width);
        let activation = self.activation("activation_function", "gelu_new")?;
        let config = GptConfig {
            inner: self.size("n_inner")?.unwrap_or(config.inner),
            activation,
            eps: self.number("layer_norm_epsilon", 1e-5)?,
            tied: self.flag("tie_word_embeddings", true)?,
            dropout: [
                self.number("embd_pdrop", 0.1)?,
                self.number("attn_pdrop", 0.1)?,
                self.number("resid_pdrop", 0.1)?,
            ],
            init_std: self.number("initializer_range", 0.02)?,
            ..config
        };
        self.all_read(&[
            "n_ctx",
            "summary_activation",
            "summary_first_dropout",
            "summary_proj_to_labels",
            "summary_type",
            "summary_use_proj",
        ])?;
        Ok(config)
    }
}

/// A [`ModelConfig::Llama`], if a [`LlamaConfig`] can say all of it.
impl From<TransformerConfig> for ModelConfig {
    fn from(c: TransformerConfig) -> ModelConfig {
        let rotary = c.layers.first().and_then(|kind| kind.rotary.clone()).unwrap_or(Rotary::new(10000.0));
        let config = LlamaConfig {
            key_heads: c.key_heads,
            head_dim: c.head_dim,
            inner: c.inner,
            eps: c.eps,
            rope_base: rotary.base,
            rope_scaling: rotary.scaling,
            tied: c.tied,
            attention_bias: c.qkv_bias,
            mlp_bias: c.mlp_bias,
            dropout: c.dropout,
            init_std: c.init_std,
            stream: c.stream,
            ..LlamaConfig::new(c.vocabulary, c.context, c.layers.len(), c.heads, c.width)
        };
        if config.transformer() == c { ModelConfig::Llama(config) } else { ModelConfig::Transformer(c) }
    }
}

#[cfg(test)]
mod tests {
    use phalanx_tensor::DType;

    use super::super::{Activation, GptConfig, LlamaConfig, ModelConfig};
    use super::*;

    fn parse(value: Value) -> std::result::Result<ModelConfig, String> {
        ModelConfig::parse(&value.to_string(), Path::new("config.json")).map_err(|e| e.to_string())
    }

    #[test]
    fn written_configs_read_back() {
        let gpt = GptConfig { activation: Activation::Gelu, tied: false, ..GptConfig::new(50, 16, 2, 2, 8) };
        let llama = LlamaConfig { key_heads: 1, rope_base: 5e5, ..LlamaConfig::new(50, 16, 2, 2, 8) };
        for config in [ModelConfig::Gpt(gpt), ModelConfig::Llama(llama)] {
            assert_eq!(parse(config.to_json(DType::F32)).unwrap(), config);
        }
    }

    #[test]
    fn unsupported_and_wrong_settings_are_named() {
        let with = |name: &str, value: Value| {
            let config = ModelConfig::Llama(LlamaConfig::new(50, 16, 2, 2, 8));
            let mut json = config.to_json(DType::F32);
            json[name] = value;
            parse(json).unwrap_err()
        };
        assert!(with("model_type", json!("bert")).contains("bert"));
        assert!(with("hidden_act", json!("laplace")).contains("hidden_act"));
        assert!(with("hidden_size", json!(-1)).contains("hidden_size is -1"));
        assert!(with("rope_parameters", json!({"rope_type": "longrope"})).contains("longrope"));
        assert!(with("num_hidden_layers", json!(0)).contains("layers is 0"));
        assert!(with("attention_dropout", json!(1.5)).contains("dropout is 1.5"));
        assert!(with("rms_norm_eps", json!(-1e-5)).contains("eps is -1e-5"));
        assert!(with("num_hidden_layers", Value::Null).contains("num_hidden_layers is missing"));
    }

    #[test]
    fn the_rotary_base_is_found_in_old_and_new_places() {
        let mut json = ModelConfig::Llama(LlamaConfig::new(50, 16, 2, 2, 8)).to_json(DType::F32);
        json["rope_parameters"] = Value::Null;
        json["rope_theta"] = json!(123.0);
        let ModelConfig::Llama(config) = parse(json).unwrap() else { panic!("a llama") };
        assert_eq!(config.rope_base, 123.0);
    }
}
