//! Pooling.

use phalanx::Var;
use phalanx::autograd::{Error, Result};
use phalanx::kernels::PoolOptions;

use super::conv::pair;
use super::{Call, one};

/// The pool family.
pub fn run(call: &Call<'_>) -> Option<Result<Vec<Var>>> {
    match call.op {
        "max_pool2d" => one(options(call).and_then(|options| call.var("input")?.max_pool2d(&options))),
        "avg_pool2d" => one(avg(call)),
        "adaptive_avg_pool2d" => one(adaptive(call)),
        _ => None,
    }
}

fn avg(call: &Call<'_>) -> Result<Var> {
    call.var("input")?.avg_pool2d(&options(call)?, call.attrs.bool_or("count_include_pad", true))
}

fn options(call: &Call<'_>) -> Result<PoolOptions> {
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
