//! Transformers: GPT, Llama and the families like it, and the encoder-decoder T5, written once over [`crate::LayerFactory`]. A [`DecoderStage`] (a [`T5Stage`]) says which
//! blocks a pipeline stage has, and whether it has the embedding and the head. So have the encoders [`Bert`] and [`Vit`], which like [`ResNet`], a
//! model of the crate's layers on one device, are read from folders by [`Pretrained`].

mod bert;
mod check;
mod config;
mod decoder;
mod encoder;
mod fields;
mod flops;
mod generate;
mod gpt;
mod hugging_face;
mod llama;
mod lora;
mod pretrained;
#[cfg(test)]
mod pretrained_tests;
mod recompute;
mod resnet;
mod router_bias;
mod router_losses;
mod save;
#[cfg(test)]
mod save_tests;
mod stored;
mod t5;
#[cfg(test)]
mod tests;
mod transformer;
mod vit;

pub use crate::modules::activation::Activation;
pub use crate::modules::attention::{Documents, KvCache, RowPart};
pub use bert::{Bert, BertConfig, BertInput, BertTask};
pub use config::ModelConfig;
pub use decoder::{Block, Decoder, DecoderStage, RowTokens, next_token_targets};
pub use encoder::{Encoder, EncoderConfig};
pub use flops::{FlopsPerToken, MegatronFlops};
pub use generate::{
    CausalModel, Generated, Generation, GenerationEnd, GenerationStep, LogitsProcessor, Sampling, TokenText,
    generate, generate_rows, generate_rows_by, generate_with,
};
pub use gpt::GptConfig;
pub use hugging_face::{
    FolderTensors, check_size, load_configured, load_model, load_stage, load_weights, read_config,
    save_model, save_tensors,
};
pub use llama::LlamaConfig;
pub use lora::{
    Adapted, AdaptedEmbedding, BaseWeights, BiasedHead, Lora, LoraConfig, Modules, TrainedBiases, adapters,
    load_adapter, merged, reset_magnitudes, save_adapter,
};
pub use pretrained::Pretrained;
pub use recompute::RecomputeMode;
pub use resnet::{ResNet, ResNetConfig, ResNetStage};
pub use router_bias::RouterBias;
pub use router_losses::RouterLosses;
pub use save::{
    SaveOptions, TensorSource, convert_folder, file_tensors, has_weights, keep_settings, save_config,
    save_from,
};
pub use t5::{T5, T5Config, T5Stage};
pub use transformer::{AttentionKind, Experts, Family, NormKind, NormPlaces, TransformerConfig};
pub use vit::{Vit, VitConfig};

/// The former name of [`DecoderStage`].
#[deprecated(since = "0.1.0", note = "renamed to `DecoderStage`")]
pub type Stage = DecoderStage;
