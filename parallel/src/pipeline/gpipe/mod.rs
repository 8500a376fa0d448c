//! Pipeline parallelism in one process that drives several devices, over micro-batches (torchgpipe, arXiv:2004.09910; GPipe,
//! arXiv:1811.06965).
//!
//! ```text
//! m = 4 micro-batches over n = 3 stages, F(i, j) being the cell of micro-batch i at stage j
//!
//! clock cycle    0       1       2       3       4       5
//! stage 0     F(0,0)  F(1,0)  F(2,0)  F(3,0)                       backward is the mirror image:
//! stage 1             F(0,1)  F(1,1)  F(2,1)  F(3,1)               B(3,2) first, B(0,0) last
//! stage 2                     F(0,2)  F(1,2)  F(2,2)  F(3,2)
//!
//! stage 0   enter ─ cell (0,0) ─ leave ── enter ─ cell (1,0) ─ leave ──
//!                                   │ copy                        │ copy
//! stage 1                           └───> enter ─ cell (0,1) ─ leave ──
//! ```
//! - A model is a [`Sequence`] of [`Layer`]s; a [`Partition`] says which of them each device has.
//! - [`scatter`] splits a batch into micro-batches. [`clock_cycles`] is the order of their cells. Each device has a worker
//!   (`worker.rs`), which computes the device's cells in that order, each as soon as its inputs have arrived, and never far
//!   ahead of the next stage.
//! - A cell is recorded between two autograd nodes, `enter` and `leave` (`dependency.rs`; torchgpipe's fork and
//!   join), so that backward runs the mirror image. The gradient of a parameter is the sum over the micro-batches,
//!   the last one first, bit for bit that of the plain model over the same micro-batches.
//! - Copies run on copy streams of their own at both ends (`copy.rs`); only the cell that needs a value waits for it.
//! - [`RecomputeMode`](phalanx_nn::models::RecomputeMode) says which micro-batches are recomputed: of these a stage keeps its
//!   inputs and nothing else.
//! - [`Skips`] go from stage to stage past those between.
//! - The first error ends the pass, after all workers have ended.
//!
//! ```text
//! pipe ──> worker ──> dependency ──> copy ──> observe <─> clock   pipe, worker: GPipe and its threads
//!   └──────> layer ──> skip ──> partition                         dependency, copy: autograd nodes
//!              └─────> batch                                      observe: when devices began and ended a cell
//! ```
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
mod clock;
mod copy;
mod dependency;
mod layer;
mod observe;
mod partition;
mod pipe;
mod skip;
mod worker;

pub use super::Cell;
pub use batch::{Batch, MicroBatchRows, gather, scatter};
pub use clock::{Observer, Phase, Span, Timeline, bubble, clock_cycles, device_orders};
pub use layer::{Layer, Sequence};
pub use partition::{Partition, StageLayers};
#[expect(deprecated, reason = "the old name of `RecomputeMode` here")]
pub use pipe::Checkpoint;
pub use pipe::{GPipe, GPipeConfig};
pub use skip::{Namespace, Route, Skip, Skippable, Skips, routes, verify_skips};
