//! What `verify` finds, and what holds for every schedule, over random sizes.

use std::collections::HashMap;

use phalanx_parallel::pipeline::schedule::{
    Action, ActionKind, Costs, Error, NAMES, Schedule, Timeline, by_name, gpipe, one_f_one_b, replicated,
    simulate, verify, with_transfers,
};
use proptest::prelude::*;

/// What is wrong with a text, over buffers of that many transfers.
fn found(text: &str, capacity: usize) -> String {
    verify(&text.parse::<Schedule>().unwrap(), capacity).unwrap_err().to_string()
}

#[test]
fn what_is_missing_is_named() {
    assert_eq!(found("0F0 0F1 0B0", 0), "rank 0: nothing does 0B1");
    assert_eq!(found("0F0 0B0 0B1", 0), "rank 0: nothing does 0F1");
    assert_eq!(found("0F0 0I0", 0), "rank 0: nothing does 0W0");
    assert_eq!(found("0F0 0W0", 0), "rank 0: nothing does 0B0");
}

#[test]
fn what_is_done_twice_is_named() {
    assert_eq!(found("0F0 0F0 0B0", 0), "rank 0, action 1 (0F0): 0F0 has been done");
    assert_eq!(found("0F0 0B0 0W0", 0), "rank 0, action 2 (0W0): 0B0 has been done");
    assert_eq!(found("0F0 0I0 0W0 0B0", 0), "rank 0, action 3 (0B0): 0I0 has been done");
}

#[test]
fn a_rank_must_have_what_it_uses() {
    assert_eq!(found("0B0 0F0", 0), "rank 0, action 0 (0B0): needs 0F0 before it on the rank");
    assert_eq!(found("0F0 0W0 0I0", 0), "rank 0, action 1 (0W0): needs 0I0 before it on the rank");
    assert_eq!(found("1F0 0F0 1B0 0B0", 0), "rank 0, action 0 (1F0): needs 0F0 before it on the rank");
    assert_eq!(
        found("0F0 1F0 0I0 1I0 0W0 1W0", 0),
        "rank 0, action 2 (0I0): needs 1B0 before it on the rank"
    );
    let late = "0F0 0SEND_F0 0RECV_B0 0B0\n1F0 1RECV_F0 1B0 1SEND_B0";
    assert_eq!(found(late, 0), "rank 1, action 0 (1F0): needs 1RECV_F0 before it on the rank");
    let early = "0SEND_F0 0F0 0RECV_B0 0B0\n1RECV_F0 1F0 1B0 1SEND_B0";
    assert_eq!(found(early, 0), "rank 0, action 0 (0SEND_F0): needs 0F0 before it on the rank");
}

#[test]
fn gradients_are_added_ascending() {
    let wrong = "adds gradients after those of micro-batch 1, wanted ascending";
    assert_eq!(found("0F0 0F1 0B1 0B0", 0), format!("rank 0, action 3 (0B0): {wrong}"));
    assert_eq!(found("0F0 0F1 0I0 0B1 0W0", 0), format!("rank 0, action 4 (0W0): {wrong}"));
    verify(&"0F0 0F1 0I1 0I0 0W0 0W1".parse().unwrap(), 0).unwrap();
}

#[test]
fn sends_and_receives_of_a_pair_are_in_one_order() {
    let order = "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1\n1RECV_F1 1RECV_F0 1F0 1B0 1SEND_B0 1F1 1B1 1SEND_B1";
    assert_eq!(found(order, 9), "rank 1, action 0 (1RECV_F1): rank 0 sends 0SEND_F0 at this point");
    let lost = "0F0 0SEND_F0 0RECV_B0 0B0\n1RECV_F0 1F0 1B0";
    assert_eq!(found(lost, 9), "rank 0, action 2 (0RECV_B0): rank 1 does not send it");
}

#[test]
fn there_is_nothing_to_send_at_the_ends_or_within_a_rank() {
    assert_eq!(found("0F0 0SEND_F0 0B0", 0), "rank 0, action 1 (0SEND_F0): there is no stage on that side");
    assert_eq!(found("0F0 0B0 0SEND_B0", 0), "rank 0, action 2 (0SEND_B0): there is no stage on that side");
    assert_eq!(
        found("0F0 0SEND_F0 1RECV_F0 1F0 1B0 0B0", 0),
        "rank 0, action 1 (0SEND_F0): stages 0 and 1 are on one rank"
    );
}

#[test]
fn sends_that_wait_for_each_other_are_a_deadlock_without_buffers_only() {
    let text = "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1\n1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1";
    assert_eq!(
        found(text, 0),
        "deadlock: rank 0, action 3 (0SEND_F1), waits for rank 1; rank 1, action 3 (1SEND_B0), waits for rank 0"
    );
    assert_eq!(verify(&text.parse().unwrap(), 1), Ok(vec![2, 1]));
}

#[test]
fn buffers_hold_as_many_as_they_may_and_no_more() {
    // Rank 1 looks at what comes from rank 0 only when it has been sent three times.
    let text = "0F0 0SEND_F0 0F1 0SEND_F1 0F2 0SEND_F2 2RECV_F0 2F0 2B0 2SEND_B0 0RECV_B0 0B0 2RECV_F1 2F1 2B1 2SEND_B1 0RECV_B1 0B1 \
                2RECV_F2 2F2 2B2 2SEND_B2 0RECV_B2 0B2\n\
                1RECV_F0 1F0 1SEND_F0 1RECV_F1 1RECV_F2 1RECV_B0 1B0 1SEND_B0 1F1 1SEND_F1 1RECV_B1 1B1 1SEND_B1 1F2 1SEND_F2 1RECV_B2 1B2 1SEND_B2";
    let schedule = text.parse().unwrap();
    let stuck = |capacity| matches!(verify(&schedule, capacity), Err(Error::Deadlock { .. }));
    assert_eq!([stuck(0), stuck(1), stuck(2)], [true, false, false]);
}

#[test]
fn computations_that_wait_for_each_other_are_a_deadlock() {
    // Rank 0 wants micro-batch 1 back before it lets micro-batch 0 go on, rank 1 the other way round.
    let text = "0F0 0F1 3F1 3B1 3F0 3B0 0B0 0B1\n1F0 2F0 2B0 1B0 1F1 2F1 2B1 1B1";
    let ascending = text.replace("3F1 3B1 3F0 3B0", "3F0 3B0 3F1 3B1");
    assert_eq!(verify(&ascending.parse().unwrap(), 0), Ok(vec![3, 2]));
    let text = text.replace("3F1 3B1 3F0 3B0", "3F1 3F0 3B0 3B1");
    assert_eq!(
        found(&text, 0),
        "deadlock: rank 0, action 2 (3F1), waits for rank 1; rank 1, action 2 (2B0), waits for rank 0"
    );
}

#[test]
fn sizes_that_do_not_fit_are_refused() {
    let mut schedule = one_f_one_b(2, 2).unwrap();
    schedule.placement[1] = 0;
    assert_eq!(
        verify(&schedule, 0).unwrap_err().to_string(),
        "rank 1, action 0 (1F0): the stage is on rank 0"
    );
    schedule.placement[1] = 2;
    let wrong = "verify: got stage 1 on rank 2 of 2, wanted stages on ranks that there are";
    assert_eq!(verify(&schedule, 0).unwrap_err().to_string(), wrong);
    schedule = gpipe(2, 2).unwrap();
    schedule.micro_batches = 1;
    assert_eq!(
        verify(&schedule, 0).unwrap_err().to_string(),
        "rank 0, action 1 (0F1): there are 1 micro-batches"
    );
    schedule.placement.pop();
    assert_eq!(
        verify(&schedule, 0).unwrap_err().to_string(),
        "rank 0, action 1 (0F1): there are 1 micro-batches"
    );
    schedule.micro_batches = 2;
    assert_eq!(verify(&schedule, 0).unwrap_err().to_string(), "rank 1, action 0 (1F0): there are 1 stages");
}

/// A name, ranks, chunks and micro-batches.
fn any() -> impl Strategy<Value = (&'static str, usize, usize, usize)> {
    (prop::sample::select(&NAMES[..]), 1_usize..9, 1_usize..5, 1_usize..25)
}

/// What the documentation promises of a rank's activations, in units of its stages.
fn bound(name: &str, ranks: usize, chunks: usize, micro_batches: usize, rank: usize) -> usize {
    let group = micro_batches.div_ceil((micro_batches / ranks).max(1));
    match name {
        "gpipe" => micro_batches,
        "interleaved" if chunks > 1 => 2 * (ranks - rank - 1) + (chunks - 1) * group + 1,
        "zb-h1" => ranks,
        "zb-h2" => 2 * ranks - 1,
        "zb-v" => 2 * ranks,
        _ => ranks - rank,
    }
}

/// Whether each computation began as soon as it could, and no earlier.
fn is_tight(schedule: &Schedule, costs: &Costs, timeline: &Timeline) -> bool {
    let ends: HashMap<Action, f64> =
        timeline.ranks.iter().flatten().map(|span| (span.action, span.end)).collect();
    let before = |action: Action| {
        let input = schedule.input(action)?;
        let producer = |kind| ends.get(&Action::new(input.from, kind, input.micro_batch));
        let end = if input.from < input.to {
            producer(ActionKind::Forward)
        } else {
            producer(ActionKind::Backward).or(producer(ActionKind::Input))
        };
        let transfer = if schedule.travels(input) { costs.transfer[input.from.min(input.to)] } else { 0.0 };
        Some(end.unwrap() + transfer)
    };
    timeline.ranks.iter().all(|spans| {
        let mut free = 0.0_f64;
        spans.iter().all(|span| {
            let begin = free.max(before(span.action).unwrap_or(0.0));
            free = span.end;
            span.begin == begin
        })
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(100))]

    #[test]
    fn every_schedule_runs_without_buffers_and_holds_what_it_says((name, ranks, chunks, micro_batches) in any()) {
        let schedule = by_name(name, ranks, chunks, micro_batches).unwrap();
        let live = verify(&schedule, 0).unwrap();
        for (rank, &live) in live.iter().enumerate() {
            let stages = schedule.stages_of(rank).count();
            prop_assert!(live <= bound(name, ranks, chunks, micro_batches, rank).min(stages * micro_batches));
        }
        let lowered = with_transfers(&schedule).unwrap();
        for capacity in [0, 1, usize::MAX] {
            prop_assert_eq!(verify(&lowered, capacity).unwrap(), live.clone());
        }
        let computations = |actions: &Vec<Action>| actions.iter().copied().filter(|a| !a.kind.is_transfer()).collect();
        let ranks: Vec<Vec<Action>> = lowered.ranks.iter().map(computations).collect();
        prop_assert_eq!(ranks, schedule.ranks, "the computations keep their order");
        prop_assert_eq!(lowered.to_string().parse::<Schedule>().unwrap(), lowered);
    }

    #[test]
    fn a_lost_or_repeated_action_is_found((name, ranks, chunks, micro_batches) in any(), pick: prop::sample::Index) {
        let schedule = with_transfers(&by_name(name, ranks, chunks, micro_batches).unwrap()).unwrap();
        let places: Vec<(usize, usize)> =
            schedule.ranks.iter().enumerate().flat_map(|(r, list)| (0..list.len()).map(move |p| (r, p))).collect();
        let (rank, position) = places[pick.index(places.len())];
        let mut lost = schedule.clone();
        let action = lost.ranks[rank].remove(position);
        prop_assert!(verify(&lost, usize::MAX).is_err(), "without {action}");
        let mut repeated = schedule;
        repeated.ranks[rank].push(action);
        prop_assert!(verify(&repeated, usize::MAX).is_err(), "twice {action}");
    }

    #[test]
    fn the_simulator_begins_everything_as_soon_as_it_can(
        (name, ranks, chunks, micro_batches) in any(),
        times in prop::collection::vec(0.0_f64..5.0, 6 * 32),
    ) {
        let schedule = by_name(name, ranks, chunks, micro_batches).unwrap();
        let stages = schedule.stages();
        let list = |number: usize, count: usize| times[32 * number..32 * number + count].to_vec();
        let costs = Costs {
            forward: list(0, stages),
            backward: list(1, stages),
            input: list(2, stages),
            weight: list(3, stages),
            transfer: list(4, stages - 1),
            activation: list(5, stages),
        };
        let timeline = simulate(&schedule, &costs).unwrap();
        prop_assert!(is_tight(&schedule, &costs, &timeline));
        for rank in 0..ranks {
            prop_assert!(timeline.work(rank) <= timeline.span(rank) * (1.0 + 1e-12));
            prop_assert!(timeline.span(rank) <= timeline.makespan());
        }
    }

    #[test]
    fn zero_bubbles_are_none_within_a_ranks_own_time(ranks in 1_usize..9, more in 0_usize..20) {
        for name in ["zb-h2", "zb-v"] {
            let schedule = by_name(name, ranks, 2, 2 * ranks - 1 + more).unwrap();
            let timeline = simulate(&schedule, &Costs::even(&schedule, 1.0, 1.0, 1.0, 0.0)).unwrap();
            prop_assert!(timeline.bubble_by_span().abs() < 1e-12, "{name}: {}", timeline.bubble_by_span());
        }
    }

    #[test]
    fn the_interleaved_bubble_is_the_formula_for_any_number_of_micro_batches(
        ranks in 1_usize..9, chunks in 1_usize..5, more in 0_usize..20,
    ) {
        let micro_batches = ranks + more;
        let schedule = by_name("interleaved", ranks, chunks, micro_batches).unwrap();
        let timeline = simulate(&schedule, &Costs::even(&schedule, 1.0, 1.0, 1.0, 0.0)).unwrap();
        let wanted = (ranks - 1) as f64 / (chunks * micro_batches + ranks - 1) as f64;
        prop_assert!((timeline.bubble_by_makespan() - wanted).abs() < 1e-9);
    }
}

proptest! {
    #[test]
    fn replicas_of_any_numbers_run_without_buffers_and_read_back(
        replicas in prop::collection::vec(1..5_usize, 1..5),
        more in 0..9_usize,
    ) {
        let micro_batches = replicas.iter().max().unwrap() + more;
        let schedule = replicated(&replicas, micro_batches).unwrap();
        verify(&schedule, 0).unwrap();
        let lists = with_transfers(&schedule).unwrap();
        verify(&lists, 0).unwrap();
        prop_assert_eq!(&lists.to_string().parse::<Schedule>().unwrap(), &lists);
        // A rank of stage s holds at most the micro-batches that keep the later stages busy, and one.
        let held = verify(&lists, usize::MAX).unwrap();
        for (stage, &count) in replicas.iter().enumerate() {
            let later: usize = replicas[stage + 1..].iter().sum();
            prop_assert!(lists.ranks_of(stage).all(|rank| held[rank] <= later.div_ceil(count) + 1));
        }
    }
}

#[test]
fn replicas_have_their_micro_batches_and_wait_for_the_sums_before() {
    assert_eq!(
        "0F0 0B0 0F1\n0B1".parse::<Schedule>().unwrap_err().to_string(),
        "schedule, line 1: got \"0F1\", wanted a stage that no line before has"
    );
    // Micro-batch 2 comes after the gradients of 0, which wait for it at the second stage.
    let early = "0F0 0B0 0F2 0B2\n0F1 0F3 0B1 0B3\n1F0 1F1 1F2 1F3 1B0 1B1 1B2 1B3";
    assert!(found(early, 0).contains("0B0"), "{}", found(early, 0));
    let shared = "0F0 1F0 1B0 0B0\n0F1 1F1 1B1 0B1";
    assert_eq!(
        found(shared, 0),
        "verify: got another stage on a rank of stage 0, wanted no other beside a replica"
    );
}
