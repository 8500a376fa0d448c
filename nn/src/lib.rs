//! Parameters, modules, losses, optimizers, data, models.
//!
//! A [`Parameter`] is a handle on a trained tensor; a [`Module`] computes with some; [`Parameters`] visits them by
//! name. Modules are made in a [`Scope`], which gives every parameter its global name and its initial values. See
//! [`models`] for transformers built over [`Layers`].
#![forbid(unsafe_code)]

mod buffer;
mod captured;
mod clip;
mod data;
mod error;
mod init;
mod layers;
mod loss;
pub mod models;
mod module;
pub mod modules;
pub mod norm_tree;
mod optim;
mod parameter;
mod parameters;
mod scaler;
mod schedule;
mod scope;
mod unit;

pub use buffer::Buffer;
pub use captured::CapturedStep;
pub use clip::{Clip, Square, Squares, clip_grad_norm, clip_grad_norm_, grad_norm, grad_squares, norm_of};
pub use data::{Batch, Loader, Windows, cut};
pub use error::{Error, Mismatch, Result};
pub use init::Init;
pub use layers::{Head, Layers, Map, OneDevice, Table, TableHead, activation_window};
pub use loss::{BceWithLogitsLoss, CrossEntropyLoss, KlDivLoss, L1Loss, Loss, MseLoss, SmoothL1Loss};
pub use module::{Module, Sequential};
pub use modules::*;
pub use optim::{Adagrad, Adam, AdamW, At, Group, Lion, Optimizer, Rmsprop, Rule, Sgd};
pub use parameter::{Parameter, Shard};
#[doc(hidden)]
pub use parameters::join_path;
pub use parameters::{Entry, Parameters, load_state_dict, state_dict};
pub use phalanx_autograd as autograd;
pub use phalanx_autograd::NllLoss;
pub use phalanx_tensor as tensor;
pub use scaler::LossScaler;
pub use schedule::{OneCycle, Schedule};
pub use scope::Scope;
pub use unit::{AnyUnit, Unit, UnitHooks, UnitHooksHandle};
