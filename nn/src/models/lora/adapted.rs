//! [`Adapted`]: a layer with the adapter beside it, as a linear map and as a head; [`AdaptedEmbedding`]: an embedding with one.

use std::sync::Arc;

use phalanx_autograd::Var;

use super::magnitude;
use crate::layer_factory::LinearMap;
use crate::modules::{Dropout, Linear};
use crate::{Head, LayerFactory, Module, Parameter, Parameters, Result, parameters};

/// A layer, and the adapter beside it, if it has one.
pub struct Adapted<L, C, A, B> {
    pub(super) layers: Arc<L>,
    pub(super) base: C,
    pub(super) adapter: Option<Adapter<A, B>>,
}

parameters!([L, C: Parameters, A: Parameters, B: Parameters] Adapted<L, C, A, B> { base = "", adapter = "" });

pub(super) struct Adapter<A, B> {
    pub(super) lora_a: A,
    pub(super) lora_b: B,
    /// `[out]`, with DoRA.
    pub(super) magnitude: Option<Parameter>,
    pub(super) dropout: Dropout,
    pub(super) scale: f64,
}

parameters!([A: Parameters, B: Parameters] Adapter<A, B> {
    lora_a = "lora_A",
    lora_b = "lora_B",
    magnitude = "lora_magnitude_vector",
});

/// An embedding, and the adapter beside it, if it has one: `y = W[i] + scale B A[i]`, where `W[i]` is row `i` of the table.
pub struct AdaptedEmbedding<E> {
    pub(super) table: E,
    pub(super) adapter: Option<EmbeddingAdapter<E>>,
}

parameters!([E: Parameters] AdaptedEmbedding<E> { table = "", adapter = "" });

pub(super) struct EmbeddingAdapter<E> {
    /// `[count, rank]`, at first 0.
    pub(super) lora_a: E,
    /// `[width, rank]`, at first random.
    pub(super) lora_b: Linear,
    pub(super) scale: f64,
}

parameters!([E: Parameters] EmbeddingAdapter<E> { lora_a = "lora_embedding_A", lora_b = "lora_embedding_B" });

impl<E: Module> Module for AdaptedEmbedding<E> {
    fn forward(&self, indices: &Var) -> Result<Var> {
        let y = self.table.forward(indices)?;
        let Some(adapter) = &self.adapter else { return Ok(y) };
        let more = adapter.lora_b.forward(&adapter.lora_a.forward(indices)?)?;
        Ok(y.add(&more.mul_scalar(adapter.scale)?)?)
    }
}

/// What is added to the logits of a mixture's gate: `scale B A x`.
pub(super) struct GateAdapter {
    pub(super) lora_a: Linear,
    pub(super) lora_b: Linear,
    pub(super) scale: f64,
}

parameters!(GateAdapter { lora_a = "lora_A", lora_b = "lora_B" });

impl Module for GateAdapter {
    fn forward(&self, x: &Var) -> Result<Var> {
        Ok(self.lora_b.forward(&self.lora_a.forward(x)?)?.mul_scalar(self.scale)?)
    }
}

/// A head with a bias, if it has one.
pub struct BiasedHead<H> {
    pub(super) head: H,
    pub(super) bias: Option<Parameter>,
}

parameters!([H: Parameters] BiasedHead<H> { head = "", bias });

impl<H: Head> Module for BiasedHead<H> {
    fn forward(&self, x: &Var) -> Result<Var> {
        self.head.scores(x, self.bias.as_ref())
    }
}

impl<H: Head> LinearMap for BiasedHead<H> {
    fn weight(&self) -> &Parameter {
        self.head.weight()
    }

    fn bias(&self) -> Option<&Parameter> {
        self.bias.as_ref()
    }
}

impl<L: LayerFactory, C: LinearMap, A: LinearMap, B: LinearMap> Adapted<L, C, A, B> {
    /// The layer's output `y` with what the adapter changes.
    pub(super) fn with_adapter(&self, x: &Var, y: Var) -> Result<Var> {
        let Some(adapter) = &self.adapter else { return Ok(y) };
        let dropped = adapter.dropout.is_active().then(|| adapter.dropout.forward(x)).transpose()?;
        let down = adapter.lora_a.forward(dropped.as_ref().unwrap_or(x))?;
        let more = adapter.lora_b.forward(&down)?.mul_scalar(adapter.scale)?;
        let Some(magnitude) = &adapter.magnitude else { return Ok(y.add(&more)?) };
        // y + (m / n - 1) W x + m / n scale B A x. As in PEFT, what is dropped goes into the second summand too, and the bias does not.
        let plain = match &dropped {
            Some(x) => self.base.forward(x)?,
            None => y.clone(),
        };
        let plain = match self.base.bias() {
            Some(bias) => plain.sub(&bias.var())?,
            None => plain,
        };
        let factors = self.factors(adapter, magnitude)?;
        let change = plain.mul(&factors.add_scalar(-1.0)?.to(y.dtype())?)?;
        Ok(y.add(&change)?.add(&more.mul(&factors.to(y.dtype())?)?)?)
    }

    /// `m / n` of each row.
    pub(super) fn factors(&self, adapter: &Adapter<A, B>, magnitude: &Parameter) -> Result<Var> {
        let weight = self.base.weight();
        let [held, a, b] = [weight, adapter.lora_a.weight(), adapter.lora_b.weight()].map(Parameter::var);
        let [held, a, b] = [held.unpacked()?, a.unpacked()?, b.unpacked()?];
        let (weight_now, a, b) = (held.tensor(), a.tensor(), b.tensor());
        let adapted = magnitude::Adapted { weight: weight_now, a, b, scale: adapter.scale };
        adapted.factors(&*self.layers, weight, &magnitude.var())
    }
}

impl<L: LayerFactory, C: LinearMap, A: LinearMap, B: LinearMap> Module for Adapted<L, C, A, B> {
    fn forward(&self, x: &Var) -> Result<Var> {
        self.with_adapter(x, self.base.forward(x)?)
    }
}

impl<L: LayerFactory, C: LinearMap, A: LinearMap, B: LinearMap> LinearMap for Adapted<L, C, A, B> {
    fn weight(&self) -> &Parameter {
        self.base.weight()
    }

    fn bias(&self) -> Option<&Parameter> {
        self.base.bias()
    }
}

impl<L: LayerFactory, C: Head, A: LinearMap, B: LinearMap> Head for Adapted<L, C, A, B> {
    fn scores(&self, x: &Var, bias: Option<&Parameter>) -> Result<Var> {
        if self.adapter.is_none() {
            return self.base.scores(x, bias);
        }
        // A magnitude does not scale the bias.
        let scores = self.with_adapter(x, self.base.scores(x, None)?)?;
        bias.map_or(Ok(scores.clone()), |bias| Ok(scores.add(&bias.var())?))
    }

    fn gathered(&self, scores: Var) -> Result<Var> {
        self.base.gathered(scores)
    }

    fn loss_of(&self, scores: &Var, targets: &Var, scale: f64) -> Result<Var> {
        self.base.loss_of(scores, targets, scale)
    }

    fn loss(&self, x: &Var, targets: &Var, scale: f64, logits_max: usize) -> Result<Var> {
        match &self.adapter {
            Some(_) => self.loss_of(&self.scores(x, None)?, targets, scale),
            None => self.base.loss(x, targets, scale, logits_max),
        }
    }
}
