//! [`Skips`]: the skips of a micro-batch, as layers stash and pop them.

use std::collections::BTreeMap;

use phalanx_nn::autograd::Var;

use super::{Skip, Skippable};
use crate::{Error, Result};

/// Stashed values of one micro-batch, handed to each layer ([`super::super::Layer::run`]).
#[derive(Debug, Default)]
pub struct Skips {
    held: BTreeMap<Skip, Option<Var>>,
    /// What the layer that runs has still to do.
    open: Skippable,
    layer: usize,
}

impl Skips {
    /// Keeps a value, or the fact that there is none, for the layer that pops it.
    ///
    /// # Errors
    /// If the layer does not declare that it stashes this one, has done so already, or the last one is still there.
    pub fn stash(&mut self, skip: &Skip, value: impl Into<Option<Var>>) -> Result<()> {
        close(&mut self.open.stashes, skip).ok_or_else(|| {
            self.wrong(format!("stashes {skip}, which it does not declare or has done already"))
        })?;
        match self.held.insert(skip.clone(), value.into()) {
            None => Ok(()),
            Some(_) => {
                Err(self.wrong(format!("stashes {skip}, which nobody has popped since it was stashed")))
            }
        }
    }

    /// Takes what was stashed, which may be nothing.
    ///
    /// # Errors
    /// If the layer does not declare that it pops this one, or nobody has stashed it.
    pub fn pop(&mut self, skip: &Skip) -> Result<Option<Var>> {
        close(&mut self.open.pops, skip).ok_or_else(|| {
            self.wrong(format!("pops {skip}, which it does not declare or has done already"))
        })?;
        self.take(skip).ok_or_else(|| self.wrong(format!("pops {skip}, which nobody has stashed")))
    }

    /// Holds what came from another stage.
    pub(in super::super) fn hold(&mut self, skip: &Skip, value: Option<Var>) {
        self.held.insert(skip.clone(), value);
    }

    /// Takes what goes to another stage.
    pub(in super::super) fn take(&mut self, skip: &Skip) -> Option<Option<Var>> {
        self.held.remove(skip)
    }

    /// Puts `f` of each value in its place.
    pub(in crate::pipeline) fn map(&mut self, f: impl Fn(Var) -> Result<Var>) -> Result<()> {
        self.held.values_mut().flatten().try_for_each(|value| {
            *value = f(value.clone())?;
            Ok(())
        })
    }

    /// Runs a layer and holds it to what it declares.
    pub(in super::super) fn within<T>(
        &mut self,
        layer: usize,
        declared: Skippable,
        run: impl FnOnce(&mut Skips) -> Result<T>,
    ) -> Result<T> {
        (self.layer, self.open) = (layer, declared);
        let done = run(self)?;
        if self.open == Skippable::default() {
            return Ok(done);
        }
        Err(self.wrong(format!("declares that it {}, but has not", self.open)))
    }

    fn wrong(&self, why: String) -> Error {
        Error::Config(format!("gpipe: layer {} {why}", self.layer))
    }
}

/// Strikes a skip off a list, if it is there.
fn close(open: &mut Vec<Skip>, skip: &Skip) -> Option<Skip> {
    let place = open.iter().position(|other| other == skip)?;
    Some(open.swap_remove(place))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn popping_what_nobody_has_stashed_is_an_error() {
        let (mut skips, a) = (Skips::default(), Skip::new("a"));
        let pop = |skips: &mut Skips| skips.within(4, Skippable::new().pop(Skip::new("a")), |s| s.pop(&a));
        assert_eq!(
            pop(&mut skips).unwrap_err().to_string(),
            "gpipe: layer 4 pops `a`, which nobody has stashed"
        );
        skips.hold(&a, None);
        assert!(pop(&mut skips).unwrap().is_none());
        assert!(pop(&mut skips).is_err(), "it is gone");
    }

    #[test]
    fn stashing_over_what_is_still_there_is_an_error() {
        let (mut skips, a) = (Skips::default(), Skip::new("a"));
        let stash = |skips: &mut Skips| {
            skips.within(1, Skippable::new().stash(Skip::new("a")), |s| s.stash(&a, None))
        };
        stash(&mut skips).unwrap();
        let message = stash(&mut skips).unwrap_err().to_string();
        assert_eq!(message, "gpipe: layer 1 stashes `a`, which nobody has popped since it was stashed");
    }
}
