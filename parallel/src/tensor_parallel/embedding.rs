//! [`VocabParallelEmbedding`]: a lookup table cut by its rows.

use phalanx_nn::autograd::Var;
use phalanx_nn::tensor::{Dims, Window};
use phalanx_nn::{Error, Module, Parameter, Result, Scope, Shard, Table, parameters};

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
        let [here, elsewhere] = local(indices, &self.cut, self.group.comm().rank(), None)?;
        let rows = self.weight.site(self.site).embedding(&here, None)?;
        // Adding -0 changes nothing, not even the sign of a zero.
        let own = rows.masked_fill(&elsewhere.unsqueeze(-1)?, -0.0)?;
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

/// Indices of rows of the whole, as those of this rank's, and a bool for each: whether its row is elsewhere (the index is 0
/// then). Where the index is `ignored`, it is elsewhere on all ranks.
pub(super) fn local(indices: &Var, cut: &Cut, rank: usize, ignored: Option<i64>) -> Result<[Var; 2]> {
    let (shape, device) = (indices.shape(), indices.device());
    let (range, whole) = (cut.range(rank), cut.whole());
    let all = if device.is_meta() { vec![0; indices.numel()] } else { indices.to_vec::<i64>()? };
    let unknown =
        |&&index: &&i64| Some(index) != ignored && usize::try_from(index).map_or(true, |row| row >= whole);
    if let Some((at, index)) = all.iter().enumerate().find(|(_, index)| unknown(index)) {
        let why = format!("got index {index} (item {at}), wanted one below {whole}");
        return Err(Error::invalid("rows cut over ranks", why));
    }
    let place = |&index: &i64| usize::try_from(index).ok().filter(|row| range.contains(row));
    let here: Vec<i64> =
        all.iter().map(|index| place(index).map_or(0, |row| (row - range.start) as i64)).collect();
    let elsewhere: Vec<bool> = all.iter().map(|index| place(index).is_none()).collect();
    Ok([Var::from_slice(&here, shape, device)?, Var::from_slice(&elsewhere, shape, device)?])
}

#[cfg(test)]
mod tests {
    use phalanx_nn::tensor::Device;

    use super::*;

    #[test]
    fn indices_are_those_of_the_ranks_rows_and_unknown_ones_are_refused() {
        let cut = Cut::shares("rows", 0, 10, 3).unwrap();
        let indices = |values: &[i64]| Var::from_slice(values, &[values.len()], Device::CPU).unwrap();
        let [here, elsewhere] = local(&indices(&[0, 4, 6, 9, -100]), &cut, 1, Some(-100)).unwrap();
        assert_eq!(here.to_vec::<i64>().unwrap(), [0, 0, 2, 0, 0]);
        assert_eq!(elsewhere.to_vec::<bool>().unwrap(), [true, false, false, true, true]);
        for wrong in [10, -1, -100] {
            let error = local(&indices(&[3, wrong]), &cut, 0, None).map(drop).unwrap_err().to_string();
            assert!(error.contains(&format!("index {wrong} (item 1), wanted one below 10")), "{error}");
        }
    }
}
