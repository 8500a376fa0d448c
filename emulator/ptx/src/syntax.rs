//! The text as a tree: directives, variables, functions, their statements and operands, with names not yet looked up.

use std::collections::HashMap;

use crate::syntax::lexer::{Cursor, TokenKind, integer};
use crate::{AddressOf, Location, ParseError};

mod lexer;
mod parser;

pub(crate) use parser::read;

/// A module's text as a tree.
#[derive(Debug, Default)]
pub(crate) struct SyntaxTree {
    pub(crate) functions: Vec<Function>,
    pub(crate) variables: Vec<Declaration>,
    pub(crate) files: HashMap<u64, String>,
}

/// The spaces that a variable can be declared in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum StateSpace {
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
    pub(crate) space: StateSpace,
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
    pub(crate) addresses: Vec<AddressOf>,
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
    Instruction(Box<RawInstruction>),
    /// A directive that is not known: the text's line, and its name.
    Unknown(u32, String),
}

/// An instruction as the text has it, with names not yet looked up.
#[derive(Debug)]
pub(crate) struct RawInstruction {
    pub(crate) guard: Option<(String, bool)>,
    /// `ld`, `global`, `v4`, `f32`.
    pub(crate) parts: Vec<String>,
    pub(crate) operands: Vec<Operand>,
    pub(crate) line: u32,
    /// The `.loc` that it stands behind.
    pub(crate) loc: Option<LocDirective>,
}

/// A `.loc`: file, line, column, and where that was inlined.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct LocDirective {
    pub(crate) file: u64,
    pub(crate) line: u32,
    pub(crate) column: u32,
    pub(crate) inlined_at: Option<(u64, u32, u32)>,
}

impl LocDirective {
    /// The location with its files' names.
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
        "b64" | "u64" | "s64" | "f64" | "texref" | "samplerref" | "surfref" => 8,
        "b128" => 16,
        _ => return None,
    })
}

/// An operand, with names not yet looked up.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Operand {
    /// A register, variable, label or function, perhaps with something added.
    Name(String, i64),
    /// A whole number's bits, with its sign extended.
    Integer(u64),
    /// `0f...` or a decimal fraction.
    Float(f64),
    /// `{a, b}`
    Vector(Vec<Operand>),
    /// `[a + 4]`, or with more: `[map, {x, y}]`.
    Address(Vec<Operand>),
    /// `(a, b)` of a call.
    Group(Vec<Operand>),
    /// `a|b`
    Pair(Box<Operand>, Box<Operand>),
    /// `!p`
    Not(Box<Operand>),
    /// `_`
    Nothing,
}

/// Reads one operand.
pub(crate) fn operand(cursor: &mut Cursor) -> Result<Operand, ParseError> {
    let first = single(cursor)?;
    if cursor.eat("|") {
        let second = single(cursor)?;
        return Ok(Operand::Pair(Box::new(first), Box::new(second)));
    }
    Ok(first)
}

/// Operands between commas up to `end`, which is taken.
fn list(cursor: &mut Cursor, end: &str) -> Result<Vec<Operand>, ParseError> {
    let mut found = Vec::new();
    while !cursor.eat(end) {
        found.push(operand(cursor)?);
        if !cursor.eat(",") && !cursor.at_mark(end) {
            return cursor.error(end);
        }
    }
    Ok(found)
}

fn single(cursor: &mut Cursor) -> Result<Operand, ParseError> {
    if cursor.eat("{") {
        return Ok(Operand::Vector(list(cursor, "}")?));
    }
    if cursor.eat("[") {
        return Ok(Operand::Address(list(cursor, "]")?));
    }
    if cursor.eat("(") {
        return Ok(Operand::Group(list(cursor, ")")?));
    }
    if cursor.eat("!") {
        return Ok(Operand::Not(Box::new(single(cursor)?)));
    }
    if cursor.at_mark("-") || cursor.peek().kind == TokenKind::Number {
        return number(cursor);
    }
    let mut name = cursor.want_kind(TokenKind::Word, "an operand")?.text.to_string();
    if name == "_" {
        return Ok(Operand::Nothing);
    }
    while cursor.peek().kind == TokenKind::Dot {
        name.push('.');
        name.push_str(cursor.next().text);
    }
    let mut added = 0i64;
    while cursor.at_mark("+") || cursor.at_mark("-") {
        let minus = cursor.next().text == "-";
        let value = cursor.integer()? as i64;
        added = if minus { added.wrapping_sub(value) } else { added.wrapping_add(value) };
    }
    Ok(Operand::Name(name, added))
}

fn number(cursor: &mut Cursor) -> Result<Operand, ParseError> {
    let negative = cursor.eat("-");
    let token = cursor.want_kind(TokenKind::Number, "a number")?;
    let Some(value) = literal(token.text) else {
        return Err(ParseError { line: token.line, what: format!("`{}` is no number", token.text) });
    };
    Ok(match (value, negative) {
        (Operand::Integer(bits), true) => Operand::Integer(bits.wrapping_neg()),
        (Operand::Float(value), true) => Operand::Float(-value),
        (value, _) => value,
    })
}

/// A number as PTX writes it. A NaN of 32 bits keeps its payload in the f64's upper bits.
pub(crate) fn literal(text: &str) -> Option<Operand> {
    if let Some(digits) = text.strip_prefix("0f").or_else(|| text.strip_prefix("0F")) {
        let bits = u32::from_str_radix(digits, 16).ok()?;
        return Some(Operand::Float(f32::from_bits(bits) as f64));
    }
    if let Some(digits) = text.strip_prefix("0d").or_else(|| text.strip_prefix("0D")) {
        return Some(Operand::Float(f64::from_bits(u64::from_str_radix(digits, 16).ok()?)));
    }
    if let Some(value) = integer(text) {
        return Some(Operand::Integer(value as u64));
    }
    text.parse().ok().map(Operand::Float)
}
