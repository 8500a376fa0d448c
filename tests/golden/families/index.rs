//! Elements and rows by index: gathers, scatters, masks, nonzero, repeats, bags of rows.

use phalanx::autograd::ops::{BagMode, EmbeddingBagOptions};
use phalanx::autograd::{Error, Result};
use phalanx::{DType, Var};

use super::{Call, one};

/// The index family.
pub fn rows(call: &Call<'_>) -> Option<Result<Vec<Var>>> {
    match call.op {
        "gather" | "index_select" | "scatter_add" | "index_add" | "embedding" => one(pick(call)),
        _ => None,
    }
}

fn pick(call: &Call<'_>) -> Result<Var> {
    let x = call.var("input")?;
    if call.op == "embedding" {
        let padding = call.attrs.int("padding_idx").map(|row| row as isize);
        return call.var("weight")?.embedding(x, padding);
    }
    let (dim, index) = (call.int("dim")?, call.var("index")?);
    match call.op {
        "gather" => x.gather(dim, index),
        "index_select" => x.index_select(dim, index),
        "scatter_add" => x.scatter_add(dim, index, call.var("src")?),
        _ => x.index_add(dim, index, call.var("source")?, call.attrs.float_or("alpha", 1.0)),
    }
}

/// The family of indices and masks.
pub fn masks(call: &Call<'_>) -> Option<Result<Vec<Var>>> {
    match call.op {
        "where_indices" => Some(call.var("condition").and_then(Var::where_indices)),
        "index" | "index_put" | "masked_select" | "nonzero" | "take_along_dim" | "repeat_interleave"
        | "embedding_bag" => one(more_pick(call)),
        _ => None,
    }
}

/// Whether the result's size depends on the inputs' values, so that `meta` must return an error.
pub fn shaped_by_data(call: &Call<'_>) -> bool {
    let masked = || call.list("indices").iter().any(|index| index.dtype() == DType::Bool);
    match call.op {
        "nonzero" | "where_indices" | "masked_select" => true,
        "index" => masked(),
        "index_put" => masked() && call.opt("values").is_some_and(|values| values.numel() != 1),
        "repeat_interleave" => call.opt("repeats").is_some(),
        _ => false,
    }
}

fn more_pick(call: &Call<'_>) -> Result<Var> {
    let x = call.var("input")?;
    let dim = call.attrs.int("dim").map(|dim| dim as isize);
    match call.op {
        "index" => x.index(&call.list("indices").iter().collect::<Vec<_>>()),
        "index_put" => {
            let accumulate = call.attrs.bool_or("accumulate", false);
            x.index_put(&call.list("indices").iter().collect::<Vec<_>>(), call.var("values")?, accumulate)
        }
        "masked_select" => x.masked_select(call.var("mask")?),
        "nonzero" => x.nonzero(),
        "take_along_dim" => x.take_along_dim(call.var("indices")?, dim),
        "repeat_interleave" => match call.opt("repeats") {
            Some(repeats) => x.repeat_interleave_each(repeats, dim),
            None => x.repeat_interleave(call.int("repeats")? as usize, dim),
        },
        _ => bag(call, x),
    }
}

fn bag(call: &Call<'_>, index: &Var) -> Result<Var> {
    let mode = match call.attrs.str_or("mode", "mean") {
        "sum" => BagMode::Sum,
        "mean" => BagMode::Mean,
        "max" => BagMode::Max,
        other => return Err(Error::Custom(format!("mode {other} is unknown"))),
    };
    let options = EmbeddingBagOptions {
        mode,
        offsets: call.opt("offsets").cloned(),
        weights: call.opt("per_sample_weights").cloned(),
        padding: call.attrs.int("padding_idx").map(|row| row as isize),
    };
    call.var("weight")?.embedding_bag(index, &options)
}
