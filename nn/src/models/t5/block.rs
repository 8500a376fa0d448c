//! [`T5Block`]: attention to the sequence itself, in a decoder attention to the encoder's output, and a gated perceptron, each with a norm
//! before it and added to the stream.

use std::ops::Range;
use std::sync::Arc;

use phalanx_autograd::{Attention, Var};

use super::T5Config;
use super::relative_bias::RelativeBias;
use crate::layer_factory::{LinearSpec, activation_window};
use crate::modules::{Dropout, RmsNorm};
use crate::scope::join;
use crate::{Entry, GeluKind, Init, LayerFactory, Module, Parameter, Parameters, Result, Scope, parameters};

/// A block of the encoder, or with cross-attention of the decoder.
pub(super) struct T5Block<L: LayerFactory> {
    attention: Residual<T5Attention<L>>,
    cross: Option<Residual<T5Attention<L>>>,
    mlp: Residual<GatedPerceptron<L>>,
}

impl<L: LayerFactory> T5Block<L> {
    /// `bias` are the relative positions of another block, if this one does not make its own.
    pub(super) fn new(
        config: &T5Config,
        layers: &Arc<L>,
        scope: &Scope,
        is_decoder: bool,
        bias: Option<Arc<RelativeBias>>,
    ) -> Result<T5Block<L>> {
        let scope = scope.child("layer");
        let (own, last) = (scope.child(0), scope.child(1 + usize::from(is_decoder)));
        let attention = own.child("SelfAttention");
        let bias = match bias {
            Some(bias) => SelfBias::Borrowed(bias),
            None => SelfBias::Owned(Arc::new(RelativeBias::new(
                config,
                &**layers,
                &attention.child("relative_attention_bias"),
                !is_decoder,
            )?)),
        };
        let cross = |scope: &Scope| {
            let attention =
                T5Attention::new(config, layers, &scope.child("EncDecAttention"), SelfBias::None)?;
            Residual::new(config, scope, "EncDecAttention", attention)
        };
        let attention = T5Attention::new(config, layers, &attention, bias)?;
        Ok(T5Block {
            attention: Residual::new(config, &own, "SelfAttention", attention)?,
            cross: is_decoder.then(|| cross(&scope.child(1))).transpose()?,
            mlp: Residual::new(
                config,
                &last,
                "DenseReluDense",
                GatedPerceptron::new(config, layers, &last.child("DenseReluDense"))?,
            )?,
        })
    }

    /// The relative positions that this block's self-attention uses.
    pub(super) fn bias(&self) -> Option<&Arc<RelativeBias>> {
        self.attention.branch.bias.table()
    }

    /// `[B, T, width]` to the same. A decoder's block attends to the encoder's output, `memory` `[B, S, width]`.
    pub(super) fn run(&self, x: &Var, memory: Option<&Var>) -> Result<Var> {
        let is_causal = self.cross.is_some();
        let mut x = self.attention.run(x, |attention, n| attention.run(n, None, is_causal))?;
        if let Some(cross) = &self.cross {
            x = cross.run(&x, |attention, n| attention.run(n, memory, false))?;
        }
        self.mlp.run(&x, GatedPerceptron::run)
    }
}

impl<L: LayerFactory> Parameters for T5Block<L> {
    fn visit(&self, path: &str, visitor: &mut dyn FnMut(&str, Entry<'_>)) {
        let path = join(path, "layer");
        self.attention.visit(&join(&path, 0), visitor);
        self.cross.visit(&join(&path, 1), visitor);
        self.mlp.visit(&join(&path, 1 + usize::from(self.cross.is_some())), visitor);
    }

    fn borrowed(&self) -> Vec<Parameter> {
        self.attention.branch.borrowed()
    }
}

/// `x + dropout(branch(layer_norm(x)))`.
struct Residual<B> {
    branch: B,
    name: &'static str,
    layer_norm: RmsNorm,
    dropout: Dropout,
}

impl<B> Residual<B> {
    fn new(config: &T5Config, scope: &Scope, name: &'static str, branch: B) -> Result<Residual<B>> {
        let layer_norm = config.norm(&scope.child("layer_norm"))?;
        Ok(Residual {
            branch,
            name,
            layer_norm,
            dropout: Dropout::new(config.dropout, &scope.child("dropout"))?,
        })
    }

    fn run(&self, x: &Var, branch: impl FnOnce(&B, &Var) -> Result<Var>) -> Result<Var> {
        let y = branch(&self.branch, &self.layer_norm.forward(x)?)?;
        self.dropout.bias_dropout_add(&y, None, x, None)
    }
}

impl<B: Parameters> Parameters for Residual<B> {
    fn visit(&self, path: &str, visitor: &mut dyn FnMut(&str, Entry<'_>)) {
        self.branch.visit(&join(path, self.name), visitor);
        self.layer_norm.visit(&join(path, "layer_norm"), visitor);
    }
}

/// Where self-attention has its relative positions from; cross-attention has none.
enum SelfBias {
    None,
    Owned(Arc<RelativeBias>),
    Borrowed(Arc<RelativeBias>),
}

impl SelfBias {
    fn table(&self) -> Option<&Arc<RelativeBias>> {
        match self {
            SelfBias::None => None,
            SelfBias::Owned(table) | SelfBias::Borrowed(table) => Some(table),
        }
    }
}

/// Attention of this rank's heads. Scores are not scaled; the initial queries are small instead.
struct T5Attention<L: LayerFactory> {
    q: L::Column,
    k: L::Column,
    v: L::Column,
    o: L::Row,
    bias: SelfBias,
    /// This rank's heads, out of `all`.
    heads: Range<usize>,
    all: usize,
    dim: usize,
    dropout: Dropout,
    layers: Arc<L>,
}

impl<L: LayerFactory> T5Attention<L> {
    fn new(config: &T5Config, layers: &Arc<L>, scope: &Scope, bias: SelfBias) -> Result<T5Attention<L>> {
        let T5Config { width, heads, head_dim, .. } = *config;
        let inner = heads * head_dim;
        let column = |name: &str, fan_in: usize| {
            let init = Init::Normal { mean: 0.0, std: (fan_in as f64).powf(-0.5) };
            let spec = LinearSpec { inputs: width, outputs: &[inner], bias: false, init, whole: false };
            layers.column(&scope.child(name), spec)
        };
        let init = Init::Normal { mean: 0.0, std: (inner as f64).powf(-0.5) };
        let row = LinearSpec { inputs: inner, outputs: &[width], bias: false, init, whole: true };
        Ok(T5Attention {
            q: column("q", width * head_dim)?,
            k: column("k", width)?,
            v: column("v", width)?,
            o: layers.row(&scope.child("o"), row)?,
            bias,
            heads: layers.heads(heads)?,
            all: heads,
            dim: head_dim,
            dropout: Dropout::new(config.dropout, &scope.child("dropout"))?,
            layers: layers.clone(),
        })
    }

    /// Attention of `x` to itself, or to `memory`.
    fn run(&self, x: &Var, memory: Option<&Var>, is_causal: bool) -> Result<Var> {
        let (q, kv) = match memory {
            None => {
                let mut all = self.layers.columns(&[&self.q, &self.k, &self.v], x)?;
                let kv = all.split_off(1);
                (all.swap_remove(0), kv)
            }
            Some(memory) => (self.q.forward(x)?, self.layers.columns(&[&self.k, &self.v], memory)?),
        };
        let by_heads = |x: &Var| -> Result<Var> {
            let shape = [x.shape()[0], x.shape()[1], self.heads.len(), self.dim];
            Ok(x.reshape_to(&shape)?.transpose(1, 2)?)
        };
        let (q, k, v) = (by_heads(&q)?, by_heads(&kv[0])?, by_heads(&kv[1])?);
        let bias = self.bias.table().map(|table| table.run(q.shape()[2], k.shape()[2])).transpose()?;
        let dropout = self.dropout.of_attention([self.all, self.heads.start]);
        let config = Attention { is_causal, scale: Some(1.0), dropout, ..Attention::default() };
        let y = q.scaled_dot_product_attention(&k, &v, bias.as_ref(), &config)?;
        let shape = [y.shape()[0], y.shape()[2], self.heads.len() * self.dim];
        self.o.forward(&y.transpose(1, 2)?.reshape_to(&shape)?)
    }
}

impl<L: LayerFactory> Parameters for T5Attention<L> {
    fn visit(&self, path: &str, visitor: &mut dyn FnMut(&str, Entry<'_>)) {
        self.q.visit(&join(path, "q"), visitor);
        self.k.visit(&join(path, "k"), visitor);
        self.v.visit(&join(path, "v"), visitor);
        self.o.visit(&join(path, "o"), visitor);
        if let SelfBias::Owned(table) = &self.bias {
            table.visit(&join(path, "relative_attention_bias"), visitor);
        }
    }

    fn borrowed(&self) -> Vec<Parameter> {
        match &self.bias {
            SelfBias::Borrowed(table) => table.parameters(),
            _ => Vec::new(),
        }
    }
}

/// `wo(dropout(gelu(wi_0(x)) * wi_1(x)))`. Source: Shazeer: GLU variants (2020).
struct GatedPerceptron<L: LayerFactory> {
    wi_0: L::Column,
    wi_1: L::Column,
    wo: L::Row,
    /// This rank's inner features, out of `all`.
    inner: Range<usize>,
    all: usize,
    dropout: Dropout,
    layers: Arc<L>,
}

parameters!([L: LayerFactory] GatedPerceptron<L> { wi_0, wi_1, wo });

impl<L: LayerFactory> GatedPerceptron<L> {
    fn new(config: &T5Config, layers: &Arc<L>, scope: &Scope) -> Result<GatedPerceptron<L>> {
        let T5Config { width, inner, .. } = *config;
        let init = |fan_in: usize| Init::Normal { mean: 0.0, std: (fan_in as f64).powf(-0.5) };
        let column = |name: &str| {
            let init = init(width);
            let spec = LinearSpec { inputs: width, outputs: &[inner], bias: false, init, whole: false };
            layers.column(&scope.child(name), spec)
        };
        let row =
            LinearSpec { inputs: inner, outputs: &[width], bias: false, init: init(inner), whole: true };
        Ok(GatedPerceptron {
            wi_0: column("wi_0")?,
            wi_1: column("wi_1")?,
            wo: layers.row(&scope.child("wo"), row)?,
            inner: layers.features(inner)?,
            all: inner,
            dropout: Dropout::new(config.dropout, &scope.child("dropout"))?,
            layers: layers.clone(),
        })
    }

    fn run(&self, x: &Var) -> Result<Var> {
        let inner = self.layers.columns(&[&self.wi_0, &self.wi_1], x)?;
        let y = inner[0].gelu(GeluKind::Tanh)?.mul(&inner[1])?;
        drop(inner);
        let window = activation_window(y.shape(), &[(2, self.inner.start, self.all)])?;
        self.wo.forward(&self.dropout.forward_in(&y, &window)?)
    }
}
