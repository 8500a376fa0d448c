//! The graph: variables, nodes, the backward engine, hooks and recomputation.
#![forbid(unsafe_code)]

mod anomaly;
mod backward;
mod engine;
mod error;
mod grad_mode;
mod gradcheck;
mod hooks;
mod leaf;
mod node;
pub mod ops;
mod outputs;
mod record;
mod saved;
mod var;

pub use anomaly::{AnomalyGuard, detect_anomaly};
pub use backward::{Backward, Cx, Grads, grads1, grads2};
pub use engine::{Options, WeightWork, backward, backward_inputs, grad};
pub use error::{Error, Result};
pub use grad_mode::{enable_grad, is_grad_enabled, no_grad};
pub use gradcheck::{GradCheck, gradcheck, gradgradcheck};
pub use hooks::HookHandle;
pub use leaf::{Leaf, Slot};
pub use outputs::Outputs;
pub use phalanx_tensor as tensor;
pub use record::{Saver, is_recording, record, record_many, record_none};
pub use saved::{Saved, SavedHooks, SavedHooksGuard, saved_hooks};
pub use var::Var;
