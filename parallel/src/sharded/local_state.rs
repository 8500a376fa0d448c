//! Local state: this rank's flat parameters and its optimizer's tensors as they are (torch: `LOCAL_STATE_DICT`). Nothing is sent. It fits
//! only the rank, the number of ranks and the wrapping that it was taken from; what it came from is in it.

use phalanx_kernels as kernels;
use phalanx_nn::Mismatch;
use phalanx_tensor::{Device, Tensor};
use xxhash_rust::xxh64::xxh64;

use super::Zero;
use super::core::ZeroState;
use super::flat_parameter::FlatParameter;
use super::zero::EntryStorage;
use crate::data_parallel::Entries;
use crate::sharded_tensor::ShardedTensor;
use crate::{Error, Result};

/// The entry of what a local state came from: the rank and the number of the ranks that share a copy, and a hash of what they own.
const LAYOUT: &str = "zero.layout";

impl Zero {
    /// This rank's flat parameters, `zero.flat.UNIT.NUMBER`, and every tensor that is not spread, by its path. The tensors are the
    /// model's own, not copies. For a state that other layouts read see [`Zero::sharded_state_dict`].
    ///
    /// # Errors
    /// If a few bytes cannot be allocated.
    pub fn local_state_dict(&self) -> Result<Entries> {
        let state = self.core.lock();
        let mut entries = vec![(LAYOUT.to_string(), self.layout(&state)?)];
        entries.extend(self.local_tensors(&state));
        Ok(entries)
    }

    /// Takes values that [`Zero::local_state_dict`] has given on the same rank of as many ranks, wrapped alike. All ranks call it.
    ///
    /// # Errors
    /// If the state is another rank's, of another number of ranks or of another wrapping, which are named; if names are missing, not known
    /// or of another shape. Then nothing is changed.
    pub fn load_local_state_dict(&self, entries: Entries) -> Result<()> {
        let mut given = self.without_layout(entries)?;
        {
            let state = self.core.lock();
            let (mut problems, mut fitting) = (Mismatch::default(), Vec::new());
            for (name, own) in self.local_tensors(&state) {
                match given.iter().position(|(other, _)| *other == name) {
                    None => problems.missing.push(name),
                    Some(place) => match given.swap_remove(place).1 {
                        values if values.shape() == own.shape() => fitting.push((own, values)),
                        other => problems.misshaped.push((name, other.shape().into(), own.shape().into())),
                    },
                }
            }
            problems.unexpected = given.into_iter().map(|(name, _)| name).collect();
            problems.unexpected.sort();
            problems.check("local state dict")?;
            for (mut own, values) in fitting {
                let values = kernels::cast(&values.to_device(own.device(), false)?, own.dtype())?;
                kernels::copy_(&mut own, &values)?;
            }
        }
        self.core.updated(true)
    }

    /// An optimizer's state on this rank, its [`Optimizer::state_dict`], and what it came from.
    ///
    /// # Errors
    /// If a few bytes cannot be allocated.
    ///
    /// [`Optimizer::state_dict`]: phalanx_nn::Optimizer::state_dict
    pub fn local_optimizer_state(&self, own: Entries) -> Result<Entries> {
        let layout = self.layout(&self.core.lock())?;
        Ok([vec![(LAYOUT.to_string(), layout)], own].concat())
    }

    /// An optimizer's state of the same rank, for [`phalanx_nn::Optimizer::load_state_dict`], after [`Zero::load_local_state_dict`].
    ///
    /// # Errors
    /// If the state is another rank's, of another number of ranks or of another wrapping, which are named.
    pub fn part_of_local_optimizer_state(&self, entries: Entries) -> Result<Entries> {
        self.without_layout(entries)
    }

    fn local_tensors(&self, state: &ZeroState) -> Vec<(String, Tensor)> {
        let flats = state.units.iter().enumerate().flat_map(|(u, unit)| {
            let named =
                move |(f, flat): (usize, &FlatParameter)| (format!("zero.flat.{u}.{f}"), flat.shard.clone());
            unit.flats.iter().enumerate().map(named)
        });
        let others = self.entries.iter().flat_map(|(path, source)| match source {
            EntryStorage::Sharded(_) | EntryStorage::Int8(..) => Vec::new(),
            EntryStorage::Parameter(p) if p.is_in_int8() => {
                let names = ShardedTensor::INT8_BLOCKS.map(|kind| format!("{path}.{kind}"));
                names.into_iter().zip(p.held_in()).collect()
            }
            EntryStorage::Parameter(p) => vec![(path.clone(), p.tensor())],
            EntryStorage::Buffer(b) => vec![(path.clone(), b.tensor())],
        });
        flats.chain(others).collect()
    }

    fn layout(&self, state: &ZeroState) -> Result<Tensor> {
        let ranks = &self.core.ranks.shard;
        let mut owned = String::new();
        for flat in state.units.iter().flat_map(|unit| &unit.flats) {
            let names: Vec<_> = flat.members.iter().map(|m| (m.parameter.name(), &m.shape)).collect();
            owned += &format!("{names:?} {:?} {}\n", flat.cuts.bounds, flat.shard_dtype());
        }
        let hash = xxh64(owned.as_bytes(), 0).cast_signed();
        Ok(Tensor::from_slice(&[ranks.rank() as i64, ranks.size() as i64, hash], &[3], Device::CPU)?)
    }

    /// The entries of a state that came from a layout like this one.
    fn without_layout(&self, mut entries: Entries) -> Result<Entries> {
        let refuse = |why: String| Err(Error::Config(format!("Zero: {why}")));
        let Some(place) = entries.iter().position(|(name, _)| name == LAYOUT) else {
            return refuse(format!("got a state without {LAYOUT:?}, wanted a local one"));
        };
        let (got, own) = (entries.remove(place).1.to_vec::<i64>()?, self.layout(&self.core.lock())?);
        let own = own.to_vec::<i64>()?;
        match (&got[..], &own[..]) {
            (got, own) if got == own => Ok(entries),
            (&[rank, ranks, _], &[own_rank, own_ranks, _]) if (rank, ranks) != (own_rank, own_ranks) => {
                refuse(format!(
                    "got the local state of rank {rank} of {ranks}, wanted that of rank {own_rank} of {own_ranks}; a full or a \
                     sharded state fits any number of ranks"
                ))
            }
            _ => refuse(
                "got the local state of another model, or of one that is wrapped or cut in another way"
                    .into(),
            ),
        }
    }
}
