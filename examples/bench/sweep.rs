//! f32 products of forty shapes, odd, skinny and tiny ones too, with either operand transposed, into outputs that exist.

use std::time::Instant;

use phalanx::{DType, Device, Tensor, kernels};

use crate::measure::{Report, median, uniform};

/// Rows, steps and columns.
const SHAPES: [[usize; 3]; 40] = [
    // Tiny.
    [1, 1, 1],
    [2, 3, 4],
    [4, 4, 4],
    [5, 7, 3],
    [8, 8, 8],
    [15, 17, 16],
    [16, 16, 16],
    [31, 33, 32],
    [32, 32, 32],
    [48, 48, 48],
    // Around the borders of tiles and blocks.
    [63, 65, 64],
    [64, 64, 64],
    [96, 96, 96],
    [100, 100, 100],
    [127, 129, 128],
    [128, 128, 128],
    [192, 192, 192],
    [200, 300, 250],
    [255, 257, 256],
    [333, 333, 333],
    // Skinny.
    [1, 256, 256],
    [1, 1024, 4096],
    [4096, 1024, 1],
    [256, 1, 256],
    [2048, 2, 2048],
    [8, 1024, 1024],
    [16, 4096, 256],
    [7, 768, 3072],
    [1024, 16, 1024],
    [3, 2048, 3],
    [33, 4096, 33],
    [4096, 33, 33],
    [10000, 8, 10],
    [64, 10000, 64],
    // As layers have them.
    [2048, 256, 768],
    [2048, 1024, 256],
    [2048, 256, 256],
    [129, 1025, 513],
    [512, 512, 512],
    [1000, 1000, 1000],
];

/// Times of one measurement at least, so that the clock's steps do not show.
const SPAN_US: f64 = 200.0;
const TIMES: usize = 15;

/// Every shape whose name contains `only`, in microseconds a product.
pub fn run(report: &Report, only: &str) -> Result<(), Box<dyn std::error::Error>> {
    for [m, k, n] in SHAPES {
        for (ways, a, b) in
            [("nn", false, false), ("nt", false, true), ("tn", true, false), ("tt", true, true)]
        {
            let name = format!("{m}x{k}x{n}_{ways}");
            if name.contains(only) {
                let (a, b) = (operand(1, m, k, a)?, operand(2, k, n, b)?);
                report.emit(
                    "sweep",
                    &name,
                    time_us(&a, &b, &mut Tensor::empty(&[m, n], DType::F32, Device::CPU)?)?,
                    "us",
                );
            }
        }
    }
    Ok(())
}

/// A matrix of so many rows and columns, whose columns lie side by side if it is transposed.
fn operand(seed: u64, rows: usize, cols: usize, transposed: bool) -> phalanx::tensor::Result<Tensor> {
    if transposed {
        uniform(seed, &[cols, rows], 1.0)?.transpose(0, 1)
    } else {
        uniform(seed, &[rows, cols], 1.0)
    }
}

fn time_us(a: &Tensor, b: &Tensor, c: &mut Tensor) -> phalanx::tensor::Result<f64> {
    let mut many = |count: usize| {
        let start = Instant::now();
        (0..count).try_for_each(|_| kernels::matmul_into(c, a, b))?;
        Ok(start.elapsed().as_secs_f64() * 1e6)
    };
    many(2)?;
    let count = (SPAN_US / many(1)?.max(1e-3)).clamp(1.0, 1e4) as usize;
    let mut times =
        (0..TIMES).map(|_| many(count).map(|us| us / count as f64)).collect::<Result<Vec<_>, _>>()?;
    Ok(median(&mut times))
}
