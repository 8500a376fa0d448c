//! Tests: held against the formula in f64.

use phalanx_tensor::{DType, Tensor};

use super::{layer_norm, layer_norm_backward, rms_norm, rms_norm_backward};
use crate::ops::{add, add_layer_norm, add_layer_norm_backward, add_rms_norm, add_rms_norm_backward, cast};
use crate::testing::{FLOATS, assert_close, floats, make, tolerance, values};

/// Rows normalised in f64, straight from the formula.
fn twin(x: &[f64], w: &[f64], b: Option<&[f64]>, eps: f64) -> (f64, f64, Vec<f64>) {
    let n = x.len() as f64;
    let mean = if b.is_some() { x.iter().sum::<f64>() / n } else { 0.0 };
    let var = x.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / n;
    let inverse = 1.0 / (var + eps).sqrt();
    let y = x.iter().enumerate().map(|(i, x)| (x - mean) * inverse * w[i] + b.map_or(0.0, |b| b[i]));
    (mean, inverse, y.collect())
}

#[test]
fn forward_and_backward_equal_the_formula() {
    for dtype in FLOATS {
        for (rows, width) in [(1, 1), (3, 7), (70, 33), (2, 1000), (200, 130)] {
            for centred in [true, false] {
                check(dtype, rows, width, centred);
            }
        }
    }
}

fn check(dtype: DType, rows: usize, width: usize, centred: bool) {
    let x = make(&[width, rows], dtype, &floats(-2.0, 3.0)).transpose(0, 1).unwrap();
    let dy = make(&[rows, width], dtype, &floats(-1.0, 1.5));
    let [w, b] = [floats(0.5, 2.0), floats(-1.0, 1.0)].map(|f| make(&[width], dtype, &f));
    let run = |x: &Tensor| {
        if centred {
            let (y, stats) = layer_norm(x, &[width], Some(&w), Some(&b), 1e-3).unwrap();
            (y, layer_norm_backward(x, &stats, &[width], Some(&w), &dy, [true; 3]).unwrap())
        } else {
            let (y, stats) = rms_norm(x, &[width], Some(&w), 1e-3).unwrap();
            let [dx, dw] = rms_norm_backward(x, &stats, &[width], Some(&w), &dy, [true; 2]).unwrap();
            (y, [dx, dw, None])
        }
    };
    let (y, [dx, dw, db]) = run(&x);
    let (again, _) = run(&x.contiguous().unwrap());
    assert_eq!(values(&y), values(&again), "bits do not depend on strides");
    let (xs, ys, ws, bs, gs) = (values(&x), values(&y), values(&w), values(&b), values(&dy));
    let dxs = values(&dx.unwrap());
    let (mut dw_want, mut db_want) = (vec![0.0; width], vec![0.0; width]);
    let near = |got: f64, want: f64| assert_close(got, want, 8.0 * tolerance(dtype));
    for r in 0..rows {
        let at = r * width..(r + 1) * width;
        let (x, dy) = (&xs[at.clone()], &gs[at.clone()]);
        let (mean, inverse, y_want) = twin(x, &ws, centred.then_some(&bs), 1e-3);
        let hat: Vec<f64> = x.iter().map(|x| (x - mean) * inverse).collect();
        let g: Vec<f64> = dy.iter().zip(&ws).map(|(dy, w)| dy * w).collect();
        let c1 = if centred { g.iter().sum::<f64>() / width as f64 } else { 0.0 };
        let c2 = g.iter().zip(&hat).map(|(g, h)| g * h).sum::<f64>() / width as f64;
        for i in 0..width {
            near(ys[r * width + i], y_want[i]);
            near(dxs[r * width + i], inverse * (g[i] - c1 - hat[i] * c2));
            dw_want[i] += dy[i] * hat[i];
            db_want[i] += dy[i];
        }
    }
    values(&dw.unwrap()).iter().zip(&dw_want).for_each(|(&got, &want)| near(got, want));
    db.iter().for_each(|db| values(db).iter().zip(&db_want).for_each(|(&got, &want)| near(got, want)));
}

#[test]
fn each_gradient_has_the_bits_alone_that_it_has_beside_the_others() {
    for (rows, width) in [(0, 5), (3, 0), (1, 1), (3, 7), (70, 33), (5, 129), (300, 1024)] {
        let x = make(&[rows, width], DType::F32, &floats(-2.0, 3.0));
        let (w, dy) = (
            make(&[width], DType::F32, &floats(0.5, 2.0)),
            make(&[rows, width], DType::F32, &floats(-1.0, 1.5)),
        );
        for weight in [None, Some(&w)] {
            let (_, stats) = layer_norm(&x, &[width], weight, None, 1e-3).unwrap();
            let run = |needs| layer_norm_backward(&x, &stats, &[width], weight, &dy, needs).unwrap();
            let bits = |t: &Tensor| values(t).into_iter().map(f64::to_bits).collect::<Vec<_>>();
            let all = run([true; 3]);
            for choice in 0..8 {
                let needs = [0, 1, 2].map(|i| choice >> i & 1 == 1);
                for ((got, want), needed) in run(needs).iter().zip(&all).zip(needs) {
                    assert_eq!(got.is_some(), needed);
                    got.iter().zip(want).for_each(|(got, want)| assert_eq!(bits(got), bits(want)));
                }
            }
        }
    }
}

#[test]
fn rows_together_have_the_bits_of_each_alone() {
    for dtype in FLOATS {
        for (rows, width) in [(5, 1), (300, 7), (70, 32), (40, 33), (9, 129), (3, 1025)] {
            let x = make(&[width, rows], dtype, &floats(-2.0, 3.0)).transpose(0, 1).unwrap();
            let dy = make(&[rows, width], dtype, &floats(-1.0, 1.5));
            let [w, b] = [floats(0.5, 2.0), floats(-1.0, 1.0)].map(|f| make(&[width], dtype, &f));
            let run = |first: usize, count: usize| {
                let [x, dy] = [&x, &dy].map(|t| t.narrow(0, first, count).unwrap());
                let (y, stats) = layer_norm(&x, &[width], Some(&w), Some(&b), 1e-3).unwrap();
                let needs = [true, false, false];
                let [dx, ..] = layer_norm_backward(&x, &stats, &[width], Some(&w), &dy, needs).unwrap();
                [values(&y), values(&dx.unwrap())]
            };
            let all = run(0, rows);
            for row in [0, rows / 2, rows - 1] {
                for (all, alone) in all.iter().zip(run(row, 1)) {
                    assert!(all[row * width..][..width] == alone, "{dtype} [{rows}, {width}] {row}");
                }
            }
        }
    }
}

#[test]
fn a_sum_and_its_norm_are_what_the_two_give_one_after_the_other() {
    for dtype in FLOATS {
        for (rows, width) in [(0, 5), (3, 0), (1, 1), (3, 7), (70, 33), (5, 129), (2, 9001)] {
            for strided in [false, true] {
                check_added([dtype; 2], rows, width, strided);
                let other = if dtype == DType::F32 { DType::BF16 } else { DType::F32 };
                check_added([dtype, other], rows, width, strided);
            }
        }
    }
}

/// A stream and a branch of these dtypes, against casts of their own.
fn check_added([dtype, branch]: [DType; 2], rows: usize, width: usize, strided: bool) {
    let operand = |dtype, low, high| match strided {
        true => make(&[width, rows], dtype, &floats(low, high)).transpose(0, 1).unwrap(),
        false => make(&[rows, width], dtype, &floats(low, high)),
    };
    let (x, residual) = (operand(dtype, -2.0, 3.0), operand(branch, -0.5, 0.25));
    let (dy, dsum) = (operand(branch, -1.0, 1.5), operand(dtype, -2.0, 1.0));
    let wide_dy = cast(&dy, dtype).unwrap();
    let [w, b] = [floats(0.5, 2.0), floats(-1.0, 1.0)].map(|f| make(&[width], dtype, &f));
    let (shape, w) = (&[width], Some(&w));
    let want = add(&x, &cast(&residual, dtype).unwrap()).unwrap();
    for centred in [true, false] {
        let ([sum, y, stats], (want_y, want_stats)) = match centred {
            true => (
                add_layer_norm(&x, &residual, shape, w, Some(&b), 1e-3).unwrap(),
                layer_norm(&want, shape, w, Some(&b), 1e-3).unwrap(),
            ),
            false => (
                add_rms_norm(&x, &residual, shape, w, 1e-3).unwrap(),
                rms_norm(&want, shape, w, 1e-3).unwrap(),
            ),
        };
        let want_y = cast(&want_y, branch).unwrap();
        assert_eq!((sum.dtype(), y.dtype()), (dtype, branch));
        let bits = |t: &Tensor| values(t).into_iter().map(f64::to_bits).collect::<Vec<_>>();
        for (got, want) in [(&sum, &want), (&y, &want_y), (&stats, &want_stats)] {
            assert_eq!(bits(got), bits(want), "{dtype} [{rows}, {width}] strided {strided}");
        }
        let ([dx, dresidual, dw, db], [part, want_dw, want_db]) = match centred {
            true => (
                add_layer_norm_backward(&sum, &stats, shape, w, (&dy, Some(&dsum)), [true; 4]).unwrap(),
                layer_norm_backward(&want, &stats, shape, w, &wide_dy, [true; 3]).unwrap(),
            ),
            false => {
                let [dx, dresidual, dw] =
                    add_rms_norm_backward(&sum, &stats, shape, w, (&dy, Some(&dsum)), [true; 3]).unwrap();
                let [part, want_dw] =
                    rms_norm_backward(&want, &stats, shape, w, &wide_dy, [true; 2]).unwrap();
                ([dx, dresidual, dw, None], [part, want_dw, None])
            }
        };
        assert_eq!(dw.map(|t| bits(&t)), want_dw.map(|t| bits(&t)));
        assert_eq!(db.map(|t| bits(&t)), want_db.map(|t| bits(&t)));
        let (dx, want) = (dx.unwrap(), add(&part.unwrap(), &dsum).unwrap());
        assert_eq!(bits(&dresidual.unwrap()), bits(&cast(&dx, branch).unwrap()));
        if matches!(dtype, DType::F32 | DType::F64) {
            assert_eq!(bits(&dx), bits(&want), "{dtype} [{rows}, {width}] strided {strided}");
        }
        // Halves are rounded once in the place of twice.
        values(&dx)
            .iter()
            .zip(values(&want))
            .for_each(|(&got, want)| assert_close(got, want, 2.0 * tolerance(dtype)));
    }
}

#[test]
fn a_small_spread_beside_a_large_mean_keeps_its_digits() {
    let x = make(&[2, 300], DType::F32, &|i| 4096.0 + (i % 7) as f64 / 1024.0);
    let (y, _) = layer_norm(&x, &[300], None, None, 1e-12).unwrap();
    let (ones, zeros) = (vec![1.0; 300], vec![0.0; 300]);
    for (x, y) in values(&x).chunks(300).zip(values(&y).chunks(300)) {
        let (_, _, want) = twin(x, &ones, Some(&zeros), 1e-12);
        y.iter().zip(want).for_each(|(&got, want)| assert_close(got, want, 1e-6));
    }
}

#[test]
fn errors_name_both_shapes() {
    let x = make(&[2, 3], DType::F32, &|_| 0.0);
    let error = layer_norm(&x, &[2], None, None, 1e-5).map(|_| ()).unwrap_err().to_string();
    assert!(error.contains("layer_norm") && error.contains("[2, 3]") && error.contains("[2]"), "{error}");
    let other = make(&[3], DType::F32, &|_| 0.0);
    let error = add_layer_norm(&x, &other, &[3], None, None, 1e-5).map(|_| ()).unwrap_err().to_string();
    assert!(error.contains("add_layer_norm") && error.contains("residual of shape [3]"), "{error}");
}
