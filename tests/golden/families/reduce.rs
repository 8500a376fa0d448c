//! Reductions over dimensions, and orders and running sums along one.

use phalanx::Var;
use phalanx::autograd::Result;

use super::{Call, one};

/// The reductions and scans.
pub fn run(call: &Call<'_>) -> Option<Result<Vec<Var>>> {
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
