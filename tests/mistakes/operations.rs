//! Operations on [`Var`]s.

use phalanx::autograd::{
    Attention, BatchNorm, CrossEntropy, KlReduction, KlTarget, NllLoss, Reduction, Rope,
};
use phalanx::kernels::{Conv1dOptions, ConvOptions, PoolOptions};
use phalanx::{DType, Device, Scalar, Var};

use crate::{Mistake, elsewhere, f, i, meta, mistakes, of};

const MEAN: Reduction = Reduction::Mean;

fn bools(shape: &[usize]) -> Var {
    of(shape, DType::Bool)
}

fn bytes(shape: &[usize]) -> Var {
    of(shape, DType::U8)
}

fn conv(options: ConvOptions) -> phalanx::autograd::Result<Var> {
    f(&[1, 4, 5, 5]).conv2d(&f(&[4, 4, 3, 3]), None, &options)
}

fn entropy(config: CrossEntropy) -> phalanx::autograd::Result<Var> {
    f(&[2, 3]).cross_entropy(&i(&[0, 1]), &config)
}

pub fn mistakes() -> Vec<Mistake> {
    let mut all = arithmetic();
    all.extend(shapes());
    all.extend(reductions());
    all.extend(indices());
    all.extend(networks());
    all.extend(losses());
    all
}

fn arithmetic() -> Vec<Mistake> {
    mistakes! {
        "add: | [2, 3] | [4] | broadcast" => f(&[2, 3]).add(&f(&[4]));
        "add: | i64 | f32" => f(&[3]).add(&i(&[1, 2, 3]));
        "add: | cpu:0 | cpu:7 | to_device" => f(&[3]).add(&elsewhere(&[3]));
        "add: | bool | number" => bools(&[2]).add(&bools(&[2]));
        "sub: | [2] | [3]" => f(&[2]).sub(&f(&[3]));
        "mul: | [2] | [3]" => &f(&[2]) * &f(&[3]);
        "div: | [2] | [3]" => &f(&[2]) / &f(&[3]);
        "div: | f64 | f32" => f(&[2]).div(&of(&[2], DType::F64));
        "pow: | [2] | [3]" => f(&[2]).pow(&f(&[3]));
        "maximum: | [2] | [3]" => f(&[2]).maximum(&f(&[3]));
        "minimum: | i64 | f32" => f(&[2]).minimum(&i(&[1, 2]));
        "add_scalar: | 1.5 | i64 | integer" => i(&[1]).add_scalar(1.5);
        "sub_scalar: | 2.5 | i64 | integer" => &i(&[1]) - 2.5;
        "rsub_scalar: | 2.5 | i64 | integer" => 2.5 - &i(&[1]);
        "mul_scalar: | NaN | i64 | integer" => i(&[1]).mul_scalar(f64::NAN);
        "mul_scalar: | 1099511627776 | i32 | 2147483647" => of(&[1], DType::I32).mul_scalar(1i64 << 40);
        "add_scalar: | 300 | u8 | 0 to 255" => bytes(&[1]).add_scalar(300);
        "add_scalar: | bool | number" => bools(&[2]).add_scalar(1);
        "pow_scalar: | -1 | i64 | from 0 up" => i(&[2]).pow_scalar(-1);
        "pow_scalar: | 0.5 | i64 | integer" => i(&[2]).pow_scalar(0.5);
        "rpow_scalar: | 1.5 | i64 | integer" => i(&[2]).rpow_scalar(1.5);
        "rpow_scalar: | 300 | u8 | 255" => bytes(&[2]).rpow_scalar(300);
        "exp: | i64 | floating-point" => i(&[1]).exp();
        "log: | i64 | floating-point" => i(&[1]).log();
        "sqrt: | u8 | floating-point" => bytes(&[1]).sqrt();
        "sin: | bool | floating-point" => bools(&[1]).sin();
        "tanh: | i64 | floating-point" => i(&[1]).tanh();
        "sigmoid: | i64 | floating-point" => i(&[1]).sigmoid();
        "gelu: | i64 | floating-point" => i(&[1]).gelu(phalanx::kernels::Gelu::Exact);
        "softplus: | i64 | floating-point" => i(&[1]).softplus(1.0, 20.0);
        "neg: | bool | number" => bools(&[1]).neg();
        "clamp: | 1.5 | i64 | integer" => i(&[1]).clamp(Some(1.5.into()), None);
        "clamp: | 300 | u8 | 0 to 255" => bytes(&[1]).clamp(Some(300.into()), None);
        "clamp: | NaN" => f(&[1]).clamp(None, Some(Scalar::Float(f64::NAN)));
        "clamp: | bool | number" => bools(&[1]).clamp(Some(0.into()), None);
        "eq: | [2] | [3]" => f(&[2]).eq(&f(&[3]));
        "lt: | i64 | f32" => f(&[2]).lt(&i(&[1, 2]));
        "where: | f32 | bool" => f(&[2]).where_(&f(&[2]), &f(&[2]));
        "where: | [2] | [3]" => f(&[2]).where_(&bools(&[2]), &f(&[3]));
        "where: | f64 | f32" => f(&[2]).where_(&bools(&[2]), &of(&[2], DType::F64));
        "masked_fill: | u8 | bool" => f(&[2]).masked_fill(&bytes(&[2]), 0);
        "masked_fill: | [3] | [2]" => f(&[2]).masked_fill(&bools(&[3]), 0);
        "masked_fill: | 300 | u8 | 255" => bytes(&[2]).masked_fill(&bools(&[2]), 300);
        "masked_fill: | -inf | i64 | integer" => i(&[2]).masked_fill(&bools(&[1]), f64::NEG_INFINITY);
        "arange: | 0 to 5 by 0" => Var::arange(0, 5, 0, DType::I64, Device::CPU);
        "arange: | 0 to 5 by -1 | leads to the end" => Var::arange(0, 5, -1, DType::F32, Device::CPU);
        "arange: | inf | finite" => Var::arange(0.0, f64::INFINITY, 1.0, DType::F32, Device::CPU);
        "arange: | 299 | u8 | 0 to 255" => Var::arange(0, 300, 1, DType::U8, Device::CPU);
        "arange: | 0.5 | i64 | integer" => Var::arange(0.5, 3.0, 1.0, DType::I64, Device::CPU);
        "dropout: | 1.5 | 0 to 1" => f(&[2]).dropout(1.5, 0, None);
        "dropout: | NaN | 0 to 1" => f(&[2]).dropout(f64::NAN, 0, None);
        "dropout: | i64 | floating-point" => i(&[2]).dropout(0.5, 0, None);
    }
}

fn shapes() -> Vec<Mistake> {
    mistakes! {
        "reshape: | [2, 3] | 6 elements | [4, 2]" => f(&[2, 3]).reshape(&[4, 2]);
        "reshape: | [2, 3] | [-1, -1] | one size may be -1" => f(&[2, 3]).reshape(&[-1, -1]);
        "reshape: | [2, 3] | [4, -1]" => f(&[2, 3]).reshape(&[4, -1]);
        "reshape: | [2, 3] | [-2, -3]" => f(&[2, 3]).reshape(&[-2, -3]);
        "reshape: | [2, 3]" => f(&[2, 3]).reshape_to(&[usize::MAX, 2]);
        "flatten: | 2 to 0" => f(&[2, 3, 4]).flatten(2, 0);
        "flatten: | dimension 3 | 3 dimensions" => f(&[2, 3, 4]).flatten(0, 3);
        "unsqueeze: | dimension 4" => f(&[2, 3]).unsqueeze(4);
        "squeeze: | dimension 2 | -2 to 1" => f(&[2, 3]).squeeze(&[2]);
        "squeeze: | dimension 0 | twice" => f(&[1, 3]).squeeze(&[0, -2]);
        "permute: | dimension 0 | twice" => f(&[2, 3]).permute(&[0, 0]);
        "permute: | [0] | 2 dimensions" => f(&[2, 3]).permute(&[0]);
        "permute: | dimension 2" => f(&[2, 3]).permute(&[0, 2]);
        "transpose: | dimension -3 | -2 to 1" => f(&[2, 3]).transpose(0, -3);
        "transpose: | dimension 0 | no dimensions" => f(&[]).transpose(0, 0);
        "broadcast_to: | [2, 3] | [2, 4]" => f(&[2, 3]).broadcast_to(&[2, 4]);
        "broadcast_to: | [2, 3] | [3]" => f(&[2, 3]).broadcast_to(&[3]);
        "expand: | [2, 3] | [2, 4]" => f(&[2, 3]).expand(&[2, 4]);
        "expand: | [3] | [-1, 3]" => f(&[3]).expand(&[-1, 3]);
        "expand: | [1] | [-7]" => f(&[1]).expand(&[-7]);
        "repeat: | 1 repeats | at least 2" => f(&[2, 3]).repeat(&[2]);
        "repeat: | 9223372036854775807" => f(&[2, 3]).repeat(&[1, i64::MAX as usize]);
        "sum_to: | [4] | [2, 3]" => f(&[2, 3]).sum_to(&[4]);
        "sum_to: | [1, 2, 3] | [2, 3]" => f(&[2, 3]).sum_to(&[1, 2, 3]);
        "narrow: | 3 elements from 1 | size 3" => f(&[2, 3]).narrow(1, 1, 3);
        "narrow: | dimension 2" => f(&[2, 3]).narrow(2, 0, 1);
        "slice: | step" => f(&[2, 3]).slice(1, None, None, 0);
        "select: | 3 | below 3" => f(&[2, 3]).select(1, 3);
        "diagonal: | dimension 0 | twice" => f(&[3, 3]).diagonal(0, 0, 0);
        "cat: | no tensors | at least one" => Var::cat::<Var>(&[], 0);
        "cat: | [2, 3] | [3, 4] | dimension 0" => Var::cat(&[f(&[3, 4]), f(&[2, 3])], 0);
        "cat: | i64 | f32" => Var::cat(&[f(&[1]), i(&[1])], 0);
        "cat: | cpu:0 | cpu:7" => Var::cat(&[f(&[1]), elsewhere(&[1])], 0);
        "cat: | dimension 1" => Var::cat(&[f(&[1])], 1);
        "cat: | dimension 0 | no dimensions" => Var::cat(&[f(&[]), f(&[])], 0);
        "stack: | no tensors | at least one" => Var::stack::<Var>(&[], 0);
        "stack: | [3] | [2] | one shape" => Var::stack(&[f(&[2]), f(&[3])], 0);
        "split: | 0 | at least 1" => f(&[4]).split(0, 0);
        "split: | dimension 1" => f(&[4]).split(2, 1);
        "split_sizes: | [1, 2] | 4" => f(&[4]).split_sizes(&[1, 2], 0);
        "chunk: | 0 chunks | at least 1" => f(&[4]).chunk(0, 0);
        "roll: | 1 shifts | 2 dimensions" => f(&[4, 4]).roll(&[1], &[0, 1]);
        "flip: | dimension 2" => f(&[4, 4]).flip(&[2]);
        "flip: | twice" => f(&[4, 4]).flip(&[0, 0]);
        "pad: | [2] | dimensions" => f(&[2]).pad(&[(1, 1), (1, 1)], 0);
        "pad: | (-2, -1) | crop" => f(&[2]).pad(&[(-2, -1)], 0);
        "pad: | 300 | u8 | 255" => bytes(&[2]).pad(&[(1, 1)], 300);
        "tril: | [3] | two dimensions" => f(&[3]).tril(0);
        "triu: | [3] | two dimensions" => f(&[3]).triu(0);
        "einsum: | ij,jk->ik | 2 operands | 1" => Var::einsum("ij,jk->ik", &[f(&[2, 3])]);
        "einsum: | j | sizes 3 and 4" => Var::einsum("ij,jk->ik", &[f(&[2, 3]), f(&[4, 5])]);
        "einsum: | ijk | names more than" => Var::einsum("ijk->k", &[f(&[2, 3])]);
        "einsum: | z | no operand" => Var::einsum("ij->iz", &[f(&[2, 3])]);
        "einsum: | ! | letter" => Var::einsum("i!->i", &[f(&[2, 3])]);
        "to_device: | meta" => meta(&[2]).to_device(Device::CPU);
        "matmul: | could not allocate | TiB | in use there" => f(&[1 << 22, 0]).matmul(&f(&[0, 1 << 25]));
        "linear: | could not allocate | bytes" => f(&[1 << 22, 0]).linear(&f(&[1 << 25, 0]), None);
        "pad: | could not allocate | bytes" => f(&[1]).pad(&[(1 << 47, 0)], 0);
        "one_hot: | could not allocate | bytes" => i(&[0]).one_hot(1 << 46);
        "add: | could not allocate | bytes" => f(&[1 << 24, 1]).add(&f(&[1, 1 << 24]));
        "contiguous: | could not allocate | bytes" => f(&[1]).broadcast_to(&[1 << 47]).unwrap().contiguous();
        "one_hot: | 9223372036854775807 | size" => i(&[0, 0, 0]).one_hot(i64::MAX as usize);
    }
}

fn reductions() -> Vec<Mistake> {
    mistakes! {
        "sum: | dimension 2 | 2 dimensions" => f(&[2, 3]).sum(&[2], false);
        "sum: | twice" => f(&[2, 3]).sum(&[1, -1], false);
        "mean: | i64 | floating-point" => i(&[1, 2]).mean_all();
        "mean: | dimension -3" => f(&[2, 3]).mean(&[-3], false);
        "var: | i64 | floating-point" => i(&[1]).var(&[0], 1.0, false);
        "var: | -1 | 0 or more" => f(&[3]).var(&[0], -1.0, false);
        "norm: | NaN" => f(&[3]).norm(f64::NAN, &[0], false);
        "norm: | i64 | floating-point" => i(&[3]).norm(2.0, &[0], false);
        "amax: | [0]" => f(&[0]).amax(&[0], false);
        "max: | [2, 0]" => f(&[2, 0]).max(1, false);
        "max: | dimension 1" => f(&[2]).max(1, false);
        "argmax: | [0]" => f(&[0]).argmax(None, false);
        "argmin: | dimension 3" => f(&[2, 2]).argmin(Some(3), false);
        "prod: | dimension 1" => f(&[2]).prod(1, false);
        "cumsum: | dimension 1" => f(&[2]).cumsum(1);
        "logsumexp: | i64 | floating-point" => i(&[2]).logsumexp(&[0], false);
        "softmax: | dimension 2" => f(&[2, 2]).softmax(2);
        "softmax: | i64 | floating-point" => i(&[2]).softmax(0);
        "log_softmax: | dimension -3" => f(&[2, 2]).log_softmax(-3);
        "sort: | dimension 1" => f(&[2]).sort(1, false);
        "topk: | k = 3 | at most 2" => f(&[2]).topk(3, 0, true);
        "item: | [2] | one element" => f(&[2]).item::<f32>();
        "item: | f32 | f64" => f(&[]).item::<f64>();
        "item: | meta | no elements" => meta(&[]).item::<f32>();
        "to_vec: | f32 | i64" => f(&[2]).to_vec::<i64>();
        "to_vec: | meta | no elements" => meta(&[2]).to_vec::<f32>();
    }
}

fn indices() -> Vec<Mistake> {
    mistakes! {
        "index_select: | index 3 (item 1) | below 3" => f(&[3]).index_select(0, &i(&[0, 3]));
        "index_select: | index -1 | below 3" => f(&[3]).index_select(0, &i(&[-1]));
        "index_select: | f32 | i64 or i32" => f(&[3]).index_select(0, &f(&[1]));
        "index_select: | [1, 2] | one dimension" => f(&[3]).index_select(0, &of(&[1, 2], DType::I64));
        "index_select: | cpu:0 | cpu:7" => elsewhere(&[3]).index_select(0, &i(&[0]));
        "index_select: | dimension 1" => f(&[3]).index_select(1, &i(&[0]));
        "index_add: | [2] | [1]" => f(&[3]).index_add(0, &i(&[0]), &f(&[2]), 1.0);
        "index_add: | 0.5 | i64 | integer" => i(&[3]).index_add(0, &i(&[0]), &i(&[2]), 0.5);
        "index_add: | index 5 | below 3" => f(&[3]).index_add(0, &i(&[5]), &f(&[1]), 1.0);
        "gather: | index 7 | below 3" => f(&[3]).gather(0, &i(&[7]));
        "gather: | u8 | i64 or i32" => f(&[3]).gather(0, &bytes(&[1]));
        "gather: | [1] | [3, 3]" => f(&[3, 3]).gather(0, &i(&[0]));
        "gather: | dimension 2" => f(&[3]).gather(2, &i(&[0]));
        "scatter_add: | [2] | [1]" => f(&[3]).scatter_add(0, &i(&[0]), &f(&[2]));
        "scatter_add: | index 3 | below 3" => f(&[3]).scatter_add(0, &i(&[3]), &f(&[1]));
        "scatter_add: | f64 | f32" => f(&[3]).scatter_add(0, &i(&[0]), &of(&[1], DType::F64));
        "embedding: | index 4 | below 4" => f(&[4, 2]).embedding(&i(&[4]), None);
        "embedding: | f32 | i64 or i32" => f(&[4, 2]).embedding(&f(&[1]), None);
        "embedding: | padding row 9 | 4 rows" => f(&[4, 2]).embedding(&i(&[0]), Some(9));
        "embedding: | padding row -5 | 4 rows" => f(&[4, 2]).embedding(&i(&[0]), Some(-5));
        "embedding: | dimension" => f(&[]).embedding(&i(&[0]), None);
        "one_hot: | index 5 | below 3" => i(&[5]).one_hot(3);
        "one_hot: | index -1 | below 3" => i(&[-1]).one_hot(3);
        "one_hot: | index 0 | below 0" => i(&[0]).one_hot(0);
        "one_hot: | f32 | i64 or i32" => f(&[2]).one_hot(3);
    }
}

fn networks() -> Vec<Mistake> {
    mistakes! {
        "matmul: | [2, 3] | [2, 3]" => f(&[2, 3]).matmul(&f(&[2, 3]));
        "matmul: | [] | [3]" => f(&[]).matmul(&f(&[3]));
        "matmul: | [2, 3, 4] | [5, 4, 2]" => f(&[2, 3, 4]).matmul(&f(&[5, 4, 2]));
        "matmul: | i64 | floating-point" => of(&[2, 2], DType::I64).matmul(&of(&[2, 2], DType::I64));
        "matmul: | f64 | f32" => f(&[2, 2]).matmul(&of(&[2, 2], DType::F64));
        "linear: | [2, 3] | [5, 4]" => f(&[2, 3]).linear(&f(&[5, 4]), None);
        "linear: | [6] | [5]" => f(&[2, 3]).linear(&f(&[5, 3]), Some(&f(&[6])));
        "linear: | [3] | in" => f(&[2, 3]).linear(&f(&[3]), None);
        "conv2d: | [4, 5] | [n, channels, h, w]" => f(&[4, 5]).conv2d(&f(&[1, 1, 2, 2]), None, &ConvOptions::default());
        "conv2d: | [1, 3, 5, 5] | [4, 4, 3, 3]" => f(&[1, 3, 5, 5]).conv2d(&f(&[4, 4, 3, 3]), None, &ConvOptions::default());
        "conv2d: | stride [0, 1] | at least 1" => conv(ConvOptions { stride: [0, 1], ..ConvOptions::default() });
        "conv2d: | dilation [0, 0] | at least 1" => conv(ConvOptions { dilation: [0; 2], ..ConvOptions::default() });
        "conv2d: | groups" => conv(ConvOptions { groups: 0, ..ConvOptions::default() });
        "conv2d: | groups" => conv(ConvOptions { groups: 3, ..ConvOptions::default() });
        "conv2d: | [9, 9] | [5, 5]" => conv(ConvOptions { dilation: [4; 2], ..ConvOptions::default() });
        "conv2d: | padding" => conv(ConvOptions { padding: [usize::MAX; 2], ..ConvOptions::default() });
        "conv2d: | bias | [3] | [4]" => f(&[1, 4, 5, 5]).conv2d(&f(&[4, 4, 3, 3]), Some(&f(&[3])), &ConvOptions::default());
        "conv2d: | i64 | floating-point" => of(&[1, 1, 2, 2], DType::I64).conv2d(&of(&[1, 1, 1, 1], DType::I64), None, &ConvOptions::default());
        "conv1d: | [4] | [n, in, length]" => f(&[4]).conv1d(&f(&[1, 1, 2]), None, &Conv1dOptions::default());
        "conv1d: | stride" => f(&[1, 1, 4]).conv1d(&f(&[1, 1, 2]), None, &Conv1dOptions { stride: 0, ..Conv1dOptions::default() });
        "conv1d: | 3 channels | [1, 1, 2]" => f(&[1, 3, 4]).conv1d(&f(&[1, 1, 2]), None, &Conv1dOptions::default());
        "conv_transpose2d: | output padding [1, 1]" => f(&[1, 2, 3, 3]).conv_transpose2d(&f(&[2, 1, 2, 2]), None, &ConvOptions::default(), [1, 1]);
        "conv_transpose2d: | padding" => f(&[1, 2, 1, 1]).conv_transpose2d(&f(&[2, 1, 2, 2]), None, &ConvOptions { padding: [3; 2], ..ConvOptions::default() }, [0; 2]);
        "max_pool2d: | [3, 3] | [channels, h, w]" => f(&[3, 3]).max_pool2d(&PoolOptions::new([2; 2]));
        "max_pool2d: | window | 2" => f(&[1, 2, 2]).max_pool2d(&PoolOptions::new([3; 2]));
        "max_pool2d: | at least 1" => f(&[1, 2, 2]).max_pool2d(&PoolOptions::new([0; 2]));
        "max_pool2d: | padding 2" => f(&[1, 4, 4]).max_pool2d(&PoolOptions { padding: [2; 2], ..PoolOptions::new([2; 2]) });
        "max_pool2d: | i64 | floating-point" => of(&[1, 2, 2], DType::I64).max_pool2d(&PoolOptions::new([1; 2]));
        "avg_pool2d: | dilation" => f(&[1, 4, 4]).avg_pool2d(&PoolOptions { dilation: [2; 2], ..PoolOptions::new([2; 2]) }, true);
        "adaptive_avg_pool2d: | [0, 4]" => f(&[1, 0, 4]).adaptive_avg_pool2d([2, 2]);
        "layer_norm: | [2, 3] | [4]" => f(&[2, 3]).layer_norm(&[4], None, None, 1e-5);
        "layer_norm: | eps -1" => f(&[2, 3]).layer_norm(&[3], None, None, -1.0);
        "layer_norm: | weight | [2] | [3]" => f(&[2, 3]).layer_norm(&[3], Some(&f(&[2])), None, 1e-5);
        "rms_norm: | eps NaN" => f(&[2, 3]).rms_norm(&[3], None, f64::NAN);
        "group_norm: | groups | channels" => f(&[2, 3]).group_norm(2, None, None, 1e-5);
        "group_norm: | 0 | groups" => f(&[2, 3]).group_norm(0, None, None, 1e-5);
        "batch_norm: | [1, 3] | more than one" => f(&[1, 3]).batch_norm(None, None, None, &BatchNorm::default());
        "batch_norm: | running" => f(&[2, 3]).batch_norm(None, None, None, &BatchNorm { training: false, ..BatchNorm::default() });
        "batch_norm: | [3]" => f(&[3]).batch_norm(None, None, None, &BatchNorm::default());
        "rope: | [2, 3] | even" => f(&[2, 3]).rope(None, &Rope::default());
        "rope: | positions | [4]" => f(&[2, 4]).rope(Some(&i(&[0, 1, 2, 3])), &Rope::default());
        "scaled_dot_product_attention: | [2, 3]" => f(&[2, 3]).scaled_dot_product_attention(&f(&[2, 4]), &f(&[2, 4]), None, &Attention::default());
        "scaled_dot_product_attention: | [5, 5]" => f(&[2, 4]).scaled_dot_product_attention(&f(&[2, 4]), &f(&[2, 4]), Some(&bools(&[5, 5])), &Attention::default());
        "scaled_dot_product_attention: | i64" => f(&[2, 4]).scaled_dot_product_attention(&f(&[2, 4]), &f(&[2, 4]), Some(&of(&[2, 2], DType::I64)), &Attention::default());
    }
}

fn losses() -> Vec<Mistake> {
    mistakes! {
        "mse_loss: | [2] | [2, 1] | one shape" => f(&[2]).mse_loss(&f(&[2, 1]), MEAN);
        "mse_loss: | i64 | f32" => f(&[2]).mse_loss(&i(&[1, 2]), MEAN);
        "mse_loss: | cpu:0 | cpu:7" => f(&[2]).mse_loss(&elsewhere(&[2]), MEAN);
        "l1_loss: | [2] | [1] | one shape" => f(&[2]).l1_loss(&f(&[1]), MEAN);
        "smooth_l1_loss: | [2, 3] | [3]" => f(&[2, 3]).smooth_l1_loss(&f(&[3]), 1.0, MEAN);
        "smooth_l1_loss: | beta -1 | 0 or more" => f(&[2]).smooth_l1_loss(&f(&[2]), -1.0, MEAN);
        "binary_cross_entropy_with_logits: | [2] | [2, 1]" => f(&[2]).binary_cross_entropy_with_logits(&f(&[2, 1]), None, None, MEAN);
        "kl_div: | [2] | [2, 1]" => f(&[2]).kl_div(&f(&[2, 1]), KlTarget::Probabilities, KlReduction::BatchMean);
        "kl_div: | dimension" => f(&[]).kl_div(&f(&[]), KlTarget::Probabilities, KlReduction::BatchMean);
        "cross_entropy: | target 3 (item 1) | below 3" => f(&[2, 3]).cross_entropy(&i(&[0, 3]), &CrossEntropy::default());
        "cross_entropy: | target -1 | below 3" => f(&[2, 3]).cross_entropy(&i(&[0, -1]), &CrossEntropy::default());
        "cross_entropy: | i32 | i64" => f(&[2, 3]).cross_entropy(&of(&[2], DType::I32), &CrossEntropy::default());
        "cross_entropy: | f32 | i64" => f(&[2, 3]).cross_entropy(&f(&[2, 3]), &CrossEntropy::default());
        "cross_entropy: | [3] | [2]" => f(&[2, 3]).cross_entropy(&i(&[0, 1, 2]), &CrossEntropy::default());
        "cross_entropy: | [3] | [N, C" => f(&[3]).cross_entropy(&i(&[0]), &CrossEntropy::default());
        "cross_entropy: | smoothing 2 | 0 to 1" => entropy(CrossEntropy { label_smoothing: 2.0, ..CrossEntropy::default() });
        "cross_entropy: | smoothing NaN" => entropy(CrossEntropy { label_smoothing: f64::NAN, ..CrossEntropy::default() });
        "cross_entropy: | weight | [2] | [3]" => entropy(CrossEntropy { weight: Some(f(&[2]).into_tensor()), ..CrossEntropy::default() });
        "cross_entropy: | weight of -1" => entropy(CrossEntropy {
            weight: Some(f(&[3]).add_scalar(-1.0).unwrap().into_tensor()),
            ..CrossEntropy::default()
        });
        "nll_loss: | target 3 | below 3" => f(&[2, 3]).nll_loss(&i(&[0, 3]), &NllLoss::default());
        "nll_loss: | [3] | [2]" => f(&[2, 3]).nll_loss(&i(&[0, 1, 2]), &NllLoss::default());
    }
}
