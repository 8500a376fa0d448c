//! An instruction's name with its modifiers and types.

use crate::lanes::round::Mode;
use crate::syntax::type_bytes;

/// `add.rn.ftz.f32`, in its parts.
pub(crate) struct Form<'a> {
    pub(crate) parts: Vec<&'a str>,
}

impl<'a> Form<'a> {
    pub(crate) fn new(parts: &'a [String]) -> Form<'a> {
        Form { parts: parts.iter().map(String::as_str).collect() }
    }

    /// The first part.
    pub(crate) fn name(&self) -> &'a str {
        self.parts[0]
    }

    pub(crate) fn has(&self, part: &str) -> bool {
        self.parts[1..].contains(&part)
    }

    /// Whether a part begins like this.
    pub(crate) fn begins(&self, start: &str) -> bool {
        self.parts[1..].iter().any(|part| part.starts_with(start))
    }

    /// The types that are named, in order.
    pub(crate) fn kinds(&self) -> Vec<&'a str> {
        self.parts[1..].iter().copied().filter(|part| type_bytes(part).is_some()).collect()
    }

    /// The last type.
    pub(crate) fn kind(&self) -> Option<&'a str> {
        self.kinds().last().copied()
    }

    /// The direction of rounding.
    pub(crate) fn mode(&self) -> Option<Mode> {
        self.parts[1..].iter().find_map(|part| Mode::named(part))
    }

    /// The name with all modifiers but types, rounding, `.ftz` and those in `without`.
    pub(crate) fn key(&self, without: &[&str]) -> String {
        let kept = self.parts.iter().enumerate().filter(|(i, part)| {
            *i == 0
                || type_bytes(part).is_none()
                    && Mode::named(part).is_none()
                    && **part != "ftz"
                    && !without.contains(part)
        });
        kept.map(|(_, part)| *part).collect::<Vec<_>>().join(".")
    }
}
