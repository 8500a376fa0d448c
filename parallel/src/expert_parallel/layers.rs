//! [`ExpertParallel`]: a layer factory ([`LayerFactory`]) whose experts are divided over ranks.

use std::ops::Range;

use phalanx_nn::autograd::Var;
use phalanx_nn::{
    EmbeddingSpec, Error, ExpertExchange, FileNames, HeadsNormSpec, LayerFactory, LinearSpec, Module,
    OneDevice, Parameter, Result, Scope,
};
use phalanx_tensor::{Device, Tensor};

use super::all_to_all;
use crate::comm::Comm;

/// Makes what another factory makes, and divides the experts of mixtures over a group of ranks.
#[derive(Clone, Debug)]
pub struct ExpertParallel<L = OneDevice> {
    layers: L,
    comm: Comm,
}

impl<L: LayerFactory> ExpertParallel<L> {
    /// The layers of `layers`, with experts divided over these ranks, each of which has rows of its own. If layers are split too (tensor
    /// parallelism), the ranks are those at one place of the split.
    pub fn new(layers: L, comm: &Comm) -> ExpertParallel<L> {
        ExpertParallel { layers, comm: comm.clone() }
    }

    /// The ranks.
    pub fn comm(&self) -> &Comm {
        &self.comm
    }
}

/// Refuses experts that cannot be divided evenly.
pub(crate) fn check_divides(experts: usize, ranks: usize) -> Result<()> {
    if ranks == 0 || !experts.is_multiple_of(ranks) {
        let why = format!("got {experts} experts for {ranks} ranks, wanted a multiple of the ranks");
        return Err(Error::invalid("expert parallelism", why));
    }
    Ok(())
}

impl<L: LayerFactory> ExpertExchange for ExpertParallel<L> {
    fn ranks(&self) -> usize {
        self.comm.size()
    }

    fn own(&self, experts: usize) -> Result<Range<usize>> {
        check_divides(experts, self.comm.size())?;
        let own = experts / self.comm.size();
        Ok(self.comm.rank() * own..(self.comm.rank() + 1) * own)
    }

    fn counts(&self, counts: &[usize], device: Device) -> Result<Vec<usize>> {
        let own = self.own(counts.len())?;
        if device.is_meta() {
            // As if all ranks had the same rows.
            return Ok(counts[own].repeat(self.comm.size()));
        }
        let sent: Vec<i64> = counts.iter().map(|&count| count as i64).collect();
        let sent = Tensor::from_slice(&sent, &[sent.len()], device.host())?;
        let mut coming = sent.zeros_like()?;
        let exchange = self.comm.all_to_all(&mut coming, &sent).map_err(crate::Error::from);
        exchange.map_err(phalanx_nn::autograd::Error::from)?;
        Ok(coming.to_vec::<i64>()?.into_iter().map(|count| count as usize).collect())
    }

    fn exchange(&self, x: &Var, sent: &[usize], wanted: &[usize]) -> Result<Var> {
        Ok(all_to_all(x, sent, wanted, &self.comm)?)
    }
}

impl<L: LayerFactory> LayerFactory for ExpertParallel<L> {
    type Column = L::Column;
    type Row = L::Row;
    type Embedding = L::Embedding;
    type Head = L::Head;

    fn column(&self, scope: &Scope, spec: LinearSpec<'_>) -> Result<L::Column> {
        self.layers.column(scope, spec)
    }

    fn row(&self, scope: &Scope, spec: LinearSpec<'_>) -> Result<L::Row> {
        self.layers.row(scope, spec)
    }

    fn columns(&self, layers: &[&L::Column], x: &Var) -> Result<Vec<Var>> {
        self.layers.columns(layers, x)
    }

    fn column_gelu(&self, layer: &L::Column, x: Var) -> Result<Var> {
        self.layers.column_gelu(layer, x)
    }

    fn row_and_bias(&self, layer: &L::Row, x: &Var) -> Result<(Var, Option<Var>)> {
        self.layers.row_and_bias(layer, x)
    }

    fn heads_norm(&self, scope: &Scope, spec: HeadsNormSpec) -> Result<Box<dyn Module>> {
        self.layers.heads_norm(scope, spec)
    }

    fn embedding(&self, scope: &Scope, spec: EmbeddingSpec) -> Result<L::Embedding> {
        self.layers.embedding(scope, spec)
    }

    fn head(&self, scope: &Scope, spec: EmbeddingSpec, tied: Option<&L::Embedding>) -> Result<L::Head> {
        self.layers.head(scope, spec, tied)
    }

    fn head_bias(&self, scope: &Scope, vocabulary: usize) -> Result<Parameter> {
        self.layers.head_bias(scope, vocabulary)
    }

    fn heads(&self, heads: usize) -> Result<Range<usize>> {
        self.layers.heads(heads)
    }

    fn key_heads(&self, queries: usize, keys: usize) -> Result<Range<usize>> {
        self.layers.key_heads(queries, keys)
    }

    fn features(&self, features: usize) -> Result<Range<usize>> {
        self.layers.features(features)
    }

    fn stream(&self, positions: usize) -> Result<Range<usize>> {
        self.layers.stream(positions)
    }

    fn set_whole_stream(&self, whole: bool) {
        self.layers.set_whole_stream(whole);
    }

    fn on_whole_stream(&self, x: &Var, work: &mut dyn FnMut(&Var) -> Result<Var>) -> Result<Var> {
        self.layers.on_whole_stream(x, work)
    }

    fn sum_over_ranks(&self, x: Tensor) -> Result<Tensor> {
        self.layers.sum_over_ranks(x)
    }

    fn experts(&self) -> Option<&dyn ExpertExchange> {
        (self.comm.size() > 1).then_some(self as _)
    }

    fn partial(&self, parameters: &[Parameter]) -> Result<()> {
        self.layers.partial(parameters)
    }

    fn begins(&self, names: FileNames, whole: bool) {
        self.layers.begins(names, whole);
    }

    fn built(&self, parameters: &[Parameter]) -> Result<()> {
        self.layers.built(parameters)
    }

    fn loaded(&self, parameters: &[Parameter]) -> Result<()> {
        self.layers.loaded(parameters)
    }
}
