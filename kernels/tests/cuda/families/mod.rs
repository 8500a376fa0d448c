//! The cases, a file a family of operations.

mod attention;
mod classes;
mod draws;
mod elements;
mod index;
mod moves;
mod normalization;
mod optim;
mod products;
mod reduce;

use crate::case::Case;

/// All cases.
pub fn all() -> Vec<Case> {
    families().into_iter().flatten().collect()
}

/// A case of each family.
pub fn one_of_each() -> Vec<Case> {
    families().into_iter().filter_map(|family| family.into_iter().next()).collect()
}

fn families() -> [Vec<Case>; 10] {
    [
        attention::cases(),
        classes::cases(),
        draws::cases(),
        index::cases(),
        moves::cases(),
        optim::cases(),
        products::cases(),
        reduce::cases(),
        elements::cases(),
        normalization::cases(),
    ]
}
