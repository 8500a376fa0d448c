//! The three convolutions against their common formula, summed in f64.

use phalanx_tensor::{DType, Device, Tensor};

use super::*;
use crate::testing::{FLOATS, floats, make, values};

#[derive(Clone, Copy, Debug)]
struct Case {
    images: usize,
    groups: usize,
    /// Channels of one group.
    inputs: usize,
    outputs: usize,
    image: [usize; 2],
    kernel: [usize; 2],
    stride: [usize; 2],
    padding: [usize; 2],
    dilation: [usize; 2],
}

const CASES: &[Case] = &[
    case(2, 1, 3, 4, [6, 6], [3, 3], [1, 1], [0, 0], [1, 1]),
    case(2, 1, 3, 4, [7, 6], [3, 3], [2, 2], [1, 1], [1, 1]),
    case(1, 4, 1, 2, [6, 6], [3, 3], [1, 1], [1, 1], [1, 1]),
    case(3, 1, 2, 3, [8, 9], [3, 2], [1, 3], [2, 0], [2, 3]),
    case(2, 1, 4, 17, [5, 5], [1, 1], [1, 1], [0, 0], [1, 1]),
    case(2, 2, 2, 3, [9, 40], [1, 5], [1, 1], [0, 2], [1, 1]),
    case(2, 1, 1, 1, [5, 7], [2, 2], [3, 4], [1, 1], [1, 1]),
    case(0, 1, 2, 3, [4, 4], [2, 2], [1, 1], [0, 0], [1, 1]),
    case(40, 1, 2, 5, [3, 3], [2, 3], [1, 1], [0, 1], [1, 1]),
    case(4, 1, 33, 40, [30, 29], [3, 3], [1, 1], [1, 1], [1, 1]),
    case(1, 1, 40, 33, [30, 29], [3, 3], [2, 1], [1, 1], [1, 1]),
    case(9, 3, 8, 16, [16, 16], [3, 3], [2, 2], [1, 1], [1, 1]),
    case(2, 1, 5, 40, [6, 45], [3, 3], [1, 1], [1, 1], [1, 1]),
    case(1, 1, 3, 26, [4, 150], [2, 3], [1, 2], [0, 1], [2, 1]),
    case(2, 1, 5, 26, [12, 23], [3, 3], [1, 1], [2, 2], [2, 2]),
    case(2, 2, 3, 26, [11, 37], [2, 5], [1, 1], [0, 2], [1, 1]),
    case(1, 1, 2, 26, [40, 3], [3, 3], [1, 1], [4, 1], [3, 1]),
    case(130, 1, 1, 5, [24, 24], [3, 3], [1, 1], [1, 1], [1, 1]),
    case(2, 7, 1, 1, [7, 7], [3, 3], [1, 1], [1, 1], [1, 1]),
    case(2, 3, 1, 3, [33, 7], [5, 3], [2, 2], [2, 1], [1, 1]),
    case(3, 5, 1, 1, [1, 129], [1, 4], [1, 1], [0, 3], [1, 1]),
    case(1, 2, 4, 4, [17, 33], [3, 3], [1, 1], [1, 1], [1, 1]),
    case(2, 2, 3, 5, [1, 1], [1, 1], [1, 1], [0, 0], [1, 1]),
    case(2, 1, 2, 7, [1, 1], [4, 4], [1, 1], [3, 3], [1, 1]),
    case(3, 1, 5, 7, [4, 3], [4, 3], [2, 1], [0, 0], [1, 1]),
    case(1, 1, 1, 1, [129, 140], [5, 5], [1, 1], [2, 2], [1, 1]),
    case(3, 1, 7, 20, [7, 7], [3, 3], [1, 1], [1, 1], [1, 1]),
    case(5, 1, 16, 33, [1, 33], [1, 3], [1, 1], [0, 8], [1, 8]),
    case(2, 2, 16, 16, [12, 12], [3, 3], [1, 1], [1, 1], [1, 1]),
    case(2, 1, 3, 16, [9, 40], [3, 3], [1, 1], [1, 1], [1, 1]),
    case(2, 1, 3, 30, [12, 11], [3, 4], [3, 4], [0, 0], [1, 1]),
    case(33, 1, 5, 14, [4, 3], [3, 3], [1, 1], [1, 1], [1, 1]),
    case(129, 2, 3, 28, [5, 5], [3, 3], [2, 2], [1, 1], [1, 1]),
    case(31, 1, 20, 26, [2, 2], [3, 3], [1, 1], [1, 1], [1, 1]),
    case(64, 1, 2, 13, [1, 17], [1, 3], [1, 2], [0, 4], [1, 2]),
    case(32, 1, 3, 28, [9, 8], [1, 1], [2, 3], [0, 0], [1, 1]),
    case(3, 33, 1, 1, [7, 7], [3, 3], [1, 1], [1, 1], [1, 1]),
    case(2, 17, 1, 1, [9, 33], [3, 4], [2, 3], [1, 2], [1, 1]),
    case(1, 8, 1, 1, [5, 6], [2, 3], [1, 1], [3, 0], [2, 2]),
    case(2, 9, 1, 1, [7, 8], [2, 1], [3, 2], [0, 0], [1, 1]),
    case(3, 1, 3, 20, [20, 37], [5, 5], [5, 5], [0, 0], [1, 1]),
    case(2, 1, 2, 20, [16, 300], [16, 16], [16, 16], [0, 0], [1, 1]),
    case(2, 1, 1, 20, [17, 70], [3, 33], [2, 33], [0, 0], [1, 1]),
];

#[allow(clippy::too_many_arguments)] // a table's columns
const fn case(
    images: usize,
    groups: usize,
    inputs: usize,
    outputs: usize,
    image: [usize; 2],
    kernel: [usize; 2],
    stride: [usize; 2],
    padding: [usize; 2],
    dilation: [usize; 2],
) -> Case {
    Case { images, groups, inputs, outputs, image, kernel, stride, padding, dilation }
}

impl Case {
    fn options(&self) -> ConvOptions {
        let Case { stride, padding, dilation, groups, .. } = *self;
        ConvOptions { stride, padding, dilation, groups }
    }

    fn grid(&self) -> [usize; 2] {
        self.options().size("conv2d", self.image, self.kernel).unwrap()
    }

    fn shapes(&self) -> [[usize; 4]; 3] {
        let (inputs, outputs) = (self.groups * self.inputs, self.groups * self.outputs);
        let (image, kernel, grid) = (self.image, self.kernel, self.grid());
        [
            [self.images, inputs, image[0], image[1]],
            [outputs, self.inputs, kernel[0], kernel[1]],
            [self.images, outputs, grid[0], grid[1]],
        ]
    }

    /// Calls `f` with the flat indices in image, weight and grid of every term of the trilinear form.
    fn for_each_term(&self, mut f: impl FnMut(usize, usize, usize)) {
        let [image, weight, grid] = self.shapes();
        let flat = |shape: [usize; 4], at: [usize; 4]| (0..4).fold(0, |sum, d| sum * shape[d] + at[d]);
        let pixel = |i: usize, point: usize, element: usize| {
            let at = (point * self.stride[i] + element * self.dilation[i]).checked_sub(self.padding[i])?;
            (at < self.image[i]).then_some(at)
        };
        for n in 0..self.images {
            for o in 0..grid[1] {
                for c in 0..self.inputs {
                    let channel = o / self.outputs * self.inputs + c;
                    for (gy, gx) in (0..grid[2]).flat_map(|y| (0..grid[3]).map(move |x| (y, x))) {
                        for (ky, kx) in (0..weight[2]).flat_map(|y| (0..weight[3]).map(move |x| (y, x))) {
                            if let (Some(y), Some(x)) = (pixel(0, gy, ky), pixel(1, gx, kx)) {
                                let at = flat(image, [n, channel, y, x]);
                                f(at, flat(weight, [o, c, ky, kx]), flat(grid, [n, o, gy, gx]));
                            }
                        }
                    }
                }
            }
        }
    }
}

fn check(case: &Case, got: &Tensor, want: &[f64], terms: &[f64], dtype: DType) {
    assert_eq!(got.dtype(), dtype);
    // One rounding for each term's sum of magnitudes, and one for the result.
    for ((got, &want), &terms) in values(got).into_iter().zip(want).zip(terms) {
        let slack = match dtype {
            DType::F64 => 1e-14,
            _ => 1e-6,
        };
        let allowed = slack * terms + crate::testing::tolerance(dtype) * want.abs().max(1e-3);
        assert!((got - want).abs() <= allowed, "{case:?} {dtype}: got {got}, wanted {want}");
    }
}

#[test]
fn each_of_the_three_equals_the_formula() {
    for case in CASES {
        for dtype in FLOATS {
            if dtype != DType::F32 && case.inputs * case.outputs > 1000 {
                continue; // large cases once: they reach the shared cuts
            }
            let [image, weight, grid] = case.shapes();
            let (image, weight, grid) = (
                make(&image, dtype, &floats(-1.0, 1.0)),
                make(&weight, dtype, &floats(-1.0, 0.7)),
                make(&grid, dtype, &floats(-0.6, 1.0)),
            );
            let bias = make(&[grid.shape()[1]], dtype, &floats(-2.0, 2.0));
            let (x, w, y, b) = (values(&image), values(&weight), values(&grid), values(&bias));
            let (mut dx, mut dw, mut dy) = (vec![0.0; x.len()], vec![0.0; w.len()], vec![0.0; y.len()]);
            let (mut sx, mut sw, mut sy) = (dx.clone(), dw.clone(), dy.clone());
            let plane = case.grid()[0] * case.grid()[1];
            (0..y.len()).for_each(|i| dy[i] = b[i / plane % b.len()]);
            case.for_each_term(|i, j, k| {
                dx[i] += w[j] * y[k];
                dw[j] += x[i] * y[k];
                dy[k] += x[i] * w[j];
                sx[i] += (w[j] * y[k]).abs();
                sw[j] += (x[i] * y[k]).abs();
                sy[k] += (x[i] * w[j]).abs();
            });
            let options = case.options();
            check(
                case,
                &conv2d(&image, &weight, Some(&bias), &options, case.grid()).unwrap(),
                &dy,
                &sy,
                dtype,
            );
            check(
                case,
                &conv_transpose2d(&grid, &weight, None, &options, case.image).unwrap(),
                &dx,
                &sx,
                dtype,
            );
            check(case, &conv2d_weight(&image, &grid, &options, case.kernel).unwrap(), &dw, &sw, dtype);
        }
    }
}

#[test]
fn what_a_point_does_not_meet_may_be_infinite() {
    let x = make(&[1, 1, 4, 5], DType::F32, &|i| if i % 5 == 0 { f64::INFINITY } else { 1.0 });
    let dy = make(&[1, 1, 4, 3], DType::F32, &|_| 1.0);
    let dw = conv2d_weight(&x, &dy, &ConvOptions::default(), [1, 3]).unwrap();
    assert_eq!(values(&dw), [f64::INFINITY, 12.0, 12.0]);
}

#[test]
fn sums_of_many_steps_have_the_bits_of_those_of_some_channels() {
    for dtype in [DType::F32, DType::BF16] {
        for (inputs, size) in [(131, [5, 9]), (130, [3, 40])] {
            let x = make(&[2, inputs, size[0], size[1]], dtype, &floats(-1.0, 1.0));
            let w = make(&[140, inputs, 3, 3], dtype, &floats(-0.5, 0.6));
            let options = ConvOptions { padding: [1; 2], ..ConvOptions::default() };
            let all = conv2d(&x, &w, None, &options, size).unwrap();
            let some = conv2d(&x, &w.narrow(0, 70, 30).unwrap(), None, &options, size).unwrap();
            assert_eq!(values(&all.narrow(1, 70, 30).unwrap()), values(&some), "{dtype} {inputs}");
        }
    }
}

#[test]
fn one_thread_and_several_have_the_same_bits_with_few_channels() {
    for (index, threads) in [(44, 1), (45, 3), (46, 8)] {
        Device::Cpu(index).set_threads(threads).unwrap();
    }
    let cases = [
        case(1, 1, 1, 1, [70, 50], [5, 5], [1, 1], [2, 2], [1, 1]),
        case(1, 1, 3, 16, [60, 70], [3, 3], [2, 2], [1, 1], [1, 1]),
        case(4, 12, 1, 1, [40, 40], [3, 3], [1, 1], [1, 1], [1, 1]),
        case(5, 129, 1, 1, [13, 14], [3, 3], [1, 1], [1, 1], [1, 1]),
        case(3, 1, 16, 40, [20, 23], [3, 3], [1, 1], [1, 1], [1, 1]),
    ];
    for (case, dtype) in cases.iter().flat_map(|case| [DType::F32, DType::BF16].map(|dtype| (case, dtype))) {
        let [image, weight, grid] = case.shapes();
        let run = |index: u16| {
            let make = |shape: &[usize]| {
                make(shape, dtype, &floats(-1.0, 1.0)).to_device(Device::Cpu(index), false).unwrap()
            };
            let (x, w, y, options) = (make(&image), make(&weight), make(&grid), case.options());
            [
                conv2d(&x, &w, None, &options, case.grid()).unwrap(),
                conv_transpose2d(&y, &w, None, &options, case.image).unwrap(),
                conv2d_weight(&x, &y, &options, case.kernel).unwrap(),
            ]
            .map(|t| values(&t))
        };
        let one = run(44);
        assert!(one == run(45) && one == run(46), "{case:?} {dtype}");
    }
}

#[test]
fn bits_do_not_depend_on_threads_strides_or_the_rest_of_the_batch() {
    let case = case(5, 2, 9, 24, [20, 21], [3, 3], [1, 2], [1, 1], [1, 1]);
    let [image, weight, grid] = case.shapes();
    let make = |shape: &[usize], device| {
        make(shape, DType::F32, &floats(-1.0, 1.0)).to_device(device, false).unwrap()
    };
    let run = |device: Device| {
        let (x, w, y) = (make(&image, device), make(&weight, device), make(&grid, device));
        let options = case.options();
        [
            conv2d(&x, &w, None, &options, case.grid()).unwrap().to_vec::<f32>().unwrap(),
            conv_transpose2d(&y, &w, None, &options, case.image).unwrap().to_vec().unwrap(),
            conv2d_weight(&x, &y, &options, case.kernel).unwrap().to_vec().unwrap(),
        ]
    };
    for (index, threads) in [(41, 1), (42, 3), (43, 8)] {
        Device::Cpu(index).set_threads(threads).unwrap();
    }
    let one = run(Device::Cpu(41));
    assert!(one == run(Device::Cpu(42)) && one == run(Device::Cpu(43)));
    let (x, w) = (make(&image, Device::CPU), make(&weight, Device::CPU));
    let options = case.options();
    let last = x.permute(&[0, 2, 3, 1]).unwrap().copy().unwrap().permute(&[0, 3, 1, 2]).unwrap();
    let across = w.permute(&[1, 0, 3, 2]).unwrap().copy().unwrap().permute(&[1, 0, 3, 2]).unwrap();
    let moved = conv2d(&last, &across, None, &options, case.grid()).unwrap();
    assert_eq!(moved.to_vec::<f32>().unwrap(), one[0]);
    let alone = conv2d(&x.narrow(0, 3, 1).unwrap(), &w, None, &options, case.grid()).unwrap();
    let len = alone.numel();
    assert_eq!(alone.to_vec::<f32>().unwrap(), one[0][3 * len..4 * len]);
}

#[test]
fn images_together_have_the_bits_of_each_alone() {
    for (index, threads) in [(47, 1), (48, 3)] {
        Device::Cpu(index).set_threads(threads).unwrap();
    }
    let cases = [
        case(31, 1, 131, 26, [2, 2], [3, 3], [1, 1], [1, 1], [1, 1]),
        case(100, 2, 9, 28, [5, 6], [3, 3], [2, 1], [1, 1], [1, 1]),
        case(64, 1, 16, 14, [1, 9], [1, 3], [1, 2], [0, 4], [1, 2]),
        case(32, 1, 7, 24, [6, 6], [1, 1], [2, 2], [0, 0], [1, 1]),
    ];
    for (case, dtype) in cases.iter().flat_map(|case| FLOATS.map(|dtype| (case, dtype))) {
        let [image, weight, grid] = case.shapes();
        let (bias, options) = (make(&[weight[0]], dtype, &floats(-2.0, 2.0)), case.options());
        let both = |images: std::ops::Range<usize>, device: Device| {
            let make = |shape: &[usize]| make(shape, dtype, &floats(-1.0, 1.0));
            let some = |t: Tensor| t.narrow(0, images.start, images.len()).unwrap();
            let [x, w, y, bias] = [some(make(&image)), make(&weight), some(make(&grid)), bias.clone()]
                .map(|t| t.to_device(device, false).unwrap());
            let there = conv2d(&x, &w, Some(&bias), &options, case.grid()).unwrap();
            let back = conv_transpose2d(&y, &w, None, &options, case.image).unwrap();
            [there, back, conv2d_weight(&x, &y, &options, case.kernel).unwrap()].map(|t| values(&t))
        };
        let all = both(0..case.images, Device::Cpu(47));
        assert!(all == both(0..case.images, Device::Cpu(48)), "{case:?} {dtype}: threads");
        for image in [0, 30, case.images - 1] {
            for (all, alone) in all.iter().zip(both(image..image + 1, Device::Cpu(48))).take(2) {
                assert!(all[image * alone.len()..][..alone.len()] == alone, "{case:?} {dtype} {image}");
            }
        }
    }
}

#[test]
fn channels_together_have_the_bits_of_each_alone() {
    for (stride, dtype) in [1, 2].into_iter().flat_map(|stride| FLOATS.map(|dtype| (stride, dtype))) {
        let case = case(2, 19, 1, 1, [7, 10], [3, 2], [stride, 1], [1, 1], [1, 1]);
        let [image, weight, grid] = case.shapes().map(|shape| make(&shape, dtype, &floats(-1.0, 1.0)));
        let bias = make(&[19], dtype, &floats(-2.0, 2.0));
        let both = |channels: std::ops::Range<usize>| {
            let some = |t: &Tensor, dim: usize| t.narrow(dim, channels.start, channels.len()).unwrap();
            let [x, w, y, b] = [some(&image, 1), some(&weight, 0), some(&grid, 1), some(&bias, 0)];
            let options = ConvOptions { groups: channels.len(), ..case.options() };
            [
                conv2d(&x, &w, Some(&b), &options, case.grid()).unwrap(),
                conv_transpose2d(&y, &w, None, &options, case.image).unwrap(),
                conv2d_weight(&x, &y, &options, case.kernel).unwrap().transpose(0, 1).unwrap(),
            ]
        };
        let all = both(0..19);
        for channel in [0, 7, 18] {
            for (all, alone) in all.iter().zip(both(channel..channel + 1)) {
                let all = all.narrow(1, channel, 1).unwrap();
                assert!(values(&all) == values(&alone), "{stride} {dtype} {channel}");
            }
        }
    }
}

#[test]
fn sizes_are_the_usual_ones_and_what_does_not_fit_is_refused_by_name() {
    let options = ConvOptions { stride: [2, 3], padding: [1, 0], dilation: [1, 2], groups: 1 };
    assert_eq!(options.size("conv2d", [7, 9], [3, 3]).unwrap(), [4, 2]);
    assert_eq!(options.transposed_size("conv_transpose2d", [4, 2], [3, 3], [0, 1]).unwrap(), [7, 9]);
    assert!(options.transposed_size("conv_transpose2d", [4, 2], [3, 3], [2, 0]).is_err());
    assert!(options.size("conv2d", [7, 4], [3, 3]).unwrap_err().to_string().contains("conv2d"));
    let x = |shape: &[usize]| make(shape, DType::F32, &floats(-1.0, 1.0));
    let grouped = ConvOptions { groups: 2, ..ConvOptions::default() };
    let refused = |image: &[usize], weight: &[usize], options: &ConvOptions| {
        let message = conv2d(&x(image), &x(weight), None, options, [1, 1]).unwrap_err().to_string();
        assert!(message.contains("conv2d"), "{message}");
    };
    refused(&[1, 3, 4, 4], &[2, 4, 3, 3], &ConvOptions::default());
    refused(&[1, 3, 4, 4], &[2, 1, 3, 3], &grouped);
    refused(&[1, 4, 4, 4], &[3, 2, 3, 3], &grouped);
    refused(&[4, 4, 4], &[3, 4, 3, 3], &ConvOptions::default());
    refused(&[1, 3, 4, 4], &[2, 3, 3, 3], &ConvOptions { stride: [0, 1], ..ConvOptions::default() });
    refused(&[1, 3, 4, 4], &[2, 3, 3, 3], &ConvOptions { groups: 0, ..ConvOptions::default() });
}

#[test]
fn numbers_beyond_all_sizes_are_refused_by_name() {
    let plain = ConvOptions::default();
    for huge in [1 << 63, usize::MAX] {
        let padded = ConvOptions { padding: [huge, 0], ..plain };
        let dilated = ConvOptions { dilation: [1, huge], ..plain };
        for options in [padded, dilated] {
            let direct = options.size("conv2d", [4, 4], [3, 3]).unwrap_err().to_string();
            assert!(direct.contains("conv2d"), "{direct}");
            let back = options.transposed_size("conv_transpose2d", [4, 4], [3, 3], [0, 0]).unwrap_err();
            assert!(back.to_string().contains("conv_transpose2d"), "{back}");
        }
        let strided = ConvOptions { stride: [huge, 1], ..plain };
        assert!(strided.transposed_size("conv_transpose2d", [4, 4], [3, 3], [0, 0]).is_err());
    }
}

#[test]
fn a_stride_beyond_the_image_makes_one_point() {
    let image = make(&[1, 2, 5, 5], DType::F32, &floats(-1.0, 1.0));
    let weight = make(&[3, 2, 3, 3], DType::F32, &floats(-1.0, 1.0));
    let run = |stride: [usize; 2]| {
        let options = ConvOptions { stride, ..ConvOptions::default() };
        let size = options.size("conv2d", [5, 5], [3, 3]).unwrap();
        let y = conv2d(&image, &weight, None, &options, size).unwrap();
        let back = conv_transpose2d(&y, &weight, None, &options, [5, 5]).unwrap();
        let grad = conv2d_weight(&image, &y, &options, [3, 3]).unwrap();
        [y, back, grad].map(|t| (t.shape().to_vec(), values(&t)))
    };
    assert_eq!(run([5, 5])[0].0, [1, 3, 1, 1]);
    for stride in [[usize::MAX; 2], [1 << 32; 2], [1 << 63; 2]] {
        assert_eq!(run(stride), run([5, 5]));
    }
    run([1, 1 << 32]);
}
