//! The graph: variables, nodes, the backward engine, hooks and recomputation.
#![forbid(unsafe_code)]

mod anomaly;
mod backward;
mod checkpoint;
mod dependency;
mod engine;
mod error;
mod function;
mod grad_mode;
mod gradcheck;
mod hooks;
mod leaf;
mod node;
pub mod ops;
mod outputs;
mod phony;
mod record;
mod saved;
mod sequence;
mod var;

pub use anomaly::{AnomalyGuard, detect_anomaly};
pub use backward::{Backward, Cx, Grads, grads1, grads2};
pub use checkpoint::{Recompute, checkpoint, checkpoint_apart, is_checkpointing, is_recomputing};
pub use dependency::{fork, join};
pub use engine::{Options, WeightWork, backward, backward_inputs, grad};
pub use error::{Error, Result};
pub use function::Function;
pub use grad_mode::{enable_grad, is_grad_enabled, no_grad};
pub use gradcheck::{GradCheck, gradcheck, gradgradcheck};
pub use hooks::HookHandle;
pub use leaf::{Leaf, Slot};
pub use ops::*;
pub use outputs::Outputs;
pub use phalanx_tensor as tensor;
pub use phony::phony;
pub use record::{Saver, is_recording, record, record_many, record_none};
pub use saved::{Saved, SavedHooks, SavedHooksGuard, saved_hooks};
pub use var::Var;
