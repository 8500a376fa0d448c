//! Indexing as in NumPy: `tensor.i((.., 1..3, 2, ..=4))`.

use std::ops::{Range, RangeFrom, RangeFull, RangeInclusive, RangeTo, RangeToInclusive};

use smallvec::SmallVec;

use crate::{Error, Result, Tensor};

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

/// What is picked of one dimension.
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
    /// What is picked, one entry a dimension from the front.
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
