//! Data sets made of others: [`Map`] changes items, [`Concat`] joins data sets, [`Subset`] selects items.

use std::sync::Arc;

use phalanx_parallel::Content;
use phalanx_tensor::{RngKey, Tensor};

use super::dataset::{in_range, stack};
use super::{Dataset, Permutation, wrong};
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
    fn counted(&self, index: usize) -> Option<usize> {
        self.dataset.counted(index)
    }

    fn len(&self) -> usize {
        self.dataset.len()
    }

    fn item(&self, index: usize, draw: u64) -> Result<Vec<Tensor>> {
        (self.change)(self.dataset.item(index, draw)?, index, draw)
    }

    fn collate(&self, items: Vec<Vec<Tensor>>) -> Result<Vec<Tensor>> {
        self.dataset.collate(items)
    }

    fn contents(&self) -> Vec<Content> {
        self.dataset.contents()
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
    fn contents(&self) -> Vec<Content> {
        self.parts.iter().flat_map(Dataset::contents).collect()
    }

    fn counted(&self, index: usize) -> Option<usize> {
        let part = self.ends.partition_point(|&end| end <= index);
        let first = if part == 0 { 0 } else { self.ends[part - 1] };
        self.parts.get(part)?.counted(index - first)
    }

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

/// The site of a split's random draws.
const SITE: u64 = 0x7370_6c69;

/// Some items of a data set, in an order of their own.
#[derive(Clone, Debug)]
pub struct Subset<D> {
    dataset: D,
    chosen: Chosen,
}

/// Which items.
#[derive(Clone, Debug)]
enum Chosen {
    /// These.
    Listed(Vec<usize>),
    /// `count` places of a drawn order, from `first` on.
    Drawn { order: Permutation, first: usize, count: usize },
}

impl<D: Dataset> Subset<D> {
    /// The items at `indices`, in this order. An index may come several times.
    ///
    /// # Errors
    /// If there is no such item.
    pub fn new(dataset: D, indices: Vec<usize>) -> Result<Subset<D>> {
        let len = dataset.len();
        indices.iter().try_for_each(|&index| in_range("Subset", index, len))?;
        Ok(Subset { dataset, chosen: Chosen::Listed(indices) })
    }

    /// The index in the whole data set of this subset's item `index`.
    ///
    /// # Errors
    /// If there is no such item.
    pub fn index(&self, index: usize) -> Result<usize> {
        in_range("Subset", index, self.len())?;
        Ok(match &self.chosen {
            Chosen::Listed(indices) => indices[index],
            Chosen::Drawn { order, first, .. } => order.at(0, (first + index) as u64) as usize,
        })
    }
}

impl<D: Dataset> Subset<Arc<D>> {
    /// See [`Dataset::split`].
    pub(super) fn parts(dataset: Arc<D>, share: f64, seed: u64) -> Result<[Self; 2]> {
        if !(0.0..=1.0).contains(&share) {
            return Err(wrong("split", format!("got a share of {share}, wanted a number from 0 to 1")));
        }
        let len = dataset.len();
        let middle = (len as f64 * share).round() as usize;
        let order = Permutation::new(len as u64, RngKey { seed, step: 0 }.site(SITE));
        let part = |first, count| Subset {
            dataset: Arc::clone(&dataset),
            chosen: Chosen::Drawn { order: order.clone(), first, count },
        };
        Ok([part(0, middle), part(middle, len - middle)])
    }
}

impl<D: Dataset> Dataset for Subset<D> {
    fn counted(&self, index: usize) -> Option<usize> {
        self.dataset.counted(self.index(index).ok()?)
    }

    fn len(&self) -> usize {
        match &self.chosen {
            Chosen::Listed(indices) => indices.len(),
            Chosen::Drawn { count, .. } => *count,
        }
    }

    fn item(&self, index: usize, draw: u64) -> Result<Vec<Tensor>> {
        self.dataset.item(self.index(index)?, draw)
    }

    fn collate(&self, items: Vec<Vec<Tensor>>) -> Result<Vec<Tensor>> {
        self.dataset.collate(items)
    }

    fn contents(&self) -> Vec<Content> {
        self.dataset.contents()
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

    fn values(data: &impl Dataset) -> Vec<i64> {
        (0..data.len()).map(|i| data.item(i, 0).unwrap()[0].item::<i64>().unwrap()).collect()
    }

    #[test]
    fn a_split_is_disjoint_complete_and_of_the_share() {
        for (len, share, first) in
            [(10, 0.8, 8), (7, 0.5, 4), (1, 0.3, 0), (0, 0.5, 0), (5, 1.0, 5), (101, 0.1, 10)]
        {
            let [a, b] = numbers(len).split(share, 3).unwrap();
            assert_eq!((a.len(), b.len()), (first, len - first));
            let mut all = [values(&a), values(&b)].concat();
            all.sort_unstable();
            assert!(all.into_iter().eq(0..len as i64));
        }
    }

    #[test]
    fn a_split_is_drawn_by_its_seed() {
        let part = |seed| values(&numbers(100).split(0.5, seed).unwrap()[0]);
        assert_eq!(part(1), part(1));
        assert_ne!(part(1), part(2));
        assert!(!part(1).into_iter().eq(0..50));
    }

    #[test]
    fn a_share_that_is_none_is_refused() {
        for share in [-0.1, 1.5, f64::NAN] {
            let error = numbers(4).split(share, 0).unwrap_err().to_string();
            assert!(error.starts_with("split: got a share of"), "{error}");
        }
    }

    #[test]
    fn a_subset_has_the_listed_items_and_refuses_others() {
        let subset = numbers(5).subset(vec![4, 0, 4]).unwrap();
        assert_eq!(values(&subset), [4, 0, 4]);
        assert_eq!(subset.index(0).unwrap(), 4);
        assert!(subset.item(3, 0).unwrap_err().to_string().contains("got item 3, wanted one of 3"));
        let error = numbers(5).subset(vec![1, 5]).unwrap_err().to_string();
        assert_eq!(error, "Subset: got item 5, wanted one of 5 items");
    }
}
