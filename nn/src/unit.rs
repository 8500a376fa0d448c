//! [`Unit`]: a part of a model that is called through hooks.
//!
//! ```text
//! forward     pre_forward   enter --> module --> leave   post_forward
//! backward    post_backward enter <-- module <-- leave   pre_backward
//! ```
//! `enter` and `leave` are identities that run hooks in backward. They are recorded only where there are hooks.

use std::sync::{Arc, PoisonError, RwLock};

use phalanx_autograd::{
    Backward, Cx, Grads, Result as GradResult, Saver, Var, checkpoint, is_recomputing, is_recording, phony,
    record,
};
use smallvec::smallvec;

use crate::{Entry, Parameters, Result};

/// What can be done around a unit's passes: sharded training gathers and frees parameters there.
pub trait UnitHooks: Send + Sync {
    /// Before the forward pass.
    ///
    /// # Errors
    /// An error ends the pass.
    fn pre_forward(&self) -> Result<()> {
        Ok(())
    }
    /// After the forward pass.
    ///
    /// # Errors
    /// An error ends the pass.
    fn post_forward(&self) -> Result<()> {
        Ok(())
    }
    /// Before the forward pass is repeated for the sake of its values.
    ///
    /// # Errors
    /// An error ends the pass.
    fn pre_recompute(&self) -> Result<()> {
        Ok(())
    }
    /// When the gradient of the unit's output has arrived.
    ///
    /// # Errors
    /// An error ends the pass.
    fn pre_backward(&self) -> Result<()> {
        Ok(())
    }
    /// When the unit's gradients are complete.
    ///
    /// # Errors
    /// An error ends the pass.
    fn post_backward(&self) -> Result<()> {
        Ok(())
    }
}

type Hooks = Arc<dyn UnitHooks>;

/// A module and the hooks around it.
pub struct Unit<M: ?Sized> {
    hooks: RwLock<Vec<Hooks>>,
    module: Arc<M>,
}

impl<M: ?Sized + Send + Sync + 'static> Unit<M> {
    /// A unit without hooks.
    pub fn new(module: Arc<M>) -> Unit<M> {
        Unit { hooks: RwLock::default(), module }
    }

    /// The module itself.
    pub fn module(&self) -> &M {
        &self.module
    }

    /// Adds hooks. Those that begin something run in order of their registration, those that end it in reverse.
    pub fn add_hooks(&self, hooks: Arc<dyn UnitHooks>) {
        self.hooks.write().unwrap_or_else(PoisonError::into_inner).push(hooks);
    }

    /// Calls the module through `forward`; with `recompute`, without keeping what it computes.
    ///
    /// # Errors
    /// Whatever `forward` or a hook returns.
    pub fn call(
        &self,
        x: &Var,
        recompute: bool,
        forward: impl Fn(&M, &Var) -> Result<Var> + Send + Sync + 'static,
    ) -> Result<Var> {
        let hooks = self.hooks.read().unwrap_or_else(PoisonError::into_inner).clone();
        if hooks.is_empty() {
            return self.run(x, recompute, hooks, forward);
        }
        hooks.iter().try_for_each(|h| h.pre_forward())?;
        // Without a gradient to wait for, `enter` stands on a value of its own; recorded before all that the unit
        // records, it runs after all of it.
        let anchor = if x.requires_grad() { x.clone() } else { phony(x.device(), true)? };
        let entered = boundary("enter", &[&anchor], &hooks, Boundary::Enter)?;
        let input = if x.requires_grad() { &entered } else { x };
        let y = self.run(input, recompute, hooks.clone(), forward)?;
        hooks.iter().rev().try_for_each(|h| h.post_forward())?;
        match is_recording(&[&y]) {
            true => boundary("leave", &[&y, &entered], &hooks, Boundary::Leave),
            false => Ok(y),
        }
    }

    fn run(
        &self,
        x: &Var,
        recompute: bool,
        hooks: Vec<Hooks>,
        forward: impl Fn(&M, &Var) -> Result<Var> + Send + Sync + 'static,
    ) -> Result<Var> {
        if !recompute {
            return forward(&self.module, x);
        }
        let module = self.module.clone();
        let again = move |vars: &[Var]| {
            if is_recomputing() {
                hooks.iter().try_for_each(|h| h.pre_recompute())?;
            }
            Ok(forward(&module, &vars[0])?)
        };
        Ok(checkpoint(again, &[x])?)
    }
}

impl<M: ?Sized + Parameters> Parameters for Unit<M> {
    fn visit(&self, path: &str, visitor: &mut dyn FnMut(&str, Entry<'_>)) {
        self.module.visit(path, visitor);
    }
}

enum Boundary {
    Enter,
    Leave,
}

/// The identity of the first input, with hooks in backward.
fn boundary(name: &'static str, inputs: &[&Var], hooks: &[Hooks], side: Boundary) -> Result<Var> {
    let hooks = hooks.to_vec();
    let output = inputs[0].tensor().clone();
    Ok(record(name, inputs, output, |_: &Saver<'_>| Ok(Pass { hooks, side, inputs: inputs.len() }))?)
}

struct Pass {
    hooks: Vec<Hooks>,
    side: Boundary,
    inputs: usize,
}

impl Backward for Pass {
    fn backward(&self, cx: &Cx<'_>) -> GradResult<Grads> {
        match self.side {
            Boundary::Enter => self.hooks.iter().rev().try_for_each(|h| h.post_backward())?,
            Boundary::Leave => self.hooks.iter().try_for_each(|h| h.pre_backward())?,
        }
        let mut grads: Grads = smallvec![Some(cx.dy().clone())];
        grads.resize(self.inputs, None);
        Ok(grads)
    }
}
