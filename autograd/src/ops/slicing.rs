//! Tensors cut into parts along a dimension, as views, and joined again.

use std::borrow::Borrow;

use phalanx_kernels as kernels;
use phalanx_tensor::{Dim, Dims, Error, Tensor};
use smallvec::SmallVec;

use super::frame::record_view;
use crate::{Backward, Cx, Grads, Result, SaveContext, Var, begins, grads1, record, record_many};

/// Views of a part: `narrow`, `slice`, `select`.
///
/// Derivative: zeros of the input's shape with `dy` where the part lies.
impl Var {
    /// Elements `start .. start + length` along `dim`, as a view.
    ///
    /// # Errors
    /// If the range is not inside the dimension.
    pub fn narrow(&self, dim: impl Dim, start: usize, length: usize) -> Result<Var> {
        let dim = dim.resolve(self.rank(), "narrow")?;
        subset("narrow", self, move |t| t.narrow(dim, start, length))
    }

    /// Python's `x[start:end:step]` along `dim`, as a view: negative bounds count from the end, and bounds beyond
    /// it are cut.
    ///
    /// # Errors
    /// If there is no such dimension or `step` is 0.
    pub fn slice(&self, dim: impl Dim, start: Option<isize>, end: Option<isize>, step: usize) -> Result<Var> {
        let dim = dim.resolve(self.rank(), "slice")?;
        let size = self.shape()[dim];
        let bound = |at: isize| match at {
            ..0 => size.saturating_sub(at.unsigned_abs()),
            _ => size.min(at.unsigned_abs()),
        };
        let (start, end) = (start.map_or(0, bound), end.map_or(size, bound));
        subset("slice", self, move |t| t.slice(dim, start, end.max(start), step))
    }

    /// The part at `index` along `dim`, which goes away; a view.
    ///
    /// # Errors
    /// If there is no such index.
    pub fn select(&self, dim: impl Dim, index: usize) -> Result<Var> {
        let dim = dim.resolve(self.rank(), "select")?;
        subset("select", self, move |t| t.select(dim, index))
    }
}

/// A view of a part of `x`.
pub(super) fn subset<F>(name: &'static str, x: &Var, view: F) -> Result<Var>
where
    F: Fn(&Tensor) -> phalanx_tensor::Result<Tensor> + Clone + Send + Sync + 'static,
{
    let from = Dims::from_slice(x.shape());
    record_view(name, x, view(x.tensor())?, move |dy| place(name, dy, &from, view.clone()))
}

/// The transposed map: zeros of a shape, with `x` in their view.
pub(super) fn place<F>(name: &'static str, x: &Var, shape: &[usize], view: F) -> Result<Var>
where
    F: Fn(&Tensor) -> phalanx_tensor::Result<Tensor> + Clone + Send + Sync + 'static,
{
    let whole = Tensor::zeros_for(name, shape, x.dtype(), x.device())?;
    let mut part = view(&whole)?;
    if part.shape() != x.shape() {
        return Err(Error::shape(name, format!("{:?}", x.shape()), format!("{:?}", part.shape())).into());
    }
    kernels::copy_(&mut part, x.tensor())?;
    record_view(name, x, whole, move |dy| subset(name, dy, view.clone()))
}

// A tensor cut into pieces along a dimension, as views.
//
// Derivative: the pieces' gradients joined, zeros for a piece that has none; a view where they lie side by side already,
// as attention's do. One node for all pieces, so that no piece's gradient is ever as large as the input.

/// An empty dimension limits the number of its pieces by nothing else.
const EMPTY_PIECES_MAX: usize = 1 << 20;

impl Var {
    /// Pieces of `size` along `dim`, the last one perhaps smaller.
    ///
    /// # Errors
    /// If there is no such dimension or `size` is 0.
    pub fn split(&self, size: usize, dim: impl Dim) -> Result<SmallVec<[Var; 4]>> {
        let dim = dim.resolve(self.rank(), "split")?;
        let total = self.shape()[dim];
        if size == 0 && total > 0 {
            return Err(Error::range("split", "a piece size of 0", "at least 1").into());
        }
        let pieces = if total == 0 { 1 } else { total.div_ceil(size) };
        let sizes: Dims = (0..pieces).map(|i| size.min(total - i * size)).collect();
        self.split_sizes(&sizes, dim)
    }

    /// Pieces of the given sizes along `dim`.
    ///
    /// # Errors
    /// If there is no such dimension, or the sizes do not add up to its size.
    pub fn split_sizes(&self, sizes: &[usize], dim: impl Dim) -> Result<SmallVec<[Var; 4]>> {
        let dim = dim.resolve(self.rank(), "split_sizes")?;
        let sum = sizes.iter().try_fold(0_usize, |sum, &size| sum.checked_add(size));
        if sum != Some(self.shape()[dim]) {
            let wanted = format!("{}, the size of dimension {dim}, as their sum", self.shape()[dim]);
            return Err(Error::shape("split_sizes", format!("sizes {sizes:?}"), wanted).into());
        }
        let mut start = 0;
        let piece = |&size: &usize| {
            start += size;
            self.tensor().narrow(dim, start - size, size)
        };
        let pieces = sizes.iter().map(piece).collect::<phalanx_tensor::Result<SmallVec<[Tensor; 4]>>>()?;
        let (from, sizes) = (Dims::from_slice(self.shape()), Dims::from_slice(sizes));
        record_many("split", &[self], pieces, |_: &SaveContext<'_>| Ok(Split { from, sizes, dim }))
    }

    /// At most `chunks` pieces of one size along `dim`, the last one perhaps smaller.
    ///
    /// # Errors
    /// If there is no such dimension, `chunks` is 0, or an empty dimension is to make millions of pieces.
    pub fn chunk(&self, chunks: usize, dim: impl Dim) -> Result<SmallVec<[Var; 4]>> {
        let dim = dim.resolve(self.rank(), "chunk")?;
        if chunks == 0 {
            return Err(Error::range("chunk", "0 chunks", "at least 1").into());
        }
        match self.shape()[dim] {
            0 if chunks > EMPTY_PIECES_MAX => {
                let wanted = format!("at most {EMPTY_PIECES_MAX} of an empty dimension");
                Err(Error::range("chunk", format!("{chunks} chunks"), wanted).into())
            }
            0 => self.split_sizes(&Dims::from_elem(0, chunks), dim),
            size => self.split(size.div_ceil(chunks), dim),
        }
    }
}

impl Var {
    /// The parts at each index along `dim`, which goes away.
    ///
    /// # Errors
    /// If there is no such dimension.
    pub fn unbind(&self, dim: impl Dim) -> Result<Vec<Var>> {
        let dim = dim.resolve(self.rank(), "unbind")?;
        let ones = Dims::from_elem(1, self.shape()[dim]);
        self.split_sizes(&ones, dim)?.iter().map(|part| part.squeeze(&[dim])).collect()
    }
}

struct Split {
    from: Dims,
    sizes: Dims,
    dim: usize,
}

impl Backward for Split {
    fn backward(&self, cx: &Cx<'_>) -> Result<Grads> {
        if let Some(whole) = self.joined(cx)? {
            return grads1(Var::new(whole));
        }
        let some = (0..self.sizes.len()).find_map(|i| cx.dy_at(i));
        let some = some.unwrap_or_else(|| unreachable!("a node runs once one of its outputs has a gradient"));
        let piece = |(i, &size): (usize, &usize)| -> Result<Var> {
            if let Some(dy) = cx.dy_at(i) {
                return Ok(dy.clone());
            }
            let mut shape = self.from.clone();
            shape[self.dim] = size;
            Ok(Var::new(Tensor::zeros(&shape, some.dtype(), some.device())?))
        };
        let pieces = self.sizes.iter().enumerate().map(piece).collect::<Result<SmallVec<[Var; 4]>>>()?;
        grads1(Var::cat(&pieces, self.dim)?)
    }

    fn is_view(&self) -> bool {
        true
    }
}

impl Split {
    /// The pieces' gradients as one view, unless it is to be differentiated.
    fn joined(&self, cx: &Cx<'_>) -> Result<Option<Tensor>> {
        let dys: Option<SmallVec<[&Tensor; 4]>> =
            (0..self.sizes.len()).map(|i| Some(cx.dy_at(i)?.tensor())).collect();
        match dys.filter(|_| !cx.create_graph()) {
            Some(dys) => Ok(Tensor::joined(&dys, self.dim)?),
            None => Ok(None),
        }
    }
}

/// Tensors joined along a dimension, an existing one (`cat`) or a new one (`stack`).
///
/// Derivative: each tensor's part of `dy`, a view.
impl Var {
    /// The tensors one after another along `dim`; their other sizes must agree.
    ///
    /// # Errors
    /// If there is none, or ranks, other sizes, dtypes or devices differ.
    pub fn cat<V: Borrow<Var>>(vars: &[V], dim: impl Dim) -> Result<Var> {
        begins();
        let vars: SmallVec<[&Var; 4]> = vars.iter().map(Borrow::borrow).collect();
        let tensors: SmallVec<[&Tensor; 4]> = vars.iter().map(|v| v.tensor()).collect();
        let Some(first) = vars.first() else {
            return Err(Error::invalid("cat", "got no tensors, wanted at least one").into());
        };
        let dim = dim.resolve(first.rank(), "cat")?;
        let y = kernels::cat(&tensors, dim)?;
        record("cat", &vars, y, |_: &SaveContext<'_>| {
            Ok(Cat { dim, sizes: vars.iter().map(|v| v.shape()[dim]).collect() })
        })
    }

    /// The tensors, all of one shape, along a new dimension put in before `dim`.
    ///
    /// # Errors
    /// If there is none, or shapes, dtypes or devices differ.
    pub fn stack<V: Borrow<Var>>(vars: &[V], dim: impl Dim) -> Result<Var> {
        let Some(first) = vars.first().map(Borrow::borrow) else {
            return Err(Error::invalid("stack", "got no tensors, wanted at least one").into());
        };
        let dim = dim.resolve(first.rank() + 1, "stack")?;
        if let Some(odd) = vars.iter().map(Borrow::borrow).find(|v| v.shape() != first.shape()) {
            let got = format!("tensors of shapes {:?} and {:?}", first.shape(), odd.shape());
            return Err(Error::shape("stack", got, "one shape").into());
        }
        let rows = vars.iter().map(|v| v.borrow().unsqueeze(dim)).collect::<Result<SmallVec<[Var; 4]>>>()?;
        Var::cat(&rows, dim)
    }
}

struct Cat {
    dim: usize,
    sizes: Dims,
}

impl Backward for Cat {
    fn backward(&self, cx: &Cx<'_>) -> Result<Grads> {
        let mut start = 0;
        let grad = |(i, &size): (usize, &usize)| {
            start += size;
            cx.needs(i).then(|| cx.dy().narrow(self.dim, start - size, size)).transpose()
        };
        self.sizes.iter().enumerate().map(grad).collect()
    }
}

#[cfg(test)]
mod tests {
    use phalanx_tensor::{DType, Device, Tensor};

    use crate::Var;
    use crate::ops::Attention;
    use crate::ops::testing::check_twice;

    #[test]
    fn parts_have_their_derivatives() {
        check_twice(&[&[4, 3]], |v| {
            let y = v[0].narrow(0, 1, 2)?;
            y.mul(&y)
        });
        check_twice(&[&[7, 2]], |v| {
            let y = v[0].slice(0, Some(-6), Some(100), 2)?;
            y.mul(&y)
        });
        check_twice(&[&[2, 3]], |v| {
            let y = v[0].select(-1, 2)?;
            y.mul(&y)
        });
    }

    #[test]
    fn sizes_without_a_sum_and_endless_pieces_are_refused() {
        let x = Var::arange(0, 2, 1, DType::F32, Device::CPU).unwrap();
        let refused = x.split_sizes(&[usize::MAX, 3], 0).err().unwrap().to_string();
        assert!(refused.contains("got sizes [18446744073709551615, 3]"), "{refused}");
        assert_eq!(x.chunk(usize::MAX, 0).unwrap().len(), 2);
        let none = x.narrow(0, 0, 0).unwrap();
        assert_eq!(none.chunk(3, 0).unwrap().len(), 3);
        for chunks in [1 << 50, usize::MAX] {
            assert!(none.chunk(chunks, 0).unwrap_err().to_string().contains("chunk"));
        }
    }

    #[test]
    fn gradients_that_lie_side_by_side_are_not_copied() {
        let values: Vec<f64> = (0..2 * 5 * 24).map(|i| (f64::from(i) * 0.7).sin()).collect();
        let leaf = Var::leaf(Tensor::from_slice(&values, &[2, 5, 24], Device::CPU).unwrap()).unwrap();
        let grads = |copied: bool| {
            let x = leaf.mul_scalar(2.0).unwrap();
            let pieces = x.split(8, 2).unwrap();
            let heads = |piece: &Var| {
                let piece = if copied { piece.mul_scalar(1.0)? } else { piece.clone() };
                piece.reshape_to(&[2, 5, 2, 4])?.transpose(1, 2)
            };
            let [q, k, v] = [0, 1, 2].map(|i| heads(&pieces[i]).unwrap());
            let y = q.scaled_dot_product_attention(&k, &v, None, &Attention::default()).unwrap();
            let all = [&x, &pieces[0], &pieces[1], &pieces[2]];
            all.iter().for_each(|var| var.retain_grad());
            y.mul(&y).unwrap().sum_all().unwrap().backward().unwrap();
            all.map(|var| var.grad().unwrap())
        };
        let [joined, copied] = [false, true].map(grads);
        assert!(joined[1..].iter().all(|piece| piece.tensor().shares_storage(joined[0].tensor())));
        assert!(!copied[1].tensor().shares_storage(copied[0].tensor()));
        for (a, b) in joined.iter().zip(&copied) {
            assert_eq!(a.tensor().to_vec::<f64>().unwrap(), b.tensor().to_vec::<f64>().unwrap());
        }
    }

    #[test]
    fn pieces_have_their_derivatives() {
        check_twice(&[&[2, 3, 2]], |v| v[0].tanh()?.unbind(-2));
        check_twice(&[&[5, 2]], |v| {
            let pieces = v[0].split(2, 0)?;
            // One piece stays unused.
            pieces[0].mul(&pieces[1])
        });
        check_twice(&[&[2, 6]], |v| {
            let pieces = v[0].split_sizes(&[1, 3, 2], -1)?;
            pieces[0].mul(&pieces[1])?.sum_all()?.mul(&pieces[2])
        });
        // The pieces' gradients are parts of one tensor.
        check_twice(&[&[2, 6]], |v| {
            let y = Var::cat(&v[0].split_sizes(&[1, 3, 2], -1)?, -1)?;
            y.mul(&y)?.mul(&y)
        });
    }

    #[test]
    fn joins_have_their_derivatives() {
        check_twice(&[&[2, 2], &[2, 3]], |v| {
            let y = Var::cat(v, 1)?;
            y.mul(&y)
        });
        check_twice(&[&[2, 2], &[2, 2]], |v| {
            let y = Var::stack(v, -1)?;
            y.mul(&y)
        });
    }
}
