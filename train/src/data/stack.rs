//! [`stack`]: items into a batch.

use phalanx_tensor::{Device, Tensor};

use super::wrong;
use crate::Result;

/// The logical CPU device on which items and batches wait. Models use others, so their ledgers do not depend on how much was read ahead.
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
    use phalanx_tensor::DType;

    use super::*;

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
