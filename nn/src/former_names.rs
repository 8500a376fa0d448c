//! Names before 0.2.

/// The former name of [`ParameterOwner`](crate::ParameterOwner).
pub use crate::ParameterOwner as Holder;

/// The former name of [`LayerFactory`](crate::LayerFactory).
pub use crate::LayerFactory as Layers;

/// The former name of [`LinearSpec`](crate::LinearSpec).
#[deprecated(since = "0.1.0", note = "renamed to `LinearSpec`")]
pub type Map<'a> = crate::LinearSpec<'a>;

/// The former name of [`EmbeddingSpec`](crate::EmbeddingSpec).
#[deprecated(since = "0.1.0", note = "renamed to `EmbeddingSpec`")]
pub type Table = crate::EmbeddingSpec;

/// The former name of [`LinearHead`](crate::LinearHead).
#[deprecated(since = "0.1.0", note = "renamed to `LinearHead`")]
pub type TableHead = crate::LinearHead;

/// The former name of [`WrappedUnit`](crate::WrappedUnit).
#[deprecated(since = "0.1.0", note = "renamed to `WrappedUnit`")]
pub type Unit<M> = crate::WrappedUnit<M>;

/// The former name of [`WrapPolicy`](crate::WrapPolicy).
#[deprecated(since = "0.1.0", note = "renamed to `WrapPolicy`")]
pub type UnitPolicy = crate::WrapPolicy;

/// The former name of [`StepHyperparameters`](crate::StepHyperparameters).
#[deprecated(since = "0.1.0", note = "renamed to `StepHyperparameters`")]
pub type At = crate::StepHyperparameters;

/// The former name of [`AttentionMasks`](crate::AttentionMasks).
#[deprecated(since = "0.1.0", note = "renamed to `AttentionMasks`")]
pub type Hidden<'a> = crate::AttentionMasks<'a>;
