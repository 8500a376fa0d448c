//! A layer of the original transformer's encoder.

use phalanx_autograd::Var;

use super::multihead_attention::Hidden;
use super::{
    Dropout, LayerNorm, LayerNormConfig, Linear, LinearConfig, MultiheadAttention, MultiheadAttentionConfig,
};
use crate::mode::{Mode, modes};
use crate::models::Activation;
use crate::{Module, Result, Scope, parameters};

/// Self-attention and a perceptron, each added to its input, with norms before or after.
/// Source: Vaswani et al.: Attention is all you need (2017); Xiong et al.: On layer normalization (2020).
pub struct TransformerEncoderLayer {
    /// Attention.
    pub self_attn: MultiheadAttention,
    /// The perceptron's first map.
    pub linear1: Linear,
    /// The perceptron's second map.
    pub linear2: Linear,
    /// The norm of attention.
    pub norm1: LayerNorm,
    /// The norm of the perceptron.
    pub norm2: LayerNorm,
    dropouts: [Dropout; 3],
    config: TransformerEncoderLayerConfig,
    mode: Mode,
}

modes!(TransformerEncoderLayer);
parameters!(TransformerEncoderLayer { self_attn, linear1, linear2, norm1, norm2 });

/// How a [`TransformerEncoderLayer`] is made.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TransformerEncoderLayerConfig {
    /// Features.
    pub width: usize,
    /// Attention heads.
    pub heads: usize,
    /// Features inside the perceptron (2048).
    pub inner: usize,
    /// Dropout everywhere (0.1).
    pub dropout: f64,
    /// The perceptron's nonlinearity (relu).
    pub activation: Activation,
    /// Added to variances (1e-5).
    pub eps: f64,
    /// Norms before attention and perceptron, rather than after the sums.
    pub norm_first: bool,
    /// Whether maps and norms have biases.
    pub bias: bool,
}

impl TransformerEncoderLayerConfig {
    /// PyTorch's defaults for a layer of that size.
    pub fn new(width: usize, heads: usize) -> TransformerEncoderLayerConfig {
        TransformerEncoderLayerConfig {
            width,
            heads,
            inner: 2048,
            dropout: 0.1,
            activation: Activation::Relu,
            eps: 1e-5,
            norm_first: false,
            bias: true,
        }
    }

    /// The layer.
    ///
    /// # Errors
    /// If the heads do not divide the width, or it cannot be allocated.
    pub fn init(self, scope: &Scope) -> Result<TransformerEncoderLayer> {
        let TransformerEncoderLayerConfig { width, heads, inner, dropout, eps, bias, .. } = self;
        let attention = MultiheadAttentionConfig::new(width, heads).with_bias(bias).with_dropout(dropout);
        let norm = LayerNormConfig::new(&[width]).with_eps(eps).with_bias(bias);
        let linear = |i, o, name: &str| LinearConfig::new(i, o).with_bias(bias).init(&scope.child(name));
        let drop = |name: &str| Dropout::new(dropout, &scope.child(name));
        Ok(TransformerEncoderLayer {
            self_attn: attention.init(&scope.child("self_attn"))?,
            linear1: linear(width, inner, "linear1")?,
            linear2: linear(inner, width, "linear2")?,
            norm1: norm.clone().init(&scope.child("norm1"))?,
            norm2: norm.init(&scope.child("norm2"))?,
            dropouts: [drop("dropout")?, drop("dropout1")?, drop("dropout2")?],
            config: self,
            mode: Mode::default(),
        })
    }
}

impl TransformerEncoderLayer {
    /// `[B, T, width]` to the same; `hidden` says what may not be seen.
    ///
    /// # Errors
    /// If the inputs do not fit.
    pub fn forward_masked(&self, x: &Var, hidden: Hidden<'_>) -> Result<Var> {
        let _mode = self.mode.enter();
        if self.config.norm_first {
            let x = x.add(&self.attend(&self.norm1.forward(x)?, hidden)?)?;
            return Ok(x.add(&self.perceptron(&self.norm2.forward(&x)?)?)?);
        }
        let x = self.norm1.forward(&x.add(&self.attend(x, hidden)?)?)?;
        self.norm2.forward(&x.add(&self.perceptron(&x)?)?)
    }

    fn attend(&self, x: &Var, hidden: Hidden<'_>) -> Result<Var> {
        self.dropouts[1].forward(&self.self_attn.forward(x, x, x, hidden)?)
    }

    fn perceptron(&self, x: &Var) -> Result<Var> {
        let y = self.config.activation.apply(&self.linear1.forward(x)?)?;
        self.dropouts[2].forward(&self.linear2.forward(&self.dropouts[0].forward(&y)?)?)
    }
}

impl Module for TransformerEncoderLayer {
    fn forward(&self, x: &Var) -> Result<Var> {
        self.forward_masked(x, Hidden::default())
    }
}
