//! Attention with projections, as in the original transformer.

use phalanx_autograd::{Attention, Var};
use phalanx_kernels as kernels;

use super::{Dropout, Linear, LinearConfig};
use crate::{Error, Init, Parameter, Result, Scope, parameters};

/// `out_proj(concat(softmax(q_h k_hᵀ / sqrt(dim)) v_h))` over heads h, for queries `[B, T, width]`, keys and values
/// `[B, S, width]`.
/// Source: Vaswani et al.: Attention is all you need (2017).
pub struct MultiheadAttention {
    /// `[3 width, width]`: the maps of queries, keys and values.
    pub in_proj_weight: Parameter,
    /// `[3 width]`
    pub in_proj_bias: Option<Parameter>,
    /// The map of the heads' results.
    pub out_proj: Linear,
    heads: usize,
    width: usize,
    dropout: Dropout,
}

parameters!(MultiheadAttention { in_proj_weight, in_proj_bias, out_proj });

/// How a [`MultiheadAttention`] is made.
#[derive(Clone, Copy, Debug)]
pub struct MultiheadAttentionConfig {
    width: usize,
    heads: usize,
    bias: bool,
    dropout: f64,
}

impl MultiheadAttentionConfig {
    /// `heads` heads that share `width` features.
    pub fn new(width: usize, heads: usize) -> MultiheadAttentionConfig {
        MultiheadAttentionConfig { width, heads, bias: true, dropout: 0.0 }
    }

    /// With biases or without.
    #[must_use]
    pub fn with_bias(self, bias: bool) -> MultiheadAttentionConfig {
        MultiheadAttentionConfig { bias, ..self }
    }

    /// With this dropout of the probabilities.
    #[must_use]
    pub fn with_dropout(self, dropout: f64) -> MultiheadAttentionConfig {
        MultiheadAttentionConfig { dropout, ..self }
    }

    /// The layer.
    ///
    /// # Errors
    /// If the heads do not divide the width, or it cannot be allocated.
    pub fn init(self, scope: &Scope) -> Result<MultiheadAttention> {
        let MultiheadAttentionConfig { width, heads, bias, dropout } = self;
        if heads == 0 || !width.is_multiple_of(heads) {
            let why = format!("{heads} heads do not divide the width {width}");
            return Err(Error::invalid("MultiheadAttention", why));
        }
        let weights = Init::XavierUniform { gain: 1.0 };
        let in_proj_bias =
            bias.then(|| scope.parameter("in_proj_bias", &[3 * width], Init::ZEROS)).transpose()?;
        let out_proj = LinearConfig::new(width, width).with_bias(bias).with_init(Init::layer(width));
        Ok(MultiheadAttention {
            in_proj_weight: scope.parameter("in_proj_weight", &[3 * width, width], weights)?,
            in_proj_bias,
            out_proj: out_proj.init(&scope.child("out_proj"))?,
            heads,
            width,
            dropout: Dropout::new(dropout, &scope.child("dropout"))?,
        })
    }
}

/// What may not be seen. True means *hidden*, as in PyTorch's modules.
#[derive(Clone, Copy, Debug, Default)]
pub struct Hidden<'a> {
    /// bool, `[T, S]` or `[B heads, T, S]`.
    pub mask: Option<&'a Var>,
    /// bool, `[B, S]`.
    pub keys: Option<&'a Var>,
}

impl MultiheadAttention {
    /// The result `[B, T, width]`.
    ///
    /// # Errors
    /// If the inputs do not fit.
    pub fn forward(&self, query: &Var, key: &Var, value: &Var, hidden: Hidden<'_>) -> Result<Var> {
        let [q, k, v] = self.project(query, key, value)?;
        let mask = self.mask(&q, &k, hidden)?;
        if self.dropout.is_active() {
            let p = crate::Module::forward(&self.dropout, &self.probabilities(&q, &k, mask.as_ref())?)?;
            return self.join(&p.matmul(&v)?);
        }
        self.join(&q.scaled_dot_product_attention(&k, &v, mask.as_ref(), &Attention::default())?)
    }

    /// The result and the probabilities `[B, heads, T, S]`, which must exist for that.
    ///
    /// # Errors
    /// If the inputs do not fit.
    pub fn forward_with_weights(
        &self,
        query: &Var,
        key: &Var,
        value: &Var,
        hidden: Hidden<'_>,
    ) -> Result<(Var, Var)> {
        let [q, k, v] = self.project(query, key, value)?;
        let mask = self.mask(&q, &k, hidden)?;
        let p = crate::Module::forward(&self.dropout, &self.probabilities(&q, &k, mask.as_ref())?)?;
        Ok((self.join(&p.matmul(&v)?)?, p))
    }

    /// Queries, keys and values by heads, `[B, heads, T or S, dim]`.
    fn project(&self, query: &Var, key: &Var, value: &Var) -> Result<[Var; 3]> {
        let (weights, biases) = (self.in_proj_weight.var(), self.in_proj_bias.as_ref().map(Parameter::var));
        let mut projected = Vec::with_capacity(3);
        for (i, x) in [query, key, value].into_iter().enumerate() {
            if x.rank() != 3 {
                let why = format!("got an input of shape {:?}, wanted [B, T, {}]", x.shape(), self.width);
                return Err(Error::invalid("MultiheadAttention", why));
            }
            let part = |all: &Var| all.narrow(0, i * self.width, self.width);
            let y = x.linear(&part(&weights)?, biases.as_ref().map(part).transpose()?.as_ref())?;
            let shape = [x.shape()[0], x.shape()[1], self.heads, self.width / self.heads];
            projected.push(y.reshape_to(&shape)?.transpose(1, 2)?);
        }
        let three = <[Var; 3]>::try_from(projected);
        Ok(three.unwrap_or_else(|_| unreachable!("one for each of three inputs")))
    }

    /// What is added to the scores: minus infinity where something is hidden.
    fn mask(&self, q: &Var, k: &Var, hidden: Hidden<'_>) -> Result<Option<Var>> {
        let (batch, queries, keys) = (q.shape()[0], q.shape()[2], k.shape()[2]);
        let mut mask: Option<Var> = None;
        let mut hide = |hidden: Var, shape: [usize; 4]| -> Result<()> {
            let before = match mask.take() {
                Some(mask) => mask.broadcast_to(&[batch, mask.shape()[1], queries, keys])?,
                None => Var::new(kernels::full(&shape, 0.0, q.dtype(), q.device())?),
            };
            mask = Some(before.masked_fill(&hidden.reshape_to(&shape)?, f64::NEG_INFINITY)?);
            Ok(())
        };
        if let Some(all) = hidden.mask {
            hide(
                all.clone(),
                if all.rank() == 3 { [batch, self.heads, queries, keys] } else { [1, 1, queries, keys] },
            )?;
        }
        if let Some(padding) = hidden.keys {
            hide(padding.clone(), [batch, 1, 1, keys])?;
        }
        Ok(mask)
    }

    fn probabilities(&self, q: &Var, k: &Var, mask: Option<&Var>) -> Result<Var> {
        let scale = ((self.width / self.heads) as f64).sqrt().recip();
        let scores = q.matmul(&k.transpose(2, 3)?)?.mul_scalar(scale)?;
        let scores = if let Some(mask) = mask { scores.add(mask)? } else { scores };
        Ok(scores.softmax(-1)?)
    }

    /// The heads' results side by side, through the last map.
    fn join(&self, y: &Var) -> Result<Var> {
        let shape = [y.shape()[0], y.shape()[2], self.width];
        crate::Module::forward(&self.out_proj, &y.transpose(1, 2)?.reshape_to(&shape)?)
    }
}
