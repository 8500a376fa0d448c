//! The command line that a run was started with, as its report shows it.

/// The command line, quoted for a shell.
pub(crate) fn command() -> String {
    std::env::args().map(quoted).collect::<Vec<_>>().join(" ")
}

/// A word of a command line as a shell reads it.
fn quoted(word: String) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_./=:,+@%".contains(c);
    if !word.is_empty() && word.chars().all(plain) {
        word
    } else {
        format!("'{}'", word.replace('\'', "'\\''"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_quoted_where_a_shell_would_cut_them() {
        assert_eq!(
            [quoted("--lr=1e-3".into()), quoted("a b's".into()), quoted(String::new())],
            ["--lr=1e-3", "'a b'\\''s'", "''"]
        );
    }
}
