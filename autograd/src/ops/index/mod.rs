//! Elements by index tensors and masks, NumPy's advanced indexing: `index` reads them and `index_put` replaces them.
//!
//! The indices of all dimensions become one place in the indexed dimensions, so that reading is one `index_select` of rows,
//! with `index_add` as its derivative. Of `index_put` with `accumulate` it is the other way round; without, what is written
//! last stays: `dx = dy` where nothing was written, `dvalues = dy` there, and 0 for values that were written over.

mod places;
mod replaced;

use phalanx_tensor::{DType, Dims, Error, broadcast_shapes};
use smallvec::SmallVec;

use super::composed::{named, product};
use crate::{Result, Var};
use places::{Block, mask_dims, places, too_many};
use replaced::replaced;

impl Var {
    /// `self[indices[0], indices[1], ..]` as in PyTorch and NumPy: an index is an i64 or i32 tensor for one dimension,
    /// counting from the end where negative, or a bool mask for as many dimensions as it has. They broadcast with each other,
    /// a mask as the list of its places. `None` leaves a dimension as it is, and so do those after the last. The dimensions of
    /// the indices stand where the indexed ones were, or in front if those are not neighbours.
    ///
    /// A mask decides the size of the result: there the host waits for the device.
    ///
    /// # Errors
    /// If there are more indices than dimensions, or none; an index is out of range, no integer, or on another device; a mask
    /// has not the sizes of its dimensions; the indices do not broadcast. A mask on a `meta` device.
    ///
    /// ```
    /// use phalanx_autograd::{Var, tensor::Device};
    /// let x = Var::from_slice(&[0, 1, 2, 3, 4, 5], &[2, 3], Device::CPU)?;
    /// let rows = Var::from_slice(&[0i64, 1], &[2], Device::CPU)?;
    /// let columns = Var::from_slice(&[2i64, -3], &[2], Device::CPU)?;
    /// assert_eq!(x.index(&[&rows, &columns])?.to_vec::<i32>()?, [2, 3]);
    /// assert_eq!(x.index(&[None, Some(&columns)])?.shape(), [2, 2]);
    /// # Ok::<(), phalanx_autograd::Error>(())
    /// ```
    pub fn index<'a, I: Into<Option<&'a Var>> + Copy>(&self, indices: &[I]) -> Result<Var> {
        let picked = Picked::new("index", self, indices)?;
        named("index", picked.read(self))
    }

    /// This, with `values` at the places that [`Var::index`] would read; they broadcast to what it would give. With
    /// `accumulate` they are added, repeats too. Without, the last value (in row-major order) for a place is the one that stays,
    /// on every device.
    ///
    /// # Errors
    /// As [`Var::index`]; if the values do not broadcast, or have another dtype or device. A mask on a `meta` device, unless
    /// there is one value for all.
    pub fn index_put<'a, I: Into<Option<&'a Var>> + Copy>(
        &self,
        indices: &[I],
        values: &Var,
        accumulate: bool,
    ) -> Result<Var> {
        const OP: &str = "index_put";
        if values.device() != self.device() {
            return Err(Error::Device { op: OP, left: self.device(), right: values.device() }.into());
        }
        if values.dtype() != self.dtype() {
            let wanted = format!("{} for the values", self.dtype());
            return Err(Error::dtype(OP, values.dtype(), wanted).into());
        }
        if self.dtype() == DType::Bool && accumulate {
            let wide = |x: &Var| x.to(DType::U8);
            return wide(self)?.index_put(indices, &wide(values)?, true)?.to(DType::Bool);
        }
        if let Some(mask) = only_mask(OP, self, indices)?
            && values.numel() == 1
        {
            let value = values.reshape_to(&[])?;
            let value = if accumulate { self.add(&value)? } else { value };
            return named(OP, value.where_(&mask, self));
        }
        let picked = Picked::new(OP, self, indices)?;
        named(OP, picked.write(self, values, accumulate))
    }
}

/// A mask, if it is all there is, with a dimension of 1 for each that comes after it.
fn only_mask<'a, I: Into<Option<&'a Var>> + Copy>(
    op: &'static str,
    x: &Var,
    indices: &[I],
) -> Result<Option<Var>> {
    let at = indices.iter().take_while(|index| (**index).into().is_none()).count();
    let rest = indices.get(at + 1..).unwrap_or_default();
    let mask = indices.get(at).and_then(|&index| index.into()).filter(|mask| mask.dtype() == DType::Bool);
    let Some(mask) = mask.filter(|_| rest.iter().all(|&index| index.into().is_none())) else {
        return Ok(None);
    };
    mask_dims(op, x, at, mask)?;
    let mut shape = Dims::from_slice(mask.shape());
    shape.resize(x.rank() - at, 1);
    Ok(Some(mask.reshape_to(&shape)?))
}

/// What indices pick of a tensor.
struct Picked {
    /// The tensor's dimensions, the indexed ones first.
    order: Dims,
    /// How many are indexed.
    indexed: usize,
    /// The number of places in the indexed dimensions.
    rows: usize,
    /// Before how many of the other dimensions those of the indices stand in the result.
    at: usize,
    /// The indices' common shape.
    shape: Dims,
    /// Their places in the indexed dimensions, seen as one: i64, flat.
    places: Var,
}

impl Picked {
    fn new<'a, I: Into<Option<&'a Var>> + Copy>(op: &'static str, x: &Var, indices: &[I]) -> Result<Picked> {
        let (mut blocks, mut dim) = (SmallVec::<[Block; 4]>::new(), 0);
        for &index in indices {
            let block = index.into().map(|index| Block::new(op, x, dim, index)).transpose()?;
            dim = block.as_ref().map_or(dim + 1, |block| block.dims.end);
            blocks.extend(block);
        }
        if dim > x.rank() {
            return Err(too_many(op, x, dim).into());
        }
        let Some(first) = blocks.first() else {
            return Err(Error::invalid(op, "got no index tensor, wanted at least one").into());
        };
        let neighbours = blocks.windows(2).all(|pair| pair[0].dims.end == pair[1].dims.start);
        let at = if neighbours { first.dims.start } else { 0 };
        let mut order: Dims = blocks.iter().flat_map(|block| block.dims.clone()).collect();
        let indexed = order.len();
        let others: Dims = (0..x.rank()).filter(|d| !order.contains(d)).collect();
        order.extend(others);
        let sizes: Dims = blocks.iter().map(|block| block.size).collect();
        let rows = product(op, &sizes)?;
        let shape = blocks
            .iter()
            .try_fold(Dims::new(), |shape, block| broadcast_shapes(op, &shape, block.index.shape()))?;
        let places = Var::new(places(op, &blocks, &shape, x.device())?);
        Ok(Picked { order, indexed, rows, at, shape, places })
    }

    /// The tensor as `[rows, the rest]`.
    fn as_rows(&self, x: &Var) -> Result<Var> {
        let rest: Dims = self.order[self.indexed..].iter().map(|&d| x.shape()[d]).collect();
        let shape = [self.rows, product("index", &rest)?];
        x.permute(&self.order)?.reshape_to(&shape)
    }

    /// The order of the result's dimensions, of those of the indices and then the rest.
    fn result_order(&self, rank: usize) -> Dims {
        let indices = self.shape.len();
        let rest = indices..rank;
        let (before, after) = (rest.clone().take(self.at), rest.skip(self.at));
        before.chain(0..indices).chain(after).collect()
    }

    fn read(&self, x: &Var) -> Result<Var> {
        let rest = self.order[self.indexed..].iter().map(|&d| x.shape()[d]);
        let shape: Dims = self.shape.iter().copied().chain(rest).collect();
        // Neighbours are read where they stand.
        if self.order[..self.indexed].iter().enumerate().all(|(i, &d)| d == self.at + i) {
            let (before, after) = (&x.shape()[..self.at], &x.shape()[self.at + self.indexed..]);
            let join =
                |middle: &[usize]| -> Dims { before.iter().chain(middle).chain(after).copied().collect() };
            let picked = x.reshape_to(&join(&[self.rows]))?.index_select(self.at, &self.places)?;
            return picked.reshape_to(&join(&self.shape));
        }
        let picked = self.as_rows(x)?.index_select(0, &self.places)?;
        picked.reshape_to(&shape)?.permute(&self.result_order(shape.len()))
    }

    fn write(&self, x: &Var, values: &Var, accumulate: bool) -> Result<Var> {
        let ordered: Dims = self.order.iter().map(|&d| x.shape()[d]).collect();
        let front: Dims = self.shape.iter().chain(&ordered[self.indexed..]).copied().collect();
        let order = self.result_order(front.len());
        let result: Dims = order.iter().map(|&d| front[d]).collect();
        let values = values.broadcast_to(&result)?.permute(&inverse(&order))?;
        let values =
            values.reshape_to(&[self.places.numel(), product("index_put", &ordered[self.indexed..])?])?;
        let rows = self.as_rows(x)?;
        let rows = match accumulate {
            true => rows.index_add(0, &self.places, &values, 1.0)?,
            false => replaced(&rows, &self.places, &values)?,
        };
        rows.reshape_to(&ordered)?.permute(&inverse(&self.order))
    }
}

fn inverse(order: &[usize]) -> Dims {
    let mut inverse = Dims::from_elem(0, order.len());
    order.iter().enumerate().for_each(|(i, &d)| inverse[d] = i);
    inverse
}

#[cfg(test)]
mod tests;
