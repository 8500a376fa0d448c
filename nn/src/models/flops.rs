//! A model's floating-point operations, by two formulas: PaLM's ([`ModelConfig::flops_per_token`]) and Megatron-LM's
//! ([`ModelConfig::flops`] has both).

use super::{ModelConfig, RecomputeMode};

/// The floating-point operations of a token, forward and backward.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct FlopsPerToken {
    /// By PaLM's formula, in which a position attends to half of the sequence.
    pub palm: f64,
    /// By Megatron-LM's formula; `None` if it is not known.
    pub megatron: Option<MegatronFlops>,
}

/// The floating-point operations of a token by Megatron-LM's formula, which counts the products of matrices, and in attention the whole
/// square of scores. Source: Narayanan et al.: Efficient large-scale language model training on GPU clusters (2021), equation 3;
/// Korthikanti et al.: Reducing activation recomputation (2022), appendix A.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MegatronFlops {
    /// What a step needs, without recomputation. Model FLOPs utilization (MFU) is made of it.
    pub model: f64,
    /// What a step computes, with recomputation. The rate of FLOP/s that the papers report is made of it.
    pub hardware: f64,
}

/// By PaLM's formula, or any other.
impl From<f64> for FlopsPerToken {
    fn from(palm: f64) -> FlopsPerToken {
        FlopsPerToken { palm, megatron: None }
    }
}

impl ModelConfig {
    /// Floating-point operations of a token in a sequence of `context` tokens, forward and backward. Each weight that a token is
    /// multiplied by takes two forward and four backward. So does each feature of the positions that it attends to, half of the sequence
    /// on average. Tables of positions and the embedding are looked up and multiply nothing; the head counts.
    /// Source: Chowdhery and others: PaLM (2022), appendix B.
    pub fn flops_per_token(&self, context: usize) -> f64 {
        let f = |n: usize| n as f64;
        let (weights, features) = match self {
            ModelConfig::Gpt(c) => (self.matrix_elements() - f(c.context) * f(c.width), f(c.width)),
            ModelConfig::Llama(c) => (self.matrix_elements(), f(c.heads) * f(c.head_dim)),
            ModelConfig::Transformer(c) => (c.active_elements(), f(c.heads) * f(c.head_dim)),
        };
        6.0 * weights + 6.0 * f(self.layers()) * features * f(context)
    }

    /// Floating-point operations of a token in a sequence of `context` tokens, forward and backward, by both formulas. What `recompute`
    /// repeats counts in [`MegatronFlops::hardware`].
    ///
    /// For `B` sequences of `s` positions, a GPT of `l` blocks of width `h` and a vocabulary of `V` that recomputes every block has
    ///
    /// ```text
    /// 96 B s l h² (1 + s / 6h + V / 16lh)
    /// ```
    /// Of these `24 B s l h² (1 + s / 6h)` are one pass over the blocks, of four, and `6 B s h V` are the head's. A pass over a block of a
    /// Llama has `4 h²` for each token times `(a d / h) (1 + k / a + s / h)` for attention of `a` query and `k` key heads of `d` features,
    /// plus `3 i / 2h` for a gated MLP of `i` inner features.
    pub fn flops(&self, context: usize, recompute: RecomputeMode) -> FlopsPerToken {
        let f = |n: usize| n as f64;
        let (s, h, blocks) = (f(context), f(self.width()), self.layers());
        let (heads, key_heads, mlp) = match self {
            ModelConfig::Gpt(c) => (h, h, 4.0 * h * f(c.inner)),
            ModelConfig::Llama(c) => {
                (f(c.heads * c.head_dim), f(c.key_heads * c.head_dim), 6.0 * h * f(c.inner))
            }
            ModelConfig::Transformer(c) => {
                let mlp = 2.0 * h * c.mlp_features(|experts| experts.chosen) / f(blocks);
                (f(c.heads * c.head_dim), f(c.key_heads * c.head_dim), mlp)
            }
        };
        let core = 4.0 * heads * s;
        let block = 4.0 * h * (heads + key_heads) + core + mlp;
        let model = 3.0 * f(blocks) * block + 6.0 * h * f(self.vocabulary());
        let repeated = match recompute {
            RecomputeMode::Attention => f(blocks) * core,
            mode => f(mode.recomputed(blocks)) * block,
        };
        let megatron = Some(MegatronFlops { model, hardware: model + repeated });
        FlopsPerToken { palm: self.flops_per_token(context), megatron }
    }
}

#[cfg(test)]
mod tests {
    use phalanx_autograd::Var;
    use phalanx_autograd::kernels::flops;
    use phalanx_tensor::{DType, Device, Tensor};

    use super::super::{GptConfig, LlamaConfig};
    use super::*;
    use crate::Scope;

    fn configs() -> [ModelConfig; 2] {
        let llama = LlamaConfig { key_heads: 1, ..LlamaConfig::new(50, 16, 2, 2, 8) };
        [ModelConfig::Gpt(GptConfig::new(50, 16, 2, 2, 8)), ModelConfig::Llama(llama)]
    }

    /// The operations of a token that kernels count in a forward pass.
    fn counted(config: &ModelConfig, rows: usize, positions: usize) -> f64 {
        let model = config.init(&Scope::new(1, DType::F32, Device::Meta(0))).unwrap();
        let tokens = Var::new(Tensor::zeros(&[rows, positions], DType::I64, Device::Meta(0)).unwrap());
        let before = flops();
        model.logits(&model.forward(&tokens).unwrap()).unwrap();
        (flops() - before) / (rows * positions) as f64
    }

    /// A third of them is the forward pass. Kernels count the position itself too, which the formula leaves out of what it attends to.
    #[test]
    fn flops_of_a_token_are_those_that_kernels_count() {
        let (rows, positions) = (3, 12);
        for config in configs() {
            let own_positions = 2.0 * (2 * 8) as f64;
            let wanted = config.flops_per_token(positions) / 3.0 + own_positions;
            assert_eq!(counted(&config, rows, positions), wanted, "{config:?}");
        }
    }

    /// Kernels count the keys up to each query, Megatron's formula counts all: `4 (T - (T + 1) / 2)` more for each feature and block.
    #[test]
    fn megatrons_flops_are_those_that_kernels_count_but_for_hidden_scores() {
        let positions = 12;
        for config in configs() {
            let hidden = 4.0 * (2 * 8) as f64 * (positions - 1) as f64 / 2.0;
            let model = config.flops(positions, RecomputeMode::Never).megatron.unwrap().model;
            assert_eq!(counted(&config, 3, positions) + hidden, model / 3.0, "{config:?}");
        }
    }

    /// Equation 3 of Narayanan et al. for GPT-3 in their table 1 (175 billion parameters: 96 blocks of 12288, batches of 1536 by 2048 tokens),
    /// and Korthikanti's 72 for a step that recomputes nothing.
    #[test]
    fn megatrons_flops_are_the_papers() {
        let (batch, s, l, h, v) = (1536.0, 2048.0, 96.0, 12288.0, 51200.0);
        let config = ModelConfig::Gpt(GptConfig::new(51200, 2048, 96, 96, 12288));
        let of = |mode| config.flops(2048, mode).megatron.unwrap();
        let close = |got: f64, wanted: f64| assert!((got / wanted - 1.0).abs() < 1e-12, "{got} {wanted}");
        let all = 96.0 * batch * s * l * h * h * (1.0 + s / (6.0 * h) + v / (16.0 * l * h));
        close(batch * s * of(RecomputeMode::Always).hardware, all);
        let model = 72.0 * batch * s * l * h * h * (1.0 + s / (6.0 * h) + v / (12.0 * l * h));
        close(batch * s * of(RecomputeMode::Always).model, model);
        close(batch * s * of(RecomputeMode::Never).hardware, model);
        close(batch * s * of(RecomputeMode::Attention).hardware, model + 4.0 * batch * s * s * l * h);
        let block = 24.0 * batch * s * h * h * (1.0 + s / (6.0 * h));
        close(batch * s * of(RecomputeMode::ExceptLast).hardware, all - block);
    }
}
