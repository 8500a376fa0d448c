//! [`TensorParallel`] as a layer factory ([`LayerFactory`]): `nn`'s models with parallel layers.

use std::ops::Range;

use phalanx_nn::autograd::Var;
use phalanx_nn::models::ModelConfig;
use phalanx_nn::{
    EmbeddingSpec, Error, HeadsNormSpec, LayerFactory, LinearSpec, Module, Parameter, Result, Scope,
};
use phalanx_tensor::Tensor;

use super::mappings::{Exchange, Split};
use super::vocabulary::head_bias;
use super::{
    ColumnParallelLinear, HeadsParallelRmsNorm, RowParallelLinear, TensorParallel, VocabParallelEmbedding,
    VocabParallelHead,
};

impl LayerFactory for TensorParallel {
    type Column = ColumnParallelLinear;
    type Row = RowParallelLinear;
    type Embedding = VocabParallelEmbedding;
    type Head = VocabParallelHead;

    fn column(&self, scope: &Scope, map: LinearSpec<'_>) -> Result<ColumnParallelLinear> {
        ColumnParallelLinear::new(self, scope, map)
    }

    fn row(&self, scope: &Scope, map: LinearSpec<'_>) -> Result<RowParallelLinear> {
        RowParallelLinear::new(self, scope, map)
    }

    fn columns(&self, maps: &[&ColumnParallelLinear], x: &Var) -> Result<Vec<Var>> {
        ColumnParallelLinear::apply(maps, x)
    }

    fn row_and_bias(&self, layer: &RowParallelLinear, x: &Var) -> Result<(Var, Option<Var>)> {
        layer.forward_and_bias(x)
    }

    fn heads_norm(&self, scope: &Scope, spec: HeadsNormSpec) -> Result<Box<dyn Module>> {
        Ok(Box::new(HeadsParallelRmsNorm::new(self, scope, spec)?))
    }

    fn embedding(&self, scope: &Scope, table: EmbeddingSpec) -> Result<VocabParallelEmbedding> {
        VocabParallelEmbedding::new(self, scope, table)
    }

    fn head(
        &self,
        scope: &Scope,
        table: EmbeddingSpec,
        tied: Option<&VocabParallelEmbedding>,
    ) -> Result<VocabParallelHead> {
        VocabParallelHead::new(self, scope, table, tied)
    }

    fn head_bias(&self, scope: &Scope, vocabulary: usize) -> Result<Parameter> {
        head_bias(self, scope, vocabulary)
    }

    fn heads(&self, heads: usize) -> Result<Range<usize>> {
        let comm = self.comm();
        Ok(Split::even("attention heads", 0, heads, comm.size())?.range(comm.rank()))
    }

    /// Key heads are split if the ranks divide their number. Otherwise every rank has all of them, its query heads use some of
    /// them, and the maps that make them are applied outside the region ([`LinearSpec::whole`]).
    fn key_heads(&self, queries: usize, keys: usize) -> Result<Range<usize>> {
        self.heads(queries)?;
        if keys.is_multiple_of(self.comm().size()) { self.heads(keys) } else { Ok(0..keys) }
    }

    fn features(&self, features: usize) -> Result<Range<usize>> {
        let comm = self.comm();
        Ok(Split::uneven("features", 0, features, comm.size())?.range(comm.rank()))
    }

    fn stream(&self, positions: usize) -> Result<Range<usize>> {
        let comm = self.comm();
        if !self.is_sequence_parallel() {
            return Ok(0..positions);
        }
        let split = Split::even("sequence parallelism: positions", 1, positions, comm.size())?;
        Ok(split.range(comm.rank()))
    }

    fn set_whole_stream(&self, whole: bool) {
        self.keep_whole(whole);
    }

    fn on_whole_stream(&self, x: &Var, work: &mut dyn FnMut(&Var) -> Result<Var>) -> Result<Var> {
        self.in_region(x, work)
    }

    fn sum_over_ranks(&self, x: Tensor) -> Result<Tensor> {
        Ok(Exchange::Sum.run(self.comm(), &x, true)?)
    }

    fn partial(&self, parameters: &[Parameter]) -> Result<()> {
        Ok(self.all_reduce_partial_grads(parameters)?)
    }

    fn built(&self, parameters: &[Parameter]) -> Result<()> {
        Ok(self.all_reduce_whole_grads(parameters)?)
    }
}

impl TensorParallel {
    /// Checks whether a model can be split over `ranks`, before it is built. `positions` is the number of positions of a sequence
    /// with sequence parallelism.
    ///
    /// # Errors
    /// If the ranks do not divide the query heads or the positions, or there are fewer tokens or inner features than ranks. The
    /// error has both numbers.
    pub fn check(config: &ModelConfig, ranks: usize, positions: Option<usize>) -> Result<()> {
        if ranks == 0 {
            return Err(Error::invalid("tensor parallelism", "got no ranks, wanted at least one"));
        }
        Split::even("attention heads", 0, config.heads(), ranks)?;
        Split::uneven("inner features", 0, config.inner(), ranks)?;
        Split::uneven("vocabulary", 0, config.vocabulary(), ranks)?;
        let positions = positions.map(|n| Split::even("sequence parallelism: positions", 1, n, ranks));
        positions.transpose().map(drop)
    }
}
