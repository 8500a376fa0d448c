//! Tests: held against the formula in f64.

use phalanx_tensor::{DType, Tensor};

use super::{BatchNorm, batch_norm, batch_norm_backward, batch_norm_update_};
use crate::testing::{FLOATS, assert_close, floats, make, tolerance, values};

fn check(dtype: DType, shape: &[usize], training: bool) {
    let (channels, places) = (shape[1], shape[2..].iter().product::<usize>());
    let (x, dy) = (make(shape, dtype, &floats(-2.0, 3.0)), make(shape, dtype, &floats(-1.0, 1.5)));
    let per = |low, high| make(&[channels], dtype, &floats(low, high));
    let (w, b, mut mean, mut var) = (per(0.5, 2.0), per(-1.0, 1.0), per(-0.5, 0.5), per(0.5, 1.5));
    let config = BatchNorm { training, momentum: 0.3, eps: 1e-3 };
    let (old_mean, old_var) = (values(&mean), values(&var));
    let (y, stats) = batch_norm(&x, Some([&mean, &var]), Some(&w), Some(&b), &config).unwrap();
    let grads = batch_norm_backward(&x, &stats, Some(&w), &dy, &config, [true; 3]).unwrap();
    let [dx, dw, db] = grads.map(|g| values(&g.unwrap()));
    if training {
        batch_norm_update_([&mut mean, &mut var], &x, &stats, 0.3).unwrap();
    }
    let (xs, ys, gs, ws, bs) = (values(&x), values(&y), values(&dy), values(&w), values(&b));
    let near = |got: f64, want: f64| assert_close(got, want, 8.0 * tolerance(dtype));
    for c in 0..channels {
        let own: Vec<usize> = (0..xs.len()).filter(|i| i / places % channels == c).collect();
        let n = own.len() as f64;
        let total = |f: &dyn Fn(usize) -> f64| own.iter().map(|&i| f(i)).sum::<f64>();
        let m = if training { total(&|i| xs[i]) / n } else { old_mean[c] };
        let v = if training { total(&|i| (xs[i] - m).powi(2)) / n } else { old_var[c] };
        let r = 1.0 / (v + 1e-3).sqrt();
        let hat = |i: usize| (xs[i] - m) * r;
        let (c1, c2) = (total(&|i| gs[i]), total(&|i| gs[i] * hat(i)));
        near(db[c], c1);
        near(dw[c], c2);
        let own_share = |i: usize| if training { (c1 + hat(i) * c2) / n } else { 0.0 };
        for &i in &own {
            near(ys[i], hat(i) * ws[c] + bs[c]);
            near(dx[i], ws[c] * r * (gs[i] - own_share(i)));
        }
        if training {
            near(values(&mean)[c], 0.7 * old_mean[c] + 0.3 * m);
            near(values(&var)[c], 0.7 * old_var[c] + 0.3 * v * n / (n - 1.0));
        }
    }
}

#[test]
fn every_layout_equals_the_formula_in_and_out_of_training() {
    for dtype in FLOATS {
        for shape in [&[5, 3][..], &[4, 33], &[3, 4, 7], &[2, 3, 4, 5], &[2, 3, 41, 50], &[1, 2, 1031]] {
            check(dtype, shape, true);
            check(dtype, shape, false);
        }
    }
}

#[test]
fn a_single_element_a_channel_has_no_variance() {
    let x = make(&[1, 3], DType::F32, &|_| 1.0);
    assert!(batch_norm(&x, None, None, None, &BatchNorm::default()).is_err());
    let eval = BatchNorm { training: false, ..BatchNorm::default() };
    assert!(batch_norm(&x, None, None, None, &eval).is_err());
}

#[test]
fn halves_that_lie_together_have_the_bits_of_those_that_do_not() {
    for dtype in [DType::BF16, DType::F16] {
        // Lines of channels and of items, whole and in parts, some of which a piece shares with the next.
        for shape in
            [&[40, 100][..], &[3, 5000], &[3, 4, 100], &[5, 3, 900], &[2, 3, 41, 70], &[1, 2, 20_001]]
        {
            let channels = shape[1];
            let per = |low, high| make(&[channels], dtype, &floats(low, high));
            let (w, b, mean, var) = (per(0.5, 2.0), per(-1.0, 1.0), per(-0.5, 0.5), per(0.5, 1.5));
            let x = make(shape, dtype, &floats(-2.0, 3.0));
            let dy = make(shape, dtype, &floats(-1.0, 1.5));
            let transposed =
                |t: &Tensor| t.transpose(0, -1).unwrap().copy().unwrap().transpose(0, -1).unwrap();
            for training in [true, false] {
                let config = BatchNorm { training, ..BatchNorm::default() };
                let run = |x: &Tensor, dy: &Tensor| {
                    let running = Some([&mean, &var]);
                    let (y, stats) = batch_norm(x, running, Some(&w), Some(&b), &config).unwrap();
                    let grads = batch_norm_backward(x, &stats, Some(&w), dy, &config, [true; 3]).unwrap();
                    [values(&y), values(grads[0].as_ref().unwrap())]
                };
                assert_eq!(run(&x, &dy), run(&transposed(&x), &transposed(&dy)), "{dtype} {shape:?}");
            }
        }
    }
}
