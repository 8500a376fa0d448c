//! [`Layer`]: a module of a pipeline, which may stash and pop skips; [`Sequence`]: a model, layers in a row.

use std::ops::Range;

use phalanx_nn::{AnyUnit, Entry, Module, Parameter, Parameters, Sequential, join_path};

use super::{Batch, Skippable, Skips, verify_skips};
use crate::Result;

/// A layer of one input or several, which may stash and pop skips. Every [`Module`] is one.
pub trait Layer: Parameters + Send + Sync {
    /// The output. It must be a function of the input, the parameters and the ambient context, since recomputation runs the
    /// layer twice.
    ///
    /// # Errors
    /// If the input does not fit.
    fn run(&self, input: Batch, skips: &mut Skips) -> Result<Batch>;

    /// The skips that it stashes and pops.
    fn skippable(&self) -> Skippable {
        Skippable::new()
    }
}

impl<M: Module> Layer for M {
    fn run(&self, input: Batch, _: &mut Skips) -> Result<Batch> {
        Ok(self.forward(&input.one()?)?.into())
    }
}

/// Layers in a row. The paths of their parameters begin with the layer's number.
#[derive(Default)]
pub struct Sequence {
    layers: Vec<Box<dyn Layer>>,
    /// The number of the first layer, for paths.
    first: usize,
}

impl Sequence {
    /// A sequence without layers: the identity.
    pub fn new() -> Sequence {
        Sequence::default()
    }

    /// With one more layer at the end.
    #[must_use]
    pub fn with(mut self, layer: impl Layer + 'static) -> Sequence {
        self.layers.push(Box::new(layer));
        self
    }

    /// The layers, in order.
    pub fn layers(&self) -> &[Box<dyn Layer>] {
        &self.layers
    }

    /// The same layers as a part of a longer sequence, in which the first of them has the number `first`. Paths and errors have
    /// these numbers.
    #[must_use]
    pub fn numbered_from(self, first: usize) -> Sequence {
        Sequence { first, ..self }
    }

    /// The skips that each layer stashes and pops.
    pub fn skippables(&self) -> Vec<Skippable> {
        self.layers.iter().map(|layer| layer.skippable()).collect()
    }

    /// The output of the plain model, whose layers are all on one device: no micro-batches, no copies.
    ///
    /// # Errors
    /// If skips do not match, or a layer refuses.
    pub fn run(&self, input: impl Into<Batch>) -> Result<Batch> {
        verify_skips(&self.skippables())?;
        self.run_layers(0..self.layers.len(), input.into(), &mut Skips::default())
    }

    /// The output of some of the layers. `skips` are those that earlier layers stashed.
    pub(crate) fn run_layers(&self, layers: Range<usize>, input: Batch, skips: &mut Skips) -> Result<Batch> {
        let layers = self.layers.iter().enumerate().take(layers.end).skip(layers.start);
        layers.into_iter().try_fold(input, |batch, (i, layer)| {
            skips.within(self.first + i, layer.skippable(), |skips| layer.run(batch, skips))
        })
    }
}

impl From<Vec<Box<dyn Layer>>> for Sequence {
    fn from(layers: Vec<Box<dyn Layer>>) -> Sequence {
        Sequence { layers, first: 0 }
    }
}

/// Layers keep the numbers that they have in paths, and lose their [hooks](Sequential::on_forward).
impl From<Sequential> for Sequence {
    fn from(modules: Sequential) -> Sequence {
        let first = modules.numbers().start;
        let layer = |module| Box::new(module) as Box<dyn Layer>;
        Sequence { layers: modules.into_modules().into_iter().map(layer).collect(), first }
    }
}

impl Parameters for Sequence {
    fn visit(&self, path: &str, visitor: &mut dyn FnMut(&str, Entry<'_>)) {
        let numbered = (self.first..).zip(&self.layers);
        numbered.for_each(|(i, layer)| layer.visit(&join_path(path, &i.to_string()), visitor));
    }

    fn visit_units(&self, visitor: &mut dyn FnMut(&dyn AnyUnit)) {
        self.layers.visit_units(visitor);
    }

    fn borrowed(&self) -> Vec<Parameter> {
        self.layers.borrowed()
    }
}
