//! [`Value`]: what a key can set.

use std::path::PathBuf;

use phalanx_tensor::{DType, Device};

use super::Kind;

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
