//! Matrix products, convolutions and pooling.

use phalanx_kernels::{
    ConvOptions, Gelu, PoolOptions, Windows, conv_transpose2d, conv2d, conv2d_weight, linear, linear_gelu,
    linear_gelu_kept, matmul, matmul_accumulate_, matmul_accumulate_row_sums_, matmul_gelu_backward,
    matmul_row_sums, max_pick2d, max_pool2d, max_unpool2d, mean_pool2d, mean_unpool2d,
};
use phalanx_tensor::{DType, Device, Result, Tensor};

use crate::case::{Case, FLOATS, make, spread, tolerance};

pub fn cases() -> Vec<Case> {
    let mut all = products_cases();
    all.extend(images_cases());
    all
}

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

/// Whether all products are Phalanx's own.
fn own_products() -> bool {
    std::env::var("PHALANX_CUDA_ALGORITHMS").is_ok_and(|way| way == "own")
}

fn products_cases() -> Vec<Case> {
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
        all.push(case(format!("product {dtype} in tiles"), |dtype, d| {
            // All four ways in which factors lie, several tiles of rows, columns and steps, and parts of tiles.
            let of = |shape: &[usize], seed| make(shape, dtype, d, spread(seed, -0.3, 0.3));
            let (a, b) = (of(&[200, 136], 1), of(&[136, 264], 2));
            let (at, bt) = (of(&[136, 200], 3).transpose(0, 1)?, of(&[264, 136], 4).transpose(0, 1)?);
            let heads = of(&[3, 8, 72], 5);
            let mut sum = matmul(&a, &b)?;
            matmul_accumulate_(&mut sum, &at, &bt)?;
            let whole = matmul(&a, &bt)?;
            let mut made = vec![sum, matmul(&at, &b)?];
            if own_products() {
                // Rows have the bits that they have alone.
                let parts = [matmul(&a.narrow(0, 0, 72)?, &bt)?, matmul(&a.narrow(0, 72, 128)?, &bt)?];
                for (part, first) in parts.iter().zip([0, 72]) {
                    let same = whole.narrow(0, first, part.size(0)?)?.contiguous()?;
                    made.push(phalanx_kernels::sub(&same, part)?);
                }
            }
            made.extend([
                whole,
                matmul(&heads, &heads.transpose(1, 2)?)?,
                matmul(&heads, &b.narrow(0, 8, 72)?)?,
            ]);
            Ok(made)
        }));
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
    all.extend(FLOATS.into_iter().flat_map(fused_cases));
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

/// Products with a step that cuBLASLt does on the way, where all sizes allow it (multiples of 8), and where one does not.
fn fused_cases(dtype: DType) -> Vec<Case> {
    let mut all = Vec::new();
    for [rows, inputs, outputs] in [[5, 16, 24], [5, 17, 24], [33, 16, 31], [1, 7, 8], [0, 8, 8], [3, 0, 8]] {
        // By rows, by columns, rows apart.
        let matrix = move |rows: usize, cols: usize, seed, how: usize, d| {
            let values = spread(seed, -1.0, 1.0);
            match how {
                0 => Ok(make(&[rows, cols], dtype, d, values)),
                1 => make(&[cols, rows], dtype, d, values).transpose(0, 1),
                _ => make(&[rows, cols + 8], dtype, d, values).narrow(1, 8, cols),
            }
        };
        let name = format!("{dtype} {rows} x {inputs} to {outputs}");
        let case = |what: &str, run: Box<dyn Fn(Device) -> Result<Vec<Tensor>> + Send + Sync>| {
            Case::new(format!("{what} {name}"), dtype, run).within(8.0 * tolerance(dtype))
        };
        all.push(case(
            "linear gelu kept",
            Box::new(move |d| {
                let b = make(&[outputs], dtype, d, spread(3, -1.0, 2.0));
                let mut results = Vec::new();
                for how in 0..3 {
                    let (x, w) = (matrix(rows, inputs, 1, how, d)?, matrix(outputs, inputs, 2, 2 - how, d)?);
                    for bias in [None, Some(&b)] {
                        let (y, z) = linear_gelu_kept(&x, &w, bias)?;
                        results.extend([y, z, linear_gelu(&x, &w, bias, Gelu::Tanh)?]);
                    }
                }
                let x = make(&[2, rows, inputs], dtype, d, spread(1, -1.0, 1.0));
                results.extend(<[_; 2]>::from(linear_gelu_kept(
                    &x,
                    &matrix(outputs, inputs, 2, 0, d)?,
                    Some(&b),
                )?));
                Ok(results)
            }),
        ));
        all.push(case(
            "matmul gelu backward",
            Box::new(move |d| {
                (0..3)
                    .map(|how| {
                        let (dy, w) =
                            (matrix(rows, inputs, 1, how, d)?, matrix(inputs, outputs, 2, 2 - how, d)?);
                        matmul_gelu_backward(&dy, &w, &make(&[rows, outputs], dtype, d, spread(3, -3.0, 3.0)))
                    })
                    .collect()
            }),
        ));
        all.push(case(
            "matmul row sums",
            Box::new(move |d| {
                let mut results = Vec::new();
                for how in 0..3 {
                    let (dy, x) = (matrix(outputs, rows, 1, how, d)?, matrix(rows, inputs, 2, 2 - how, d)?);
                    results.extend(<[_; 2]>::from(matmul_row_sums(&dy, &x)?));
                    let mut sum = make(&[outputs, inputs], dtype, d, spread(3, -3.0, 3.0));
                    results.push(matmul_accumulate_row_sums_(&mut sum, &dy, &x)?);
                    results.push(sum);
                }
                Ok(results)
            }),
        ));
    }
    all
}

fn images_cases() -> Vec<Case> {
    let mut all = Vec::new();
    pools(&mut all);
    convolutions(&mut all);
    all
}

fn pools(all: &mut Vec<Case>) {
    for (kernel, stride, padding, dilation) in [
        ([2, 2], [2, 2], [0, 0], [1, 1]),
        ([3, 3], [2, 1], [1, 1], [1, 1]),
        ([2, 3], [1, 2], [1, 1], [2, 2]),
        ([2, 5], [3, 3], [1, 2], [1, 1]),
    ] {
        for (ceil_mode, dtype) in [false, true].into_iter().flat_map(|c| FLOATS.map(|d| (c, d))) {
            let options = PoolOptions { kernel, stride, padding, dilation, ceil_mode };
            all.push(Case::new(format!("pool max {dtype} {options:?}"), dtype, move |d| {
                let special = [f64::NAN, f64::NEG_INFINITY, f64::INFINITY];
                let values = spread(1, -9.0, 9.0);
                let x = make(&[2, 3, 7, 9], dtype, d, |i| {
                    special.get(i / 50).copied().filter(|_| i % 50 < 3).unwrap_or(values(i).round())
                });
                let (y, places) = max_pool2d(&x, &options)?;
                let dy = make(y.shape(), dtype, d, spread(2, -1.0, 1.0));
                Ok(vec![max_pick2d(&x, &places)?, max_unpool2d(&dy, &places, [7, 9])?, y, places])
            }));
            if dilation != [1, 1] {
                continue;
            }
            for count_padding in [false, true] {
                let name = format!("pool mean {dtype} {options:?} {count_padding}");
                all.push(Case::new(name, dtype, move |d| {
                    let windows = Windows::fixed("mean", [7, 9], &options, count_padding)?;
                    let x = make(&[2, 3, 7, 9], dtype, d, spread(1, -9.0, 9.0));
                    let y = mean_pool2d(&x, &windows)?;
                    let dy = make(y.shape(), dtype, d, spread(2, -1.0, 1.0));
                    Ok(vec![mean_unpool2d(&dy, &windows)?, y])
                }));
            }
        }
    }
    // Windows and margins that no u32 holds; each window ends one pixel further into the image, or out of it.
    for count_padding in [false, true] {
        all.push(Case::new(format!("pool mean beyond u32 {count_padding}"), DType::F32, move |d| {
            let (kernel, padding) = ([(1 << 33) + 4, 3], [(1 << 32) + 1, 1]);
            let options = PoolOptions { kernel, stride: [1, 2], padding, dilation: [1, 1], ceil_mode: false };
            let windows = Windows::fixed("mean", [7, 9], &options, count_padding)?;
            let x = make(&[2, 3, 7, 9], DType::F32, d, spread(1, -9.0, 9.0));
            let y = mean_pool2d(&x, &windows)?;
            let dy = make(y.shape(), DType::F32, d, spread(2, -1.0, 1.0));
            Ok(vec![mean_unpool2d(&dy, &windows)?, y])
        }));
    }
    for (size, dtype) in
        [[1, 1], [3, 4], [7, 9], [10, 11]].into_iter().flat_map(|s| [(s, DType::F32), (s, DType::BF16)])
    {
        all.push(Case::new(format!("pool adaptive {dtype} {size:?}"), dtype, move |d| {
            let windows = Windows::adaptive("mean", [7, 9], size)?;
            let x = make(&[3, 7, 9], dtype, d, spread(1, -9.0, 9.0));
            let y = mean_pool2d(&x, &windows)?;
            let dy = make(y.shape(), dtype, d, spread(2, -1.0, 1.0));
            Ok(vec![mean_unpool2d(&dy, &windows)?, y])
        }));
    }
}

/// Images, groups, channels of a group in and out, image, kernel, stride, padding and dilation.
type Form = (usize, usize, [usize; 2], [usize; 2], [usize; 2], [usize; 2], [usize; 2], [usize; 2]);

const FORMS: [Form; 10] = [
    (2, 1, [3, 4], [6, 6], [3, 3], [1, 1], [0, 0], [1, 1]),
    (2, 1, [3, 4], [7, 6], [3, 3], [2, 2], [1, 1], [1, 1]),
    (1, 4, [1, 2], [6, 6], [3, 3], [1, 1], [1, 1], [1, 1]),
    (3, 1, [2, 3], [8, 9], [3, 2], [1, 3], [2, 0], [2, 3]),
    (2, 1, [4, 17], [5, 5], [1, 1], [1, 1], [0, 0], [1, 1]),
    (2, 2, [2, 3], [9, 33], [1, 5], [1, 1], [0, 2], [1, 1]),
    (2, 1, [1, 1], [5, 7], [2, 2], [3, 4], [1, 1], [1, 1]),
    (0, 1, [2, 3], [4, 4], [2, 2], [1, 1], [0, 0], [1, 1]),
    (20, 1, [2, 5], [3, 3], [2, 3], [1, 1], [0, 1], [1, 1]),
    (2, 18, [1, 1], [5, 5], [3, 3], [2, 2], [1, 1], [1, 1]),
];

fn convolutions(all: &mut Vec<Case>) {
    for (form, dtype) in FORMS.into_iter().flat_map(|f| FLOATS.map(|d| (f, d))) {
        let (images, groups, [inputs, outputs], image, kernel, stride, padding, dilation) = form;
        let options = ConvOptions { stride, padding, dilation, groups };
        let case = Case::new(format!("conv {dtype} {form:?}"), dtype, move |d| {
            let grid = options.size("conv2d", image, kernel)?;
            let (all_in, all_out) = (groups * inputs, groups * outputs);
            let x = make(&[images, image[0], all_in, image[1]], dtype, d, spread(1, -1.0, 1.0))
                .transpose(1, 2)?;
            let w = make(&[all_out, inputs, kernel[0], kernel[1]], dtype, d, spread(2, -1.0, 1.0));
            let dy = make(&[images, all_out, grid[0], grid[1]], dtype, d, spread(3, -1.0, 1.0));
            let (b, c) = (
                make(&[all_out], dtype, d, spread(4, -1.0, 1.0)),
                make(&[all_in], dtype, d, spread(5, -1.0, 1.0)),
            );
            Ok(vec![
                conv2d(&x, &w, None, &options, grid)?,
                conv2d(&x, &w, Some(&b), &options, grid)?,
                conv_transpose2d(&dy, &w, None, &options, image)?,
                conv_transpose2d(&dy, &w, Some(&c), &options, image)?,
                conv2d_weight(&x, &dy, &options, kernel)?,
            ])
        });
        all.push(case.within(4.0 * tolerance(dtype)));
    }
}
