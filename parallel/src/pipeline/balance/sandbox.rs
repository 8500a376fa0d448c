//! [`Sandbox`]: layers run on trial.

use phalanx_nn::{Buffer, Entry, Parameter, Parameters};
use phalanx_tensor::{Context, ContextGuard, Tensor};

use crate::pipeline::gpipe::{Sequence, verify_skips};
use crate::{Error, Result};

/// As long as it lives, this thread is in train mode and the layers' buffers are copies.
pub(super) struct Sandbox {
    /// In the order in which they were replaced; one that two layers share is here twice.
    buffers: Vec<(Buffer, Tensor)>,
    _context: ContextGuard,
}

impl Sandbox {
    /// # Errors
    /// If skips do not match, a parameter has a gradient, or a buffer cannot be copied.
    pub(super) fn of(layers: &Sequence) -> Result<Sandbox> {
        verify_skips(&layers.skippables())?;
        let has_grad = |p: &Parameter| p.leaves().iter().any(|leaf| leaf.grad().is_some());
        if let Some(parameter) = layers.parameters().into_iter().find(has_grad) {
            let why = format!("got a gradient of {}, wanted a model that has none yet", parameter.name());
            return Err(Error::Config(format!("balance: {why}")));
        }
        let context = Context::with(|c| (c.train, c.grad, c.recomputing) = (true, true, false));
        let mut sandbox = Sandbox { buffers: Vec::new(), _context: context };
        let mut buffers = Vec::new();
        layers.visit("", &mut |_, entry| match entry {
            Entry::Buffer(buffer) => buffers.push(buffer.clone()),
            Entry::Parameter(_) => {}
        });
        for buffer in buffers {
            let held = buffer.tensor();
            buffer.set(held.copy()?);
            sandbox.buffers.push((buffer, held));
        }
        Ok(sandbox)
    }
}

impl Drop for Sandbox {
    fn drop(&mut self) {
        self.buffers.drain(..).rev().for_each(|(buffer, held)| buffer.set(held));
    }
}
