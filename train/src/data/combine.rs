//! [`Map`] and [`Concat`]: data sets made of others.

use std::sync::Arc;

use phalanx_tensor::Tensor;

use super::Dataset;
use super::dataset::in_range;
use super::stack::stack;
use crate::Result;

/// The items of a data set after a change; see [`Dataset::map`].
#[derive(Clone, Debug)]
pub struct Map<D, F> {
    dataset: D,
    change: F,
}

impl<D, F> Map<D, F> {
    pub(super) fn new(dataset: D, change: F) -> Map<D, F> {
        Map { dataset, change }
    }
}

impl<D, F> Dataset for Map<D, F>
where
    D: Dataset,
    F: Fn(Vec<Tensor>, usize, u64) -> Result<Vec<Tensor>> + Send + Sync,
{
    fn len(&self) -> usize {
        self.dataset.len()
    }

    fn item(&self, index: usize, draw: u64) -> Result<Vec<Tensor>> {
        (self.change)(self.dataset.item(index, draw)?, index, draw)
    }

    fn collate(&self, items: Vec<Vec<Tensor>>) -> Result<Vec<Tensor>> {
        self.dataset.collate(items)
    }
}

/// The items of several data sets, one set after the other. The first set makes the batches.
#[derive(Clone)]
pub struct Concat {
    parts: Vec<Arc<dyn Dataset>>,
    /// How many items there are up to the end of each part.
    ends: Vec<usize>,
}

impl Concat {
    /// The items of `parts`, in this order.
    pub fn new(parts: Vec<Arc<dyn Dataset>>) -> Concat {
        let ends = parts.iter().scan(0, |end, part| {
            *end += part.len();
            Some(*end)
        });
        Concat { ends: ends.collect(), parts }
    }
}

impl Dataset for Concat {
    fn len(&self) -> usize {
        self.ends.last().copied().unwrap_or(0)
    }

    fn item(&self, index: usize, draw: u64) -> Result<Vec<Tensor>> {
        in_range("Concat", index, self.len())?;
        let part = self.ends.partition_point(|&end| end <= index);
        let first = if part == 0 { 0 } else { self.ends[part - 1] };
        self.parts[part].item(index - first, draw)
    }

    fn collate(&self, items: Vec<Vec<Tensor>>) -> Result<Vec<Tensor>> {
        match self.parts.first() {
            Some(part) => part.collate(items),
            None => stack(items),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::scratch::numbers;
    use super::super::{HOST, wrong};
    use super::*;

    #[test]
    fn a_mapped_item_knows_its_index_and_draw() {
        let data = numbers(4).map(|item, index, draw| {
            let value = item[0].item::<i64>()? * 100 + index as i64 * 10 + draw as i64;
            Ok(vec![Tensor::scalar(value, HOST)?])
        });
        assert_eq!(data.item(3, 7).unwrap()[0].item::<i64>().unwrap(), 337);
        assert_eq!(data.len(), 4);
        let refusing = numbers(4).map(|_, _, _| Err(wrong("mine", "no")));
        assert_eq!(refusing.item(0, 0).unwrap_err().to_string(), "mine: no");
    }

    #[test]
    fn concatenated_items_follow_each_other_and_empty_parts_are_passed_over() {
        let all = numbers(2).concat(numbers(0)).concat(numbers(3));
        let values: Vec<i64> = (0..5).map(|i| all.item(i, 0).unwrap()[0].item().unwrap()).collect();
        assert_eq!((all.len(), values), (5, vec![0, 1, 0, 1, 2]));
        assert!(all.item(5, 0).unwrap_err().to_string().contains("got item 5, wanted one of 5"));
        assert!(Concat::new(vec![]).is_empty());
    }

    #[test]
    fn the_first_set_makes_the_batches() {
        struct Sums;
        impl Dataset for Sums {
            fn len(&self) -> usize {
                1
            }
            fn item(&self, _: usize, _: u64) -> Result<Vec<Tensor>> {
                Ok(vec![Tensor::scalar(5i64, HOST)?])
            }
            fn collate(&self, items: Vec<Vec<Tensor>>) -> Result<Vec<Tensor>> {
                let sum = items.iter().map(|item| item[0].item::<i64>()).sum::<Result<i64, _>>()?;
                Ok(vec![Tensor::scalar(sum, HOST)?])
            }
        }
        let data = Sums.map(|item, _, _| Ok(item)).concat(numbers(3));
        let items = (0..4).map(|i| data.item(i, 0).unwrap()).collect();
        assert_eq!(data.collate(items).unwrap()[0].item::<i64>().unwrap(), 8);
    }
}
