//! The layers, with PyTorch's conventions, names and initial values. A configuration makes each in a [`crate::Scope`].

pub(crate) mod activation;
pub(crate) mod attention;
mod batch_norm;
mod conv;
pub(crate) mod dropout;
mod embedding;
mod layout;
mod linear;
mod norm;
mod pool;
mod recurrent;
#[cfg(test)]
mod tests;
mod transformer_encoder;

pub use activation::{
    Celu, Elu, Flatten, Gelu, Glu, Hardsigmoid, Hardswish, Hardtanh, LeakyRelu, LogSigmoid, LogSoftmax, Mish,
    Prelu, PreluConfig, Relu, Relu6, Selu, Sigmoid, Silu, Softmax, Softplus, Softsign, Tanh, Tanhshrink,
};
pub use attention::{GroupedQueryAttention, GroupedQueryAttentionConfig, QueryKeyNorm, RopeScaling, Rotary};
pub use batch_norm::{BatchNorm, BatchNormConfig};
pub use conv::{
    Conv1d, Conv1dConfig, Conv2d, Conv2dConfig, Conv3d, Conv3dConfig, ConvTranspose1d, ConvTranspose2d,
    ConvTranspose3d,
};
pub use dropout::{Dropout, DropoutConfig};
pub use embedding::{Embedding, EmbeddingBag, EmbeddingBagConfig, EmbeddingConfig, RotaryEmbedding};
pub use layout::{
    CircularPad, ConstantPad, Fold, LocalResponseNorm, PixelShuffle, PixelUnshuffle, ReflectionPad,
    ReplicationPad, Unfold, Upsample, ZeroPad,
};
pub use linear::{Linear, LinearConfig};
pub use norm::{
    GroupNorm, GroupNormConfig, InstanceNorm, InstanceNormConfig, LayerNorm, LayerNormConfig, PreNorm,
    RmsNorm, RmsNormConfig,
};
pub use pool::{
    AdaptiveAvgPool1d, AdaptiveAvgPool2d, AdaptiveMaxPool2d, AvgPool1d, AvgPool2d, AvgPool3d, MaxPool1d,
    MaxPool2d, MaxPool3d,
};
pub use recurrent::{Gru, Lstm, LstmOutput, RecurrentConfig};
pub use transformer_encoder::{
    AttentionMasks, MultiheadAttention, MultiheadAttentionConfig, TransformerEncoderLayer,
    TransformerEncoderLayerConfig,
};
