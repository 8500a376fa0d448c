//! Expert parallelism: ranks divide the experts of a mixture, and tokens travel to their experts and back.
//!
//! ```text
//! layers     ExpertParallel: the layers of another factory, with experts divided over a group
//! exchange   all_to_all: rows to other ranks and back, as an operation that is differentiated
//! selection  the experts of a model, and the rest of it, each as a model for a data-parallel wrapper
//!
//! layers ──> exchange ──> comm
//! ```
//! The group's ranks are replicas: each computes its own rows of the batch with every layer but the experts. Of `experts` experts each rank of
//! N has `experts / N`. Forward, a rank sends each token to the ranks of its experts, which send the outputs back; backward, gradients go the
//! same ways in the opposite directions.
//!
//! **Gradients.** An expert takes the tokens of each rank in a product of its own, whose gradient is kept at a site of its own
//! ([`Parameter::with_replica_sites`](phalanx_nn::Parameter::with_replica_sites)): it is what the replica would have computed with all experts. At
//! the end of a step the sites are added as data parallelism adds replicas. So an expert's gradients have the bits that they have without
//! expert parallelism. They take the memory that they take there, since a rank keeps one gradient for each replica, of fewer experts.
//!
//! Sources: Lepikhin et al.: GShard (2020), section 3.2; Fedus et al.: Switch transformers (2021), section 5.3; Rajbhandari et al.:
//! DeepSpeed-MoE (2022), section 5.

mod exchange;
mod layers;
mod selection;

pub use exchange::all_to_all;
pub use layers::ExpertParallel;
pub(crate) use layers::check_divides;
pub use selection::{Selection, divided_experts, without_divided_experts};
