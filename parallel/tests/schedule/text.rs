//! The textual form.

use phalanx_parallel::pipeline::schedule::{Action, Kind, Schedule, one_f_one_b, with_transfers};

fn refused(text: &str) -> String {
    text.parse::<Schedule>().unwrap_err().to_string()
}

#[test]
fn every_kind_of_action_has_a_token() {
    let tokens = Kind::ALL.map(|kind| Action::new(12, kind, 3).to_string());
    assert_eq!(
        tokens,
        ["12F3", "12B3", "12I3", "12W3", "12U3", "12SEND_F3", "12RECV_F3", "12SEND_B3", "12RECV_B3"]
    );
}

#[test]
fn reading_gives_what_was_written() {
    let schedule = with_transfers(&one_f_one_b(3, 4).unwrap()).unwrap();
    assert_eq!(schedule.to_string().parse::<Schedule>().unwrap(), schedule);
}

#[test]
fn commas_and_ranks_without_actions_are_read_too() {
    let schedule: Schedule = "0F0,0F1, 0B0\t0B1\n\n1F0\n".parse().unwrap();
    assert_eq!((schedule.placement.clone(), schedule.micro_batches), (vec![0, 2], 2));
    assert_eq!(schedule.ranks.iter().map(Vec::len).collect::<Vec<_>>(), [4, 0, 1]);
}

#[test]
fn what_cannot_be_read_is_named_with_its_line() {
    assert_eq!(
        refused("0F0\n1F0 F1"),
        "schedule, line 2: got \"F1\", wanted an action such as 2F3, beginning with a stage's number"
    );
    assert_eq!(
        refused("0F0 0X1"),
        "schedule, line 1: got \"0X1\", wanted F, B, I, W, U, SEND_F, RECV_F, SEND_B or RECV_B after the stage"
    );
    assert_eq!(refused("0F"), "schedule, line 1: got \"0F\", wanted a micro-batch's number at the end");
    assert_eq!(
        refused("0F99999"),
        "schedule, line 1: got \"0F99999\", wanted a micro-batch's number at the end"
    );
    assert_eq!(refused("0F0\n0B0"), "schedule, line 2: got \"0B0\", wanted a stage that no line before has");
    assert_eq!(refused("0F0 2F0"), "schedule: got no action of stage 1, wanted every stage up to the last");
}
