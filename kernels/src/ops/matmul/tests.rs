//! Products against the triple loop in f64.

use phalanx_tensor::{Device, Dims, Tensor, broadcast_shapes};

use super::*;
use crate::ops::{accumulate_, add, cast, cat, gelu, neg};
use crate::testing::{FLOATS, assert_close, floats, make, values};

/// `[.., m, k]` times `[.., k, n]`, element by element.
fn twin(a: &Tensor, b: &Tensor) -> Vec<f64> {
    let (ar, br) = (a.rank() - 2, b.rank() - 2);
    let batch = broadcast_shapes("twin", &a.shape()[..ar], &b.shape()[..br]).unwrap();
    let (m, k, n) = (a.shape()[ar], a.shape()[ar + 1], b.shape()[br + 1]);
    let full = |t: &Tensor, rows: usize, cols: usize| {
        values(&t.broadcast_to(&[&batch[..], &[rows, cols]].concat()).unwrap())
    };
    let (a, b) = (full(a, m, k), full(b, k, n));
    let mut out = Vec::new();
    for item in 0..batch.iter().product() {
        for i in 0..m {
            for j in 0..n {
                let term = |l: usize| a[(item * m + i) * k + l] * b[(item * k + l) * n + j];
                out.push((0..k).map(term).sum());
            }
        }
    }
    out
}

fn tolerance(dtype: phalanx_tensor::DType) -> f64 {
    10.0 * crate::testing::tolerance(dtype)
}

#[test]
fn equals_the_triple_loop_for_every_batch_and_dtype() {
    let shapes: &[(&[usize], &[usize])] = &[
        (&[3, 4], &[4, 5]),
        (&[1, 1], &[1, 1]),
        (&[33, 17], &[17, 40]),
        (&[2, 3, 4], &[4, 5]),
        (&[3, 4], &[2, 4, 5]),
        (&[2, 1, 3, 4], &[5, 4, 2]),
        (&[2, 3, 1, 7], &[2, 1, 7, 1]),
        (&[0, 3, 4], &[4, 5]),
        (&[2, 3, 0], &[2, 0, 5]),
        (&[3, 0], &[0, 0]),
    ];
    for &(a, b) in shapes {
        for dtype in FLOATS {
            let (a, b) = (make(a, dtype, &floats(-1.0, 1.0)), make(b, dtype, &floats(-2.0, 1.0)));
            let c = matmul(&a, &b).unwrap();
            assert_eq!(c.dtype(), dtype);
            for (got, want) in values(&c).into_iter().zip(twin(&a, &b)) {
                assert_close(got, want, tolerance(dtype));
            }
        }
    }
}

#[test]
fn bits_do_not_depend_on_strides_or_batching() {
    let wide = |shape: &[usize]| make(shape, phalanx_tensor::DType::F32, &floats(-1.0, 1.0));
    let dense = |t: &Tensor| t.copy().unwrap();
    let bits = |t: Tensor| t.to_vec::<f32>().unwrap();
    // Heads of [batch, time, heads, width]: permuted, never merged into one batch stride.
    let (q, k) = (wide(&[2, 9, 3, 8]).permute(&[0, 2, 1, 3]).unwrap(), wide(&[2, 7, 3, 8]));
    let k = k.permute(&[0, 2, 3, 1]).unwrap();
    assert_eq!(bits(matmul(&q, &k).unwrap()), bits(matmul(&dense(&q), &dense(&k)).unwrap()));
    // Last positions only: rows far apart.
    let x = wide(&[5, 4, 8]).narrow(1, 3, 1).unwrap();
    let w = wide(&[6, 8]).transpose(0, 1).unwrap();
    assert_eq!(bits(matmul(&x, &w).unwrap()), bits(matmul(&dense(&x), &dense(&w)).unwrap()));
    // A batch is its items.
    let (a, b) = (wide(&[4, 5, 16]), wide(&[4, 16, 3]));
    let all = matmul(&a, &b).unwrap();
    for i in 0..4 {
        let one = matmul(&a.select(0, i).unwrap(), &b.select(0, i).unwrap()).unwrap();
        assert_eq!(bits(one), bits(all.select(0, i).unwrap()));
    }
}

#[test]
fn vectors_lose_their_dimension() {
    let x = |shape: &[usize]| make(shape, phalanx_tensor::DType::F64, &floats(-1.0, 1.0));
    let shape = |a: &[usize], b: &[usize]| Dims::from_slice(matmul(&x(a), &x(b)).unwrap().shape());
    assert_eq!(&shape(&[4], &[4])[..], &[0usize; 0]);
    assert_eq!(&shape(&[3, 4], &[4])[..], &[3]);
    assert_eq!(&shape(&[4], &[2, 4, 5])[..], &[2, 5]);
    assert_eq!(&shape(&[2, 3, 4], &[4])[..], &[2, 3]);
}

#[test]
fn accumulating_has_the_bits_of_adding_the_product() {
    for dtype in FLOATS {
        let (a, b) = (make(&[7, 33], dtype, &floats(-1.0, 1.0)), make(&[33, 9], dtype, &floats(-1.0, 1.0)));
        let start = make(&[7, 9], dtype, &floats(-3.0, 3.0));
        let (mut fused, mut apart) = (start.copy().unwrap(), start.copy().unwrap());
        matmul_accumulate_(&mut fused, &a, &b).unwrap();
        accumulate_(&mut apart, &matmul(&a, &b).unwrap()).unwrap();
        assert_eq!(values(&fused), values(&apart));
    }
}

#[test]
fn a_product_whose_steps_come_in_parts_has_the_bits_of_the_whole() {
    let cases = FLOATS.into_iter().flat_map(|dtype| [2, 9, 129].map(move |n| (dtype, n)));
    for ((dtype, columns), vanishes) in cases.flat_map(|case| [false, true].map(move |v| (case, v))) {
        let mut a = make(&[7, 130], dtype, &floats(-1.0, 1.0));
        let mut b = make(&[130, columns], dtype, &floats(-1.0, 1.0));
        // Of a sum that vanishes the order is left, which halves otherwise round away.
        if vanishes {
            let (x, y) = (a.narrow(1, 0, 65).unwrap(), b.narrow(0, 0, 65).unwrap());
            (a, b) = (cat(&[&x, &x], 1).unwrap(), cat(&[&y, &neg(&y).unwrap()], 0).unwrap());
        }
        let whole = matmul(&a, &b).unwrap();
        for parts in [&[130][..], &[64, 66], &[32, 96, 2], &[2, 100, 28]] {
            let anywhere = parts[..parts.len() - 1].iter().any(|len| len % PART_STEPS != 0);
            if anywhere && dtype == DType::BF16 && has_tiles() {
                continue;
            }
            let mut sum = Tensor::zeros(&[7, columns], wide_dtype(dtype), Device::CPU).unwrap();
            let mut at = 0;
            for &len in parts {
                let (a, b) = (a.narrow(1, at, len).unwrap(), b.narrow(0, at, len).unwrap());
                matmul_continue_(&mut sum, &a, &b).unwrap();
                at += len;
            }
            assert_eq!(values(&cast(&sum, dtype).unwrap()), values(&whole), "{dtype} {columns} {parts:?}");
        }
    }
    let a = make(&[2, 2], DType::BF16, &floats(-1.0, 1.0));
    let error = matmul_continue_(&mut a.copy().unwrap(), &a, &a).unwrap_err().to_string();
    assert!(error.starts_with("matmul_continue: ") && error.contains("f32"), "{error}");
}

#[test]
fn a_result_that_exists_gets_the_bits_of_a_new_one() {
    for dtype in FLOATS {
        let (a, b) =
            (make(&[3, 7, 33], dtype, &floats(-1.0, 1.0)), make(&[33, 9], dtype, &floats(-1.0, 1.0)));
        let mut c = make(&[3, 7, 9], dtype, &floats(-3.0, 3.0));
        matmul_into(&mut c, &a, &b).unwrap();
        assert_eq!(values(&c), values(&matmul(&a, &b).unwrap()));
        for shape in [&[7, 9][..], &[3, 9, 7]] {
            let mut other = make(shape, dtype, &floats(-3.0, 3.0));
            let message = matmul_into(&mut other, &a, &b).unwrap_err().to_string();
            assert!(message.contains("matmul_into") && message.contains(&format!("{shape:?}")), "{message}");
        }
        let square = make(&[4, 4], dtype, &floats(-1.0, 1.0));
        assert!(matmul_into(&mut square.clone(), &square, &square).is_err());
    }
}

#[test]
fn what_does_not_fit_is_refused_by_name() {
    let x = |shape: &[usize]| make(shape, phalanx_tensor::DType::F32, &floats(-1.0, 1.0));
    for (a, b) in [(&[3, 4][..], &[3, 4][..]), (&[], &[3]), (&[2, 3, 4], &[3, 4, 5])] {
        let message = matmul(&x(a), &x(b)).unwrap_err().to_string();
        assert!(message.contains("matmul") && message.contains(&format!("{b:?}")), "{message}");
    }
    let half = cast(&x(&[4, 2]), phalanx_tensor::DType::BF16).unwrap();
    assert!(matmul(&x(&[3, 4]), &half).unwrap_err().to_string().contains("bf16"));
}

#[test]
fn a_wide_sum_takes_the_unrounded_product_of_halves() {
    for dtype in [phalanx_tensor::DType::BF16, phalanx_tensor::DType::F16] {
        let (a, b) = (make(&[7, 33], dtype, &floats(-1.0, 1.0)), make(&[33, 9], dtype, &floats(-1.0, 1.0)));
        let start = make(&[7, 9], phalanx_tensor::DType::F32, &floats(-3.0, 3.0));
        let mut sum = start.copy().unwrap();
        matmul_accumulate_(&mut sum, &a, &b).unwrap();
        for ((got, start), product) in values(&sum).into_iter().zip(values(&start)).zip(twin(&a, &b)) {
            assert_close(got, start + product, 1e-5);
        }
        assert!(matmul_accumulate_(&mut start.copy().unwrap(), &sum, &b).is_err());
    }
}

#[test]
fn an_outer_product_of_halves_is_rounded_once_and_has_no_negative_zero() {
    for dtype in [DType::BF16, DType::F16] {
        for (a, b) in [
            (&[129, 1][..], &[1, 33][..]),
            (&[3, 5, 1], &[3, 1, 70]),
            (&[2, 1, 7, 1], &[3, 1, 129]),
            (&[0, 1], &[1, 5]),
        ] {
            let a = make(a, dtype, &|i| if i % 5 == 0 { 0.0 } else { i as f64 * 0.37 - 9.0 });
            let b = make(b, dtype, &floats(-2.0, 1.0));
            let transposed = a.transpose(-1, -2).unwrap().copy().unwrap().transpose(-1, -2).unwrap();
            let products = twin(&a, &b);
            let exact = make(&[products.len()], dtype, &|i| products[i] + 0.0);
            for a in [a, transposed] {
                let got = values(&matmul(&a, &b).unwrap());
                let bits = |x: Vec<f64>| x.into_iter().map(f64::to_bits).collect::<Vec<_>>();
                assert_eq!(bits(got), bits(values(&exact)));
            }
        }
    }
}

#[test]
fn has_the_bits_of_a_product_and_a_sum() {
    for dtype in FLOATS {
        for shape in [&[17][..], &[1, 17], &[5, 17], &[2, 3, 17], &[0, 17]] {
            let x = make(shape, dtype, &floats(-1.0, 1.0));
            let (w, b) = (make(&[33, 17], dtype, &floats(-1.0, 0.5)), make(&[33], dtype, &floats(-1.0, 2.0)));
            let product = matmul(&x, &w.transpose(0, 1).unwrap()).unwrap();
            assert_eq!(values(&linear(&x, &w, None).unwrap()), values(&product));
            let sum = add(&product, &b).unwrap();
            assert_eq!(values(&linear(&x, &w, Some(&b)).unwrap()), values(&sum));
            for kind in [Gelu::Exact, Gelu::Tanh] {
                let fused = linear_gelu(&x, &w, Some(&b), kind).unwrap();
                assert_eq!(values(&fused), values(&gelu(&sum, kind).unwrap()));
            }
        }
    }
}

#[test]
fn what_linear_does_not_fit_is_refused_by_name() {
    let x = |shape: &[usize]| make(shape, phalanx_tensor::DType::F32, &floats(-1.0, 1.0));
    let message = linear(&x(&[2, 3]), &x(&[4, 5]), None).unwrap_err().to_string();
    assert!(message.contains("linear") && message.contains("[4, 5]"), "{message}");
    assert!(linear(&x(&[2, 3]), &x(&[4, 3]), Some(&x(&[3]))).is_err());
    assert!(linear(&x(&[]), &x(&[4, 3]), None).is_err());
}

#[test]
fn a_weight_in_panels_has_the_bits_of_the_weight() {
    let biased = |dtype, n: usize| [None, Some(make(&[n], dtype, &floats(-1.0, 1.0)))];
    for dtype in FLOATS {
        for (n, k) in [(33, 1), (70, 7), (129, 33), (64, 129), (1000, 48), (257, 600)] {
            let weight = make(&[n, k], dtype, &floats(-1.0, 1.0));
            // As it lies, and as a part of a larger one.
            let parts = cat(&[&weight, &weight], 1).unwrap();
            for weight in [weight.clone(), parts.narrow(1, k, k).unwrap()] {
                let panels = WeightPanels::new(&weight).unwrap().unwrap();
                assert_eq!((panels.shape(), panels.dtype()), ([n, k], dtype));
                let bits = |t: &Tensor| values(t).into_iter().map(f64::to_bits).collect::<Vec<_>>();
                assert_eq!(bits(&panels.values().unwrap()), bits(&weight));
                for shape in [&[k][..], &[1, k], &[3, k], &[2, 5, k], &[70, k], &[0, k]] {
                    let x = make(shape, dtype, &floats(-0.7, 1.3));
                    for bias in biased(dtype, n) {
                        let made = panels.linear(&x, bias.as_ref()).unwrap();
                        let want = linear(&x, &weight, bias.as_ref()).unwrap();
                        assert_eq!(made.shape(), want.shape());
                        assert_eq!(bits(&made), bits(&want), "{dtype} {shape:?} {n} x {k}");
                    }
                }
                let index =
                    Tensor::from_slice(&[0, n as i64 - 1, 5, 5, 32, 31], &[3, 2], Device::CPU).unwrap();
                let (made, want) =
                    (panels.embedding(&index).unwrap(), crate::embedding(&weight, &index).unwrap());
                assert_eq!((made.shape(), bits(&made)), (want.shape(), bits(&want)));
            }
        }
    }
}

#[test]
fn several_weights_in_panels_have_the_bits_of_each() {
    let device = Device::Cpu(831);
    for (threads, dtype) in [1, 2, 5].into_iter().flat_map(|threads| FLOATS.map(|dtype| (threads, dtype))) {
        device.set_threads(threads).unwrap();
        let of = |shape: &[usize]| make(shape, dtype, &floats(-1.0, 1.0)).to_device(device, false).unwrap();
        for k in [7, 129, 1200] {
            let weights = [257, 33, 70, 1001].map(|n| WeightPanels::new(&of(&[n, k])).unwrap().unwrap());
            // A bias that is a part of another tensor, and none.
            let biases = [Some(of(&[2, 257]).select(0, 1).unwrap()), None, Some(of(&[70])), None];
            let maps: Vec<_> = weights.iter().zip(biases.iter().map(Option::as_ref)).collect();
            for shape in [&[k][..], &[1, 1, k], &[3, k], &[0, k], &[71, k], &[2, 36, k]] {
                let x = of(shape);
                let made = WeightPanels::linear_each(&x, &maps).unwrap();
                for ((weight, bias), made) in maps.iter().zip(made) {
                    let want = weight.linear(&x, *bias).unwrap();
                    assert_eq!(made.shape(), want.shape());
                    let bits = |t: &Tensor| values(t).into_iter().map(f64::to_bits).collect::<Vec<_>>();
                    assert_eq!(bits(&made), bits(&want), "{dtype} {shape:?} {:?}", weight.shape());
                }
            }
        }
    }
    assert!(
        WeightPanels::linear_each(&make(&[1, 7], DType::F32, &floats(-1.0, 1.0)), &[]).unwrap().is_empty()
    );
}

#[test]
fn a_weight_in_panels_refuses_what_does_not_fit() {
    let of = |shape: &[usize]| make(shape, DType::F32, &floats(-1.0, 1.0));
    let said = |error: Error| error.to_string();
    assert!(said(WeightPanels::new(&of(&[40])).unwrap_err()).contains("[40]"));
    let numbers = Tensor::zeros(&[40, 2], DType::I64, Device::CPU).unwrap();
    assert!(said(WeightPanels::new(&numbers).unwrap_err()).contains("i64"));
    for small in [[1, 5], [0, 5], [40, 0]] {
        assert!(WeightPanels::new(&of(&small)).unwrap().is_none(), "{small:?}");
    }
    let panels = WeightPanels::new(&of(&[40, 6])).unwrap().unwrap();
    assert!(said(panels.linear(&of(&[2, 5]), None).unwrap_err()).contains("[2, 5]"));
    assert!(said(panels.linear(&of(&[2, 6]), Some(&of(&[39]))).unwrap_err()).contains("[39]"));
    let both = [(&panels, None), (&panels, Some(&of(&[39])))];
    assert!(said(WeightPanels::linear_each(&of(&[1, 6]), &both).unwrap_err()).contains("[39]"));
    let wide = cast(&of(&[2, 6]), DType::F64).unwrap();
    assert!(said(panels.linear(&wide, None).unwrap_err()).contains("f64"));
    assert!(said(WeightPanels::linear_each(&wide, &[(&panels, None); 2]).unwrap_err()).contains("f64"));
    let index = |i: i64| Tensor::from_slice(&[1, i], &[2], Device::CPU).unwrap();
    for wrong in [-1, 40] {
        let error = said(panels.embedding(&index(wrong)).unwrap_err());
        assert!(error.contains(&format!("index {wrong} (item 1)")), "{error}");
    }
}
