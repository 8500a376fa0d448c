//! [`Versions`]: the versions of a stage's weights that are still needed.

use std::collections::BTreeMap;

use phalanx_nn::Parameter;
use phalanx_nn::autograd::{Leaf, Stash};
use phalanx_tensor::{Category, Context};

use crate::{Error, Result};

/// A stage's weights at several times, by handle. The parameters hold one version, that of the computation under way; a
/// version is copied only when the next is made while somebody still needs it, and is gone after its last use.
///
/// ```text
///            newest, needed again:  copy, set the copy, update that   (the old one stays in `kept`)
///   U  --->
///            newest, not needed:    update in place
/// ```
pub(super) struct Versions {
    parameters: Vec<Parameter>,
    /// The values of all leaves of the parameters, in order.
    kept: BTreeMap<usize, Vec<Stash>>,
    /// The version that the parameters hold.
    held: usize,
    newest: usize,
    /// Computations that are still to come, by the version they use.
    left: BTreeMap<usize, usize>,
}

impl Versions {
    /// Version 0 is what the parameters hold; `uses` are the computations of each version.
    pub(super) fn new(parameters: Vec<Parameter>, uses: BTreeMap<usize, usize>) -> Result<Versions> {
        parameters.iter().try_for_each(has_its_own_storage)?;
        let mut versions = Versions { parameters, kept: BTreeMap::new(), held: 0, newest: 0, left: uses };
        versions.keep();
        Ok(versions)
    }

    fn leaves(&self) -> impl Iterator<Item = &Leaf> {
        self.parameters.iter().flat_map(Parameter::leaves)
    }

    /// Keeps what the parameters hold as the newest version.
    fn keep(&mut self) {
        let stashes = self.leaves().map(Leaf::stash).collect();
        self.held = self.newest;
        self.kept.insert(self.newest, stashes);
    }

    /// Lets the parameters hold a version.
    pub(super) fn hold(&mut self, version: usize) -> Result<()> {
        if self.held != version {
            let missing = || Error::Config(format!("version {version} of the weights is not kept"));
            let stashes = self.kept.get(&version).ok_or_else(missing)?;
            self.leaves().zip(stashes).try_for_each(|(leaf, stash)| leaf.restore(stash))?;
            self.held = version;
        }
        Ok(())
    }

    /// The newest version.
    pub(super) fn newest(&self) -> usize {
        self.newest
    }

    /// Whether the newest version is needed again, and so is not written by an update.
    pub(super) fn keeps_newest(&self) -> bool {
        self.left.contains_key(&self.newest)
    }

    /// Lets the parameters hold the newest version.
    pub(super) fn hold_newest(&mut self) -> Result<()> {
        self.hold(self.newest)
    }

    /// After a computation that used a version.
    pub(super) fn used(&mut self, version: usize) -> Result<()> {
        self.left.entry(version).and_modify(|left| *left -= 1);
        self.left.retain(|_, left| *left > 0);
        if version < self.newest && !self.left.contains_key(&version) {
            self.hold_newest()?;
            self.kept.remove(&version);
        }
        Ok(())
    }

    /// Makes the next version of the newest by `step`, which writes the parameters.
    pub(super) fn update(&mut self, step: impl FnOnce() -> Result<()>) -> Result<()> {
        self.hold_newest()?;
        if self.keeps_newest() {
            let _category = Context::with(|c| c.category = Category::Parameters);
            self.parameters.iter().try_for_each(|p| Ok::<_, Error>(p.set_tensor(p.tensor().copy()?)?))?;
        } else {
            self.kept.remove(&self.newest);
        }
        step()?;
        self.newest += 1;
        self.keep();
        Ok(())
    }
}

/// Refuses a parameter that lives in a buffer with others, or not always.
fn has_its_own_storage(parameter: &Parameter) -> Result<()> {
    let tensor = parameter.tensor();
    let bytes = parameter.range().len() * tensor.dtype().size();
    if tensor.storage().bytes() == bytes {
        return Ok(());
    }
    let (name, got) = (parameter.name(), tensor.storage().bytes());
    Err(Error::Config(format!(
        "{name}: got a parameter of {bytes} bytes in a storage of {got}, as ZeRO's are, wanted one with a storage of \
         its own, of which versions can be kept"
    )))
}
