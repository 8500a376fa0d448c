//! Products so wide that B is taken in several blocks of columns, for all of which A is packed once: the bits of their columns alone.

use phalanx_kernels::{cast, cat, matmul};
use phalanx_tensor::{DType, Device, Tensor};

fn matrix(rows: usize, cols: usize) -> Tensor {
    let values: Vec<f32> = (0..rows * cols).map(|i| (i * 7919 % 257) as f32 / 129.0 - 1.0).collect();
    Tensor::from_slice(&values, &[rows, cols], Device::CPU).unwrap()
}

#[test]
fn columns_of_several_blocks_have_the_bits_that_they_have_alone() {
    for (rows, steps, cols) in [(30, 512, 1100), (200, 900, 1500), (129, 1025, 2200)] {
        for dtype in [DType::F32, DType::BF16] {
            let a = cast(&matrix(rows, steps), dtype).unwrap();
            let plain = cast(&matrix(steps, cols), dtype).unwrap();
            let turned = cast(&matrix(cols, steps), dtype).unwrap().transpose(0, 1).unwrap();
            for b in [plain, turned] {
                let pieces: Vec<Tensor> = (0..cols)
                    .step_by(100)
                    .map(|first| matmul(&a, &b.narrow(1, first, 100).unwrap()).unwrap())
                    .collect();
                let apart = cat(&pieces.iter().collect::<Vec<_>>(), 1).unwrap();
                let whole = matmul(&a, &b).unwrap();
                assert!(
                    whole.to_bytes().unwrap() == apart.to_bytes().unwrap(),
                    "{rows} {steps} {cols} {dtype}"
                );
            }
        }
    }
}
