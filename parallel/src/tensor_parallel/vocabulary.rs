//! [`VocabParallelEmbedding`]: a lookup table split by its rows; [`VocabParallelHead`]: the map to the logits of a vocabulary
//! that is split, with the loss.

use phalanx_kernels::split_indices;
use phalanx_nn::autograd::{CrossEntropy, Reduction, Var};
use phalanx_nn::tensor::{Dims, Window};
use phalanx_nn::{EmbeddingSpec, Head, Module, Parameter, Result, Scope, Shard, parameters};

use super::linear::columns;
use super::mappings::{Exchange, Split, exchanged};
use super::{TensorParallel, vocab_parallel_cross_entropy, vocab_parallel_linear_cross_entropy};

/// Looks up rows of a table `[count, width]`: i64 indices `[B, T]`, which every rank has, to activations `[B, T, width]`. A rank
/// holds some of the rows and gives zeros for the others; the sum over the ranks leaves the region.
pub struct VocabParallelEmbedding {
    /// `[count / ranks, width]`
    pub weight: Parameter,
    group: TensorParallel,
    split: Split,
    /// The site of this use of the table: 1 if a head is tied to the table, which uses site 0.
    site: usize,
}

parameters!(VocabParallelEmbedding { weight });

impl VocabParallelEmbedding {
    /// This rank's rows of a table.
    ///
    /// # Errors
    /// If there are fewer rows than ranks, or memory is short.
    pub fn new(
        group: &TensorParallel,
        scope: &Scope,
        table: EmbeddingSpec,
    ) -> Result<VocabParallelEmbedding> {
        let (weight, split) = rows(group, scope, table)?;
        Ok(VocabParallelEmbedding { weight, group: group.clone(), split, site: usize::from(table.tied) })
    }

    /// How the rows are split.
    pub(super) fn split(&self) -> &Split {
        &self.split
    }
}

impl Module for VocabParallelEmbedding {
    fn forward(&self, indices: &Var) -> Result<Var> {
        let own = self.split.range(self.group.comm().rank());
        let (here, elsewhere) = split_indices(indices.tensor(), own, self.split.total(), None)?;
        let rows = self.weight.site(self.site).embedding(&Var::new(here), None)?;
        // Adding -0 changes nothing, not even the sign of a zero.
        let own = rows.masked_fill(&Var::new(elsewhere.unsqueeze(-1)?), -0.0)?;
        drop(rows);
        Ok(self.group.leave(own)?)
    }
}

/// This rank's rows of a table, with their part of the initial values. A tied table has two sites, for the head and for the
/// embedding, one of which may be on another stage.
pub(super) fn rows(
    group: &TensorParallel,
    scope: &Scope,
    table: EmbeddingSpec,
) -> Result<(Parameter, Split)> {
    let comm = group.comm();
    let split = Split::uneven(&format!("{}: rows", scope.path()), 0, table.count, comm.size())?;
    let range = split.range(comm.rank());
    let window = Window {
        global: Dims::from_slice(&[table.count, table.width]),
        offset: Dims::from_slice(&[range.start, 0]),
    };
    let held = [range.len(), table.width];
    let part = Shard { window, extent: Dims::from_slice(&held) };
    let weight = scope.shard("weight", &held, part, table.init)?;
    Ok((weight.with_sites(1 + usize::from(table.tied))?, split))
}

/// The map from activations to logits `[.., vocabulary]`. A rank computes the logits of its rows of the table; the loss does not
/// gather them.
pub struct VocabParallelHead {
    /// `[vocabulary / ranks, width]`
    pub weight: Parameter,
    group: TensorParallel,
    split: Split,
}

parameters!(VocabParallelHead { weight });

impl VocabParallelHead {
    /// This rank's part of a head, on the table of `tied`, or on a table of its own.
    ///
    /// # Errors
    /// If there are fewer rows than ranks, or memory is short.
    pub fn new(
        group: &TensorParallel,
        scope: &Scope,
        table: EmbeddingSpec,
        tied: Option<&VocabParallelEmbedding>,
    ) -> Result<VocabParallelHead> {
        let (weight, split) = match tied {
            Some(embedding) => (embedding.weight.clone(), embedding.split().clone()),
            None => rows(group, scope, table)?,
        };
        Ok(VocabParallelHead { weight, group: group.clone(), split })
    }

    /// This rank's logits of all positions.
    fn own(&self, x: &Var) -> Result<Var> {
        Ok(columns(&self.group, x, &[(self.weight.var(), None)])?.swap_remove(0))
    }
}

impl Head for VocabParallelHead {
    fn logits(&self, x: &Var) -> Result<Var> {
        let own = self.own(x)?;
        let split = Split { dim: own.rank() - 1, ..self.split.clone() };
        let exchanges = [Exchange::Gather(split.clone()), Exchange::Part(split)];
        Ok(exchanged("logits", own, self.group.comm(), exchanges)?)
    }

    fn loss(&self, x: &Var, targets: &Var, scale: f64, logits_max: usize) -> Result<Var> {
        let reduction = Reduction::Sum;
        let config = CrossEntropy { reduction, scale, wide: true, ..CrossEntropy::default() };
        let targets = targets.flatten(0, -1)?;
        let (classes, comm) = (self.split.total(), self.group.comm());
        // All ranks take the same way, that of the rank with most classes.
        let most = self.split.lengths.iter().copied().max().unwrap_or(0);
        if targets.numel().saturating_mul(most) <= logits_max {
            let own = self.own(x)?.flatten(0, -2)?;
            return Ok(vocab_parallel_cross_entropy(&own, &targets, classes, comm, &config)?);
        }
        let (x, weight) = (self.group.enter(x)?.flatten(0, -2)?, self.weight.var());
        Ok(vocab_parallel_linear_cross_entropy(&x, &weight, &targets, classes, comm, &config, logits_max)?)
    }
}
