//! An instruction's operands.

use super::cursor::{Cursor, integer};
use super::lexer::Kind;
use crate::ParseError;

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
    if cursor.at_mark("-") || cursor.peek().kind == Kind::Number {
        return number(cursor);
    }
    let mut name = cursor.want_kind(Kind::Word, "an operand")?.text.to_string();
    if name == "_" {
        return Ok(Operand::Nothing);
    }
    while cursor.peek().kind == Kind::Dot {
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
    let token = cursor.want_kind(Kind::Number, "a number")?;
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
