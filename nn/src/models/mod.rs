//! Transformers: GPT and Llama, written once over [`crate::LayerFactory`]. A [`Stage`] is a range of blocks, with or without the embedding and
//! the head.

mod config;
mod decoder;
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
pub use decoder::{Block, Decoder, Stage, next_token_targets};
pub use generate::{Sampling, generate, generate_with};
pub use gpt::GptConfig;
pub use hugging_face::{
    check_size, load_configured, load_model, load_stage, load_weights, read_config, save_model, save_tensors,
};
pub use llama::LlamaConfig;
pub use recompute::RecomputeMode;
