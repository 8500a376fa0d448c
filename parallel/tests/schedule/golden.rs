//! What the generators give, literally, and the textual form.

use phalanx_parallel::pipeline::schedule::{
    Action, ActionKind, NAMES, Schedule, by_name, gpipe, interleaved, one_f_one_b, replicated, verify,
    with_transfers, zb_h1, zb_h2, zb_v,
};

fn same(schedule: Schedule, ranks: &[&str]) {
    assert_eq!(schedule.to_string(), format!("{}\n", ranks.join("\n")));
    verify(&schedule, 0).unwrap();
}

#[test]
fn gpipe_runs_all_forward_passes_then_all_backward_passes_ascending() {
    same(gpipe(2, 3).unwrap(), &["0F0 0F1 0F2 0B0 0B1 0B2", "1F0 1F1 1F2 1B0 1B1 1B2"]);
}

#[test]
fn one_f_one_b_warms_up_with_the_ranks_behind() {
    same(
        one_f_one_b(4, 6).unwrap(),
        &[
            "0F0 0F1 0F2 0F3 0B0 0F4 0B1 0F5 0B2 0B3 0B4 0B5",
            "1F0 1F1 1F2 1B0 1F3 1B1 1F4 1B2 1F5 1B3 1B4 1B5",
            "2F0 2F1 2B0 2F2 2B1 2F3 2B2 2F4 2B3 2F5 2B4 2B5",
            "3F0 3B0 3F1 3B1 3F2 3B2 3F3 3B3 3F4 3B4 3F5 3B5",
        ],
    );
}

#[test]
fn replicas_take_micro_batches_in_turn() {
    let schedule = replicated(&[2, 1], 4).unwrap();
    same(schedule.clone(), &["0F0 0F2 0B0 0B2", "0F1 0F3 0B1 0B3", "1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3"]);
    assert_eq!((schedule.placement.clone(), schedule.replicas.clone()), (vec![0, 2], vec![2]));
    assert_eq!([0, 1, 2].map(|m| schedule.rank_of(0, m).unwrap()), [0, 1, 0]);
    same(
        replicated(&[2, 1, 3], 6).unwrap(),
        &[
            "0F0 0F2 0F4 0B0 0B2 0B4",
            "0F1 0F3 0F5 0B1 0B3 0B5",
            "1F0 1F1 1F2 1F3 1B0 1F4 1B1 1F5 1B2 1B3 1B4 1B5",
            "2F0 2B0 2F3 2B3",
            "2F1 2B1 2F4 2B4",
            "2F2 2B2 2F5 2B5",
        ],
    );
    assert_eq!(replicated(&[1, 1, 1], 4).unwrap(), one_f_one_b(3, 4).unwrap());
    let error = |replicas: &[usize], m| replicated(replicas, m).unwrap_err().to_string();
    assert_eq!(error(&[1, 0], 2), "replicated: got 0 replicas, wanted at least 1");
    assert_eq!(
        error(&[1, 3], 2),
        "replicated: got 2 micro-batches for 3 replicas, wanted at least one for each replica"
    );
}

#[test]
fn fewer_micro_batches_than_ranks_leave_the_warm_up_short() {
    same(one_f_one_b(3, 1).unwrap(), &["0F0 0B0", "1F0 1B0", "2F0 2B0"]);
    same(zb_h1(3, 1).unwrap(), &["0F0 0I0 0W0", "1F0 1I0 1W0", "2F0 2I0 2W0"]);
    same(zb_v(2, 1).unwrap(), &["0F0 3F0 3I0 3W0 0I0 0W0", "1F0 2F0 2I0 2W0 1I0 1W0"]);
}

#[test]
fn interleaved_passes_groups_through_all_stages_of_a_rank() {
    same(
        interleaved(2, 2, 4).unwrap(),
        &[
            "0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 2B2 2B3 0B2 0B3",
            "1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3",
        ],
    );
}

#[test]
fn interleaved_groups_differ_by_one_if_the_micro_batches_do_not_divide() {
    same(
        interleaved(2, 2, 5).unwrap(),
        &[
            "0F0 0F1 0F2 2F0 2F1 2F2 2B0 0F3 2B1 0F4 2B2 2F3 0B0 2F4 0B1 0B2 2B3 2B4 0B3 0B4",
            "1F0 1F1 1F2 3F0 3B0 3F1 3B1 3F2 3B2 1F3 1B0 1F4 1B1 3F3 1B2 3F4 3B3 3B4 1B3 1B4",
        ],
    );
}

#[test]
fn zb_h1_puts_weights_off_by_the_ranks_before() {
    same(
        zb_h1(3, 4).unwrap(),
        &[
            "0F0 0F1 0F2 0I0 0W0 0F3 0I1 0W1 0I2 0W2 0I3 0W3",
            "1F0 1F1 1I0 1F2 1I1 1W0 1F3 1I2 1W1 1I3 1W2 1W3",
            "2F0 2I0 2F1 2I1 2F2 2I2 2W0 2F3 2I3 2W1 2W2 2W3",
        ],
    );
}

#[test]
fn zb_h2_fills_the_beginning_with_forward_passes() {
    same(
        zb_h2(2, 4).unwrap(),
        &[
            "0F0 0F1 0F2 0I0 0W0 0F3 0I1 0W1 0I2 0W2 0I3 0W3",
            "1F0 1I0 1F1 1I1 1F2 1I2 1W0 1F3 1I3 1W1 1W2 1W3",
        ],
    );
}

#[test]
fn zb_v_comes_back_to_the_first_rank() {
    let schedule = zb_v(2, 3).unwrap();
    assert_eq!(schedule.placement, [0, 1, 1, 0]);
    same(
        schedule,
        &[
            "0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0I0 0W0 3F2 3I2 3W2 0I1 0W1 0I2 0W2",
            "1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1I1 2I2 1I2 1W1 2W2 1W2",
        ],
    );
}

#[test]
fn zb_v_leaves_out_what_fewer_micro_batches_do_not_have() {
    let (whole, part) = (zb_v(3, 5).unwrap(), zb_v(3, 2).unwrap());
    let exists = |action: &Action| action.micro_batch < 2;
    let kept: Vec<Vec<Action>> =
        whole.ranks.iter().map(|list| list.iter().copied().filter(exists).collect()).collect();
    assert_eq!(part.ranks, kept);
    same(
        zb_v(2, 2).unwrap(),
        &[
            "0F0 0F1 3F0 3I0 3W0 3F1 3I1 3W1 0I0 0W0 0I1 0W1",
            "1F0 2F0 1F1 2F1 2I0 2W0 1I0 1W0 2I1 2W1 1I1 1W1",
        ],
    );
}

#[test]
fn one_rank_needs_no_schedule() {
    same(one_f_one_b(1, 2).unwrap(), &["0F0 0B0 0F1 0B1"]);
    same(zb_h1(1, 2).unwrap(), &["0F0 0I0 0W0 0F1 0I1 0W1"]);
    same(interleaved(1, 2, 2).unwrap(), &["0F0 1F0 1B0 0F1 0B0 1F1 1B1 0B1"]);
}

#[test]
fn a_schedule_has_a_name_and_sizes_from_one_up() {
    for name in NAMES {
        assert_eq!(by_name(name, 3, 2, 4).unwrap().micro_batches, 4, "{name}");
        assert_eq!(
            by_name(name, 3, 2, 0).unwrap_err().to_string(),
            format!("{name}: got 0 micro-batches, wanted at least 1")
        );
        assert_eq!(
            by_name(name, 0, 2, 4).unwrap_err().to_string(),
            format!("{name}: got 0 ranks, wanted at least 1")
        );
    }
    assert_eq!(
        interleaved(2, 0, 4).unwrap_err().to_string(),
        "interleaved: got 0 stages a rank, wanted at least 1"
    );
    let wrong = by_name("1b1f", 2, 1, 2).unwrap_err().to_string();
    assert_eq!(wrong, "schedule: got \"1b1f\", wanted gpipe, 1f1b, interleaved, zb-h1, zb-h2 or zb-v");
}

fn refused(text: &str) -> String {
    text.parse::<Schedule>().unwrap_err().to_string()
}

#[test]
fn every_kind_of_action_has_a_token() {
    let tokens = ActionKind::ALL.map(|kind| Action::new(12, kind, 3).to_string());
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
