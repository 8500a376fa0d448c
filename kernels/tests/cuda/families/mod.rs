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

/// Of each family a case in bf16 and one in f32, whichever it has, of tensors that are not empty.
pub fn one_of_each() -> Vec<Case> {
    let chosen = |family: Vec<Case>| {
        let has = |case: &Case, dtype: &str| {
            case.name.contains(dtype) && !["[]", "[0", ", 0"].iter().any(|empty| case.name.contains(empty))
        };
        let at = ["bf16", "f32"].map(|dtype| family.iter().position(|case| has(case, dtype)));
        family.into_iter().enumerate().filter(move |(i, _)| at.contains(&Some(*i))).map(|(_, case)| case)
    };
    families().into_iter().flat_map(chosen).collect()
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
