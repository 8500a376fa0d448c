//! Whether all ranks hold the same model with the same settings, and whether a model is still the one that was wrapped. [`Ddp`]
//! and [`Zero`](crate::sharded::Zero) refuse everything else.
//!
//! [`Ddp`]: super::Ddp

use std::sync::Arc;

use phalanx_kernels as kernels;
use phalanx_nn::autograd::{HookHandle, Leaf};
use phalanx_nn::{Entry, Parameter, ParameterOwner, Parameters, Usage};
use phalanx_tensor::{DType, Device, Tensor};
use xxhash_rust::xxh64::xxh64;

use crate::comm::Comm;
use crate::{Error, Result};

/// Why an optimizer refuses to step on gradients that only accumulated on this rank.
pub(crate) const UNREDUCED: &str = "has gradients of this rank alone, which are not added to the other ranks': run the last \
    backward pass of a step without `no_sync`, and call `finish` after a pass of your own";

/// Takes the wrapper's place at its parameters when the wrapper was dropped before its first pass, which is most often a mistake
/// (`let _ = Ddp::new(..)`).
pub(crate) struct DroppedWrapper;

impl ParameterOwner for DroppedWrapper {
    fn refusal(&self, usage: Usage) -> Option<&'static str> {
        (usage == Usage::Update).then_some(
            "is of a model whose `Ddp` or `Zero` was dropped before its first pass, so that ranks would train apart: bind it to a \
             name (`let _ = ..` drops it), or make it anew",
        )
    }
}

/// Refuses a parameter that is not trained or frozen as it was when `wrapper` was made.
pub(crate) fn check_trained(wrapper: &str, parameter: &Parameter, trained: bool) -> Result<()> {
    let (now, then) = match (parameter.is_trained(), trained) {
        (true, false) => ("trained", "frozen"),
        (false, true) => ("frozen", "trained"),
        _ => return Ok(()),
    };
    Err(changed(wrapper, parameter, now, then))
}

fn changed(wrapper: &str, parameter: &Parameter, now: &str, then: &str) -> Error {
    let why = format!("is {now} now, and was {then} when `{wrapper}` was made; make it anew");
    phalanx_nn::Error::invalid(parameter.name(), why).into()
}

/// Refuses gradients of a parameter that was frozen when `wrapper` was made, as long as no other wrapper owns it since: they would not
/// be added over the ranks. To be removed when `wrapper` is dropped, since the hooks hold the parameter that holds them.
pub(crate) fn refuse_gradients(wrapper: &'static str, parameter: &Parameter) -> Vec<HookHandle> {
    let owner = |parameter: &Parameter| parameter.owner().map(|owner| Arc::as_ptr(&owner).addr());
    let then = owner(parameter);
    let refuse = |leaf: &Leaf| {
        let parameter = parameter.clone();
        leaf.on_accumulate(move |_| match owner(&parameter) == then {
            false => Ok(()),
            true => Err(changed(wrapper, &parameter, "trained", "frozen").into()),
        })
    };
    parameter.leaves().iter().map(refuse).collect()
}

/// Refuses to go on when another wrapper has taken the model over.
pub(crate) fn check_owned(wrapper: &str, replaced: bool) -> Result<()> {
    match replaced {
        false => Ok(()),
        true => Err(Error::Config(format!(
            "{wrapper}: another wrapper, made later, has the model now; this one can only be dropped"
        ))),
    }
}

/// Refuses a model whose values are spread by another wrapper.
pub(crate) fn check_values(wrapper: &str, model: &(impl Parameters + ?Sized)) -> Result<()> {
    let parameters = model.parameters();
    let is_withheld = |p: &Parameter| p.held_in().iter().any(|held| held.why_withheld().is_some());
    let is_gone = |p: &&Parameter| is_withheld(p) && !p.is_deferred();
    let Some(gone) = parameters.iter().find(is_gone) else { return Ok(()) };
    let name = gone.name();
    Err(Error::Config(format!(
        "{wrapper}: {name} has no values here: another `Zero` spreads them; load the model's state dict into a new model"
    )))
}

/// Refuses a model with parameters that a wrapper does not know.
pub(crate) fn check_model(
    wrapper: &str,
    model: &dyn Parameters,
    is_known: impl Fn(&Parameter) -> bool,
) -> Result<()> {
    match model.parameters().iter().find(|p| !is_known(p)) {
        None => Ok(()),
        Some(other) => Err(Error::Config(format!(
            "{wrapper}: {} is not among the parameters that it was made with; make it anew after parameters are added or \
             replaced",
            other.name()
        ))),
    }
}

/// Refuses a loss that depends on a trained parameter which the wrapper does not know: its gradient would not be added over the ranks.
pub(crate) fn check_reached(wrapper: &str, reached: &[Leaf]) -> Result<()> {
    match reached.iter().find(|leaf| !leaf.is_watched()) {
        None => Ok(()),
        Some(leaf) => Err(Error::Config(format!(
            "{wrapper}: the loss depends on a parameter of shape {:?} that is not among those that it was made with; make it \
             anew after parameters are added or replaced, and freeze what is not to be trained",
            leaf.tensor().shape()
        ))),
    }
}

/// Compares the names, shapes, dtypes, trained flags and settings of all ranks with rank 0's. The error names the ranks that
/// differ, on every rank.
pub(crate) fn check_same_model(
    model: &(impl Parameters + ?Sized),
    settings: &str,
    comm: &Comm,
) -> Result<()> {
    if !comm.has_peers() {
        return Ok(());
    }
    let (mut entries, mut device) = (Vec::<String>::new(), Device::CPU);
    model.visit("", &mut |path, entry| {
        let (tensor, kind) = match entry {
            Entry::Parameter(p) if p.is_in_int8() => (p.tensor(), "in 8-bit blocks"),
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
    let hashes: Vec<i64> = entries.iter().map(|entry| xxh64(entry.as_bytes(), 0).cast_signed()).collect();
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

/// Broadcasts `root`'s small tensors; those of one dtype and device travel in one message.
pub(crate) fn broadcast_coalesced(tensors: &[Tensor], root: usize, comm: &Comm) -> Result<()> {
    let mut kinds: Vec<(DType, Device)> = tensors.iter().map(|t| (t.dtype(), t.device())).collect();
    kinds.sort_by_key(|kind| tensors.iter().position(|t| (t.dtype(), t.device()) == *kind));
    kinds.dedup();
    for (dtype, device) in kinds {
        let same: Vec<&Tensor> =
            tensors.iter().filter(|t| (t.dtype(), t.device()) == (dtype, device)).collect();
        let mut flat = Tensor::empty(&[same.iter().map(|t| t.numel()).sum()], dtype, device)?;
        let mut at = 0;
        let mut parts = Vec::new();
        for tensor in &same {
            parts.push(flat.narrow(0, at, tensor.numel())?.with_shape(tensor.shape())?);
            at += tensor.numel();
        }
        if comm.rank() == root {
            parts.iter_mut().zip(&same).try_for_each(|(part, tensor)| kernels::copy_(part, tensor))?;
        }
        comm.broadcast(&mut flat, root)?;
        if comm.rank() != root {
            same.iter().zip(&parts).try_for_each(|(&t, part)| kernels::copy_(&mut t.clone(), part))?;
        }
    }
    Ok(())
}
