//! [`Chunks`]: the stages of one rank, as one model.

use std::sync::Arc;

use phalanx_nn::models::{Decoder, ModelConfig};
use phalanx_nn::{AnyUnit, Entry, Layers, Parameter, Parameters, Scope};

use super::place;
use crate::pipeline::schedule::Schedule;
use crate::{Error, Result};

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
