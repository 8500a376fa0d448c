//! Data parallelism in which every rank keeps a share of optimizer state, gradients and parameters: ZeRO, FSDP.
//!
//! ```text
//! config    what is spread, and how        cuts   which elements each rank owns
//! grouping  what is gathered together      flat   the buffers
//! zero      the wrapper around a model     build  how it takes one in hand
//! core      when values are gathered and freed, when gradients are sent
//! hooks     around a unit's passes         norm   the gradients' norm
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
//! A table that is tied to a head sends a gradient for each of its two sites.
//!
//! Sources: Rajbhandari et al., "ZeRO" (2020); Zhao et al., "PyTorch FSDP" (2023).

mod build;
mod config;
mod core;
mod cuts;
mod data_parallel;
mod flat;
mod gathered;
mod grouping;
mod hooks;
mod norm;
mod optimizer_state;
mod sharded_state;
mod whole;
mod zero;

pub use config::{Reshard, Stage, ZeroConfig};
pub use cuts::{Cuts, Ownership};
pub use gathered::Gathered;
pub use zero::Zero;
