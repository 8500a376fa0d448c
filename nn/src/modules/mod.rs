//! The layers, each with PyTorch's conventions, names and initial values, made from a configuration in a
//! [`crate::Scope`].

mod activation;
mod batch_norm;
mod conv;
mod conv3d;
mod dropout;
mod embedding;
mod embedding_bag;
mod group_norm;
mod grouped_query_attention;
mod gru;
mod instance_norm;
mod layer_norm;
mod layout;
mod linear;
mod lstm;
mod multihead_attention;
mod pool;
mod recurrent;
mod rms_norm;
mod transformer_encoder_layer;

pub use activation::{
    Celu, Elu, Flatten, Gelu, Glu, Hardsigmoid, Hardswish, Hardtanh, LeakyRelu, LogSigmoid, LogSoftmax, Mish,
    Prelu, PreluConfig, Relu, Relu6, Selu, Sigmoid, Silu, Softmax, Softplus, Softsign, Tanh, Tanhshrink,
};
pub use batch_norm::{BatchNorm, BatchNormConfig};
pub use conv::{Conv1d, Conv1dConfig, Conv2d, Conv2dConfig, ConvTranspose1d, ConvTranspose2d};
pub use conv3d::{Conv3d, Conv3dConfig, ConvTranspose3d};
pub use dropout::{Dropout, DropoutConfig};
pub use embedding::{Embedding, EmbeddingConfig};
pub use embedding_bag::{EmbeddingBag, EmbeddingBagConfig};
pub use group_norm::{GroupNorm, GroupNormConfig};
pub use grouped_query_attention::{GroupedQueryAttention, GroupedQueryAttentionConfig, RotaryEmbedding};
pub use gru::Gru;
pub use instance_norm::{InstanceNorm, InstanceNormConfig};
pub use layer_norm::{LayerNorm, LayerNormConfig};
pub use layout::{
    CircularPad, ConstantPad, Fold, LocalResponseNorm, PixelShuffle, PixelUnshuffle, ReflectionPad,
    ReplicationPad, Unfold, Upsample, ZeroPad,
};
pub use linear::{Linear, LinearConfig};
pub use lstm::{Lstm, LstmOutput};
pub use multihead_attention::{Hidden, MultiheadAttention, MultiheadAttentionConfig};
pub use pool::{
    AdaptiveAvgPool1d, AdaptiveAvgPool2d, AdaptiveMaxPool2d, AvgPool1d, AvgPool2d, AvgPool3d, MaxPool1d,
    MaxPool2d, MaxPool3d,
};
pub use recurrent::RecurrentConfig;
pub use rms_norm::{RmsNorm, RmsNormConfig};
pub use transformer_encoder_layer::{TransformerEncoderLayer, TransformerEncoderLayerConfig};

#[cfg(test)]
mod tests;
