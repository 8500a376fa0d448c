//! The model's state dict, made of all ranks' shares, and the way back.

use std::collections::HashMap;

use phalanx_nn::Mismatch;
use phalanx_tensor::{Device, Tensor};

use super::Zero;
use super::build::Source;
use crate::Result;
use crate::data_parallel::Entries;

impl Zero {
    /// Every parameter and buffer by name, as [`phalanx_nn::state_dict`] of a whole model, copied to the CPU; parameters in
    /// the dtype that shares are kept in. On rank 0; elsewhere nothing. All ranks call it. One group of parameters is gathered
    /// at a time.
    ///
    /// # Errors
    /// If memory is short, or as [`crate::comm::Pending::wait`].
    pub fn full_state_dict(&self) -> Result<Entries> {
        let (state, first) = (self.core.lock(), self.core.ranks.all.rank() == 0);
        let mut found: HashMap<(usize, usize, usize), Tensor> = HashMap::new();
        for (g, group) in state.groups.iter().enumerate() {
            for (f, flat) in group.flats.iter().enumerate() {
                let whole = flat.whole(&self.core.ranks)?;
                if !first {
                    continue;
                }
                let whole = to_host(&whole)?;
                for (m, member) in flat.members.iter().enumerate() {
                    found.insert((g, f, m), member.of(&whole)?);
                }
            }
        }
        let entry = |(path, source): &(String, Source)| -> Result<Option<(String, Tensor)>> {
            let tensor = match source {
                Source::Flat(g, f, m) => found.get(&(*g, *f, *m)).cloned(),
                Source::Parameter(p) => Some(copy(&p.tensor())?),
                Source::Buffer(b) => Some(copy(&b.tensor())?),
            };
            Ok(tensor.map(|tensor| (path.clone(), tensor)))
        };
        let entries = self.entries.iter().filter(|_| first);
        entries.filter_map(|named| entry(named).transpose()).collect()
    }

    /// Takes parameters and buffers from a state dict of the whole model, which every rank has; converts dtypes.
    ///
    /// # Errors
    /// If names are missing, not known or of another shape; then nothing is changed.
    pub fn load_full_state_dict(&self, entries: Entries) -> Result<()> {
        let mut given: HashMap<String, Tensor> = entries.into_iter().collect();
        let (mut problems, mut fitting) = (Mismatch::default(), Vec::new());
        {
            let mut state = self.core.lock();
            for (path, source) in &self.entries {
                let shape = match source {
                    Source::Flat(g, f, m) => state.groups[*g].flats[*f].members[*m].shape.to_vec(),
                    Source::Parameter(p) => p.tensor().shape().to_vec(),
                    Source::Buffer(b) => b.tensor().shape().to_vec(),
                };
                match given.remove(path) {
                    None => problems.missing.push(path.clone()),
                    Some(t) if t.shape() != shape => {
                        problems.misshaped.push((path.clone(), t.shape().into(), shape[..].into()));
                    }
                    Some(t) => fitting.push((source, t)),
                }
            }
            problems.unexpected = given.into_keys().collect();
            problems.unexpected.sort();
            problems.check("state dict")?;
            for (source, values) in fitting {
                match source {
                    Source::Flat(g, f, m) => state.groups[*g].flats[*f].load(*m, &values)?,
                    Source::Parameter(p) => p.load(&values)?,
                    Source::Buffer(b) => b.load(&values)?,
                }
            }
        }
        self.core.updated(true)
    }
}

/// On the CPU, unless there are no values.
pub(super) fn to_host(tensor: &Tensor) -> Result<Tensor> {
    let home = if tensor.device().is_meta() { tensor.device() } else { Device::CPU };
    Ok(tensor.to_device(home, false)?)
}

/// The same, in a storage of its own.
fn copy(tensor: &Tensor) -> Result<Tensor> {
    let copy = to_host(tensor)?;
    if copy.shares_storage(tensor) { Ok(copy.copy()?) } else { Ok(copy) }
}
