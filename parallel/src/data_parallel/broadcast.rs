//! Giving all ranks one rank's tensors.

use phalanx_kernels as kernels;
use phalanx_tensor::{DType, Device, Tensor};

use crate::Result;
use crate::comm::Comm;

/// Gives all ranks `root`'s small tensors, those of a dtype and device in one message.
pub(crate) fn together(tensors: &[Tensor], root: usize, comm: &Comm) -> Result<()> {
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
