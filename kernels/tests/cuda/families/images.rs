//! Convolutions and pooling.

use phalanx_kernels::{
    ConvOptions, PoolOptions, Windows, conv_transpose2d, conv2d, conv2d_weight, max_pick2d, max_pool2d,
    max_unpool2d, mean_pool2d, mean_unpool2d,
};
use phalanx_tensor::DType;

use crate::case::{Case, FLOATS, make, spread, tolerance};

pub fn cases() -> Vec<Case> {
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
