//! [`Dataset`]: numbered items of tensors; [`TensorDataset`], rows of tensors in memory; [`stack`], which makes a batch of items.

use std::sync::Arc;

use phalanx_parallel::Content;
use phalanx_tensor::{Device, Tensor};

use super::{Concat, Map, Subset, wrong};
use crate::Result;

/// Numbered items, each a list of tensors. Several threads read items at the same time.
pub trait Dataset: Send + Sync {
    /// How many items there are.
    fn len(&self) -> usize;

    /// Whether there are none.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The item's tensors, without a batch dimension, on a CPU device, best on [`HOST`](super::HOST), which no model uses.
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

    /// What the data consist of, which ranks that are processes compare before the first step. By default nothing is known, and nothing
    /// is compared.
    fn contents(&self) -> Vec<Content> {
        Vec::new()
    }

    /// How often the item counts in the mean loss, if items count unlike often. Either all items have such a number or none has; see
    /// [`Samples::counted`](super::Samples::counted).
    fn counted(&self, _index: usize) -> Option<usize> {
        None
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

            fn contents(&self) -> Vec<Content> {
                (**self).contents()
            }

            fn counted(&self, index: usize) -> Option<usize> {
                (**self).counted(index)
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

/// The content that these bytes are.
pub(super) fn in_memory(bytes: impl Iterator<Item = u8>) -> Content {
    Content::Digest(phalanx_nn::fnv1a(bytes))
}

/// Item i is a view of row i of each tensor.
#[derive(Clone, Debug)]
pub struct TensorDataset {
    tensors: Vec<Tensor>,
    rows: usize,
}

impl TensorDataset {
    /// Rows of tensors of the same first dimension. Tensors of a GPU are copied to the host, where batches are made.
    ///
    /// # Errors
    /// If there are no tensors, one has no dimension, or their first dimensions differ.
    pub fn new(tensors: Vec<Tensor>) -> Result<TensorDataset> {
        let sizes: Vec<Option<usize>> = tensors.iter().map(|t| t.shape().first().copied()).collect();
        let Some(Some(rows)) = sizes.first().copied().filter(|first| sizes.iter().all(|size| size == first))
        else {
            let shapes: Vec<&[usize]> = tensors.iter().map(Tensor::shape).collect();
            let why = format!(
                "got tensors of the shapes {shapes:?}, wanted at least one, all with the same number of rows"
            );
            return Err(wrong("TensorDataset", why));
        };
        let to_host =
            |t: Tensor| if t.device().is_cuda() { t.to_device(t.device().host(), false) } else { Ok(t) };
        Ok(TensorDataset { tensors: tensors.into_iter().map(to_host).collect::<Result<_, _>>()?, rows })
    }
}

impl Dataset for TensorDataset {
    fn len(&self) -> usize {
        self.rows
    }

    fn item(&self, index: usize, _draw: u64) -> Result<Vec<Tensor>> {
        in_range("TensorDataset", index, self.rows)?;
        Ok(self.tensors.iter().map(|t| t.select(0, index)).collect::<Result<_, _>>()?)
    }

    fn contents(&self) -> Vec<Content> {
        self.tensors.iter().map(|tensor| in_memory(tensor.to_bytes().into_iter().flatten())).collect()
    }
}

/// The logical CPU device of items and batches that are read ahead. Models use other devices, so their ledgers do not depend on how
/// much was read ahead.
pub const HOST: Device = Device::Cpu(1023);

/// One batch of items of the same shapes: tensor t of the batch has all items' tensors t along a new first dimension, on [`HOST`].
///
/// # Errors
/// If there are no items, or an item differs from the first in its number of tensors, in a shape or in a dtype.
pub fn stack(items: Vec<Vec<Tensor>>) -> Result<Vec<Tensor>> {
    let Some(first) = items.first() else { return Err(wrong("stack", "got no items, wanted at least one")) };
    if let Some((row, why)) = odd_one(&items) {
        return Err(wrong("stack", format!("item {row} of the batch differs from item 0: {why}")));
    }
    (0..first.len()).map(|t| stack_one(&items, t)).collect()
}

/// The first item that differs from item 0, and how.
pub(super) fn odd_one(items: &[Vec<Tensor>]) -> Option<(usize, String)> {
    let first = items.first()?;
    items.iter().enumerate().find_map(|(row, item)| {
        if item.len() != first.len() {
            return Some((row, format!("got {} tensors, wanted {}", item.len(), first.len())));
        }
        let is_odd = |(t, (a, b)): (usize, (&Tensor, &Tensor))| {
            let odd = a.shape() != b.shape() || a.dtype() != b.dtype();
            let say = |x: &Tensor| format!("{:?} {}", x.shape(), x.dtype());
            odd.then(|| (row, format!("got tensor {t} of {}, wanted {}", say(a), say(b))))
        };
        item.iter().zip(first).enumerate().find_map(is_odd)
    })
}

/// Tensors `t` of all items, which are alike.
fn stack_one(items: &[Vec<Tensor>], t: usize) -> Result<Tensor> {
    const OP: &str = "stack";
    let like = &items[0][t];
    let shape: Vec<usize> = std::iter::once(items.len()).chain(like.shape().iter().copied()).collect();
    let mut out = Tensor::empty_for(OP, &shape, like.dtype(), HOST)?;
    let size = like.numel() * like.dtype().size();
    let mut to = out.write_bytes(OP)?;
    for (row, item) in items.iter().enumerate() {
        let item = match item[t].device().is_cuda() {
            true => item[t].to_device(HOST, true)?,
            false => item[t].contiguous()?,
        };
        let from = item.read_bytes(OP)?;
        let skip = item.offset() * item.dtype().size();
        to[row * size..][..size].copy_from_slice(&from[skip..][..size]);
    }
    drop(to);
    Ok(out)
}

#[cfg(test)]
mod tests {
    use phalanx_tensor::{DType, Device};

    use super::*;

    #[test]
    fn items_are_rows() {
        let x = Tensor::from_slice(&[1f32, 2.0, 3.0, 4.0], &[2, 2], Device::CPU).unwrap();
        let y = Tensor::from_slice(&[7i64, 8], &[2], Device::CPU).unwrap();
        let data = TensorDataset::new(vec![x, y]).unwrap();
        let item = data.item(1, 0).unwrap();
        assert_eq!(item[0].to_vec::<f32>().unwrap(), [3.0, 4.0]);
        assert_eq!((item[1].shape(), item[1].item::<i64>().unwrap()), (&[][..], 8));
        assert_eq!(data.len(), 2);
        let error = data.item(2, 0).unwrap_err().to_string();
        assert_eq!(error, "TensorDataset: got item 2, wanted one of 2 items");
    }

    #[test]
    fn tensors_of_unequal_numbers_of_rows_are_refused() {
        let zeros = |shape: &[usize]| Tensor::zeros(shape, DType::F32, Device::CPU).unwrap();
        for tensors in
            [vec![], vec![zeros(&[])], vec![zeros(&[2, 1]), zeros(&[3])], vec![zeros(&[2]), zeros(&[])]]
        {
            assert!(TensorDataset::new(tensors).is_err());
        }
        let error = TensorDataset::new(vec![zeros(&[2, 1]), zeros(&[3])]).err().unwrap().to_string();
        assert!(error.contains("[[2, 1], [3]]"), "{error}");
    }

    fn row(values: &[f32]) -> Tensor {
        Tensor::from_slice(values, &[values.len()], Device::CPU).unwrap()
    }

    #[test]
    fn items_lie_along_a_new_first_dimension_views_and_scalars_too() {
        let table = Tensor::from_slice(&[1i64, 2, 3, 4, 5, 6], &[2, 3], Device::CPU).unwrap();
        let column = |i| table.select(1, i).unwrap();
        let scalar = |x: f64| Tensor::scalar(x, HOST).unwrap();
        let items = vec![vec![column(2), scalar(0.5)], vec![column(0), scalar(1.5)]];
        let batch = stack(items).unwrap();
        assert_eq!((batch[0].shape(), batch[1].shape()), (&[2, 2][..], &[2][..]));
        assert_eq!(batch[0].to_vec::<i64>().unwrap(), [3, 6, 1, 4]);
        assert_eq!(batch[1].to_vec::<f64>().unwrap(), [0.5, 1.5]);
        assert_eq!(batch[0].device(), HOST);
    }

    #[test]
    fn items_without_elements_stack_to_none() {
        let nothing = || vec![Tensor::zeros(&[0, 4], DType::F32, HOST).unwrap()];
        assert_eq!(stack(vec![nothing(), nothing()]).unwrap()[0].shape(), [2, 0, 4]);
        assert!(stack(vec![vec![], vec![]]).unwrap().is_empty());
    }

    #[test]
    fn the_item_that_differs_is_named() {
        let error = |items| stack(items).unwrap_err().to_string();
        let short = error(vec![vec![row(&[1.0, 2.0])], vec![row(&[1.0, 2.0])], vec![row(&[3.0])]]);
        assert_eq!(
            short,
            "stack: item 2 of the batch differs from item 0: got tensor 0 of [1] f32, wanted [2] f32"
        );
        let other = Tensor::zeros(&[2], DType::I64, HOST).unwrap();
        assert!(
            error(vec![vec![row(&[1.0, 2.0])], vec![other]])
                .ends_with("got tensor 0 of [2] i64, wanted [2] f32")
        );
        assert!(
            error(vec![vec![row(&[1.0])], vec![]])
                .ends_with("item 1 of the batch differs from item 0: got 0 tensors, wanted 1")
        );
        assert!(error(vec![]).contains("got no items"));
    }

    #[test]
    fn items_without_bytes_are_refused() {
        let meta = Tensor::zeros(&[2], DType::F32, Device::Meta(0)).unwrap();
        assert!(stack(vec![vec![meta]]).unwrap_err().to_string().contains("meta"));
    }
}
