//! The statements of a function.

use super::cursor::Cursor;
use super::directive::declarations;
use super::lexer::Kind;
use super::operand::operand;
use super::{Place, Spelled, Statement};
use crate::ParseError;

/// Reads a body with its braces.
pub(super) fn body(cursor: &mut Cursor) -> Result<Vec<Statement>, ParseError> {
    cursor.want("{")?;
    let (mut found, mut depth, mut place) = (Vec::new(), 1, None);
    while depth > 0 {
        if cursor.eat("{") {
            depth += 1;
            found.push(Statement::Open);
        } else if cursor.eat("}") {
            depth -= 1;
            if depth > 0 {
                found.push(Statement::Close);
            }
        } else if cursor.peek().kind == Kind::Dot {
            directive(cursor, &mut found, &mut place)?;
        } else if cursor.peek().kind == Kind::Word && cursor.second().text == ":" {
            let label = cursor.next().text.to_string();
            cursor.next();
            found.push(labelled(cursor, label)?);
        } else if cursor.eat(";") {
        } else {
            found.push(Statement::Instruction(Box::new(instruction(cursor, &place)?)));
        }
    }
    Ok(found)
}

fn directive(
    cursor: &mut Cursor,
    found: &mut Vec<Statement>,
    place: &mut Option<Place>,
) -> Result<(), ParseError> {
    match cursor.peek().text {
        "loc" => *place = Some(loc(cursor)?),
        "pragma" => cursor.skip_statement()?,
        "reg" | "local" | "shared" | "param" | "global" | "const" => {
            found.extend(declarations(cursor)?.into_iter().map(Statement::Declare));
        }
        _ => return cursor.error("a statement"),
    }
    Ok(())
}

/// `.loc file line column, function_name label, inlined_at file line column`
pub(super) fn loc(cursor: &mut Cursor) -> Result<Place, ParseError> {
    cursor.next();
    let three = |cursor: &mut Cursor| -> Result<(u64, u32, u32), ParseError> {
        Ok((cursor.integer()? as u64, cursor.integer()? as u32, cursor.integer()? as u32))
    };
    let (file, line, column) = three(cursor)?;
    let mut place = Place { file, line, column, inlined_at: None };
    while cursor.eat(",") {
        match cursor.want_kind(Kind::Word, "`function_name` or `inlined_at`")?.text {
            "function_name" => {
                cursor.next();
                if cursor.eat("+") {
                    cursor.integer()?;
                }
            }
            "inlined_at" => place.inlined_at = Some(three(cursor)?),
            _ => return cursor.error("`inlined_at`"),
        }
    }
    Ok(place)
}

/// What stands behind a label: perhaps a table of targets or a prototype.
fn labelled(cursor: &mut Cursor, label: String) -> Result<Statement, ParseError> {
    if cursor.eat_dot("branchtargets") || cursor.eat_dot("calltargets") {
        let mut names = Vec::new();
        while !cursor.eat(";") {
            names.push(cursor.want_kind(Kind::Word, "a target")?.text.to_string());
            cursor.eat(",");
        }
        return Ok(Statement::Targets(label, names));
    }
    if cursor.eat_dot("callprototype") {
        cursor.skip_statement()?;
        return Ok(Statement::Prototype(label));
    }
    Ok(Statement::Label(label))
}

fn instruction(cursor: &mut Cursor, place: &Option<Place>) -> Result<Spelled, ParseError> {
    let line = cursor.peek().line;
    let mut guard = None;
    if cursor.eat("@") {
        let negated = cursor.eat("!");
        guard = Some((cursor.want_kind(Kind::Word, "a predicate")?.text.to_string(), negated));
    }
    let mut parts = vec![cursor.want_kind(Kind::Word, "an instruction")?.text.to_string()];
    while cursor.peek().kind == Kind::Dot {
        parts.push(cursor.next().text.to_string());
    }
    let mut operands = Vec::new();
    while !cursor.eat(";") {
        operands.push(operand(cursor)?);
        if !cursor.eat(",") && !cursor.at_mark(";") {
            return cursor.error("`,` or `;`");
        }
    }
    Ok(Spelled { guard, parts, operands, line, place: place.clone() })
}
