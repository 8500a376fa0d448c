//! A model's whole tensors, made of what ranks hold of it, and Hugging Face folders of them.
//!
//! ```text
//! every rank     says which part of which parameter it has      -> the same list on all of them
//! plan           the first that has a part gives it             (pure)
//! others         send what they are to give, in order
//! rank 0         receives in order, and puts each part in its place
//! ```
//! The ranks are all that hold a model together, over tensor parallelism and stages alike. To load a folder, every rank
//! reads its own parts: [`phalanx_nn::models::load_stage`].

use std::collections::{HashMap, HashSet};
use std::path::Path;

use phalanx_kernels as kernels;
use phalanx_nn::models::{Decoder, ModelConfig, save_tensors};
use phalanx_nn::{Layers, Parameter, Parameters, Shard};
use phalanx_tensor::{DType, Device, Dims, Tensor, Window};

use crate::comm::{Call, Comm};
use crate::data_parallel::Entries;
use crate::{Error, Result};

/// Writes the folder of a model that these ranks hold together, as [`phalanx_nn::models::save_model`] writes that of one
/// device. All of them call it; rank 0 writes, and needs memory for the whole model on the CPU.
///
/// # Errors
/// As [`gather_parameters`], or if a file cannot be written.
pub fn save_model<L: Layers>(
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

/// The whole tensors of the parameters that these ranks hold together, by global name, on rank 0's CPU; elsewhere nothing.
/// What several hold, the first gives. All ranks call it.
///
/// # Errors
/// If parts are missing, or as [`crate::comm::Pending::wait`].
pub fn gather_parameters(parameters: &[Parameter], comm: &Comm) -> Result<Entries> {
    let held = exchange(&parameters.iter().map(Held::of).collect::<Vec<_>>(), comm)?;
    let wanted = plan(&held);
    if comm.rank() != 0 {
        for &(_, i) in wanted.iter().filter(|(rank, _)| *rank == comm.rank()) {
            comm.send(&parameters[i].tensor(), 0)?;
        }
        return Ok(Vec::new());
    }
    let host = parameters.first().map_or(Device::CPU, Parameter::device).host();
    let mut whole: HashMap<&str, (Tensor, usize)> = HashMap::new();
    for (rank, i) in wanted {
        let Held { name, dtype, part, shape } = &held[rank][i];
        let tensor = match rank {
            0 => parameters[i].tensor().to_device(host, false)?,
            _ => {
                let mut tensor = Tensor::empty(shape, *dtype, host)?;
                comm.recv(&mut tensor, rank)?;
                tensor
            }
        };
        if !whole.contains_key(name.as_str()) {
            whole.insert(name, (Tensor::empty(&part.whole_shape(shape.len()), *dtype, host)?, 0));
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

/// What a rank has of a parameter.
#[derive(Clone, Debug, PartialEq)]
struct Held {
    name: String,
    dtype: DType,
    part: Shard,
    /// The part's own shape.
    shape: Vec<usize>,
}

/// The first rank that has a part, and the parameter's number there; for every part, in order of the ranks.
fn plan(held: &[Vec<Held>]) -> Vec<(usize, usize)> {
    let mut seen: HashSet<(&str, &[usize])> = HashSet::new();
    let all = held
        .iter()
        .enumerate()
        .flat_map(|(rank, own)| own.iter().enumerate().map(move |(i, h)| (rank, i, h)));
    let first = all.filter(|(.., h)| seen.insert((&h.name, &h.part.window.offset)));
    first.map(|(rank, i, _)| (rank, i)).collect()
}

/// All ranks' lists.
fn exchange(own: &[Held], comm: &Comm) -> Result<Vec<Vec<Held>>> {
    let text: String = own.iter().map(Held::to_line).collect();
    let bytes = Tensor::from_slice(text.as_bytes(), &[text.len()], Device::CPU)?;
    let mut lengths = Tensor::zeros(&[comm.size()], DType::I64, Device::CPU)?;
    comm.all_gather(&mut lengths, &Tensor::from_slice(&[text.len() as i64], &[1], Device::CPU)?)?;
    let counts: Vec<usize> = lengths.to_vec::<i64>()?.into_iter().map(|n| n as usize).collect();
    let all = Tensor::zeros(&[counts.iter().sum()], DType::U8, Device::CPU)?;
    comm.run(Call::all_gather_uneven(all.clone(), bytes, &counts))?;
    let (all, mut start) = (all.to_vec::<u8>()?, 0);
    let mut held = Vec::with_capacity(counts.len());
    for count in counts {
        let text = String::from_utf8_lossy(&all[start..start + count]).into_owned();
        held.push(
            text.lines()
                .map(|line| Held::parse(line).ok_or_else(|| unreadable(line)))
                .collect::<Result<_>>()?,
        );
        start += count;
    }
    Ok(held)
}

fn unreadable(line: &str) -> Error {
    Error::Config(format!("gather_parameters: got {line:?} from another rank, wanted a parameter's part"))
}

impl Held {
    fn of(parameter: &Parameter) -> Held {
        let (name, part) = (parameter.name().to_string(), parameter.part().clone());
        let tensor = parameter.tensor();
        Held { name, dtype: tensor.dtype(), part, shape: tensor.shape().to_vec() }
    }

    /// One line: name, dtype, and the sizes, parted by tabs.
    fn to_line(&self) -> String {
        let Shard { window: Window { global, offset }, extent } = &self.part;
        let sizes = [&global[..], &offset[..], &extent[..], &self.shape[..]]
            .map(|sizes| sizes.iter().map(usize::to_string).collect::<Vec<_>>().join(","));
        format!("{}\t{}\t{}\n", self.name, self.dtype, sizes.join("\t"))
    }

    fn parse(line: &str) -> Option<Held> {
        let fields: Vec<&str> = line.split('\t').collect();
        let [name, dtype, sizes @ ..] = &fields[..] else { return None };
        let list = |text: &&str| -> Option<Dims> {
            text.split(',').filter(|size| !size.is_empty()).map(|size| size.parse().ok()).collect()
        };
        let sizes: Option<Vec<Dims>> = sizes.iter().map(list).collect();
        let [global, offset, extent, shape] = <[Dims; 4]>::try_from(sizes?).ok()?;
        let dtype = DType::parse(dtype)?;
        let part = Shard { window: Window { global, offset }, extent };
        Some(Held { name: name.to_string(), dtype, part, shape: shape.to_vec() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn held(name: &str, global: &[usize], offset: &[usize], extent: &[usize]) -> Held {
        let dims = Dims::from_slice;
        let window = Window { global: dims(global), offset: dims(offset) };
        let part = Shard { window, extent: dims(extent) };
        Held { name: name.into(), dtype: DType::BF16, part, shape: extent.to_vec() }
    }

    #[test]
    fn every_part_comes_from_the_first_that_has_it() {
        let (left, right) = (held("w", &[4, 2], &[0, 0], &[2, 2]), held("w", &[4, 2], &[2, 0], &[2, 2]));
        let (norm, last) = (held("n", &[3], &[0], &[3]), held("z", &[], &[], &[]));
        let ranks =
            [vec![left.clone(), norm.clone()], vec![right.clone(), norm], vec![last, left], vec![right]];
        assert_eq!(plan(&ranks), [(0, 0), (0, 1), (1, 0), (2, 0)]);
    }

    #[test]
    fn lists_round_trip() {
        for part in [held("h.0.w", &[3, 4, 2], &[0, 2, 0], &[3, 2, 2]), held("scalar", &[], &[], &[])] {
            assert_eq!(Held::parse(part.to_line().trim_end_matches('\n')), Some(part));
        }
        assert_eq!(Held::parse("w\tf32\t3"), None);
    }
}
