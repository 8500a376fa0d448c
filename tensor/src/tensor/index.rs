//! Arguments that name dimensions, shapes and elements. Negative dimensions count from the end, -1 in a shape is inferred, and indices are
//! as in NumPy: `tensor.i((.., 1..3, 2, ..=4))`.

use std::ops::{Range, RangeFrom, RangeFull, RangeInclusive, RangeTo, RangeToInclusive};

use smallvec::SmallVec;

use crate::{Dims, Error, Result, Tensor};

/// Names a dimension: an index from the front, or a negative one from the back (-1 is the last).
pub trait Dim: Copy {
    /// The index from the front.
    ///
    /// # Errors
    /// [`Error::Range`] naming `op` if a tensor of `rank` dimensions has none such.
    fn resolve(self, rank: usize, op: &'static str) -> Result<usize>;
}

impl Dim for isize {
    fn resolve(self, rank: usize, op: &'static str) -> Result<usize> {
        let dim = if self < 0 { self + rank as isize } else { self };
        if dim < 0 || dim >= rank as isize {
            let wanted = match rank {
                0 => "none: the tensor has no dimensions".into(),
                _ => format!("-{rank} to {} for a tensor of {rank} dimensions", rank - 1),
            };
            return Err(Error::range(op, format!("dimension {self}"), wanted));
        }
        Ok(dim as usize)
    }
}

impl Dim for usize {
    fn resolve(self, rank: usize, op: &'static str) -> Result<usize> {
        isize::try_from(self).unwrap_or(isize::MAX).resolve(rank, op)
    }
}

impl Dim for i32 {
    fn resolve(self, rank: usize, op: &'static str) -> Result<usize> {
        (self as isize).resolve(rank, op)
    }
}

impl Dim for i64 {
    fn resolve(self, rank: usize, op: &'static str) -> Result<usize> {
        (self as isize).resolve(rank, op)
    }
}

/// The dimensions as indices from the front, in the order given.
///
/// # Errors
/// [`Error::Range`] for one that does not exist, [`Error::Invalid`] for one named twice.
pub fn resolve_dims<D: Dim>(op: &'static str, dims: &[D], rank: usize) -> Result<Dims> {
    let mut out = Dims::new();
    for dim in dims {
        let dim = dim.resolve(rank, op)?;
        if out.contains(&dim) {
            return Err(Error::invalid(op, format!("dimension {dim} is named twice")));
        }
        out.push(dim);
    }
    Ok(out)
}

/// `wanted` with its -1, if any, inferred from the number of elements of `from`.
///
/// # Errors
/// [`Error::Shape`] if the number of elements cannot agree.
pub fn resolve_shape(op: &'static str, from: &[usize], wanted: &[isize]) -> Result<Dims> {
    let wrong = || {
        let got = format!("{from:?} with {} elements", from.iter().product::<usize>());
        Error::shape(op, got, format!("as many elements as {wanted:?}, in which one size may be -1"))
    };
    let numel: usize = from.iter().product();
    let known = wanted
        .iter()
        .filter(|&&n| n != -1)
        .try_fold(1usize, |product, &n| usize::try_from(n).ok().and_then(|n| product.checked_mul(n)));
    let known = known.ok_or_else(wrong)?;
    let inferred = match wanted.iter().filter(|&&n| n == -1).count() {
        0 if known == numel => 0,
        1 if known > 0 && numel.is_multiple_of(known) => numel / known,
        _ => return Err(wrong()),
    };
    Ok(wanted.iter().map(|&n| if n == -1 { inferred } else { n as usize }).collect())
}

impl Tensor {
    /// A view of the elements that `index` picks. It is one of the following, or a tuple of up to five of them, one
    /// for each dimension from the front: an index, which takes the dimension away; a range, which keeps it;
    /// `..`, which keeps it whole, as do the dimensions after the last.
    ///
    /// # Errors
    /// [`Error::Range`] if an index or a range lies outside its dimension, or there are more than dimensions.
    ///
    /// ```
    /// # use phalanx_tensor::{Device, Tensor};
    /// let x = Tensor::from_slice(&[0, 1, 2, 3, 4, 5], &[2, 3], Device::CPU)?;
    /// assert_eq!(x.i((.., 1))?.to_vec::<i32>()?, [1, 4]);
    /// assert_eq!(x.i((1, ..=1))?.to_vec::<i32>()?, [3, 4]);
    /// assert_eq!(x.i(1)?.shape(), [3]);
    /// # Ok::<(), phalanx_tensor::Error>(())
    /// ```
    pub fn i(&self, index: impl Index) -> Result<Tensor> {
        let picks = index.picks();
        if picks.len() > self.rank() {
            let wanted = format!("at most {}, for shape {:?}", self.rank(), self.shape());
            return Err(Error::range("i", format!("an index of {} dimensions", picks.len()), wanted));
        }
        let (mut out, mut dim) = (self.clone(), 0);
        for pick in picks {
            match pick {
                Pick::At(index) => out = out.select(dim, index)?,
                Pick::Span { start, end } => {
                    let end = end.unwrap_or(out.shape()[dim]);
                    let length = end.checked_sub(start).ok_or_else(|| {
                        Error::range("i", format!("{start}..{end}"), "a start up to the end")
                    })?;
                    out = out.narrow(dim, start, length)?;
                    dim += 1;
                }
            }
        }
        Ok(out)
    }
}

/// The elements picked along one dimension.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pick {
    /// One index; the dimension goes away.
    At(usize),
    /// A range; the dimension stays.
    Span {
        /// The first index.
        start: usize,
        /// One past the last index, the dimension's size if `None`.
        end: Option<usize>,
    },
}

/// An argument of [`Tensor::i`].
pub trait Index {
    /// One entry for each dimension from the front.
    fn picks(self) -> SmallVec<[Pick; 5]>;
}

impl<T: Into<Pick>> Index for T {
    fn picks(self) -> SmallVec<[Pick; 5]> {
        smallvec::smallvec![self.into()]
    }
}

macro_rules! tuples {
    ($($name:ident)*) => {
        impl<$($name: Into<Pick>),*> Index for ($($name,)*) {
            #[allow(non_snake_case)]
            fn picks(self) -> SmallVec<[Pick; 5]> {
                let ($($name,)*) = self;
                smallvec::smallvec![$($name.into()),*]
            }
        }
    };
}

tuples!(A);
tuples!(A B);
tuples!(A B C);
tuples!(A B C D);
tuples!(A B C D E);

macro_rules! picks {
    ($($type:ty: $range:ident => $start:expr, $end:expr;)*) => {$(
        impl From<$type> for Pick {
            fn from($range: $type) -> Pick {
                Pick::Span { start: $start, end: $end }
            }
        }
    )*};
}

// The end of an inclusive range saturates: no dimension is that large, so the error stays an error.
picks! {
    Range<usize>: r => r.start, Some(r.end);
    RangeFrom<usize>: r => r.start, None;
    RangeTo<usize>: r => 0, Some(r.end);
    RangeInclusive<usize>: r => *r.start(), Some(r.end().saturating_add(1));
    RangeToInclusive<usize>: r => 0, Some(r.end.saturating_add(1));
    RangeFull: _r => 0, None;
}

impl From<usize> for Pick {
    fn from(index: usize) -> Pick {
        Pick::At(index)
    }
}
