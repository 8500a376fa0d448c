//! Maxima of windows against the formula, window by window.

use super::super::max_unpool2d;
use super::*;
use crate::testing::{FLOATS, floats, make, values};

#[test]
fn finds_the_first_largest_pixel_and_sends_gradients_there() {
    for (kernel, stride, padding, dilation) in
        [([2, 2], [2, 2], [0, 0], [1, 1]), ([3, 3], [2, 1], [1, 1], [1, 1]), ([2, 3], [1, 2], [1, 1], [2, 2])]
    {
        for (ceil_mode, dtype) in [false, true].into_iter().flat_map(|c| FLOATS.map(|d| (c, d))) {
            let options = PoolOptions { kernel, stride, padding, dilation, ceil_mode };
            let x = make(&[2, 3, 7, 9], dtype, &|i| (floats(-9.0, 9.0)(i)).round());
            let (y, places) = max_pool2d(&x, &options).unwrap();
            let [h, w] = options.size("max_pool2d", [7, 9]).unwrap();
            let (xs, ys, places_found) = (values(&x), values(&y), places.to_vec::<i32>().unwrap());
            for i in 0..ys.len() {
                let (plane, row, col) = (i / (h * w), i / w % h, i % w);
                let mut best = (f64::NEG_INFINITY, -1);
                for (a, b) in (0..kernel[0]).flat_map(|a| (0..kernel[1]).map(move |b| (a, b))) {
                    let r = (row * stride[0] + a * dilation[0]).checked_sub(padding[0]).filter(|&r| r < 7);
                    let c = (col * stride[1] + b * dilation[1]).checked_sub(padding[1]).filter(|&c| c < 9);
                    if let (Some(r), Some(c)) = (r, c)
                        && xs[plane * 63 + r * 9 + c] > best.0
                    {
                        best = (xs[plane * 63 + r * 9 + c], (r * 9 + c) as i32);
                    }
                }
                assert_eq!((ys[i], places_found[i]), best, "{options:?}");
            }
            let ones = make(y.shape(), dtype, &|_| 1.0);
            let dx = values(&max_unpool2d(&ones, &places, [7, 9]).unwrap());
            assert_eq!(dx.iter().sum::<f64>(), places_found.iter().filter(|&&p| p >= 0).count() as f64);
        }
    }
}

/// The value and place of each window, and the same of the images with their channels side by side.
fn agrees(x: &Tensor, options: &PoolOptions) {
    let [h, w] = [2, 3].map(|d| x.shape()[d]);
    let (y, places) = max_pool2d(x, options).unwrap();
    let [oh, ow] = options.size("max_pool2d", [h, w]).unwrap();
    let xs = values(x);
    let (ys, ps) = (values(&y), places.to_vec::<i32>().unwrap());
    let [rows, cols] = [taps(options, 0, h, oh), taps(options, 1, w, ow)];
    for i in 0..ys.len() {
        let ((top, down), (left, across)) = (&rows[i / ow % oh], &cols[i % ow]);
        let mut best = (f64::NEG_INFINITY, -1);
        for (a, b) in down.clone().flat_map(|a| across.clone().map(move |b| (a, b))) {
            let at = (top + (a * options.dilation[0]) as isize) * w as isize
                + left
                + (b * options.dilation[1]) as isize;
            let pixel = xs[i / (oh * ow) * h * w + at as usize];
            if best.1 < 0 || pixel > best.0 || pixel.is_nan() && !best.0.is_nan() {
                best = (pixel, at as i32);
            }
        }
        assert!(ys[i].to_bits() == best.0.to_bits() || ys[i].is_nan() && best.0.is_nan(), "{options:?}");
        assert_eq!(ps[i], best.1, "{options:?}");
    }
    let last = x.permute(&[0, 2, 3, 1]).unwrap().copy().unwrap().permute(&[0, 3, 1, 2]).unwrap();
    let (transposed, turned_places) = max_pool2d(&last, options).unwrap();
    assert_eq!(transposed.shape(), y.shape());
    let bits = |x: &Tensor| values(x).iter().map(|x| x.to_bits()).collect::<Vec<_>>();
    assert_eq!(bits(&transposed), bits(&y), "{options:?}");
    assert_eq!(turned_places.to_vec::<i32>().unwrap(), ps, "{options:?}");
    let dy = make(y.shape(), x.dtype(), &floats(-1.0, 1.0));
    let dx = values(&max_unpool2d(&dy, &places, [h, w]).unwrap());
    assert_eq!(values(&max_unpool2d(&dy, &turned_places, [h, w]).unwrap()), dx);
}

#[test]
fn windows_of_any_size_are_those_of_the_formula() {
    let strange = |i: usize| match i * 7919 % 13 {
        0 => f64::NEG_INFINITY,
        1 if i.is_multiple_of(5) => f64::NAN,
        n => (n as f64 - 6.0).abs(),
    };
    let lowest = |_: usize| f64::NEG_INFINITY;
    for dtype in FLOATS {
        for (shape, kernel, stride, padding, dilation) in [
            ([1, 1, 1, 1], [1, 1], [1, 1], [0, 0], [1, 1]),
            ([2, 3, 33, 129], [2, 2], [2, 2], [0, 0], [1, 1]),
            ([1, 17, 7, 33], [3, 3], [2, 2], [1, 1], [1, 1]),
            ([2, 33, 13, 13], [5, 5], [1, 1], [2, 2], [1, 1]),
            ([1, 2, 9, 50], [1, 50], [1, 50], [0, 0], [1, 1]),
            ([1, 5, 30, 20], [30, 20], [1, 1], [0, 0], [1, 1]),
            ([1, 2, 20, 21], [3, 2], [4, 5], [1, 1], [2, 3]),
            ([1, 1, 200, 150], [3, 3], [1, 1], [1, 1], [1, 1]),
        ] {
            for ceil_mode in [false, true] {
                let options = PoolOptions { kernel, stride, padding, dilation, ceil_mode };
                agrees(&make(&shape, dtype, &floats(-3.0, 3.0)), &options);
                agrees(&make(&shape, dtype, &strange), &options);
                agrees(&make(&shape, dtype, &lowest), &options);
            }
        }
        let far = PoolOptions { padding: [1 << 30, 0], ..PoolOptions::new([1 << 31, 1]) };
        agrees(&make(&[1, 1, 3, 2], dtype, &floats(-1.0, 1.0)), &far);
    }
}

#[test]
fn nan_wins_and_minus_infinity_has_a_place() {
    let x = make(&[1, 1, 4], DType::F32, &|i| [1.0, f64::NAN, f64::NEG_INFINITY, f64::NEG_INFINITY][i]);
    let (y, places) = max_pool2d(&x, &PoolOptions::new([1, 2])).unwrap();
    let y = values(&y);
    assert!(y[0].is_nan() && y[1] == f64::NEG_INFINITY);
    assert_eq!(places.to_vec::<i32>().unwrap(), [1, 2]);
}

#[test]
fn a_stride_beyond_the_image_makes_one_window() {
    for ceil_mode in [false, true] {
        let options = PoolOptions { stride: [usize::MAX; 2], ceil_mode, ..PoolOptions::new([2, 2]) };
        assert_eq!(options.size("max_pool2d", [3, 3]).unwrap(), [1, 1]);
    }
}

#[test]
fn windows_that_do_not_fit_are_refused_by_name() {
    let x = make(&[1, 3, 3], DType::F32, &|i| i as f64);
    for options in [
        PoolOptions::new([4, 1]),
        PoolOptions { padding: [2, 0], ..PoolOptions::new([2, 2]) },
        PoolOptions { stride: [0, 1], ..PoolOptions::new([2, 2]) },
        PoolOptions { dilation: [1 << 63, 1], ..PoolOptions::new([3, 1]) },
        PoolOptions { dilation: [2, 1], ..PoolOptions::new([(1 << 63) + 1, 1]) },
        PoolOptions::new([(1 << 63) + 1, 1]),
    ] {
        let message = max_pool2d(&x, &options).unwrap_err().to_string();
        assert!(message.contains("max_pool2d"), "{message}");
    }
    assert!(max_pool2d(&make(&[3, 3], DType::F32, &|i| i as f64), &PoolOptions::new([1, 1])).is_err());
}
