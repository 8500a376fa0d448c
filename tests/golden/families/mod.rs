//! The operators by family: each turns a case's arguments into a call of the library.

mod conv;
mod fused;
mod higher_order;
pub mod index;
mod layout;
mod loss;
mod model;
mod module;
mod optim;
mod pointwise;
mod reduce;

use std::cell::RefCell;
use std::collections::BTreeSet;

use phalanx::Var;
use phalanx::autograd::{Error, Result};

use crate::case::{Attrs, Case, Set};

/// An operator call: its name, its inputs by name, its attributes.
pub struct Call<'a> {
    pub op: &'a str,
    pub attrs: &'a Attrs<'a>,
    inputs: Vec<(String, Var)>,
    read: RefCell<BTreeSet<String>>,
    stand_ins: RefCell<Vec<(String, Var)>>,
    refused: RefCell<Option<String>>,
}

/// A family's answer to a call.
pub enum Reply {
    Unknown,
    Done(Result<Vec<Var>>),
}

/// A family of operators with the usual form: `None` if the operator is of another family.
type Family = fn(&Call<'_>) -> Option<Result<Vec<Var>>>;

/// A family that reads and checks its cases itself.
type Special = fn(&Set, &Case) -> Option<std::result::Result<(), String>>;

#[rustfmt::skip] // One a line, so that additions do not meet.
const FAMILIES: &[Family] = &[
    pointwise::unary,
    pointwise::binary,
    pointwise::choice,
    fused::fused,
    layout::grids_and_windows,
    layout::shapes,
    fused::matmul,
    reduce::reductions,
    index::rows,
    optim::run,
    loss::pointwise,
    conv::images,
    conv::pools,
    module::run,
    pointwise::further,
    reduce::further,
    index::masks,
    conv::sequences_and_volumes,
    loss::further,
    higher_order::run,
];

/// Families that are more than one call.
pub const SPECIAL: &[Special] = &[model::run];

/// Asks each family in turn.
pub fn call(call: &Call<'_>) -> Reply {
    FAMILIES.iter().find_map(|family| family(call)).map_or(Reply::Unknown, Reply::Done)
}

impl<'a> Call<'a> {
    pub fn new(op: &'a str, attrs: &'a Attrs<'a>, inputs: Vec<(String, Var)>) -> Call<'a> {
        let (read, stand_ins, refused) = Default::default();
        Call { op, attrs, inputs, read, stand_ins, refused }
    }

    /// What is not supported: what a family refused, or else an input or attribute that was not read.
    pub fn unsupported(&self) -> Option<String> {
        let read = self.read.borrow();
        let unread = || self.inputs.iter().map(|(name, _)| name).find(|name| !read.contains(*name));
        self.refused()
            .or_else(|| unread().map(|name| format!("input {name}")))
            .or_else(|| self.attrs.unread())
    }

    /// What a family refused.
    pub fn refused(&self) -> Option<String> {
        self.refused.borrow().clone()
    }

    /// Records that the case needs something that the library does not have. Returns an error for the caller.
    pub fn refuse(&self, what: String) -> Error {
        let error = Error::Custom(format!("unsupported: {what}"));
        self.refused.borrow_mut().get_or_insert(what);
        error
    }

    /// Lets `var` be asked for the gradient of the input `name`, from which it was copied.
    pub fn stand_in(&self, name: String, var: Var) {
        self.stand_ins.borrow_mut().push((name, var));
    }

    /// The values whose gradients are compared: those of [`Call::stand_in`], or else the inputs.
    pub fn leaves(&self, given: &[Var]) -> Vec<Var> {
        let stand_ins = self.stand_ins.borrow();
        let leaf = |((name, _), given): (&(String, Var), &Var)| {
            stand_ins.iter().find(|(n, _)| n == name).map_or(given, |(_, var)| var).clone()
        };
        self.inputs.iter().zip(given).map(leaf).collect()
    }

    /// The names of all inputs.
    pub fn names(&self) -> Vec<String> {
        self.inputs.iter().map(|(name, _)| name.clone()).collect()
    }

    /// An input that may be absent.
    pub fn opt(&self, name: &str) -> Option<&Var> {
        self.read.borrow_mut().insert(name.into());
        self.inputs.iter().find(|(n, _)| n == name).map(|(_, var)| var)
    }

    /// An input that must be there.
    pub fn var(&self, name: &str) -> Result<&Var> {
        self.opt(name).ok_or_else(|| Error::Custom(format!("the case has no input {name}")))
    }

    /// The inputs `name.0`, `name.1`, ...
    pub fn list(&self, name: &str) -> Vec<Var> {
        (0..).map_while(|i| self.opt(&format!("{name}.{i}")).cloned()).collect()
    }

    /// An integer attribute that must be there.
    pub fn int(&self, name: &str) -> Result<i64> {
        self.attrs.int(name).ok_or_else(|| Error::Custom(format!("the case has no attribute {name}")))
    }
}

/// One output.
pub fn one(output: Result<Var>) -> Option<Result<Vec<Var>>> {
    Some(output.map(|var| vec![var]))
}
