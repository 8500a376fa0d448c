//! [`Transformer`]: a model's sizes, its parameters and its arithmetic.

/// The sizes of a GPT: the output layer shares the embedding's weights, positions are learned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Transformer {
    /// Blocks, `l`.
    pub layers: usize,
    /// The width of the residual stream, `h`.
    pub hidden: usize,
    /// Heads of attention, `a`.
    pub heads: usize,
    /// Words of the vocabulary, `V`.
    pub vocabulary: usize,
    /// Positions, `s`.
    pub sequence: usize,
}

impl Transformer {
    /// How many parameters there are: `12 l h^2 (1 + 13 / (12 h) + (V + s) / (12 l h))`, which is whole, and exact below
    /// `2^53`. Left out are the last norm's `2 h`.
    ///
    /// Source: Narayanan et al., "Efficient large-scale language model training on GPU clusters" (arXiv:2104.04473),
    /// equation 2.
    ///
    /// ```
    /// use phalanx_parallel::estimate::Transformer;
    ///
    /// let gpt3 = Transformer { layers: 96, hidden: 12288, heads: 96, vocabulary: 51200, sequence: 2048 };
    /// assert_eq!(gpt3.parameters(), 174_615_822_336.0);
    /// ```
    pub fn parameters(&self) -> f64 {
        let [l, h, v, s] = [self.layers, self.hidden, self.vocabulary, self.sequence].map(|size| size as f64);
        l * h * (12.0 * h + 13.0) + (v + s) * h
    }

    /// The floating-point operations of matrix products in a step over `batch` sequences, forward, backward and a second
    /// forward of every block in backward (full recomputation): `96 B s l h^2 (1 + s / (6 h) + V / (16 l h))`.
    ///
    /// Source: as of [`Transformer::parameters`], equation 3.
    pub fn flops_recomputed(&self, batch: usize) -> f64 {
        self.block_flops(batch) * 4.0 + self.head_flops(batch) * 3.0
    }

    /// The same without recomputation: `72 B s l h^2 (1 + s / (6 h) + V / (12 l h))`.
    ///
    /// Source: Korthikanti et al., "Reducing activation recomputation in large transformer models" (arXiv:2205.05198),
    /// appendix A, the model's operations.
    pub fn flops(&self, batch: usize) -> f64 {
        (self.block_flops(batch) + self.head_flops(batch)) * 3.0
    }

    /// Of the blocks' forward pass: `24 B s l h^2 (1 + s / (6 h))`. A backward pass is twice that.
    fn block_flops(&self, batch: usize) -> f64 {
        let [l, h, s, b] = [self.layers, self.hidden, self.sequence, batch].map(|size| size as f64);
        24.0 * b * s * l * h * h * (1.0 + s / (6.0 * h))
    }

    /// Of the output layer's forward pass: `2 B s h V`.
    fn head_flops(&self, batch: usize) -> f64 {
        let [h, v, s, b] = [self.hidden, self.vocabulary, self.sequence, batch].map(|size| size as f64);
        2.0 * b * s * h * v
    }
}
