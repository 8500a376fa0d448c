//! PipeDream's planner: which layers form a stage, and how many workers replicate it.
//!
//! Source: Narayanan et al., "PipeDream: generalized pipeline parallelism for DNN training" (SOSP 2019), section 3.1.

mod partition;
mod profile;

pub use partition::{Plan, Stage, plan};
pub use profile::{Layer, Level};
