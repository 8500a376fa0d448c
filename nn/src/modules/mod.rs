//! The layers, each with PyTorch's conventions, names and initial values, made from a configuration in a
//! [`crate::Scope`].

mod dropout;
mod embedding;
mod layer_norm;
mod linear;
mod rms_norm;

pub use dropout::Dropout;
pub use embedding::{Embedding, EmbeddingConfig};
pub use layer_norm::{LayerNorm, LayerNormConfig};
pub use linear::{Linear, LinearConfig};
pub use rms_norm::{RmsNorm, RmsNormConfig};
