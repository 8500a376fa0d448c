//! Index tensors and masks as places in the dimensions that they index, seen as one.

use std::ops::Range;

use phalanx_kernels as kernels;
use phalanx_tensor::{DType, Device, Error, Tensor};

use super::super::composed::product;
use super::super::nonzero::positions;
use crate::{Result, Var};

/// The dimensions that a mask for dimension `at` and after indexes, whose sizes it has.
pub(super) fn mask_dims(op: &'static str, x: &Var, at: usize, mask: &Var) -> Result<Range<usize>> {
    let end = at + mask.rank();
    if mask.rank() == 0 || x.shape().get(at..end) != Some(mask.shape()) {
        let got = format!("a mask of shape {:?} for dimension {at} of {:?}", mask.shape(), x.shape());
        return Err(Error::shape(op, got, "the sizes of the dimensions that it indexes").into());
    }
    if mask.device() != x.device() {
        return Err(Error::Device { op, left: x.device(), right: mask.device() }.into());
    }
    Ok(at..end)
}

/// Some neighbouring dimensions, seen as one, with an i64 index into them.
pub(super) struct Block {
    pub dims: Range<usize>,
    pub size: usize,
    pub index: Tensor,
}

impl Block {
    pub fn new(op: &'static str, x: &Var, at: usize, index: &Var) -> Result<Block> {
        if index.dtype() == DType::Bool {
            let dims = mask_dims(op, x, at, index)?;
            let size = product(op, index.shape())?;
            return Ok(Block { dims, size, index: positions(op, index.tensor())? });
        }
        if !matches!(index.dtype(), DType::I64 | DType::I32) {
            return Err(Error::dtype(op, index.dtype(), "i64 or i32 for the indices, or a bool mask").into());
        }
        if index.device() != x.device() {
            return Err(Error::Device { op, left: x.device(), right: index.device() }.into());
        }
        let size = *x.shape().get(at).ok_or_else(|| too_many(op, x, at + 1))?;
        Ok(Block { dims: at..at + 1, size, index: kernels::cast(index.tensor(), DType::I64)? })
    }
}

pub(super) fn too_many(op: &'static str, x: &Var, count: usize) -> Error {
    let wanted = format!("at most {}, for shape {:?}", x.rank(), x.shape());
    Error::range(op, format!("an index for {count} dimensions"), wanted)
}

/// The places that the blocks' indices, broadcast to `shape`, name in all their dimensions.
pub(super) fn places(op: &'static str, blocks: &[Block], shape: &[usize], device: Device) -> Result<Tensor> {
    let count = product(op, shape)?;
    if device.is_meta() {
        return Ok(Tensor::empty(&[count], DType::I64, device)?);
    }
    if device.is_cuda() {
        return places_on_gpu(blocks, shape, count);
    }
    let mut places = vec![0_i64; count];
    for Block { size, index, dims } in blocks {
        let size = *size as i64;
        let at = index.broadcast_to(shape)?.to_vec::<i64>()?;
        for (item, (place, &index)) in places.iter_mut().zip(&at).enumerate() {
            let from_front = if index < 0 { index.saturating_add(size) } else { index };
            if !(0..size).contains(&from_front) {
                let wanted = format!("-{size} to {} for dimension {} of size {size}", size - 1, dims.start);
                return Err(Error::range(op, format!("index {index} (item {item})"), wanted).into());
            }
            *place = *place * size + from_front;
        }
    }
    Ok(Tensor::from_slice(&places, &[count], device)?)
}

/// [`places`] without waiting: what is out of range is found by the tables that the indices read.
fn places_on_gpu(blocks: &[Block], shape: &[usize], count: usize) -> Result<Tensor> {
    let (mut places, mut stride) = (None, 1_i64);
    for Block { size, index, .. } in blocks.iter().rev() {
        let size = *size as i64;
        let negative = kernels::lt_scalar(index, 0.into())?;
        let index = kernels::where_(&negative, &kernels::add_scalar(index, size.into())?, index)?;
        let index = index.broadcast_to(shape)?.with_shape(&[count])?;
        let term = match blocks.len() {
            1 => index,
            _ => {
                let table = kernels::arange(0, size * stride, stride.max(1), DType::I64, index.device())?;
                kernels::index_select(&table, 0, &index)?
            }
        };
        places = Some(places.map_or(Ok(term.clone()), |sum| kernels::add(&sum, &term))?);
        stride *= size;
    }
    places.ok_or_else(|| Error::invalid("index", "got no index tensor, wanted at least one").into())
}
