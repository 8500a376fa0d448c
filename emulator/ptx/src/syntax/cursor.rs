//! A place among the tokens, with what every part of the grammar needs.

use super::lexer::{Kind, Token};
use crate::ParseError;

/// Tokens, and the next one.
pub(crate) struct Cursor<'a> {
    tokens: Vec<Token<'a>>,
    at: usize,
}

impl<'a> Cursor<'a> {
    /// At the first token; the last must be `End`.
    pub(crate) fn new(tokens: Vec<Token<'a>>) -> Cursor<'a> {
        Cursor { tokens, at: 0 }
    }

    /// The next token.
    pub(crate) fn peek(&self) -> Token<'a> {
        self.tokens[self.at]
    }

    /// The token after the next.
    pub(crate) fn second(&self) -> Token<'a> {
        self.tokens[(self.at + 1).min(self.tokens.len() - 1)]
    }

    /// Takes the next token. `End` stays.
    pub(crate) fn next(&mut self) -> Token<'a> {
        let token = self.peek();
        if token.kind != Kind::End {
            self.at += 1;
        }
        token
    }

    /// An error at the next token.
    pub(crate) fn error<T>(&self, wanted: &str) -> Result<T, ParseError> {
        let token = self.peek();
        let found = if token.kind == Kind::End { "the end" } else { token.text };
        Err(ParseError { line: token.line, what: format!("{wanted} wanted, found `{found}`") })
    }

    /// Whether the next token is this mark.
    pub(crate) fn at_mark(&self, mark: &str) -> bool {
        self.peek().kind == Kind::Mark && self.peek().text == mark
    }

    /// Takes a mark if it is next.
    pub(crate) fn eat(&mut self, mark: &str) -> bool {
        let found = self.at_mark(mark);
        if found {
            self.at += 1;
        }
        found
    }

    /// Takes `.name` if it is next.
    pub(crate) fn eat_dot(&mut self, name: &str) -> bool {
        let found = self.peek().kind == Kind::Dot && self.peek().text == name;
        if found {
            self.at += 1;
        }
        found
    }

    /// Takes a mark that must be next.
    pub(crate) fn want(&mut self, mark: &str) -> Result<(), ParseError> {
        if self.eat(mark) { Ok(()) } else { self.error(&format!("`{mark}`")) }
    }

    /// Takes a token of a kind that must be next.
    pub(crate) fn want_kind(&mut self, kind: Kind, what: &str) -> Result<Token<'a>, ParseError> {
        if self.peek().kind == kind { Ok(self.next()) } else { self.error(what) }
    }

    /// Takes a whole number, perhaps with a sign.
    pub(crate) fn integer(&mut self) -> Result<i128, ParseError> {
        let negative = self.eat("-");
        if !negative {
            self.eat("+");
        }
        let token = self.want_kind(Kind::Number, "a number")?;
        let Some(value) = integer(token.text) else {
            return Err(ParseError {
                line: token.line,
                what: format!("`{}` is no whole number", token.text),
            });
        };
        Ok(if negative { -value } else { value })
    }

    /// Skips everything up to the brace that closes the next one.
    pub(crate) fn skip_braces(&mut self) -> Result<(), ParseError> {
        self.want("{")?;
        let mut depth = 1;
        while depth > 0 {
            if self.peek().kind == Kind::End {
                return self.error("`}`");
            }
            let token = self.next();
            if token.kind == Kind::Mark {
                depth += (token.text == "{") as i32 - (token.text == "}") as i32;
            }
        }
        Ok(())
    }

    /// Skips everything up to and with the next `;`.
    pub(crate) fn skip_statement(&mut self) -> Result<(), ParseError> {
        while !self.eat(";") {
            if self.peek().kind == Kind::End {
                return self.error("`;`");
            }
            self.next();
        }
        Ok(())
    }
}

/// A whole number as PTX writes it: decimal, `0x`, `0b`, octal with a leading 0, perhaps with `U`.
pub(crate) fn integer(text: &str) -> Option<i128> {
    let text = text.strip_suffix(['U', 'u']).unwrap_or(text);
    let based = |digits: &str, base| i128::from_str_radix(digits, base).ok();
    if let Some(digits) = text.strip_prefix("0x").or_else(|| text.strip_prefix("0X")) {
        return based(digits, 16);
    }
    if let Some(digits) = text.strip_prefix("0b").or_else(|| text.strip_prefix("0B")) {
        return based(digits, 2);
    }
    if text.len() > 1 && text.starts_with('0') {
        return based(&text[1..], 8);
    }
    based(text, 10)
}
