//! [`Settings`]: a configuration by keys. Values come from a program's defaults, from a TOML file and from words such as `--steps 500`;
//! later sources overrule earlier ones. The same table of keys has the help texts, and writes the file that repeats a run.

mod key;

use std::collections::BTreeMap;
use std::path::Path;

use toml::{Table, Value as Toml};

pub use key::{Key, Keyed, SettingValue, ValueKind};

use crate::report::Setting;
use crate::{Error, Result};

/// The source of a value. Later ones overrule earlier ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum ValueSource {
    /// A file.
    File,
    /// A command line, or the program.
    Words,
}

/// Returns the source and the text that a file or words gave a key, by the key's name.
pub type GivenValues<'a> = dyn Fn(&str) -> Option<(ValueSource, String)> + 'a;

/// The values of a configuration's keys: those of the program, and those that files and words give.
///
/// ```
/// use phalanx_train::{Config, Settings};
/// let mut settings = Settings::new(Config { steps: 200, ..Config::default() });
/// settings.read_text("batch = 8\nclip = 0.5", "run.toml")?;
/// settings.words(["--batch", "16", "--dp=2"].map(String::from))?;
/// let config = settings.resolve()?;
/// assert_eq!((config.steps, config.batch, config.clip, config.layout.dp), (200, 16, Some(0.5), 2));
/// assert!(settings.to_toml(&[]).contains("\nbatch = 16\n"));
/// let error = settings.read_text("stepz = 3", "run.toml").unwrap_err().to_string();
/// assert_eq!(error, "run.toml: there is no key \"stepz\"; the nearest is \"steps\"");
/// # Ok::<(), phalanx_train::Error>(())
/// ```
#[derive(Clone)]
pub struct Settings<C> {
    keys: Vec<Key<C>>,
    base: C,
    given: BTreeMap<&'static str, (ValueSource, String)>,
}

/// Takes a flag that is no key, such as one that names a file of settings, and its value out of a command line, which has it once at most.
///
/// # Errors
/// If it has no value, or comes twice.
pub fn take_flag(words: &mut Vec<String>, flag: &str) -> Result<Option<String>> {
    let assigned = |word: &str| word.strip_prefix(flag)?.strip_prefix('=').map(String::from);
    let mut found = Vec::new();
    while let Some(at) = words.iter().position(|word| word == flag || assigned(word).is_some()) {
        let word = words.remove(at);
        let value = assigned(&word).or_else(|| (at < words.len()).then(|| words.remove(at)));
        found.push(value.ok_or_else(|| Error::Config(format!("{flag} has no value, wanted one")))?);
    }
    match &found[..] {
        [_, second, ..] => Err(Error::Config(format!("got a second {flag}, {second}, wanted one"))),
        _ => Ok(found.pop()),
    }
}

impl<C: Keyed> Settings<C> {
    /// Those of a configuration.
    pub fn new(base: C) -> Settings<C> {
        Settings { keys: C::keys(), base, given: BTreeMap::new() }
    }

    /// All keys.
    pub fn keys(&self) -> &[Key<C>] {
        &self.keys
    }

    /// A key's text; none if it has no value.
    pub fn value(&self, name: &str) -> Option<String> {
        let given = self.given.get(name).map(|(_, text)| text.clone());
        given.or_else(|| self.keys.iter().find(|key| key.name == name).and_then(|key| (key.get)(&self.base)))
    }

    /// Every key that has a value, for a report. Those that a file, words or the program have given are marked.
    pub fn listed(&self) -> Vec<Setting>
    where
        C: Default,
    {
        let default = C::default();
        let setting = |key: &Key<C>| {
            let given = self.given.contains_key(key.name) || (key.get)(&self.base) != (key.get)(&default);
            Some(Setting { key: key.name.into(), value: self.value(key.name)?, given })
        };
        self.keys.iter().filter_map(setting).collect()
    }

    /// Gives a key a value, unless a later source has.
    ///
    /// # Errors
    /// If there is no such key, or the text is not of its form.
    pub fn set(&mut self, name: &str, text: &str, source: ValueSource) -> Result<()> {
        let key = self.keys.iter().find(|key| key.name == name).ok_or_else(|| self.unknown(name))?;
        (key.set)(&mut self.base.clone(), text).ok_or_else(|| key.refused(text))?;
        let text = key.kind.plain(text);
        let text = match self.given.get(key.name) {
            Some((before, _)) if *before > source => return Ok(()),
            // The texts of a list are given one by one.
            Some((before, texts)) if *before == source && key.kind == ValueKind::Texts => {
                format!("{texts}\n{text}")
            }
            _ => text,
        };
        self.given.insert(key.name, (source, text));
        Ok(())
    }

    /// Two keys that exclude each other. If a file gives one and words the other, the words overrule the file.
    ///
    /// # Errors
    /// If both come from the same place.
    pub fn either(&mut self, one: &str, other: &str) -> Result<()> {
        let source = |name: &str| self.given.get(name).map(|(source, _)| *source);
        match (source(one), source(other)) {
            (Some(a), Some(b)) if a == b => {
                Err(Error::Config(format!("`{one}` does not go with `{other}`, wanted one of them")))
            }
            (Some(a), Some(b)) => {
                self.given.remove(if a < b { one } else { other });
                Ok(())
            }
            _ => Ok(()),
        }
    }

    /// Reads a TOML file of keys.
    ///
    /// # Errors
    /// If it cannot be read, has an unknown key, or a value of another form.
    pub fn read(&mut self, path: &Path) -> Result<()> {
        let text = std::fs::read_to_string(path).map_err(|e| Error::file(path, e))?;
        self.read_text(&text, &path.display().to_string())
    }

    /// Reads TOML, which errors call `name`.
    ///
    /// # Errors
    /// As [`Settings::read`].
    pub fn read_text(&mut self, text: &str, name: &str) -> Result<()> {
        let table: Table = text
            .parse()
            .map_err(|e: toml::de::Error| Error::data(name, e.to_string().trim().replace('\n', " ")))?;
        for (key, value) in &table {
            let set =
                as_text(key, value, &self.keys).and_then(|text| self.set(key, &text, ValueSource::File));
            set.map_err(|error| Error::data(name, error.to_string()))?;
        }
        Ok(())
    }

    /// Reads words: `--key value`, `--key=value`, `--key` alone for a switch, and several values behind the key of a list.
    ///
    /// # Errors
    /// If a word is no key, lacks its value, or has one of another form.
    pub fn words(&mut self, words: impl IntoIterator<Item = String>) -> Result<&mut Settings<C>> {
        let mut words = words.into_iter().peekable();
        while let Some(word) = words.next() {
            let Some(name) = word.strip_prefix("--") else {
                return Err(Error::Config(format!(
                    "got {word:?}, wanted a key and its value, such as --seed 1"
                )));
            };
            let (name, value) = match name.split_once('=') {
                Some((name, value)) => (name, Some(value.to_string())),
                None => (name, None),
            };
            let key = self.keys.iter().find(|key| key.name == name).ok_or_else(|| self.unknown(&word))?;
            let kind = key.kind;
            let value = match value {
                Some(value) => value,
                None if kind == ValueKind::Switch => "true".into(),
                // A text that begins like a key can only be given with `=`.
                None => words.next_if(|word| !word.starts_with("--")).ok_or_else(|| {
                    Error::Config(format!("`{name}` has no value, wanted {}", kind.wanted()))
                })?,
            };
            self.set(name, &value, ValueSource::Words)?;
            while let Some(more) = words.next_if(|word| kind == ValueKind::Texts && !word.starts_with("--")) {
                self.set(name, &more, ValueSource::Words)?;
            }
        }
        Ok(self)
    }

    /// All keys as words, with their values and what they do.
    pub fn help(&self) -> String {
        let line = |key: &Key<C>| {
            let value = match key.kind {
                ValueKind::Whole => " N".into(),
                ValueKind::WholeOr(word) => format!(" N|{word}"),
                ValueKind::Number => " X".into(),
                ValueKind::Switch => String::new(),
                ValueKind::Text | ValueKind::Form(_) => " TEXT".into(),
                ValueKind::Texts => " TEXT..".into(),
                ValueKind::Choice(names) => format!(" {}", names.join("|")),
            };
            let default = self
                .value(key.name)
                .filter(|_| key.kind != ValueKind::Switch && !key.help.contains("[default"));
            let default =
                default.map_or_else(String::new, |value| format!(" [default: {}]", value.escape_debug()));
            format!("  --{}{value}\n      {}{default}\n", key.name, key.help)
        };
        self.keys.iter().map(line).collect()
    }

    /// The configuration.
    ///
    /// # Errors
    /// If values do not go together.
    pub fn resolve(&self) -> Result<C> {
        let mut config = self.base.clone();
        for key in &self.keys {
            if let Some((_, text)) = self.given.get(key.name) {
                (key.set)(&mut config, text).ok_or_else(|| key.refused(text))?;
            }
        }
        config.settle(&|name| self.given.get(name).cloned())?;
        Ok(config)
    }

    /// All keys but `without` as a TOML file that gives the same values; a comment for a key that has none.
    pub fn to_toml(&self, without: &[&str]) -> String {
        let line = |key: &Key<C>| match self.value(key.name) {
            Some(text) => format!("{} = {}\n", key.name, key.kind.toml(&text)),
            None => format!("# {} =\n", key.name),
        };
        self.keys.iter().filter(|key| !without.contains(&key.name)).map(line).collect()
    }

    fn unknown(&self, name: &str) -> Error {
        let near = |key: &&Key<C>| (strsim::jaro_winkler(key.name, name) * 1e6) as u64;
        let nearest = self.keys.iter().max_by_key(near).map_or("", |key| key.name);
        Error::Config(format!("there is no key {name:?}; the nearest is {nearest:?}"))
    }
}

/// A value of a TOML file as a key's text.
fn as_text<C>(name: &str, value: &Toml, keys: &[Key<C>]) -> Result<String> {
    match value {
        Toml::String(text) => Ok(text.clone()),
        Toml::Integer(n) => Ok(n.to_string()),
        Toml::Float(x) => Ok(format!("{x:?}")),
        Toml::Boolean(on) => Ok(on.to_string()),
        Toml::Array(all) if keys.iter().any(|key| key.name == name && key.kind == ValueKind::Texts) => {
            Ok(all.iter().map(|one| as_text(name, one, keys)).collect::<Result<Vec<_>>>()?.join("\n"))
        }
        other => {
            let kind = other.type_str();
            Err(Error::Config(format!("{name} has the type {kind}, wanted a number, a text, true or false")))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Config;

    #[test]
    fn a_report_marks_what_is_not_the_default() {
        let mut settings = Settings::new(Config { steps: 17, ..Config::default() });
        settings.words(["--batch", "16"].map(String::from)).unwrap();
        let listed = settings.listed();
        let given: Vec<_> = listed.iter().filter(|s| s.given).map(|s| (&s.key[..], &s.value[..])).collect();
        assert_eq!(given, [("steps", "17"), ("batch", "16")]);
        assert!(listed.len() > 10, "keys that were left are listed too");
    }
}
