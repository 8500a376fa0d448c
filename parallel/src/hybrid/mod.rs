//! All axes at once: data, tensor and pipeline parallelism, ZeRO and recomputation in one run.
//!
//! ```text
//! Layout        how many ranks along which axis, which schedule      pure: refuses what cannot be, and names the nearest
//! StagedModel   a rank's stages of a model; `decoder` builds those of a language model, `encoder_decoder` those of a T5, `encoder`
//!               those of a BERT or a ViT
//! Step          a training step of a StagedModel, as the stages of a pipeline
//! generate_rows prompts continued by the ranks of a replica
//! MeshParallel  what the ranks of all axes share, as a DataParallel: tied tables, norms, whole state
//!
//! Layout, StagedModel, MeshParallel ──> mesh, pipeline, tensor_parallel, data_parallel, sharded
//! ```
//! A rank has some stages of a model ([`Chunks`](crate::pipeline::ranks::Chunks)), whose layers may be split over its
//! tensor-parallel ranks ([`TensorParallel`](crate::tensor_parallel::TensorParallel)). A
//! [`Pipeline`](crate::pipeline::ranks::Pipeline) runs them, and [`Ddp`](crate::data_parallel::Ddp) or
//! [`Zero`](crate::sharded::Zero) adds the gradients of replicas. None of these knows the others; [`MeshParallel`] joins them.

mod encoder;
mod encoder_decoder;
mod generation;
mod layout;
mod mesh_parallel;
mod staged_model;

pub use encoder::encoder;
pub use encoder_decoder::encoder_decoder;
pub use generation::{CausalStage, generate_rows};
pub use layout::Layout;
pub use mesh_parallel::MeshParallel;
pub use staged_model::{StagedModel, Step, adapted_decoder, decoder};

/// The former name of [`StagedModel`].
pub use staged_model::StagedModel as Part;

/// The former name of [`MeshParallel`].
#[deprecated(since = "0.1.0", note = "renamed to `MeshParallel`")]
pub type OnMesh = MeshParallel;
