//! [`Outputs`]: what a function of several values may return.

use smallvec::SmallVec;

use crate::Var;

/// The results of a function passed to this crate: one [`Var`] or several.
pub trait Outputs: Sized {
    /// As a list.
    fn into_vars(self) -> Vec<Var>;
}

impl Outputs for Var {
    fn into_vars(self) -> Vec<Var> {
        vec![self]
    }
}

impl Outputs for Vec<Var> {
    fn into_vars(self) -> Vec<Var> {
        self
    }
}

impl<const N: usize> Outputs for [Var; N] {
    fn into_vars(self) -> Vec<Var> {
        self.into()
    }
}

impl<const N: usize> Outputs for SmallVec<[Var; N]>
where
    [Var; N]: smallvec::Array<Item = Var>,
{
    fn into_vars(self) -> Vec<Var> {
        self.into_vec()
    }
}

impl Outputs for (Var, Var) {
    fn into_vars(self) -> Vec<Var> {
        vec![self.0, self.1]
    }
}

impl Outputs for (Var, Var, Var) {
    fn into_vars(self) -> Vec<Var> {
        vec![self.0, self.1, self.2]
    }
}
