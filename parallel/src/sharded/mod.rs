//! Data parallelism in which every rank keeps a shard of optimizer state, gradients and parameters: ZeRO, FSDP.
//!
//! ```text
//! FSDP unit: the parameters that are unsharded together, in one flat parameter for each dtype
//!
//! parameters        │ w: 6 elements │ b: 2 │ v: 4 elements   │
//! flat parameter    [w w w w w w b b v v v v]                          unshard: all-gather before the unit computes
//!                    └ rank 0 ┘└ rank 1 ┘└ rank 2 ┘                    reshard: each rank frees all but its shard
//! shards                        b'/w' "pieces": views with their       gradients: reduce-scatter, so each rank has the
//!                               parameters' names, for the optimizer              sums of its own shard
//!
//! zero (the wrapper) ──► core (state) ──► flat_parameter ──► cuts (which elements a rank owns; pure), config
//!   │  └─ wrap: makes it of a model          ▲                  ▲
//!   ├──► state_dict, local_state, norm    unshard ──► order   gradients: when values are gathered and freed, when gradients are sent
//!   │                                     refresh: how updated values come to ranks that keep all
//! ```
//!
//! | of a parameter's bytes  | every rank keeps                        | and sends a step, of the parameters' bytes |
//! |-------------------------|-----------------------------------------|--------------------------------------------|
//! | `ZeroStage::Optimizer`  | parameters, gradients, 1/N of the state | 2 (N-1)/N                                  |
//! | `ZeroStage::Gradients`  | parameters, 1/N of the rest             | 2 (N-1)/N                                  |
//! | `ZeroStage::Parameters` | 1/N                                     | 3 (N-1)/N, less units that are not resharded |
//!
//! Parameters outside all wrapped modules are a unit of their own, the root. It is unsharded before the first module's forward
//! pass, or when one of its parameters is first used, and resharded after the backward pass. So a model without wrapped modules
//! is sharded as well; then all its values are here from its forward pass to the end of its backward pass.
//!
//! A table that is tied to a head sends a gradient for each of its two sites.
//!
//! Sources: Rajbhandari et al., "ZeRO" (2020); Zhao et al., "PyTorch FSDP" (2023).

mod config;
mod core;
mod cuts;
mod flat_parameter;
mod gradients;
mod local_state;
mod norm;
mod offload;
mod order;
mod refresh;
mod state_dict;
mod unshard;
mod wrap;
mod zero;

pub use crate::data_parallel::Gathered;
pub use config::{BackwardPrefetch, FullStateDict, Prefetch, Reshard, ZeroConfig, ZeroStage};
pub use cuts::{Cuts, Ownership};
pub use zero::Zero;

/// The former name of [`ZeroStage`].
#[deprecated(since = "0.1.0", note = "renamed to `ZeroStage`")]
pub type Stage = ZeroStage;
