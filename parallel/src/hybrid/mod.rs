//! All axes at once: data, tensor and pipeline parallelism, ZeRO and recomputation in one run.
//!
//! ```text
//! Layout     how many ranks along which axis, which schedule      pure: refuses what cannot be, and says what could
//! decoder    a rank's part of a language model
//! Step       a step of a language model, as a pipeline's work
//! OnMesh     what the ranks of all axes share: DataParallel       tied tables, norms, whole state
//! ```
//! A rank has some stages of a model ([`Chunks`](crate::pipeline::ranks::Chunks)), whose layers may be cut over its
//! tensor-parallel ranks ([`TensorParallel`](crate::tensor_parallel::TensorParallel)); a
//! [`Pipeline`](crate::pipeline::ranks::Pipeline) runs them; [`Ddp`](crate::data_parallel::Ddp) or
//! [`Zero`](crate::sharded::Zero) adds up replicas. Each knows nothing of the others. [`OnMesh`] is where they meet.

mod decoder;
mod layout;
mod on_mesh;
mod step;

pub use decoder::decoder;
pub use layout::Layout;
pub use on_mesh::OnMesh;
pub use step::{Part, Step};
