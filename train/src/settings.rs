//! [`Settings`]: a configuration by keys. Values come from a program's defaults, from a TOML file and from words such as `--steps 500`; the
//! later of these win. The same table of keys has the help, and writes the file that repeats a run.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use phalanx_tensor::{DType, Device};
use toml::{Table, Value as Toml};

use crate::{Error, Result};

/// What a key's values are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A whole number from 0 up.
    Whole,
    /// A number.
    Number,
    /// `true` or `false`.
    Switch,
    /// Any text.
    Text,
    /// Any number of texts.
    Texts,
    /// One of these.
    Choice(&'static [&'static str]),
    /// A text of the form that is described.
    Form(&'static str),
}

impl Kind {
    /// What an error says was wanted.
    fn wanted(self) -> String {
        match self {
            Kind::Whole => "a whole number from 0 up".into(),
            Kind::Number => "a number".into(),
            Kind::Switch => "true or false".into(),
            Kind::Text | Kind::Texts => "a text".into(),
            Kind::Choice(names) => names.join(", "),
            Kind::Form(form) => form.into(),
        }
    }

    /// The same value in one way of writing it.
    fn plain(self, text: &str) -> String {
        let plain = match self {
            Kind::Whole => text.parse().ok().map(|n: u64| n.to_string()),
            Kind::Number => text.parse().ok().map(|x: f64| x.to_string()),
            _ => None,
        };
        plain.unwrap_or_else(|| text.into())
    }

    /// The value as TOML has it. Texts are quoted, numbers are written as numbers.
    fn toml(self, text: &str) -> String {
        match self {
            Kind::Whole => text.parse::<i64>().map_or_else(|_| quoted(text), |n| n.to_string()),
            Kind::Number => {
                text.parse::<f64>().map_or_else(|_| quoted(text), |x| format!("{x:?}").replace("NaN", "nan"))
            }
            Kind::Switch => text.into(),
            Kind::Texts => format!("[{}]", text.lines().map(quoted).collect::<Vec<_>>().join(", ")),
            Kind::Text | Kind::Choice(_) | Kind::Form(_) => quoted(text),
        }
    }
}

/// A text as a TOML string on one line. JSON's escapes are TOML's, but for one character.
fn quoted(text: &str) -> String {
    serde_json::Value::from(text).to_string().replace('\u{7f}', "\\u007f")
}

/// What a key can set: read from text, and written as text that is read as the same value.
pub trait Value: Sized {
    /// What its texts are.
    const KIND: Kind;

    /// The value of a text; none if it is of another form.
    fn parse(text: &str) -> Option<Self>;

    /// The value's text; none if there is no value.
    fn text(&self) -> Option<String>;
}

macro_rules! values {
    ($($type:ty: $kind:expr),* $(,)?) => {$(
        impl Value for $type {
            const KIND: Kind = $kind;

            fn parse(text: &str) -> Option<Self> {
                text.parse().ok()
            }

            fn text(&self) -> Option<String> {
                Some(self.to_string())
            }
        }
    )*};
}

values! {
    u64: Kind::Whole,
    usize: Kind::Whole,
    u8: Kind::Whole,
    u32: Kind::Whole,
    bool: Kind::Switch,
    f64: Kind::Number,
    String: Kind::Text,
    Device: Kind::Form("cpu, cuda, cuda:1 or meta"),
}

/// Gives a type of few values the texts that keys have for them; or defines such a type.
///
/// ```
/// use phalanx_train::{Value, choices};
/// choices! { pub enum Color { Red = "red", Green = "green" } }
/// assert_eq!(Color::parse("green"), Some(Color::Green));
/// assert_eq!(Color::parse("blue"), None);
/// ```
#[macro_export]
macro_rules! choices {
    ($($vis:vis enum $name:ident { $($value:ident = $text:literal),* $(,)? })*) => {$(
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        #[allow(missing_docs)]
        $vis enum $name { $($value),* }
        $crate::choices! { $name { $($name::$value = $text),* } }
    )*};
    ($($type:ty { $($value:path = $text:literal),* $(,)? })*) => {$(
        impl $crate::Value for $type {
            const KIND: $crate::Kind = $crate::Kind::Choice(&[$($text),*]);

            fn parse(text: &str) -> Option<Self> {
                [$(($text, $value)),*].into_iter().find(|(name, _)| *name == text).map(|(_, value)| value)
            }

            fn text(&self) -> Option<String> {
                match self {
                    $($value => Some($text.into()),)*
                    #[allow(unreachable_patterns)]
                    _ => None,
                }
            }
        }
    )*};
}

choices! { DType { DType::F32 = "f32", DType::BF16 = "bf16", DType::F16 = "f16", DType::F64 = "f64" } }

impl Value for PathBuf {
    const KIND: Kind = Kind::Text;

    fn parse(text: &str) -> Option<PathBuf> {
        (!text.is_empty()).then(|| text.into())
    }

    fn text(&self) -> Option<String> {
        Some(self.display().to_string())
    }
}

/// Texts are the lines of one.
impl Value for Vec<String> {
    const KIND: Kind = Kind::Texts;

    fn parse(text: &str) -> Option<Vec<String>> {
        Some(text.lines().map(String::from).collect())
    }

    fn text(&self) -> Option<String> {
        (!self.is_empty()).then(|| self.join("\n"))
    }
}

impl<T: Value> Value for Option<T> {
    const KIND: Kind = T::KIND;

    fn parse(text: &str) -> Option<Option<T>> {
        T::parse(text).map(Some)
    }

    fn text(&self) -> Option<String> {
        self.as_ref().and_then(T::text)
    }
}

type Get<C> = Arc<dyn Fn(&C) -> Option<String> + Send + Sync>;
type Set<C> = Arc<dyn Fn(&mut C, &str) -> Option<()> + Send + Sync>;

/// A setting of a configuration `C`.
#[derive(Clone)]
pub struct Key<C> {
    /// What it is called in files and errors.
    pub name: &'static str,
    /// What it does, in a sentence or two.
    pub help: &'static str,
    /// What its values are.
    pub kind: Kind,
    get: Get<C>,
    set: Set<C>,
}

impl<C: Clone + 'static> Key<C> {
    /// A key for a field.
    pub fn new<T: Value + 'static>(
        name: &'static str,
        help: &'static str,
        place: fn(&mut C) -> &mut T,
    ) -> Key<C> {
        let get = move |config: &C| place(&mut config.clone()).text();
        let set = move |config: &mut C, text: &str| T::parse(text).map(|value| *place(config) = value);
        Key { name, help, kind: T::KIND, get: Arc::new(get), set: Arc::new(set) }
    }

    /// A key for what only some configurations have; elsewhere it does nothing.
    pub fn partial<T: Value + 'static>(
        name: &'static str,
        help: &'static str,
        place: fn(&mut C) -> Option<&mut T>,
    ) -> Key<C> {
        let get = move |config: &C| place(&mut config.clone()).and_then(|value| value.text());
        let set = move |config: &mut C, text: &str| {
            let value = T::parse(text)?;
            if let Some(place) = place(config) {
                *place = value;
            }
            Some(())
        };
        Key { name, help, kind: T::KIND, get: Arc::new(get), set: Arc::new(set) }
    }

    /// A key that is read and written in its own way. `set` returns none if the text is of another form than the kind says.
    pub fn with(
        name: &'static str,
        help: &'static str,
        kind: Kind,
        get: fn(&C) -> Option<String>,
        set: fn(&mut C, &str) -> Option<()>,
    ) -> Key<C> {
        Key { name, help, kind, get: Arc::new(get), set: Arc::new(set) }
    }

    /// The same key of a configuration that contains this one.
    pub fn of<D: Clone + 'static>(self, place: fn(&mut D) -> &mut C) -> Key<D> {
        let Key { name, help, kind, get, set } = self;
        let get = move |outer: &D| get(place(&mut outer.clone()));
        let set = move |outer: &mut D, text: &str| set(place(outer), text);
        Key { name, help, kind, get: Arc::new(get), set: Arc::new(set) }
    }

    fn refused(&self, text: &str) -> Error {
        Error::Config(format!("`{}` is {text:?}, wanted {}", self.name, self.kind.wanted()))
    }
}

/// A configuration that is described by keys.
pub trait Keyed: Clone + 'static {
    /// Its keys. They are set in this order.
    fn keys() -> Vec<Key<Self>>;

    /// Completes a configuration of which all keys are set. `given` has the source and the text of each key that a file or words gave.
    ///
    /// # Errors
    /// If keys do not go together.
    fn settle(&mut self, _given: &Given<'_>) -> Result<()> {
        Ok(())
    }
}

/// Defines a configuration whose fields have keys: a structure, its default, and [`Keyed`], with the fields' comments as help. Parts that
/// have keys of their own come first, after `in`.
///
/// ```
/// use phalanx_train::{Config, Settings, keyed};
/// keyed! {
///     /// How a net of a certain size is trained.
///     pub struct Net {
///         in run: Config = Config { steps: 50, ..Config::default() },
///         /// Neurons of a layer.
///         "width" width: usize = 64,
///     }
/// }
/// let mut settings = Settings::new(Net::default());
/// settings.words(["--width", "32", "--lr", "0.1"].map(String::from))?;
/// let net = settings.resolve()?;
/// assert_eq!((net.width, net.run.steps, net.run.lr.peak()), (32, 50, 0.1));
/// # Ok::<(), phalanx_train::Error>(())
/// ```
#[macro_export]
macro_rules! keyed {
    ($(#[$meta:meta])* $vis:vis struct $name:ident {
        $(in $part:ident: $part_type:ty = $part_default:expr,)*
        $($(#[doc = $help:literal])+ $key:literal $field:ident: $type:ty = $default:expr,)*
    }) => {
        $(#[$meta])*
        #[derive(Clone, Debug)]
        $vis struct $name {
            $(#[doc = "What has keys of its own."] pub $part: $part_type,)*
            $($(#[doc = $help])+ pub $field: $type,)*
        }

        impl Default for $name {
            fn default() -> Self {
                $name { $($part: $part_default,)* $($field: $default,)* }
            }
        }

        impl $crate::Keyed for $name {
            fn keys() -> Vec<$crate::Key<Self>> {
                let mut keys: Vec<$crate::Key<Self>> = Vec::new();
                $(keys.extend(<$part_type as $crate::Keyed>::keys().into_iter().map(|key| {
                    key.of(|all: &mut Self| &mut all.$part)
                }));)*
                keys.extend([
                    $($crate::Key::new($key, concat!($($help),+).trim(), |all: &mut Self| &mut all.$field)),*
                ]);
                keys
            }

            fn settle(&mut self, _given: &$crate::Given<'_>) -> $crate::Result<()> {
                $($crate::Keyed::settle(&mut self.$part, _given)?;)*
                Ok(())
            }
        }
    };
}

/// Where a value comes from. Later ones win.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Source {
    /// A file.
    File,
    /// A command line, or the program.
    Words,
}

/// What a file or words gave a key, by its name.
pub type Given<'a> = dyn Fn(&str) -> Option<(Source, String)> + 'a;

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
    given: BTreeMap<&'static str, (Source, String)>,
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

    /// Every key that has a value, with its text.
    pub fn values(&self) -> Vec<(String, String)> {
        self.keys.iter().filter_map(|key| Some((key.name.to_string(), self.value(key.name)?))).collect()
    }

    /// Gives a key a value, unless a later source has.
    ///
    /// # Errors
    /// If there is no such key, or the text is not of its form.
    pub fn set(&mut self, name: &str, text: &str, source: Source) -> Result<()> {
        let key = self.keys.iter().find(|key| key.name == name).ok_or_else(|| self.unknown(name))?;
        (key.set)(&mut self.base.clone(), text).ok_or_else(|| key.refused(text))?;
        let text = key.kind.plain(text);
        let text = match self.given.get(key.name) {
            Some((before, _)) if *before > source => return Ok(()),
            // A list is given one by one.
            Some((before, texts)) if *before == source && key.kind == Kind::Texts => {
                format!("{texts}\n{text}")
            }
            _ => text,
        };
        self.given.insert(key.name, (source, text));
        Ok(())
    }

    /// Two keys of which one run has at most one: if a file gives one and words the other, those of the words win.
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
            let set = as_text(key, value, &self.keys).and_then(|text| self.set(key, &text, Source::File));
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
                None if kind == Kind::Switch => "true".into(),
                // A word that begins like a key is a text only behind `=`.
                None => words.next_if(|word| !word.starts_with("--")).ok_or_else(|| {
                    Error::Config(format!("`{name}` has no value, wanted {}", kind.wanted()))
                })?,
            };
            self.set(name, &value, Source::Words)?;
            while let Some(more) = words.next_if(|word| kind == Kind::Texts && !word.starts_with("--")) {
                self.set(name, &more, Source::Words)?;
            }
        }
        Ok(self)
    }

    /// All keys as words, with their values and what they do.
    pub fn help(&self) -> String {
        let line = |key: &Key<C>| {
            let value = match key.kind {
                Kind::Whole => " N".into(),
                Kind::Number => " X".into(),
                Kind::Switch => String::new(),
                Kind::Text | Kind::Form(_) => " TEXT".into(),
                Kind::Texts => " TEXT..".into(),
                Kind::Choice(names) => format!(" {}", names.join("|")),
            };
            let default =
                self.value(key.name).filter(|_| key.kind != Kind::Switch && !key.help.contains("[default"));
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
        Toml::Array(all) if keys.iter().any(|key| key.name == name && key.kind == Kind::Texts) => {
            Ok(all.iter().map(|one| as_text(name, one, keys)).collect::<Result<Vec<_>>>()?.join("\n"))
        }
        other => {
            let kind = other.type_str();
            Err(Error::Config(format!("{name} has the type {kind}, wanted a number, a text, true or false")))
        }
    }
}
