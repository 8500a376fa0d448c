//! Elements in and out, and views made contiguous: the device's own copies.

use phalanx_tensor::{DType, Tensor};

use crate::case::{Case, make, spread};

/// Shapes, odd and empty ones too.
const SHAPES: [&[usize]; 11] = [
    &[],
    &[0],
    &[1],
    &[129],
    &[7, 33],
    &[40, 72],
    &[3, 0, 2],
    &[3, 10, 17],
    &[2, 16, 140],
    &[2, 3, 4, 5],
    &[2, 3, 4, 16],
];

pub fn cases() -> Vec<Case> {
    let mut all = Vec::new();
    for dtype in [DType::F64, DType::F32, DType::BF16, DType::I64, DType::U8] {
        for shape in SHAPES {
            let made = move |device| make(shape, dtype, device, spread(1, 0.0, 200.0));
            all.push(Case::new(format!("copy round trip {dtype} {shape:?}"), dtype, move |device| {
                Ok(vec![made(device)])
            }));
            let turned = move |device| {
                let order: Vec<usize> = (0..shape.len()).rev().collect();
                Ok(vec![made(device).permute(&order)?.contiguous()?])
            };
            all.push(Case::new(format!("copy transposed {dtype} {shape:?}"), dtype, turned));
            for (order, cut) in
                [(&[0, 2, 1][..], 0), (&[2, 1, 0], 0), (&[0, 2, 1, 3], 0), (&[1, 0], 4), (&[1, 0], 1)]
            {
                if order.len() == shape.len() {
                    let planes = move |device| {
                        Ok(vec![
                            made(device)
                                .narrow(-1, cut, shape[shape.len() - 1] - cut)?
                                .permute(order)?
                                .contiguous()?,
                        ])
                    };
                    all.push(Case::new(
                        format!("copy permuted {dtype} {shape:?} {order:?} from {cut}"),
                        dtype,
                        planes,
                    ));
                }
            }
            let zeros = move |device| Ok(vec![Tensor::zeros(shape, dtype, device)?]);
            all.push(Case::new(format!("zeros {dtype} {shape:?}"), dtype, zeros));
        }
    }
    all
}
