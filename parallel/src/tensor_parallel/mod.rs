//! Tensor parallelism: the matrices of every layer cut over ranks, and perhaps the stream between them.
//!
//! ```text
//!                 the stream                the region: every rank its part                 the stream
//!            [B, T, width] whole   enter    columns of W_1      rows of W_2        leave
//!   plain    on every rank ------> copy --> y = f(x W_1ᵀ) --> z = y W_2ᵀ, partial --> sum ----> + bias
//!                                  (dx: sum)                                       (dz: copy)
//!            [B, T / n, width]
//!   sequence on each rank  ------> gather --> the same                         --> sum, cut --> + bias
//!                                  (dx: sum, cut)                              (dz: gather)
//! ```
//!
//! What enters and what leaves are a conjugate pair: the backward pass of one is the forward pass of the other. So
//! there are two exchanges a layer and direction. With *sequence parallelism* the stream itself (norms, dropout, what is
//! kept of them) is cut by positions, for the same traffic. Attention is cut by heads, the embedding and the loss by
//! the vocabulary.
//!
//! Initial values and dropout are draws by place in the whole, so they are those of one device. Sums that are cut (the
//! rows of `W_2`, the loss's exponentials) are added in order of the ranks: a run differs from one device's by rounding
//! alone, and every rank computes the same bits of what all hold.
//!
//! What is not cut, all ranks hold: norms, biases of rows, positions, and keys and values whose heads cannot be cut.
//! [`Shard::is_whole`](phalanx_nn::Shard::is_whole) tells a parameter's kind. Gradients of whole ones are the same on all
//! ranks after every backward pass: where the stream is cut, a hook adds the ranks' parts
//! ([`TensorParallel::share`]).
//!
//! ```text
//! cut            which part of a size a rank has               exchange    what ranks do with a tensor
//! regions        exchanges as differentiable functions         group       TensorParallel: the settings, enter and leave
//! column, row, embedding, head    the layers                   layers      nn's models of these layers
//! columns        the maps of one input as one operation, whose exchange overlaps with the weights' gradients
//! cross_entropy  of logits cut by the vocabulary
//! norm           the gradients' norm when some parameters are cut
//! whole          a model's whole tensors, made of all ranks' parts; Hugging Face folders
//! ```
//! Source: Shoeybi et al.: Megatron-LM (2019); Korthikanti et al.: Reducing activation recomputation (2022), section 4.

mod column;
mod columns;
mod cross_entropy;
mod cut;
mod embedding;
mod exchange;
mod group;
mod head;
mod layers;
mod merged;
mod norm;
mod regions;
mod row;
mod whole;

pub use column::ColumnParallelLinear;
pub use cross_entropy::vocab_parallel_cross_entropy;
pub use embedding::VocabParallelEmbedding;
pub use group::TensorParallel;
pub use head::VocabParallelHead;
pub use norm::{grad_norm, sum_squares};
pub use regions::{
    all_gather, copy_to_region, gather_from_region, reduce_from_region, reduce_scatter, scatter_to_region,
};
pub use row::RowParallelLinear;
pub use whole::{gather_parameters, gather_parts, save_model};
