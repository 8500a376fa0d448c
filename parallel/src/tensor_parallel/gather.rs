//! A model's whole tensors, gathered from the parts that ranks hold, and Hugging Face folders of them.
//!
//! ```text
//! every rank     says which part of which parameter it has      -> the same list on all of them
//! first_holders  the first rank that has a part sends it        (pure)
//! others         send their parts, in order
//! rank 0         receives in order, and copies each part to where it lies in the whole
//! ```
//! The group is all ranks of one replica of a model, over tensor parallelism and stages alike. To load a folder, every rank
//! reads its own parts: [`phalanx_nn::models::load_stage`].

use std::collections::{HashMap, HashSet};
use std::path::Path;

use phalanx_kernels as kernels;
use phalanx_nn::models::{Decoder, ModelConfig, Pretrained, save_tensors};
use phalanx_nn::{LayerFactory, Parameter, Parameters, Shard};
use phalanx_tensor::{DType, Device, Dims, Tensor, Window};
use serde::{Deserialize, Serialize};

use crate::all_gather::all_gather_object;
use crate::comm::Comm;
use crate::data_parallel::Entries;
use crate::sharded_tensor::ShardedTensor;
use crate::{Error, Result};

/// Writes the folder of a model that these ranks hold together, as [`phalanx_nn::models::save_model`] does on one device. All
/// ranks call it. Rank 0 writes, and needs memory for the whole model on the CPU.
///
/// # Errors
/// As [`gather_parameters`], or if a file cannot be written.
pub fn save_model<L: LayerFactory>(
    model: &Decoder<L>,
    config: &ModelConfig,
    comm: &Comm,
    folder: impl AsRef<Path>,
) -> Result<()> {
    let entries = gather_parameters(&model.parameters(), comm)?;
    if comm.rank() == 0 {
        save_tensors(entries, config, folder)?;
    }
    Ok(comm.barrier()?)
}

/// Writes the folder of an encoder that these ranks hold together, as [`Pretrained::save`] does on one device. All ranks call it. Rank 0
/// writes, and needs memory for the whole model on the CPU.
///
/// # Errors
/// As [`gather_parameters`], or if a file cannot be written.
pub fn save_encoder<C: Pretrained>(
    model: &(impl Parameters + ?Sized),
    config: &C,
    comm: &Comm,
    folder: impl AsRef<Path>,
) -> Result<()> {
    let entries = gather_parts(&ShardedTensor::all_of(model), comm)?;
    if comm.rank() == 0 {
        config.save_tensors(entries, folder)?;
    }
    Ok(comm.barrier()?)
}

/// The whole tensors of the parameters that these ranks hold together, by global name, on rank 0's CPU; on other ranks an empty
/// list. If several ranks hold a part, the first one sends it. All ranks call it.
///
/// # Errors
/// If parts are missing, or as [`crate::comm::Pending::wait`].
pub fn gather_parameters(parameters: &[Parameter], comm: &Comm) -> Result<Entries> {
    gather_parts(&parameters.iter().map(ShardedTensor::with_values).collect::<Result<Vec<_>>>()?, comm)
}

/// [`gather_parameters`] of any parts, of buffers too ([`ShardedTensor::all_of`]), which are never split.
///
/// # Errors
/// As [`gather_parameters`].
pub fn gather_parts(parts: &[ShardedTensor], comm: &Comm) -> Result<Entries> {
    let held = all_gather_object(comm, &parts.iter().map(HeldPart::of).collect::<Vec<_>>())?;
    let wanted = first_holders(&held);
    if comm.rank() != 0 {
        for &(_, i) in wanted.iter().filter(|(rank, _)| *rank == comm.rank()) {
            comm.send(&parts[i].values, 0)?;
        }
        return Ok(Vec::new());
    }
    let host = parts.first().map_or(Device::CPU, |part| part.values.device()).host();
    let mut whole: HashMap<&str, (Tensor, usize)> = HashMap::new();
    for (rank, i) in wanted {
        let one = &held[rank][i];
        let (HeldPart { name, shape, .. }, dtype, part) = (one, one.dtype()?, one.part());
        let tensor = match rank {
            0 => parts[i].values.to_device(host, false)?,
            _ => {
                let mut tensor = Tensor::empty(shape, dtype, host)?;
                comm.recv(&mut tensor, rank)?;
                tensor
            }
        };
        if !whole.contains_key(name.as_str()) {
            whole.insert(name, (Tensor::empty(&part.whole_shape(shape.len()), dtype, host)?, 0));
        }
        if let Some((to, filled)) = whole.get_mut(name.as_str()) {
            kernels::copy_(&mut part.of(to)?, &tensor.with_shape(&part.extent)?)?;
            *filled += tensor.numel();
        }
    }
    let mut entries = Entries::new();
    for (name, (tensor, filled)) in whole {
        if filled != tensor.numel() {
            let why = format!("{name}: the ranks hold {filled} of {} elements", tensor.numel());
            return Err(Error::Config(why));
        }
        entries.push((name.to_string(), tensor));
    }
    entries.sort_by(|a, b| a.0.cmp(&b.0));
    Ok(entries)
}

/// The part of a tensor that a rank holds.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct HeldPart {
    name: String,
    dtype: String,
    /// The whole tensor's shape as the split sees it, the part's offset and extent there, and the shape of the rank's tensor.
    global: Vec<usize>,
    offset: Vec<usize>,
    extent: Vec<usize>,
    shape: Vec<usize>,
}

/// For every part the first rank that has it and its number on that rank, in order of the ranks.
fn first_holders(held: &[Vec<HeldPart>]) -> Vec<(usize, usize)> {
    let mut seen: HashSet<(&str, &[usize])> = HashSet::new();
    let all = held
        .iter()
        .enumerate()
        .flat_map(|(rank, own)| own.iter().enumerate().map(move |(i, h)| (rank, i, h)));
    let first = all.filter(|(.., h)| seen.insert((&h.name, &h.offset)));
    first.map(|(rank, i, _)| (rank, i)).collect()
}

impl HeldPart {
    fn of(part: &ShardedTensor) -> HeldPart {
        let Shard { window: Window { global, offset }, extent } = &part.shard;
        HeldPart {
            name: part.name.clone(),
            dtype: part.values.dtype().to_string(),
            global: global.to_vec(),
            offset: offset.to_vec(),
            extent: extent.to_vec(),
            shape: part.values.shape().to_vec(),
        }
    }

    fn part(&self) -> Shard {
        let [global, offset, extent] =
            [&self.global, &self.offset, &self.extent].map(|d| Dims::from_slice(d));
        Shard { window: Window { global, offset }, extent }
    }

    fn dtype(&self) -> Result<DType> {
        let unknown = || Error::Config(format!("{}: another rank has it in {:?}", self.name, self.dtype));
        DType::parse(&self.dtype).ok_or_else(unknown)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn held(name: &str, global: &[usize], offset: &[usize], extent: &[usize]) -> HeldPart {
        let [global, offset, extent] = [global, offset, extent].map(<[usize]>::to_vec);
        HeldPart { name: name.into(), dtype: "bf16".into(), shape: extent.clone(), global, offset, extent }
    }

    #[test]
    fn every_part_comes_from_the_first_that_has_it() {
        let (left, right) = (held("w", &[4, 2], &[0, 0], &[2, 2]), held("w", &[4, 2], &[2, 0], &[2, 2]));
        let (norm, last) = (held("n", &[3], &[0], &[3]), held("z", &[], &[], &[]));
        let ranks =
            [vec![left.clone(), norm.clone()], vec![right.clone(), norm], vec![last, left], vec![right]];
        assert_eq!(first_holders(&ranks), [(0, 0), (0, 1), (1, 0), (2, 0)]);
    }
}
