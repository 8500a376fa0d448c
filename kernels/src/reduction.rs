//! How the losses of the items of a batch become the result.

/// What a loss makes of its items' losses.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Reduction {
    /// One loss an item.
    None,
    /// Their mean; losses with class weights divide by the sum of the weights.
    #[default]
    Mean,
    /// Their sum.
    Sum,
}
