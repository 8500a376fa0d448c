//! The operators by family: each turns a case's arguments into a call of the library.

mod binary;
mod choice;
mod conv;
mod fused;
mod index;
mod layout;
mod matmul;
mod model;
mod module;
mod optim;
mod pointwise_loss;
mod pool;
mod reduce;
mod unary;

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
}

/// What a family says to a call.
pub enum Reply {
    Unknown,
    Done(Result<Vec<Var>>),
}

/// A family of operators with the usual form: `None` if the operator is none of its own.
type Family = fn(&Call<'_>) -> Option<Result<Vec<Var>>>;

/// A family that reads and checks its cases itself.
type Special = fn(&Set, &Case) -> Option<std::result::Result<(), String>>;

#[rustfmt::skip] // One a line, so that additions do not meet.
const FAMILIES: &[Family] = &[
    unary::run,
    binary::run,
    choice::run,
    fused::run,
    layout::run,
    matmul::run,
    reduce::run,
    index::run,
    optim::run,
    pointwise_loss::run,
    conv::run,
    pool::run,
];

/// Families that are more than one call.
pub const SPECIAL: &[Special] = &[model::run, module::run];

/// Asks each family in turn.
pub fn call(call: &Call<'_>) -> Reply {
    FAMILIES.iter().find_map(|family| family(call)).map_or(Reply::Unknown, Reply::Done)
}

impl<'a> Call<'a> {
    pub fn new(op: &'a str, attrs: &'a Attrs<'a>, inputs: Vec<(String, Var)>) -> Call<'a> {
        Call { op, attrs, inputs, read: RefCell::default() }
    }

    /// The first input that nobody asked for.
    pub fn unread(&self) -> Option<String> {
        let read = self.read.borrow();
        self.inputs.iter().find(|(name, _)| !read.contains(name)).map(|(name, _)| format!("input {name}"))
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
