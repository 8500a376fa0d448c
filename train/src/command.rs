//! The command line that a run was started with, as its report shows it.

use crate::Config;

/// The command line, quoted for a shell.
pub(crate) fn command() -> String {
    std::env::args().map(quoted).collect::<Vec<_>>().join(" ")
}

/// Tells settings that were given from those that have their defaults.
pub(crate) struct Given {
    words: Vec<String>,
    defaults: Vec<(String, String)>,
}

impl Given {
    pub fn new() -> Given {
        Given { words: std::env::args().collect(), defaults: Config::default().settings() }
    }

    /// A setting of [`Config`] that differs from its default, or another that the command line names.
    pub fn is(&self, key: &str, value: &str) -> bool {
        let default = self.defaults.iter().find(|(name, _)| name == key);
        let flag = format!("--{key}");
        let is_named = |word: &String| {
            word.strip_prefix(&flag).is_some_and(|rest| rest.is_empty() || rest.starts_with('='))
        };
        self.words.iter().any(is_named)
            || default.is_some_and(|(_, default)| default != value && !self.has_flags())
    }

    fn has_flags(&self) -> bool {
        self.words.iter().any(|word| word.starts_with("--"))
    }
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

    #[test]
    fn a_setting_is_given_by_a_flag_or_by_another_value_than_the_default() {
        let defaults = Config::default().settings();
        let with = |words: &[&str]| Given {
            words: words.iter().map(|word| word.to_string()).collect(),
            defaults: defaults.clone(),
        };
        let flags = with(&["gpt", "--lr", "1e-3", "--width=64"]);
        assert!(flags.is("lr", "1e-3") && flags.is("width", "64"));
        assert!(!flags.is("wid", "64") && !flags.is("steps", "17"));
        let program = with(&["program"]);
        let (name, value) = defaults.iter().find(|(name, _)| name == "batch").unwrap();
        assert!(!program.is(name, value) && program.is(name, "another"));
    }
}
