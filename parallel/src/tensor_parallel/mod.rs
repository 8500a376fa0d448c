//! Tensor parallelism: the matrices of every layer split over ranks (Megatron-LM), and with sequence parallelism the
//! activations between the layers as well.
//!
//! ```text
//! two ranks, an MLP; W_1 is column-parallel, W_2 row-parallel (f and g: the conjugate collectives of `mappings.rs`)
//!
//!                  +-- rank 0:  Y_0 = gelu(X W_1[:, left])   -- Z_0 = Y_0 W_2[top, :]    --+
//!   X  -- f ------>|                                                                      |---- g -->  Z = Z_0 + Z_1 + bias
//!                  +-- rank 1:  Y_1 = gelu(X W_1[:, right])  -- Z_1 = Y_1 W_2[bottom, :] --+
//!
//!            activations between layers    f (enter)    the region    g (leave)
//!   tensor   [B, T, width] on every rank   copy         split         sum                backward of f: sum; of g: copy
//!   sequence [B, T / n, width] on each     all-gather   split         reduce-scatter     backward of f: reduce-scatter;
//!                                                                                        of g: all-gather
//! ```
//! (A weight is stored as `[out, in]`, so a column of the paper's `W_1` is a row of the parameter.)
//!
//! `f` and `g` are a conjugate pair: the backward pass of one is the forward pass of the other. So a layer has two exchanges
//! in each direction. With *sequence parallelism* norms and dropout, and what they save for backward, are split by positions,
//! for the same traffic. Attention is split by heads, the embedding and the loss by the vocabulary.
//!
//! Initial values and dropout are drawn by position in the whole tensor, so they are those of one device. Sums that are split
//! (the products of `W_2`, the loss's exponentials) are added in order of the ranks: a run differs from one device's by
//! rounding alone, and every rank computes the same bits of what all ranks hold.
//!
//! All ranks hold what is not split: norms, biases of row-parallel layers, positions, and keys and values whose heads do not
//! divide by the ranks. [`Shard::is_whole`](phalanx_nn::Shard::is_whole) tells such a parameter. Its gradients are the same on
//! all ranks after every backward pass: with sequence parallelism a hook adds the ranks' parts ([`TensorParallel::all_reduce_whole_grads`]).
//!
//! ```text
//! mappings       how a dimension is split, exchanges, and exchanges as differentiable functions
//! group          TensorParallel: the settings, enter and leave; the gradients' norm when some parameters are split
//! linear         column- and row-parallel linear maps; maps of one input as one operation, whose exchange overlaps with the
//!                weights' gradients
//! heads_norm     an RMS norm over the features of all heads
//! vocabulary     embedding and head        cross_entropy    of logits split by the vocabulary
//! layers         nn's models made of these layers
//! gather         a model's whole tensors, made of all ranks' parts; Hugging Face folders
//!
//! layers ──> linear, heads_norm, vocabulary ──> group ──> mappings <── cross_entropy <── vocabulary
//! ```
//! Source: Shoeybi et al.: Megatron-LM (2019); Korthikanti et al.: Reducing activation recomputation (2022), section 4.

mod cross_entropy;
mod gather;
mod group;
mod heads_norm;
mod layers;
mod linear;
mod mappings;
mod vocabulary;

pub use cross_entropy::{vocab_parallel_cross_entropy, vocab_parallel_linear_cross_entropy};
pub use gather::{gather_parameters, gather_parts, save_encoder, save_model};
pub use group::{TensorParallel, grad_norm, sum_squares};
pub use heads_norm::HeadsParallelRmsNorm;
pub use linear::{ColumnParallelLinear, RowParallelLinear};
pub use mappings::{
    all_gather, copy_to_region, gather_from_region, reduce_from_region, reduce_scatter, scatter_to_region,
};
pub use vocabulary::{VocabParallelEmbedding, VocabParallelHead};
