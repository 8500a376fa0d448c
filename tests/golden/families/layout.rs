//! Views and copies: shapes, parts, joins, orders, margins, triangles.

use phalanx::Var;
use phalanx::autograd::Result;

use super::{Call, one};

/// The layout family.
pub fn run(call: &Call<'_>) -> Option<Result<Vec<Var>>> {
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
