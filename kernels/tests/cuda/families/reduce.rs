//! Reductions over dimensions, running sums and orders.

use phalanx_kernels::{amax, amin, logsumexp, mean, norm, sum, var};
use phalanx_tensor::{DType, Device, Result, Tensor};

use crate::case::{Case, FLOATS, make, spread, tolerance};

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

pub fn cases() -> Vec<Case> {
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
