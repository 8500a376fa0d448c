//! What is made of one all-gather: [`all_gather_object`] of serialised values, by which checkpoints and meshes agree on a plan, and
//! [`gather_sums`] of a few f64, by which gradients' norms are added over ranks.

use phalanx_kernels as kernels;
use phalanx_tensor::{DType, Device, Tensor};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::comm::{Call, Comm};
use crate::{Error, Result};

/// The device of the messages. No rank computes on it, so no rank's memory ledger counts them.
pub(crate) const HOST: Device = Device::Cpu(1023);

/// Gives every rank the values of all ranks, in order of the ranks, as PyTorch's function of this name. All ranks of a
/// group call it.
///
/// # Errors
/// As [`crate::comm::Pending::wait`]; or if the communicator has no peers ([`crate::comm::meta`]).
#[track_caller]
pub fn all_gather_object<T: Serialize + DeserializeOwned>(comm: &Comm, value: &T) -> Result<Vec<T>> {
    let wrong = |e: serde_json::Error| Error::Config(format!("ranks do not understand each other: {e}"));
    let own = serde_json::to_vec(value).map_err(wrong)?;
    let texts = if comm.size() == 1 { vec![own] } else { gather(comm, &own)? };
    texts.iter().map(|text| serde_json::from_slice(text).map_err(wrong)).collect()
}

#[track_caller]
fn gather(comm: &Comm, own: &[u8]) -> Result<Vec<Vec<u8>>> {
    if !comm.has_peers() {
        return Err(Error::Config("ranks without peers, such as those on meta, have nothing to tell".into()));
    }
    let count = Tensor::from_slice(&[own.len() as i64], &[1], HOST)?;
    let mut counts = Tensor::empty(&[comm.size()], DType::I64, HOST)?;
    comm.all_gather(&mut counts, &count)?;
    let counts: Vec<usize> = counts.to_vec::<i64>()?.into_iter().map(|n| n as usize).collect();
    let all = Tensor::empty(&[counts.iter().sum()], DType::U8, HOST)?;
    let own = Tensor::from_slice(own, &[own.len()], HOST)?;
    comm.run(Call::all_gather_uneven(all.clone(), own, &counts))?;
    let all = all.to_bytes()?;
    let mut rest = &all[..];
    let mut next = |count| {
        let (text, others) = rest.split_at(count);
        rest = others;
        text.to_vec()
    };
    Ok(counts.into_iter().map(&mut next).collect())
}

/// The values of all ranks if every rank succeeded.
///
/// # Errors
/// The failure of the first rank that failed, the same on every rank; it names the rank.
#[track_caller]
pub(crate) fn all_ok<T>(comm: &Comm, outcomes: Vec<Result<T, String>>) -> Result<Vec<T>> {
    let name = |(rank, outcome): (usize, Result<T, String>)| {
        outcome.map_err(|cause| crate::comm::Error::Failed { rank: comm.ranks()[rank], cause }.into())
    };
    outcomes.into_iter().enumerate().map(name).collect()
}

/// Gathers `own`, f64 `[counts[rank]]`, of every rank, one rank after another, and adds up `count` sums of the gathered
/// numbers, f64 `[count]` on the device of `own`. The sums are 0 at first. Then for each pair `(to, from)` in order, the
/// gathered number `from` is added to the sum `to`; where `to` is `count` or more, it is added to the gathered number
/// `to - count`. The caller does not wait for a GPU.
///
/// # Errors
/// As [`crate::comm::Pending::wait`].
#[track_caller]
pub(crate) fn gather_sums(
    comm: &Comm,
    own: &Tensor,
    counts: &[usize],
    count: usize,
    pairs: impl IntoIterator<Item = (usize, usize)>,
) -> Result<Tensor> {
    let gathered = counts.iter().sum();
    let mut all = Tensor::zeros(&[count + gathered], DType::F64, own.device())?;
    let parts = all.narrow(0, count, gathered)?;
    comm.run(Call::all_gather_uneven(parts, own.clone(), counts))?;
    let pairs: Vec<_> = pairs.into_iter().map(|(to, from)| (to, count + from)).collect();
    kernels::add_pairs_(&mut all, &pairs)?;
    Ok(all.narrow(0, 0, count)?)
}

/// The old name of [`all_gather_object`].
///
/// # Errors
/// As [`all_gather_object`].
#[deprecated(since = "0.1.0", note = "renamed to `all_gather_object`")]
#[track_caller]
pub fn tell<T: Serialize + DeserializeOwned>(comm: &Comm, value: &T) -> Result<Vec<T>> {
    all_gather_object(comm, value)
}
