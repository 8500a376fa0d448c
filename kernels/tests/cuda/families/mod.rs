//! The cases, a file a family of operations.

mod attention;
mod captured;
mod channels;
mod classes;
mod copies;
mod draws;
mod floats;
mod functions;
mod images;
mod index;
mod moves;
mod optim;
mod orders;
mod products;
mod reduce;
mod rows;

use crate::case::Case;

/// All cases.
pub fn all() -> Vec<Case> {
    let families = [
        attention::cases(),
        captured::cases(),
        channels::cases(),
        classes::cases(),
        copies::cases(),
        draws::cases(),
        floats::cases(),
        functions::cases(),
        images::cases(),
        index::cases(),
        moves::cases(),
        optim::cases(),
        orders::cases(),
        products::cases(),
        reduce::cases(),
        rows::cases(),
    ];
    families.into_iter().flatten().collect()
}
