//! Schedules without flushes.

use phalanx_parallel::pipeline::schedule::{
    Action, ActionKind, Costs, Schedule, common_multiple, double_buffered, double_buffered_over, one_f_one_b,
    simulate, verify, vertical_sync, vertical_sync_over, weight_stashing, weight_stashing_over,
    with_transfers,
};
use proptest::prelude::*;

#[test]
fn weight_stashing_uses_the_newest_weights_forward_and_the_same_backward() {
    let plan = weight_stashing(3, 6).unwrap();
    assert_eq!(plan.versions, [[0, 0, 0, 1, 2, 3], [0, 0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 5]]);
    assert_eq!(plan.interval, 1);
}

#[test]
fn weight_stashing_keeps_a_version_more_than_the_warm_up() {
    for ranks in 1..=8 {
        for micro_batches in [1, 2, 7, 30] {
            let wanted: Vec<usize> = (0..ranks).map(|r| (ranks - r).min(micro_batches)).collect();
            let kept = weight_stashing(ranks, micro_batches).unwrap().verify(0).unwrap();
            let wanted =
                if micro_batches >= 2 * ranks { (0..ranks).map(|r| ranks - r).collect() } else { wanted };
            assert!(
                kept.iter().zip(&wanted).all(|(kept, most)| kept <= most),
                "{kept:?}, at most {wanted:?}"
            );
            assert!(micro_batches < 2 * ranks || kept == wanted, "{kept:?}, wanted {wanted:?}");
        }
    }
}

#[test]
fn vertical_sync_uses_the_first_stages_version_at_every_stage() {
    let plan = vertical_sync(3, 6).unwrap();
    assert_eq!(plan.versions, [[0, 0, 0, 1, 2, 3]; 3]);
    for ranks in 1..=6 {
        assert_eq!(vertical_sync(ranks, 3 * ranks).unwrap().verify(0).unwrap(), vec![ranks; ranks]);
    }
}

#[test]
fn double_buffers_use_the_version_before_the_newest_on_every_stage() {
    let plan = double_buffered(3, 3, 9).unwrap();
    assert_eq!(plan.versions, vec![vec![0, 0, 0, 0, 0, 0, 1, 1, 1]; 3]);
}

#[test]
fn double_buffers_keep_two_versions() {
    for ranks in 1..=6 {
        for interval in [ranks, ranks + 1, 2 * ranks + 1] {
            let kept = double_buffered(ranks, interval, 5 * interval + 1).unwrap().verify(0).unwrap();
            assert_eq!(kept, vec![2; ranks], "{ranks} ranks, an update every {interval}");
        }
    }
}

#[test]
fn replicas_update_together_after_a_micro_batch_of_each() {
    let plan = weight_stashing_over(&[2, 1], 5).unwrap();
    let wanted = "0F0 0F2 0B0 0U1 0F4 0B2 0U3 0B4\n0F1 0F3 0B1 0U1 0B3 0U3\n\
                  1F0 1B0 1U0 1F1 1B1 1U1 1F2 1B2 1U2 1F3 1B3 1U3 1F4 1B4 1U4\n";
    assert_eq!(plan.schedule.to_string(), wanted);
    assert_eq!(wanted.parse::<Schedule>().unwrap(), plan.schedule);
    assert_eq!(plan.versions, [[0, 0, 0, 0, 1], [0, 1, 2, 3, 4]]);
    assert_eq!((plan.interval_of(0), plan.interval_of(1)), (2, 1));
    // All stages update after six micro-batches: the micro-batches 7 to 12 come to the first stage after the first update.
    let plan = vertical_sync_over(&[1, 3, 2], 14).unwrap();
    assert_eq!((plan.interval, plan.verify(0)), (6, Ok(vec![2, 2, 2])));
    assert_eq!(plan.versions, vec![[0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1]; 3]);
    assert_eq!([&[1, 1][..], &[4, 6, 2], &[3, 5], &[2, 0]].map(common_multiple), [1, 12, 15, 0]);
    let error = double_buffered_over(&[2, 3], 4, 8).unwrap_err().to_string();
    assert!(error.contains("an update every 4 micro-batches over 5 ranks"), "{error}");
}

#[test]
fn updates_of_replicas_that_stand_elsewhere_or_nowhere_are_found() {
    let plan = weight_stashing_over(&[2, 1], 4).unwrap();
    let changed = |change: &dyn Fn(&mut Vec<Action>)| {
        let mut plan = plan.clone();
        change(&mut plan.schedule.ranks[0]);
        plan.verify(0).unwrap_err().to_string()
    };
    assert_eq!(plan.schedule.to_string().lines().next(), Some("0F0 0F2 0B0 0U1 0B2 0U3"));
    assert_eq!(changed(&|list| list.truncate(5)), "rank 0: nothing does 0U3");
    let early = changed(&|list| list.swap(2, 3));
    assert_eq!(early, "rank 0, action 2 (0U1): there are no gradients yet");
    let late = changed(&|list| list.swap(3, 4));
    assert_eq!(late, "rank 0, action 4 (0U1): the last gradients are those of micro-batch 2");
    let twice = changed(&|list| list.insert(4, list[3]));
    assert_eq!(twice, "rank 0, action 4 (0U1): 0U1 has been done");
}

proptest! {
    #[test]
    fn stages_with_any_numbers_of_replicas_update_without_deadlock(
        replicas in prop::collection::vec(1..5_usize, 1..5),
        more in 0..30_usize,
    ) {
        let micro_batches = replicas.iter().max().unwrap() + more;
        let (ranks, first) = (replicas.iter().sum::<usize>(), replicas[0]);
        let warm_up = |stage: usize| replicas[stage + 1..].iter().sum::<usize>().div_ceil(replicas[stage]);
        let stashing = weight_stashing_over(&replicas, micro_batches).unwrap();
        let synced = vertical_sync_over(&replicas, micro_batches).unwrap();
        let doubled = double_buffered_over(&replicas, ranks, micro_batches).unwrap();
        for plan in [&stashing, &synced, &doubled] {
            plan.verify(0).unwrap();
            let travelling = with_transfers(&plan.schedule).unwrap();
            verify(&travelling, 0).unwrap();
            prop_assert_eq!(&travelling.to_string().parse::<Schedule>().unwrap().to_string(), &travelling.to_string());
        }
        prop_assert!(doubled.verify(0).unwrap().iter().all(|&kept| kept <= 2));
        for micro_batch in 0..micro_batches {
            // A replica's own number of the micro-batch, less those in flight, is how many times its stage has updated.
            for (stage, &count) in replicas.iter().enumerate() {
                let version = (micro_batch / count).saturating_sub(warm_up(stage));
                prop_assert_eq!(stashing.versions[stage][micro_batch], version);
            }
            let back = (micro_batch / first).saturating_sub(warm_up(0));
            let version = back / (common_multiple(&replicas) / first);
            prop_assert!(synced.versions.iter().all(|versions| versions[micro_batch] == version));
        }
    }
}

#[test]
fn versions_that_do_not_exist_yet_are_found() {
    let mut plan = weight_stashing(2, 4).unwrap();
    plan.versions[0][2] = 2;
    let wanted = "rank 0, action 4 (0F2): uses version 2 of the weights, the newest is 1";
    assert_eq!(plan.verify(0).unwrap_err().to_string(), wanted);
    plan.versions[0].pop();
    let wanted = "verify: got versions for [3, 4] micro-batches, an update every 1, wanted one for each stage and micro-batch, 1 or more";
    assert_eq!(plan.verify(0).unwrap_err().to_string(), wanted);
    let early = double_buffered(4, 3, 8).unwrap_err().to_string();
    let wanted = "double_buffered: got an update every 3 micro-batches over 4 ranks, wanted at least as many as there are ranks";
    assert_eq!(early, wanted);
}

#[test]
fn an_update_stands_after_each_whole_interval() {
    let plan = double_buffered(2, 2, 5).unwrap();
    let wanted =
        "0F0 0F1 0B0 0F2 0B1 0U1 0F3 0B2 0F4 0B3 0U3 0B4\n1F0 1B0 1F1 1B1 1U1 1F2 1B2 1F3 1B3 1U3 1F4 1B4\n";
    assert_eq!(plan.schedule.to_string(), wanted);
    let plan = weight_stashing(2, 2).unwrap();
    assert_eq!(plan.schedule.to_string(), "0F0 0F1 0B0 0U0 0B1 0U1\n1F0 1B0 1U0 1F1 1B1 1U1\n");
    assert!(plan.schedule.has_updates() && !one_f_one_b(2, 2).unwrap().has_updates());
}

#[test]
fn updates_that_stand_elsewhere_or_nowhere_are_found() {
    let plan = double_buffered(1, 2, 4).unwrap();
    assert_eq!(plan.schedule.to_string(), "0F0 0B0 0F1 0B1 0U1 0F2 0B2 0F3 0B3 0U3\n");
    let moved = |from: usize, to: usize| {
        let mut plan = plan.clone();
        let update = plan.schedule.ranks[0].remove(from);
        plan.schedule.ranks[0].insert(to, update);
        plan.verify(0).unwrap_err().to_string()
    };
    assert_eq!(moved(4, 0), "rank 0, action 0 (0U1): there are no gradients yet");
    assert_eq!(moved(4, 2), "rank 0, action 2 (0U1): the last gradients are those of micro-batch 0");
    assert_eq!(moved(4, 6), "rank 0, action 6 (0U1): the last gradients are those of micro-batch 2");
    let mut less = plan.clone();
    less.schedule.ranks[0].remove(4);
    let wanted = "rank 0, action 5 (0B2): an update was due after micro-batch 1";
    assert_eq!(less.verify(0).unwrap_err().to_string(), wanted);
    let mut less = plan.clone();
    less.schedule.ranks[0].pop();
    assert_eq!(less.verify(0).unwrap_err().to_string(), "rank 0: nothing does 0U3");
    let mut more = plan.clone();
    more.schedule.ranks[0].insert(2, Action::new(0, ActionKind::Update, 0));
    let wanted = "rank 0, action 2 (0U0): the next update is due after micro-batch 1";
    assert_eq!(more.verify(0).unwrap_err().to_string(), wanted);
    more.schedule.ranks[0].insert(3, Action::new(0, ActionKind::Update, 0));
    assert_eq!(more.verify(0).unwrap_err().to_string(), "rank 0, action 3 (0U0): 0U0 has been done");
}

#[test]
fn updates_change_neither_transfers_nor_times() {
    for (ranks, micro_batches) in [(1, 3), (2, 5), (4, 9)] {
        let (plan, plain) =
            (weight_stashing(ranks, micro_batches).unwrap(), one_f_one_b(ranks, micro_batches).unwrap());
        let mut travelling = with_transfers(&plan.schedule).unwrap();
        assert_eq!(verify(&travelling, 0), verify(&plain, 0));
        travelling.ranks.iter_mut().for_each(|list| list.retain(|action| action.kind != ActionKind::Update));
        assert_eq!(travelling, with_transfers(&plain).unwrap());
        let costs = Costs::even(&plain, 1.0, 1.0, 1.0, 0.1);
        assert_eq!(simulate(&plan.schedule, &costs), simulate(&plain, &costs));
    }
}

#[test]
fn sharing_one_old_version_needs_as_many_as_updates_pass() {
    let mut plan = weight_stashing(1, 5).unwrap();
    plan.versions[0] = vec![0, 1, 1, 1, 0];
    assert_eq!(plan.verify(0), Ok(vec![3]), "0, 1 and the newest");
}
