//! [`Chunks`]: the stages of one rank as one model; [`split_blocks`]: which of a model's blocks each stage has.

use std::sync::Arc;

use phalanx_nn::models::{Decoder, DecoderStage, ModelConfig};
use phalanx_nn::{AnyUnit, Entry, LayerFactory, Parameter, Parameters, Scope, cut};

use crate::pipeline::schedule::Schedule;
use crate::{Error, Result};

/// Divides a model's blocks among stages: evenly, and earlier stages take the remainder. The first stage has the embedding as
/// well, and the last the final norm and the head. With more stages than blocks some stages have no block and pass their input
/// on.
///
/// # Errors
/// If there is no stage.
///
/// ```
/// use phalanx_parallel::pipeline::ranks::split_blocks;
/// let stages = split_blocks(5, 3)?;
/// assert_eq!(stages.iter().map(|stage| stage.layers.clone()).collect::<Vec<_>>(), [0..2, 2..4, 4..5]);
/// assert!(stages[0].first && stages[2].last && !stages[1].first && !stages[1].last);
/// # Ok::<(), phalanx_parallel::Error>(())
/// ```
pub fn split_blocks(blocks: usize, stages: usize) -> Result<Vec<DecoderStage>> {
    if stages == 0 {
        return Err(Error::Config(format!("place: got 0 stages for {blocks} blocks, wanted at least 1")));
    }
    let stage = |(i, layers)| DecoderStage { layers, first: i == 0, last: i + 1 == stages };
    Ok(cut(blocks, stages).into_iter().enumerate().map(stage).collect())
}

/// The former name of [`split_blocks`].
///
/// # Errors
/// As [`split_blocks`].
#[deprecated(since = "0.1.0", note = "renamed to `split_blocks`")]
pub fn place(blocks: usize, stages: usize) -> Result<Vec<DecoderStage>> {
    split_blocks(blocks, stages)
}

/// The stages of a model that are on one rank, as one model: it has one optimizer, one
/// [`DataParallel`](crate::data_parallel::DataParallel) and one state dict. (Megatron-LM's model chunks.)
pub struct Chunks<M>(Vec<(usize, M)>);

impl<M> Chunks<M> {
    /// Chunks with the numbers of their stages, ascending.
    pub fn new(chunks: Vec<(usize, M)>) -> Chunks<M> {
        Chunks(chunks)
    }

    /// All chunks, stages ascending.
    pub fn iter(&self) -> impl Iterator<Item = &M> {
        self.0.iter().map(|(_, chunk)| chunk)
    }

    /// All chunks, stages ascending.
    pub fn iter_mut(&mut self) -> impl Iterator<Item = &mut M> {
        self.0.iter_mut().map(|(_, chunk)| chunk)
    }

    /// The chunk of a stage.
    ///
    /// # Errors
    /// If the stage is not on this rank.
    pub fn of(&self, stage: usize) -> Result<&M> {
        let found = self.0.iter().find(|(number, _)| *number == stage).map(|(_, chunk)| chunk);
        let here: Vec<usize> = self.0.iter().map(|(number, _)| *number).collect();
        found.ok_or_else(|| Error::Config(format!("got stage {stage} on a rank with stages {here:?}")))
    }
}

impl<L: LayerFactory> Chunks<Decoder<L>> {
    /// Builds a rank's stages of a model, divided by [`split_blocks`]. If the rank has the first and the last stage of a model
    /// with a tied table, both share it.
    ///
    /// # Errors
    /// If a stage cannot be built.
    pub fn build(
        config: &ModelConfig,
        layers: &Arc<L>,
        scope: &Scope,
        schedule: &Schedule,
        rank: usize,
    ) -> Result<Chunks<Decoder<L>>> {
        let placed = split_blocks(config.layers(), schedule.stages())?;
        Chunks::build_stages(config, layers, scope, &placed, schedule.stages_of(rank))
    }

    /// Builds some stages of a model that is divided into `placed`, such as
    /// [`StagePlan::decoder_stages`](crate::planning::StagePlan::decoder_stages). If the first and the last stage of a model with a
    /// tied table are among `own`, both share it.
    ///
    /// # Errors
    /// If a stage cannot be built, or there is none of its number.
    pub fn build_stages(
        config: &ModelConfig,
        layers: &Arc<L>,
        scope: &Scope,
        placed: &[DecoderStage],
        own: impl IntoIterator<Item = usize>,
    ) -> Result<Chunks<Decoder<L>>> {
        let mut chunks: Vec<(usize, Decoder<L>)> = Vec::new();
        for stage in own {
            let missing =
                || Error::Config(format!("got stage {stage} of a model of {} stages", placed.len()));
            let part = placed.get(stage).cloned().ok_or_else(missing)?;
            let first = chunks.first().map(|(_, first)| first);
            let chunk = config.init_stage_beside(layers, scope, part, first)?;
            chunks.push((stage, chunk));
        }
        Ok(Chunks(chunks))
    }
}

impl<M: Parameters> Parameters for Chunks<M> {
    fn visit(&self, path: &str, visitor: &mut dyn FnMut(&str, Entry<'_>)) {
        self.0.iter().for_each(|(_, chunk)| chunk.visit(path, visitor));
    }

    fn visit_units(&self, visitor: &mut dyn FnMut(&dyn AnyUnit)) {
        self.0.iter().for_each(|(_, chunk)| chunk.visit_units(visitor));
    }

    fn borrowed(&self) -> Vec<Parameter> {
        self.0.iter().flat_map(|(_, chunk)| chunk.borrowed()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn earlier_stages_take_the_remainder_and_the_ends_have_the_ends() {
        for (blocks, stages, sizes) in [
            (4, 1, &[4][..]),
            (4, 2, &[2, 2]),
            (4, 3, &[2, 1, 1]),
            (6, 4, &[2, 2, 1, 1]),
            (6, 8, &[1, 1, 1, 1, 1, 1, 0, 0]),
            (0, 2, &[0, 0]),
        ] {
            let placed = split_blocks(blocks, stages).unwrap();
            assert_eq!(placed.iter().map(|s| s.layers.len()).collect::<Vec<_>>(), sizes);
            assert!(placed.windows(2).all(|pair| pair[0].layers.end == pair[1].layers.start));
            assert_eq!((placed[0].layers.start, placed[stages - 1].layers.end), (0, blocks));
            assert!(
                placed.iter().enumerate().all(|(i, s)| s.first == (i == 0) && s.last == (i + 1 == stages))
            );
        }
        let error = split_blocks(4, 0).unwrap_err().to_string();
        assert!(error.contains("got 0 stages for 4 blocks"), "{error}");
    }
}
