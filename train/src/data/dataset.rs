//! [`Dataset`]: numbered items that are tensors.

use std::sync::Arc;

use phalanx_tensor::Tensor;

use super::stack::stack;
use super::{Concat, Map, Subset, wrong};
use crate::Result;

/// Numbered items, each of which is some tensors. Several threads read items at the same time.
pub trait Dataset: Send + Sync {
    /// How many items there are.
    fn len(&self) -> usize;

    /// Whether there are none.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The item's tensors, without a batch dimension, on a CPU device (best on [`HOST`](super::HOST), which no model uses).
    ///
    /// `draw` is the number of the epoch. An augmentation makes its random numbers from the seed, `index` and `draw`, so that it is
    /// the same under any number of workers and after a resume.
    ///
    /// # Errors
    /// If there is no such item, or it cannot be read.
    fn item(&self, index: usize, draw: u64) -> Result<Vec<Tensor>>;

    /// Makes a batch of items: by default [`stack`], which adds a first dimension. Replace it to pad items of unequal lengths.
    ///
    /// # Errors
    /// If the items do not fit each other.
    fn collate(&self, items: Vec<Vec<Tensor>>) -> Result<Vec<Tensor>> {
        stack(items)
    }

    /// The items at these indices, in this order.
    ///
    /// # Errors
    /// If there is no such item.
    fn subset(self, indices: Vec<usize>) -> Result<Subset<Self>>
    where
        Self: Sized,
    {
        Subset::new(self, indices)
    }

    /// Two disjoint parts that are all items together, drawn by the seed. The first has `share` of them, rounded.
    ///
    /// # Errors
    /// If the share is not a number from 0 to 1.
    fn split(self, share: f64, seed: u64) -> Result<[Subset<Arc<Self>>; 2]>
    where
        Self: Sized,
    {
        Subset::parts(Arc::new(self), share, seed)
    }

    /// The same items after `change`, which is given an item's tensors, its index and the number of the draw (see [`Dataset::item`]).
    fn map<F>(self, change: F) -> Map<Self, F>
    where
        Self: Sized,
        F: Fn(Vec<Tensor>, usize, u64) -> Result<Vec<Tensor>> + Send + Sync,
    {
        Map::new(self, change)
    }

    /// These items, and then those of another.
    fn concat(self, other: impl Dataset + 'static) -> Concat
    where
        Self: Sized + 'static,
    {
        Concat::new(vec![Arc::new(self), Arc::new(other)])
    }
}

macro_rules! forward {
    ($($pointer:ident),*) => {$(
        impl<D: Dataset + ?Sized> Dataset for $pointer<D> {
            fn len(&self) -> usize {
                (**self).len()
            }

            fn item(&self, index: usize, draw: u64) -> Result<Vec<Tensor>> {
                (**self).item(index, draw)
            }

            fn collate(&self, items: Vec<Vec<Tensor>>) -> Result<Vec<Tensor>> {
                (**self).collate(items)
            }
        }
    )*};
}

forward!(Arc, Box);

/// Refuses an item that is not there.
pub(super) fn in_range(what: &str, index: usize, len: usize) -> Result<()> {
    match index < len {
        true => Ok(()),
        false => Err(wrong(what, format!("got item {index}, wanted one of {len} items"))),
    }
}
