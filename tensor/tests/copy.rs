//! Copies of any layout against a naive twin.

use phalanx_tensor::{DType, Device, Result, Tensor};
use proptest::prelude::*;

/// Element by element.
fn naive(x: &Tensor, storage: &[i32]) -> Vec<i32> {
    let (shape, strides) = (x.shape(), x.strides());
    (0..x.numel())
        .map(|mut index| {
            let mut at = x.offset();
            for dim in (0..shape.len()).rev() {
                at += index % shape[dim] * strides[dim];
                index /= shape[dim];
            }
            storage[at]
        })
        .collect()
}

/// A view over views over views.
fn view(mut x: Tensor, steps: &[(u8, usize, usize)]) -> Result<Tensor> {
    for &(kind, a, b) in steps {
        let dim = a % x.rank();
        let size = x.shape()[dim];
        x = match kind {
            0 => x.transpose(dim, b % x.rank())?,
            1 => x.narrow(dim, b % (size + 1), size - b % (size + 1))?,
            2 => x.slice(dim, 0, size, b % 4 + 1)?,
            3 if x.rank() < 6 && x.numel() < 20_000 => {
                let mut shape = x.unsqueeze(dim)?.shape().to_vec();
                shape[dim] = b % 3 + 1;
                x.unsqueeze(dim)?.broadcast_to(&shape)?
            }
            4 if x.rank() > 1 => x.select(dim, b % size.max(1)).unwrap_or(x),
            _ => x,
        };
    }
    Ok(x)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn a_copy_of_any_view_equals_the_naive_one(
        shape in prop_oneof![prop::collection::vec(0usize..7, 1..5), prop::collection::vec(1usize..90, 2..4)],
        steps in prop::collection::vec((0u8..5, 0usize..6, 0usize..100), 0..6),
    ) {
        let numel: usize = shape.iter().product();
        let storage: Vec<i32> = (0..numel as i32).collect();
        let x = view(Tensor::from_slice(&storage, &shape, Device::CPU).unwrap(), &steps).unwrap();
        let copy = x.copy().unwrap();
        prop_assert!(copy.is_contiguous() && copy.shape() == x.shape());
        prop_assert_eq!(copy.to_vec::<i32>().unwrap(), naive(&x, &storage));
        prop_assert_eq!(x.to_vec::<i32>().unwrap(), naive(&x, &storage));
    }
}

#[test]
fn transposes_of_every_dtype_and_thread_count_move_every_element() -> Result<()> {
    let device = Device::Cpu(20);
    for threads in [1, 3] {
        device.set_threads(threads)?;
        for (rows, columns) in [(8, 8), (31, 33), (64, 100), (257, 300), (1, 40), (1000, 9)] {
            for dtype in DType::ALL {
                let size = dtype.size();
                // Bools hold 0 and 1 only.
                let top = if dtype == DType::Bool { 2 } else { 251 };
                let bytes: Vec<u8> = (0..rows * columns * size).map(|i| (i % top) as u8).collect();
                let x = Tensor::from_bytes(&bytes, &[rows, columns], dtype, device)?.transpose(0, 1)?;
                let moved = x.copy()?.to_bytes()?;
                for (at, got) in moved.chunks(size).enumerate() {
                    let from = (at % rows * columns + at / rows) * size;
                    assert_eq!(got, &bytes[from..from + size], "{dtype} {rows}x{columns} at {at}");
                }
            }
        }
    }
    Ok(())
}

#[test]
fn large_permutations_are_moved_in_pieces_without_loss() -> Result<()> {
    let storage: Vec<i32> = (0..6 * 70 * 5 * 64).collect();
    let x = Tensor::from_slice(&storage, &[6, 70, 5, 64], Device::CPU)?;
    for dims in [[0, 2, 1, 3], [0, 2, 3, 1], [3, 2, 1, 0], [1, 3, 0, 2], [2, 0, 3, 1]] {
        let turned = x.permute(&dims)?;
        assert_eq!(turned.to_vec::<i32>()?, naive(&turned, &storage), "{dims:?}");
    }
    Ok(())
}

#[test]
fn a_tensor_is_overwritten_by_another_of_its_form() {
    let from = Tensor::from_slice(&[1i32, 2, 3, 4], &[2, 2], Device::CPU).unwrap();
    let whole = Tensor::zeros(&[3, 2], DType::I32, Device::Cpu(1)).unwrap();
    whole.narrow(0, 1, 2).unwrap().copy_from(&from.transpose(0, 1).unwrap()).unwrap();
    assert_eq!(whole.to_vec::<i32>().unwrap(), [0, 0, 1, 3, 2, 4]);
    // Parts of one storage that overlap: read before they are written.
    whole.narrow(0, 0, 2).unwrap().copy_from(&whole.narrow(0, 1, 2).unwrap()).unwrap();
    assert_eq!(whole.to_vec::<i32>().unwrap(), [1, 3, 2, 4, 2, 4]);
    let refused = |from: &Tensor| whole.clone().copy_from(from).unwrap_err().to_string();
    assert!(refused(&from).contains("copy_from"), "{}", refused(&from));
    let other = Tensor::zeros(&[3, 2], DType::F32, Device::CPU).unwrap();
    assert!(refused(&other).contains("f32"), "{}", refused(&other));
    let mut strided = from.transpose(0, 1).unwrap();
    assert!(strided.copy_from(&from).unwrap_err().to_string().contains("contiguous"));
}
