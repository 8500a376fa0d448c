//! When a sender can be sure.

use std::collections::HashMap;

use phalanx_parallel::pipeline::schedule::{
    Action, NAMES, Schedule, by_name, gpipe, one_f_one_b, receipts, with_transfers,
};

fn told(schedule: &Schedule, rank: usize) -> Vec<(String, String)> {
    let known = receipts(schedule).unwrap().swap_remove(rank);
    let mut known: Vec<(Action, Option<Action>)> = known.into_iter().collect();
    known.sort();
    known
        .into_iter()
        .map(|(send, by)| (send.to_string(), by.map_or("end".into(), |by| by.to_string())))
        .collect()
}

fn pairs(pairs: &[(&str, &str)]) -> Vec<(String, String)> {
    pairs.iter().map(|(send, by)| (send.to_string(), by.to_string())).collect()
}

#[test]
fn a_gradient_says_that_its_output_has_come_and_all_before() {
    let schedule = with_transfers(&gpipe(2, 2).unwrap()).unwrap();
    assert_eq!(told(&schedule, 0), pairs(&[("0SEND_F0", "0RECV_B0"), ("0SEND_F1", "0RECV_B0")]));
    assert_eq!(told(&schedule, 1), pairs(&[("1SEND_B0", "end"), ("1SEND_B1", "end")]));
    let schedule = with_transfers(&one_f_one_b(2, 3).unwrap()).unwrap();
    let wanted = [("0SEND_F0", "0RECV_B0"), ("0SEND_F1", "0RECV_B0"), ("0SEND_F2", "0RECV_B1")];
    assert_eq!(told(&schedule, 0), pairs(&wanted));
    assert_eq!(
        told(&schedule, 1),
        pairs(&[("1SEND_B0", "1RECV_F2"), ("1SEND_B1", "end"), ("1SEND_B2", "end")])
    );
}

/// The slow way: a send may be late unless the schedule has no order in which it is received after `by`.
fn certain(schedule: &Schedule, rank: usize, send: Action, by: Action) -> bool {
    let transfer = schedule.transfer(send).unwrap();
    let receiver = schedule.placement[transfer.to];
    // Everything goes on but the receiver, which stops before it receives.
    let stop = schedule.ranks[receiver].iter().position(|a| *a == transfer.receive()).unwrap();
    let mut next = vec![0; schedule.ranks.len()];
    let mut sent: HashMap<Action, bool> = HashMap::new();
    loop {
        let mut moved = false;
        for (r, next) in next.iter_mut().enumerate() {
            let end = if r == receiver { stop } else { schedule.ranks[r].len() };
            while *next < end {
                let action = schedule.ranks[r][*next];
                let receives = schedule.transfer(action).filter(|t| t.receive() == action);
                if receives.is_some_and(|t| !sent.contains_key(&t.send())) {
                    break;
                }
                sent.insert(action, true);
                *next += 1;
                moved = true;
            }
        }
        if !moved {
            return !schedule.ranks[rank][..next[rank]].contains(&by);
        }
    }
}

#[test]
fn nothing_is_released_while_it_may_be_waited_for_or_held_longer() {
    for name in NAMES {
        for (ranks, micro_batches) in [(1, 2), (2, 3), (3, 5), (4, 4)] {
            let schedule = with_transfers(&by_name(name, ranks, 2, micro_batches).unwrap()).unwrap();
            for (rank, known) in receipts(&schedule).unwrap().into_iter().enumerate() {
                for (send, by) in known {
                    let list = &schedule.ranks[rank];
                    let first = list.iter().copied().find(|&by| certain(&schedule, rank, send, by));
                    let is_after = |a: Action| list.iter().position(|b| *b == a).unwrap();
                    let after = first.filter(|&first| is_after(first) > is_after(send));
                    assert_eq!(by, after, "{name}, {ranks} ranks, {micro_batches}: {send}");
                }
            }
        }
    }
}

#[test]
fn a_schedule_without_transfers_is_refused() {
    let error = receipts(&one_f_one_b(2, 2).unwrap()).unwrap_err().to_string();
    assert_eq!(error, "receipts: got a schedule without transfers, wanted one with transfers");
}
