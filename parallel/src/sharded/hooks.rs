//! What happens around a unit's passes.

use std::sync::Weak;

use phalanx_nn::UnitHooks;

use super::core::{Core, Pass};
use crate::Result;

/// A unit's part.
pub(super) struct Hooks {
    pub(super) core: Weak<Core>,
    pub(super) unit: usize,
}

impl Hooks {
    fn with(&self, f: impl FnOnce(&Core) -> Result<()>) -> phalanx_nn::Result<()> {
        let core = self.core.upgrade().filter(|core| !core.is_lost());
        let done = core.map_or(Ok(()), |core| f(&core));
        Ok(done.map_err(phalanx_nn::autograd::Error::from)?)
    }
}

impl UnitHooks for Hooks {
    fn pre_forward(&self) -> phalanx_nn::Result<()> {
        self.with(|core| core.enter(self.unit, Pass::Forward))
    }
    fn post_forward(&self) -> phalanx_nn::Result<()> {
        self.with(|core| core.leave(self.unit, Pass::Forward))
    }
    fn pre_recompute(&self) -> phalanx_nn::Result<()> {
        self.with(|core| core.enter_again(self.unit))
    }
    fn pre_backward(&self) -> phalanx_nn::Result<()> {
        self.with(|core| core.enter(self.unit, Pass::Backward))
    }
    fn post_backward(&self) -> phalanx_nn::Result<()> {
        self.with(|core| core.leave(self.unit, Pass::Backward))
    }
}
