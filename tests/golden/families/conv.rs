//! Convolutions, pools and norms of images, sequences and volumes.

use phalanx::Var;
use phalanx::autograd::ops::{Pool1dOptions, Pool3dOptions};
use phalanx::autograd::{Error, Result};
use phalanx::kernels::{Conv1dOptions, Conv3dOptions, ConvOptions, PoolOptions};

use super::{Call, one};

/// The conv family.
pub fn images(call: &Call<'_>) -> Option<Result<Vec<Var>>> {
    match call.op {
        "conv1d" => one(conv1d(call)),
        "conv2d" => one(conv2d(call)),
        "conv_transpose2d" => one(conv_transpose2d(call)),
        _ => None,
    }
}

fn conv1d(call: &Call<'_>) -> Result<Var> {
    let list = |name: &str, default: usize| pair(call, name, default).map(|p| p[1]);
    let options = Conv1dOptions {
        stride: list("stride", 1)?,
        padding: list("padding", 0)?,
        dilation: list("dilation", 1)?,
        groups: groups(call)?,
    };
    call.var("input")?.conv1d(call.var("weight")?, call.opt("bias"), &options)
}

fn conv2d(call: &Call<'_>) -> Result<Var> {
    call.var("input")?.conv2d(call.var("weight")?, call.opt("bias"), &options(call)?)
}

fn conv_transpose2d(call: &Call<'_>) -> Result<Var> {
    let output_padding = pair(call, "output_padding", 0)?;
    let (weight, bias) = (call.var("weight")?, call.opt("bias"));
    call.var("input")?.conv_transpose2d(weight, bias, &options(call)?, output_padding)
}

fn options(call: &Call<'_>) -> Result<ConvOptions> {
    Ok(ConvOptions {
        stride: pair(call, "stride", 1)?,
        padding: pair(call, "padding", 0)?,
        dilation: pair(call, "dilation", 1)?,
        groups: groups(call)?,
    })
}

fn groups(call: &Call<'_>) -> Result<usize> {
    usize::try_from(call.attrs.int_or("groups", 1)).map_err(|e| Error::Custom(format!("groups: {e}")))
}

/// Two sizes; a single one stands for both.
pub fn pair(call: &Call<'_>, name: &str, default: usize) -> Result<[usize; 2]> {
    if !call.attrs.has(name) {
        return Ok([default; 2]);
    }
    match call.attrs.sizes(name).as_deref() {
        Some(&[both]) => Ok([both; 2]),
        Some(&[a, b]) => Ok([a, b]),
        _ => Err(Error::Custom(format!("{name} is not one or two sizes"))),
    }
}

/// The pool family.
pub fn pools(call: &Call<'_>) -> Option<Result<Vec<Var>>> {
    match call.op {
        "max_pool2d" => one(pool_options(call).and_then(|options| call.var("input")?.max_pool2d(&options))),
        "avg_pool2d" => one(avg(call)),
        "adaptive_avg_pool2d" => one(adaptive(call)),
        _ => None,
    }
}

fn avg(call: &Call<'_>) -> Result<Var> {
    call.var("input")?.avg_pool2d(&pool_options(call)?, call.attrs.bool_or("count_include_pad", true))
}

fn pool_options(call: &Call<'_>) -> Result<PoolOptions> {
    let kernel = pair(call, "kernel_size", 0)?;
    let stride = match call.attrs.ints("stride") {
        Some(list) if list.is_empty() => kernel,
        Some(_) => pair(call, "stride", 0)?,
        None => kernel,
    };
    Ok(PoolOptions {
        kernel,
        stride,
        padding: pair(call, "padding", 0)?,
        dilation: pair(call, "dilation", 1)?,
        ceil_mode: call.attrs.bool_or("ceil_mode", false),
    })
}

/// A size that is null keeps the image's.
fn adaptive(call: &Call<'_>) -> Result<Var> {
    let input = call.var("input")?;
    let image = &input.shape()[input.rank().saturating_sub(2)..];
    let wrong = || Error::Custom("output_size is not one or two sizes".into());
    let list = match call.attrs.get("output_size").ok_or_else(wrong)? {
        serde_json::Value::Array(list) => list.clone(),
        one => vec![one.clone(); 2],
    };
    let sizes: Vec<usize> =
        list.iter().zip(image).map(|(size, &image)| size.as_u64().map_or(image, |n| n as usize)).collect();
    input.adaptive_avg_pool2d(sizes.try_into().map_err(|_| wrong())?)
}

/// The family of windows of sequences and volumes.
pub fn sequences_and_volumes(call: &Call<'_>) -> Option<Result<Vec<Var>>> {
    let f = match call.op {
        "conv3d" | "conv_transpose1d" | "conv_transpose3d" => convolution,
        "max_pool1d" | "avg_pool1d" | "adaptive_avg_pool1d" => pool1d,
        "max_pool3d" | "avg_pool3d" | "adaptive_max_pool2d" => pool3d,
        "local_response_norm" | "instance_norm" => norm,
        _ => return None,
    };
    one(call.var("input").and_then(|x| f(call, x)))
}

/// `N` sizes; a single one stands for all.
fn sizes<const N: usize>(call: &Call<'_>, name: &str, default: usize) -> Result<[usize; N]> {
    if !call.attrs.has(name) {
        return Ok([default; N]);
    }
    let list = call.attrs.sizes(name).unwrap_or_default();
    match list.as_slice() {
        [all] => Ok([*all; N]),
        list => list.try_into().map_err(|_| Error::Custom(format!("{name} is not one or {N} sizes"))),
    }
}

fn convolution(call: &Call<'_>, x: &Var) -> Result<Var> {
    let (weight, bias) = (call.var("weight")?, call.opt("bias"));
    let groups = call.attrs.int_or("groups", 1) as usize;
    if call.op == "conv_transpose1d" {
        let [stride] = sizes(call, "stride", 1)?;
        let ([padding], [dilation]) = (sizes(call, "padding", 0)?, sizes(call, "dilation", 1)?);
        let [output_padding] = sizes(call, "output_padding", 0)?;
        let options = Conv1dOptions { stride, padding, dilation, groups };
        return x.conv_transpose1d(weight, bias, &options, output_padding);
    }
    let options = Conv3dOptions {
        stride: sizes(call, "stride", 1)?,
        padding: sizes(call, "padding", 0)?,
        dilation: sizes(call, "dilation", 1)?,
        groups,
    };
    match call.op {
        "conv3d" => x.conv3d(weight, bias, &options),
        _ => x.conv_transpose3d(weight, bias, &options, sizes(call, "output_padding", 0)?),
    }
}

/// The stride, which is the kernel where it is absent or empty.
fn stride<const N: usize>(call: &Call<'_>, kernel: [usize; N]) -> Result<[usize; N]> {
    let given = call.attrs.ints("stride").is_some_and(|list| !list.is_empty());
    if given { sizes(call, "stride", 0) } else { Ok(kernel) }
}

fn pool1d(call: &Call<'_>, x: &Var) -> Result<Var> {
    if call.op == "adaptive_avg_pool1d" {
        let [size] = sizes(call, "output_size", 1)?;
        return x.adaptive_avg_pool1d(size);
    }
    let kernel = sizes(call, "kernel_size", 0)?;
    let ([stride], [padding]) = (stride(call, kernel)?, sizes(call, "padding", 0)?);
    let [dilation] = sizes(call, "dilation", 1)?;
    let ceil_mode = call.attrs.bool_or("ceil_mode", false);
    let options = Pool1dOptions { kernel: kernel[0], stride, padding, dilation, ceil_mode };
    match call.op {
        "max_pool1d" => x.max_pool1d(&options),
        _ => x.avg_pool1d(&options, call.attrs.bool_or("count_include_pad", true)),
    }
}

fn pool3d(call: &Call<'_>, x: &Var) -> Result<Var> {
    if call.op == "adaptive_max_pool2d" {
        // A size that is null keeps the image's.
        let image = [x.shape()[x.rank() - 2], x.shape()[x.rank() - 1]];
        let size = match call.attrs.get("output_size") {
            Some(serde_json::Value::Array(list)) if list.len() == 2 => {
                [0, 1].map(|i| list[i].as_u64().map_or(image[i], |n| n as usize))
            }
            _ => sizes(call, "output_size", 1)?,
        };
        return x.adaptive_max_pool2d(size);
    }
    let kernel = sizes(call, "kernel_size", 0)?;
    let options = Pool3dOptions {
        kernel,
        stride: stride(call, kernel)?,
        padding: sizes(call, "padding", 0)?,
        dilation: sizes(call, "dilation", 1)?,
        ceil_mode: call.attrs.bool_or("ceil_mode", false),
    };
    match call.op {
        "max_pool3d" => x.max_pool3d(&options),
        _ => x.avg_pool3d(&options, call.attrs.bool_or("count_include_pad", true)),
    }
}

fn norm(call: &Call<'_>, x: &Var) -> Result<Var> {
    let number = |name: &str, default: f64| call.attrs.float_or(name, default);
    if call.op == "instance_norm" {
        return x.instance_norm(call.opt("weight"), call.opt("bias"), number("eps", 1e-5));
    }
    let size = call.int("size")? as usize;
    x.local_response_norm(size, number("alpha", 1e-4), number("beta", 0.75), number("k", 1.0))
}
