//! [`Mixture`]: a mixture of experts. A gate gives each token a probability for each expert, and the token takes those of the largest ones:
//!
//! ```text
//! y(x) = sum over the chosen experts e of p_e(x) expert_e(x),    p = softmax(gate(x))
//! ```
//! The tokens are sorted by expert, so that an expert takes all of its tokens at once, and none is dropped. An expert without tokens has a
//! gradient of zeros.
//!
//! Ranks may divide the experts (expert parallelism). Each has tokens of its own, and sends them to the ranks of their experts:
//!
//! ```text
//! this rank's tokens, by expert ──counts──► how many come from each rank
//!                               ──rows────► own experts' tokens, by rank, then by expert ──own experts──► outputs ──► back, by expert
//! ```
//! An expert takes the tokens of each rank by themselves, at a site of its own, so the sums of its gradients are those of data parallelism.
//!
//! With sequence parallelism ranks have parts of the positions between layers, and parts of every expert. A mixture gathers the positions once, and
//! each rank routes all of them. Its experts give partial sums, which are weighed and put in their places; then the ranks' sums are added, and each
//! rank keeps its own positions.
//!
//! Sources: Shazeer et al.: Outrageously large neural networks (2017); Lepikhin et al.: GShard (2020), section 3; Fedus et al.: Switch
//! transformers (2021), section 2; Jiang et al.: Mixtral of experts (2024).

use std::sync::Arc;

use phalanx_autograd::{ContextMode, Var, is_recomputing};
use phalanx_kernels as kernels;
use phalanx_tensor::{Context, DType, Tensor};

use super::block::Perceptron;
use super::{Experts, TransformerConfig};
use crate::layer_factory::LinearSpec;
use crate::models::RouterBias;
use crate::models::router_losses::{Positions, WatchedRouter};
use crate::parameter::in_replica;
use crate::{
    AnyUnit, Entry, ExpertExchange, Init, LayerFactory, Module, Parameter, Parameters, Result, Scope,
    join_path, parameters,
};

pub(super) struct Mixture<L: LayerFactory> {
    gate: Gate,
    experts: OwnExperts<L>,
    /// How many experts there are in all.
    count: usize,
    chosen: usize,
    normalized: bool,
}

parameters!([L: LayerFactory] Mixture<L> { gate, experts });

struct Gate {
    /// `[experts, width]`
    weight: Parameter,
    bias: Option<RouterBias>,
    /// What is added to its logits.
    beside: Option<Box<dyn Module>>,
}

parameters!(Gate { weight, bias = "e_score_correction_bias", beside = "" });

impl Gate {
    /// The logits `[N, experts]` of `[N, width]`, in f32 or f64.
    fn logits(&self, rows: &Var) -> Result<Var> {
        let wide = if rows.dtype() == DType::F64 { DType::F64 } else { DType::F32 };
        let logits = rows.linear(&self.weight.var(), None)?;
        let logits = match &self.beside {
            Some(beside) => logits.add(&beside.forward(rows)?)?,
            None => logits,
        };
        Ok(logits.to(wide)?)
    }
}

impl<L: LayerFactory> Mixture<L> {
    pub(super) fn new(
        config: &TransformerConfig,
        experts: &Experts,
        layers: &Arc<L>,
        scope: &Scope,
    ) -> Result<Mixture<L>> {
        let init = Init::Normal { mean: 0.0, std: config.init_std };
        let gate = scope.child("gate");
        let weight = gate.parameter("weight", &[experts.count, config.width], init)?;
        let spec =
            LinearSpec { inputs: config.width, outputs: &[experts.count], bias: false, init, whole: true };
        let beside = layers.beside_gate(&gate, spec)?;
        let has_bias = experts.bias_step > 0.0;
        let bias = || RouterBias::new(experts.count, experts.bias_step, scope.device());
        let bias = has_bias.then(bias).transpose()?;
        let (own, scope) = match layers.experts() {
            None => (0..experts.count, scope.child("experts")),
            Some(exchange) => {
                (exchange.own(experts.count)?, scope.child("experts").with_replica_sites(exchange.ranks()))
            }
        };
        let first = own.start;
        let expert =
            |i: usize| Perceptron::new(config, experts.inner, &**layers, &scope.child(i.to_string()));
        Ok(Mixture {
            gate: Gate { weight, bias, beside },
            experts: OwnExperts { first, of: own.map(expert).collect::<Result<_>>()? },
            count: experts.count,
            chosen: experts.chosen,
            normalized: experts.normalized,
        })
    }

    /// The biases of the experts, if there are any.
    pub(super) fn bias(&self) -> Option<&RouterBias> {
        self.gate.bias.as_ref()
    }

    /// The output for `[B, T, width]`, or for this rank's part of the positions.
    pub(super) fn run(&self, x: &Var, layers: &L) -> Result<Var> {
        layers.on_whole_stream(x, &mut |x| self.run_whole(x, layers))
    }

    /// The output for all positions, or what this rank's parts of the experts add to it.
    fn run_whole(&self, x: &Var, layers: &L) -> Result<Var> {
        let rows = x.flatten(0, -2)?;
        let logits = self.gate.logits(&rows)?;
        let watched = WatchedRouter::here();
        // Every rank knows the gradient of the losses of all positions. Of those that have ranks of their own, each adds its own.
        let own = Positions { all: x.shape()[1], own: layers.stream(x.shape()[1])? };
        let logits =
            watched.as_ref().map_or_else(|| Ok(logits.clone()), |router| router.watch(&logits, own))?;
        let probabilities = logits.softmax(-1)?;
        let Routes { experts, tokens, pairs, counts } = self.routes(probabilities.tensor())?;
        if let Some(bias) =
            self.gate.bias.as_ref().filter(|_| Context::current().train() && !is_recomputing())
        {
            bias.count(&counts);
        }
        if let Some(router) = &watched {
            router.note(logits.tensor(), probabilities.tensor(), &counts)?;
        }
        drop((logits, watched));
        let mut weights = probabilities.gather(1, &experts)?;
        if self.normalized {
            weights = weights.div(&weights.sum(&[-1], true)?)?;
        }
        let sorted = rows.index_select(0, &tokens)?;
        let outputs = match layers.experts() {
            None => self.experts.run(&sorted, &counts, layers)?,
            Some(exchange) => self.experts.run_for_ranks(exchange, &sorted, &counts, layers)?,
        };
        let weights = weights.flatten(0, -1)?.index_select(0, &pairs)?.unsqueeze(1)?.to(rows.dtype())?;
        let weighted = outputs.mul(&weights)?;
        let y = Var::new(rows.tensor().zeros_like()?).index_add(0, &tokens, &weighted, 1.0)?;
        Ok(y.reshape_to(x.shape())?)
    }

    /// Which experts each of `[N, experts]` tokens takes. Of equal probabilities, with biases, the first expert's counts.
    fn routes(&self, probabilities: &Tensor) -> Result<Routes> {
        let (rows, count, device) = (probabilities.shape()[0], self.count, probabilities.device());
        let mut experts: Vec<i64> = Vec::with_capacity(rows * self.chosen);
        if device.is_meta() {
            // As if they were evenly loaded.
            experts.extend((0..rows * self.chosen).map(|i| (i % count) as i64));
        } else {
            let values = kernels::cast(probabilities, DType::F64)?.to_vec::<f64>()?;
            let bias = self.gate.bias.as_ref().map_or_else(|| Ok(vec![0.0; count]), RouterBias::values)?;
            let mut order: Vec<usize> = Vec::with_capacity(count);
            for row in values.chunks(count) {
                order.clear();
                order.extend(0..count);
                let score = |expert: usize| row[expert] + bias[expert];
                order.sort_by(|&a, &b| score(b).total_cmp(&score(a)));
                experts.extend(order[..self.chosen].iter().map(|&expert| expert as i64));
            }
        }
        let mut pairs: Vec<i64> = (0..experts.len() as i64).collect();
        pairs.sort_by_key(|&pair| experts[pair as usize]);
        let mut counts = vec![0; count];
        experts.iter().for_each(|&expert| counts[expert as usize] += 1);
        let tokens: Vec<i64> = pairs.iter().map(|pair| pair / self.chosen as i64).collect();
        let list = |values: &[i64]| Var::from_slice(values, &[values.len()], device);
        Ok(Routes {
            experts: Var::from_slice(&experts, &[rows, self.chosen], device)?,
            tokens: list(&tokens)?,
            pairs: list(&pairs)?,
            counts,
        })
    }
}

/// The experts that this rank has, of which the first has this number.
struct OwnExperts<L: LayerFactory> {
    first: usize,
    of: Vec<Perceptron<L::Column, L::Row>>,
}

impl<L: LayerFactory> OwnExperts<L> {
    /// The outputs for tokens `[rows, width]`, of which each expert takes the next `counts`. There may be several rounds of all experts,
    /// each for another replica's tokens.
    fn run(&self, rows: &Var, counts: &[usize], layers: &L) -> Result<Var> {
        let rows = rows.unsqueeze(0)?;
        let (mut at, mut parts) = (0, Vec::with_capacity(counts.len()));
        for (replica, counts) in counts.chunks(self.of.len()).enumerate() {
            for (expert, &count) in self.of.iter().zip(counts) {
                let tokens = rows.narrow(1, at, count)?;
                parts.push(in_replica(replica, || expert.run(tokens, layers))?);
                at += count;
            }
        }
        Ok(Var::cat(&parts, 1)?.squeeze(&[0])?)
    }

    /// The outputs for this rank's tokens `[rows, width]`, of which each of all experts takes the next `counts`.
    fn run_for_ranks(
        &self,
        exchange: &dyn ExpertExchange,
        rows: &Var,
        counts: &[usize],
        layers: &L,
    ) -> Result<Var> {
        let own = self.of.len();
        let of_ranks =
            |counts: &[usize]| counts.chunks(own).map(|rank| rank.iter().sum()).collect::<Vec<_>>();
        let coming = exchange.counts(counts, rows.device())?;
        let (sent, wanted) = (of_ranks(counts), of_ranks(&coming));
        let here = exchange.exchange(rows, &sent, &wanted)?;
        exchange.exchange(&self.run(&here, &coming, layers)?, &wanted, &sent)
    }
}

/// Under their numbers among all experts.
impl<L: LayerFactory> Parameters for OwnExperts<L> {
    fn visit(&self, path: &str, visitor: &mut dyn FnMut(&str, Entry<'_>)) {
        for (number, expert) in (self.first..).zip(&self.of) {
            expert.visit(&join_path(path, &number.to_string()), visitor);
        }
    }

    fn visit_units(&self, visitor: &mut dyn FnMut(&dyn AnyUnit)) {
        self.of.visit_units(visitor);
    }
}

/// Where tokens go. A pair is a token and an expert that it takes.
struct Routes {
    /// The experts of each token, `[N, chosen]`.
    experts: Var,
    /// The token of each pair, and the pair's number in `experts`, sorted by expert.
    tokens: Var,
    pairs: Var,
    /// Pairs of each expert.
    counts: Vec<usize>,
}
