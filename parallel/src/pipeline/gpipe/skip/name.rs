//! [`Skip`]: what a skip connection is called, and [`Skippable`]: which ones a layer has to do with.

use std::fmt;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Keeps names apart: two U-Nets in one model can both have a skip `1to3`. Copies are the same namespace.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Namespace(usize);

impl Namespace {
    /// One that no other equals.
    #[expect(clippy::new_without_default, reason = "each is another, which nobody expects of a default")]
    pub fn new() -> Namespace {
        static NEXT: AtomicUsize = AtomicUsize::new(0);
        Namespace(NEXT.fetch_add(1, Ordering::Relaxed))
    }

    /// A name in this namespace.
    pub fn skip(self, name: impl Into<String>) -> Skip {
        Skip { namespace: Some(self), name: name.into() }
    }
}

/// A skip connection. It is stashed once and popped once.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Skip {
    /// Where the name belongs; `None` is a namespace too.
    pub namespace: Option<Namespace>,
    /// Its name there.
    pub name: String,
}

impl Skip {
    /// A name without a namespace.
    pub fn new(name: impl Into<String>) -> Skip {
        Skip { namespace: None, name: name.into() }
    }
}

impl fmt::Display for Skip {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.namespace {
            Some(Namespace(number)) => write!(f, "`{}` of namespace {number}", self.name),
            None => write!(f, "`{}`", self.name),
        }
    }
}

/// What a layer stashes and what it pops; it must do all of it in each forward pass, and nothing else.
///
/// ```
/// use phalanx_parallel::pipeline::gpipe::{Skip, Skippable};
/// let skippable = Skippable::new().stash(Skip::new("a")).pop(Skip::new("b"));
/// assert_eq!(skippable.to_string(), "stashes `a`, pops `b`");
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Skippable {
    /// What it stashes.
    pub stashes: Vec<Skip>,
    /// What it pops.
    pub pops: Vec<Skip>,
}

impl Skippable {
    /// Nothing yet.
    pub fn new() -> Skippable {
        Skippable::default()
    }

    /// One more that it stashes.
    #[must_use]
    pub fn stash(mut self, skip: Skip) -> Skippable {
        self.stashes.push(skip);
        self
    }

    /// One more that it pops.
    #[must_use]
    pub fn pop(mut self, skip: Skip) -> Skippable {
        self.pops.push(skip);
        self
    }
}

impl fmt::Display for Skippable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let verbs = [("stashes", &self.stashes), ("pops", &self.pops)];
        let each =
            verbs.into_iter().flat_map(|(verb, skips)| skips.iter().map(move |s| format!("{verb} {s}")));
        f.write_str(&each.collect::<Vec<_>>().join(", "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_namespace_equals_its_copies_and_no_other() {
        let (a, b) = (Namespace::new(), Namespace::new());
        let copy = a;
        assert_eq!(a, copy);
        assert_ne!(a, b);
        assert_eq!(a.skip("x"), copy.skip("x"));
        assert_ne!(a.skip("x"), b.skip("x"));
        assert_ne!(a.skip("x"), Skip::new("x"));
    }
}
