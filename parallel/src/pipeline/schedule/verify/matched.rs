//! Whether every rank receives what others send to it, in their order.

use std::collections::BTreeMap;

use super::super::{Action, Error, Kind, Result, Schedule, Transfer};

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
            let sends = matches!(action.kind, Kind::SendForward | Kind::SendBackward);
            let transfer = if sends { schedule.output(action) } else { schedule.input(action) };
            let Some(transfer) = transfer.filter(|_| action.kind.is_transfer()) else { continue };
            let pair = pairs.entry((schedule.placement[transfer.from], schedule.placement[transfer.to]));
            let Pair { sends: sent, receives } = pair.or_default();
            let list = if sends { sent } else { receives };
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
