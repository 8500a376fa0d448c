//! Tokens to the tree: files, variables and the heads of functions; statements and what is declared among them.

use super::lexer::{Cursor, TokenKind, tokens};
use super::{
    Declaration, Function, LocDirective, Operand, RawInstruction, StateSpace, Statement, SyntaxTree, literal,
    operand, type_bytes,
};
use crate::{AddressOf, ParseError};

/// Reads a module's text.
///
/// # Errors
/// With the line of what is no PTX.
pub(crate) fn read(text: &str) -> Result<SyntaxTree, ParseError> {
    let mut cursor = Cursor::new(tokens(text)?);
    let mut tree = SyntaxTree::default();
    while cursor.peek().kind != TokenKind::End {
        top(&mut cursor, &mut tree)?;
    }
    Ok(tree)
}

fn top(cursor: &mut Cursor, tree: &mut SyntaxTree) -> Result<(), ParseError> {
    let token = cursor.peek();
    if token.kind != TokenKind::Dot {
        return cursor.error("a directive");
    }
    match token.text {
        "version" | "address_size" => {
            cursor.next();
            cursor.next();
        }
        "target" => {
            cursor.next();
            cursor.next();
            while cursor.eat(",") {
                cursor.next();
            }
        }
        "file" => {
            cursor.next();
            let number = cursor.integer()? as u64;
            let name = cursor.want_kind(TokenKind::Text, "a file's name")?.text.to_string();
            tree.files.insert(number, name);
            while cursor.eat(",") {
                cursor.integer()?;
            }
        }
        "section" => {
            while !cursor.at_mark("{") && cursor.peek().kind != TokenKind::End {
                cursor.next();
            }
            cursor.skip_braces()?;
        }
        "pragma" | "alias" => cursor.skip_statement()?,
        "loc" => loc_directive(cursor).map(|_| ())?,
        _ => linked(cursor, tree)?,
    }
    Ok(())
}

/// A variable or a function, with what says how it is linked.
fn linked(cursor: &mut Cursor, tree: &mut SyntaxTree) -> Result<(), ParseError> {
    let mut external = false;
    loop {
        match cursor.peek().text {
            "extern" => external = true,
            "visible" | "weak" | "common" => {}
            _ => break,
        }
        cursor.next();
    }
    if cursor.peek().text == "entry" || cursor.peek().text == "func" {
        tree.functions.push(function(cursor)?);
        return Ok(());
    }
    for mut variable in declarations(cursor)? {
        variable.external = external;
        tree.variables.push(variable);
    }
    Ok(())
}

fn function(cursor: &mut Cursor) -> Result<Function, ParseError> {
    let line = cursor.peek().line;
    let entry = cursor.next().text == "entry";
    let attributes = |cursor: &mut Cursor| -> Result<(), ParseError> {
        while cursor.eat_dot("attribute") {
            while !cursor.eat(")") && cursor.peek().kind != TokenKind::End {
                cursor.next();
            }
        }
        Ok(())
    };
    attributes(cursor)?;
    let returns = if cursor.at_mark("(") { parameters(cursor)? } else { Vec::new() };
    let name = cursor.want_kind(TokenKind::Word, "a function's name")?.text.to_string();
    let takes = if cursor.at_mark("(") { parameters(cursor)? } else { Vec::new() };
    let (mut threads_max, mut cluster) = (None, None);
    while cursor.peek().kind == TokenKind::Dot {
        let directive = cursor.next();
        let mut numbers = Vec::new();
        while cursor.peek().kind == TokenKind::Number {
            numbers.push(cursor.integer()? as u32);
            cursor.eat(",");
        }
        match directive.text {
            "maxntid" | "reqntid" => threads_max = Some(numbers.iter().product()),
            "reqnctapercluster" => {
                numbers.resize(3, 1);
                cluster = Some([numbers[0], numbers[1], numbers[2]]);
            }
            "pragma" => {
                cursor.next();
                cursor.eat(";");
            }
            _ => {}
        }
    }
    let body = if cursor.eat(";") { None } else { Some(body(cursor)?) };
    Ok(Function { name, entry, returns, parameters: takes, threads_max, cluster, body, line })
}

/// `(.param .u64 a, .param .align 8 .b8 b[24])`
fn parameters(cursor: &mut Cursor) -> Result<Vec<Declaration>, ParseError> {
    cursor.want("(")?;
    let mut found = Vec::new();
    while !cursor.eat(")") {
        found.push(declaration(cursor, None)?);
        if !cursor.eat(",") && !cursor.at_mark(")") {
            return cursor.error("`)`");
        }
    }
    Ok(found)
}

/// `.global .align 4 .b8 a[16] = {1}, b[4];`
pub(super) fn declarations(cursor: &mut Cursor) -> Result<Vec<Declaration>, ParseError> {
    let mut found = vec![declaration(cursor, None)?];
    while cursor.eat(",") {
        let like = found[0].clone();
        found.push(declaration(cursor, Some(&like))?);
    }
    cursor.want(";")?;
    Ok(found)
}

fn declaration(cursor: &mut Cursor, like: Option<&Declaration>) -> Result<Declaration, ParseError> {
    let line = cursor.peek().line;
    let (mut space, mut align, mut kind, mut lanes) = (None, None, None, 1);
    if let Some(like) = like {
        (space, align, kind) = (Some(like.space), Some(like.align), Some(like.kind.clone()));
    }
    while cursor.peek().kind == TokenKind::Dot {
        match cursor.next().text {
            "reg" => space = Some(StateSpace::Register),
            "global" => space = Some(StateSpace::Global),
            "const" => space = Some(StateSpace::Constant),
            "shared" => space = Some(StateSpace::Shared),
            "local" => space = Some(StateSpace::Local),
            "param" => space = Some(StateSpace::Parameter),
            "align" => align = Some(cursor.integer()? as u32),
            "v2" => lanes = 2,
            "v4" => lanes = 4,
            "attribute" => {
                while !cursor.eat(")") && cursor.peek().kind != TokenKind::End {
                    cursor.next();
                }
            }
            "ptr" | "managed" | "visible" => {}
            text if type_bytes(text).is_some() => kind = Some(text.to_string()),
            // The space that a pointer parameter points to.
            _ => {}
        }
    }
    let Some(kind) = kind else { return cursor.error("a type") };
    let (Some(space), Some(size)) = (space, type_bytes(&kind)) else { return cursor.error("a state space") };
    // In a prototype a parameter may go without a name.
    let name =
        if cursor.peek().kind == TokenKind::Word { cursor.next().text.to_string() } else { "_".into() };
    let mut many = None;
    if cursor.eat("<") {
        many = Some(cursor.integer()? as u32);
        cursor.want(">")?;
    }
    let (mut elements, mut open) = (lanes, false);
    while cursor.eat("[") {
        if cursor.eat("]") {
            open = true;
            continue;
        }
        elements *= cursor.integer()? as u64;
        cursor.want("]")?;
    }
    let bytes = size as u64 * elements;
    let align = align.unwrap_or(size * lanes as u32).max(1);
    let (value, addresses) = (Vec::new(), Vec::new());
    let bytes = if open { 0 } else { bytes };
    let mut made =
        Declaration { space, name, many, kind, align, bytes, external: false, value, addresses, line };
    if cursor.eat("=") {
        initial(cursor, &mut made)?;
        made.bytes = made.bytes.max(made.value.len() as u64);
    }
    Ok(made)
}

/// The initial value: numbers and addresses, with braces that say no more than the order does.
fn initial(cursor: &mut Cursor, into: &mut Declaration) -> Result<(), ParseError> {
    let size = type_bytes(&into.kind).unwrap_or(1) as usize;
    let mut depth = 0;
    loop {
        if cursor.eat("{") {
            depth += 1;
        } else if cursor.eat("}") {
            depth -= 1;
        } else if cursor.at_mark(",") && depth > 0 {
            cursor.next();
        } else {
            element(cursor, into, size)?;
        }
        if depth == 0 {
            return Ok(());
        }
        if cursor.peek().kind == TokenKind::End {
            return cursor.error("`}`");
        }
    }
}

fn element(cursor: &mut Cursor, into: &mut Declaration, size: usize) -> Result<(), ParseError> {
    if cursor.peek().kind == TokenKind::Word {
        return address(cursor, into, 0, size.min(8) as u32);
    }
    if cursor.peek().kind == TokenKind::Number && cursor.second().text == "(" {
        // `0xff00(name)`: the byte of the address that the mask says.
        let mask = cursor.integer()? as u64;
        cursor.want("(")?;
        let bits = mask.trailing_zeros().min(56);
        if mask != 0xff << bits || !bits.is_multiple_of(8) {
            return cursor.error("a mask of one byte");
        }
        address(cursor, into, bits / 8, 1)?;
        return cursor.want(")");
    }
    let negative = cursor.eat("-");
    let token = cursor.want_kind(TokenKind::Number, "a number")?;
    let bits = match (literal(token.text), into.kind.as_str()) {
        (Some(Operand::Integer(bits)), _) if negative => bits.wrapping_neg(),
        (Some(Operand::Integer(bits)), _) => bits,
        (Some(Operand::Float(value)), "f64") => if negative { -value } else { value }.to_bits(),
        (Some(Operand::Float(value)), _) => (if negative { -value } else { value } as f32).to_bits() as u64,
        _ => return Err(ParseError { line: token.line, what: format!("`{}` is no number", token.text) }),
    };
    into.value.extend_from_slice(&bits.to_le_bytes()[..size.min(8)]);
    Ok(())
}

/// `name + 8` or `generic(name) + 8`, of which so many bytes from byte `first` on are the element.
fn address(cursor: &mut Cursor, into: &mut Declaration, first: u32, bytes: u32) -> Result<(), ParseError> {
    let mut name = cursor.want_kind(TokenKind::Word, "a name")?.text.to_string();
    if name == "generic" {
        cursor.want("(")?;
        name = cursor.want_kind(TokenKind::Word, "a name")?.text.to_string();
        cursor.want(")")?;
    }
    let added = match () {
        () if cursor.eat("+") => cursor.integer()? as u64,
        () if cursor.eat("-") => (cursor.integer()? as u64).wrapping_neg(),
        () => 0,
    };
    into.addresses.push(AddressOf { offset: into.value.len() as u64, name, added, first, bytes });
    into.value.extend(std::iter::repeat_n(0, bytes as usize));
    Ok(())
}

/// Reads a body with its braces.
pub(super) fn body(cursor: &mut Cursor) -> Result<Vec<Statement>, ParseError> {
    cursor.want("{")?;
    let (mut found, mut depth, mut loc) = (Vec::new(), 1, None);
    while depth > 0 {
        if cursor.eat("{") {
            depth += 1;
            found.push(Statement::Open);
        } else if cursor.eat("}") {
            depth -= 1;
            if depth > 0 {
                found.push(Statement::Close);
            }
        } else if cursor.peek().kind == TokenKind::Dot {
            directive(cursor, &mut found, &mut loc)?;
        } else if cursor.peek().kind == TokenKind::Word && cursor.second().text == ":" {
            let label = cursor.next().text.to_string();
            cursor.next();
            found.push(labelled(cursor, label)?);
        } else if cursor.eat(";") {
        } else {
            found.push(Statement::Instruction(Box::new(instruction(cursor, &loc)?)));
        }
    }
    Ok(found)
}

fn directive(
    cursor: &mut Cursor,
    found: &mut Vec<Statement>,
    loc: &mut Option<LocDirective>,
) -> Result<(), ParseError> {
    match cursor.peek().text {
        "loc" => *loc = Some(loc_directive(cursor)?),
        "pragma" => cursor.skip_statement()?,
        "reg" | "local" | "shared" | "param" | "global" | "const" => {
            found.extend(declarations(cursor)?.into_iter().map(Statement::Declare));
        }
        _ => {
            let token = cursor.next();
            found.push(Statement::Unknown(token.line, token.text.to_string()));
            cursor.skip_statement()?;
        }
    }
    Ok(())
}

/// `.loc file line column, function_name label, inlined_at file line column`
pub(super) fn loc_directive(cursor: &mut Cursor) -> Result<LocDirective, ParseError> {
    cursor.next();
    let three = |cursor: &mut Cursor| -> Result<(u64, u32, u32), ParseError> {
        Ok((cursor.integer()? as u64, cursor.integer()? as u32, cursor.integer()? as u32))
    };
    let (file, line, column) = three(cursor)?;
    let mut loc = LocDirective { file, line, column, inlined_at: None };
    while cursor.eat(",") {
        match cursor.want_kind(TokenKind::Word, "`function_name` or `inlined_at`")?.text {
            "function_name" => {
                cursor.next();
                if cursor.eat("+") {
                    cursor.integer()?;
                }
            }
            "inlined_at" => loc.inlined_at = Some(three(cursor)?),
            _ => return cursor.error("`inlined_at`"),
        }
    }
    Ok(loc)
}

/// What stands behind a label: perhaps a table of targets or a prototype.
fn labelled(cursor: &mut Cursor, label: String) -> Result<Statement, ParseError> {
    if cursor.eat_dot("branchtargets") || cursor.eat_dot("calltargets") {
        let mut names = Vec::new();
        while !cursor.eat(";") {
            names.push(cursor.want_kind(TokenKind::Word, "a target")?.text.to_string());
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

fn instruction(cursor: &mut Cursor, loc: &Option<LocDirective>) -> Result<RawInstruction, ParseError> {
    let line = cursor.peek().line;
    let mut guard = None;
    if cursor.eat("@") {
        let negated = cursor.eat("!");
        guard = Some((cursor.want_kind(TokenKind::Word, "a predicate")?.text.to_string(), negated));
    }
    let mut parts = vec![cursor.want_kind(TokenKind::Word, "an instruction")?.text.to_string()];
    while cursor.peek().kind == TokenKind::Dot {
        parts.push(cursor.next().text.to_string());
    }
    let mut operands = Vec::new();
    while !cursor.eat(";") {
        operands.push(operand(cursor)?);
        if !cursor.eat(",") && !cursor.at_mark(";") {
            return cursor.error("`,` or `;`");
        }
    }
    Ok(RawInstruction { guard, parts, operands, line, loc: loc.clone() })
}
