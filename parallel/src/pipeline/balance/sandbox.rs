//! [`Sandbox`]: layers run on trial.

use phalanx_nn::{Buffer, Entry, Module, Parameter};
use phalanx_tensor::{Context, ContextGuard, Tensor};

use crate::{Error, Result};

/// As long as it lives, this thread is in train mode and the layers' buffers are copies.
pub(super) struct Sandbox {
    /// In the order in which they were replaced; one that two layers share is here twice.
    buffers: Vec<(Buffer, Tensor)>,
    _context: ContextGuard,
}

impl Sandbox {
    /// # Errors
    /// If a parameter has a gradient, or a buffer cannot be copied.
    pub(super) fn of<M: Module>(layers: &[M]) -> Result<Sandbox> {
        let has_grad = |p: &Parameter| p.leaves().iter().any(|leaf| leaf.grad().is_some());
        if let Some(parameter) = layers.iter().flat_map(M::parameters).find(has_grad) {
            let why = format!("got a gradient of {}, wanted a model that has none yet", parameter.name());
            return Err(Error::Config(format!("balance: {why}")));
        }
        let context = Context::with(|c| (c.train, c.grad, c.recomputing) = (true, true, false));
        let mut sandbox = Sandbox { buffers: Vec::new(), _context: context };
        let mut buffers = Vec::new();
        for layer in layers {
            layer.visit("", &mut |_, entry| buffers.extend(buffer(entry)));
        }
        for buffer in buffers {
            let held = buffer.tensor();
            buffer.set(held.copy()?);
            sandbox.buffers.push((buffer, held));
        }
        Ok(sandbox)
    }
}

fn buffer(entry: Entry<'_>) -> Option<Buffer> {
    match entry {
        Entry::Buffer(buffer) => Some(buffer.clone()),
        Entry::Parameter(_) => None,
    }
}

impl Drop for Sandbox {
    fn drop(&mut self) {
        self.buffers.drain(..).rev().for_each(|(buffer, held)| buffer.set(held));
    }
}
