//! Where files have the parameters of a transformer: under the family's names, and some of them joined.

use super::{Family, TransformerConfig};
use crate::models::stored::{Rows, Stored};

impl TransformerConfig {
    /// Where files have a parameter of this name.
    pub(crate) fn stored(&self, name: &str) -> Stored {
        let (heads, keys) = (self.heads * self.head_dim, self.key_heads * self.head_dim);
        let parts = [
            ("self_attn.q_proj", 0, heads),
            ("self_attn.k_proj", heads, keys),
            ("self_attn.v_proj", heads + keys, keys),
        ];
        match self.family {
            Family::Phi3 => {
                let mlp = [("mlp.gate_proj", 0, self.inner), ("mlp.up_proj", self.inner, self.inner)];
                let joint = parts.iter().map(|part| (part, "self_attn.qkv_proj"));
                let mut joint = joint.chain(mlp.iter().map(|part| (part, "mlp.gate_up_proj")));
                match joint.find(|((part, ..), _)| name.contains(part)) {
                    Some(((part, from, count), joint)) => {
                        let rows = Rows::Some { from: *from, count: *count };
                        Stored::part(format!("model.{}", name.replace(part, joint)), rows)
                    }
                    None => Stored::whole(with_prefix("model.", name)),
                }
            }
            Family::GptNeoX => {
                if let Some(third) = parts.iter().position(|(part, ..)| name.contains(part)) {
                    let name = name.replace(parts[third].0, "attention.query_key_value");
                    let rows = Rows::Third { third, heads: self.heads };
                    return Stored::part(format!("gpt_neox.{name}"), rows);
                }
                let names = [
                    ("self_attn.o_proj", "attention.dense"),
                    ("mlp.up_proj", "mlp.dense_h_to_4h"),
                    ("mlp.down_proj", "mlp.dense_4h_to_h"),
                    ("embed_tokens.", "embed_in."),
                    ("lm_head.", "embed_out."),
                ];
                let mut stored =
                    names.iter().fold(name.to_string(), |name, (ours, theirs)| name.replace(ours, theirs));
                if let Some(rest) = stored.strip_prefix("norm.") {
                    stored = format!("final_layer_norm.{rest}");
                }
                Stored::whole(if stored.starts_with("embed_out.") {
                    stored
                } else {
                    format!("gpt_neox.{stored}")
                })
            }
            Family::Mixtral => {
                let mut stored = with_prefix("model.", name);
                let names = [
                    ("gate_proj", "w1"),
                    ("down_proj", "w2"),
                    ("up_proj", "w3"),
                    (".mlp.", ".block_sparse_moe."),
                ];
                for (ours, theirs) in names {
                    stored = stored.replace(ours, theirs);
                }
                Stored::whole(stored)
            }
            _ => Stored::whole(with_prefix("model.", name)),
        }
    }
}

fn with_prefix(prefix: &str, name: &str) -> String {
    if name.starts_with("lm_head.") { name.to_string() } else { format!("{prefix}{name}") }
}
