//! Choices between elements, bounds, conversions.

use phalanx::autograd::{Error, Result};
use phalanx::{DType, Var};

use super::{Call, one};

/// The family of `where`, `clamp`, `masked_fill` and `to`.
pub fn run(call: &Call<'_>) -> Option<Result<Vec<Var>>> {
    match call.op {
        "where" | "clamp" | "masked_fill" | "to" => one(choose(call)),
        _ => None,
    }
}

fn choose(call: &Call<'_>) -> Result<Var> {
    let (x, attrs) = (call.var("input")?, call.attrs);
    let missing = |name: &str| Error::Custom(format!("the case has no {name}"));
    match call.op {
        "where" => x.where_(call.var("condition")?, call.var("other")?),
        "clamp" => x.clamp(attrs.scalar("min"), attrs.scalar("max")),
        "masked_fill" => {
            x.masked_fill(call.var("mask")?, attrs.scalar("value").ok_or_else(|| missing("value"))?)
        }
        _ => x.to(DType::parse(attrs.str_or("dtype", "")).ok_or_else(|| missing("dtype"))?),
    }
}
