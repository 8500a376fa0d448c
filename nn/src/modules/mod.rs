//! The layers, each with PyTorch's conventions, names and initial values, made from a configuration in a
//! [`crate::Scope`].

mod activation;
mod batch_norm;
mod conv;
mod dropout;
mod embedding;
mod group_norm;
mod grouped_query_attention;
mod gru;
mod layer_norm;
mod linear;
mod lstm;
mod multihead_attention;
mod pool;
mod recurrent;
mod rms_norm;
mod transformer_encoder_layer;

pub use activation::{
    Elu, Flatten, Gelu, LeakyRelu, LogSoftmax, Relu, Sigmoid, Silu, Softmax, Softplus, Tanh,
};
pub use batch_norm::{BatchNorm, BatchNormConfig};
pub use conv::{Conv1d, Conv1dConfig, Conv2d, Conv2dConfig, ConvTranspose2d};
pub use dropout::Dropout;
pub use embedding::{Embedding, EmbeddingConfig};
pub use group_norm::{GroupNorm, GroupNormConfig};
pub use grouped_query_attention::{GroupedQueryAttention, GroupedQueryAttentionConfig, RotaryEmbedding};
pub use gru::Gru;
pub use layer_norm::{LayerNorm, LayerNormConfig};
pub use linear::{Linear, LinearConfig};
pub use lstm::{Lstm, LstmOutput};
pub use multihead_attention::{Hidden, MultiheadAttention, MultiheadAttentionConfig};
pub use pool::{AdaptiveAvgPool2d, AvgPool2d, MaxPool2d};
pub use recurrent::RecurrentConfig;
pub use rms_norm::{RmsNorm, RmsNormConfig};
pub use transformer_encoder_layer::{TransformerEncoderLayer, TransformerEncoderLayerConfig};

#[cfg(test)]
mod tests;
