//! The operations, one file or folder each. An operation checks its arguments once, makes its output on any
//! device, and computes it where there are elements.

mod abs;
mod accumulate;
mod add;
mod add_layer_norm;
mod add_pairs;
mod add_rms_norm;
mod amax;
mod any_nan;
mod arange;
mod argmax;
mod batch_norm;
mod cast;
mod cat;
mod clamp;
mod compare;
mod conv2d;
mod conv3d;
mod copy;
mod cos;
mod cross_entropy;
mod cumsum;
mod div;
mod elu;
mod erf;
mod exp;
mod exp_m1;
mod flip;
mod fold;
mod full;
mod functions;
mod gelu;
mod group_norm;
mod index;
mod layer_norm;
mod leaky_relu;
mod linear;
mod ln_1p;
mod log;
mod log_softmax;
mod logsumexp;
mod loss;
mod lstm;
mod matmul;
mod maximum;
mod mul;
mod neg;
mod nll_loss;
mod norm;
pub mod optim;
mod pad;
mod pool2d;
mod pow;
mod prod;
pub mod random;
mod reciprocal;
mod recurrence;
mod relu;
mod rms_norm;
mod rope;
mod rsqrt;
mod scale;
mod scaled_dot_product_attention;
mod sheets;
mod sigmoid;
mod silu;
mod sin;
mod softmax;
mod softplus;
mod sort;
mod sqrt;
mod square;
mod sub;
mod sum;
mod sum_of_squares;
mod tanh;
mod taps;
mod tril;
mod var;
mod where_;

pub use abs::{abs, abs_backward};
pub use accumulate::{accumulate_, add_scaled_};
pub use add::{add, add_scalar};
pub use add_layer_norm::{add_layer_norm, add_layer_norm_backward};
pub use add_pairs::add_pairs_;
pub use add_rms_norm::{add_rms_norm, add_rms_norm_backward};
pub use amax::{amax, amin};
pub use any_nan::any_nan;
pub use arange::arange;
pub use argmax::{argmax, argmin, max, min};
pub use batch_norm::{BatchNorm, batch_norm, batch_norm_backward, batch_norm_update_};
pub use cast::cast;
pub use cat::cat;
pub use clamp::{clamp, clamp_backward};
pub use compare::{eq, eq_scalar, ge, ge_scalar, gt, gt_scalar, le, le_scalar, lt, lt_scalar, ne, ne_scalar};
pub use conv2d::{Conv1dOptions, Conv3dOptions, ConvOptions, conv_transpose2d, conv2d, conv2d_weight};
pub use conv3d::{conv_transpose3d, conv3d, conv3d_weight};
pub use copy::copy_;
pub use cos::{cos, cos_backward};
pub use cross_entropy::{
    CrossEntropy, cross_entropy, cross_entropy_backward, cross_entropy_backward_over, cross_entropy_targets,
};
pub use cumsum::{cummax, cummin, cumprod, cumsum, cumsum_reversed, logcumsumexp};
pub use div::{div, div_backward_divisor, div_scalar, rdiv_backward, rdiv_scalar};
pub use elu::{elu, elu_backward};
pub use erf::{erf, erf_backward};
pub use exp::exp;
pub use exp_m1::exp_m1;
pub use flip::flip;
pub use fold::{fold, unfold};
pub use full::{fill_, full};
pub use functions::{
    acos, acosh, asin, asinh, atan, atan2, atanh, bitwise_and, bitwise_or, bitwise_xor, ceil, cosh, erfc,
    exp2, floor, floor_divide, fmod, frac, hypot, lerp, log2, log10, logaddexp, remainder, round, sign, sinh,
    tan, tanhshrink, trunc, trunc_divide, xlogy,
};
pub use gelu::{Gelu, gelu, gelu_backward, gelu_backward_over};
pub use group_norm::{group_norm, group_norm_backward};
pub use index::{
    embedding, embedding_backward, embedding_backward_accumulate_, gather, gather_backward, index_add,
    index_select, index_select_backward, one_hot, scatter_add, split_indices,
};
pub use layer_norm::{layer_norm, layer_norm_backward};
pub use leaky_relu::{leaky_relu, leaky_relu_backward};
pub use linear::{linear, linear_gelu};
pub use ln_1p::ln_1p;
pub use log::log;
pub use log_softmax::{log_softmax, log_softmax_backward};
pub use logsumexp::logsumexp;
pub use loss::{
    binary_cross_entropy_with_logits, binary_cross_entropy_with_logits_backward, huber_loss,
    huber_loss_backward, kl_div, kl_div_backward_target, kl_div_log_target, kl_div_log_target_backward,
    kl_div_log_target_backward_target, l1_loss, l1_loss_backward, mse_loss, mse_loss_backward,
    smooth_l1_loss, smooth_l1_loss_backward,
};
pub use lstm::{lstm, lstm_backward};
pub use matmul::{matmul, matmul_accumulate_, matmul_into};
pub use maximum::{maximum, maximum_backward, minimum};
pub use mul::{mul, mul_over, mul_scalar};
pub use neg::neg;
pub use nll_loss::{NllLoss, nll_loss, nll_loss_backward};
pub use norm::norm;
pub use pad::pad;
pub use pool2d::{PoolOptions, Windows, max_pick2d, max_pool2d, max_unpool2d, mean_pool2d, mean_unpool2d};
pub use pow::{
    pow, pow_backward_base, pow_backward_exponent, pow_scalar, pow_scalar_backward, rpow_scalar,
    rpow_scalar_backward,
};
pub use prod::{prod, prod_of_others};
pub use reciprocal::{reciprocal, reciprocal_backward};
pub use recurrence::recurrence;
pub use relu::{relu, relu_backward};
pub use rms_norm::{rms_norm, rms_norm_backward};
pub use rope::{Rope, rope, rope_backward};
pub use rsqrt::{rsqrt, rsqrt_backward};
pub use scale::scale_;
pub use scaled_dot_product_attention::{
    Attention, AttentionDropout, attention_in_tiles, attention_keep, scaled_dot_product_attention,
    scaled_dot_product_attention_backward,
};
pub use sigmoid::{sigmoid, sigmoid_backward};
pub use silu::{silu, silu_backward, silu_backward_over};
pub use sin::{sin, sin_backward};
pub use softmax::{softmax, softmax_backward};
pub use softplus::{softplus, softplus_backward};
pub use sort::{sort, topk};
pub use sqrt::{sqrt, sqrt_backward};
pub use square::{square, square_backward};
pub use sub::{rsub_scalar, sub, sub_scalar};
pub use sum::{mean, sum};
pub use sum_of_squares::{NORM_BLOCK, Stretches, sum_of_squares_blocks, sums_of_squares};
pub use tanh::{tanh, tanh_backward};
pub use tril::{tril, triu};
pub use var::var;
pub use where_::{masked_fill, where_};
