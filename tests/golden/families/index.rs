//! Elements and rows by index.

use phalanx::Var;
use phalanx::autograd::Result;

use super::{Call, one};

/// The index family.
pub fn run(call: &Call<'_>) -> Option<Result<Vec<Var>>> {
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
