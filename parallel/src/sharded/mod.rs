//! Data parallelism in which every rank keeps a share of optimizer state, gradients and parameters: ZeRO, FSDP.
//!
//! ```text
//! config    what is spread, and how        cuts   which elements each rank owns
//! grouping  what is gathered together      flat   the buffers
//! zero      the wrapper around a model     build  how it takes one in hand
//! core      when values are gathered and freed, when gradients are sent
//! hooks     around a unit's passes         norm   the gradients' norm
//! hands     what others may do with what is spread
//! whole     the model's state dict         optimizer_state  the optimizer's    gathered  all values for a while
//! sharded_state   the state dict in parts
//! ```
//!
//! | of a parameter's bytes | every rank keeps                        | and sends a step, of the parameters' bytes |
//! |------------------------|-----------------------------------------|--------------------------------------------|
//! | `Stage::Optimizer`     | parameters, gradients, 1/N of the state | 2 (N-1)/N                                  |
//! | `Stage::Gradients`     | parameters, 1/N of the rest             | 2 (N-1)/N                                  |
//! | `Stage::Parameters`    | 1/N                                     | 3 (N-1)/N, less units that are not resharded |
//!
//! What lies outside all units is a unit of its own, the root: its values are gathered before the first unit's forward pass, or
//! when one is first used, and freed after the backward pass. So a model without units is spread as well; then all of its values
//! are here from its forward pass to the end of its backward pass.
//!
//! A table that is tied to a head sends a gradient for each of its two sites.
//!
//! Sources: Rajbhandari et al., "ZeRO" (2020); Zhao et al., "PyTorch FSDP" (2023).

mod config;
mod core;
mod cuts;
mod flat_parameter;
mod gradients;
mod norm;
mod state_dict;
mod unshard;
mod wrap;
mod zero;

pub use crate::data_parallel::Gathered;
pub use config::{Reshard, Stage, ZeroConfig};
pub use cuts::{Cuts, Ownership};
pub use zero::Zero;
