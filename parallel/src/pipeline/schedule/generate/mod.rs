//! Schedules from a number of ranks and of micro-batches: pure functions, one a file, for any of both from 1 up.

mod gpipe;
mod interleaved;
mod one_f_one_b;
mod zb_h1;
mod zb_h2;
mod zb_v;

pub use gpipe::gpipe;
pub use interleaved::interleaved;
pub use one_f_one_b::one_f_one_b;
pub use zb_h1::zb_h1;
pub use zb_h2::zb_h2;
pub use zb_v::zb_v;

use super::{Action, Error, Kind, Result, Schedule};

/// The names that [`by_name`] knows.
pub const NAMES: [&str; 6] = ["gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v"];

/// The schedule of a name, one of [`NAMES`]. `chunks` is how many stages a rank has: of `interleaved` any number, of `zb-v`
/// always two, of the others one; these two take no notice of it.
///
/// # Errors
/// For any other name, and if a number is 0.
pub fn by_name(name: &str, ranks: usize, chunks: usize, micro_batches: usize) -> Result<Schedule> {
    match name {
        "gpipe" => gpipe(ranks, micro_batches),
        "1f1b" => one_f_one_b(ranks, micro_batches),
        "interleaved" => interleaved(ranks, chunks, micro_batches),
        "zb-h1" => zb_h1(ranks, micro_batches),
        "zb-h2" => zb_h2(ranks, micro_batches),
        "zb-v" => zb_v(ranks, micro_batches),
        other => Err(Error::Invalid {
            op: "schedule",
            got: format!("{other:?}"),
            wanted: "gpipe, 1f1b, interleaved, zb-h1, zb-h2 or zb-v",
        }),
    }
}

/// A stage and a micro-batch.
type Cell = (usize, usize);

/// The backward passes of a rank, in one piece or in two.
#[derive(Clone, Copy)]
enum Backward {
    /// `B`.
    Whole,
    /// `I`, and that many of them later its `W`.
    Split { delay: usize },
}

/// A rank's list: `warm_up` forward passes, then a backward after each further forward, then the other backward passes, at
/// the end the `W`s that are left.
fn alternate(forwards: &[Cell], backwards: &[Cell], warm_up: usize, backward: Backward) -> Vec<Action> {
    let act = |kind, (stage, micro_batch): Cell| Action::new(stage, kind, micro_batch);
    let (first, rest) = forwards.split_at(warm_up.min(forwards.len()));
    let mut actions: Vec<Action> = first.iter().map(|&f| act(Kind::Forward, f)).collect();
    let mut rest = rest.iter();
    for (i, &b) in backwards.iter().enumerate() {
        actions.extend(rest.next().map(|&f| act(Kind::Forward, f)));
        match backward {
            Backward::Whole => actions.push(act(Kind::Backward, b)),
            Backward::Split { delay } => {
                actions.push(act(Kind::Input, b));
                actions.extend(i.checked_sub(delay).map(|done| act(Kind::Weight, backwards[done])));
            }
        }
    }
    if let Backward::Split { delay } = backward {
        let left = backwards.len().saturating_sub(delay);
        actions.extend(backwards[left..].iter().map(|&b| act(Kind::Weight, b)));
    }
    actions
}

/// A schedule of one stage a rank: `warm_up` and `backward` of each.
fn one_stage_each(
    op: &'static str,
    ranks: usize,
    micro_batches: usize,
    plan: impl Fn(usize) -> (usize, Backward),
) -> Result<Schedule> {
    check(op, &[("ranks", ranks), ("micro-batches", micro_batches)])?;
    let list = |rank| {
        let cells: Vec<Cell> = (0..micro_batches).map(|micro_batch| (rank, micro_batch)).collect();
        let (warm_up, backward) = plan(rank);
        alternate(&cells, &cells, warm_up, backward)
    };
    Ok(Schedule { placement: (0..ranks).collect(), micro_batches, ranks: (0..ranks).map(list).collect() })
}

/// Refuses numbers that are 0.
fn check(op: &'static str, numbers: &[(&str, usize)]) -> Result<()> {
    match numbers.iter().find(|&&(_, number)| number == 0) {
        Some((what, _)) => Err(Error::Invalid { op, got: format!("0 {what}"), wanted: "at least 1" }),
        None => Ok(()),
    }
}
