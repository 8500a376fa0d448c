//! [`Transformer`]: what a transformer costs before it is built, by the formulas of papers: parameters, arithmetic, and the
//! activations that a forward pass keeps for backward, in bytes, with activations in two bytes and dropout's masks in one.
//!
//! Source of the activations: Korthikanti et al., "Reducing activation recomputation in large transformer models"
//! (arXiv:2205.05198), section 4 and table 2.

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
    /// use phalanx_parallel::planning::Transformer;
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

/// What of each block is computed again in backward: Megatron-LM's `--recompute-granularity`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum RecomputeGranularity {
    /// Nothing.
    #[default]
    Nothing,
    /// `selective`: attention between its products with weights: its scores, softmax, dropout and the product with the values.
    Attention,
    /// `full`: the whole block; only its input is kept.
    Block,
}

/// How many ways a model is split over ranks, and what of it is recomputed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Degrees {
    /// Ranks that share each layer, `t`.
    pub tensor: usize,
    /// Whether those also share what lies between the shared layers, along the sequence.
    pub sequence_parallel: bool,
    /// Pipeline ranks, `p`.
    pub pipeline: usize,
    /// Stages of a pipeline rank, `v`.
    pub chunks: usize,
    /// What is computed again.
    pub recompute: RecomputeGranularity,
}

impl Default for Degrees {
    /// One rank that recomputes nothing.
    fn default() -> Degrees {
        let recompute = RecomputeGranularity::Nothing;
        Degrees { tensor: 1, sequence_parallel: false, pipeline: 1, chunks: 1, recompute }
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
    pub fn block_activation_bytes(&self, degrees: &Degrees, b: usize) -> f64 {
        let [h, a, s, t] = [self.hidden, self.heads, self.sequence, degrees.tensor].map(|size| size as f64);
        let sbh = s * b as f64 * h;
        let attention = match degrees.recompute {
            RecomputeGranularity::Nothing => 5.0 * a * s / h,
            RecomputeGranularity::Attention => 0.0,
            RecomputeGranularity::Block => return 2.0 * sbh,
        };
        let between = if degrees.sequence_parallel { 10.0 / t } else { 10.0 };
        sbh * (between + (24.0 + attention) / t)
    }

    /// What a rank of the first pipeline stage keeps with 1F1B, which is the most of any: as many blocks as the whole model
    /// has, times `1 + (p - 1) / (p v)` if it has several stages; and `s b h p / t` of the embedding's dropout. Without a
    /// pipeline also `4 s b h / t (1 + V / h)` of the last norm, the output layer and the loss (in four bytes).
    ///
    /// The ends are those with sequence parallelism, as in the paper; without it they are small beside the blocks too.
    pub fn activation_bytes(&self, degrees: &Degrees, b: usize) -> f64 {
        let [h, v, s, t] =
            [self.hidden, self.vocabulary, self.sequence, degrees.tensor].map(|size| size as f64);
        let (p, chunks) = (degrees.pipeline as f64, degrees.chunks as f64);
        let sbh = s * b as f64 * h;
        let blocks = self.layers as f64 * self.block_activation_bytes(degrees, b);
        let more = if degrees.chunks > 1 { 1.0 + (p - 1.0) / (p * chunks) } else { 1.0 };
        let head = if degrees.pipeline == 1 { 4.0 * sbh / t * (1.0 + v / h) } else { 0.0 };
        blocks * more + sbh * p / t + head
    }
}
