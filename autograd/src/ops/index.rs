//! Elements by index tensors and masks, NumPy's advanced indexing: `index` reads them and `index_put` replaces them.
//!
//! The indices of all dimensions become one place in the indexed dimensions, so that reading is one `index_select` of rows,
//! with `index_add` as its derivative. Of `index_put` with `accumulate` it is the other way round; without, what is written
//! last stays: `dx = dy` where nothing was written, `dvalues = dy` there, and 0 for values that were written over.

use std::ops::Range;

use phalanx_kernels as kernels;
use phalanx_tensor::{DType, Device, Dims, Error, Tensor, broadcast_shapes};
use smallvec::SmallVec;

use super::counting::positions;
use super::frame::{named, product};
use crate::{Backward, Cx, Grads, Result, SaveContext, Var, begins, grads2, record};

impl Var {
    /// `self[indices[0], indices[1], ..]` as in PyTorch and NumPy: an index is an i64 or i32 tensor for one dimension,
    /// counting from the end where negative, or a bool mask for as many dimensions as it has. They broadcast with each
    /// other, a mask as the list of its places. `None` leaves a dimension as it is, and so do those after the last. The
    /// dimensions of the indices stand where the indexed ones were, or in front if those are not neighbours.
    ///
    /// A mask decides the size of the result: there the host waits for the device.
    ///
    /// # Errors
    /// If there are more indices than dimensions, or none; an index is out of range, no integer, or on another device;
    /// a mask has not the sizes of its dimensions; the indices do not broadcast. A mask on a `meta` device.
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
    /// `accumulate` they are added, repeats too. Without, the last value (in row-major order) for a place is the one
    /// that stays, on every device.
    ///
    /// # Errors
    /// As [`Var::index`]; if the values do not broadcast, or have another dtype or device. A mask on a `meta` device,
    /// unless there is one value for all.
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

// Index tensors and masks as places in the dimensions that they index, seen as one.

/// The dimensions that a mask for dimension `at` and after indexes, whose sizes it has.
fn mask_dims(op: &'static str, x: &Var, at: usize, mask: &Var) -> Result<Range<usize>> {
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
struct Block {
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

fn too_many(op: &'static str, x: &Var, count: usize) -> Error {
    let wanted = format!("at most {}, for shape {:?}", x.rank(), x.shape());
    Error::range(op, format!("an index for {count} dimensions"), wanted)
}

/// The places that the blocks' indices, broadcast to `shape`, name in all their dimensions.
fn places(op: &'static str, blocks: &[Block], shape: &[usize], device: Device) -> Result<Tensor> {
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

// Rows replaced by others, the last of several for a row.
//
// Saves the places, which rows are replaced, and which values are written over.

/// `x` `[rows, width]` with `values` `[count, width]` in the rows that `places` name; the last of several stays.
fn replaced(x: &Var, places: &Var, values: &Var) -> Result<Var> {
    begins();
    if values.numel() == 0 {
        return Ok(x.clone());
    }
    let rows = x.shape()[0];
    // The position that each row's value comes from, plus 1; 0 for a row that stays.
    let owners = owners(places.tensor(), rows)?;
    let taken = kernels::gt_scalar(&owners, 0.into())?;
    let from = kernels::sub_scalar(&kernels::clamp(&owners, Some(1.into()), None)?, 1.into())?;
    let column = |t: &Tensor| t.with_shape(&[t.numel(), 1]);
    let taken = column(&taken)?;
    let new = kernels::index_select(values.tensor(), 0, &from)?;
    let y = kernels::where_(&taken, &new, x.tensor())?;
    record("index_put", &[x, values], y, |s: &SaveContext<'_>| {
        let lost = match s.needs(1) {
            false => None,
            true => {
                let count = places.numel() as i64;
                let own = kernels::arange(1, count + 1, 1, DType::I64, x.device())?;
                let winner = kernels::index_select(&owners, 0, places.tensor())?;
                Some(column(&kernels::ne(&winner, &own)?)?)
            }
        };
        Ok(Replaced { places: places.clone(), taken: Var::new(taken), lost: lost.map(Var::new) })
    })
}

/// For each row one plus the last position that names it, or 0.
fn owners(places: &Tensor, rows: usize) -> Result<Tensor> {
    let (count, device) = (places.numel(), places.device());
    if !device.is_cuda() && !device.is_meta() {
        let mut owners = vec![0_i64; rows];
        for (position, &row) in (1..).zip(&places.to_vec::<i64>()?) {
            if let Some(owner) = usize::try_from(row).ok().and_then(|row| owners.get_mut(row)) {
                *owner = position;
            }
        }
        return Ok(Tensor::from_slice(&owners, &[rows], device)?);
    }
    let (sorted, order) = kernels::sort(places, 0, false)?;
    let last = kernels::full(&[1], true, DType::Bool, device)?;
    let ends = kernels::ne(&sorted.narrow(0, 1, count - 1)?, &sorted.narrow(0, 0, count - 1)?)?;
    let ends = kernels::cast(&kernels::cat(&[&ends, &last], 0)?, DType::I64)?;
    let positions = kernels::mul(&kernels::add_scalar(&order, 1.into())?, &ends)?;
    let none = Tensor::zeros(&[rows], DType::I64, device)?;
    Ok(kernels::index_add(&none, 0, &sorted, &positions, 1.0)?)
}

struct Replaced {
    places: Var,
    /// `[rows, 1]`: whether a row is replaced.
    taken: Var,
    /// `[count, 1]`: whether a value is written over by a later one.
    lost: Option<Var>,
}

impl Backward for Replaced {
    fn backward(&self, cx: &Cx<'_>) -> Result<Grads> {
        let dx = || cx.dy().masked_fill(&self.taken, 0.0);
        let dvalues = |lost: &Var| cx.dy().index_select(0, &self.places)?.masked_fill(lost, 0.0);
        let lost = self.lost.as_ref().filter(|_| cx.needs(1));
        grads2(cx.needs(0).then(dx).transpose()?, lost.map(dvalues).transpose()?)
    }
}

#[cfg(test)]
mod tests {
    // NumPy's indexing, worked out by hand; derivatives; refusals.

    use phalanx_tensor::{DType, Device};

    use crate::Var;
    use crate::ops::testing::check_twice;

    fn ints(values: &[i64], shape: &[usize]) -> Var {
        Var::from_slice(values, shape, Device::CPU).unwrap()
    }

    fn counting(shape: &[usize]) -> Var {
        let all = Var::arange(0, shape.iter().product::<usize>() as i64, 1, DType::I64, Device::CPU).unwrap();
        all.reshape_to(shape).unwrap()
    }

    #[test]
    fn places_are_numpys() {
        let x = counting(&[2, 3, 4]);
        let vec = |y: Var| (y.shape().to_vec(), y.to_vec::<i64>().unwrap());
        let (a, b) = (ints(&[1, -2], &[2, 1]), ints(&[0, -1], &[2]));
        assert_eq!(vec(x.index(&[&a]).unwrap()).0, [2, 1, 3, 4]);
        assert_eq!(
            vec(x.index(&[None, None, Some(&b)]).unwrap().narrow(1, 2, 1).unwrap()).1,
            [8, 11, 20, 23]
        );
        let neighbours = x.index(&[None, Some(&a), Some(&b)]).unwrap();
        assert_eq!(vec(neighbours), (vec![2, 2, 2], vec![4, 7, 4, 7, 16, 19, 16, 19]));
        let apart = x.index(&[Some(&a), None, Some(&b)]).unwrap();
        assert_eq!(vec(apart), (vec![2, 2, 3], vec![12, 16, 20, 15, 19, 23, 0, 4, 8, 3, 7, 11]));
        let mask = x.select(0, 0).unwrap().gt_scalar(8).unwrap();
        assert_eq!(vec(x.index(&[None, Some(&mask)]).unwrap()), (vec![2, 3], vec![9, 10, 11, 21, 22, 23]));
    }

    #[test]
    fn the_last_value_for_a_place_stays_and_repeats_add_up() {
        let x = counting(&[3, 2]);
        let rows = ints(&[2, 0, 2], &[3]);
        let values = ints(&[10, 11, 20, 21, 30, 31], &[3, 2]);
        let put = |accumulate| x.index_put(&[&rows], &values, accumulate).unwrap().to_vec::<i64>().unwrap();
        assert_eq!(put(false), [20, 21, 2, 3, 30, 31]);
        assert_eq!(put(true), [20, 22, 2, 3, 44, 47]);
        let column = ints(&[-1], &[1]);
        let one = x.index_put(&[None, Some(&column)], &ints(&[7, 8, 9], &[3, 1]), false).unwrap();
        assert_eq!(one.to_vec::<i64>().unwrap(), [0, 7, 2, 8, 4, 9]);
        let mask = x.gt_scalar(3).unwrap();
        let filled = x.index_put(&[&mask], &ints(&[-1], &[1]), true).unwrap();
        assert_eq!(filled.to_vec::<i64>().unwrap(), [0, 1, 2, 3, 3, 4]);
        let flags = mask.index_put(&[&rows], &mask.narrow(0, 0, 1).unwrap(), true).unwrap();
        assert_eq!(flags.to_vec::<bool>().unwrap(), mask.to_vec::<bool>().unwrap());
    }

    #[test]
    fn reading_and_writing_have_their_derivatives() {
        let (a, b) = (ints(&[1, -2, 1], &[3, 1]), ints(&[0, -1], &[2]));
        check_twice(&[&[2, 3, 4]], |v| v[0].tanh()?.index(&[Some(&a), None, Some(&b)]));
        check_twice(&[&[2, 3, 4]], |v| v[0].tanh()?.index(&[None, Some(&a)]));
        for accumulate in [false, true] {
            check_twice(&[&[2, 3, 4], &[3, 2, 1]], |v| {
                v[0].tanh()?.index_put(&[Some(&a), None, Some(&b)], &v[1].tanh()?, accumulate)
            });
            let mask = ints(&[1, 0, 1, 1], &[4]).to(DType::Bool).unwrap();
            check_twice(&[&[2, 4], &[2, 3]], |v| {
                v[0].tanh()?.index_put(&[None, Some(&mask)], &v[1].tanh()?, accumulate)
            });
            check_twice(&[&[2, 4], &[1]], |v| {
                v[0].tanh()?.index_put(&[None, Some(&mask)], &v[1].tanh()?, accumulate)
            });
        }
    }

    #[test]
    fn wrong_indices_are_errors_that_name_the_index_and_the_size() {
        let x = counting(&[2, 3]);
        let says = |error: crate::Error, what: &str| assert!(error.to_string().contains(what), "{error}");
        for bad in [3, -4, i64::MIN, i64::MAX] {
            let index = ints(&[0, bad], &[2]);
            says(x.index(&[None, Some(&index)]).unwrap_err(), &format!("index: index {bad} (item 1)"));
            let error = x.index_put(&[None, Some(&index)], &x.narrow(1, 0, 2).unwrap(), false).unwrap_err();
            says(error, "dimension 1 of size 3");
        }
        let one = ints(&[0], &[1]);
        says(x.index(&[&one, &one, &one]).unwrap_err(), "3 dimensions");
        says(x.index(&[&x.gt_scalar(1).unwrap(), &one]).unwrap_err(), "3 dimensions");
        says(x.index(&[&one.to(DType::F32).unwrap()]).unwrap_err(), "i64 or i32");
        says(x.index(&[&one.gt_scalar(0).unwrap()]).unwrap_err(), "mask of shape [1]");
        says(x.index::<Option<&Var>>(&[None]).unwrap_err(), "no index tensor");
        says(x.index(&[&ints(&[0, 1], &[2]), &ints(&[0, 1, 0], &[3])]).unwrap_err(), "index");
        says(x.index_put(&[&one], &one.to(DType::F32).unwrap(), false).unwrap_err(), "values");
        says(x.index_put(&[&one], &ints(&[0, 1], &[2]), false).unwrap_err(), "index_put");
    }
}
