//! [`Family`]: the families of transformers, and their settings.

use super::{Experts, NormKind, NormPlaces, TransformerConfig};
use crate::models::{Activation, RouterLosses};
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
    /// Mixtral: two of some experts.
    Mixtral,
    /// Qwen3's mixtures of experts.
    Qwen3Moe,
    /// OLMoE: many small experts.
    OlmoE,
}

/// Each family, its `model_type`, and its class in transformers.
pub(super) const FAMILIES: [(Family, &str, &str); 14] = [
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
    (Family::Mixtral, "mixtral", "MixtralForCausalLM"),
    (Family::Qwen3Moe, "qwen3_moe", "Qwen3MoeForCausalLM"),
    (Family::OlmoE, "olmoe", "OlmoeForCausalLM"),
];

/// Attention of a block, as files say it.
pub(super) const FULL: &str = "full_attention";
pub(super) const SLIDING: &str = "sliding_attention";

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
        let list = |by: f64| (0..c.head_dim / 2).map(|i| 1.0 + by * i as f64).collect();
        let long = RopeScaling::LongRope {
            short: list(0.5),
            long: list(2.0),
            attention_factor: RopeScaling::long_rope_factor(context, (context / 2).max(2)),
            context: (context / 2).max(2),
        };
        for (i, kind) in c.layers.iter_mut().enumerate() {
            let rotary = kind.rotary.clone().unwrap_or(Rotary::new(10000.0));
            match self {
                Family::Llama => kind.rotary = Some(Rotary { scaling: half.clone(), ..rotary }),
                Family::Phi3 => kind.rotary = Some(Rotary { scaling: long.clone(), ..rotary }),
                Family::Mistral => kind.window = Some(5),
                Family::Gemma2 | Family::Gemma3 if i % 2 == 0 => kind.window = Some(5),
                Family::GptNeoX => {
                    kind.rotary = Some(Rotary { features: Some(c.head_dim / 4 * 2), ..rotary })
                }
                Family::SmolLm3 if i % 4 == 3 => kind.rotary = None,
                _ => {}
            }
        }
        c.padding = matches!(self, Family::Gemma | Family::Olmo2).then_some(1);
        match self {
            Family::Gemma2 => (c.score_cap, c.logit_cap) = (Some(50.0), Some(30.0)),
            Family::GptNeoX => c.key_heads = heads,
            _ => {}
        }
        if let Some(experts) = &mut c.experts {
            (experts.count, experts.chosen, experts.inner) = (4, 2, c.inner / 2);
            experts.dense.extend((self == Family::Qwen3Moe).then_some(1));
        }
        if matches!(self, Family::Mixtral | Family::OlmoE) {
            c.inner /= 2;
        }
        c
    }

    pub(super) fn is_gemma(self) -> bool {
        matches!(self, Family::Gemma | Family::Gemma2 | Family::Gemma3)
    }

    /// A config of given sizes with what all models of the family have.
    pub(super) fn settings(self, config: TransformerConfig) -> TransformerConfig {
        let mut c = config;
        let experts = |inner, count, chosen, normalized| {
            let losses = RouterLosses::default();
            Some(Experts { count, chosen, inner, normalized, dense: Vec::new(), losses, bias_step: 0.0 })
        };
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
            Family::Mixtral => c.experts = experts(c.inner, 8, 2, true),
            Family::Qwen3Moe => {
                c.query_key_norm = each_head(false);
                c.experts = experts(768, 128, 8, true);
            }
            Family::OlmoE => {
                c.query_key_norm = Some(QueryKeyNorm { each_head: false, plus_one: false, eps: c.eps });
                c.experts = experts(c.inner, 64, 8, false);
            }
        }
        c
    }
}
