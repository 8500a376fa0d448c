//! What the caller may ask for on the product's way to C: bias, activation, addition to what is there.

use crate::ops::Gelu;

/// Whether a product replaces C or is added to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Write {
    /// C = A B
    Store,
    /// C = C + A B, the finished product added once.
    Accumulate,
}

/// Steps applied to the product before it is written, in the order of the fields. Each has the bits of a step of its
/// own: in half precision the value is rounded between them.
#[derive(Clone, Copy)]
pub(crate) struct Epilogue<'a, T> {
    /// Added to every row: one value per column.
    pub(crate) bias: Option<&'a [T]>,
    /// Applied to every element.
    pub(crate) activation: Option<Gelu>,
}

impl<T> Default for Epilogue<'_, T> {
    fn default() -> Self {
        Epilogue { bias: None, activation: None }
    }
}

impl<T> Epilogue<'_, T> {
    /// Whether nothing is to be done.
    pub(super) fn is_empty(&self) -> bool {
        self.bias.is_none() && self.activation.is_none()
    }
}
