//! What a transformer costs before there is one: parameters, arithmetic, activation memory. Formulas of papers, as functions.

mod activations;
mod transformer;

pub use activations::{Layout, Recompute};
pub use transformer::Transformer;
