//! The arithmetic of a model's training step, by a formula.

use super::ModelConfig;

impl ModelConfig {
    /// Floating-point operations of a token in a sequence of so many, forward and backward: two for each weight that it is multiplied by forward
    /// and four backward, and as many for each feature of the positions that it attends to, half of the sequence on average. A table of
    /// positions is looked up and multiplies nothing, as is the embedding; the head counts. Source: Chowdhery and others: PaLM (2022), appendix B.
    pub fn flops_per_token(&self, context: usize) -> f64 {
        let f = |n: usize| n as f64;
        let (weights, features) = match self {
            ModelConfig::Gpt(c) => (self.matrix_elements() - f(c.context) * f(c.width), f(c.width)),
            ModelConfig::Llama(c) => (self.matrix_elements(), f(c.heads) * f(c.head_dim)),
        };
        6.0 * weights + 6.0 * f(self.layers()) * features * f(context)
    }
}

#[cfg(test)]
mod tests {
    use phalanx_autograd::{Var, kernels::flops};
    use phalanx_tensor::{DType, Device, Tensor};

    use crate::Scope;
    use crate::models::{GptConfig, LlamaConfig, ModelConfig};

    /// A third of them is the forward pass. Kernels count the position itself too, which the formula leaves out of what it attends to.
    #[test]
    fn flops_of_a_token_are_those_that_kernels_count() {
        let gpt = ModelConfig::Gpt(GptConfig::new(50, 16, 2, 2, 8));
        let llama = ModelConfig::Llama(LlamaConfig { key_heads: 1, ..LlamaConfig::new(50, 16, 2, 2, 8) });
        for config in [gpt, llama] {
            let (rows, positions) = (3, 12);
            let model = config.init(&Scope::new(1, DType::F32, Device::Meta(0))).unwrap();
            let tokens = Var::new(Tensor::zeros(&[rows, positions], DType::I64, Device::Meta(0)).unwrap());
            let before = flops();
            model.logits(&model.forward(&tokens).unwrap()).unwrap();
            let own_positions = 2.0 * (2 * 8) as f64;
            let wanted = config.flops_per_token(positions) / 3.0 + own_positions;
            assert_eq!((flops() - before) / (rows * positions) as f64, wanted, "{config:?}");
        }
    }
}
