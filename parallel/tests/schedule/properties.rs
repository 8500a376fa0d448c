//! What holds for every schedule, over random sizes.

use std::collections::HashMap;

use phalanx_parallel::pipeline::schedule::{
    Action, Costs, Kind, NAMES, Schedule, Timeline, by_name, simulate, verify, with_transfers,
};
use proptest::prelude::*;

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
            producer(Kind::Forward)
        } else {
            producer(Kind::Backward).or(producer(Kind::Input))
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
