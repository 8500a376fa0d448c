//! [`Outputs`]: what a function of several values may return.

use smallvec::SmallVec;

use crate::Var;

/// The results of a function passed to this crate: one [`Var`] or several.
pub trait Outputs: Sized {
    /// As a list.
    fn into_vars(self) -> Vec<Var>;
    /// The reverse of [`Outputs::into_vars`]; `None` if it does not give as many.
    fn from_vars(vars: Vec<Var>) -> Option<Self>;
}

impl Outputs for Var {
    fn into_vars(self) -> Vec<Var> {
        vec![self]
    }

    fn from_vars(vars: Vec<Var>) -> Option<Var> {
        <[Var; 1]>::from_vars(vars).map(|[x]| x)
    }
}

impl Outputs for Vec<Var> {
    fn into_vars(self) -> Vec<Var> {
        self
    }

    fn from_vars(vars: Vec<Var>) -> Option<Vec<Var>> {
        Some(vars)
    }
}

impl<const N: usize> Outputs for [Var; N] {
    fn into_vars(self) -> Vec<Var> {
        self.into()
    }

    fn from_vars(vars: Vec<Var>) -> Option<[Var; N]> {
        vars.try_into().ok()
    }
}

impl<const N: usize> Outputs for SmallVec<[Var; N]>
where
    [Var; N]: smallvec::Array<Item = Var>,
{
    fn into_vars(self) -> Vec<Var> {
        self.into_vec()
    }

    fn from_vars(vars: Vec<Var>) -> Option<Self> {
        Some(SmallVec::from_vec(vars))
    }
}

impl Outputs for (Var, Var) {
    fn into_vars(self) -> Vec<Var> {
        vec![self.0, self.1]
    }

    fn from_vars(vars: Vec<Var>) -> Option<Self> {
        <[Var; 2]>::from_vars(vars).map(|[a, b]| (a, b))
    }
}

impl Outputs for (Var, Var, Var) {
    fn into_vars(self) -> Vec<Var> {
        vec![self.0, self.1, self.2]
    }

    fn from_vars(vars: Vec<Var>) -> Option<Self> {
        <[Var; 3]>::from_vars(vars).map(|[a, b, c]| (a, b, c))
    }
}
