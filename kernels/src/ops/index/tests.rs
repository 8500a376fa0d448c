//! Indexing held against loops written from the formulas.

use phalanx_tensor::{DType, Device, Tensor};

use super::*;
use crate::testing::{FLOATS, assert_close, floats, make, tolerance, values};

fn index(shape: &[usize], n: usize) -> Tensor {
    let values: Vec<i64> = (0..shape.iter().product()).map(|i| (i * 7 % 11 % n) as i64).collect();
    Tensor::from_slice(&values, shape, Device::CPU).unwrap()
}

fn transposed(x: &Tensor) -> Tensor {
    let order: Vec<usize> = (0..x.rank()).rev().collect();
    x.permute(&order).unwrap().copy().unwrap().permute(&order).unwrap()
}

#[test]
fn gather_and_scatter_add_equal_their_formulas() {
    for dtype in FLOATS {
        for (shape, dim, at) in
            [(&[3, 5][..], 0, &[6, 4][..]), (&[3, 5], 1, &[2, 9]), (&[2, 3, 4], 1, &[2, 7, 3])]
        {
            let (x, index) = (make(shape, dtype, &floats(-2.0, 2.0)), index(at, shape[dim]));
            let source = make(at, dtype, &floats(-1.0, 3.0));
            let (xs, is, ss) = (values(&x), index.to_vec::<i64>().unwrap(), values(&source));
            let stride = |d: usize| shape[d + 1..].iter().product::<usize>();
            let place = |flat: usize| -> usize {
                let digit = |d: usize| flat / at[d + 1..].iter().product::<usize>() % at[d];
                (0..shape.len())
                    .map(|d| if d == dim { is[flat] as usize } else { digit(d) } * stride(d))
                    .sum()
            };
            let mut sums = xs.clone();
            (0..is.len()).for_each(|i| sums[place(i)] += ss[i]);
            for x in [x.clone(), transposed(&x)] {
                let got = values(&gather(&x, dim, &transposed(&index)).unwrap());
                assert!(got.iter().enumerate().all(|(i, &g)| g == xs[place(i)]));
                let got = values(&scatter_add(&x, dim, &index, &transposed(&source)).unwrap());
                got.iter().zip(&sums).for_each(|(&got, &want)| assert_close(got, want, tolerance(dtype)));
            }
        }
    }
}

#[test]
fn index_add_is_the_transpose_of_index_select() {
    for dtype in FLOATS {
        for (shape, dim) in [(&[11, 3][..], 0), (&[4, 13], 1), (&[2, 5, 2000], 1)] {
            let (x, at) = (make(shape, dtype, &floats(-2.0, 2.0)), index(&[7], shape[dim]));
            let rows = index_select(&transposed(&x), dim, &at).unwrap();
            let wanted: Vec<Tensor> =
                at.to_vec::<i64>().unwrap().iter().map(|&i| x.narrow(dim, i as usize, 1).unwrap()).collect();
            let wanted = crate::ops::cat(&wanted.iter().collect::<Vec<_>>(), dim).unwrap();
            assert_eq!(values(&rows), values(&wanted));
            let mut sums = x.copy().unwrap();
            let zero = x.zeros_like().unwrap();
            sums = index_add(&sums, dim, &at, &transposed(&rows), -0.5).unwrap();
            let back = values(&index_add(&zero, dim, &at, &rows, 1.0).unwrap());
            for ((&got, x), back) in values(&sums).iter().zip(values(&x)).zip(back) {
                assert_close(got, x - 0.5 * back, tolerance(dtype));
            }
        }
    }
}

#[test]
fn the_gradient_of_an_embedding_is_a_chain_over_positions_at_any_thread_count() {
    let (dy, at) = (make(&[50, 20, 33], DType::F32, &floats(-1.0, 1.0)), index(&[50, 20], 9));
    let mut wanted = vec![0f32; 9 * 33];
    let positions = at.to_vec::<i64>().unwrap();
    for (row, &at) in dy.to_vec::<f32>().unwrap().chunks(33).zip(&positions) {
        wanted[at as usize * 33..][..33].iter_mut().zip(row).for_each(|(to, x)| *to += x);
    }
    let device = Device::Cpu(78);
    for threads in [1, 2, 7] {
        device.set_threads(threads).unwrap();
        let (dy, at) = (dy.to_device(device, true).unwrap(), at.to_device(device, true).unwrap());
        let got = embedding_backward(&dy, &at, 9, None).unwrap();
        assert_eq!(got.to_vec::<f32>().unwrap(), wanted);
        let mut buffer = crate::ops::full(&[9, 33], 0.1, DType::F32, device).unwrap();
        assert!(embedding_backward_accumulate_(&mut buffer, &dy, &at, None).unwrap());
        let added: Vec<f32> = wanted.iter().map(|x| 0.1 + x).collect();
        assert_eq!(buffer.to_vec::<f32>().unwrap(), added);
    }
    let padded = embedding_backward(&dy, &at, 9, Some(4)).unwrap();
    assert!(values(&padded.narrow(0, 4, 1).unwrap()).iter().all(|&x| x == 0.0));
}

#[test]
fn an_index_out_of_range_is_named() {
    let w = make(&[5, 2], DType::F32, &|_| 1.0);
    for bad in [5, -1] {
        let at = Tensor::from_slice(&[0, bad], &[2], Device::CPU).unwrap();
        let message = embedding(&w, &at).unwrap_err().to_string();
        assert!(message.contains("embedding") && message.contains(&format!("index {bad}")), "{message}");
        assert!(gather(&w.narrow(1, 0, 1).unwrap(), 0, &at.unsqueeze(-1).unwrap()).is_err());
        assert!(embedding_backward(&w.narrow(0, 0, 2).unwrap(), &at, 5, None).is_err());
    }
    assert!(embedding(&w, &w).is_err());
}

#[test]
fn integers_are_gathered_and_added_and_ones_are_hot() {
    let (x, at) = (Tensor::from_slice(&[1i64, 2, 3], &[3], Device::CPU).unwrap(), index(&[4], 3));
    let at_values: Vec<usize> = at.to_vec::<i64>().unwrap().iter().map(|&i| i as usize).collect();
    let got = gather(&x, 0, &at).unwrap().to_vec::<i64>().unwrap();
    assert_eq!(got, at_values.iter().map(|&i| i as i64 + 1).collect::<Vec<_>>());
    let mut sums = [1, 2, 3];
    at_values.iter().zip(&got).for_each(|(&i, g)| sums[i] += g);
    let source = gather(&x, 0, &at).unwrap();
    assert_eq!(scatter_add(&x, 0, &at, &source).unwrap().to_vec::<i64>().unwrap(), sums);
    let hot = one_hot(&at, 3).unwrap().to_vec::<i64>().unwrap();
    assert!(
        hot.chunks(3)
            .zip(at_values)
            .all(|(row, at)| row.iter().enumerate().all(|(i, &x)| x == i64::from(i == at)))
    );
}

#[test]
fn sums_are_chains_in_order_at_any_thread_count_whatever_the_rows() {
    let device = Device::Cpu(931);
    for threads in [1, 3] {
        device.set_threads(threads).unwrap();
        for [outer, rows, inner] in [[3, 5, 1], [1, 9, 1], [200, 129, 1], [4, 33, 7], [2, 7, 1500]] {
            for count in [0, 1, 7, 33, 2000 / inner] {
                let shape = [outer, count, inner];
                let (x, source) = (floats(-2.0, 2.0), floats(-1.0, 3.0));
                let x = make(&[outer, rows, inner], DType::F32, &|i| if i % 5 == 0 { -0.0 } else { x(i) });
                let source = make(&shape, DType::F32, &|i| if i % 4 == 0 { -0.0 } else { source(i) });
                let [x, source] = [x, source].map(|t| t.to_device(device, true).unwrap());
                // The last row is never named.
                let at = index(&[count], rows - 1).to_device(device, true).unwrap();
                let (named, added) = (at.to_vec::<i64>().unwrap(), source.to_vec::<f32>().unwrap());
                let mut sums = vec![None; outer * rows * inner];
                for (i, &x) in added.iter().enumerate() {
                    let place = i / (count * inner) * rows + named[i / inner % count] as usize;
                    let sum = &mut sums[place * inner + i % inner];
                    *sum = Some(sum.map_or(x, |sum| sum + x));
                }
                let bits = |x: Vec<f32>| x.into_iter().map(f32::to_bits).collect::<Vec<_>>();
                let old = x.to_vec::<f32>().unwrap();
                let add = |(&old, sum): (&f32, &Option<f32>)| sum.map_or(old, |sum| old + sum * -0.5);
                let wanted = bits(old.iter().zip(&sums).map(add).collect());
                let got = index_add(&x, 1, &at, &source, -0.5).unwrap();
                assert_eq!(bits(got.to_vec::<f32>().unwrap()), wanted);
                let back = index_select_backward(&source, 1, &at, x.shape()).unwrap();
                let wanted = index_add(&x.zeros_like().unwrap(), 1, &at, &source, 1.0).unwrap();
                assert_eq!(bits(back.to_vec::<f32>().unwrap()), bits(wanted.to_vec::<f32>().unwrap()));
                let everywhere = at.with_shape(&[1, count, 1]).unwrap().broadcast_to(&shape).unwrap();
                let back = gather_backward(&source, 1, &everywhere, x.shape()).unwrap();
                assert_eq!(bits(back.to_vec::<f32>().unwrap()), bits(wanted.to_vec::<f32>().unwrap()));
                let rows = index_select(&got, 1, &at).unwrap();
                let elements = gather(&got, 1, &everywhere).unwrap();
                assert_eq!(rows.to_vec::<f32>().unwrap(), elements.to_vec::<f32>().unwrap());
            }
        }
    }
}

#[test]
fn an_index_out_of_range_is_found_wherever_it_is() {
    for (n, inner) in [(3, 1), (20_000, 1), (700, 40)] {
        let x = make(&[2, n, inner], DType::F32, &|i| i as f64);
        for (place, bad) in [(0, -1), (n / 2, n as i64), (n - 1, i64::MIN), (n - 1, i64::MAX)] {
            let at: Vec<i64> = (0..n).map(|i| if i == place { bad } else { i as i64 }).collect();
            let at = Tensor::from_slice(&at, &[n], Device::CPU).unwrap();
            let every = at.unsqueeze(0).unwrap().unsqueeze(-1).unwrap().broadcast_to(x.shape()).unwrap();
            let results = [
                index_select(&x, 1, &at),
                index_add(&x, 1, &at, &x, 1.0),
                gather(&x, 1, &every),
                scatter_add(&x, 1, &every, &x),
            ];
            for result in results {
                let message = result.unwrap_err().to_string();
                assert!(message.contains(&format!("index {bad} (item ")), "{message}");
            }
        }
    }
}

#[test]
fn indices_are_those_of_the_own_rows_and_unknown_ones_are_refused() {
    let indices = |values: &[i64]| Tensor::from_slice(values, &[values.len()], Device::CPU).unwrap();
    let every = indices(&[0, 7, 4, 7, 6, 7, 9, 7, -100, 7]);
    let strided = every.slice(0, 0, 10, 2).unwrap();
    let (here, elsewhere) = split_indices(&strided, 4..7, 10, Some(-100)).unwrap();
    assert_eq!(here.to_vec::<i64>().unwrap(), [0, 0, 2, 0, 0]);
    assert_eq!(elsewhere.to_vec::<bool>().unwrap(), [true, false, false, true, true]);
    assert_eq!(split_indices(&indices(&[]), 0..1, 1, None).unwrap().0.numel(), 0);
    for wrong in [10, -1, -100] {
        let error = split_indices(&indices(&[3, wrong]), 0..4, 10, None).unwrap_err().to_string();
        assert!(
            error.contains(&format!("index {wrong} (item 1) is out of range, wanted an index below 10")),
            "{error}"
        );
    }
}
