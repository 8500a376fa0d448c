//! The operations. An operation checks its arguments once, allocates its output on any device, and runs the kernel of
//! that device (`dispatch.rs`); a meta device has no elements, so no kernel runs there.
//!
//! | file | operations |
//! |---|---|
//! | `unary`, `activation`, `functions` | functions of one element; those of neural networks; those that are computed one by one |
//! | `arithmetic`, `pow`, `compare`, `clamp`, `where_`, `loss` | functions of two or three elements |
//! | `cast`, `creation`, `in_place`, `rearrange`, `fold` | conversion, new tensors, writing into views, joining and padding |
//! | `sum`, `norm`, `prod`, `extremum`, `cumsum`, `recurrence`, `sort` | along dimensions |
//! | `softmax`, `layer_norm`, `group_norm`, `batch_norm`, `rope` | rows and channels |
//! | `matmul`, `conv2d`, `conv3d`, `scaled_dot_product_attention`, `lstm` | products |
//! | `cross_entropy`, `nll_loss` | losses over classes |
//! | `index`, `pool2d`, `random`, `optim`, `sum_of_squares` | indices, windows, random numbers, optimizer steps, gradient norms |
//!
//! An operation with CUDA text of its own is a folder, with the `.cu` file beside its Rust files. `space_to_depth` and `tap_range` are shared by
//! convolutions, pooling and `fold`.

mod activation;
mod arithmetic;
mod batch_norm;
mod cast;
mod clamp;
mod compare;
mod conv2d;
mod conv3d;
mod creation;
mod cross_entropy;
mod cumsum;
mod extremum;
mod fold;
mod functions;
mod group_norm;
mod in_place;
mod index;
mod layer_norm;
mod loss;
mod lstm;
mod matmul;
mod nll_loss;
mod norm;
pub mod optim;
mod pool2d;
mod pow;
mod prod;
pub mod random;
mod rearrange;
mod recurrence;
mod rope;
mod scaled_dot_product_attention;
mod softmax;
mod sort;
mod space_to_depth;
mod sum;
mod sum_of_squares;
mod tap_range;
mod unary;
mod where_;

pub use activation::{
    Gelu, elu, elu_backward, gelu, gelu_backward, gelu_backward_over, leaky_relu, leaky_relu_backward, relu,
    relu_backward, sigmoid, sigmoid_backward, silu, silu_backward, silu_backward_over, silu_mul,
    silu_mul_backward, softplus, softplus_backward, tanh, tanh_backward,
};
pub use arithmetic::{
    add, add_scalar, div, div_backward_divisor, div_scalar, maximum, maximum_backward, minimum, mul,
    mul_over, mul_scalar, rdiv_backward, rdiv_scalar, rsub_scalar, sub, sub_scalar,
};
pub use batch_norm::{BatchNorm, batch_norm, batch_norm_backward, batch_norm_update_};
pub use cast::cast;
pub use clamp::{clamp, clamp_backward};
pub use compare::{eq, eq_scalar, ge, ge_scalar, gt, gt_scalar, le, le_scalar, lt, lt_scalar, ne, ne_scalar};
pub use conv2d::{Conv1dOptions, Conv3dOptions, ConvOptions, conv_transpose2d, conv2d, conv2d_weight};
pub use conv3d::{conv_transpose3d, conv3d, conv3d_weight};
pub use creation::{arange, fill_, full, tril, triu};
pub use cross_entropy::{
    CrossEntropy, cross_entropy, cross_entropy_backward, cross_entropy_backward_over,
    cross_entropy_backward_part, cross_entropy_items, cross_entropy_reduce, cross_entropy_targets,
};
pub use cumsum::{cummax, cummin, cumprod, cumsum, cumsum_reversed, logcumsumexp};
pub use extremum::{amax, amin, any_nan, argmax, argmin, max, min};
pub use fold::{fold, unfold};
pub use functions::{
    acos, acosh, asin, asinh, atan, atan2, atanh, bitwise_and, bitwise_or, bitwise_xor, ceil, cosh, erfc,
    exp2, floor, floor_divide, fmod, frac, hypot, lerp, log2, log10, logaddexp, remainder, round, sign, sinh,
    tan, tanhshrink, trunc, trunc_divide, xlogy,
};
pub use group_norm::{group_norm, group_norm_backward};
pub use in_place::{accumulate_, add_scaled_, copy_, scale_};
pub use index::{
    embedding, embedding_backward, embedding_backward_accumulate_, gather, gather_backward, index_add,
    index_select, index_select_backward, one_hot, scatter_add, split_indices,
};
pub use layer_norm::{
    add_layer_norm, add_layer_norm_backward, add_rms_norm, add_rms_norm_backward, layer_norm,
    layer_norm_backward, layer_norm_to, rms_norm, rms_norm_backward, rms_norm_to,
};
pub use loss::{
    binary_cross_entropy_with_logits, binary_cross_entropy_with_logits_backward, huber_loss,
    huber_loss_backward, kl_div, kl_div_backward_target, kl_div_log_target, kl_div_log_target_backward,
    kl_div_log_target_backward_target, l1_loss, l1_loss_backward, mse_loss, mse_loss_backward,
    smooth_l1_loss, smooth_l1_loss_backward,
};
pub use lstm::{lstm, lstm_backward};
pub use matmul::{
    PART_STEPS, WeightPanels, fuses_epilogues, linear, linear_gelu, linear_gelu_kept, matmul,
    matmul_accumulate_, matmul_accumulate_row_sums_, matmul_continue_, matmul_gelu_backward, matmul_into,
    matmul_row_sums,
};
pub use nll_loss::{NllLoss, nll_loss, nll_loss_backward};
pub use norm::norm;
pub use pool2d::{PoolOptions, Windows, max_pick2d, max_pool2d, max_unpool2d, mean_pool2d, mean_unpool2d};
pub use pow::{
    pow, pow_backward_base, pow_backward_exponent, pow_scalar, pow_scalar_backward, rpow_scalar,
    rpow_scalar_backward,
};
pub use prod::{prod, prod_of_others};
pub use rearrange::{cat, flip, pad};
pub use recurrence::recurrence;
pub use rope::{Rope, RopeFrequencies, rope, rope_backward, rope_by, rope_by_backward};
pub use scaled_dot_product_attention::{
    Attention, AttentionDropout, attention_in_tiles, attention_keep, scaled_dot_product_attention,
    scaled_dot_product_attention_backward,
};
pub use softmax::{log_softmax, log_softmax_backward, softmax, softmax_backward};
pub use sort::{sort, topk};
pub use sum::{logsumexp, mean, sum, var};
pub use sum_of_squares::{NORM_BLOCK, Stretches, add_pairs_, sum_of_squares_blocks, sums_of_squares};
pub use unary::{
    abs, abs_backward, cos, cos_backward, erf, erf_backward, exp, exp_m1, ln_1p, log, neg, reciprocal,
    reciprocal_backward, rsqrt, rsqrt_backward, sin, sin_backward, sqrt, sqrt_backward, square,
    square_backward,
};
pub use where_::{masked_fill, where_};
