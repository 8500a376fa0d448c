//! A transformer's config from the fields of its `config.json`.

use serde_json::{Map, Value};

use super::family::{FULL, SLIDING};
use super::{AttentionKind, Family, NormPlaces, TransformerConfig};
use crate::models::Activation;
use crate::models::check::check_layers;
use crate::models::fields::{Fields, Parsed, activation_name};
use crate::modules::{QueryKeyNorm, RopeScaling, Rotary};

impl Family {
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
        c.padding = self.padding(f, c.vocabulary)?;
        c.eps = match self {
            Family::GptNeoX => f.number("layer_norm_eps", 1e-5)?,
            Family::Phi3 | Family::Olmo2 | Family::Mixtral | Family::OlmoE => {
                f.number("rms_norm_eps", 1e-5)?
            }
            _ => f.number("rms_norm_eps", 1e-6)?,
        };
        c.query_key_norm = c.query_key_norm.map(|norm| QueryKeyNorm { eps: c.eps, ..norm });
        let activation = activation_name(c.activation);
        c.activation = match self {
            Family::Gemma2 | Family::Gemma3 => f.activation("hidden_activation", activation)?,
            // The first files say "gelu" and mean what a tanh approximates, as transformers knows.
            Family::Gemma => match f.activation("hidden_act", activation)? {
                Activation::Gelu if f.text("hidden_act")? == Some("gelu") => Activation::GeluTanh,
                other => other,
            },
            _ => f.activation("hidden_act", activation)?,
        };
        ["lm_head_bias", "rope_interleaved", "use_mrope"]
            .iter()
            .try_for_each(|name| f.must_be(name, false))?;
        if self != Family::GptNeoX {
            c.key_heads = f.size("num_key_value_heads")?.unwrap_or(heads);
            let default = match self {
                Family::Qwen3 | Family::Qwen3Moe => 128,
                _ if self.is_gemma() => 256,
                _ => c.head_dim,
            };
            c.head_dim = f.size("head_dim")?.unwrap_or(default);
        }
        self.biases(f, &mut c)?;
        match self {
            Family::Phi3 => ["embd_pdrop", "resid_pdrop"].iter().try_for_each(|name| f.must_be_zero(name))?,
            Family::GptNeoX => {
                ["hidden_dropout", "hidden_dropout_prob"].iter().try_for_each(|name| f.must_be_zero(name))?;
                if !f.flag("use_parallel_residual", true)? {
                    c.norms = NormPlaces::Before;
                }
            }
            Family::Gemma2 => {
                let cap = |name, usual| if f.has(name) { f.maybe_number(name) } else { Ok(Some(usual)) };
                c.score_cap = cap("attn_logit_softcapping", 50.0)?;
                c.logit_cap = cap("final_logit_softcapping", 30.0)?;
            }
            Family::Gemma3 => c.logit_cap = f.maybe_number("final_logit_softcapping")?,
            _ => {}
        }
        if self.is_gemma() {
            f.must_be("use_bidirectional_attention", false)?;
        }
        if matches!(self, Family::Gemma2 | Family::Gemma3) {
            c.score_scale = Some(f.number("query_pre_attn_scalar", 256.0)?.sqrt().recip());
        }
        self.experts(f, &mut c)?;
        let windows = self.windows(f, layers)?;
        c.layers = self.kinds(f, &c, windows)?;
        f.all_used(match self {
            Family::Gemma => &["hidden_activation"],
            Family::Gemma2 => &["hidden_act", "sliding_window_size"],
            Family::Gemma3 => &["hidden_act", "attn_logit_softcapping"],
            Family::GptNeoX => &["attention_probs_dropout_prob"],
            Family::Qwen2 => &["attention_bias"],
            _ => &[],
        })?;
        c.context = c.scalings().map(|scaling| scaling.extended(c.context)).max().unwrap_or(c.context);
        Ok(c)
    }

    /// The token of padding: what it is unless the file says so is the family's.
    fn padding(self, f: &Fields<'_>, vocabulary: usize) -> Parsed<Option<usize>> {
        let usual = match self {
            Family::GptNeoX => return Ok(None),
            Family::Gemma | Family::Gemma2 | Family::Gemma3 => Some(0),
            Family::Olmo2 | Family::OlmoE => Some(1),
            Family::Phi3 => Some(32_000),
            Family::SmolLm3 => Some(128_004),
            _ => None,
        };
        if !f.has("pad_token_id") {
            return Ok(usual.filter(|token| *token < vocabulary));
        }
        let token = f.get("pad_token_id", "a token", Value::as_i64)?;
        // A negative one counts from the end.
        let row = |token| if token < 0 { token + vocabulary as i64 } else { token };
        let wrong = |token| format!("pad_token_id is {token}, wanted one of {vocabulary} tokens");
        token.map(|token| usize::try_from(row(token)).map_err(|_| wrong(token))).transpose()
    }

    /// The experts of a mixture.
    fn experts(self, f: &Fields<'_>, c: &mut TransformerConfig) -> Parsed<()> {
        let Some(experts) = &mut c.experts else { return Ok(()) };
        // With the logits the loss has a term that balances the experts.
        let balance = f.number("router_aux_loss_coef", if self == Family::OlmoE { 0.01 } else { 0.001 })?;
        if f.flag("output_router_logits", false)? {
            experts.losses.balance = balance;
        }
        // transformers knows neither for these families.
        experts.losses.z = f.number("router_z_loss_coef", 0.0)?;
        experts.bias_step = f.number("router_bias_step", 0.0)?;
        f.must_be_zero("router_jitter_noise")?;
        // Some files have the one name, some the other.
        for name in ["num_experts", "num_local_experts"] {
            experts.count = f.size(name)?.unwrap_or(experts.count);
        }
        experts.chosen = f.size("num_experts_per_tok")?.unwrap_or(experts.chosen);
        experts.inner = c.inner;
        if self == Family::Mixtral {
            return Ok(());
        }
        experts.normalized = f.flag("norm_topk_prob", false)?;
        if self == Family::OlmoE {
            c.qkv_clip = f.maybe_number("clip_qkv")?;
        }
        if self == Family::Qwen3Moe {
            experts.inner = f.size("moe_intermediate_size")?.unwrap_or(768);
            let step = f.size("decoder_sparse_step")?.unwrap_or(1).max(1);
            let listed = f.list("mlp_only_layers")?.map_or(&[][..], Vec::as_slice);
            let is_dense = |i: &usize| {
                !(i + 1).is_multiple_of(step) || listed.iter().any(|n| n.as_u64() == Some(*i as u64))
            };
            experts.dense = (0..c.layers.len()).filter(is_dense).collect();
        }
        Ok(())
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
            Family::Qwen2 => f.must_be("mlp_bias", false)?,
            Family::Mistral | Family::Phi3 | Family::Mixtral => {
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
            Family::Llama | Family::Gemma | Family::Olmo2 | Family::GptNeoX | Family::OlmoE => {
                return Ok(vec![None; layers]);
            }
            Family::Mistral if !f.has("sliding_window") => return Ok(vec![Some(4096); layers]),
            Family::Mistral | Family::Phi3 | Family::Mixtral => {
                return Ok(vec![f.size("sliding_window")?; layers]);
            }
            Family::Gemma2 | Family::Gemma3 => Some(4096),
            Family::Qwen2 | Family::Qwen3 | Family::SmolLm3 | Family::Qwen3Moe => None,
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
            Family::Gemma2 | Family::Gemma3 => !(i + 1).is_multiple_of(pattern),
            // These have one for all blocks.
            Family::Qwen3Moe => true,
            Family::Qwen2 | Family::Qwen3 => i >= after,
            // SmolLM3.
            _ => !self.has_positions(f, i).unwrap_or(true),
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
            None => Ok(!(i + 1).is_multiple_of(interval)),
        }
    }

    fn kinds(
        self,
        f: &Fields<'_>,
        c: &TransformerConfig,
        windows: Vec<Option<usize>>,
    ) -> Parsed<Vec<AttentionKind>> {
        let full = self.rotary(f, c, FULL)?;
        let sliding = if self == Family::Gemma3 { self.rotary(f, c, SLIDING)? } else { full.clone() };
        let kind = |(i, window): (usize, Option<usize>)| {
            let rotary = if window.is_some() { &sliding } else { &full };
            let rotary = self.has_positions(f, i)?.then(|| rotary.clone());
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
            (Family::GptNeoX, _) => f.number("rotary_emb_base", f.number("rope_theta", 10000.0)?)?,
            (Family::Gemma3, SLIDING) => f.number("rope_local_base_freq", 10000.0)?,
            (Family::Gemma3 | Family::Mixtral, _) => f.number("rope_theta", 1_000_000.0)?,
            (Family::SmolLm3, _) => f.number("rope_theta", 2_000_000.0)?,
            _ => f.number("rope_theta", 10000.0)?,
        };
        let part = match self {
            Family::GptNeoX => f.number("rotary_pct", f.number("partial_rotary_factor", 0.25)?)?,
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
        fields.all_read(&["type", "finetuned"])?;
        scaling.all_read(&["type", "rope_type", "finetuned"])?;
        let features = (c.head_dim as f64 * part) as usize;
        Ok(Rotary { features: (features != c.head_dim).then_some(features), ..rotary })
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
        // Phi-3's first files have other names for it, as transformers knows.
        "longrope" | "su" => long_rope(f, c, former)?,
        "yarn" if f.has("short_factor") => long_rope(f, c, former)?,
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
                "rope_type {other:?} is not supported, wanted default, linear, dynamic, llama3, yarn or longrope"
            ));
        }
    })
}

/// Long rope's numbers. The former context is the file's `original_max_position_embeddings`, which stands beside the lists or, in Phi-3's
/// files, beside `max_position_embeddings`.
fn long_rope(f: &Fields<'_>, c: &TransformerConfig, former: Option<usize>) -> Parsed<RopeScaling> {
    let list = |name: &str| {
        let list =
            f.get(name, "a list of numbers", |list| list.as_array()?.iter().map(Value::as_f64).collect())?;
        list.map(Vec::into).ok_or_else(|| format!("{name} of longrope is missing"))
    };
    let of_lists = f.size("original_max_position_embeddings")?;
    if let (Some(one), Some(other)) = (of_lists, former)
        && one != other
    {
        return Err(format!(
            "original_max_position_embeddings is {one} for longrope and {other} for the model"
        ));
    }
    let context = of_lists.or(former).ok_or("original_max_position_embeddings of longrope is missing")?;
    let times = c.context as f64 / context as f64;
    // Of two unlike ones transformers takes the factor, where files have `rope_parameters`; for older files its versions differ.
    let default = match f.maybe_number("factor")?.filter(|other| (other / times - 1.0).abs() > 1e-6) {
        None => RopeScaling::long_rope_factor(c.context, context),
        Some(factor) if f.has("rope_theta") => RopeScaling::long_rope_factor_of(factor, context),
        Some(other) => {
            return Err(format!(
                "the factor of longrope is {other}, and {} positions are {times} times the former {context}, wanted one number",
                c.context
            ));
        }
    };
    let attention_factor = f.number("attention_factor", default)?;
    Ok(RopeScaling::LongRope {
        short: list("short_factor")?,
        long: list("long_factor")?,
        attention_factor,
        context,
    })
}
