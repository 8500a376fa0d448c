//! Sends and receives, and when a sender can be sure that a tensor has been received.

use std::collections::HashMap;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::Duration;

use phalanx_parallel::pipeline::schedule::{
    Action, ActionKind, Costs, NAMES, Schedule, Transfer, acknowledgements, by_name, gpipe, one_f_one_b,
    simulate, verify, with_transfers, zb_v,
};

fn lowered(schedule: Schedule) -> Vec<String> {
    with_transfers(&schedule).unwrap().to_string().lines().map(str::to_string).collect()
}

#[test]
fn sends_come_early_and_receives_late() {
    assert_eq!(
        lowered(gpipe(2, 2).unwrap()),
        [
            "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1",
            "1RECV_F0 1F0 1RECV_F1 1F1 1B0 1SEND_B0 1B1 1SEND_B1",
        ]
    );
}

#[test]
fn a_rank_receives_before_it_sends_where_both_would_send() {
    assert_eq!(
        lowered(one_f_one_b(2, 3).unwrap()),
        [
            "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0F2 0SEND_F2 0RECV_B1 0B1 0RECV_B2 0B2",
            "1RECV_F0 1F0 1B0 1RECV_F1 1SEND_B0 1F1 1B1 1RECV_F2 1SEND_B1 1F2 1B2 1SEND_B2",
        ]
    );
}

#[test]
fn nothing_is_sent_between_stages_of_one_rank() {
    assert_eq!(
        lowered(zb_v(2, 1).unwrap()),
        [
            "0F0 0SEND_F0 3RECV_F0 3F0 3I0 3SEND_B0 3W0 0RECV_B0 0I0 0W0",
            "1RECV_F0 1F0 2F0 2SEND_F0 2RECV_B0 2I0 2W0 1I0 1SEND_B0 1W0",
        ]
    );
}

#[test]
fn a_schedule_with_transfers_or_faults_gets_none() {
    let schedule = with_transfers(&gpipe(2, 1).unwrap()).unwrap();
    let again = with_transfers(&schedule).unwrap_err().to_string();
    assert_eq!(again, "with_transfers: got a schedule with 0SEND_F0, wanted one without transfers");
    let wrong = with_transfers(&"0F0 0B0\n1F0".parse().unwrap()).unwrap_err().to_string();
    assert_eq!(wrong, "rank 1: nothing does 1B0");
}

/// Runs the lists on threads, over channels in which a send waits for its receive.
fn run(schedule: &Schedule) {
    let mut senders: HashMap<(usize, usize), mpsc::SyncSender<Transfer>> = HashMap::new();
    let mut receivers = HashMap::new();
    for (from, to) in (0..schedule.ranks.len()).flat_map(|a| (0..schedule.ranks.len()).map(move |b| (a, b))) {
        let (sender, receiver) = mpsc::sync_channel(0);
        senders.insert((from, to), sender);
        receivers.insert((from, to), receiver);
    }
    let (done, end) = mpsc::channel();
    for rank in 0..schedule.ranks.len() {
        let senders = senders.clone();
        let receivers: HashMap<_, _> = receivers.extract_if(|&(_, to), _| to == rank).collect();
        let (schedule, done) = (schedule.clone(), done.clone());
        thread::spawn(move || {
            for &action in &schedule.ranks[rank] {
                match action.kind {
                    ActionKind::SendForward | ActionKind::SendBackward => {
                        let transfer = schedule.transfer(action).unwrap();
                        senders[&(rank, schedule.placement[transfer.to])].send(transfer).unwrap();
                    }
                    ActionKind::RecvForward | ActionKind::RecvBackward => {
                        let transfer = schedule.transfer(action).unwrap();
                        let got = receivers[&(schedule.placement[transfer.from], rank)].recv().unwrap();
                        assert_eq!(got, transfer);
                    }
                    _ => {}
                }
            }
            done.send(()).unwrap();
        });
    }
    for _ in 0..schedule.ranks.len() {
        let ended = end.recv_timeout(Duration::from_secs(60));
        assert_ne!(ended, Err(RecvTimeoutError::Timeout), "no end:\n{schedule}");
    }
}

#[test]
fn threads_over_channels_without_buffers_come_to_their_ends() {
    for name in NAMES {
        for (ranks, chunks, micro_batches) in [(2, 2, 5), (3, 3, 7), (4, 2, 8), (8, 2, 3), (5, 4, 11)] {
            let schedule = with_transfers(&by_name(name, ranks, chunks, micro_batches).unwrap()).unwrap();
            verify(&schedule, 0).unwrap();
            run(&schedule);
        }
    }
}

/// When the last rank ends if `B` takes 2, other computations 1, transfers nothing, and a receive blocks its rank.
fn makespan(schedule: &Schedule) -> u64 {
    let ranks = schedule.ranks.len();
    let (mut positions, mut clocks, mut sent) = (vec![0; ranks], vec![0; ranks], HashMap::new());
    while (0..ranks).any(|rank| positions[rank] < schedule.ranks[rank].len()) {
        for rank in 0..ranks {
            while let Some(&action) = schedule.ranks[rank].get(positions[rank]) {
                match (action.kind, schedule.transfer(action)) {
                    (ActionKind::SendForward | ActionKind::SendBackward, transfer) => {
                        sent.insert(transfer, clocks[rank]);
                    }
                    (ActionKind::RecvForward | ActionKind::RecvBackward, transfer) => {
                        match sent.get(&transfer) {
                            Some(&time) => clocks[rank] = time.max(clocks[rank]),
                            None => break,
                        }
                    }
                    (kind, _) => clocks[rank] += if kind == ActionKind::Backward { 2 } else { 1 },
                }
                positions[rank] += 1;
            }
        }
    }
    clocks.into_iter().max().unwrap()
}

#[test]
fn receives_that_block_lose_no_time() {
    for name in NAMES {
        for (ranks, chunks, micro_batches) in (1..7).flat_map(|p| (1..14).map(move |m| (p, 1 + m % 3, m))) {
            let schedule = by_name(name, ranks, chunks, micro_batches).unwrap();
            let stages = schedule.stages();
            let costs = Costs {
                backward: vec![2.0; stages],
                forward: vec![1.0; stages],
                input: vec![1.0; stages],
                weight: vec![1.0; stages],
                transfer: vec![0.0; stages - 1],
                activation: vec![1.0; stages],
            };
            let best = simulate(&schedule, &costs).unwrap().makespan();
            let lowered = with_transfers(&schedule).unwrap();
            assert_eq!(
                makespan(&lowered) as f64,
                best,
                "{name}, {ranks} ranks, {micro_batches} micro-batches"
            );
        }
    }
}

fn told(schedule: &Schedule, rank: usize) -> Vec<(String, String)> {
    let known = acknowledgements(schedule).unwrap().swap_remove(rank);
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
            for (rank, known) in acknowledgements(&schedule).unwrap().into_iter().enumerate() {
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
    let error = acknowledgements(&one_f_one_b(2, 2).unwrap()).unwrap_err().to_string();
    assert_eq!(error, "acknowledgements: got a schedule without transfers, wanted one with transfers");
}
