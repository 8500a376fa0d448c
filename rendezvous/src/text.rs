//! Text for people: ranks by their numbers, and what comes from the network.

/// Ranks by their numbers: `rank 1`, `ranks 0, 2`.
pub fn name_ranks(ranks: &[usize]) -> String {
    let numbers: Vec<String> = ranks.iter().map(usize::to_string).collect();
    format!("rank{} {}", if ranks.len() == 1 { "" } else { "s" }, numbers.join(", "))
}

/// The characters of a text from the network that are shown.
const TEXT_MAX: usize = 4000;

/// Text from the network as one line that may be printed: escapes control characters, and cuts a long text.
pub fn clean(text: &[u8]) -> String {
    let text = String::from_utf8_lossy(&text[..text.len().min(4 * TEXT_MAX)]);
    let mut line = String::new();
    for (place, c) in text.chars().enumerate() {
        match c {
            _ if place == TEXT_MAX => return line + "..",
            '\n' => line.push(' '),
            c if c.is_control() => line.extend(c.escape_default()),
            c => line.push(c),
        }
    }
    line
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_from_the_network_is_one_line_of_a_bounded_length() {
        assert_eq!(clean(b"a\nb\x1b[2J\xff\r"), "a b\\u{1b}[2J\u{fffd}\\r");
        assert_eq!(clean(&vec![b'x'; 1 << 20]).len(), TEXT_MAX + 2);
    }
}
