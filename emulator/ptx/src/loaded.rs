//! A module bound to a memory.

use std::sync::Arc;

use crate::{Memory, Module, OutOfMemory, Variable};

/// A module whose `.global` and `.const` variables have addresses in a memory.
#[derive(Clone, Debug)]
pub struct Loaded {
    module: Arc<Module>,
    addresses: Vec<u64>,
}

impl Loaded {
    /// Allocates the module's variables in `memory` and gives them their initial values.
    ///
    /// # Errors
    /// If the memory is too small.
    pub fn new(module: Arc<Module>, memory: &Memory) -> Result<Loaded, OutOfMemory> {
        let mut addresses = Vec::new();
        for variable in module.variables() {
            addresses.push(memory.allocate(variable.bytes.max(1))?);
        }
        let loaded = Loaded { module, addresses };
        for (variable, &address) in loaded.module.variables().iter().zip(&loaded.addresses) {
            let value = variable.value_at(|name| loaded.variable(name).map(|(address, _)| address));
            // The allocation above is as long as the value.
            let _ = memory.write(address, &value);
        }
        Ok(loaded)
    }

    /// The address and the bytes of a variable.
    pub fn variable(&self, name: &str) -> Option<(u64, u64)> {
        let place = self.module.variables().iter().position(|v| v.name == name)?;
        Some((self.addresses[place], self.module.variables()[place].bytes))
    }

    /// The module.
    pub fn module(&self) -> &Arc<Module> {
        &self.module
    }

    /// Frees the variables; the module must not be launched afterwards.
    pub fn unload(self, memory: &Memory) {
        for address in self.addresses {
            // Each was allocated in `new`, and whoever freed it since has no more use for it.
            let _ = memory.free(address);
        }
    }

    /// The addresses of all variables, in the module's order.
    pub(crate) fn addresses(&self) -> &[u64] {
        &self.addresses
    }
}

impl Variable {
    /// The bytes of the initial value, with the addresses of the variables it names.
    fn value_at(&self, address: impl Fn(&str) -> Option<u64>) -> Vec<u8> {
        let mut value = self.value.clone();
        value.resize(self.bytes as usize, 0);
        for (offset, name, addend) in &self.addresses {
            let bytes = address(name).unwrap_or(0).wrapping_add(*addend).to_le_bytes();
            let start = *offset as usize;
            let end = (start + 8).min(value.len());
            value[start..end].copy_from_slice(&bytes[..end - start]);
        }
        value
    }
}
