//! The `config.json` of a transformer, as transformers reads it.

use serde_json::{Value, json};

use super::family::{FAMILIES, FULL, SLIDING};
use super::{AttentionKind, Family, NormPlaces, TransformerConfig};
use crate::models::Activation;
use crate::models::fields::activation_name;
use crate::modules::{RopeScaling, Rotary};

impl Family {
    /// The `config.json` of a config, which transformers reads.
    pub(crate) fn json(self, c: &TransformerConfig, dtype: &str) -> Value {
        let (_, name, class) =
            FAMILIES.into_iter().find(|(family, ..)| *family == self).unwrap_or(FAMILIES[0]);
        // Scaled positions serve sequences that are longer than this.
        let former = c.scalings().map(|scaling| scaling.stated(c.context)).min().unwrap_or(c.context);
        let mut json = json!({
            "architectures": [class], "model_type": name, "dtype": dtype, "vocab_size": c.vocabulary,
            "max_position_embeddings": former, "num_hidden_layers": c.layers.len(),
            "num_attention_heads": c.heads, "hidden_size": c.width, "intermediate_size": c.inner,
            "tie_word_embeddings": c.tied, "attention_dropout": c.dropout, "initializer_range": c.init_std,
            "bos_token_id": null, "eos_token_id": null, "pad_token_id": c.padding, "use_cache": true,
        });
        let mut set = |name: &str, value: Value| {
            json[name] = value;
        };
        let activation = if self.is_gemma() { "hidden_activation" } else { "hidden_act" };
        let named = match c.activation {
            Activation::GeluTanh if self.is_gemma() => "gelu_pytorch_tanh",
            // "gelu" is another one there.
            Activation::Gelu if self == Family::Gemma => "gelu_python",
            other => activation_name(other),
        };
        set(activation, json!(named));
        if self == Family::Gemma {
            set("hidden_act", json!(named));
        }
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
            Family::Mistral | Family::Phi3 | Family::Qwen2 | Family::Mixtral => {}
            _ => set("attention_bias", json!(c.qkv_bias)),
        }
        match self {
            Family::Llama | Family::SmolLm3 => set("mlp_bias", json!(c.mlp_bias)),
            Family::Phi3 => {
                ["embd_pdrop", "resid_pdrop"].iter().for_each(|name| set(name, json!(0.0)));
                if let Some(former) = c.turning_points().next() {
                    set("original_max_position_embeddings", json!(former));
                }
            }
            Family::Gemma2 | Family::Gemma3 => {
                set("query_pre_attn_scalar", json!(c.score_scale.map(|scale| scale.powi(-2).round() as u64)));
                set("attn_logit_softcapping", json!(c.score_cap));
                set("final_logit_softcapping", json!(c.logit_cap));
            }
            _ => {}
        }
        let window = c.layers.iter().find_map(|kind| kind.window);
        let kinds: Vec<_> =
            c.layers.iter().map(|kind| if kind.window.is_some() { SLIDING } else { FULL }).collect();
        match self {
            Family::Llama | Family::Gemma | Family::Olmo2 | Family::GptNeoX | Family::OlmoE => {}
            Family::Mistral | Family::Phi3 | Family::Mixtral => set("sliding_window", json!(window)),
            Family::Qwen3Moe => {
                set("sliding_window", json!(window));
                set("use_sliding_window", json!(window.is_some()));
            }
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
        if let Some(experts) = &c.experts {
            let count = if self == Family::Mixtral { "num_local_experts" } else { "num_experts" };
            set(count, json!(experts.count));
            set("num_experts_per_tok", json!(experts.chosen));
            set("output_router_logits", json!(experts.losses.balance > 0.0));
            if experts.losses.balance > 0.0 {
                set("router_aux_loss_coef", json!(experts.losses.balance));
            }
            if experts.losses.z > 0.0 {
                set("router_z_loss_coef", json!(experts.losses.z));
            }
            if experts.bias_step > 0.0 {
                set("router_bias_step", json!(experts.bias_step));
            }
            match self {
                Family::Mixtral => {}
                _ => set("norm_topk_prob", json!(experts.normalized)),
            }
            if self == Family::OlmoE {
                set("clip_qkv", json!(c.qkv_clip));
            }
            if self == Family::Qwen3Moe {
                set("moe_intermediate_size", json!(experts.inner));
                set("decoder_sparse_step", json!(1));
                set("mlp_only_layers", json!(experts.dense));
            }
        }
        if self == Family::SmolLm3 {
            let has = |kind: &AttentionKind| i32::from(kind.rotary.is_some());
            set("no_rope_layers", json!(c.layers.iter().map(has).collect::<Vec<_>>()));
        }
        let rotary = |slides: bool| {
            let of = c.layers.iter().filter(|kind| kind.window.is_some() == slides);
            let of = of.chain(&c.layers).find_map(|kind| kind.rotary.clone()).unwrap_or(Rotary::new(10000.0));
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

fn rotary_json(rotary: &Rotary, c: &TransformerConfig) -> Value {
    let mut json = match &rotary.scaling {
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
        RopeScaling::LongRope { short, long, attention_factor, context, .. } => {
            let mut json = json!({
                "rope_type": "longrope", "short_factor": short[..], "long_factor": long[..],
                "original_max_position_embeddings": context,
            });
            if *attention_factor != RopeScaling::long_rope_factor(c.context, *context) {
                json["attention_factor"] = json!(attention_factor);
            }
            json
        }
    };
    json["rope_theta"] = json!(rotary.base);
    if c.family == Family::GptNeoX || rotary.features.is_some() {
        let features = rotary.features.unwrap_or(c.head_dim);
        json["partial_rotary_factor"] = json!(partial_rotary_factor(features, c.head_dim));
    }
    json
}

/// The factor by which a reader multiplies the features of a head, and rounds down, to get these: the quotient, or the next larger number where
/// the product falls short of a whole one.
fn partial_rotary_factor(features: usize, head_dim: usize) -> f64 {
    let quotient = features as f64 / head_dim as f64;
    if (head_dim as f64 * quotient) as usize == features { quotient } else { quotient.next_up() }
}

#[cfg(test)]
mod tests {
    use super::partial_rotary_factor;

    #[test]
    fn a_written_factor_is_read_as_the_same_number_of_features() {
        for head_dim in 1..=512 {
            for features in 1..=head_dim {
                let factor = partial_rotary_factor(features, head_dim);
                assert_eq!((head_dim as f64 * factor) as usize, features, "of {head_dim}");
            }
        }
        assert_eq!(partial_rotary_factor(32, 128), 0.25);
    }
}
