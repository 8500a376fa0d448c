//! Parameters, modules, losses, optimizers, data, models.
//!
//! A [`Parameter`] is a handle on a trained tensor. A [`Module`] computes with parameters, and [`Parameters`] visits them by
//! name. A module is made in a [`Scope`], which gives each parameter its global name and its initial values.
//!
//! ```text
//! files (state dicts, safetensors)     optim (rules, Optimizer, CapturedStep)     models (GPT, Llama over LayerFactory)
//!                   \                      |                                     /
//!                module (Module, Parameters, Buffer)     modules (layers)     layer_factory (LayerFactory)
//!                                          |
//!                     parameter (Parameter, Shard, ParameterOwner)     scope (Scope, Init)
//! ```
//!
//! | for | items |
//! |---|---|
//! | models | [`Module`], [`Parameters`], [`Parameter`], [`Buffer`], [`parameters!`], [`Scope`], [`Init`], [`Mode`] |
//! | layers | [`modules`] lists them: [`Linear`], [`Conv2d`], [`Lstm`], [`MultiheadAttention`], [`LayerNorm`], [`Dropout`], ..; [`SequentialConfig`] puts them in a row |
//! | losses | [`Loss`], [`CrossEntropyLoss`], [`MseLoss`], [`BceWithLogitsLoss`], [`KlDivLoss`], .. |
//! | optimizers | [`Optimizer`] over [`Group`]s with a [`Rule`]: [`Sgd`], [`Adam`], [`AdamW`], [`Adamax`], [`Lion`], [`Muon`], [`Lamb`], [`Adafactor`], [`Adagrad`], [`Adadelta`], [`Rmsprop`]; [`Ema`] averages weights |
//! | rates, clipping, scaling | [`Schedule`], [`clip_grad_norm`], [`LossScaler`] |
//! | evaluation | [`inference`], [`eval`], [`no_grad`], [`pack_weights`] |
//! | files | [`save`], [`load`], [`load_with`], [`state_dict`], [`load_state_dict`] |
//! | transformers | [`models::GptConfig`], [`models::LlamaConfig`], [`models::TransformerConfig`], [`models::load_model`], [`models::generate`], [`sample()`] |
//! | steps as CUDA graphs | [`CapturedStep`] |
//! | for wrappers of parallel training | [`LayerFactory`], [`WrappedUnit`], [`WrapPolicy`], [`Shard`], [`ParameterOwner`] |
#![forbid(unsafe_code)]

mod clip;
mod data;
mod error;
mod files;
mod former_names;
mod forward_hooks;
mod layer_factory;
mod loss;
mod mode;
pub mod models;
mod module;
pub mod modules;
pub mod norm_tree;
mod optim;
mod parameter;
mod sample;
mod scaler;
mod schedule;
mod scope;
mod sequential;
mod unit;
mod wrap_policy;

pub use clip::{
    Clip, Square, Squares, UpdateGuard, clip_grad_norm, clip_grad_norm_, grad_norm, grad_squares, norm_of,
};
#[doc(hidden)]
pub use data::Permutation;
pub use data::{Batch, Loader, Windows, cut};
pub use error::{Error, Mismatch, Result};
pub use files::{LoadOptions, load, load_state_dict, load_state_dict_with, load_with, save, state_dict};
#[allow(deprecated)]
pub use former_names::{At, Hidden, Holder, Layers, Map, Table, TableHead, Unit, UnitPolicy};
pub use forward_hooks::{ForwardHookHandle, Hooked};
pub use layer_factory::{
    EmbeddingSpec, ExpertExchange, FileNames, Head, HeadsNormSpec, LayerFactory, LinearHead, LinearMap,
    LinearSpec, OneDevice, activation_window,
};
pub use loss::{
    BceLoss, BceWithLogitsLoss, ClassesLast, CosineEmbeddingLoss, CrossEntropyLoss, GaussianNllLoss,
    HingeEmbeddingLoss, HuberLoss, KlDivLoss, L1Loss, Loss, MarginRankingLoss, MseLoss, PoissonNllLoss,
    SmoothL1Loss, TripletMarginLoss,
};
pub use mode::Mode;
pub use module::{Buffer, Entry, Module, Parameters, join_path};
pub use modules::*;
pub use optim::{
    Adadelta, Adafactor, Adagrad, Adam, AdamW, Adamax, CapturedStep, EMA, Ema, Group, Lamb, Lion, Muon,
    MuonScale, Optimizer, Peers, Rmsprop, Rule, Sgd, StepHyperparameters, WholeExchange, WholeRule,
    WholeStep, is_whole_state, update_whole,
};
#[doc(hidden)]
pub use optim::{is_one_of_ranks, note_ranks};
pub use parameter::{Parameter, ParameterOwner, Shard, Usage, pack_weights};
pub use phalanx_autograd::{
    Conv1dOptions, ConvOptions, Gelu as GeluKind, KlReduction, KlTarget, NllLoss, PoolOptions, Reduction,
    enable_grad, eval, inference, kernels, manual_seed, no_grad,
};
pub use sample::{SampleOptions, sample};
pub use scaler::LossScaler;
pub use schedule::{OneCycle, Schedule};
#[doc(hidden)]
pub use scope::fnv1a;
pub use scope::{Init, Scope};
pub use sequential::{Build, Sequential, SequentialConfig};
pub use unit::{AnyUnit, UnitHooks, UnitHooksHandle, WrappedUnit};
pub use wrap_policy::{WrapPolicy, Wrapping, wrap_by, wrap_by_size};
pub use {phalanx_autograd as autograd, phalanx_tensor as tensor};

/// The README's example, compiled and run.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
