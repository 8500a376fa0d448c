//! [`TransformerBlock`]: attention and a perceptron, with norms where the config wants them.
//!
//! ```text
//! before       x += attention(norm(x)),          x += mlp(norm(x))
//! after        x += norm(attention(x)),          x += norm(mlp(x))
//! both         x += norm(attention(norm(x))),    x += norm(mlp(norm(x)))
//! parallel     x += attention(norm(x)) + mlp(norm(x))
//!
//! mlp(x) = down_proj(activation(gate_proj(x)) * up_proj(x)), or down_proj(activation(up_proj(x))), or a mixture of these
//! ```
//! Sources: Touvron et al.: LLaMA (2023); Ainslie et al.: GQA (2023); Shazeer: GLU variants (2020); and those of
//! [`NormPlaces`](super::NormPlaces).

use std::sync::Arc;

use phalanx_autograd::Var;
use phalanx_tensor::DType;

use super::mixture::Mixture;
use super::{NormKind, NormPlaces, TransformerConfig};
use crate::layer_factory::LinearSpec;
use crate::models::{Activation, Block, Documents, KvCache, RouterBias, RowPart};
use crate::modules::attention::Positions;
use crate::modules::dropout::add_branch;
use crate::modules::{
    GroupedQueryAttention, GroupedQueryAttentionConfig, LayerNorm, LayerNormConfig, PreNorm, RmsNorm,
    RmsNormConfig, RopeScaling,
};
use crate::{
    AnyUnit, Entry, Init, LayerFactory, Module, Parameters, Result, Scope, WrappedUnit, join_path, parameters,
};

/// A norm of the stream.
pub(super) enum Norm {
    Rms(RmsNorm),
    Layer(LayerNorm),
}

impl Norm {
    pub(super) fn new(config: &TransformerConfig, scope: &Scope) -> Result<Norm> {
        let shape = [config.width];
        Ok(match config.norm {
            NormKind::Layer => Norm::Layer(LayerNormConfig::new(&shape).with_eps(config.eps).init(scope)?),
            kind => {
                let norm = RmsNormConfig::new(&shape).with_eps(config.eps);
                Norm::Rms(norm.with_plus_one(kind == NormKind::RmsPlusOne).init(scope)?)
            }
        })
    }

    /// `x + residual` and its norm.
    fn add_forward(&self, x: &Var, residual: &Var) -> Result<(Var, Var)> {
        match self {
            Norm::Rms(norm) => norm.add_forward(x, residual),
            Norm::Layer(norm) => norm.add_forward(x, residual),
        }
    }
}

impl Module for Norm {
    fn forward(&self, x: &Var) -> Result<Var> {
        match self {
            Norm::Rms(norm) => norm.forward(x),
            Norm::Layer(norm) => norm.forward(x),
        }
    }
}

impl PreNorm for Norm {
    fn pre_forward(&self, x: &Var, dtype: DType) -> Result<(Var, Var)> {
        match self {
            Norm::Rms(norm) => norm.pre_forward(x, dtype),
            Norm::Layer(norm) => norm.pre_forward(x, dtype),
        }
    }
}

impl Parameters for Norm {
    fn visit(&self, path: &str, visitor: &mut dyn FnMut(&str, Entry<'_>)) {
        match self {
            Norm::Rms(norm) => norm.visit(path, visitor),
            Norm::Layer(norm) => norm.visit(path, visitor),
        }
    }
}

/// A norm, and what files call it.
struct NamedNorm {
    name: &'static str,
    norm: Norm,
}

pub(super) struct TransformerBlock<L: LayerFactory> {
    before_attention: Option<NamedNorm>,
    self_attn: WrappedUnit<GroupedQueryAttention<L>>,
    after_attention: Option<NamedNorm>,
    before_mlp: Option<NamedNorm>,
    mlp: Mlp<L>,
    after_mlp: Option<NamedNorm>,
    /// Whether attention and the perceptron see the same stream.
    parallel: bool,
    matrix: DType,
    layers: Arc<L>,
}

enum Mlp<L: LayerFactory> {
    Dense(WrappedUnit<Perceptron<L::Column, L::Row>>),
    Sparse(WrappedUnit<Mixture<L>>),
}

pub(super) struct Perceptron<C, R> {
    gate_and_up: WrappedUnit<GateAndUp<C>>,
    down_proj: WrappedUnit<R>,
    activation: Activation,
}

parameters!([C: Module + 'static, R: Module + 'static] Perceptron<C, R> { gate_and_up = "", down_proj });

struct GateAndUp<C> {
    gate_proj: Option<C>,
    up_proj: C,
}

parameters!([C: Parameters] GateAndUp<C> { gate_proj, up_proj });

impl<C: Module + 'static, R: Module + 'static> Perceptron<C, R> {
    /// A perceptron of so many inner features.
    pub(super) fn new<L: LayerFactory<Column = C, Row = R>>(
        config: &TransformerConfig,
        inner: usize,
        layers: &L,
        scope: &Scope,
    ) -> Result<Perceptron<C, R>> {
        let TransformerConfig { width, mlp_bias: bias, .. } = *config;
        let init = Init::Normal { mean: 0.0, std: config.init_std };
        let column = |name: &str| {
            let spec = LinearSpec { inputs: width, outputs: &[inner], bias, init, whole: false };
            layers.column(&scope.child(name), spec)
        };
        let down = LinearSpec { inputs: inner, outputs: &[width], bias, init, whole: true };
        Ok(Perceptron {
            gate_and_up: WrappedUnit::part(GateAndUp {
                gate_proj: config.gated.then(|| column("gate_proj")).transpose()?,
                up_proj: column("up_proj")?,
            }),
            down_proj: WrappedUnit::part(layers.row(&scope.child("down_proj"), down)?),
            activation: config.activation,
        })
    }

    pub(super) fn run<L: LayerFactory<Column = C, Row = R>>(&self, n: Var, layers: &L) -> Result<Var> {
        let inner = self.gate_and_up.call_once(n, |maps, n| {
            let Some(gate) = &maps.gate_proj else {
                return self.activation.apply(&maps.up_proj.forward(&n)?);
            };
            let inner = layers.columns(&[gate, &maps.up_proj], &n)?;
            self.activation.gated(&inner[0], &inner[1])
        })?;
        self.down_proj.forward(&inner)
    }
}

impl<L: LayerFactory> TransformerBlock<L> {
    /// Block `i`.
    pub(super) fn new(
        config: &TransformerConfig,
        i: usize,
        layers: &Arc<L>,
        scope: &Scope,
    ) -> Result<TransformerBlock<L>> {
        let kind = &config.layers[i];
        let init = Init::Normal { mean: 0.0, std: config.init_std };
        let mlp = scope.child("mlp");
        let stream = scope.with_dtype(config.stream.unwrap_or(scope.dtype()));
        let norm = |name: &'static str| {
            Ok::<_, crate::Error>(Some(NamedNorm { name, norm: Norm::new(config, &stream.child(name))? }))
        };
        let [input, after] = ["input_layernorm", "post_attention_layernorm"];
        let [pre, post] = ["pre_feedforward_layernorm", "post_feedforward_layernorm"];
        let places = match config.norms {
            NormPlaces::Before | NormPlaces::Parallel => [norm(input)?, None, norm(after)?, None],
            NormPlaces::After => [None, norm(after)?, None, norm(post)?],
            NormPlaces::BeforeAndAfter => [norm(input)?, norm(after)?, norm(pre)?, norm(post)?],
        };
        let [before_attention, after_attention, before_mlp, after_mlp] = places;
        let attention = GroupedQueryAttentionConfig {
            head_dim: config.head_dim,
            bias: config.qkv_bias,
            output_bias: config.output_bias,
            rope_base: kind.rotary.as_ref().map(|rotary| rotary.base),
            rope_features: kind.rotary.as_ref().and_then(|rotary| rotary.features),
            rope_scaling: kind.rotary.as_ref().map_or(RopeScaling::None, |rotary| rotary.scaling.clone()),
            score_scale: config.score_scale,
            score_cap: config.score_cap,
            window: kind.window,
            query_key_norm: config.query_key_norm,
            qkv_clip: config.qkv_clip,
            dropout: config.dropout,
            init,
            ..GroupedQueryAttentionConfig::new(config.width, config.heads, config.key_heads)
        };
        Ok(TransformerBlock {
            before_attention,
            self_attn: WrappedUnit::part(attention.init_on(layers, &scope.child("self_attn"))?),
            after_attention,
            before_mlp,
            mlp: match &config.experts {
                Some(experts) if !experts.dense.contains(&i) => {
                    Mlp::Sparse(WrappedUnit::part(Mixture::new(config, experts, layers, &mlp)?))
                }
                _ => Mlp::Dense(WrappedUnit::part(Perceptron::new(config, config.inner, &**layers, &mlp)?)),
            },
            after_mlp,
            parallel: config.norms == NormPlaces::Parallel,
            matrix: scope.dtype(),
            layers: layers.clone(),
        })
    }

    fn run(&self, x: &Var, rows: Positions<'_>) -> Result<Var> {
        let stream = x.dtype();
        let (x, n) = match &self.before_attention {
            Some(NamedNorm { norm, .. }) => norm.pre_forward(x, self.matrix)?,
            None => (x.clone(), x.to(self.matrix)?),
        };
        let y = self.self_attn.call_once(n, |attention, n| attention.run(&n, rows))?;
        let y = match &self.after_attention {
            Some(NamedNorm { norm, .. }) => norm.forward(&y.to(stream)?)?,
            None => y,
        };
        let (x, n) = match &self.before_mlp {
            Some(NamedNorm { norm, .. }) if self.parallel => {
                let (x, n) = norm.pre_forward(&x, self.matrix)?;
                let z = self.perceptron(n)?.to(stream)?;
                return Ok(z.add(&y.to(stream)?)?.add(&x)?);
            }
            Some(NamedNorm { norm, .. }) => norm.add_forward(&x, &y)?,
            None => {
                let x = add_branch(&x, &y)?;
                (x.clone(), x)
            }
        };
        drop(y);
        let y = self.perceptron(n.to(self.matrix)?)?;
        match &self.after_mlp {
            Some(NamedNorm { norm, .. }) => Ok(x.add(&norm.forward(&y.to(stream)?)?)?),
            None => add_branch(&x, &y),
        }
    }

    fn perceptron(&self, n: Var) -> Result<Var> {
        match &self.mlp {
            Mlp::Dense(mlp) => mlp.call_once(n, |mlp, n| mlp.run(n, &*self.layers)),
            Mlp::Sparse(mlp) => mlp.call_once(n, |mlp, n| mlp.run(&n, &*self.layers)),
        }
    }

    fn norms(&self) -> impl Iterator<Item = &NamedNorm> {
        let places = [&self.before_attention, &self.after_attention, &self.before_mlp, &self.after_mlp];
        places.into_iter().flatten()
    }
}

impl<L: LayerFactory> Parameters for TransformerBlock<L> {
    fn visit(&self, path: &str, visitor: &mut dyn FnMut(&str, Entry<'_>)) {
        self.self_attn.visit(&join_path(path, "self_attn"), visitor);
        match &self.mlp {
            Mlp::Dense(mlp) => mlp.visit(&join_path(path, "mlp"), visitor),
            Mlp::Sparse(mlp) => mlp.visit(&join_path(path, "mlp"), visitor),
        }
        self.norms().for_each(|NamedNorm { name, norm }| norm.visit(&join_path(path, name), visitor));
    }

    fn visit_units(&self, visitor: &mut dyn FnMut(&dyn AnyUnit)) {
        self.self_attn.visit_units(visitor);
        match &self.mlp {
            Mlp::Dense(mlp) => mlp.visit_units(visitor),
            Mlp::Sparse(mlp) => mlp.visit_units(visitor),
        }
    }
}

impl<L: LayerFactory> Module for TransformerBlock<L> {
    fn forward(&self, x: &Var) -> Result<Var> {
        self.run(x, Positions::Whole)
    }
}

impl<L: LayerFactory> Block for TransformerBlock<L> {
    fn extend(&self, x: &Var, cache: &mut KvCache) -> Result<Var> {
        self.run(x, Positions::Continued(cache))
    }

    fn extend_rows<'a>(&self, x: &Var, rows: &'a mut [RowPart<'a>]) -> Result<Var> {
        self.run(x, Positions::Rows(rows))
    }

    fn packed(&self, x: &Var, documents: &Documents) -> Result<Var> {
        self.run(x, Positions::Packed(documents))
    }

    fn router_bias(&self) -> Option<&RouterBias> {
        match &self.mlp {
            Mlp::Dense(_) => None,
            Mlp::Sparse(mixture) => mixture.module().bias(),
        }
    }

    fn cache(&self, batch: usize, capacity: usize) -> Result<KvCache> {
        self.self_attn.module().cache(batch, capacity)
    }

    fn set_recompute_attention(&self, recompute: bool) {
        self.self_attn.module().set_recompute(recompute);
    }
}
