//! The text as a tree: directives, variables, functions and their statements, with names not yet looked up.

mod body;
mod cursor;
mod directive;
mod lexer;
mod operand;

pub(crate) use directive::read;
pub(crate) use operand::Operand;

use std::collections::HashMap;

use crate::Location;

/// A module's text.
#[derive(Debug, Default)]
pub(crate) struct Source {
    pub(crate) functions: Vec<Function>,
    pub(crate) variables: Vec<Declaration>,
    pub(crate) files: HashMap<u64, String>,
}

/// The spaces that a variable can be declared in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Home {
    Register,
    Global,
    Constant,
    Shared,
    Local,
    Parameter,
}

/// A variable as it is declared.
#[derive(Clone, Debug)]
pub(crate) struct Declaration {
    pub(crate) home: Home,
    pub(crate) name: String,
    /// How many registers `%r<n>` declares.
    pub(crate) many: Option<u32>,
    /// The type of an element, without its dot.
    pub(crate) kind: String,
    pub(crate) align: u32,
    /// All of it: elements times their size; 0 for an array without a length.
    pub(crate) bytes: u64,
    pub(crate) external: bool,
    pub(crate) value: Vec<u8>,
    pub(crate) addresses: Vec<(u64, String, u64)>,
    pub(crate) line: u32,
}

/// A `.entry` or a `.func`.
#[derive(Debug)]
pub(crate) struct Function {
    pub(crate) name: String,
    pub(crate) entry: bool,
    pub(crate) returns: Vec<Declaration>,
    pub(crate) parameters: Vec<Declaration>,
    pub(crate) threads_max: Option<u32>,
    pub(crate) cluster: Option<[u32; 3]>,
    /// `None` for a prototype.
    pub(crate) body: Option<Vec<Statement>>,
    pub(crate) line: u32,
}

/// A statement of a body.
#[derive(Debug)]
pub(crate) enum Statement {
    Open,
    Close,
    Label(String),
    Declare(Declaration),
    /// `.branchtargets`, `.calltargets`: a label with names.
    Targets(String, Vec<String>),
    /// The label of a `.callprototype`: a call finds its function's parameters without it.
    Prototype(String),
    Instruction(Box<Spelled>),
}

/// An instruction as it is spelled.
#[derive(Debug)]
pub(crate) struct Spelled {
    pub(crate) guard: Option<(String, bool)>,
    /// `ld`, `global`, `v4`, `f32`.
    pub(crate) parts: Vec<String>,
    pub(crate) operands: Vec<Operand>,
    pub(crate) line: u32,
    /// Which of the function's locations it has.
    pub(crate) place: Option<Place>,
}

/// A `.loc`: file, line, column, and where that was inlined.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Place {
    pub(crate) file: u64,
    pub(crate) line: u32,
    pub(crate) column: u32,
    pub(crate) inlined_at: Option<(u64, u32, u32)>,
}

impl Place {
    /// The place with its files' names.
    pub(crate) fn resolve(&self, files: &HashMap<u64, String>) -> Location {
        let name = |file: u64| files.get(&file).cloned().unwrap_or_else(|| format!("file {file}"));
        let inlined_at = self.inlined_at.map(|(file, line, column)| {
            Box::new(Location { file: name(file), line, column, inlined_at: None })
        });
        Location { file: name(self.file), line: self.line, column: self.column, inlined_at }
    }
}

/// The bytes of an element of a type.
pub(crate) fn type_bytes(kind: &str) -> Option<u32> {
    Some(match kind {
        "pred" | "b8" | "u8" | "s8" | "e4m3" | "e5m2" => 1,
        "b16" | "u16" | "s16" | "f16" | "bf16" | "e4m3x2" | "e5m2x2" => 2,
        "b32" | "u32" | "s32" | "f32" | "f16x2" | "bf16x2" | "u16x2" | "s16x2" | "tf32" => 4,
        "b64" | "u64" | "s64" | "f64" => 8,
        "b128" => 16,
        _ => return None,
    })
}
