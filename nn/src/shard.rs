//! [`Shard`]: the part of a whole tensor that a parameter is.

use phalanx_tensor::{Dims, Tensor, Window};

use crate::Result;

/// The part of a whole tensor that a parameter is: `extent` elements from `window.offset` on.
///
/// The whole may be seen in a finer shape than the tensor's own, where that is what the cut is regular in: the joint
/// map of queries, keys and values as `[3, out, in]`, of which a rank has `[3, out / ranks, in]`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shard {
    /// The whole's shape, and where the part begins in it.
    pub window: Window,
    /// The part's shape, with as many dimensions.
    pub extent: Dims,
}

impl Shard {
    /// The part that is the whole.
    pub fn whole(shape: &[usize]) -> Shard {
        Shard { window: Window::whole(shape), extent: Dims::from_slice(shape) }
    }

    /// Whether it is the whole.
    pub fn is_whole(&self) -> bool {
        self.extent == self.window.global
    }

    /// The shape of the whole tensor, which has `rank` dimensions: where the cut sees a finer one, the first sizes are one.
    pub fn whole_shape(&self, rank: usize) -> Vec<usize> {
        let seen = &self.window.global;
        let (first, rest) = seen.split_at((seen.len() + 1).saturating_sub(rank.max(1)));
        if first.is_empty() { seen.to_vec() } else { [&[first.iter().product()], rest].concat() }
    }

    /// This part of a whole tensor, as a view.
    ///
    /// # Errors
    /// If the tensor is not the whole.
    pub fn of(&self, whole: &Tensor) -> Result<Tensor> {
        let mut cuts = self.window.offset.iter().zip(&self.extent).enumerate();
        let seen = whole.with_shape(&self.window.global)?;
        Ok(cuts.try_fold(seen, |part, (dim, (&offset, &length))| part.narrow(dim, offset, length))?)
    }
}
