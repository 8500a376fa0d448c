//! One process that drives several devices: pipeline parallelism over micro-batches (torchgpipe, arXiv:2004.09910; GPipe,
//! arXiv:1811.06965).
//!
//! ```text
//! m = 4 micro-batches over n = 2 stages
//!            forward: clock cycles            backward: their mirror
//! stage 0    F0  F1  F2  F3                       B3  B2  B1  B0
//! stage 1        F0  F1  F2  F3              B3  B2  B1  B0
//! ```
//! - A model is a [`Sequence`] of [`Layer`]s; a [`Partition`] says which of them each device has.
//! - A batch is cut into micro-batches ([`scatter`]). [`clock_cycles`] is the order of their cells; each device has a worker
//!   that computes its cells in that order, as soon as their inputs are there, never far ahead of the next stage.
//! - Cells stand between fences (`fence.rs`), so that backward runs the mirror: the gradient of a parameter is the sum over the
//!   micro-batches, the last one first, bit for bit that of the plain model over the same micro-batches.
//! - Copies run on lanes of their own (`copy.rs`); only the cell that needs a value waits for it.
//! - [`Checkpoint`] says which micro-batches are recomputed: their stages keep what enters them and nothing else.
//! - [`Skips`] pass over stages without going through them.
//! - Whatever fails first ends the pass; no worker is left behind.
//!
//! ```
//! use phalanx_nn::{LinearConfig, Module, Parameters, Relu, Scope};
//! use phalanx_nn::autograd::Var;
//! use phalanx_parallel::pipeline::gpipe::{GPipe, GPipeConfig, Partition, Sequence};
//! use phalanx_tensor::{DType, Device, Tensor};
//!
//! let partition = Partition::new(&[2, 1], &[Device::Cpu(0), Device::Cpu(1)])?;
//! let [first, last] = [0, 1].map(|i| Scope::new(1, DType::F32, Device::Cpu(i)));
//! let model = Sequence::new()
//!     .with(LinearConfig::new(3, 8).init(&first.child(0))?)
//!     .with(Relu {})
//!     .with(LinearConfig::new(8, 2).init(&last.child(2))?);
//! let model = GPipe::new(model, partition, GPipeConfig::new(4))?;
//! let x = Var::new(Tensor::zeros(&[9, 3], DType::F32, Device::Cpu(0))?);
//! model.forward(&x)?.sum_all()?.backward()?;
//! assert!(model.parameters().iter().all(|p| p.grad().is_ok_and(|grad| grad.is_some())));
//! # Ok::<(), phalanx_parallel::Error>(())
//! ```

mod batch;
mod board;
mod clock;
mod config;
mod copy;
mod fence;
mod layer;
mod partition;
mod pipe;
mod skip;
mod stage;
mod timeline;
mod worker;

pub use batch::{Batch, MicroBatchRows, gather, scatter};
pub use clock::{Cell, clock_cycles, device_orders};
pub use config::{Checkpoint, GPipeConfig};
pub use layer::{Layer, Sequence};
pub use partition::{Partition, StageLayers};
pub use pipe::GPipe;
pub use skip::{Namespace, Route, Skip, Skippable, Skips, routes, verify_skips};
pub use timeline::{Observer, Phase, Span, Timeline, bubble};
