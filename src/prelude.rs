//! What a training program needs, in one line: `use phalanx::prelude::*`.
//!
//! ```
//! use phalanx::prelude::*;
//!
//! fn main() -> Result<()> {
//!     let scope = Scope::new(1, DType::F32, Device::CPU);
//!     let model = SequentialConfig::new()
//!         .with(LinearConfig::new(1, 16))
//!         .with(Tanh)
//!         .with(LinearConfig::new(16, 1))
//!         .init(&scope)?;
//!     let mut optimizer = AdamW::default().init(vec![Group::new(model.parameters(), 1e-2)])?;
//!     let x = Var::from_slice(&[-1f32, 0.0, 1.0], &[3, 1], Device::CPU)?;
//!     for _ in 0..10 {
//!         optimizer.zero_grad()?;
//!         let loss = MseLoss::default().forward(&model.forward(&x)?, &x.sin()?)?;
//!         loss.backward()?;
//!         optimizer.step()?;
//!     }
//!     Ok(())
//! }
//! ```
//!
//! It has all traits whose methods are called on models, losses and optimizers. Its `Result` is [`phalanx::nn::Result`](crate::nn::Result),
//! into which `?` takes the errors of tensors and of autograd; with two arguments it is the standard library's, and an import of your own
//! (`use anyhow::Result`) goes before it. Models by name are in [`phalanx::nn::models`](crate::nn::models), ranks in
//! [`phalanx::parallel`](crate::parallel).

// Values and their gradients.
pub use phalanx_autograd::{
    Generator, Options as BackwardOptions, Var, backward, checkpoint, enable_grad, eval, grad, inference,
    is_grad_enabled, manual_seed, no_grad,
};
pub use phalanx_tensor::{Context, DType, Device, Scalar, Tensor, bf16, f16};

// How models are written.
pub use phalanx_nn::{
    Buffer, Build, Entry, Error, Init, Module, Parameter, Parameters, Result, Scope, Sequential,
    SequentialConfig, WrapPolicy, WrappedUnit, Wrapping, load_state_dict, parameters, state_dict, wrap_by,
    wrap_by_size,
};

// Their former names.
#[doc(hidden)]
#[allow(deprecated)]
pub use phalanx_nn::{Hidden, Unit, UnitPolicy};

// Layers, and how they are made.
pub use phalanx_nn::{
    AdaptiveAvgPool2d, AttentionMasks, AvgPool2d, BatchNorm, BatchNormConfig, Conv1d, Conv1dConfig,
    Conv1dOptions, Conv2d, Conv2dConfig, ConvOptions, ConvTranspose2d, Dropout, DropoutConfig, Elu,
    Embedding, EmbeddingConfig, Flatten, Gelu, GeluKind, GroupNorm, GroupNormConfig, GroupedQueryAttention,
    GroupedQueryAttentionConfig, Gru, Hooked, LayerNorm, LayerNormConfig, LeakyRelu, Linear, LinearConfig,
    LogSoftmax, Lstm, LstmOutput, MaxPool2d, MultiheadAttention, MultiheadAttentionConfig, PoolOptions,
    RecurrentConfig, Relu, RmsNorm, RmsNormConfig, Sigmoid, Silu, Softmax, Softplus, Tanh,
    TransformerEncoderLayer, TransformerEncoderLayerConfig,
};

// Training: losses, optimizers, rates, clipping.
pub use phalanx_nn::{
    Adadelta, Adafactor, Adagrad, Adam, AdamW, Adamax, BceWithLogitsLoss, ClassesLast, CrossEntropyLoss,
    Group, KlDivLoss, KlReduction, KlTarget, L1Loss, Lamb, Lion, Loss, LossScaler, MseLoss, Muon, NllLoss,
    Optimizer, Reduction, Rmsprop, Rule, Schedule, Sgd, SmoothL1Loss, clip_grad_norm, clip_grad_norm_,
    grad_norm,
};

// Files and draws.
pub use phalanx_nn::{LoadOptions, SampleOptions, load, load_with, sample, save};
