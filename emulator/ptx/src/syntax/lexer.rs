//! Text to tokens, and a cursor over these.

use crate::ParseError;

/// A token with its line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Token<'a> {
    pub(crate) kind: TokenKind,
    pub(crate) text: &'a str,
    pub(crate) line: u32,
}

/// What a token is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TokenKind {
    /// A name, perhaps with `%` or `$` in it.
    Word,
    /// `.name`, perhaps with `::` in it; the text is without the first dot.
    Dot,
    Number,
    /// Text without its quotes.
    Text,
    Mark,
    End,
}

fn is_word(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'$' | b'%')
}

/// All tokens of a text, and one `End`.
///
/// # Errors
/// On text or a comment without an end.
pub(crate) fn tokens(text: &str) -> Result<Vec<Token<'_>>, ParseError> {
    let bytes = text.as_bytes();
    let (mut tokens, mut at, mut line) = (Vec::new(), 0, 1);
    while at < bytes.len() {
        let start = at;
        match bytes[at] {
            b'\n' => {
                line += 1;
                at += 1;
            }
            byte if byte.is_ascii_whitespace() => at += 1,
            b'/' if bytes.get(at + 1) == Some(&b'/') => at = find(bytes, at, b"\n").unwrap_or(bytes.len()),
            b'/' if bytes.get(at + 1) == Some(&b'*') => {
                let what = "a comment has no end".to_string();
                at = find(bytes, at + 2, b"*/").ok_or(ParseError { line, what })? + 2;
                line += bytes[start..at].iter().filter(|&&b| b == b'\n').count() as u32;
            }
            b'"' => {
                let what = "a text has no end".to_string();
                at = find(bytes, at + 1, b"\"").ok_or(ParseError { line, what })? + 1;
                tokens.push(Token { kind: TokenKind::Text, text: &text[start + 1..at - 1], line });
            }
            byte if byte.is_ascii_digit() => {
                at = number(bytes, at);
                tokens.push(Token { kind: TokenKind::Number, text: &text[start..at], line });
            }
            b'.' if bytes.get(at + 1).is_some_and(|&b| is_word(b)) => {
                at = dotted(bytes, at + 1);
                tokens.push(Token { kind: TokenKind::Dot, text: &text[start + 1..at], line });
            }
            byte if is_word(byte) => {
                at += bytes[at..].iter().take_while(|&&b| is_word(b)).count();
                tokens.push(Token { kind: TokenKind::Word, text: &text[start..at], line });
            }
            byte if byte.is_ascii() => {
                at += 1;
                tokens.push(Token { kind: TokenKind::Mark, text: &text[start..at], line });
            }
            _ => return Err(ParseError { line, what: "a character that is not ASCII".into() }),
        }
    }
    tokens.push(Token { kind: TokenKind::End, text: "", line });
    Ok(tokens)
}

fn find(bytes: &[u8], from: usize, what: &[u8]) -> Option<usize> {
    bytes[from..].windows(what.len()).position(|w| w == what).map(|i| from + i)
}

/// The end of `name(::name)*`.
fn dotted(bytes: &[u8], mut at: usize) -> usize {
    loop {
        at += bytes[at..].iter().take_while(|&&b| is_word(b)).count();
        let more = bytes[at..].starts_with(b"::") && bytes.get(at + 2).is_some_and(|&b| is_word(b));
        if !more {
            return at;
        }
        at += 2;
    }
}

/// The end of a number: digits of any base, a fraction, an exponent with its sign.
fn number(bytes: &[u8], start: usize) -> usize {
    let mut at = start;
    let hexadecimal =
        bytes[start..].len() > 1 && matches!(bytes[start + 1], b'x' | b'X' | b'f' | b'F' | b'd' | b'D');
    while at < bytes.len() {
        let fraction = bytes[at] == b'.' && bytes.get(at + 1).is_some_and(u8::is_ascii_digit);
        let sign = matches!(bytes[at], b'+' | b'-') && matches!(bytes[at - 1], b'e' | b'E') && !hexadecimal;
        if !(bytes[at].is_ascii_alphanumeric() || fraction || sign && at > start) {
            break;
        }
        at += 1;
    }
    at
}

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
        if token.kind != TokenKind::End {
            self.at += 1;
        }
        token
    }

    /// An error at the next token.
    pub(crate) fn error<T>(&self, wanted: &str) -> Result<T, ParseError> {
        let token = self.peek();
        let found = if token.kind == TokenKind::End { "the end" } else { token.text };
        Err(ParseError { line: token.line, what: format!("{wanted} wanted, found `{found}`") })
    }

    /// Whether the next token is this mark.
    pub(crate) fn at_mark(&self, mark: &str) -> bool {
        self.peek().kind == TokenKind::Mark && self.peek().text == mark
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
        let found = self.peek().kind == TokenKind::Dot && self.peek().text == name;
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
    pub(crate) fn want_kind(&mut self, kind: TokenKind, what: &str) -> Result<Token<'a>, ParseError> {
        if self.peek().kind == kind { Ok(self.next()) } else { self.error(what) }
    }

    /// Takes a whole number, perhaps with a sign.
    pub(crate) fn integer(&mut self) -> Result<i128, ParseError> {
        let negative = self.eat("-");
        if !negative {
            self.eat("+");
        }
        let token = self.want_kind(TokenKind::Number, "a number")?;
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
            if self.peek().kind == TokenKind::End {
                return self.error("`}`");
            }
            let token = self.next();
            if token.kind == TokenKind::Mark {
                depth += (token.text == "{") as i32 - (token.text == "}") as i32;
            }
        }
        Ok(())
    }

    /// Skips everything up to and with the next `;`.
    pub(crate) fn skip_statement(&mut self) -> Result<(), ParseError> {
        while !self.eat(";") {
            if self.peek().kind == TokenKind::End {
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

#[cfg(test)]
mod tests {
    use super::{TokenKind, tokens};

    #[test]
    fn words_dots_numbers_and_lines_are_told_apart() {
        let found =
            tokens("ld.shared::cta.v2 {%f1}, [x+0x10]; // c\n mov 0f3F800000 1e-5, $L_1: /* \n */ \"a b\"")
                .unwrap();
        let texts: Vec<_> = found.iter().map(|t| t.text).collect();
        let wanted = "ld|shared::cta|v2|{|%f1|}|,|[|x|+|0x10|]|;|mov|0f3F800000|1e-5|,|$L_1|:|a b|";
        assert_eq!(texts.join("|"), wanted);
        assert_eq!(found[1].kind, TokenKind::Dot);
        assert_eq!((found[13].line, found[19].line), (2, 3));
    }
}
