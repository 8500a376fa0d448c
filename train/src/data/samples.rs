//! [`Samples`]: an endless sequence that is read in any order, and data sets as such.

use std::sync::Arc;

use phalanx_tensor::Tensor;

use super::stack::stack;
use super::{Dataset, Permutation, wrong};
use crate::Result;

/// An endless sequence of samples. A sample is a function of its number, so any thread, rank or resumed run reads any of them by itself.
pub trait Samples: Send + Sync {
    /// The tensors of sample `number`, counted over all epochs, without a batch dimension, on a CPU device.
    ///
    /// # Errors
    /// If it cannot be read.
    fn sample(&self, number: u64) -> Result<Vec<Tensor>>;

    /// What errors call the sample.
    fn name(&self, number: u64) -> String {
        format!("sample {number}")
    }

    /// Makes a batch of samples; see [`Dataset::collate`].
    ///
    /// # Errors
    /// If the samples do not fit each other.
    fn collate(&self, items: Vec<Vec<Tensor>>) -> Result<Vec<Tensor>> {
        stack(items)
    }
}

macro_rules! forward {
    ($($pointer:ident),*) => {$(
        impl<S: Samples + ?Sized> Samples for $pointer<S> {
            fn sample(&self, number: u64) -> Result<Vec<Tensor>> {
                (**self).sample(number)
            }

            fn name(&self, number: u64) -> String {
                (**self).name(number)
            }

            fn collate(&self, items: Vec<Vec<Tensor>>) -> Result<Vec<Tensor>> {
                (**self).collate(items)
            }
        }
    )*};
}

forward!(Arc, Box);

/// The items of a data set, epoch after epoch, each epoch in an order that is drawn by (seed, epoch).
#[derive(Clone, Debug)]
pub struct Shuffled<D> {
    dataset: D,
    order: Permutation,
}

impl<D: Dataset> Shuffled<D> {
    /// All items once an epoch.
    ///
    /// # Errors
    /// If there are none.
    pub fn new(dataset: D, seed: u64) -> Result<Shuffled<D>> {
        let order = Permutation::of_data(some_items(&dataset)?, seed);
        Ok(Shuffled { dataset, order })
    }
}

/// The items of a data set in their own order, epoch after epoch.
#[derive(Clone, Debug)]
pub struct Ordered<D> {
    dataset: D,
    count: u64,
}

impl<D: Dataset> Ordered<D> {
    /// All items once an epoch.
    ///
    /// # Errors
    /// If there are none.
    pub fn new(dataset: D) -> Result<Ordered<D>> {
        Ok(Ordered { count: some_items(&dataset)?, dataset })
    }

    /// Items an epoch.
    pub(super) fn count(&self) -> u64 {
        self.count
    }

    fn place(&self, number: u64) -> (u64, u64) {
        (number / self.count, number % self.count)
    }
}

/// The number of items, of which there is to be one.
fn some_items(dataset: &impl Dataset) -> Result<u64> {
    match dataset.len() {
        0 => Err(wrong("Dataset", "got one without items, wanted at least one item")),
        len => Ok(len as u64),
    }
}

fn name((epoch, item): (u64, u64)) -> String {
    format!("item {item} in epoch {epoch}")
}

impl<D: Dataset> Samples for Shuffled<D> {
    fn sample(&self, number: u64) -> Result<Vec<Tensor>> {
        let (epoch, item) = self.order.draw(number);
        self.dataset.item(item as usize, epoch)
    }

    fn name(&self, number: u64) -> String {
        name(self.order.draw(number))
    }

    fn collate(&self, items: Vec<Vec<Tensor>>) -> Result<Vec<Tensor>> {
        self.dataset.collate(items)
    }
}

impl<D: Dataset> Samples for Ordered<D> {
    fn sample(&self, number: u64) -> Result<Vec<Tensor>> {
        let (epoch, item) = self.place(number);
        self.dataset.item(item as usize, epoch)
    }

    fn name(&self, number: u64) -> String {
        name(self.place(number))
    }

    fn collate(&self, items: Vec<Vec<Tensor>>) -> Result<Vec<Tensor>> {
        self.dataset.collate(items)
    }
}

#[cfg(test)]
mod tests {
    use super::super::scratch::numbers;
    use super::*;

    #[test]
    fn a_shuffled_epoch_has_every_item_once_and_the_next_is_another() {
        let samples = Shuffled::new(numbers(30), 5).unwrap();
        let epoch = |e: u64| -> Vec<i64> {
            (e * 30..e * 30 + 30).map(|n| samples.sample(n).unwrap()[0].item().unwrap()).collect()
        };
        let mut sorted = epoch(2);
        sorted.sort_unstable();
        assert!(sorted.into_iter().eq(0..30));
        assert_ne!(epoch(0), epoch(1));
        assert_eq!(samples.name(31), format!("item {} in epoch 1", epoch(1)[1]));
    }

    #[test]
    fn ordered_items_come_in_order_and_again() {
        let samples = Ordered::new(numbers(3)).unwrap();
        let values: Vec<i64> = (0..7).map(|n| samples.sample(n).unwrap()[0].item().unwrap()).collect();
        assert_eq!(values, [0, 1, 2, 0, 1, 2, 0]);
        assert_eq!(samples.name(5), "item 2 in epoch 1");
    }

    #[test]
    fn a_data_set_without_items_is_refused() {
        let why = "Dataset: got one without items, wanted at least one item";
        assert_eq!(Shuffled::new(numbers(0), 0).err().unwrap().to_string(), why);
        assert_eq!(Ordered::new(numbers(0)).err().unwrap().to_string(), why);
    }
}
