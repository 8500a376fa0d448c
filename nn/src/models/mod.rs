//! Transformers: GPT and Llama, written once over [`crate::Layers`], for a range of layers with or without ends.

pub(crate) mod attend;
mod cache;
mod config;
mod decoder;
mod documents;
mod flops;
mod generate;
mod gpt;
mod hugging_face;
mod llama;
mod recompute;
mod stage;
mod targets;
#[cfg(test)]
mod tests;

pub use cache::KvCache;
pub use config::ModelConfig;
pub use decoder::{Block, Decoder};
pub use documents::Documents;
pub use generate::{Sampling, generate, generate_with};
pub use gpt::{Activation, GptConfig};
pub use hugging_face::{
    check_size, load_configured, load_model, load_stage, load_weights, read_config, save_model, save_tensors,
};
pub use llama::LlamaConfig;
pub use recompute::RecomputeMode;
pub use stage::Stage;
pub use targets::next_token_targets;
