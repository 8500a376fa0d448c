//! Reductions over dimensions, and orders along one: extrema with places, running sums, sorting.

use phalanx_kernels::{
    NORM_BLOCK, add_pairs_, amax, amin, argmax, argmin, cumsum, cumsum_reversed, logsumexp, max, mean, min,
    norm, prod, sort, sum, sum_of_squares_blocks, sums_of_squares, topk, var,
};
use phalanx_tensor::{DType, Device, Result, Tensor};

use crate::case::{Case, FLOATS, make, spread, tolerance};

pub fn cases() -> Vec<Case> {
    let mut all = reduce_cases();
    all.extend(orders_cases());
    all
}

/// Shapes, and the dimensions that are reduced: rows, columns, few and many of both, what lies between and what is apart.
const FRAMES: [(&[usize], &[usize]); 17] = [
    (&[], &[]),
    (&[7], &[0]),
    (&[5000], &[0]),
    (&[129, 33], &[1]),
    (&[3, 5001], &[1]),
    (&[1, 20000], &[1]),
    (&[500, 3], &[0]),
    (&[203, 9], &[0]),
    (&[33, 129], &[0]),
    (&[9, 1300], &[0]),
    (&[3000, 8], &[0]),
    (&[4, 70, 33], &[1]),
    (&[6, 7, 50], &[0, 2]),
    (&[3, 4, 64], &[0, 2]),
    (&[2, 3, 4, 5], &[1, 3]),
    (&[0, 3], &[0]),
    (&[3, 0], &[0]),
];

fn reduce_cases() -> Vec<Case> {
    let mut all = Vec::new();
    for dtype in FLOATS {
        for (shape, dims) in FRAMES {
            let many = [DType::F32, DType::BF16].contains(&dtype);
            if many || shape.iter().product::<usize>() < 4000 {
                all.push(over(dtype, shape, dims));
            }
        }
        for p in [0.0, 0.5, 1.0, 2.0, 3.0, -1.0, f64::INFINITY, f64::NEG_INFINITY] {
            all.push(norms(dtype, p, 1.0));
        }
        all.push(Case::new(format!("reduce {dtype} of infinities and NaN"), dtype, move |device| {
            let (inf, nan) = (f64::INFINITY, f64::NAN);
            let rows =
                [[0.0, inf, 1.0], [-inf, -inf, -inf], [-inf, 1.0, 2.0], [1.0, nan, 2.0], [nan, inf, -inf]];
            let x = make(&[5, 3], dtype, device, |i| rows[i / 3][i % 3]);
            Ok(vec![amax(&x, &[1], false)?, amin(&x, &[1], false)?, logsumexp(&x, &[1], false)?])
        }));
    }
    for (size, dtype) in [(1e30, DType::F32), (1e-30, DType::F32), (1e300, DType::F64)] {
        all.push(norms(dtype, 2.0, size));
        all.push(norms(dtype, 3.0, size));
    }
    all.push(Case::new("mean f16 beyond its range", DType::F16, |device| {
        let x = make(&[1000], DType::F16, device, |_| 60000.0);
        Ok(vec![mean(&x, &[0], false)?])
    }));
    all
}

/// The values behind other strides.
fn turned(x: &Tensor) -> Result<Tensor> {
    let order: Vec<usize> = (0..x.rank()).rev().collect();
    x.permute(&order)?.copy()?.permute(&order)
}

fn over(dtype: DType, shape: &'static [usize], dims: &'static [usize]) -> Case {
    let run = move |device: Device| {
        let x = make(shape, dtype, device, spread(1, -1.0, 3.0));
        let far = make(shape, dtype, device, spread(1, 99.0, 101.0));
        let sums = sum(&x, dims, false)?;
        let again = sum(&turned(&x)?, dims, false)?;
        let mut all =
            vec![again, mean(&x, dims, true)?, var(&far, dims, 0.0, false)?, var(&x, dims, 1.0, false)?];
        all.push(logsumexp(&x, dims, false)?);
        if shape.iter().product::<usize>() > 0 {
            all.extend([amax(&x, dims, false)?, amin(&turned(&x)?, dims, true)?]);
        }
        // The same bits whatever the strides.
        let bits = |t: &Tensor| {
            phalanx_kernels::cast(&t.to_device(Device::CPU, false)?, DType::F64)?.to_vec::<f64>()
        };
        assert_eq!(bits(&sums)?, bits(&all[0])?);
        Ok(all)
    };
    Case::new(format!("reduce {dtype} {shape:?} over {dims:?}"), dtype, run).within(2.0 * tolerance(dtype))
}

fn norms(dtype: DType, p: f64, size: f64) -> Case {
    let run = move |device| {
        // Without zeros, whose negative powers are infinite.
        let x = make(&[9, 50], dtype, device, |i| {
            size * (spread(1, 0.5, 2.0)(i)) * if i % 3 == 0 { -1.0 } else { 1.0 }
        });
        let scaled = |t: Tensor| {
            let mut host = t.to_device(Device::CPU, true)?;
            phalanx_kernels::scale_(&mut host, 1.0 / size).map(|()| host)
        };
        Ok(vec![scaled(norm(&x, p, &[1], false)?)?, scaled(norm(&x, p, &[0], true)?)?])
    };
    let pick = if size == 1.0 { 8.0 } else { 20.0 };
    Case::new(format!("norm {dtype} p {p} of {size:e}"), dtype, run).within(pick * tolerance(dtype))
}

const SHAPES: [(&[usize], usize); 8] = [
    (&[1], 0),
    (&[33], 0),
    (&[5, 300], 1),
    (&[300, 5], 0),
    (&[40, 9], 0),
    (&[2, 5000], 1),
    (&[2500, 8], 0),
    (&[3, 7, 10], 1),
];
const ALL: [DType; 8] =
    [DType::F64, DType::F32, DType::F16, DType::BF16, DType::I64, DType::I32, DType::U8, DType::Bool];

fn orders_cases() -> Vec<Case> {
    let mut all = Vec::new();
    for dtype in ALL {
        for (shape, dim) in SHAPES {
            let many = [DType::F32, DType::U8].contains(&dtype);
            if many || shape.iter().product::<usize>() < 2000 {
                all.push(places(dtype, shape, dim));
                all.push(running(dtype, shape, dim));
                all.push(order(dtype, shape, dim));
            }
        }
    }
    for dtype in FLOATS {
        all.push(Case::new(format!("sort {dtype} of NaN, infinities and zeros"), dtype, move |device| {
            let (inf, nan) = (f64::INFINITY, f64::NAN);
            let line = [0.0, nan, -0.0, inf, 1.0, nan, -inf, 0.0, -1.0];
            let x = make(&[9], dtype, device, |i| line[i]);
            let (up, down, best) = (sort(&x, 0, false)?, sort(&x, 0, true)?, topk(&x, 4, 0, true)?);
            let (top, low) = (max(&x, 0, false)?, min(&x, 0, false)?);
            Ok(vec![up.0, up.1, down.0, down.1, best.0, best.1, top.0, top.1, low.0, low.1])
        }));
        for n in [0, 1, 63, 64, 65, 2047, 2049, 20000] {
            let run = move |device| {
                let x = make(&[n], dtype, device, spread(1, -3.0, 5.0));
                let blocks = sum_of_squares_blocks(&x)?;
                let all = 0..n.div_ceil(NORM_BLOCK);
                let roots = sums_of_squares(device, &[(x, vec![all])])?;
                Ok(vec![Tensor::from_slice(&blocks, &[blocks.len()], Device::CPU)?, roots])
            };
            all.push(
                Case::new(format!("sum_of_squares {dtype} of {n}, bit for bit"), dtype, run).within(0.0),
            );
        }
    }
    // More blocks than a block of threads joins, and more stretches than a launch takes, of tensors of several dtypes.
    let many = |device| {
        let long = make(&[64 * 9000 + 7], DType::F32, device, spread(2, -3.0, 5.0));
        let strided = make(&[129, 33], DType::BF16, device, spread(3, -3.0, 5.0)).transpose(0, 1)?;
        let none = make(&[0], DType::F64, device, |_| 0.0);
        let (ends, few) = (vec![0..9001, 1..9000, 4096..8192, 7..7], (0..300).map(|i| i % 67..67).collect());
        Ok(vec![sums_of_squares(device, &[(long, ends), (strided, few), (none, vec![0..0; 3])])?])
    };
    all.push(Case::new("sums_of_squares of stretches, bit for bit", DType::F64, many).within(0.0));
    for n in [1, 7, 33, 129, 2000] {
        all.push(
            Case::new(format!("add_pairs of {n}, bit for bit"), DType::F64, move |device| {
                let mut x = make(&[n + 1], DType::F64, device, spread(4, -1e8, 1e8)).narrow(0, 1, n)?;
                let pairs: Vec<_> = (0..n).map(|i| (i / 7 % n, i * 31 % n)).collect();
                add_pairs_(&mut x, &pairs)?;
                Ok(vec![x])
            })
            .within(0.0),
        );
    }
    all.push(Case::new("argmax f32 of nothing", DType::F32, |device| {
        Ok(vec![argmax::<usize>(&make(&[0, 3], DType::F32, device, |_| 0.0), None, false)?])
    }));
    all
}

/// Small whole numbers, with equal ones among them.
fn wholes(dtype: DType, shape: &[usize], device: Device) -> Tensor {
    let low = if [DType::U8, DType::Bool].contains(&dtype) { 0 } else { 6 };
    let most = if dtype == DType::Bool { 2 } else { 13 };
    make(shape, dtype, device, move |i| (i * 7 % most) as f64 - low as f64)
}

fn places(dtype: DType, shape: &'static [usize], dim: usize) -> Case {
    let run = move |device| {
        let x = wholes(dtype, shape, device);
        let (top, low) = (max(&x, dim, false)?, min(&x, dim, true)?);
        let whole = [argmax::<usize>(&x, None, false)?, argmin(&x, Some(dim), true)?];
        let mut all = vec![top.0, top.1, low.0, low.1, amax(&x, &[dim], false)?, amin(&x, &[dim], false)?];
        all.extend(whole);
        all.push(sum(&x, &[dim], false)?);
        // Near 1, so that products stay within range.
        let near =
            make(shape, dtype, device, |i| if dtype.is_float() { 1.0 + 1e-3 * (i % 7) as f64 } else { 3.0 });
        all.push(prod(&near, &[dim], false)?);
        Ok(all)
    };
    Case::new(format!("places {dtype} {shape:?} along {dim}"), dtype, run)
}

fn running(dtype: DType, shape: &'static [usize], dim: usize) -> Case {
    let run = move |device| {
        let x = wholes(dtype, shape, device);
        let turned = x.transpose(0, -1)?;
        Ok(vec![cumsum(&x, dim)?, cumsum_reversed(&x, dim)?, cumsum(&turned, dim)?])
    };
    Case::new(format!("cumsum {dtype} {shape:?} along {dim}"), dtype, run)
}

fn order(dtype: DType, shape: &'static [usize], dim: usize) -> Case {
    let run = move |device| {
        let x = wholes(dtype, shape, device);
        let (up, down) = (sort(&x, dim, false)?, sort(&x, dim, true)?);
        let best = topk(&x, shape[dim].min(5), dim, true)?;
        let least = topk(&x, shape[dim].min(3), dim, false)?;
        Ok(vec![up.0, up.1, down.0, down.1, best.0, best.1, least.0, least.1])
    };
    Case::new(format!("sort {dtype} {shape:?} along {dim}"), dtype, run)
}
