//! What a model costs, and how it is divided into pipeline stages.
//!
//! ```text
//!                            balance_by_time, balance_by_size ──> block_partition ──> gpipe::Partition (one device a stage)
//! Sequence ──> profile ─────┤
//!                            profile() ──> plan: PipeDream's dynamic program ──> StagePlan ──> stages of ranks, with replicas
//!
//! Transformer                parameters, FLOPs and activation memory by formula, before there is a model
//! ```
//! A profile is measured: each layer runs alone on its device. [`balance_by_time`] and [`balance_by_size`] divide the layers
//! among as many stages as there are devices; [`plan`] chooses the number of stages and their replicas from the machine's
//! bandwidths. [`Transformer`]'s formulas are those of papers, and need no model.
//!
//! ```
//! # use std::time::Duration;
//! # use phalanx_nn::{LinearConfig, Scope, Tanh, autograd::Var};
//! # use phalanx_parallel::pipeline::gpipe::Sequence;
//! # use phalanx_tensor::{DType, Device};
//! use phalanx_parallel::planning::{Level, plan, profile};
//!
//! let scope = Scope::new(7, DType::F32, Device::CPU);
//! let linear = |name: &str| LinearConfig::new(32, 32).init(&scope.child(name));
//! let model = Sequence::new().with(linear("a")?).with(Tanh {}).with(linear("b")?).with(Tanh {});
//! let micro_batch = Var::from_slice(&[0.5f32; 64 * 32], &[64, 32], Device::CPU)?;
//!
//! let layers = profile(&model, &micro_batch, Duration::from_millis(10))?;
//! let four_workers = Level { width: 4, bandwidth: 10e9 };
//! let plan = plan(&layers, &[four_workers])?;
//! assert_eq!(plan.stages.last().map(|stage| stage.layers.end), Some(4));
//! assert!(plan.stages.iter().map(|stage| stage.replicas).sum::<usize>() <= 4);
//! # Ok::<(), phalanx_parallel::Error>(())
//! ```

mod balance;
mod partition;
mod profile;
mod stage_plan;
#[cfg(test)]
mod tests;
mod transformer;

pub use balance::{balance_by_size, balance_by_time, block_partition};
pub use partition::{Level, Plan, PlannedStage, plan};
pub use profile::{LayerProfile, SizeConfig, profile};
pub use stage_plan::{StagePlan, StageReplicas, decoder_layers};
pub use transformer::{Degrees, RecomputeGranularity, Transformer};
