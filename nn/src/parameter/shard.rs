//! [`Shard`]: which part of a whole tensor a parameter is.

use phalanx_tensor::{Dims, Tensor, Window};

use crate::Result;

/// A box of a whole tensor: `extent` elements from `window.offset` on.
///
/// The box may be given in a finer shape than the tensor's own, in which the cut is regular. The joint weight of queries, keys and
/// values, for example, is cut as `[3, out, in]`, of which a rank has `[3, out / ranks, in]`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shard {
    /// The whole tensor's shape, and the offset of the part in it.
    pub window: Window,
    /// The part's shape, with as many dimensions as the whole.
    pub extent: Dims,
}

impl Shard {
    /// The whole tensor as a part.
    pub fn whole(shape: &[usize]) -> Shard {
        Shard { window: Window::whole(shape), extent: Dims::from_slice(shape) }
    }

    /// Whether the part is the whole tensor.
    pub fn is_whole(&self) -> bool {
        self.extent == self.window.global
    }

    /// The shape of the whole tensor, which has `rank` dimensions. If the cut is given in a finer shape, its first sizes are multiplied.
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
