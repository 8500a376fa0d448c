//! [`TensorDataset`]: rows of tensors that are in memory.

use phalanx_tensor::Tensor;

use super::dataset::in_range;
use super::{Dataset, wrong};
use crate::Result;

/// Item i is row i of each of some tensors, as a view of it.
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
}
