//! Transformers: GPT and Llama, written once over [`crate::LayerFactory`]. A [`DecoderStage`] says which blocks a pipeline stage has, and whether
//! it has the embedding and the head.

mod config;
mod decoder;
mod flops;
mod generate;
mod gpt;
mod hugging_face;
mod llama;
mod recompute;
#[cfg(test)]
mod tests;

pub use crate::modules::activation::Activation;
pub use crate::modules::attention::{Documents, KvCache};
pub use config::ModelConfig;
pub use decoder::{Block, Decoder, DecoderStage, next_token_targets};
pub use generate::{Sampling, generate, generate_with};
pub use flops::{FlopsPerToken, MegatronFlops};
pub use gpt::GptConfig;
pub use hugging_face::{
    check_size, load_configured, load_model, load_stage, load_weights, read_config, save_model, save_tensors,
};
pub use llama::LlamaConfig;
pub use recompute::RecomputeMode;

/// The former name of [`DecoderStage`].
#[deprecated(since = "0.1.0", note = "renamed to `DecoderStage`")]
pub type Stage = DecoderStage;
