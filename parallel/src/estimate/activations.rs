//! Activation memory: what a forward pass keeps for backward, in bytes, with activations in two bytes and dropout's masks in one.
//!
//! Source: Korthikanti et al., "Reducing activation recomputation in large transformer models" (arXiv:2205.05198), section 4 and
//! table 2.

use super::Transformer;

/// What is computed again in backward.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Recompute {
    /// Nothing.
    #[default]
    Nothing,
    /// Attention between its products with weights: its scores, softmax, dropout and the product with the values.
    Attention,
    /// The whole block: only its input is kept.
    Block,
}

/// How a model is cut over ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    /// Ranks that share each layer, `t`.
    pub tensor: usize,
    /// Whether those also share what lies between the shared layers, along the sequence.
    pub sequence_parallel: bool,
    /// Pipeline ranks, `p`.
    pub pipeline: usize,
    /// Stages of a pipeline rank, `v`.
    pub chunks: usize,
    /// What is computed again.
    pub recompute: Recompute,
}

impl Default for Layout {
    /// One rank that recomputes nothing.
    fn default() -> Layout {
        let recompute = Recompute::Nothing;
        Layout { tensor: 1, sequence_parallel: false, pipeline: 1, chunks: 1, recompute }
    }
}

impl Transformer {
    /// What a rank keeps of one block for a micro-batch of `b` sequences:
    ///
    /// ```text
    ///                        nothing recomputed              attention recomputed
    /// one rank               s b h (34 + 5 a s / h)          34 s b h
    /// t ranks                s b h (10 + 24 / t + 5 a s / (h t))   s b h (10 + 24 / t)
    /// t, sequence parallel   s b h (34 + 5 a s / h) / t      34 s b h / t
    /// ```
    ///
    /// and `2 s b h` if the whole block is recomputed, whatever the ranks: the paper keeps the input on each.
    pub fn block_activation_bytes(&self, layout: &Layout, b: usize) -> f64 {
        let [h, a, s, t] = [self.hidden, self.heads, self.sequence, layout.tensor].map(|size| size as f64);
        let sbh = s * b as f64 * h;
        let attention = match layout.recompute {
            Recompute::Nothing => 5.0 * a * s / h,
            Recompute::Attention => 0.0,
            Recompute::Block => return 2.0 * sbh,
        };
        let between = if layout.sequence_parallel { 10.0 / t } else { 10.0 };
        sbh * (between + (24.0 + attention) / t)
    }

    /// What a rank of the first pipeline stage keeps with 1F1B, which is the most of any: as many blocks as the whole model
    /// has, times `1 + (p - 1) / (p v)` if it has several stages; and `s b h p / t` of the embedding's dropout. Without a
    /// pipeline also `4 s b h / t (1 + V / h)` of the last norm, the output layer and the loss (in four bytes).
    ///
    /// The ends are those with sequence parallelism, as in the paper; without it they are small beside the blocks too.
    pub fn activation_bytes(&self, layout: &Layout, b: usize) -> f64 {
        let [h, v, s, t] =
            [self.hidden, self.vocabulary, self.sequence, layout.tensor].map(|size| size as f64);
        let (p, chunks) = (layout.pipeline as f64, layout.chunks as f64);
        let sbh = s * b as f64 * h;
        let blocks = self.layers as f64 * self.block_activation_bytes(layout, b);
        let more = if layout.chunks > 1 { 1.0 + (p - 1.0) / (p * chunks) } else { 1.0 };
        let head = if layout.pipeline == 1 { 4.0 * sbh / t * (1.0 + v / h) } else { 0.0 };
        blocks * more + sbh * p / t + head
    }
}
