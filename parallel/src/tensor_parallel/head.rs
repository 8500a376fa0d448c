//! [`VocabParallelHead`]: scores of a vocabulary that is cut, with the loss.

use phalanx_nn::autograd::{CrossEntropy, Reduction, Var};
use phalanx_nn::{Head, Parameter, Result, Scope, Table, parameters};

use super::columns::columns;
use super::cut::Cut;
use super::embedding::rows;
use super::exchange::Exchange;
use super::regions::exchanged;
use super::{TensorParallel, VocabParallelEmbedding, vocab_parallel_cross_entropy};

/// The map from the stream to scores `[.., vocabulary]`, of which a rank makes those of its rows of the table; the loss
/// never gathers them.
pub struct VocabParallelHead {
    /// `[vocabulary / ranks, width]`
    pub weight: Parameter,
    group: TensorParallel,
    cut: Cut,
}

parameters!(VocabParallelHead { weight });

impl VocabParallelHead {
    /// This rank's part of a head, on the table of `tied` or one of its own.
    ///
    /// # Errors
    /// If there are fewer rows than ranks, or memory is short.
    pub fn new(
        group: &TensorParallel,
        scope: &Scope,
        table: Table,
        tied: Option<&VocabParallelEmbedding>,
    ) -> Result<VocabParallelHead> {
        let (weight, cut) = match tied {
            Some(embedding) => (embedding.weight.clone(), embedding.cut().clone()),
            None => rows(group, scope, table)?,
        };
        Ok(VocabParallelHead { weight, group: group.clone(), cut })
    }

    /// This rank's scores, of all positions.
    fn own(&self, x: &Var) -> Result<Var> {
        Ok(columns(&self.group, x, &[(self.weight.var(), None)])?.swap_remove(0))
    }
}

impl Head for VocabParallelHead {
    fn logits(&self, x: &Var) -> Result<Var> {
        let own = self.own(x)?;
        let cut = Cut { dim: own.rank() - 1, ..self.cut.clone() };
        let exchanges = [Exchange::Gather(cut.clone()), Exchange::Part(cut)];
        Ok(exchanged("logits", own, self.group.comm(), exchanges)?)
    }

    fn loss(&self, x: &Var, targets: &Var, scale: f64) -> Result<Var> {
        let own = self.own(x)?.flatten(0, -2)?;
        let reduction = Reduction::Sum;
        let config = CrossEntropy { reduction, scale, wide: true, ..CrossEntropy::default() };
        let targets = targets.flatten(0, -1)?;
        Ok(vocab_parallel_cross_entropy(&own, &targets, self.cut.whole(), self.group.comm(), &config)?)
    }
}
