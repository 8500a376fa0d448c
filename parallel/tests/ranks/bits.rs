//! Every schedule gives the bits of one device, and a pipeline changes no bit of a model whose layers are split over ranks.

use std::sync::Arc;

use phalanx_nn::models::{ModelConfig, RecomputeMode};
use phalanx_parallel::launch::{Rank, threads};
use phalanx_parallel::mesh::{Axis, Groups, Mesh};
use phalanx_parallel::pipeline::schedule::{NAMES, Schedule, by_name, gpipe};
use phalanx_parallel::tensor_parallel::TensorParallel;

use crate::kit::{Trained, alone, assert_equal, config, llama, together, train_on};

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

/// What the ranks of each pipeline have, the pipelines being the ranks of a tensor-parallel group.
fn run(pp: usize, schedule: &Schedule, sequence: bool, mode: RecomputeMode) -> Vec<Vec<Trained>> {
    let mesh = Mesh::new(2, 1, pp).unwrap();
    let run = |rank: Rank| -> phalanx_parallel::Result<Trained> {
        let groups = Groups::new(mesh, rank.comm())?;
        let layers = TensorParallel::new(groups.along(Axis::Tp)).with_sequence_parallel(sequence);
        train_on(&Arc::new(layers), groups.along(Axis::Pp), &config(4), schedule, mode, rank.device())
    };
    let mut pipelines = [vec![], vec![]];
    for (rank, trained) in threads(mesh.ranks(), run).unwrap().into_iter().enumerate() {
        pipelines[mesh.coordinates(rank).tp].push(trained);
    }
    pipelines.into()
}

#[test]
fn pipelines_of_cut_layers_have_the_bits_of_cut_layers_alone() {
    for sequence in [false, true] {
        let mut alone = run(1, &gpipe(1, 3).unwrap(), sequence, RecomputeMode::Never);
        for name in ["1f1b", "zb-h1", "zb-v"] {
            let schedule = by_name(name, 2, 2, 3).unwrap();
            let all = run(2, &schedule, sequence, RecomputeMode::ExceptLast);
            for (pipeline, wanted) in all.into_iter().zip(&mut alone) {
                assert_equal(pipeline, &wanted[0], &format!("{name}, sequence parallel: {sequence}"));
            }
        }
    }
}
