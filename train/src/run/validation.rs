//! [`Validation`]: the mean loss over validation data, with the same bits under every layout that does not split layers; [`BestLoss`], the
//! lowest one so far; [`PlateauState`], the learning rate's reduction when it does not fall.

use std::ops::Range;
use std::sync::Arc;

use phalanx_nn::{Batch, Permutation, cut, inference};
use phalanx_parallel::data_parallel::DataParallel;
use phalanx_parallel::hybrid::{Layout, StagedModel, Step};
use phalanx_parallel::mesh::Axis;
use phalanx_parallel::pipeline::ranks::Pipeline;
use phalanx_tensor::{Category, Context, DType, RngKey, Tensor};

use super::step::{in_model_dtype, loss_value};
use crate::data::Dataset;
use crate::mesh_rank::MeshRank;
use crate::{Config, Error, Plateau, Result};

/// Rows of a piece at most. Pieces are the same under every layout, and their losses are added in order. (Running statistics of a batch
/// norm are the first replica's, which has trained on other rows than one device would.)
const ROWS: usize = 8;

/// The site of the random draws of validation rows.
const SITE: u64 = 0x7661_6c69;

/// The lowest validation loss of a run.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct BestLoss {
    pub loss: Option<f64>,
    /// The steps that were done then.
    pub step: u64,
    /// Validations since then.
    pub since: usize,
}

impl BestLoss {
    /// Updates it with a validation after `step` steps.
    pub fn update(&mut self, step: u64, loss: f64) {
        // A NaN is no lower loss.
        if !loss.is_nan() && self.loss.is_none_or(|best| loss < best) {
            *self = BestLoss { loss: Some(loss), step, since: 0 };
        } else {
            self.since += 1;
        }
    }
}

/// The items of a validation: all, or as many as are wanted, drawn by the seed.
fn rows(config: &Config, all: usize) -> Vec<usize> {
    let Some(some) = config.validation_rows.filter(|&some| some < all) else { return (0..all).collect() };
    let order = Permutation::new(all as u64, RngKey { seed: config.seed, step: 0 }.site(SITE));
    let mut rows: Vec<usize> = (0..some as u64).map(|index| order.draw(index).1 as usize).collect();
    rows.sort_unstable();
    rows
}

/// Validates on this rank: the pieces of its replica, in a pipeline without backward passes.
pub(crate) struct Validation {
    data: Arc<dyn Dataset>,
    /// The items that are used, in order.
    rows: Vec<usize>,
    /// The rows of each piece of the data.
    pieces: Vec<Range<usize>>,
    /// The pieces of this rank's replica.
    own: Range<usize>,
    /// Passes of each replica. A replica without a piece left takes part in the last ones, because ZeRO gathers on all ranks together.
    rounds: usize,
    pipeline: Pipeline,
    micro_batches: usize,
    /// 1 / (rows or tokens that count).
    scale: f64,
    /// The model's dtype.
    dtype: DType,
}

impl Validation {
    pub fn new(
        config: &Config,
        mesh_rank: &MeshRank,
        data: Arc<dyn Dataset>,
        counted: usize,
    ) -> Result<Validation> {
        let drawn = rows(config, data.len());
        let rows = drawn.len();
        if rows == 0 {
            return Err(Error::Config("train: got validation data without rows, wanted at least one".into()));
        }
        let each = config.batch.min(ROWS);
        let pieces: Vec<_> = (0..rows).step_by(each).map(|start| start..(start + each).min(rows)).collect();
        let (replicas, line) = (mesh_rank.replicas(), mesh_rank.groups.along(Axis::Pp));
        let own = cut(pieces.len(), replicas.size()).swap_remove(replicas.rank());
        let micro_batches = line.size();
        let schedule = Layout { micro_batches, ..config.layout.clone() }.schedule()?;
        let pipeline = Pipeline::new(&schedule, line.clone(), mesh_rank.device)?;
        let rounds = pieces.len().div_ceil(replicas.size()).div_ceil(micro_batches);
        let all: usize = drawn.iter().map(|&row| data.counted(row).unwrap_or(counted)).sum();
        let scale = 1.0 / all as f64;
        Ok(Validation {
            data,
            rows: drawn,
            pieces,
            own,
            rounds,
            pipeline,
            micro_batches,
            scale,
            dtype: config.dtype,
        })
    }

    /// The mean loss over all rows. All ranks call it.
    pub fn loss(
        &self,
        mesh_rank: &MeshRank,
        model: &Arc<dyn StagedModel>,
        replicas: &Arc<dyn DataParallel>,
    ) -> Result<f64> {
        let _inference = inference();
        let mut own = vec![0.0; self.pieces.len()];
        for round in 0..self.rounds {
            let numbers: Vec<usize> =
                (0..self.micro_batches).map(|i| self.own.start + round * self.micro_batches + i).collect();
            // A rank without a piece left repeats one, because ZeRO gathers on all ranks together. That loss is not counted.
            let piece = |&number: &usize| self.batch(mesh_rank, number.min(self.own.end.max(1) - 1));
            let micro_batches = numbers.iter().map(piece).collect::<Result<Vec<_>>>()?;
            let work =
                Step { model: model.clone(), replicas: replicas.clone(), micro_batches, scale: self.scale };
            let losses = self.pipeline.evaluate(&Arc::new(work))?;
            for (&number_of, loss) in numbers.iter().zip(&losses).filter(|(n, _)| self.own.contains(n)) {
                own[number_of] = if mesh_rank.counts_loss() { loss_value(loss)? } else { 0.0 };
            }
        }
        // One rank has the loss of a piece; the others have 0.
        let (count, all) = (own.len(), mesh_rank.all_gather_slice(&own)?);
        let loss_of = |piece: usize| all.iter().skip(piece).step_by(count).fold(0.0, |sum, x| sum + x);
        Ok((0..count).map(loss_of).fold(0.0, |sum, loss| sum + loss))
    }

    fn batch(&self, mesh_rank: &MeshRank, piece: usize) -> Result<Batch> {
        let first_row = self.pieces[piece].start;
        let rows = self.rows[self.pieces[piece].clone()].iter().copied();
        let named = |row: usize, why: Error| {
            Error::data(format!("item {row} of the validation data"), why.to_string())
        };
        let item = |row: usize| self.data.item(row, 0).map_err(|why| named(row, why));
        let items = rows.map(item).collect::<Result<Vec<_>>>()?;
        let _category = Context::with(|c| c.category = Category::Buffers);
        let on_device = |tensor: Tensor| Ok(tensor.to_device(mesh_rank.device, false)?);
        let tensors = self.data.collate(items)?.into_iter().map(on_device).collect::<Result<Vec<_>>>()?;
        in_model_dtype(Batch { tensors, first_row }, self.dtype)
    }
}

/// How far plateaus have lowered the learning rate.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct PlateauState {
    /// The schedule's rate is multiplied by this.
    pub lr_factor: f64,
    /// Validations without a lower loss since it was lowered.
    pub stale: usize,
}

impl Default for PlateauState {
    fn default() -> PlateauState {
        PlateauState { lr_factor: 1.0, stale: 0 }
    }
}

impl PlateauState {
    /// Updates it after a validation.
    pub fn update(&mut self, plateau: Plateau, lower: bool) {
        self.stale = if lower { 0 } else { self.stale + 1 };
        if self.stale >= plateau.patience {
            *self = PlateauState { lr_factor: self.lr_factor * plateau.factor, stale: 0 };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rate_falls_after_validations_in_a_row_without_a_lower_loss() {
        let (mut state, plateau) = (PlateauState::default(), Plateau { factor: 0.5, patience: 2 });
        let mut factors = Vec::new();
        for lower in [true, false, false, false, true, false, false] {
            state.update(plateau, lower);
            factors.push(state.lr_factor);
        }
        assert_eq!(factors, [1.0, 1.0, 0.5, 0.5, 0.5, 0.5, 0.25]);
    }
}
