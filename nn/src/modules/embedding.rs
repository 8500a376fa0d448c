//! [`Embedding`]: a lookup table; [`EmbeddingBag`]: a lookup table whose rows are added up; [`RotaryEmbedding`]: positions as
//! rotations.

use phalanx_autograd::{BagMode, EmbeddingBagOptions, Rope, Var};

use crate::error::label;
use crate::{Entry, Error, Init, Module, Parameter, Parameters, Result, Scope, parameters};

/// Row `i` of a table `[count, width]` for every index: `[..]` i64 to `[.., width]`.
pub struct Embedding {
    /// `[count, width]`
    pub weight: Parameter,
    /// The site at which the table is used: 1 if a tied head uses it at site 0.
    site: usize,
    padding: Option<isize>,
}

parameters!(Embedding { weight });

/// How an [`Embedding`] is made.
#[derive(Clone, Copy, Debug)]
pub struct EmbeddingConfig {
    count: usize,
    width: usize,
    init: Init,
    padding: Option<isize>,
    tied: bool,
}

impl EmbeddingConfig {
    /// `count` rows of `width`, normal with variance 1.
    pub fn new(count: usize, width: usize) -> EmbeddingConfig {
        let init = Init::Normal { mean: 0.0, std: 1.0 };
        EmbeddingConfig { count, width, init, padding: None, tied: false }
    }

    /// With these initial values.
    #[must_use]
    pub fn with_init(self, init: Init) -> EmbeddingConfig {
        EmbeddingConfig { init, ..self }
    }

    /// With a row that gets no gradient and begins as 0.
    #[must_use]
    pub fn with_padding(self, row: isize) -> EmbeddingConfig {
        EmbeddingConfig { padding: Some(row), ..self }
    }

    /// With a second site, for a head that shares the table.
    #[must_use]
    pub fn with_tied_head(self, tied: bool) -> EmbeddingConfig {
        EmbeddingConfig { tied, ..self }
    }

    /// The layer.
    ///
    /// # Errors
    /// If it cannot be allocated, or the padding row does not exist.
    pub fn init(self, scope: &Scope) -> Result<Embedding> {
        let EmbeddingConfig { count, width, init, padding, tied } = self;
        let index_of = |row: isize| {
            if row < 0 { count.checked_sub(row.unsigned_abs()) } else { Some(row.unsigned_abs()) }
        };
        if let Some(row) = padding
            && index_of(row).is_none_or(|index| index >= count)
        {
            let why = format!("got the padding row {row}, wanted one of the {count} rows");
            return Err(Error::invalid(label("Embedding", scope.path()), why));
        }
        let mut weight = scope.parameter("weight", &[count, width], init)?;
        if let Some(index) = padding.and_then(index_of) {
            weight = weight.with_zero_row(index)?;
        }
        let weight = weight.with_sites(1 + usize::from(tied))?;
        Ok(Embedding { weight, site: usize::from(tied), padding })
    }
}

impl Module for Embedding {
    fn forward(&self, indices: &Var) -> Result<Var> {
        Ok(self.weight.site(self.site).embedding(indices, self.padding)?)
    }
}

/// Reduces the rows of a table `[count, width]` that each bag names to one row: `[bags, length]` i64 to `[bags, width]`.
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

    /// How a bag's rows are reduced.
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
    /// The bags that begin at `offsets` `[bags]` in the flat indices `[count]`: `[bags, width]`.
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

/// Rotates the halves of each row of `[.., T, D]` by its position.
/// Source: Su et al.: RoFormer (2021).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RotaryEmbedding {
    /// The ratio of the slowest to the fastest wavelength, about.
    pub base: f64,
    /// The first position.
    pub offset: i64,
}

impl Default for RotaryEmbedding {
    fn default() -> RotaryEmbedding {
        RotaryEmbedding { base: 10000.0, offset: 0 }
    }
}

impl Parameters for RotaryEmbedding {
    fn visit(&self, _: &str, _: &mut dyn FnMut(&str, Entry<'_>)) {}
}

impl Module for RotaryEmbedding {
    fn forward(&self, x: &Var) -> Result<Var> {
        Ok(x.rope(None, &Rope { base: self.base, offset: self.offset })?)
    }
}
