//! State dicts in parts: what each rank has of the model, and the way back from the parts of any layout.

use super::Zero;
use super::build::Source;
use crate::Result;
use crate::part::{self, Part};

impl Zero {
    /// This rank's part of every parameter, in the dtype that shares are kept in, by the parameter's name, and every tensor
    /// that is not spread, such as buffers by their paths. The tensors are the model's own, not copies. Nothing is sent.
    ///
    /// # Errors
    /// Never for tensors that are contiguous, as a model's are.
    pub fn sharded_state_dict(&self) -> Result<Vec<Part>> {
        let state = self.core.lock();
        let mut parts: Vec<Part> = Vec::new();
        for (path, source) in &self.entries {
            let part = match source {
                Source::Flat(g, f, m) => {
                    let flat = &state.groups[*g].flats[*f];
                    let (range, values) = flat.share_of(*m)?;
                    Part { range, values, ..Part::of_parameter(&flat.members[*m].parameter) }
                }
                Source::Parameter(p) => Part::of_parameter(p),
                Source::Buffer(b) => Part::of_buffer(path, b),
            };
            if !parts.iter().any(|known| known.name == part.name) {
                parts.push(part);
            }
        }
        Ok(parts)
    }

    /// Takes this rank's values from parts of any layout's state dict, usually those of all its ranks; converts dtypes. All
    /// ranks call it.
    ///
    /// # Errors
    /// If parts of what this rank has are missing, or names are not known or of another size; then nothing is changed.
    pub fn load_sharded_state_dict(&self, parts: &[Part]) -> Result<()> {
        part::load("sharded state dict", &self.sharded_state_dict()?, parts, true)?;
        self.core.updated(true)
    }
}
