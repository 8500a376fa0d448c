//! Matrix products and linear maps.

use phalanx_kernels::{Gelu, linear, linear_gelu, matmul, matmul_accumulate_};
use phalanx_tensor::{DType, Tensor};

use crate::case::{Case, FLOATS, make, spread, tolerance};

/// Shapes of both factors.
const SHAPES: [(&[usize], &[usize]); 15] = [
    (&[1, 1], &[1, 1]),
    (&[3, 4], &[4, 5]),
    (&[33, 17], &[17, 40]),
    (&[129, 70], &[70, 33]),
    (&[2, 3, 4], &[4, 5]),
    (&[3, 4], &[2, 4, 5]),
    (&[2, 1, 3, 4], &[5, 4, 2]),
    (&[2, 3, 1, 7], &[2, 1, 7, 1]),
    (&[0, 3, 4], &[4, 5]),
    (&[2, 3, 0], &[2, 0, 5]),
    (&[3, 0], &[0, 0]),
    (&[4], &[4]),
    (&[3, 4], &[4]),
    (&[4], &[2, 4, 5]),
    (&[1, 64], &[64, 64]),
];

pub fn cases() -> Vec<Case> {
    let mut all = Vec::new();
    for dtype in FLOATS {
        let case =
            move |name: String,
                  run: fn(DType, phalanx_tensor::Device) -> phalanx_tensor::Result<Vec<Tensor>>| {
                Case::new(name, dtype, move |d| run(dtype, d)).within(4.0 * tolerance(dtype))
            };
        for (a, b) in SHAPES {
            let name = format!("product {dtype} {a:?} {b:?}");
            all.push(
                Case::new(name, dtype, move |d| {
                    let (a, b) =
                        (make(a, dtype, d, spread(1, -1.0, 1.0)), make(b, dtype, d, spread(2, -2.0, 1.0)));
                    Ok(vec![matmul(&a, &b)?])
                })
                .within(4.0 * tolerance(dtype)),
            );
        }
        all.push(case(format!("product {dtype} transposed"), |dtype, d| {
            let a = make(&[19, 33], dtype, d, spread(1, -1.0, 1.0));
            let b = make(&[21, 19], dtype, d, spread(2, -1.0, 1.0));
            let (at, bt) = (a.transpose(0, 1)?, b.transpose(0, 1)?);
            Ok(vec![
                matmul(&at, &bt)?,
                matmul(&bt.contiguous()?.transpose(0, 1)?, &a)?,
                matmul(&at, &at.transpose(0, 1)?)?,
            ])
        }));
        all.push(case(format!("product {dtype} of strange strides"), |dtype, d| {
            let wide = make(&[9, 12, 10], dtype, d, spread(1, -1.0, 1.0));
            // Heads, rows far apart, a step of 12 along both dimensions, repeated rows.
            let heads = wide.permute(&[1, 0, 2])?;
            let a = wide.select(2, 3)?;
            let row = wide.select(0, 0)?.narrow(0, 1, 1)?.broadcast_to(&[5, 10])?;
            Ok(vec![
                matmul(&heads, &wide.permute(&[1, 2, 0])?)?,
                matmul(&a, &a.transpose(0, 1)?)?,
                matmul(&row, &wide.select(0, 1)?.transpose(0, 1)?)?,
            ])
        }));
        all.push(case(format!("product {dtype} of many heads"), |dtype, d| {
            let q = make(&[3, 5, 20, 4], dtype, d, spread(1, -1.0, 1.0)).permute(&[0, 2, 1, 3])?;
            let parts = make(&[4, 3, 6], dtype, d, spread(1, -1.0, 1.0));
            let map = make(&[6, 5], dtype, d, spread(2, -1.0, 1.0));
            let few = make(&[2, 3, 5, 4], dtype, d, spread(1, -1.0, 1.0)).permute(&[0, 2, 1, 3])?;
            let k = few.transpose(2, 3)?;
            Ok(vec![
                matmul(&q, &q.transpose(2, 3)?)?,
                matmul(&few, &k)?,
                matmul(&parts.narrow(1, 1, 2)?, &map)?,
                matmul(&parts.narrow(1, 2, 1)?, &map)?,
            ])
        }));
        all.push(case(format!("product {dtype} added"), |dtype, d| {
            let a = make(&[33, 7], dtype, d, spread(1, -1.0, 1.0)).transpose(0, 1)?;
            let b = make(&[33, 9], dtype, d, spread(2, -1.0, 1.0));
            let mut sum = make(&[7, 9], dtype, d, spread(3, -3.0, 3.0));
            matmul_accumulate_(&mut sum, &a, &b)?;
            let mut same = make(&[7, 9], dtype, d, spread(3, -3.0, 3.0));
            let none = make(&[7, 0], dtype, d, |_| 0.0);
            matmul_accumulate_(&mut same, &none, &make(&[0, 9], dtype, d, |_| 0.0))?;
            Ok(vec![sum, same])
        }));
        all.push(case(format!("linear {dtype}"), |dtype, d| {
            let mut results = Vec::new();
            let (w, b) = (
                make(&[33, 17], dtype, d, spread(2, -1.0, 0.5)),
                make(&[33], dtype, d, spread(3, -1.0, 2.0)),
            );
            for shape in [&[17][..], &[1, 17], &[5, 17], &[2, 3, 17], &[0, 17]] {
                let x = make(shape, dtype, d, spread(1, -1.0, 1.0));
                results.push(linear(&x, &w, None)?);
                results.push(linear(&x, &w, Some(&b))?);
                for kind in [Gelu::Exact, Gelu::Tanh] {
                    results.push(linear_gelu(&x, &w, Some(&b), kind)?);
                    results.push(linear_gelu(&x, &w, None, kind)?);
                }
            }
            let none = make(&[5, 0], dtype, d, |_| 0.0);
            results.push(linear_gelu(&none, &make(&[33, 0], dtype, d, |_| 0.0), Some(&b), Gelu::Tanh)?);
            // A view that begins at an odd place.
            let x = make(&[5, 18], dtype, d, spread(1, -1.0, 1.0)).narrow(1, 1, 17)?;
            results.push(linear(&x, &w, Some(&b))?);
            Ok(results)
        }));
    }
    for dtype in [DType::BF16, DType::F16] {
        let wide = move |d| {
            let (a, b) = (
                make(&[7, 33], dtype, d, spread(1, -1.0, 1.0)),
                make(&[33, 9], dtype, d, spread(2, -1.0, 1.0)),
            );
            let mut sum = make(&[7, 9], DType::F32, d, spread(3, -3.0, 3.0));
            matmul_accumulate_(&mut sum, &a, &b)?;
            Ok(vec![sum])
        };
        all.push(Case::new(format!("product {dtype} added to f32"), DType::F32, wide));
    }
    all
}
