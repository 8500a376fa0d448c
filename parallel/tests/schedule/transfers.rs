//! Sends and receives.

use std::collections::HashMap;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::Duration;

use phalanx_parallel::pipeline::schedule::{
    Kind, NAMES, Schedule, Transfer, by_name, gpipe, one_f_one_b, verify, with_transfers, zb_v,
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
                    Kind::SendForward | Kind::SendBackward => {
                        let transfer = schedule.transfer(action).unwrap();
                        senders[&(rank, schedule.placement[transfer.to])].send(transfer).unwrap();
                    }
                    Kind::RecvForward | Kind::RecvBackward => {
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
