//! Lookup tables whose rows are added up.

use phalanx_autograd::{BagMode, EmbeddingBagOptions, Var};

use crate::{EmbeddingConfig, Init, Module, Parameter, Result, Scope, parameters};

/// Of a table `[count, width]` the rows that each bag names, reduced to one: `[bags, length]` i64 to `[bags, width]`.
pub struct EmbeddingBag {
    /// `[count, width]`
    pub weight: Parameter,
    mode: BagMode,
    padding: Option<isize>,
}

parameters!(EmbeddingBag { weight });

/// How an [`EmbeddingBag`] is made.
#[derive(Clone, Copy, Debug)]
pub struct EmbeddingBagConfig {
    table: EmbeddingConfig,
    mode: BagMode,
    padding: Option<isize>,
}

impl EmbeddingBagConfig {
    /// `count` rows of `width`, normal with variance 1, of which bags get the mean.
    pub fn new(count: usize, width: usize) -> EmbeddingBagConfig {
        EmbeddingBagConfig { table: EmbeddingConfig::new(count, width), mode: BagMode::Mean, padding: None }
    }

    /// With these initial values.
    #[must_use]
    pub fn with_init(self, init: Init) -> EmbeddingBagConfig {
        EmbeddingBagConfig { table: self.table.with_init(init), ..self }
    }

    /// What becomes of a bag's rows.
    #[must_use]
    pub fn with_mode(self, mode: BagMode) -> EmbeddingBagConfig {
        EmbeddingBagConfig { mode, ..self }
    }

    /// With a row that does not count, gets no gradient and begins as 0.
    #[must_use]
    pub fn with_padding(self, row: isize) -> EmbeddingBagConfig {
        EmbeddingBagConfig { table: self.table.with_padding(row), padding: Some(row), ..self }
    }

    /// The layer.
    ///
    /// # Errors
    /// If it cannot be allocated, or the padding row does not exist.
    pub fn init(self, scope: &Scope) -> Result<EmbeddingBag> {
        let weight = self.table.init(scope)?.weight;
        Ok(EmbeddingBag { weight, mode: self.mode, padding: self.padding })
    }
}

impl EmbeddingBag {
    /// The bags of the flat indices `[count]` that begin at `offsets` `[bags]`: `[bags, width]`.
    ///
    /// # Errors
    /// As [`Var::embedding_bag`].
    pub fn forward_from(&self, indices: &Var, offsets: &Var) -> Result<Var> {
        let options = EmbeddingBagOptions { offsets: Some(offsets.clone()), ..self.options() };
        Ok(self.weight.var().embedding_bag(indices, &options)?)
    }

    fn options(&self) -> EmbeddingBagOptions {
        EmbeddingBagOptions { mode: self.mode, padding: self.padding, ..EmbeddingBagOptions::default() }
    }
}

impl Module for EmbeddingBag {
    fn forward(&self, indices: &Var) -> Result<Var> {
        Ok(self.weight.var().embedding_bag(indices, &self.options())?)
    }
}
