//! [`Chunks`]: the stages of one rank as one model, and [`place`], which divides a model's blocks among the stages.

use std::sync::Arc;

use phalanx_nn::models::{Decoder, ModelConfig, Stage};
use phalanx_nn::{AnyUnit, Entry, Layers, Parameter, Parameters, Scope, cut};

use crate::pipeline::schedule::Schedule;
use crate::{Error, Result};

/// A model's blocks laid over stages: evenly, earlier stages take the remainder, the embedding is with the first and the
/// norm and head with the last. A stage may have no blocks, where there are more stages than blocks; it passes its input on.
///
/// # Errors
/// If there is no stage.
///
/// ```
/// use phalanx_parallel::pipeline::ranks::place;
/// let stages = place(5, 3)?;
/// assert_eq!(stages.iter().map(|stage| stage.layers.clone()).collect::<Vec<_>>(), [0..2, 2..4, 4..5]);
/// assert!(stages[0].first && stages[2].last && !stages[1].first && !stages[1].last);
/// # Ok::<(), phalanx_parallel::Error>(())
/// ```
pub fn place(blocks: usize, stages: usize) -> Result<Vec<Stage>> {
    if stages == 0 {
        return Err(Error::Config(format!("place: got 0 stages for {blocks} blocks, wanted at least 1")));
    }
    let stage = |(i, layers)| Stage { layers, first: i == 0, last: i + 1 == stages };
    Ok(cut(blocks, stages).into_iter().enumerate().map(stage).collect())
}

/// The parts of a model that are on one rank, by the numbers of their stages, as one model: of one optimizer, one
/// [`DataParallel`](crate::data_parallel::DataParallel), one state dict.
pub struct Chunks<M>(Vec<(usize, M)>);

impl<M> Chunks<M> {
    /// These, stages ascending.
    pub fn new(chunks: Vec<(usize, M)>) -> Chunks<M> {
        Chunks(chunks)
    }

    /// All, stages ascending.
    pub fn iter(&self) -> impl Iterator<Item = &M> {
        self.0.iter().map(|(_, chunk)| chunk)
    }

    /// All, stages ascending.
    pub fn iter_mut(&mut self) -> impl Iterator<Item = &mut M> {
        self.0.iter_mut().map(|(_, chunk)| chunk)
    }

    /// A stage's part.
    ///
    /// # Errors
    /// If that stage is not here.
    pub fn of(&self, stage: usize) -> Result<&M> {
        let found = self.0.iter().find(|(number, _)| *number == stage).map(|(_, chunk)| chunk);
        let here: Vec<usize> = self.0.iter().map(|(number, _)| *number).collect();
        found.ok_or_else(|| Error::Config(format!("got stage {stage} on a rank with stages {here:?}")))
    }
}

impl<L: Layers> Chunks<Decoder<L>> {
    /// Builds a rank's part of a model by [`place`]. Where it has both ends of a model that ties them, they share the table.
    ///
    /// # Errors
    /// If a part cannot be built.
    pub fn build(
        config: &ModelConfig,
        layers: &Arc<L>,
        scope: &Scope,
        schedule: &Schedule,
        rank: usize,
    ) -> Result<Chunks<Decoder<L>>> {
        let placed = place(config.layers(), schedule.stages())?;
        let mut chunks: Vec<(usize, Decoder<L>)> = Vec::new();
        for stage in schedule.stages_of(rank) {
            let first = chunks.first().map(|(_, first)| first);
            let chunk = config.init_stage_beside(layers, scope, placed[stage].clone(), first)?;
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
            let placed = place(blocks, stages).unwrap();
            assert_eq!(placed.iter().map(|s| s.layers.len()).collect::<Vec<_>>(), sizes);
            assert!(placed.windows(2).all(|pair| pair[0].layers.end == pair[1].layers.start));
            assert_eq!((placed[0].layers.start, placed[stages - 1].layers.end), (0, blocks));
            assert!(
                placed.iter().enumerate().all(|(i, s)| s.first == (i == 0) && s.last == (i + 1 == stages))
            );
        }
        let error = place(4, 0).unwrap_err().to_string();
        assert!(error.contains("got 0 stages for 4 blocks"), "{error}");
    }
}
