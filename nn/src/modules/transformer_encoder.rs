//! The original transformer's attention and encoder: [`MultiheadAttention`], [`TransformerEncoderLayer`].

use phalanx_autograd::{Attention, Var};
use phalanx_tensor::DType;

use super::{Dropout, LayerNorm, LayerNormConfig, Linear, LinearConfig};
use crate::mode::{Mode, modes};
use crate::models::Activation;
use crate::{Error, Init, Module, Parameter, Result, Scope, parameters};

/// `out_proj(concat(softmax(q_h k_hᵀ / sqrt(dim)) v_h))` over heads h, for queries `[B, T, width]`, keys and values
/// `[B, S, width]`.
/// Source: Vaswani et al.: Attention is all you need (2017).
pub struct MultiheadAttention {
    /// `[3 width, width]`: the weights of queries, keys and values.
    pub in_proj_weight: Parameter,
    /// `[3 width]`
    pub in_proj_bias: Option<Parameter>,
    /// The output projection of the heads' results.
    pub out_proj: Linear,
    heads: usize,
    width: usize,
    dropout: Dropout,
    mode: Mode,
}

modes!(MultiheadAttention);
parameters!(MultiheadAttention { in_proj_weight, in_proj_bias, out_proj });

/// How a [`MultiheadAttention`] is made.
#[derive(Clone, Copy, Debug)]
pub struct MultiheadAttentionConfig {
    width: usize,
    heads: usize,
    bias: bool,
    qkv_bias: Option<bool>,
    init: Option<Init>,
    dropout: f64,
}

impl MultiheadAttentionConfig {
    /// `heads` heads that share `width` features.
    pub fn new(width: usize, heads: usize) -> MultiheadAttentionConfig {
        MultiheadAttentionConfig { width, heads, bias: true, qkv_bias: None, init: None, dropout: 0.0 }
    }

    /// With biases or without.
    #[must_use]
    pub fn with_bias(self, bias: bool) -> MultiheadAttentionConfig {
        MultiheadAttentionConfig { bias, ..self }
    }

    /// With biases of queries, keys and values or without, whatever the output has.
    #[must_use]
    pub fn with_qkv_bias(self, bias: bool) -> MultiheadAttentionConfig {
        MultiheadAttentionConfig { qkv_bias: Some(bias), ..self }
    }

    /// With these initial weights, and biases of 0.
    #[must_use]
    pub fn with_init(self, init: Init) -> MultiheadAttentionConfig {
        MultiheadAttentionConfig { init: Some(init), ..self }
    }

    /// With this dropout of the probabilities.
    #[must_use]
    pub fn with_dropout(self, dropout: f64) -> MultiheadAttentionConfig {
        MultiheadAttentionConfig { dropout, ..self }
    }

    /// The layer.
    ///
    /// # Errors
    /// If the width is no multiple of the heads, or it cannot be allocated.
    pub fn init(self, scope: &Scope) -> Result<MultiheadAttention> {
        let MultiheadAttentionConfig { width, heads, bias, dropout, .. } = self;
        let sound = heads > 0 && width > 0 && width.is_multiple_of(heads);
        let Some(rows) = width.checked_mul(3).filter(|_| sound) else {
            let why = format!("got {heads} heads of a width of {width}, wanted a multiple of the heads");
            return Err(Error::invalid("MultiheadAttention", why));
        };
        let weights = self.init.unwrap_or(Init::XavierUniform { gain: 1.0 });
        let in_proj_bias = || scope.parameter("in_proj_bias", &[rows], Init::ZEROS);
        let in_proj_bias = self.qkv_bias.unwrap_or(bias).then(in_proj_bias).transpose()?;
        let out_init = self.init.unwrap_or(Init::layer(width));
        let out_proj = LinearConfig::new(width, width).with_bias(bias).with_init(out_init);
        Ok(MultiheadAttention {
            in_proj_weight: scope.parameter("in_proj_weight", &[rows, width], weights)?,
            in_proj_bias,
            out_proj: out_proj.init(&scope.child("out_proj"))?,
            heads,
            width,
            dropout: Dropout::new(dropout, &scope.child("dropout"))?,
            mode: Mode::default(),
        })
    }
}

/// The attention masks. True means *hidden*, as in PyTorch's modules.
#[derive(Clone, Copy, Debug, Default)]
pub struct AttentionMasks<'a> {
    /// bool, `[T, S]`, or `[B heads, T, S]` with a mask for each head.
    pub mask: Option<&'a Var>,
    /// bool, `[B, S]`.
    pub keys: Option<&'a Var>,
}

impl MultiheadAttention {
    /// The result `[B, T, width]`.
    ///
    /// # Errors
    /// If the inputs do not fit.
    pub fn forward(&self, query: &Var, key: &Var, value: &Var, masks: AttentionMasks<'_>) -> Result<Var> {
        let _mode = self.mode.enter();
        let [q, k, v] = self.project([query, key, value])?;
        let visible = self.visible_keys(&q, &k, masks)?;
        self.join(&match self.dropout.is_active() {
            true => self.probabilities(&q, &k, visible.as_ref())?.matmul(&v)?,
            false => q.scaled_dot_product_attention(&k, &v, visible.as_ref(), &Attention::default())?,
        })
    }

    /// The result and the probabilities `[B, heads, T, S]`.
    ///
    /// # Errors
    /// If the inputs do not fit.
    pub fn forward_with_weights(
        &self,
        query: &Var,
        key: &Var,
        value: &Var,
        masks: AttentionMasks<'_>,
    ) -> Result<(Var, Var)> {
        let _mode = self.mode.enter();
        let [q, k, v] = self.project([query, key, value])?;
        let p = self.probabilities(&q, &k, self.visible_keys(&q, &k, masks)?.as_ref())?;
        Ok((self.join(&p.matmul(&v)?)?, p))
    }

    /// Queries, keys and values by heads, `[B, heads, T or S, dim]`.
    fn project(&self, inputs: [&Var; 3]) -> Result<[Var; 3]> {
        if let Some(odd) = inputs.iter().find(|x| x.rank() != 3 || x.shape()[2] != self.width) {
            let why = format!("got an input of shape {:?}, wanted [B, T, {}]", odd.shape(), self.width);
            return Err(Error::invalid("MultiheadAttention", why));
        }
        let (weight, bias) = (self.in_proj_weight.var(), self.in_proj_bias.as_ref().map(Parameter::var));
        let projected = if inputs.iter().all(|x| std::ptr::eq(*x, inputs[0])) {
            // One product for all three.
            inputs[0].linear(&weight, bias.as_ref())?.split(self.width, -1)?
        } else {
            let weights = weight.split(self.width, 0)?;
            let biases = bias.map(|bias| bias.split(self.width, 0)).transpose()?;
            let part = |i: usize| inputs[i].linear(&weights[i], biases.as_ref().map(|all| &all[i]));
            [part(0)?, part(1)?, part(2)?].into_iter().collect()
        };
        let by_heads = |x: &Var| -> Result<Var> {
            let shape = [x.shape()[0], x.shape()[1], self.heads, self.width / self.heads];
            Ok(x.reshape_to(&shape)?.transpose(1, 2)?)
        };
        Ok([by_heads(&projected[0])?, by_heads(&projected[1])?, by_heads(&projected[2])?])
    }

    /// The mask of visible keys, in a shape that broadcasts to `[B, heads, T, S]`.
    fn visible_keys(&self, q: &Var, k: &Var, masks: AttentionMasks<'_>) -> Result<Option<Var>> {
        let (batch, queries, keys) = (q.shape()[0], q.shape()[2], k.shape()[2]);
        let mask = match masks.mask {
            Some(mask) if mask.rank() == 3 => {
                let mask = wanted(mask, &[batch * self.heads, queries, keys])?;
                Some(mask.reshape_to(&[batch, self.heads, queries, keys])?.eq_scalar(false)?)
            }
            Some(mask) => Some(wanted(mask, &[queries, keys])?.eq_scalar(false)?),
            None => None,
        };
        let Some(padding) = masks.keys else { return Ok(mask) };
        let padding = wanted(padding, &[batch, keys])?.reshape_to(&[batch, 1, 1, keys])?;
        let Some(mask) = mask else { return Ok(Some(padding.eq_scalar(false)?)) };
        let shape = [batch, if mask.rank() == 4 { self.heads } else { 1 }, queries, keys];
        Ok(Some(mask.broadcast_to(&shape)?.masked_fill(&padding, false)?))
    }

    fn probabilities(&self, q: &Var, k: &Var, visible: Option<&Var>) -> Result<Var> {
        let scale = ((self.width / self.heads) as f64).sqrt().recip();
        let mut scores = q.matmul(&k.transpose(2, 3)?)?.mul_scalar(scale)?;
        if let Some(visible) = visible {
            scores = scores.masked_fill(&visible.eq_scalar(false)?, f64::NEG_INFINITY)?;
        }
        self.dropout.forward(&scores.softmax(-1)?)
    }

    /// The heads' results side by side, through the output projection.
    fn join(&self, y: &Var) -> Result<Var> {
        let shape = [y.shape()[0], y.shape()[2], self.width];
        self.out_proj.forward(&y.transpose(1, 2)?.reshape_to(&shape)?)
    }
}

/// A mask of that shape.
fn wanted<'a>(mask: &'a Var, shape: &[usize]) -> Result<&'a Var> {
    if mask.shape() == shape && mask.dtype() == DType::Bool {
        return Ok(mask);
    }
    let got = format!("got a mask of shape {:?} and dtype {}", mask.shape(), mask.dtype());
    Err(Error::invalid("MultiheadAttention", format!("{got}, wanted {shape:?} and {}", DType::Bool)))
}

/// Self-attention and an MLP, each added to its input, with norms before or after.
/// Source: Vaswani et al.: Attention is all you need (2017); Xiong et al.: On layer normalization (2020).
pub struct TransformerEncoderLayer {
    /// Attention.
    pub self_attn: MultiheadAttention,
    /// The MLP's first layer.
    pub linear1: Linear,
    /// The MLP's second layer.
    pub linear2: Linear,
    /// The norm of attention.
    pub norm1: LayerNorm,
    /// The norm of the MLP.
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
    /// Features inside the MLP (2048).
    pub inner: usize,
    /// Dropout everywhere (0.1).
    pub dropout: f64,
    /// The MLP's activation function (relu).
    pub activation: Activation,
    /// Added to variances (1e-5).
    pub eps: f64,
    /// Whether norms come before attention and the MLP, rather than after the sums.
    pub norm_first: bool,
    /// Whether linear layers and norms have biases.
    pub bias: bool,
    /// Whether queries, keys and values have biases (as `bias` if absent).
    pub qkv_bias: Option<bool>,
    /// Dropout of attention's probabilities (as `dropout` if absent).
    pub attention_dropout: Option<f64>,
    /// Dropout between the MLP's layers (as `dropout` if absent).
    pub inner_dropout: Option<f64>,
    /// Initial weights of linear layers, whose biases then begin as 0 (PyTorch's if absent).
    pub init: Option<Init>,
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
            qkv_bias: None,
            attention_dropout: None,
            inner_dropout: None,
            init: None,
        }
    }

    /// The layer.
    ///
    /// # Errors
    /// If the heads do not divide the width, or it cannot be allocated.
    pub fn init(self, scope: &Scope) -> Result<TransformerEncoderLayer> {
        let TransformerEncoderLayerConfig { width, heads, inner, dropout, eps, bias, .. } = self;
        let attention = MultiheadAttentionConfig {
            bias,
            qkv_bias: self.qkv_bias,
            init: self.init,
            dropout: self.attention_dropout.unwrap_or(dropout),
            ..MultiheadAttentionConfig::new(width, heads)
        };
        let norm = LayerNormConfig::new(&[width]).with_eps(eps).with_bias(bias);
        let linear = |i, o, name: &str| {
            let linear = LinearConfig::new(i, o).with_bias(bias);
            self.init.map_or(linear, |init| linear.with_init(init)).init(&scope.child(name))
        };
        let drop = |p, name: &str| Dropout::new(p, &scope.child(name));
        Ok(TransformerEncoderLayer {
            self_attn: attention.init(&scope.child("self_attn"))?,
            linear1: linear(width, inner, "linear1")?,
            linear2: linear(inner, width, "linear2")?,
            norm1: norm.clone().init(&scope.child("norm1"))?,
            norm2: norm.init(&scope.child("norm2"))?,
            dropouts: [
                drop(self.inner_dropout.unwrap_or(dropout), "dropout")?,
                drop(dropout, "dropout1")?,
                drop(dropout, "dropout2")?,
            ],
            config: self,
            mode: Mode::default(),
        })
    }
}

impl TransformerEncoderLayer {
    /// `[B, T, width]` to the same shape, with attention masks.
    ///
    /// # Errors
    /// If the inputs do not fit.
    pub fn forward_masked(&self, x: &Var, masks: AttentionMasks<'_>) -> Result<Var> {
        let _mode = self.mode.enter();
        if self.config.norm_first {
            let x = self.add_attention(x, &self.norm1.forward(x)?, masks)?;
            return self.add_perceptron(&x, &self.norm2.forward(&x)?);
        }
        let x = self.norm1.forward(&self.add_attention(x, x, masks)?)?;
        self.norm2.forward(&self.add_perceptron(&x, &x)?)
    }

    /// `residual + dropout(attention(x))`.
    fn add_attention(&self, residual: &Var, x: &Var, masks: AttentionMasks<'_>) -> Result<Var> {
        let y = self.self_attn.forward(x, x, x, masks)?;
        self.dropouts[1].bias_dropout_add(&y, None, residual, None)
    }

    /// `residual + dropout(perceptron(x))`.
    fn add_perceptron(&self, residual: &Var, x: &Var) -> Result<Var> {
        let y = self.config.activation.apply(&self.linear1.forward(x)?)?;
        let y = self.linear2.forward(&self.dropouts[0].forward(&y)?)?;
        self.dropouts[2].bias_dropout_add(&y, None, residual, None)
    }
}

impl Module for TransformerEncoderLayer {
    fn forward(&self, x: &Var) -> Result<Var> {
        self.forward_masked(x, AttentionMasks::default())
    }
}
