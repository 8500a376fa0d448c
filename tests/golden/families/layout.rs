//! Views and copies: shapes, parts, joins, orders, margins, diagonals, windows, resized images.

use phalanx::autograd::ops::{FoldOptions, Interpolate, InterpolateMode, MeshIndexing, PadMode};
use phalanx::autograd::{Error, Result};
use phalanx::{DType, Device, Var};

use super::conv::pair;
use super::{Call, one};

/// The layout family.
pub fn shapes(call: &Call<'_>) -> Option<Result<Vec<Var>>> {
    match call.op {
        "cat" => return one(call.int("dim").and_then(|dim| Var::cat(&call.list("tensors"), dim))),
        "stack" => return one(call.int("dim").and_then(|dim| Var::stack(&call.list("tensors"), dim))),
        "split" | "chunk" => return Some(pieces(call)),
        _ => {}
    }
    let f = match call.op {
        "reshape" | "permute" | "transpose" | "expand" | "repeat" | "squeeze" | "unsqueeze" | "flatten" => {
            shape
        }
        "narrow" | "slice" => part,
        "flip" | "roll" | "pad" | "tril" | "triu" => rearrange,
        _ => return None,
    };
    one(call.var("input").and_then(|x| f(call, x)))
}

fn ints(call: &Call<'_>, name: &str) -> Vec<isize> {
    call.attrs.ints(name).unwrap_or_default().into_iter().map(|n| n as isize).collect()
}

fn counts(call: &Call<'_>, name: &str) -> Vec<usize> {
    ints(call, name).into_iter().map(|n| n as usize).collect()
}

fn shape(call: &Call<'_>, x: &Var) -> Result<Var> {
    match call.op {
        "reshape" => x.reshape(&ints(call, "shape")),
        "permute" => x.permute(&ints(call, "dims")),
        "transpose" => x.transpose(call.int("dim0")?, call.int("dim1")?),
        "expand" => x.expand(&ints(call, "size")),
        "repeat" => x.repeat(&counts(call, "repeats")),
        "squeeze" if call.attrs.has("dim") => x.squeeze(&ints(call, "dim")),
        "squeeze" => x.squeeze_all(),
        "unsqueeze" => x.unsqueeze(call.int("dim")?),
        _ => x.flatten(call.attrs.int_or("start_dim", 0), call.attrs.int_or("end_dim", -1)),
    }
}

fn part(call: &Call<'_>, x: &Var) -> Result<Var> {
    let dim = call.attrs.int_or("dim", 0);
    let bound = |name| call.attrs.int(name).map(|n| n as isize);
    if call.op == "slice" {
        return x.slice(dim, bound("start"), bound("end"), call.attrs.int_or("step", 1) as usize);
    }
    let (start, length) = (call.int("start")?, call.int("length")?);
    let size = x.tensor().size(dim)?;
    let start = if start < 0 { size.saturating_add_signed(start as isize) } else { start as usize };
    x.narrow(dim, start, length as usize)
}

fn pieces(call: &Call<'_>) -> Result<Vec<Var>> {
    let (x, dim) = (call.var("input")?, call.attrs.int_or("dim", 0));
    Ok(match call.op {
        "chunk" => x.chunk(call.int("chunks")? as usize, dim)?,
        _ if call.attrs.has("split_sizes") => x.split_sizes(&counts(call, "split_sizes"), dim)?,
        _ => x.split(call.int("split_size")? as usize, dim)?,
    }
    .into_vec())
}

fn rearrange(call: &Call<'_>, x: &Var) -> Result<Var> {
    match call.op {
        "flip" => x.flip(&ints(call, "dims")),
        "roll" if call.attrs.has("dims") => x.roll(&ints(call, "shifts"), &ints(call, "dims")),
        "roll" => x.roll_all(ints(call, "shifts")[0]),
        "tril" => x.tril(call.attrs.int_or("diagonal", 0) as isize),
        "triu" => x.triu(call.attrs.int_or("diagonal", 0) as isize),
        _ => {
            call.attrs.str_or("mode", "constant");
            let margins: Vec<_> = ints(call, "pad").chunks(2).map(|pair| (pair[0], pair[1])).collect();
            x.pad(&margins, call.attrs.float_or("value", 0.0))
        }
    }
}

/// The family of layouts that `layout` does not have.
pub fn grids_and_windows(call: &Call<'_>) -> Option<Result<Vec<Var>>> {
    let f = match call.op {
        "unbind" => return Some(call.var("input").and_then(|x| x.unbind(call.attrs.int_or("dim", 0)))),
        "meshgrid" => return Some(meshgrid(call)),
        "linspace" | "eye" => return one(constant(call)),
        "diag" | "diag_embed" | "rot90" | "movedim" | "tile" | "pixel_shuffle" | "pixel_unshuffle" => moved,
        "unfold" | "fold" => windows,
        "interpolate" => resized,
        "pad" if call.attrs.str_or("mode", "constant") != "constant" => margins,
        _ => return None,
    };
    one(call.var("input").and_then(|x| f(call, x)))
}

fn moved(call: &Call<'_>, x: &Var) -> Result<Var> {
    let attrs = call.attrs;
    match call.op {
        "diag" => x.diag(attrs.int_or("diagonal", 0) as isize),
        "diag_embed" => {
            let (a, b) = (attrs.int_or("dim1", -2), attrs.int_or("dim2", -1));
            x.diag_embed(attrs.int_or("offset", 0) as isize, a, b)
        }
        "rot90" => x.rot90(attrs.int_or("k", 1) as isize, &attrs.ints("dims").unwrap_or(vec![0, 1])),
        "movedim" => {
            let list = |name: &str| attrs.ints(name).unwrap_or_default();
            x.movedim(&list("source"), &list("destination"))
        }
        "tile" => x.tile(&attrs.sizes("dims").unwrap_or_default()),
        "pixel_shuffle" => x.pixel_shuffle(call.int("upscale_factor")? as usize),
        _ => x.pixel_unshuffle(call.int("downscale_factor")? as usize),
    }
}

fn meshgrid(call: &Call<'_>) -> Result<Vec<Var>> {
    let xy = call.attrs.str_or("indexing", "ij") == "xy";
    Var::meshgrid(&call.list("tensors"), if xy { MeshIndexing::Xy } else { MeshIndexing::Ij })
}

fn constant(call: &Call<'_>) -> Result<Var> {
    let dtype = DType::parse(call.attrs.str_or("dtype", "f32"));
    let dtype = dtype.ok_or_else(|| Error::Custom("the dtype is unknown".into()))?;
    if call.op == "eye" {
        let rows = call.int("n")?;
        return Var::eye(rows as usize, call.attrs.int_or("m", rows) as usize, dtype, Device::CPU);
    }
    let bound = |name: &str| call.attrs.float_or(name, 0.0);
    Var::linspace(bound("start"), bound("end"), call.int("steps")? as usize, dtype, Device::CPU)
}

fn windows(call: &Call<'_>, x: &Var) -> Result<Var> {
    let options = FoldOptions {
        kernel: pair(call, "kernel_size", 0)?,
        stride: pair(call, "stride", 1)?,
        padding: pair(call, "padding", 0)?,
        dilation: pair(call, "dilation", 1)?,
    };
    if call.op == "unfold" { x.unfold(&options) } else { x.fold(pair(call, "output_size", 0)?, &options) }
}

fn margins(call: &Call<'_>, x: &Var) -> Result<Var> {
    let mode = match call.attrs.str_or("mode", "constant") {
        "reflect" => PadMode::Reflect,
        "replicate" => PadMode::Replicate,
        "circular" => PadMode::Circular,
        other => return Err(call.refuse(format!("mode = {other}"))),
    };
    call.attrs.get("value");
    let pad = call.attrs.ints("pad").unwrap_or_default();
    let margins: Vec<_> = pad.chunks(2).map(|pair| (pair[0] as isize, pair[1] as isize)).collect();
    x.pad_mode(&margins, mode)
}

fn resized(call: &Call<'_>, x: &Var) -> Result<Var> {
    use InterpolateMode as Mode;
    let mode = match call.attrs.str_or("mode", "nearest") {
        "nearest" => Mode::Nearest,
        "nearest-exact" => Mode::NearestExact,
        "linear" => Mode::Linear,
        "bilinear" => Mode::Bilinear,
        "trilinear" => Mode::Trilinear,
        "bicubic" => Mode::Bicubic,
        "area" => Mode::Area,
        other => return Err(call.refuse(format!("mode = {other}"))),
    };
    let options = match call.attrs.sizes("size") {
        Some(size) => Interpolate::to_size(&size, mode),
        None => {
            let one = || call.attrs.float("scale_factor").map(|factor| vec![factor]);
            let factors = call.attrs.floats("scale_factor").or_else(one).unwrap_or_default();
            if call.attrs.bool_or("recompute_scale_factor", false) {
                let size = |(i, &n): (usize, &usize)| (n as f64 * factors[i.min(factors.len() - 1)]) as usize;
                let sizes: Vec<usize> = x.shape()[2..].iter().enumerate().map(size).collect();
                Interpolate::to_size(&sizes, mode)
            } else {
                Interpolate::by_scale(&factors, mode)
            }
        }
    };
    x.interpolate(&options.with_align_corners(call.attrs.bool_or("align_corners", false)))
}
