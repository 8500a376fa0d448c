//! [`Key`]: a setting of a configuration; [`Keyed`]: a configuration of such settings; [`SettingValue`]: a type that keys can set.

use std::path::PathBuf;
use std::sync::Arc;

use phalanx_nn::models::LoraConfig;
use phalanx_tensor::{DType, Device};

use super::GivenValues;
use crate::{Error, Result};

/// The form of a key's values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ValueKind {
    /// A whole number from 0 up.
    Whole,
    /// A whole number from 0 up, or this word.
    WholeOr(&'static str),
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

impl ValueKind {
    /// The allowed values, for errors.
    pub(super) fn wanted(self) -> String {
        match self {
            ValueKind::Whole => "a whole number from 0 up".into(),
            ValueKind::WholeOr(word) => format!("a whole number from 0 up, or {word}"),
            ValueKind::Number => "a number".into(),
            ValueKind::Switch => "true or false".into(),
            ValueKind::Text | ValueKind::Texts => "a text".into(),
            ValueKind::Choice(names) => names.join(", "),
            ValueKind::Form(form) => form.into(),
        }
    }

    /// The same value in one way of writing it.
    pub(super) fn plain(self, text: &str) -> String {
        let plain = match self {
            ValueKind::Whole | ValueKind::WholeOr(_) => text.parse().ok().map(|n: u64| n.to_string()),
            ValueKind::Number => text.parse().ok().map(|x: f64| x.to_string()),
            _ => None,
        };
        plain.unwrap_or_else(|| text.into())
    }

    /// The value as TOML has it. Texts are quoted, numbers are written as numbers.
    pub(super) fn toml(self, text: &str) -> String {
        match self {
            ValueKind::Whole | ValueKind::WholeOr(_) => {
                text.parse::<i64>().map_or_else(|_| quoted(text), |n| n.to_string())
            }
            ValueKind::Number => {
                text.parse::<f64>().map_or_else(|_| quoted(text), |x| format!("{x:?}").replace("NaN", "nan"))
            }
            ValueKind::Switch => text.into(),
            ValueKind::Texts => format!("[{}]", text.lines().map(quoted).collect::<Vec<_>>().join(", ")),
            ValueKind::Text | ValueKind::Choice(_) | ValueKind::Form(_) => quoted(text),
        }
    }
}

/// A text as a TOML string on one line. JSON's escapes are TOML's, but for one character.
fn quoted(text: &str) -> String {
    serde_json::Value::from(text).to_string().replace('\u{7f}', "\\u007f")
}

type Get<C> = Arc<dyn Fn(&C) -> Option<String> + Send + Sync>;
type Set<C> = Arc<dyn Fn(&mut C, &str) -> Option<()> + Send + Sync>;

/// A setting of a configuration `C`.
#[derive(Clone)]
pub struct Key<C> {
    /// Its name in files and errors.
    pub name: &'static str,
    /// What it does, in a sentence or two.
    pub help: &'static str,
    /// The form of its values.
    pub kind: ValueKind,
    pub(super) get: Get<C>,
    pub(super) set: Set<C>,
}

impl<C: Clone + 'static> Key<C> {
    /// A key for a field.
    pub fn new<T: SettingValue + 'static>(
        name: &'static str,
        help: &'static str,
        field: fn(&mut C) -> &mut T,
    ) -> Key<C> {
        let get = move |config: &C| field(&mut config.clone()).text();
        let set = move |config: &mut C, text: &str| T::parse(text).map(|value| *field(config) = value);
        Key { name, help, kind: T::KIND, get: Arc::new(get), set: Arc::new(set) }
    }

    /// A key for a field that only some configurations have. For others it does nothing.
    pub fn partial<T: SettingValue + 'static>(
        name: &'static str,
        help: &'static str,
        field: fn(&mut C) -> Option<&mut T>,
    ) -> Key<C> {
        let get = move |config: &C| field(&mut config.clone()).and_then(|value| value.text());
        let set = move |config: &mut C, text: &str| {
            let value = T::parse(text)?;
            if let Some(field) = field(config) {
                *field = value;
            }
            Some(())
        };
        Key { name, help, kind: T::KIND, get: Arc::new(get), set: Arc::new(set) }
    }

    /// A key with its own functions to read and write it. `set` returns `None` if the text has another form than the kind.
    pub fn with(
        name: &'static str,
        help: &'static str,
        kind: ValueKind,
        get: fn(&C) -> Option<String>,
        set: fn(&mut C, &str) -> Option<()>,
    ) -> Key<C> {
        Key { name, help, kind, get: Arc::new(get), set: Arc::new(set) }
    }

    /// The same key of a configuration that contains this one.
    pub fn of<D: Clone + 'static>(self, field: fn(&mut D) -> &mut C) -> Key<D> {
        let Key { name, help, kind, get, set } = self;
        let get = move |outer: &D| get(field(&mut outer.clone()));
        let set = move |outer: &mut D, text: &str| set(field(outer), text);
        Key { name, help, kind, get: Arc::new(get), set: Arc::new(set) }
    }

    /// The text of its value in a configuration; none if it has no value there.
    pub(crate) fn text(&self, config: &C) -> Option<String> {
        (self.get)(config)
    }

    pub(super) fn refused(&self, text: &str) -> Error {
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
    fn settle(&mut self, _given: &GivenValues<'_>) -> Result<()> {
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

            fn settle(&mut self, _given: &$crate::GivenValues<'_>) -> $crate::Result<()> {
                $($crate::Keyed::settle(&mut self.$part, _given)?;)*
                Ok(())
            }
        }
    };
}

/// A type that keys can set: read from text, and written as text that is read as the same value.
pub trait SettingValue: Sized {
    /// The form of its texts.
    const KIND: ValueKind;

    /// The value of a text; none if it is of another form.
    fn parse(text: &str) -> Option<Self>;

    /// The value's text; none if there is no value.
    fn text(&self) -> Option<String>;
}

macro_rules! values {
    ($($type:ty: $kind:expr),* $(,)?) => {$(
        impl SettingValue for $type {
            const KIND: ValueKind = $kind;

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
    u64: ValueKind::Whole,
    usize: ValueKind::Whole,
    u8: ValueKind::Whole,
    u32: ValueKind::Whole,
    bool: ValueKind::Switch,
    f64: ValueKind::Number,
    String: ValueKind::Text,
    Device: ValueKind::Form("cpu, cuda, cuda:1 or meta"),
    LoraConfig: ValueKind::Form("r=8,alpha=16,targets=q_proj,v_proj"),
}

/// Implements [`SettingValue`] for an enum by a text for each variant, or defines such an enum.
///
/// ```
/// use phalanx_train::{SettingValue, choices};
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
        impl $crate::SettingValue for $type {
            const KIND: $crate::ValueKind = $crate::ValueKind::Choice(&[$($text),*]);

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

impl SettingValue for PathBuf {
    const KIND: ValueKind = ValueKind::Text;

    fn parse(text: &str) -> Option<PathBuf> {
        (!text.is_empty()).then(|| text.into())
    }

    fn text(&self) -> Option<String> {
        Some(self.display().to_string())
    }
}

/// A list is a text with a line for each element.
impl SettingValue for Vec<String> {
    const KIND: ValueKind = ValueKind::Texts;

    fn parse(text: &str) -> Option<Vec<String>> {
        Some(text.lines().map(String::from).collect())
    }

    fn text(&self) -> Option<String> {
        (!self.is_empty()).then(|| self.join("\n"))
    }
}

impl<T: SettingValue> SettingValue for Option<T> {
    const KIND: ValueKind = T::KIND;

    fn parse(text: &str) -> Option<Option<T>> {
        T::parse(text).map(Some)
    }

    fn text(&self) -> Option<String> {
        self.as_ref().and_then(T::text)
    }
}
