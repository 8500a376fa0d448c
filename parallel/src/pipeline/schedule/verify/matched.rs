//! Whether every rank receives what others send to it, in their order.

use std::collections::BTreeMap;

use super::super::{Action, Error, Result, Schedule, Transfer};

/// One end of a transfer: rank, position, action.
type End = (usize, usize, Action);

/// What one rank sends to another, and what that one receives, each in order.
#[derive(Default)]
struct Pair {
    sends: Vec<(Transfer, End)>,
    receives: Vec<(Transfer, End)>,
}

pub(super) fn check(schedule: &Schedule) -> Result<()> {
    let mut pairs: BTreeMap<(usize, usize), Pair> = BTreeMap::new();
    for (rank, actions) in schedule.ranks.iter().enumerate() {
        for (position, &action) in actions.iter().enumerate() {
            let Some(transfer) = schedule.transfer(action) else { continue };
            let place = |stage: usize| schedule.placement[stage];
            let pair = pairs.entry((place(transfer.from), place(transfer.to))).or_default();
            let list = if action == transfer.send() { &mut pair.sends } else { &mut pair.receives };
            list.push((transfer, (rank, position, action)));
        }
    }
    pairs.into_iter().try_for_each(|((from, to), pair)| in_order(from, to, &pair))
}

fn in_order(from: usize, to: usize, pair: &Pair) -> Result<()> {
    let wrong = |&(_, (rank, position, action)): &(Transfer, End), why| {
        Err(Error::Action { rank, position, action, why })
    };
    for (send, receive) in pair.sends.iter().zip(&pair.receives) {
        if send.0 != receive.0 {
            return wrong(receive, format!("rank {from} sends {} at this point", send.0.send()));
        }
    }
    let count = pair.sends.len().min(pair.receives.len());
    match (pair.sends.get(count), pair.receives.get(count)) {
        (Some(send), _) => wrong(send, format!("rank {to} does not receive it")),
        (_, Some(receive)) => wrong(receive, format!("rank {from} does not send it")),
        (None, None) => Ok(()),
    }
}
