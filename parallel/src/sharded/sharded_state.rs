//! State dicts in parts: what each rank has of the model, and the way back from the parts of any layout.

use std::ops::Range;

use phalanx_kernels as kernels;
use phalanx_nn::Mismatch;
use phalanx_tensor::{Dims, Tensor};

use super::Zero;
use super::build::Source;
use crate::Result;

/// A part of an entry of a model's state dict.
#[derive(Clone, Debug)]
pub struct StatePart {
    /// The entry's path.
    pub name: String,
    /// The whole tensor's shape.
    pub shape: Dims,
    /// The part's elements, in row-major order of the whole.
    pub range: Range<usize>,
    /// Their values: one dimension.
    pub values: Tensor,
}

impl Zero {
    /// This rank's part of the model's state dict, in the dtype that shares are kept in; what is not spread, such as
    /// buffers, is rank 0's. The tensors are the model's own, not copies. Nothing is sent.
    ///
    /// # Errors
    /// Never for tensors that are contiguous, as a model's are.
    pub fn sharded_state_dict(&self) -> Result<Vec<StatePart>> {
        let (state, first) = (self.core.lock(), self.core.ranks.shard.rank() == 0);
        let mut parts = Vec::new();
        for (path, source) in &self.entries {
            let (shape, part) = match source {
                Source::Flat(g, f, m) => {
                    let buffer = &state.groups[*g].flats[*f];
                    (buffer.members[*m].shape.clone(), buffer.part(*m)?)
                }
                Source::Parameter(p) => {
                    (all_of(&p.tensor()).0, first.then(|| flat(&p.tensor())).transpose()?)
                }
                Source::Buffer(b) => (all_of(&b.tensor()).0, first.then(|| flat(&b.tensor())).transpose()?),
            };
            if let Some((range, values)) = part {
                parts.push(StatePart { name: path.clone(), shape, range, values });
            }
        }
        Ok(parts)
    }

    /// Takes this rank's values from parts of any layout's state dict, usually those of all its ranks; converts dtypes. All
    /// ranks call it.
    ///
    /// # Errors
    /// If parts of what this rank has are missing, or names are not known or of another shape; then nothing is changed.
    pub fn load_sharded_state_dict(&self, parts: &[StatePart]) -> Result<()> {
        let mut problems = Mismatch::default();
        {
            let mut state = self.core.lock();
            for (path, source) in &self.entries {
                let (shape, own) = match source {
                    Source::Flat(g, f, m) => {
                        let flat = &state.groups[*g].flats[*f];
                        (flat.members[*m].shape.clone(), flat.part(*m)?.map(|(range, _)| range))
                    }
                    Source::Parameter(p) => all_of(&p.tensor()),
                    Source::Buffer(b) => all_of(&b.tensor()),
                };
                let named: Vec<&StatePart> = parts.iter().filter(|part| part.name == *path).collect();
                if let Some(other) = named.iter().find(|part| part.shape != shape) {
                    problems.misshaped.push((path.clone(), other.shape[..].into(), shape[..].into()));
                } else if own.is_some_and(|own| !covers(&named, own)) {
                    problems.missing.push(path.clone());
                }
            }
            let known = |name: &str| self.entries.iter().any(|(path, _)| path == name);
            problems.unexpected = parts.iter().map(|p| p.name.clone()).filter(|name| !known(name)).collect();
            problems.unexpected.sort();
            problems.unexpected.dedup();
            problems.check("sharded state dict")?;
            for part in parts {
                let Some((_, source)) = self.entries.iter().find(|(path, _)| *path == part.name) else {
                    continue;
                };
                match source {
                    Source::Flat(g, f, m) => {
                        state.groups[*g].flats[*f].put(*m, part.range.start, &part.values)?;
                    }
                    Source::Parameter(p) => put(&p.tensor(), part)?,
                    Source::Buffer(b) => put(&b.tensor(), part)?,
                }
            }
        }
        self.core.updated(true)
    }
}

/// A tensor's elements and their values in one dimension.
fn flat(tensor: &Tensor) -> Result<(Range<usize>, Tensor)> {
    Ok((0..tensor.numel(), tensor.with_shape(&[tensor.numel()])?))
}

fn all_of(tensor: &Tensor) -> (Dims, Option<Range<usize>>) {
    (Dims::from_slice(tensor.shape()), Some(0..tensor.numel()))
}

/// Whether parts hold all of a range.
fn covers(parts: &[&StatePart], wanted: Range<usize>) -> bool {
    let mut ranges: Vec<Range<usize>> = parts.iter().map(|part| part.range.clone()).collect();
    ranges.sort_by_key(|range| range.start);
    let reach = |at: usize, range: &Range<usize>| if range.start <= at { at.max(range.end) } else { at };
    ranges.iter().fold(wanted.start, reach) >= wanted.end
}

fn put(tensor: &Tensor, part: &StatePart) -> Result<()> {
    let mut place = tensor.with_shape(&[tensor.numel()])?.narrow(0, part.range.start, part.range.len())?;
    let values = kernels::cast(&part.values.to_device(tensor.device(), false)?, tensor.dtype())?;
    Ok(kernels::copy_(&mut place, &values)?)
}
