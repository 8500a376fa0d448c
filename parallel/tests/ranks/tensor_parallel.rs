//! A pipeline changes no bit of a model whose layers are cut over ranks.

use std::sync::Arc;

use phalanx_nn::models::RecomputeMode;
use phalanx_parallel::launch::{Rank, threads};
use phalanx_parallel::mesh::{Axis, Groups, Mesh};
use phalanx_parallel::pipeline::schedule::{Schedule, by_name, gpipe};
use phalanx_parallel::tensor_parallel::TensorParallel;

use crate::kit::{Trained, assert_equal, config, train_on};

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
