//! [`ModelConfig`]: the settings of a GPT or a Llama, read from and written as the `config.json` of Hugging Face's transformers.

use std::path::Path;
use std::sync::Arc;

use phalanx_tensor::DType;
use serde_json::{Map, Value, json};

use super::{Activation, Decoder, DecoderStage, GptConfig, LlamaConfig};
use crate::{Error, LayerFactory, Result, Scope};

/// A model's settings, of either family.
#[derive(Clone, Debug, PartialEq)]
pub enum ModelConfig {
    /// GPT-2.
    Gpt(GptConfig),
    /// Llama.
    Llama(LlamaConfig),
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
        }
    }

    /// Attention heads of a block.
    pub fn heads(&self) -> usize {
        match self {
            ModelConfig::Gpt(config) => config.heads,
            ModelConfig::Llama(config) => config.heads,
        }
    }

    /// Width of the residual stream.
    pub fn width(&self) -> usize {
        match self {
            ModelConfig::Gpt(config) => config.width,
            ModelConfig::Llama(config) => config.width,
        }
    }

    /// Features inside a block's perceptron.
    pub fn inner(&self) -> usize {
        match self {
            ModelConfig::Gpt(config) => config.inner,
            ModelConfig::Llama(config) => config.inner,
        }
    }

    /// The largest number of positions of a sequence.
    pub fn context(&self) -> usize {
        match self {
            ModelConfig::Gpt(config) => config.context,
            ModelConfig::Llama(config) => config.context,
        }
    }

    /// The number of tokens.
    pub fn vocabulary(&self) -> usize {
        match self {
            ModelConfig::Gpt(config) => config.vocabulary,
            ModelConfig::Llama(config) => config.vocabulary,
        }
    }

    /// Sets every dropout to `p`.
    pub fn set_dropout(&mut self, p: f64) {
        match self {
            ModelConfig::Gpt(config) => config.dropout = [p; 3],
            ModelConfig::Llama(config) => config.dropout = p,
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
        }
    }

    /// From the text of a `config.json`; `path` names it in errors.
    ///
    /// # Errors
    /// If it is not valid, its sizes do not fit each other, or a setting is not supported.
    pub fn parse(text: &str, path: &Path) -> Result<ModelConfig> {
        let wrong = |why: String| Error::invalid(path.display().to_string(), why);
        let value: Value = serde_json::from_str(text).map_err(|e| wrong(format!("not valid JSON: {e}")))?;
        let fields = value.as_object().ok_or_else(|| wrong("not a JSON object".into()))?;
        let fields = Fields(fields);
        let config = match fields.text("model_type").map_err(wrong)? {
            Some("gpt2") => fields.gpt().map(ModelConfig::Gpt),
            Some("llama") => fields.llama().map(ModelConfig::Llama),
            Some(other) => Err(format!("model_type {other:?} is not supported, wanted gpt2 or llama")),
            None => Err("model_type is missing, wanted gpt2 or llama".into()),
        };
        let config = config.map_err(wrong)?;
        match &config {
            ModelConfig::Gpt(c) => c.check(),
            ModelConfig::Llama(c) => c.check(),
        }
        .map_err(wrong)?;
        Ok(config)
    }

    /// The `config.json` that transformers reads.
    pub fn to_json(&self, dtype: DType) -> Value {
        let dtype = match dtype {
            DType::F64 => "float64",
            DType::BF16 => "bfloat16",
            DType::F16 => "float16",
            _ => "float32",
        };
        match self {
            ModelConfig::Gpt(c) => gpt_json(c, dtype),
            ModelConfig::Llama(c) => llama_json(c, dtype),
        }
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

fn llama_json(c: &LlamaConfig, dtype: &str) -> Value {
    json!({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": dtype,
        "vocab_size": c.vocabulary, "max_position_embeddings": c.context, "num_hidden_layers": c.layers,
        "num_attention_heads": c.heads, "num_key_value_heads": c.key_heads, "head_dim": c.head_dim,
        "hidden_size": c.width, "intermediate_size": c.inner, "hidden_act": "silu", "rms_norm_eps": c.eps,
        "rope_theta": c.rope_base, "rope_parameters": {"rope_theta": c.rope_base, "rope_type": "default"},
        "tie_word_embeddings": c.tied, "attention_bias": c.attention_bias, "mlp_bias": c.mlp_bias,
        "attention_dropout": c.dropout, "initializer_range": c.init_std,
        "bos_token_id": null, "eos_token_id": null,
    })
}

const ACTIVATIONS: [(&str, Activation); 6] = [
    ("gelu_new", Activation::GeluTanh),
    ("gelu", Activation::Gelu),
    ("relu", Activation::Relu),
    ("silu", Activation::Silu),
    ("gelu_pytorch_tanh", Activation::GeluTanh),
    ("swish", Activation::Silu),
];

fn activation_name(activation: Activation) -> &'static str {
    ACTIVATIONS.iter().find(|(_, known)| *known == activation).map_or("gelu_new", |(name, _)| name)
}

/// The fields of a `config.json`. A null field counts as absent.
struct Fields<'a>(&'a Map<String, Value>);

type Parsed<T> = std::result::Result<T, String>;

impl<'a> Fields<'a> {
    fn get<T>(&self, name: &str, wanted: &str, read: impl Fn(&'a Value) -> Option<T>) -> Parsed<Option<T>> {
        match self.0.get(name) {
            None | Some(Value::Null) => Ok(None),
            Some(value) => read(value).map(Some).ok_or_else(|| format!("{name} is {value}, wanted {wanted}")),
        }
    }

    fn text(&self, name: &str) -> Parsed<Option<&'a str>> {
        self.get(name, "a string", Value::as_str)
    }

    fn size(&self, name: &str) -> Parsed<Option<usize>> {
        self.get(name, "a size", |v| v.as_u64().and_then(|n| usize::try_from(n).ok()))
    }

    fn needed(&self, name: &str) -> Parsed<usize> {
        self.size(name)?.ok_or_else(|| format!("{name} is missing"))
    }

    fn number(&self, name: &str, default: f64) -> Parsed<f64> {
        Ok(self.get(name, "a number", Value::as_f64)?.unwrap_or(default))
    }

    fn flag(&self, name: &str, default: bool) -> Parsed<bool> {
        Ok(self.get(name, "true or false", Value::as_bool)?.unwrap_or(default))
    }

    fn must_be(&self, name: &str, wanted: bool) -> Parsed<()> {
        let got = self.flag(name, wanted)?;
        if got == wanted { Ok(()) } else { Err(format!("{name} = {got} is not supported")) }
    }

    fn gpt(&self) -> Parsed<GptConfig> {
        self.must_be("scale_attn_weights", true)?;
        for name in ["scale_attn_by_inverse_layer_idx", "reorder_and_upcast_attn", "add_cross_attention"] {
            self.must_be(name, false)?;
        }
        let sizes = [self.needed("vocab_size")?, self.needed("n_positions")?, self.needed("n_layer")?];
        let (heads, width) = (self.needed("n_head")?, self.needed("n_embd")?);
        let config = GptConfig::new(sizes[0], sizes[1], sizes[2], heads, width);
        let name = self.text("activation_function")?.unwrap_or("gelu_new");
        let activation = ACTIVATIONS.iter().find(|(known, _)| *known == name);
        let activation =
            activation.ok_or_else(|| format!("activation_function {name:?} is not supported"))?.1;
        Ok(GptConfig {
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
        })
    }

    fn llama(&self) -> Parsed<LlamaConfig> {
        let act = self.text("hidden_act")?.unwrap_or("silu");
        if !["silu", "swish"].contains(&act) {
            return Err(format!("hidden_act {act:?} is not supported, wanted silu"));
        }
        let sizes = [
            self.needed("vocab_size")?,
            self.size("max_position_embeddings")?.unwrap_or(2048),
            self.needed("num_hidden_layers")?,
        ];
        let (heads, width) = (self.needed("num_attention_heads")?, self.needed("hidden_size")?);
        let config = LlamaConfig::new(sizes[0], sizes[1], sizes[2], heads, width);
        Ok(LlamaConfig {
            key_heads: self.size("num_key_value_heads")?.unwrap_or(heads),
            head_dim: self.size("head_dim")?.unwrap_or(config.head_dim),
            inner: self.needed("intermediate_size")?,
            eps: self.number("rms_norm_eps", 1e-6)?,
            rope_base: self.rope_base()?,
            tied: self.flag("tie_word_embeddings", false)?,
            attention_bias: self.flag("attention_bias", false)?,
            mlp_bias: self.flag("mlp_bias", false)?,
            dropout: self.number("attention_dropout", 0.0)?,
            init_std: self.number("initializer_range", 0.02)?,
            ..config
        })
    }

    /// The base of rotary positions. Newer files have it under `rope_parameters`.
    fn rope_base(&self) -> Parsed<f64> {
        let empty = Map::new();
        for place in ["rope_parameters", "rope_scaling"] {
            let inner = Fields(self.get(place, "an object", Value::as_object)?.unwrap_or(&empty));
            let kind = inner.text("rope_type")?.or(inner.text("type")?).unwrap_or("default");
            if kind != "default" {
                return Err(format!("{place} of type {kind:?} is not supported, wanted default"));
            }
            if let Some(base) = inner.get("rope_theta", "a number", Value::as_f64)? {
                return Ok(base);
            }
        }
        self.number("rope_theta", 10000.0)
    }
}

#[cfg(test)]
mod tests {
    use phalanx_tensor::DType;

    use super::super::{GptConfig, LlamaConfig, ModelConfig};
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
        assert!(with("hidden_act", json!("gelu")).contains("hidden_act"));
        assert!(with("hidden_size", json!(-1)).contains("hidden_size is -1"));
        assert!(with("rope_parameters", json!({"rope_type": "yarn"})).contains("yarn"));
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
