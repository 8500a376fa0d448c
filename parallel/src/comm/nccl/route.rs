//! [`route`]: what one rank does for a call, step by step. Pure.
//!
//! It follows the same plan as the wires ([`plan`]): ranks give their parts of a share to its owner, who adds them in order of
//! the ranks, and gives the sum to those who want it. What is given is added in rounds, so that the owner needs room for
//! a bounded part of it only. Where nothing is added, and everybody gets the same, NCCL's own broadcast and
//! gathering do the last step: they know how the GPUs are connected.

use std::ops::Range;

use crate::comm::plan::{Place, Side, Transfer, plan};
use crate::comm::{Kind, Reduction, Signature};

use super::Sums;

/// Bytes of room for what is given to an owner.
const ROOM_BYTES: usize = 64 << 20;
/// Elements of a round are a multiple of this, so that rounds begin where packets do.
const ROUND: usize = 64;

/// One thing after the other.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// Messages that go at the same time.
    Exchange(Vec<Message>),
    /// This rank's elements of `own` and those in the room become `out`.
    Combine { own: (Side, Range<usize>), out: Range<usize>, by: Reduction },
    /// NCCL's own collective.
    Whole(Whole),
}

/// Elements to or from a rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Message {
    Send {
        from: Side,
        range: Range<usize>,
        to: usize,
    },
    /// Into the output.
    Receive {
        range: Range<usize>,
        from: usize,
    },
    /// Into the room.
    Given {
        range: Range<usize>,
        from: usize,
    },
}

/// What NCCL does as a whole. All but gathering is in place, in the output.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Whole {
    Broadcast { root: usize, count: usize },
    AllGather { own: (Side, usize), count: usize },
    AllReduce { by: Reduction, count: usize },
    ReduceScatter { by: Reduction, count: usize },
    Reduce { by: Reduction, root: usize, count: usize },
}

/// The steps of rank `me` of `size`. `in_place`: its input is in the output already.
pub(super) fn route(
    signature: &Signature,
    (me, size): (usize, usize),
    in_place: bool,
    sums: Sums,
) -> Vec<Step> {
    let Signature { kind, counts, by, .. } = signature;
    let (first, total) = (counts.first().copied().unwrap_or(0), counts.iter().sum::<usize>());
    let even = counts.iter().all(|&count| count == first);
    let root = signature.root.unwrap_or(0);
    let whole = match (kind, *by) {
        _ if total == 0 => None,
        (Kind::Broadcast, _) => Some(Whole::Broadcast { root, count: total }),
        (Kind::AllGather, _) if even => Some(gather(in_place, me, first)),
        (Kind::AllReduce, Some(by)) if sums == Sums::Library => Some(Whole::AllReduce { by, count: total }),
        (Kind::ReduceScatter, Some(by)) if sums == Sums::Library && even => {
            Some(Whole::ReduceScatter { by, count: first })
        }
        (Kind::Reduce, Some(by)) if sums == Sums::Library => Some(Whole::Reduce { by, root, count: total }),
        _ => None,
    };
    if let Some(whole) = whole {
        return vec![Step::Whole(whole)];
    }
    let transfers = transfers(signature, me, size, in_place);
    let mut steps = rounds(&transfers, signature, (me, size));
    match (kind, total % size) {
        (Kind::AllReduce, 0) if total > 0 => {
            let count = total / size;
            steps.push(Step::Whole(Whole::AllGather { own: (Side::Output, me * count), count }));
        }
        _ => steps.extend(results(&transfers, me)),
    }
    steps
}

fn gather(in_place: bool, me: usize, count: usize) -> Whole {
    let own = if in_place { (Side::Output, me * count) } else { (Side::Input, 0) };
    Whole::AllGather { own, count }
}

/// The call's transfers; of those that are not this rank's, an all-to-all has none.
fn transfers(signature: &Signature, me: usize, size: usize, in_place: bool) -> Vec<Transfer> {
    let Signature { kind: Kind::AllToAll, counts, wanted, .. } = signature else {
        let here = Signature { on_gpus: false, ..signature.clone() };
        return plan(&vec![&here; size], &vec![in_place; size]);
    };
    let place = |rank, side, range: Range<usize>| vec![Place { rank, side, range }];
    let (sent, wanted) = (crate::comm::plan::ranges(counts), crate::comm::plan::ranges(wanted));
    let to = |q: usize| {
        let dest = if q == me { wanted[me].clone() } else { 0..sent[q].len() };
        let sources = place(me, Side::Input, sent[q].clone());
        Transfer { owner: me, sources, dests: place(q, Side::Output, dest) }
    };
    let from = |q: usize| {
        let sources = place(q, Side::Input, 0..wanted[q].len());
        Transfer { owner: q, sources, dests: place(me, Side::Output, wanted[q].clone()) }
    };
    (0..size).map(to).chain((0..size).filter(|&q| q != me).map(from)).collect()
}

/// The reductions, until each owner has its sum in its output.
fn rounds(transfers: &[Transfer], signature: &Signature, (me, size): (usize, usize)) -> Vec<Step> {
    let Some(by) = signature.by.filter(|_| size > 1) else { return vec![] };
    let bytes = signature.dtype.map_or(1, |dtype| dtype.size());
    let step = (ROOM_BYTES / bytes / (size - 1) / ROUND).max(1) * ROUND;
    let longest = transfers.iter().map(|t| t.dests[0].range.len()).max().unwrap_or(0);
    let mut steps = vec![];
    for start in (0..longest).step_by(step) {
        let part = |range: &Range<usize>| {
            let end = range.len().min(start + step);
            range.start + start.min(end)..range.start + end
        };
        let (mut messages, mut combine) = (vec![], None);
        for Transfer { owner, sources, dests } in transfers {
            let Some(own) = sources.iter().find(|source| source.rank == me) else { continue };
            let range = part(&own.range);
            if range.is_empty() {
                continue;
            }
            if *owner != me {
                messages.push(Message::Send { from: own.side, range, to: *owner });
                continue;
            }
            let others = sources.iter().filter(|source| source.rank != me).enumerate();
            messages.extend(others.map(|(i, source)| Message::Given {
                range: i * range.len()..(i + 1) * range.len(),
                from: source.rank,
            }));
            let out = dests.iter().find(|dest| dest.rank == me).map(|dest| part(&dest.range));
            combine = out.map(|out| Step::Combine { own: (own.side, range), out, by });
        }
        if !messages.is_empty() {
            steps.push(Step::Exchange(messages));
        }
        steps.extend(combine);
    }
    steps
}

/// From the owners to those who want it.
fn results(transfers: &[Transfer], me: usize) -> Option<Step> {
    let mut messages = vec![];
    for Transfer { owner, sources, dests } in transfers {
        for dest in dests.iter().filter(|dest| !dest.range.is_empty()) {
            if *owner == me {
                // What was combined lies in the owner's own output.
                let combined = dests.iter().find(|dest| dest.rank == me).filter(|_| sources.len() > 1);
                let from = combined.or(sources.first());
                let Some(Place { side, range, .. }) = from.filter(|from| *from != dest) else { continue };
                messages.push(Message::Send { from: *side, range: range.clone(), to: dest.rank });
            }
            if dest.rank == me && !(*owner == me && (sources.len() > 1 || sources.first() == Some(dest))) {
                messages.push(Message::Receive { range: dest.range.clone(), from: *owner });
            }
        }
    }
    (!messages.is_empty()).then_some(Step::Exchange(messages))
}

#[cfg(test)]
mod tests;
