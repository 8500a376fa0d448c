//! [`Build`]: what becomes a layer once it has a place.

use crate::{
    BatchNorm, BatchNormConfig, Conv1d, Conv1dConfig, Conv2d, Conv2dConfig, Dropout, DropoutConfig,
    Embedding, EmbeddingConfig, GroupNorm, GroupNormConfig, GroupedQueryAttention,
    GroupedQueryAttentionConfig, LayerNorm, LayerNormConfig, Linear, LinearConfig, Module, Result, RmsNorm,
    RmsNormConfig, Scope, Sequential, SequentialConfig, TransformerEncoderLayer,
    TransformerEncoderLayerConfig,
};

/// A layer's configuration, or a layer that is ready: what [`SequentialConfig::with`] takes. Implement it for
/// configurations of your own modules.
pub trait Build {
    /// The layer.
    type Module: Module;

    /// The layer at that place of the model, whose path names its parameters. A layer that is ready stays as it is.
    ///
    /// # Errors
    /// If the settings make no sense, or it cannot be allocated.
    fn build(self, scope: &Scope) -> Result<Self::Module>;
}

/// Activations, pools and others that need no place, and whatever was made before.
impl<M: Module> Build for M {
    type Module = M;

    fn build(self, _: &Scope) -> Result<M> {
        Ok(self)
    }
}

macro_rules! configs {
    ($($config:ty => $module:ty),* $(,)?) => {$(
        impl Build for $config {
            type Module = $module;

            fn build(self, scope: &Scope) -> Result<$module> {
                self.init(scope)
            }
        }
    )*};
}

configs! {
    BatchNormConfig => BatchNorm,
    Conv1dConfig => Conv1d,
    Conv2dConfig => Conv2d,
    DropoutConfig => Dropout,
    EmbeddingConfig => Embedding,
    GroupNormConfig => GroupNorm,
    GroupedQueryAttentionConfig => GroupedQueryAttention,
    LayerNormConfig => LayerNorm,
    LinearConfig => Linear,
    RmsNormConfig => RmsNorm,
    SequentialConfig => Sequential,
    TransformerEncoderLayerConfig => TransformerEncoderLayer,
}
