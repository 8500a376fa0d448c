//! Every schedule gives the bits of one device.

use phalanx_nn::models::{ModelConfig, RecomputeMode};
use phalanx_parallel::pipeline::schedule::{NAMES, by_name};

use crate::kit::{alone, assert_equal, config, llama, together};

const MODES: [RecomputeMode; 3] = [RecomputeMode::Never, RecomputeMode::ExceptLast, RecomputeMode::Always];

fn check(config: &ModelConfig, micro_batches: usize, ranks: &[usize], modes: &[RecomputeMode]) {
    let wanted = alone(config, micro_batches);
    for (&ranks, name) in ranks.iter().flat_map(|ranks| NAMES.map(|name| (ranks, name))) {
        let schedule = by_name(name, ranks, 2, micro_batches).unwrap();
        for &mode in modes {
            let what = format!(
                "{name}, {} layers, {ranks} ranks, {micro_batches} micro-batches, {mode:?}",
                config.layers()
            );
            let got = together(config, &schedule, mode).unwrap_or_else(|e| panic!("{what}: {e}"));
            assert_equal(got, &wanted, &what);
        }
    }
}

#[test]
fn every_schedule_has_the_bits_of_one_device_in_every_mode() {
    check(&config(4), 5, &[3], &MODES);
    check(&config(4), 3, &[1, 2], &[RecomputeMode::ExceptLast]);
}

#[test]
fn so_it_is_with_fewer_micro_batches_than_stages_and_fewer_layers() {
    check(&config(4), 2, &[4], &MODES[..1]);
    check(&config(6), 1, &[4], &MODES[2..]);
}

#[test]
fn so_it_is_with_a_llama() {
    check(&llama(4), 3, &[2], &MODES[2..]);
}

/// Everything that is promised; `cargo test -- --ignored`.
#[test]
#[ignore = "takes minutes"]
fn all_layouts() {
    for (layers, micro_batches) in [4, 6].into_iter().flat_map(|l| [1, 2, 3, 5, 8].map(|m| (l, m))) {
        check(&config(layers), micro_batches, &[2, 3, 4], &MODES);
    }
}
