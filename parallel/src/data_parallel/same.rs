//! Whether all ranks hold the same model, names, shapes, dtypes, and what is trained, and have the same settings.

use phalanx_nn::{Entry, Parameters};
use phalanx_tensor::{Device, Tensor};

use crate::comm::Comm;
use crate::{Error, Result};

/// Compares this rank's model and settings with rank 0's; every rank learns who differs.
pub(crate) fn check(model: &(impl Parameters + ?Sized), settings: &str, comm: &Comm) -> Result<()> {
    if !comm.has_peers() {
        return Ok(());
    }
    let (mut entries, mut device) = (Vec::<String>::new(), Device::CPU);
    model.visit("", &mut |path, entry| {
        let (tensor, kind) = match entry {
            Entry::Parameter(p) => (p.tensor(), if p.is_trained() { "trained" } else { "frozen" }),
            Entry::Buffer(b) => (b.tensor(), "buffer"),
        };
        device = tensor.device().host();
        entries.push(format!("{path}: {kind}, {} {:?}", tensor.dtype(), tensor.shape()));
    });
    let counts = gather(comm, device, &[entries.len() as i64])?;
    if let Some(ranks) = others(&counts, 1) {
        let why = format!("{} tensors, here {}", counts[0], entries.len());
        return Err(Error::Models { ranks, why });
    }
    entries.push(settings.into());
    let hashes: Vec<i64> = entries.iter().map(|entry| hash(entry)).collect();
    let all = gather(comm, device, &hashes)?;
    let Some(ranks) = others(&all, hashes.len()) else { return Ok(()) };
    let differs = |i: &usize| (0..comm.size()).any(|rank| all[rank * hashes.len() + i] != all[*i]);
    let first = (0..hashes.len()).find(differs).unwrap_or(0);
    if first == entries.len() - 1 {
        return Err(Error::Config(format!(
            "ranks {ranks:?} have other settings than rank 0; here {settings}"
        )));
    }
    Err(Error::Models { ranks, why: format!("tensor {first}, here {}", entries[first]) })
}

/// Every rank's values, one after the other.
fn gather(comm: &Comm, device: Device, own: &[i64]) -> Result<Vec<i64>> {
    let own = Tensor::from_slice(own, &[own.len()], device)?;
    let mut all = Tensor::zeros(&[own.numel() * comm.size()], own.dtype(), device)?;
    comm.all_gather(&mut all, &own)?;
    Ok(all.to_vec()?)
}

/// The ranks whose values are not rank 0's, if there are any.
fn others(all: &[i64], each: usize) -> Option<Vec<usize>> {
    let differ = all.chunks(each.max(1)).enumerate().filter(|(_, values)| *values != &all[..each]);
    let ranks: Vec<usize> = differ.map(|(rank, _)| rank).collect();
    (!ranks.is_empty()).then_some(ranks)
}

/// FNV-1a, the same on every machine.
fn hash(text: &str) -> i64 {
    let hash = |hash: u64, byte: u8| (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3);
    text.bytes().fold(0xcbf2_9ce4_8422_2325, hash).cast_signed()
}
