//! Schedules without flushes.

use phalanx_parallel::pipeline::schedule::{double_buffered, weight_stashing};

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
fn versions_that_do_not_exist_yet_are_found() {
    let mut plan = weight_stashing(2, 4).unwrap();
    plan.versions[0][2] = 2;
    let wanted = "rank 0, action 3 (0F2): uses version 2 of the weights, the newest is 1";
    assert_eq!(plan.verify(0).unwrap_err().to_string(), wanted);
    plan.versions[0].pop();
    let wanted = "verify: got versions for [3, 4] micro-batches, an update every 1, wanted one for each stage and micro-batch, 1 or more";
    assert_eq!(plan.verify(0).unwrap_err().to_string(), wanted);
    let early = double_buffered(4, 3, 8).unwrap_err().to_string();
    let wanted = "double_buffered: got an update every 3 micro-batches over 4 ranks, wanted at least as many as there are ranks";
    assert_eq!(early, wanted);
}

#[test]
fn sharing_one_old_version_needs_as_many_as_updates_pass() {
    let mut plan = weight_stashing(1, 5).unwrap();
    plan.versions[0] = vec![0, 1, 1, 1, 0];
    assert_eq!(plan.verify(0), Ok(vec![3]), "0, 1 and the newest");
}
