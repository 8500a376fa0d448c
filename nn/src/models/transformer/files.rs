//! Where files have the parameters of a transformer: under the family's names, and some of them joined.

use phalanx_tensor::Tensor;

use super::{Family, TransformerConfig};
use crate::{Error, Result};

/// Where a file has a parameter.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Stored {
    /// The tensor of the file.
    pub(crate) name: String,
    /// Which of its rows.
    pub(crate) rows: Rows,
}

impl Stored {
    /// Whether the tensor has rows of other parameters too.
    pub(crate) fn is_joint(&self) -> bool {
        self.rows != Rows::All
    }
}

/// Rows of a tensor.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Rows {
    All,
    /// So many from a row on.
    Some {
        from: usize,
        count: usize,
    },
    /// The rows are `[heads, 3, features]`, of which this third.
    Third {
        third: usize,
        heads: usize,
    },
}

impl Rows {
    /// Those rows of a tensor of a file.
    pub(crate) fn of(self, whole: &Tensor) -> Result<Tensor> {
        Ok(match self {
            Rows::All => whole.clone(),
            Rows::Some { from, count } => whole.narrow(0, from, count)?,
            Rows::Third { third, heads } => {
                let rest = &whole.shape()[1..];
                let shape = [&[heads, 3, whole.shape()[0] / (3 * heads)], rest].concat();
                let part = whole.contiguous()?.with_shape(&shape)?.select(1, third)?.contiguous()?;
                part.with_shape(&[&[whole.shape()[0] / 3], rest].concat())?
            }
        })
    }

    /// Where they are among those of the same tensor.
    pub(crate) fn place(self) -> usize {
        match self {
            Rows::All => 0,
            Rows::Some { from, .. } => from,
            Rows::Third { third, .. } => third,
        }
    }

    /// The shape of those rows.
    pub(crate) fn shape(self, whole: &[usize]) -> Option<Vec<usize>> {
        let (first, rest) = whole.split_first()?;
        let rows = match self {
            Rows::All => *first,
            Rows::Some { from, count } => count.min(first.checked_sub(from)?),
            Rows::Third { heads, .. } => {
                if !first.is_multiple_of(3 * heads) {
                    return None;
                }
                first / 3
            }
        };
        Some([&[rows], rest].concat())
    }

    /// The tensor of a file, of all its parts in order.
    pub(crate) fn join(self, parts: &[Tensor]) -> Result<Tensor> {
        let [first, ..] = parts else { return Err(Error::invalid("save", "got no parts of a tensor")) };
        match self {
            Rows::All => Ok(first.clone()),
            Rows::Some { .. } => Ok(phalanx_kernels::cat(&parts.iter().collect::<Vec<_>>(), 0)?),
            Rows::Third { heads, .. } => {
                let rest = &first.shape()[1..];
                let shape = [&[heads, 1, first.shape()[0] / heads], rest].concat();
                let apart = |part: &Tensor| part.contiguous()?.with_shape(&shape);
                let apart = parts.iter().map(apart).collect::<phalanx_tensor::Result<Vec<_>>>()?;
                let whole = phalanx_kernels::cat(&apart.iter().collect::<Vec<_>>(), 1)?;
                Ok(whole.with_shape(&[&[3 * first.shape()[0]], rest].concat())?)
            }
        }
    }
}

impl TransformerConfig {
    /// Where files have a parameter of this name.
    pub(crate) fn stored(&self, name: &str) -> Stored {
        let (heads, keys) = (self.heads * self.head_dim, self.key_heads * self.head_dim);
        let parts = [
            ("self_attn.q_proj", 0, heads),
            ("self_attn.k_proj", heads, keys),
            ("self_attn.v_proj", heads + keys, keys),
        ];
        let whole = |name: String| Stored { name, rows: Rows::All };
        match self.family {
            Family::Phi3 => {
                let mlp = [("mlp.gate_proj", 0, self.inner), ("mlp.up_proj", self.inner, self.inner)];
                let joint = parts.iter().map(|part| (part, "self_attn.qkv_proj"));
                let mut joint = joint.chain(mlp.iter().map(|part| (part, "mlp.gate_up_proj")));
                match joint.find(|((part, ..), _)| name.contains(part)) {
                    Some(((part, from, count), joint)) => Stored {
                        name: format!("model.{}", name.replace(part, joint)),
                        rows: Rows::Some { from: *from, count: *count },
                    },
                    None => whole(with_prefix("model.", name)),
                }
            }
            Family::GptNeoX => {
                if let Some(third) = parts.iter().position(|(part, ..)| name.contains(part)) {
                    let name = name.replace(parts[third].0, "attention.query_key_value");
                    return Stored {
                        name: format!("gpt_neox.{name}"),
                        rows: Rows::Third { third, heads: self.heads },
                    };
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
                whole(if stored.starts_with("embed_out.") { stored } else { format!("gpt_neox.{stored}") })
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
                whole(stored)
            }
            _ => whole(with_prefix("model.", name)),
        }
    }
}

fn with_prefix(prefix: &str, name: &str) -> String {
    if name.starts_with("lm_head.") { name.to_string() } else { format!("{prefix}{name}") }
}
