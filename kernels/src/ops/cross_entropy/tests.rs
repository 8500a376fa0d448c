//! Tests: held against the formula in f64.

use phalanx_tensor::{DType, Device, Tensor};

use super::{
    CrossEntropy, cross_entropy, cross_entropy_backward, cross_entropy_backward_over,
    cross_entropy_backward_part, cross_entropy_items, cross_entropy_reduce, cross_entropy_targets,
};
use crate::Reduction;
use crate::ops::cast;
use crate::testing::{FLOATS, assert_close, floats, make, tolerance, values};

const CLASSES: usize = 37;

fn config(weight: Option<Tensor>, label_smoothing: f64, reduction: Reduction) -> CrossEntropy {
    CrossEntropy { weight, ignore_index: 3, label_smoothing, reduction, scale: 0.5, wide: false }
}

/// Each item's loss and gradient, from the formula.
fn twin(x: &[f64], y: usize, w: &[f64], s: f64) -> (f64, Vec<f64>) {
    let max = x.iter().copied().fold(f64::MIN, f64::max);
    let sum: f64 = x.iter().map(|x| (x - max).exp()).sum();
    let log_p = |c: usize| x[c] - max - sum.ln();
    let q = |c: usize| s / x.len() as f64 * w[c] + if c == y { (1.0 - s) * w[y] } else { 0.0 };
    let all: f64 = (0..x.len()).map(q).sum();
    let loss = (0..x.len()).map(|c| -q(c) * log_p(c)).sum();
    (loss, (0..x.len()).map(|c| all * log_p(c).exp() - q(c)).collect())
}

#[test]
fn loss_and_gradient_equal_the_formula() {
    let targets: Vec<i64> = (0..10).map(|i| [5, 3, 36, 0, 3, 7, 7, 20, 1, 30][i]).collect();
    let target = Tensor::from_slice(&targets, &[2, 5], Device::CPU).unwrap();
    for dtype in FLOATS {
        let x = make(&[2, CLASSES, 5], dtype, &floats(-4.0, 9.0));
        let rows = values(&x.transpose(1, 2).unwrap());
        for (weighted, s) in [(false, 0.0), (true, 0.0), (false, 0.25), (true, 0.25)] {
            let weight = weighted.then(|| make(&[CLASSES], dtype, &floats(0.5, 2.0)));
            let w = weight.as_ref().map_or(vec![1.0; CLASSES], values);
            for reduction in [Reduction::None, Reduction::Mean, Reduction::Sum] {
                let config = config(weight.clone(), s, reduction);
                let (loss, stats) = cross_entropy(&x, &target, &config).unwrap();
                let dy = make(loss.shape(), dtype, &floats(0.5, 1.5));
                let dx = cross_entropy_backward(&x, &target, &stats, &dy, &config).unwrap();
                assert_eq!(dx.shape(), x.shape());
                let counted = || targets.iter().filter(|&&y| y != 3);
                let total: f64 = counted().map(|&y| w[y as usize]).sum();
                let factor = if reduction == Reduction::Mean { 0.5 / total } else { 0.5 };
                let (dys, mut sum, mut each) = (values(&dy), 0.0, Vec::new());
                for (item, got) in values(&dx.transpose(1, 2).unwrap()).chunks(CLASSES).enumerate() {
                    let y = targets[item] as usize;
                    let (item_loss, slope) = twin(&rows[item * CLASSES..][..CLASSES], y, &w, s);
                    let counts = if y == 3 { 0.0 } else { factor };
                    sum += item_loss * counts;
                    each.push(item_loss * counts);
                    let dy = dys[if reduction == Reduction::None { item } else { 0 }];
                    got.iter().zip(slope).for_each(|(&g, want)| {
                        assert_close(g, want * counts * dy, 4.0 * tolerance(dtype));
                    });
                }
                let want = if reduction == Reduction::None { each } else { vec![sum] };
                values(&loss).iter().zip(want).for_each(|(&g, w)| assert_close(g, w, 4.0 * tolerance(dtype)));
                let q = values(&cross_entropy_targets(&x, &target, &config).unwrap());
                assert_eq!(q.len(), x.numel());
            }
        }
    }
}

#[test]
fn parts_have_the_bits_of_the_whole() {
    let targets: Vec<i64> = (0..33).map(|i| if i % 7 == 3 { 3 } else { i * 5 % CLASSES as i64 }).collect();
    let target = Tensor::from_slice(&targets, &[33], Device::CPU).unwrap();
    let cuts = |len: usize, at: &[usize]| -> Vec<std::ops::Range<usize>> {
        let ends = at.iter().copied().chain([len]);
        [0].into_iter().chain(at.iter().copied()).zip(ends).map(|(start, end)| start..end).collect()
    };
    for (dtype, weighted, s, wide) in FLOATS.into_iter().flat_map(|dtype| {
        [
            (dtype, false, 0.0, false),
            (dtype, false, 0.0, true),
            (dtype, true, 0.25, false),
            (dtype, false, 0.25, true),
        ]
    }) {
        let x = make(&[33, CLASSES], dtype, &floats(-4.0, 9.0));
        let weight = weighted.then(|| make(&[CLASSES], dtype, &floats(0.5, 2.0)));
        for reduction in [Reduction::None, Reduction::Mean, Reduction::Sum] {
            let config = CrossEntropy { wide, ..config(weight.clone(), s, reduction) };
            let (loss, stats) = cross_entropy(&x, &target, &config).unwrap();
            let dy = make(loss.shape(), loss.dtype(), &floats(0.5, 1.5));
            let dx = cross_entropy_backward(&x, &target, &stats, &dy, &config).unwrap();
            for rows in [cuts(33, &[]), cuts(33, &[1, 20]), cuts(33, &[16])] {
                let (mut losses, mut kept) = (Vec::new(), Vec::new());
                for items in rows {
                    let part = x.narrow(0, items.start, items.len()).unwrap();
                    let (of_items, stats) = cross_entropy_items(&part, &target, items, &config).unwrap();
                    losses.extend(values(&of_items));
                    kept.extend(values(&stats));
                }
                let losses = Tensor::from_slice(&losses, &[33], Device::CPU).unwrap();
                let whole = cross_entropy_reduce(&losses, &target, (dtype, CLASSES), &config).unwrap();
                assert_eq!((values(&whole), whole.dtype()), (values(&loss), loss.dtype()));
                assert_eq!(kept, values(&stats));
            }
            for columns in [cuts(CLASSES, &[]), cuts(CLASSES, &[1, 8, 36]), cuts(CLASSES, &[20])] {
                for columns in columns {
                    let part = x.narrow(1, columns.start, columns.len()).unwrap();
                    let want = values(&dx.narrow(1, columns.start, columns.len()).unwrap());
                    for part in [part.clone(), part.copy().unwrap()] {
                        let at = (columns.start, CLASSES);
                        let got = cross_entropy_backward_part(part, at, [&target, &stats, &dy], &config);
                        assert_eq!(values(&got.unwrap()), want, "{dtype} {columns:?}");
                    }
                }
            }
        }
    }
    let x = make(&[2, CLASSES], DType::F32, &floats(-4.0, 9.0));
    let error = cross_entropy_items(&x, &target, 32..34, &CrossEntropy::default()).unwrap_err().to_string();
    assert!(error.starts_with("cross_entropy_items: ") && error.contains("32..34"), "{error}");
    let wrong = Tensor::from_slice(&[0i64, 99], &[2], Device::CPU).unwrap();
    let one = x.narrow(0, 0, 1).unwrap();
    let error = cross_entropy_items(&one, &wrong, 1..2, &CrossEntropy::default()).unwrap_err().to_string();
    assert!(error.contains("99 (item 1)"), "{error}");
}

#[test]
fn halves_give_what_they_give_widened_and_a_gradient_of_their_own() {
    let target = Tensor::from_slice(&[5i64, 3, 36, 0, 7, 20], &[2, 3], Device::CPU).unwrap();
    for dtype in [DType::BF16, DType::F16] {
        let x = make(&[2, CLASSES, 3], dtype, &floats(-4.0, 9.0));
        let widened = cast(&x, DType::F32).unwrap();
        for reduction in [Reduction::None, Reduction::Mean, Reduction::Sum] {
            for s in [0.0, 0.25] {
                let narrow = config(None, s, reduction);
                let wide = CrossEntropy { wide: true, ..narrow.clone() };
                let (want, want_stats) = cross_entropy(&widened, &target, &narrow).unwrap();
                let (loss, stats) = cross_entropy(&x, &target, &wide).unwrap();
                assert_eq!(loss.dtype(), DType::F32);
                assert_eq!(values(&loss), values(&want));
                assert_eq!(values(&stats), values(&want_stats));
                let dy = make(loss.shape(), DType::F32, &floats(0.5, 1.5));
                let dx = cross_entropy_backward(&x, &target, &stats, &dy, &wide).unwrap();
                let want = cross_entropy_backward(&widened, &target, &want_stats, &dy, &narrow).unwrap();
                assert_eq!(dx.dtype(), dtype);
                assert_eq!(values(&dx), values(&cast(&want, dtype).unwrap()));
                let q = cross_entropy_targets(&x, &target, &wide).unwrap();
                assert_eq!(values(&q), values(&cross_entropy_targets(&widened, &target, &narrow).unwrap()));
                let error = cross_entropy_backward(&x, &target, &stats, &cast(&dy, dtype).unwrap(), &wide);
                assert!(error.unwrap_err().to_string().contains("f32"));
            }
        }
    }
}

#[test]
fn a_gradient_is_written_over_logits_that_nobody_else_has() {
    let targets: Vec<i64> = (0..9).map(|i| [5, 3, 36, 0, 3, 7, 7, 20, 1][i]).collect();
    let target = Tensor::from_slice(&targets, &[9], Device::CPU).unwrap();
    for dtype in FLOATS {
        let x = make(&[9, CLASSES], dtype, &floats(-4.0, 9.0));
        for (weighted, s) in [(false, 0.0), (true, 0.0), (false, 0.25), (true, 0.25)] {
            let weight = weighted.then(|| make(&[CLASSES], dtype, &floats(0.5, 2.0)));
            let config = config(weight, s, Reduction::Sum);
            let (loss, stats) = cross_entropy(&x, &target, &config).unwrap();
            let dy = make(loss.shape(), dtype, &floats(0.5, 1.5));
            let want = values(&cross_entropy_backward(&x, &target, &stats, &dy, &config).unwrap());
            let over = |x| cross_entropy_backward_over(x, &target, &stats, &dy, &config).unwrap();
            let sole = x.copy().unwrap();
            let place = |x: &Tensor| std::ptr::from_ref(x.storage()).addr();
            let (before, dx) = (place(&sole), over(sole));
            assert_eq!((values(&dx), place(&dx)), (want.clone(), before), "{dtype}");
            let kept = values(&x);
            assert_eq!((values(&over(x.clone())), values(&x)), (want.clone(), kept));
            let strided = x.transpose(0, 1).unwrap().copy().unwrap().transpose(0, 1).unwrap();
            assert_eq!(values(&over(strided)), want);
            let wrong = make(&[2], dtype, &|_| 0.0);
            assert!(
                cross_entropy_backward_over(x.copy().unwrap(), &target, &stats, &wrong, &config).is_err()
            );
        }
    }
}

#[test]
fn huge_logits_lose_nothing_and_a_mean_of_nothing_is_nan() {
    let x = make(&[2, 3], DType::F32, &|i| [10000.0, 9999.0, -1e30, 3e4, -3e4, 3e4][i]);
    let target = |t: &[i64]| Tensor::from_slice(t, &[2], Device::CPU).unwrap();
    let none = CrossEntropy { reduction: Reduction::None, ..CrossEntropy::default() };
    let (loss, _) = cross_entropy(&x, &target(&[1, 0]), &none).unwrap();
    assert_close(values(&loss)[0], 1.0 + (1.0 + (-1f64).exp()).ln(), 1e-6);
    assert_close(values(&loss)[1], 2f64.ln(), 1e-6);
    let ignored = target(&[-100, -100]);
    let mean = CrossEntropy::default();
    let (loss, stats) = cross_entropy(&x, &ignored, &mean).unwrap();
    assert!(values(&loss)[0].is_nan());
    let dy = make(&[], DType::F32, &|_| 1.0);
    let dx = cross_entropy_backward(&x, &ignored, &stats, &dy, &mean).unwrap();
    assert_eq!(values(&dx), vec![0.0; 6]);
}

#[test]
fn a_row_of_any_length_equals_the_formula_wherever_its_largest_element_lies() {
    for classes in [1usize, 7, 33, 129, 2048, 2049, 5000] {
        let wave = |i: usize| (i as f64 * 0.7).sin();
        let end = classes as f64;
        let rows: [&dyn Fn(usize) -> f64; 5] = [
            &wave,
            &|i| 90.0 * i as f64 / end + wave(i),
            &|i| -90.0 * i as f64 / end + wave(i),
            &|i| if i < classes / 2 { f64::NEG_INFINITY } else { wave(i) },
            &|i| if i == classes / 2 { 1e30 } else { wave(i) - 1e30 },
        ];
        for dtype in [DType::F32, DType::F64] {
            let x = make(&[rows.len(), classes], dtype, &|i| rows[i / classes](i % classes));
            let target = Tensor::from_slice(&[classes as i64 - 1; 5], &[rows.len()], Device::CPU).unwrap();
            let none = CrossEntropy { reduction: Reduction::None, ..CrossEntropy::default() };
            let (loss, stats) = cross_entropy(&x, &target, &none).unwrap();
            let dx = cross_entropy_backward(&x, &target, &stats, &loss, &none).unwrap();
            let (loss, dx) = (values(&loss), values(&dx));
            for (i, x) in values(&x).chunks(classes).enumerate() {
                let max = x.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                let sum: f64 = x.iter().map(|x| (x - max).exp()).sum();
                assert_close(loss[i], max - x[classes - 1] + sum.ln(), 8.0 * tolerance(dtype));
                for (c, &got) in dx[i * classes..][..classes].iter().enumerate() {
                    let p = (x[c] - max).exp() / sum - if c == classes - 1 { 1.0 } else { 0.0 };
                    assert_close(got, p * loss[i], 8.0 * tolerance(dtype));
                }
            }
        }
    }
}

#[test]
fn a_row_without_a_finite_largest_element_gives_nan() {
    for lost in [f64::NEG_INFINITY, f64::INFINITY, f64::NAN] {
        for all in [true, false] {
            if !all && lost == f64::NEG_INFINITY {
                continue;
            }
            let x = make(&[1, 5000], DType::F32, &|i| if all || i == 77 { lost } else { 1.0 });
            let target = Tensor::from_slice(&[3i64], &[1], Device::CPU).unwrap();
            let (loss, stats) = cross_entropy(&x, &target, &CrossEntropy::default()).unwrap();
            let dx = cross_entropy_backward(&x, &target, &stats, &loss, &CrossEntropy::default()).unwrap();
            assert!(values(&loss)[0].is_nan() && values(&dx)[3].is_nan(), "{lost} {all}");
        }
    }
}

#[test]
fn a_target_that_is_no_class_is_named() {
    let x = make(&[2, 3], DType::F32, &|_| 0.0);
    for wrong in [3i64, -1] {
        let target = Tensor::from_slice(&[0, wrong], &[2], Device::CPU).unwrap();
        let error = cross_entropy(&x, &target, &CrossEntropy::default()).map(|_| ()).unwrap_err().to_string();
        assert!(error.contains(&format!("target {wrong} (item 1)")), "{error}");
    }
}

#[test]
fn images_have_the_bits_of_the_same_items_with_classes_last() {
    for dtype in FLOATS {
        for [n, classes, places] in [[2, 7, 33], [3, 129, 8], [1, 70, 300], [2, 3, 5000]] {
            let last = make(&[n, places, classes], dtype, &floats(-4.0, 4.0));
            let transposed = last.transpose(1, 2).unwrap();
            let images = transposed.copy().unwrap();
            let targets: Vec<i64> =
                (0..n * places).map(|i| if i % 5 == 0 { -100 } else { (i * 3 % classes) as i64 }).collect();
            let target = Tensor::from_slice(&targets, &[n, places], phalanx_tensor::Device::CPU).unwrap();
            for reduction in [Reduction::Mean, Reduction::None] {
                let config = CrossEntropy { reduction, ..CrossEntropy::default() };
                let results = [&transposed, &images].map(|x| {
                    let (loss, stats) = cross_entropy(x, &target, &config).unwrap();
                    let dx = cross_entropy_backward(x, &target, &stats, &loss, &config).unwrap();
                    (values(&loss), values(&stats), values(&dx))
                });
                assert!(results[0] == results[1], "{dtype} {n} {classes} {places}");
            }
        }
    }
}
