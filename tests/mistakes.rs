//! What a user can do wrong, and what the error must say: the operation, what came and what was wanted. No mistake may
//! panic or pass.

#[path = "mistakes/files.rs"]
mod files;
#[path = "mistakes/kit.rs"]
mod kit;
#[path = "mistakes/layers.rs"]
mod layers;
#[path = "mistakes/operations.rs"]
mod operations;
#[path = "mistakes/tensors.rs"]
mod tensors;
#[path = "mistakes/training.rs"]
mod training;

use kit::{Mistake, check};

#[test]
fn operations_name_themselves_what_came_and_what_was_wanted() {
    check(operations::mistakes());
}

#[test]
fn tensors_and_in_place_operations_refuse_what_they_cannot_do() {
    check(tensors::mistakes());
}

#[test]
fn layers_refuse_settings_and_inputs_that_make_no_sense() {
    check(layers::mistakes());
}

#[test]
fn backward_passes_optimizers_and_data_refuse_misuse() {
    check(training::mistakes());
}

#[test]
fn damaged_and_unfit_files_are_refused() {
    check(files::mistakes());
}

#[test]
fn there_are_enough_of_them() {
    let all: [Vec<Mistake>; 5] = [
        operations::mistakes(),
        tensors::mistakes(),
        layers::mistakes(),
        training::mistakes(),
        files::mistakes(),
    ];
    assert!(all.iter().map(Vec::len).sum::<usize>() >= 250);
}
