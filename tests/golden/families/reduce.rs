//! Reductions, orders and running values along dimensions; distances and products of vectors and matrices.

use phalanx::Var;
use phalanx::autograd::{Error, Result};

use super::{Call, one};

/// The reductions and scans.
pub fn reductions(call: &Call<'_>) -> Option<Result<Vec<Var>>> {
    match call.op {
        "sum" | "mean" | "var" | "amax" | "amin" | "logsumexp" | "norm" => {
            one(call.var("input").and_then(|x| over_dims(call, x)))
        }
        "prod" | "argmax" | "argmin" | "cumsum" => one(call.var("input").and_then(|x| over_dim(call, x))),
        "max" | "min" | "sort" | "topk" => Some(call.var("input").and_then(|x| picked(call, x))),
        _ => None,
    }
}

/// All dimensions where none is named.
fn over_dims(call: &Call<'_>, x: &Var) -> Result<Var> {
    let dims = call.attrs.ints("dim").unwrap_or_else(|| (0..x.rank() as i64).collect());
    let keepdim = call.attrs.bool_or("keepdim", false);
    match call.op {
        "sum" => x.sum(&dims, keepdim),
        "mean" => x.mean(&dims, keepdim),
        "var" => x.var(&dims, call.attrs.float_or("correction", 1.0), keepdim),
        "amax" => x.amax(&dims, keepdim),
        "amin" => x.amin(&dims, keepdim),
        "logsumexp" => x.logsumexp(&dims, keepdim),
        _ => {
            let infinite = call.attrs.str_or("p", "") == "inf";
            let p = if infinite { f64::INFINITY } else { call.attrs.float_or("p", 2.0) };
            x.norm(p, &dims, keepdim)
        }
    }
}

fn over_dim(call: &Call<'_>, x: &Var) -> Result<Var> {
    let (dim, keepdim) = (call.attrs.int("dim"), call.attrs.bool_or("keepdim", false));
    match (call.op, dim) {
        ("prod", Some(dim)) => x.prod(dim, keepdim),
        ("prod", None) => x.prod_all(),
        ("argmax", dim) => x.argmax(dim.map(|d| d as isize), keepdim),
        ("argmin", dim) => x.argmin(dim.map(|d| d as isize), keepdim),
        (_, dim) => x.cumsum(dim.unwrap_or(0)),
    }
}

fn picked(call: &Call<'_>, x: &Var) -> Result<Vec<Var>> {
    let dim = call.attrs.int("dim");
    let keepdim = call.attrs.bool_or("keepdim", false);
    let (values, indices) = match (call.op, dim) {
        ("max", None) => return Ok(vec![x.max_all()?]),
        ("min", None) => return Ok(vec![x.min_all()?]),
        ("max", Some(dim)) => x.max(dim, keepdim)?,
        ("min", Some(dim)) => x.min(dim, keepdim)?,
        ("sort", dim) => {
            call.attrs.bool_or("stable", true);
            x.sort(dim.unwrap_or(-1), call.attrs.bool_or("descending", false))?
        }
        _ => {
            call.attrs.bool_or("sorted", true);
            x.topk(call.int("k")? as usize, dim.unwrap_or(-1), call.attrs.bool_or("largest", true))?
        }
    };
    Ok(vec![values, indices])
}

/// The families of this file.
pub fn further(call: &Call<'_>) -> Option<Result<Vec<Var>>> {
    match call.op {
        "std" | "any" | "all" | "count_nonzero" | "nansum" | "trace" | "quantile" | "histc" | "bincount" => {
            one(call.var("input").and_then(|x| reduced(call, x)))
        }
        "cumprod" | "logcumsumexp" | "diff" => one(call.var("input").and_then(|x| running(call, x))),
        "median" | "kthvalue" | "cummax" | "cummin" | "unique" => {
            Some(call.var("input").and_then(|x| more_picked(call, x)))
        }
        "searchsorted" => {
            let right = call.attrs.bool_or("right", false) || call.attrs.str_or("side", "left") == "right";
            one(call.var("sorted_sequence").and_then(|s| s.searchsorted(call.var("input")?, right)))
        }
        "cosine_similarity" | "cdist" => one(distance(call)),
        "dot" | "mv" | "bmm" | "outer" | "kron" | "cross" => {
            one(call.var("input").and_then(|x| product(call, x)))
        }
        "addmm" | "baddbmm" => one(call.var("input").and_then(|x| sum_of_products(call, x))),
        "bilinear" => one(bilinear(call)),
        _ => None,
    }
}

fn reduced(call: &Call<'_>, x: &Var) -> Result<Var> {
    let attrs = call.attrs;
    if call.op == "quantile" {
        let (dim, keepdim) = (attrs.int("dim").map(|d| d as isize), attrs.bool_or("keepdim", false));
        return match (attrs.float("q"), attrs.floats("q")) {
            (Some(q), _) => x.quantile(q, dim, keepdim),
            (None, Some(q)) => x.quantiles(&q, dim, keepdim),
            (None, None) => Err(Error::Custom("the case has no q".into())),
        };
    }
    let dims = || attrs.ints("dim").unwrap_or_else(|| (0..x.rank() as i64).collect());
    let keepdim = || attrs.bool_or("keepdim", false);
    match call.op {
        "std" => x.std(&dims(), attrs.float_or("correction", 1.0), keepdim()),
        "any" => x.any(&dims(), keepdim()),
        "all" => x.all(&dims(), keepdim()),
        "count_nonzero" => x.count_nonzero(&dims()),
        "nansum" => x.nansum(&dims(), keepdim()),
        "trace" => x.trace(),
        "histc" => x.histc(
            attrs.int_or("bins", 100) as usize,
            attrs.float_or("min", 0.0),
            attrs.float_or("max", 0.0),
        ),
        _ => {
            let minlength = attrs.int_or("minlength", 0) as usize;
            call.opt("weights").map_or_else(|| x.bincount(minlength), |w| x.bincount_weighted(w, minlength))
        }
    }
}

fn running(call: &Call<'_>, x: &Var) -> Result<Var> {
    match call.op {
        "cumprod" => x.cumprod(call.int("dim")?),
        "logcumsumexp" => x.logcumsumexp(call.int("dim")?),
        _ => x.diff(call.attrs.int_or("n", 1) as usize, call.attrs.int_or("dim", -1)),
    }
}

/// Values with indices, or with more.
fn more_picked(call: &Call<'_>, x: &Var) -> Result<Vec<Var>> {
    let (dim, keepdim) = (call.attrs.int("dim"), call.attrs.bool_or("keepdim", false));
    let (values, indices) = match (call.op, dim) {
        ("unique", _) => {
            for name in ["sorted", "return_inverse", "return_counts"] {
                call.attrs.bool_or(name, true);
            }
            let (values, inverse, counts) = x.unique()?;
            return Ok(vec![values, inverse, counts]);
        }
        ("median", None) => return Ok(vec![x.median_all()?]),
        ("median", Some(dim)) => x.median(dim, keepdim)?,
        ("kthvalue", dim) => x.kthvalue(call.int("k")? as usize, dim.unwrap_or(-1), keepdim)?,
        ("cummax", _) => x.cummax(call.int("dim")?)?,
        _ => x.cummin(call.int("dim")?)?,
    };
    Ok(vec![values, indices])
}

fn distance(call: &Call<'_>) -> Result<Var> {
    let (a, b, attrs) = (call.var("x1")?, call.var("x2")?, call.attrs);
    match (call.op, attrs.str_or("p", "")) {
        ("cdist", "inf") => a.cdist(b, f64::INFINITY),
        ("cdist", _) => a.cdist(b, attrs.float_or("p", 2.0)),
        _ => a.cosine_similarity(b, attrs.int_or("dim", 1), attrs.float_or("eps", 1e-8)),
    }
}

fn product(call: &Call<'_>, x: &Var) -> Result<Var> {
    match call.op {
        "dot" => x.dot(call.var("tensor")?),
        "mv" => x.mv(call.var("vec")?),
        "bmm" => x.bmm(call.var("mat2")?),
        "outer" => x.outer(call.var("vec2")?),
        "kron" => x.kron(call.var("other")?),
        _ => x.cross(call.var("other")?, call.attrs.int("dim").map(|d| d as isize)),
    }
}

fn sum_of_products(call: &Call<'_>, x: &Var) -> Result<Var> {
    let (beta, alpha) = (call.attrs.float_or("beta", 1.0), call.attrs.float_or("alpha", 1.0));
    match call.op {
        "addmm" => x.addmm(call.var("mat1")?, call.var("mat2")?, beta, alpha),
        _ => x.baddbmm(call.var("batch1")?, call.var("batch2")?, beta, alpha),
    }
}

fn bilinear(call: &Call<'_>) -> Result<Var> {
    call.var("input1")?.bilinear(call.var("input2")?, call.var("weight")?, call.opt("bias"))
}
