//! [`VocabParallelEmbedding`]: a lookup table split by its rows; [`VocabParallelHead`]: the map to the logits of a vocabulary
//! that is split, with the loss.

use phalanx_kernels::split_indices;
use phalanx_nn::autograd::{CrossEntropy, Reduction, Var};
use phalanx_nn::tensor::{Dims, Window};
use phalanx_nn::{EmbeddingSpec, Head, Init, LinearMap, Module, Parameter, Result, Scope, Shard, parameters};

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
    /// The row of padding among this rank's, if it is one of them.
    padding: Option<isize>,
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
        let padding = own_row(table.padding, &split, group).map(|row| row as isize);
        Ok(VocabParallelEmbedding {
            weight,
            group: group.clone(),
            split,
            site: usize::from(table.tied),
            padding,
        })
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
        let rows = self.weight.site(self.site).embedding(&Var::new(here), self.padding)?;
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
    let mut weight = scope.shard("weight", &held, part, table.init)?;
    if let Some(row) = own_row(table.padding, &split, group) {
        weight = weight.with_zero_row(row)?;
    }
    Ok((weight.with_sites(1 + usize::from(table.tied))?, split))
}

/// A row's number among this rank's rows, if it is one of them.
fn own_row(row: Option<usize>, split: &Split, group: &TensorParallel) -> Option<usize> {
    let own = split.range(group.comm().rank());
    row.filter(|row| own.contains(row)).map(|row| row - own.start)
}

/// This rank's part of a bias of a head's scores.
pub(super) fn head_bias(group: &TensorParallel, scope: &Scope, vocabulary: usize) -> Result<Parameter> {
    let comm = group.comm();
    let split = Split::uneven(&format!("{}: bias", scope.path()), 0, vocabulary, comm.size())?;
    let range = split.range(comm.rank());
    let window = Window { global: Dims::from_slice(&[vocabulary]), offset: Dims::from_slice(&[range.start]) };
    let part = Shard { window, extent: Dims::from_slice(&[range.len()]) };
    scope.shard("bias", &[range.len()], part, Init::ZEROS)
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
        Ok(VocabParallelHead { weight: weight.as_weight(), group: group.clone(), split })
    }
}

/// Cross entropies that are added and multiplied by `scale`.
fn summed(scale: f64) -> CrossEntropy {
    CrossEntropy { reduction: Reduction::Sum, scale, wide: true, ..CrossEntropy::default() }
}

impl Module for VocabParallelHead {
    fn forward(&self, x: &Var) -> Result<Var> {
        self.scores(x, None)
    }
}

impl LinearMap for VocabParallelHead {
    fn weight(&self) -> &Parameter {
        &self.weight
    }

    fn bias(&self) -> Option<&Parameter> {
        None
    }
}

impl Head for VocabParallelHead {
    fn scores(&self, x: &Var, bias: Option<&Parameter>) -> Result<Var> {
        Ok(columns(&self.group, x, &[(self.weight.var(), bias.map(Parameter::var))])?.swap_remove(0))
    }

    fn gathered(&self, scores: Var) -> Result<Var> {
        let split = Split { dim: scores.rank() - 1, ..self.split.clone() };
        let exchanges = [Exchange::Gather(split.clone()), Exchange::Part(split)];
        Ok(exchanged("logits", scores, self.group.comm(), exchanges)?)
    }

    fn loss_of(&self, scores: &Var, targets: &Var, scale: f64) -> Result<Var> {
        let (classes, comm) = (self.split.total(), self.group.comm());
        let (scores, targets) = (scores.flatten(0, -2)?, targets.flatten(0, -1)?);
        Ok(vocab_parallel_cross_entropy(&scores, &targets, classes, comm, &summed(scale))?)
    }

    fn loss(&self, x: &Var, targets: &Var, scale: f64, logits_max: usize) -> Result<Var> {
        let (classes, comm) = (self.split.total(), self.group.comm());
        // All ranks take the same way, that of the rank with most classes.
        let most = self.split.lengths.iter().copied().max().unwrap_or(0);
        if targets.numel().saturating_mul(most) <= logits_max {
            return self.loss_of(&self.scores(x, None)?, targets, scale);
        }
        let (x, weight) = (self.group.enter(x)?.flatten(0, -2)?, self.weight.var());
        let (targets, config) = (targets.flatten(0, -1)?, summed(scale));
        Ok(vocab_parallel_linear_cross_entropy(&x, &weight, &targets, classes, comm, &config, logits_max)?)
    }
}
