//! [`VocabParallelEmbedding`]: a lookup table cut by its rows.

use phalanx_kernels::split_indices;
use phalanx_nn::autograd::Var;
use phalanx_nn::tensor::{Dims, Window};
use phalanx_nn::{Module, Parameter, Result, Scope, Shard, Table, parameters};

use super::TensorParallel;
use super::cut::Cut;

/// Rows of a table `[count, width]` by indices, which every rank has: `[B, T]` i64 to the stream `[B, T, width]`. A rank
/// holds some of the rows; it contributes those, and the sum of all ranks' contributions leaves the region.
pub struct VocabParallelEmbedding {
    /// `[count / ranks, width]`
    pub weight: Parameter,
    group: TensorParallel,
    cut: Cut,
    /// The site at which the table is used: 1 where a head is tied to it and uses it at site 0.
    site: usize,
}

parameters!(VocabParallelEmbedding { weight });

impl VocabParallelEmbedding {
    /// This rank's part of a table.
    ///
    /// # Errors
    /// If there are fewer rows than ranks, or memory is short.
    pub fn new(group: &TensorParallel, scope: &Scope, table: Table) -> Result<VocabParallelEmbedding> {
        let (weight, cut) = rows(group, scope, table)?;
        Ok(VocabParallelEmbedding { weight, group: group.clone(), cut, site: usize::from(table.tied) })
    }

    /// How the rows are cut.
    pub(super) fn cut(&self) -> &Cut {
        &self.cut
    }
}

impl Module for VocabParallelEmbedding {
    fn forward(&self, indices: &Var) -> Result<Var> {
        let own = self.cut.range(self.group.comm().rank());
        let (here, elsewhere) = split_indices(indices.tensor(), own, self.cut.whole(), None)?;
        let rows = self.weight.site(self.site).embedding(&Var::new(here), None)?;
        // Adding -0 changes nothing, not even the sign of a zero.
        let own = rows.masked_fill(&Var::new(elsewhere.unsqueeze(-1)?), -0.0)?;
        drop(rows);
        Ok(self.group.leave(own)?)
    }
}

/// This rank's rows of a table, with their part of the initial values, and of a tied one with a site for the head and one for
/// the embedding, of which one may be on another stage.
pub(super) fn rows(group: &TensorParallel, scope: &Scope, table: Table) -> Result<(Parameter, Cut)> {
    let comm = group.comm();
    let cut = Cut::shares(&format!("{}: rows", scope.path()), 0, table.count, comm.size())?;
    let range = cut.range(comm.rank());
    let window = Window {
        global: Dims::from_slice(&[table.count, table.width]),
        offset: Dims::from_slice(&[range.start, 0]),
    };
    let held = [range.len(), table.width];
    let part = Shard { window, extent: Dims::from_slice(&held) };
    let weight = scope.shard("weight", &held, part, table.init)?;
    Ok((weight.with_sites(1 + usize::from(table.tied))?, cut))
}
