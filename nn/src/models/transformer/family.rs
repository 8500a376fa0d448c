//! [`Family`]: the families of transformers, their settings, and their `config.json`.

use serde_json::{Map, Value, json};

use super::{AttentionKind, NormKind, NormPlaces, TransformerConfig};
use crate::models::Activation;
use crate::models::check::check_layers;
use crate::models::fields::{Fields, Parsed, activation_name};
use crate::modules::{QueryKeyNorm, RopeScaling, Rotary};

/// A family of transformers: how `config.json` and the files of weights name things, and what they are unless it says so.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Family {
    /// Llama 2 to 3.3.
    Llama,
    /// Mistral: attention sees a window.
    Mistral,
    /// Qwen2 and Qwen2.5: queries, keys and values have biases.
    Qwen2,
    /// Qwen3: queries and keys are normalised.
    Qwen3,
    /// Gemma 1: scaled embeddings, norms of 1 + weight.
    Gemma,
    /// Gemma 2: norms before and after, capped scores and logits, every other block sees a window.
    Gemma2,
    /// Gemma 3 (text): two rotary bases.
    Gemma3,
    /// Phi-3 and Phi-4: files join queries, keys and values, and gate and up.
    Phi3,
    /// OLMo 2: norms after, queries and keys are normalised over all heads.
    Olmo2,
    /// GPT-NeoX and Pythia: both branches at once, part of a head is rotated.
    GptNeoX,
    /// SmolLM3: some blocks have no positions.
    SmolLm3,
}

/// Each family, its `model_type`, and its class in transformers.
const FAMILIES: [(Family, &str, &str); 11] = [
    (Family::Llama, "llama", "LlamaForCausalLM"),
    (Family::Mistral, "mistral", "MistralForCausalLM"),
    (Family::Qwen2, "qwen2", "Qwen2ForCausalLM"),
    (Family::Qwen3, "qwen3", "Qwen3ForCausalLM"),
    (Family::Gemma, "gemma", "GemmaForCausalLM"),
    (Family::Gemma2, "gemma2", "Gemma2ForCausalLM"),
    (Family::Gemma3, "gemma3_text", "Gemma3ForCausalLM"),
    (Family::Phi3, "phi3", "Phi3ForCausalLM"),
    (Family::Olmo2, "olmo2", "Olmo2ForCausalLM"),
    (Family::GptNeoX, "gpt_neox", "GPTNeoXForCausalLM"),
    (Family::SmolLm3, "smollm3", "SmolLM3ForCausalLM"),
];

const FULL: &str = "full_attention";
const SLIDING: &str = "sliding_attention";

impl Family {
    /// The family of a `model_type`.
    pub(crate) fn of(model_type: &str) -> Option<Family> {
        FAMILIES.iter().find(|(_, known, _)| *known == model_type).map(|(family, ..)| *family)
    }

    /// The names of all families, for errors.
    pub(crate) fn names() -> String {
        FAMILIES.map(|(_, name, _)| name).join(", ")
    }

    /// The `model_type` of its files.
    pub fn name(self) -> &'static str {
        FAMILIES.iter().find(|(family, ..)| *family == self).map_or("", |(_, name, _)| name)
    }

    /// For tests: a model of each family in the sizes of another one, with windows, caps, scaled and partial rotations, and blocks without
    /// positions, as the family may have them.
    #[doc(hidden)]
    pub fn samples(size: &TransformerConfig) -> Vec<TransformerConfig> {
        FAMILIES.map(|(family, ..)| family.sample(size)).into()
    }

    fn sample(self, size: &TransformerConfig) -> TransformerConfig {
        let TransformerConfig { vocabulary, context, heads, width, .. } = *size;
        let mut c = TransformerConfig::new(self, vocabulary, context, size.layers.len(), heads, width);
        (c.key_heads, c.head_dim, c.inner) = (size.key_heads, size.head_dim, size.inner);
        (c.dropout, c.tied) = (size.dropout, size.tied);
        let half = RopeScaling::Llama3 {
            factor: 4.0,
            low_frequency: 1.0,
            high_frequency: 4.0,
            context: context / 2,
        };
        for (i, kind) in c.layers.iter_mut().enumerate() {
            let rotary = kind.rotary.unwrap_or(Rotary::new(10000.0));
            match self {
                Family::Llama => kind.rotary = Some(Rotary { scaling: half, ..rotary }),
                Family::Mistral => kind.window = Some(5),
                Family::Gemma2 | Family::Gemma3 if i % 2 == 0 => kind.window = Some(5),
                Family::GptNeoX => {
                    kind.rotary = Some(Rotary { features: Some(c.head_dim / 4 * 2), ..rotary })
                }
                Family::SmolLm3 if i % 4 == 3 => kind.rotary = None,
                _ => {}
            }
        }
        match self {
            Family::Gemma2 => (c.score_cap, c.logit_cap) = (Some(50.0), Some(30.0)),
            Family::GptNeoX => c.key_heads = heads,
            _ => {}
        }
        c
    }

    fn is_gemma(self) -> bool {
        matches!(self, Family::Gemma | Family::Gemma2 | Family::Gemma3)
    }

    /// A config of given sizes with what all models of the family have.
    pub(super) fn settings(self, config: TransformerConfig) -> TransformerConfig {
        let mut c = config;
        let each_head = |plus_one| Some(QueryKeyNorm { each_head: true, plus_one, eps: c.eps });
        match self {
            Family::Llama | Family::Mistral | Family::Phi3 => {}
            Family::Qwen2 => c.qkv_bias = true,
            Family::Qwen3 => c.query_key_norm = each_head(false),
            Family::Gemma | Family::Gemma2 | Family::Gemma3 => {
                if self == Family::Gemma3 {
                    c.query_key_norm = each_head(true);
                }
                c.norm = NormKind::RmsPlusOne;
                c.activation = Activation::GeluTanh;
                c.embedding_scale = Some((c.width as f64).sqrt());
                c.tied = true;
                if self != Family::Gemma {
                    c.norms = NormPlaces::BeforeAndAfter;
                    c.score_scale = Some(1.0 / 16.0);
                }
            }
            Family::Olmo2 => {
                c.norms = NormPlaces::After;
                c.query_key_norm = Some(QueryKeyNorm { each_head: false, plus_one: false, eps: c.eps });
            }
            Family::GptNeoX => {
                (c.norm, c.norms, c.gated) = (NormKind::Layer, NormPlaces::Parallel, false);
                c.activation = Activation::Gelu;
                (c.qkv_bias, c.output_bias, c.mlp_bias) = (true, true, true);
            }
            Family::SmolLm3 => c.tied = true,
        }
        c
    }

    /// The config of a file's fields.
    pub(in crate::models) fn parse(self, f: &Fields<'_>) -> Parsed<TransformerConfig> {
        let layers = f.needed("num_hidden_layers")?;
        check_layers(layers)?;
        let (heads, width) = (f.needed("num_attention_heads")?, f.needed("hidden_size")?);
        let context = f.size("max_position_embeddings")?.unwrap_or(2048);
        let mut c = TransformerConfig::new(self, f.needed("vocab_size")?, context, layers, heads, width);
        c.inner = f.needed("intermediate_size")?;
        c.init_std = f.number("initializer_range", 0.02)?;
        c.dropout = f.number("attention_dropout", 0.0)?;
        c.tied = f.flag("tie_word_embeddings", c.tied)?;
        c.eps = match self {
            Family::GptNeoX => f.number("layer_norm_eps", 1e-5)?,
            Family::Phi3 | Family::Olmo2 => f.number("rms_norm_eps", 1e-5)?,
            _ => f.number("rms_norm_eps", 1e-6)?,
        };
        c.query_key_norm = c.query_key_norm.map(|norm| QueryKeyNorm { eps: c.eps, ..norm });
        let activation = activation_name(c.activation);
        c.activation = match self {
            Family::Gemma2 | Family::Gemma3 => f.activation("hidden_activation", activation)?,
            Family::Gemma => match f.text("hidden_activation")? {
                Some(_) => f.activation("hidden_activation", activation)?,
                None => f.activation("hidden_act", activation)?,
            },
            _ => f.activation("hidden_act", activation)?,
        };
        ["lm_head_bias", "rope_interleaved", "use_mrope"]
            .iter()
            .try_for_each(|name| f.must_be(name, false))?;
        if self != Family::GptNeoX {
            c.key_heads = f.size("num_key_value_heads")?.unwrap_or(heads);
            let default = match self {
                Family::Qwen3 => 128,
                _ if self.is_gemma() => 256,
                _ => c.head_dim,
            };
            c.head_dim = f.size("head_dim")?.unwrap_or(default);
        }
        self.biases(f, &mut c)?;
        match self {
            Family::Phi3 => ["embd_pdrop", "resid_pdrop"].iter().try_for_each(|name| f.must_be_zero(name))?,
            Family::GptNeoX => {
                f.must_be_zero("hidden_dropout")?;
                if !f.flag("use_parallel_residual", true)? {
                    c.norms = NormPlaces::Before;
                }
            }
            Family::Gemma2 => {
                c.score_cap = f.maybe_number("attn_logit_softcapping")?;
                c.logit_cap = f.maybe_number("final_logit_softcapping")?;
            }
            Family::Gemma3 => {
                c.score_cap = f.maybe_number("attn_logit_softcapping")?;
                c.logit_cap = f.maybe_number("final_logit_softcapping")?;
            }
            _ => {}
        }
        if self.is_gemma() {
            f.must_be("use_bidirectional_attention", false)?;
        }
        if matches!(self, Family::Gemma2 | Family::Gemma3) {
            c.score_scale = Some(f.number("query_pre_attn_scalar", 256.0)?.sqrt().recip());
        }
        let windows = self.windows(f, layers)?;
        c.layers = self.kinds(f, &c, windows)?;
        let gemmas: &[&str] = if self.is_gemma() { &["hidden_act"] } else { &[] };
        f.all_read(&[&["pretraining_tp", "_sliding_window_pattern"], gemmas].concat())?;
        if let Some(RopeScaling::Dynamic { factor, context }) = c.scaling() {
            c.context = (context as f64 * factor) as usize;
        }
        Ok(c)
    }

    fn biases(self, f: &Fields<'_>, c: &mut TransformerConfig) -> Parsed<()> {
        match self {
            Family::Llama | Family::SmolLm3 => {
                c.qkv_bias = f.flag("attention_bias", false)?;
                c.output_bias = c.qkv_bias;
                c.mlp_bias = f.flag("mlp_bias", false)?;
            }
            Family::GptNeoX => {
                c.qkv_bias = f.flag("attention_bias", true)?;
                c.output_bias = c.qkv_bias;
            }
            Family::Mistral | Family::Phi3 | Family::Qwen2 => {
                ["attention_bias", "mlp_bias"].iter().try_for_each(|name| f.must_be(name, false))?;
            }
            _ => {
                c.qkv_bias = f.flag("attention_bias", false)?;
                c.output_bias = c.qkv_bias;
            }
        }
        Ok(())
    }

    /// The window of each block.
    fn windows(self, f: &Fields<'_>, layers: usize) -> Parsed<Vec<Option<usize>>> {
        let default = match self {
            Family::Llama | Family::Gemma | Family::Olmo2 | Family::GptNeoX => return Ok(vec![None; layers]),
            Family::Mistral if !f.has("sliding_window") => return Ok(vec![Some(4096); layers]),
            Family::Mistral | Family::Phi3 => return Ok(vec![f.size("sliding_window")?; layers]),
            Family::Gemma2 | Family::Gemma3 => Some(4096),
            Family::Qwen2 | Family::Qwen3 | Family::SmolLm3 => None,
        };
        let mut window = f.size("sliding_window")?.or(default);
        let after = f.size("max_window_layers")?.unwrap_or(28);
        if !self.is_gemma() && !f.flag("use_sliding_window", false)? {
            window = None;
        }
        let pattern = match self {
            Family::Gemma2 => 2,
            _ => f.size("sliding_window_pattern")?.unwrap_or(6).max(1),
        };
        let slides = |i: usize| match self {
            Family::Gemma2 | Family::Gemma3 => (i + 1) % pattern != 0,
            Family::Qwen2 | Family::Qwen3 => i >= after,
            _ => self.has_positions(f, i).unwrap_or(true),
        };
        let Some(kinds) = f.list("layer_types")? else {
            return Ok((0..layers).map(|i| window.filter(|_| slides(i))).collect());
        };
        if kinds.len() != layers {
            return Err(format!("layer_types has {} entries, wanted {layers}", kinds.len()));
        }
        kinds
            .iter()
            .map(|kind| match kind.as_str() {
                Some(SLIDING) => Ok(window),
                Some(FULL) => Ok(None),
                _ => Err(format!("layer_types has {kind}, wanted {FULL:?} or {SLIDING:?}")),
            })
            .collect()
    }

    /// Whether a block of SmolLM3 has rotary positions.
    fn has_positions(self, f: &Fields<'_>, i: usize) -> Parsed<bool> {
        if self != Family::SmolLm3 {
            return Ok(true);
        }
        let interval = f.size("no_rope_layer_interval")?.unwrap_or(4).max(1);
        match f.list("no_rope_layers")? {
            Some(list) => match list.get(i).and_then(Value::as_i64) {
                Some(flag) => Ok(flag != 0),
                None => Err(format!("no_rope_layers has no number for layer {i}")),
            },
            None => Ok((i + 1) % interval != 0),
        }
    }

    fn kinds(
        self,
        f: &Fields<'_>,
        c: &TransformerConfig,
        windows: Vec<Option<usize>>,
    ) -> Parsed<Vec<AttentionKind>> {
        let full = self.rotary(f, c, FULL)?;
        let sliding = if self == Family::Gemma3 { self.rotary(f, c, SLIDING)? } else { full };
        let kind = |(i, window): (usize, Option<usize>)| {
            let rotary = if window.is_some() { sliding } else { full };
            let rotary = self.has_positions(f, i)?.then_some(rotary);
            Ok(AttentionKind { window, rotary })
        };
        windows.into_iter().enumerate().map(kind).collect()
    }

    /// Rotary positions of blocks of this kind. Newer files have their settings under `rope_parameters`, by kind if there are two.
    fn rotary(self, f: &Fields<'_>, c: &TransformerConfig, kind: &str) -> Parsed<Rotary> {
        let empty = Map::new();
        let mut place = f.object("rope_parameters")?.unwrap_or(&empty);
        if let Some(of_kind) = place.get(kind).and_then(Value::as_object) {
            place = of_kind;
        }
        let scaling = f.object("rope_scaling")?.filter(|_| kind == FULL).unwrap_or(&empty);
        let base = match (self, kind) {
            (Family::GptNeoX, _) => f.number("rotary_emb_base", 10000.0)?,
            (Family::Gemma3, SLIDING) => f.number("rope_local_base_freq", 10000.0)?,
            (Family::Gemma3, _) => f.number("rope_theta", 1_000_000.0)?,
            _ => f.number("rope_theta", 10000.0)?,
        };
        let part = match self {
            Family::GptNeoX => f.number("rotary_pct", 0.25)?,
            _ => f.number("partial_rotary_factor", 1.0)?,
        };
        let former = f.size("original_max_position_embeddings")?.filter(|_| self == Family::Phi3);
        let (fields, scaling) = (Fields::new(place), Fields::new(scaling));
        let rotary = Rotary {
            base: fields.number("rope_theta", base)?,
            features: None,
            scaling: rope_scaling(
                if place.contains_key("rope_type") { &fields } else { &scaling },
                c,
                former,
            )?,
        };
        let part = fields.number("partial_rotary_factor", part)?;
        fields.all_read(&["type"])?;
        scaling.all_read(&["type", "rope_type"])?;
        let features = (c.head_dim as f64 * part) as usize;
        Ok(Rotary { features: (features != c.head_dim).then_some(features), ..rotary })
    }

    /// The `config.json` of a config, which transformers reads.
    pub(crate) fn json(self, c: &TransformerConfig, dtype: &str) -> Value {
        let (_, name, class) =
            FAMILIES.into_iter().find(|(family, ..)| *family == self).unwrap_or(FAMILIES[0]);
        // Dynamic scaling serves sequences that are longer than this.
        let former = match c.scaling() {
            Some(RopeScaling::Dynamic { context, .. }) => context,
            _ => c.context,
        };
        let mut json = json!({
            "architectures": [class], "model_type": name, "dtype": dtype, "vocab_size": c.vocabulary,
            "max_position_embeddings": former, "num_hidden_layers": c.layers.len(),
            "num_attention_heads": c.heads, "hidden_size": c.width, "intermediate_size": c.inner,
            "tie_word_embeddings": c.tied, "attention_dropout": c.dropout, "initializer_range": c.init_std,
            "bos_token_id": null, "eos_token_id": null, "use_cache": true,
        });
        let mut set = |name: &str, value: Value| {
            json[name] = value;
        };
        let activation = if self.is_gemma() { "hidden_activation" } else { "hidden_act" };
        let gelu = c.activation == Activation::GeluTanh && self.is_gemma();
        set(activation, json!(if gelu { "gelu_pytorch_tanh" } else { activation_name(c.activation) }));
        match self {
            Family::GptNeoX => {
                set("layer_norm_eps", json!(c.eps));
                set("use_parallel_residual", json!(c.norms == NormPlaces::Parallel));
                set("hidden_dropout", json!(0.0));
            }
            _ => {
                set("rms_norm_eps", json!(c.eps));
                set("num_key_value_heads", json!(c.key_heads));
                set("head_dim", json!(c.head_dim));
            }
        }
        match self {
            Family::Mistral | Family::Phi3 | Family::Qwen2 => {}
            _ => set("attention_bias", json!(c.qkv_bias)),
        }
        match self {
            Family::Llama | Family::SmolLm3 => set("mlp_bias", json!(c.mlp_bias)),
            Family::Phi3 => ["embd_pdrop", "resid_pdrop"].iter().for_each(|name| set(name, json!(0.0))),
            Family::Gemma2 | Family::Gemma3 => {
                set("query_pre_attn_scalar", json!(c.score_scale.map(|scale| scale.powi(-2).round())));
                set("attn_logit_softcapping", json!(c.score_cap));
                set("final_logit_softcapping", json!(c.logit_cap));
            }
            _ => {}
        }
        let window = c.layers.iter().find_map(|kind| kind.window);
        let kinds: Vec<_> =
            c.layers.iter().map(|kind| if kind.window.is_some() { SLIDING } else { FULL }).collect();
        match self {
            Family::Llama | Family::Gemma | Family::Olmo2 | Family::GptNeoX => {}
            Family::Mistral | Family::Phi3 => set("sliding_window", json!(window)),
            Family::Gemma2 | Family::Gemma3 => {
                set("sliding_window", json!(window.unwrap_or(4096)));
                set("layer_types", json!(kinds));
            }
            Family::Qwen2 | Family::Qwen3 | Family::SmolLm3 => {
                set("sliding_window", json!(window));
                set("use_sliding_window", json!(window.is_some()));
                set("layer_types", json!(kinds));
            }
        }
        if self == Family::SmolLm3 {
            let has = |kind: &AttentionKind| i32::from(kind.rotary.is_some());
            set("no_rope_layers", json!(c.layers.iter().map(has).collect::<Vec<_>>()));
        }
        let rotary = |slides: bool| {
            let of = c.layers.iter().filter(|kind| kind.window.is_some() == slides);
            let of = of.chain(&c.layers).find_map(|kind| kind.rotary).unwrap_or(Rotary::new(10000.0));
            rotary_json(&of, c)
        };
        let plain = rotary(window.is_some() && kinds.iter().all(|kind| *kind == SLIDING));
        set(
            "rope_parameters",
            if self == Family::Gemma3 { json!({FULL: rotary(false), SLIDING: rotary(true)}) } else { plain },
        );
        json
    }
}

fn rope_scaling(f: &Fields<'_>, c: &TransformerConfig, former: Option<usize>) -> Parsed<RopeScaling> {
    let kind = f.text("rope_type")?.or(f.text("type")?).unwrap_or("default");
    let context = f.size("original_max_position_embeddings")?.or(former).unwrap_or(c.context).max(1);
    let factor = |f: &Fields<'_>| match f.maybe_number("factor")? {
        Some(factor) if factor > 0.0 => Ok(factor),
        Some(factor) => Err(format!("the factor of the positions is {factor}, wanted a number above 0")),
        None => Ok(c.context as f64 / context as f64),
    };
    Ok(match kind {
        "default" => RopeScaling::None,
        "linear" => RopeScaling::Linear { factor: factor(f)? },
        "dynamic" => RopeScaling::Dynamic { factor: factor(f)?, context: c.context },
        "llama3" => RopeScaling::Llama3 {
            factor: factor(f)?,
            low_frequency: f.number("low_freq_factor", 1.0)?,
            high_frequency: f.number("high_freq_factor", 4.0)?,
            context,
        },
        "yarn" => {
            let factor = factor(f)?;
            let scale = |scale: f64| if factor <= 1.0 { 1.0 } else { 0.1 * scale * factor.ln() + 1.0 };
            let [part, whole] = [f.number("mscale", 0.0)?, f.number("mscale_all_dim", 0.0)?];
            let of_scales = (part != 0.0 && whole != 0.0).then(|| scale(part) / scale(whole));
            RopeScaling::Yarn {
                factor,
                attention_factor: f.maybe_number("attention_factor")?.or(of_scales),
                beta_fast: f.number("beta_fast", 32.0)?,
                beta_slow: f.number("beta_slow", 1.0)?,
                context,
                truncate: f.flag("truncate", true)?,
            }
        }
        other => {
            return Err(format!(
                "rope_type {other:?} is not supported, wanted default, linear, dynamic, llama3 or yarn"
            ));
        }
    })
}

fn rotary_json(rotary: &Rotary, c: &TransformerConfig) -> Value {
    let mut json = match rotary.scaling {
        RopeScaling::None => json!({"rope_type": "default"}),
        RopeScaling::Linear { factor } => json!({"rope_type": "linear", "factor": factor}),
        RopeScaling::Dynamic { factor, .. } => json!({"rope_type": "dynamic", "factor": factor}),
        RopeScaling::Llama3 { factor, low_frequency, high_frequency, context } => json!({
            "rope_type": "llama3", "factor": factor, "low_freq_factor": low_frequency,
            "high_freq_factor": high_frequency, "original_max_position_embeddings": context,
        }),
        RopeScaling::Yarn { factor, attention_factor, beta_fast, beta_slow, context, truncate } => {
            let mut json = json!({
                "rope_type": "yarn", "factor": factor, "beta_fast": beta_fast, "beta_slow": beta_slow,
                "original_max_position_embeddings": context, "truncate": truncate,
            });
            if let Some(attention_factor) = attention_factor {
                json["attention_factor"] = json!(attention_factor);
            }
            json
        }
    };
    json["rope_theta"] = json!(rotary.base);
    if c.family == Family::GptNeoX || rotary.features.is_some() {
        let part = rotary.features.unwrap_or(c.head_dim) as f64 / c.head_dim as f64;
        json["partial_rotary_factor"] = json!(part);
    }
    json
}
