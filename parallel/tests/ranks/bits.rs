//! Every schedule gives the bits of one device.

use phalanx_nn::models::RecomputeMode;

use crate::kit::{alone, assert_equal, gpipe, one_f_one_b, together};

const MODES: [RecomputeMode; 3] = [RecomputeMode::Never, RecomputeMode::ExceptLast, RecomputeMode::Always];

#[test]
fn schedules_by_hand_give_the_bits_of_one_device() {
    for (layers, micro_batches) in [(4, 1), (4, 3), (3, 5)] {
        let wanted = alone(layers, micro_batches);
        for ranks in [1, 2, 3, 4] {
            let all = [
                ("gpipe", gpipe(ranks, micro_batches)),
                ("1f1b", one_f_one_b(ranks, micro_batches, false)),
                ("split", one_f_one_b(ranks, micro_batches, true)),
            ];
            for (name, schedule) in all {
                for mode in MODES {
                    let what = format!("{name}, {ranks} ranks, {micro_batches} micro-batches, {mode:?}");
                    let got = together(layers, &schedule, mode).unwrap_or_else(|e| panic!("{what}: {e}"));
                    assert_equal(got, &wanted, &what);
                }
            }
        }
    }
}
