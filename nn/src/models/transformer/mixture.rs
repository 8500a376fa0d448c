//! [`Mixture`]: a mixture of experts. A gate gives each token a probability for each expert, and the token takes those of the largest ones:
//!
//! ```text
//! y(x) = sum over the chosen experts e of p_e(x) expert_e(x),    p = softmax(gate(x))
//! ```
//! The tokens are sorted by expert, so that an expert takes all of its tokens at once, and none is dropped. An expert without tokens has a
//! gradient of zeros.
//! Sources: Shazeer et al.: Outrageously large neural networks (2017); Jiang et al.: Mixtral of experts (2024).

use std::sync::Arc;

use phalanx_autograd::Var;
use phalanx_kernels as kernels;
use phalanx_tensor::{DType, Tensor};

use super::block::Perceptron;
use super::{Experts, TransformerConfig};
use crate::{Error, Init, LayerFactory, Parameter, Result, Scope, parameters};

pub(super) struct Mixture<L: LayerFactory> {
    gate: Gate,
    experts: Vec<Perceptron<L::Column, L::Row>>,
    chosen: usize,
    normalized: bool,
}

parameters!([L: LayerFactory] Mixture<L> { gate, experts });

struct Gate {
    /// `[experts, width]`
    weight: Parameter,
}

parameters!(Gate { weight });

impl<L: LayerFactory> Mixture<L> {
    pub(super) fn new(
        config: &TransformerConfig,
        experts: &Experts,
        layers: &Arc<L>,
        scope: &Scope,
    ) -> Result<Mixture<L>> {
        let init = Init::Normal { mean: 0.0, std: config.init_std };
        let weight = scope.child("gate").parameter("weight", &[experts.count, config.width], init)?;
        let place = |i: usize| scope.child("experts").child(i.to_string());
        let expert = |i| Perceptron::new(config, experts.inner, &**layers, &place(i));
        Ok(Mixture {
            gate: Gate { weight },
            experts: (0..experts.count).map(expert).collect::<Result<_>>()?,
            chosen: experts.chosen,
            normalized: experts.normalized,
        })
    }

    /// The output for `[B, T, width]`.
    pub(super) fn run(&self, x: &Var, layers: &L) -> Result<Var> {
        if layers.stream(x.shape()[1])?.len() != x.shape()[1] {
            let why = "got a stream that is cut by positions, wanted no sequence parallelism";
            return Err(Error::invalid("mixture of experts", why));
        }
        let rows = x.flatten(0, -2)?;
        let wide = if rows.dtype() == DType::F64 { DType::F64 } else { DType::F32 };
        let probabilities = rows.linear(&self.gate.weight.var(), None)?.to(wide)?.softmax(-1)?;
        let Routes { experts, tokens, pairs, counts } = self.routes(probabilities.tensor())?;
        let mut weights = probabilities.gather(1, &experts)?;
        if self.normalized {
            weights = weights.div(&weights.sum(&[-1], true)?)?;
        }
        let sorted = rows.index_select(0, &tokens)?.unsqueeze(0)?;
        let (mut at, mut parts) = (0, Vec::with_capacity(counts.len()));
        for (expert, count) in self.experts.iter().zip(counts) {
            parts.push(expert.run(sorted.narrow(1, at, count)?, layers)?);
            at += count;
        }
        let weights = weights.flatten(0, -1)?.index_select(0, &pairs)?.unsqueeze(1)?.to(rows.dtype())?;
        let weighted = Var::cat(&parts, 1)?.squeeze(&[0])?.mul(&weights)?;
        let y = Var::new(rows.tensor().zeros_like()?).index_add(0, &tokens, &weighted, 1.0)?;
        Ok(y.reshape_to(x.shape())?)
    }

    /// Which experts each of `[N, experts]` tokens takes. Of equal probabilities the first expert's counts.
    fn routes(&self, probabilities: &Tensor) -> Result<Routes> {
        let (rows, count, device) = (probabilities.shape()[0], self.experts.len(), probabilities.device());
        let mut experts: Vec<i64> = Vec::with_capacity(rows * self.chosen);
        if device.is_meta() {
            // As if they were evenly loaded.
            experts.extend((0..rows * self.chosen).map(|i| (i % count) as i64));
        } else {
            let values = kernels::cast(probabilities, DType::F64)?.to_vec::<f64>()?;
            let mut order: Vec<usize> = Vec::with_capacity(count);
            for row in values.chunks(count) {
                order.clear();
                order.extend(0..count);
                order.sort_by(|&a, &b| row[b].total_cmp(&row[a]));
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
