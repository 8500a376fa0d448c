//! Single operations, forward and forward with backward; the backward pass starts from ones.

use phalanx::autograd::ops::{Attention, CrossEntropy};
use phalanx::autograd::{Options, Result, grad, no_grad};
use phalanx::nn::{AdamW, Group, Parameter, Rule};
use phalanx::{DType, Tensor, Var, kernels};

use crate::measure::{Report, ids, median_ms, uniform};

/// The least work of a row.
#[derive(Clone, Copy, Default)]
struct Work {
    /// Floating-point operations of the forward pass.
    flops: f64,
    /// Bytes moved by the forward pass, and by both.
    bytes: [f64; 2],
}

/// Moves so many bytes.
fn moves(forward: usize, both: usize) -> Work {
    Work { flops: 0.0, bytes: [forward as f64, both as f64] }
}

struct Bench<'a> {
    report: &'a Report,
    workload: &'a str,
    only: &'a str,
}

impl Bench<'_> {
    fn row(
        &self,
        name: &str,
        work: Work,
        inputs: &[Tensor],
        f: impl Fn(&[Var]) -> Result<Var>,
    ) -> Result<()> {
        if !name.contains(self.only) {
            return Ok(());
        }
        let leaves = inputs.iter().map(|t| Var::leaf(t.clone())).collect::<Result<Vec<_>>>()?;
        let ones = {
            let y = f(&leaves)?;
            Var::new(kernels::full(y.shape(), 1.0, y.dtype(), y.device())?)
        };
        let wanted: Vec<&Var> = leaves.iter().collect();
        let fwd = median_ms(0.6, || {
            let _guard = no_grad();
            assert!(f(&leaves).is_ok());
        });
        let both = median_ms(0.6, || {
            let roots = f(&leaves).map(|y| [(y, Some(ones.clone()))]);
            assert!(roots.and_then(|r| grad(&r, &wanted, Options::default())).is_ok());
        });
        let passes =
            [("fwd", fwd, work.flops, work.bytes[0]), ("fwd+bwd", both, 3.0 * work.flops, work.bytes[1])];
        for (pass, ms, flops, bytes) in passes {
            let metric = format!("{name}/{pass}");
            self.report.emit(self.workload, &metric, ms, "ms");
            for (amount, unit) in [(flops, "GFLOP/s"), (bytes, "GB/s")] {
                if amount > 0.0 {
                    self.report.emit(self.workload, &metric, amount / ms / 1e6, unit);
                }
            }
        }
        Ok(())
    }
}

fn random(shape: &[usize]) -> Result<Tensor> {
    Ok(uniform(7, shape, 1.0)?)
}

pub fn run(report: &Report, only: &str) -> std::result::Result<(), Box<dyn std::error::Error>> {
    let bench = Bench { report, workload: "ops", only };
    products(&bench)?;
    rows_of_memory(&bench, 4096, 2048)?;
    heavier(&bench)?;
    adamw(&bench, 100_000)?;
    Ok(())
}

/// The rows that move memory, over arrays of 128 MiB, which no cache holds.
pub fn large(report: &Report, only: &str) -> std::result::Result<(), Box<dyn std::error::Error>> {
    let bench = Bench { report, workload: "large-ops", only };
    rows_of_memory(&bench, 32768, 5792)?;
    cross_entropy(&bench)?;
    adamw(&bench, 335_544)?;
    Ok(())
}

fn products(bench: &Bench<'_>) -> Result<()> {
    for (dtype, sizes) in [(DType::F32, &[256, 512, 1024, 2048][..]), (DType::BF16, &[1024, 2048])] {
        for &n in sizes {
            let x = kernels::cast(&random(&[n, n])?, dtype)?;
            let work = Work { flops: 2.0 * (n as f64).powi(3), ..Work::default() };
            bench
                .row(&format!("matmul_{dtype}_{n}"), work, &[x.clone(), x.copy()?], |x| x[0].matmul(&x[1]))?;
        }
    }
    let work = Work { flops: 32.0 * 2.0 * 256.0 * 64.0 * 256.0, ..Work::default() };
    let pair = [random(&[32, 256, 64])?, random(&[32, 64, 256])?];
    bench.row("bmm_32x256x64x256", work, &pair, |x| x[0].matmul(&x[1]))
}

/// Over so many rows of 1024; the transpose is of a square.
fn rows_of_memory(bench: &Bench<'_>, rows: usize, square: usize) -> Result<()> {
    let n = rows * 1024 * 4;
    let (big, line) = (random(&[rows, 1024])?, random(&[1024])?);
    bench.row("softmax", moves(2 * n, 5 * n), std::slice::from_ref(&big), |x| x[0].softmax(-1))?;
    let normed = [big.clone(), line.clone(), line.copy()?];
    bench.row("layer_norm", moves(2 * n, 5 * n), &normed, |x| {
        x[0].layer_norm(&[1024], Some(&x[1]), Some(&x[2]), 1e-5)
    })?;
    bench.row("gelu", moves(2 * n, 5 * n), std::slice::from_ref(&big), |x| x[0].gelu(kernels::Gelu::Tanh))?;
    bench.row("add_broadcast", moves(2 * n, 3 * n), &[big.clone(), line], |x| x[0].add(&x[1]))?;
    let bytes = square * square * 4;
    bench.row("transpose_contiguous", moves(2 * bytes, 2 * bytes), &[random(&[square, square])?], |x| {
        x[0].transpose(0, 1)?.contiguous()
    })?;
    bench.row("sum_dim0", moves(n, n), std::slice::from_ref(&big), |x| x[0].sum(&[0], false))?;
    bench.row("sum_dim1", moves(n, n), &[big], |x| x[0].sum(&[1], false))
}

fn heavier(bench: &Bench<'_>) -> Result<()> {
    let at = Var::new(ids(3, 8192, 50257)?);
    bench.row("embedding", moves(2 * 8192 * 256 * 4, 0), &[random(&[50257, 256])?], |x| {
        x[0].embedding(&at, None)
    })?;
    cross_entropy(bench)?;
    let head = random(&[8, 8, 512, 64])?;
    let causal = Attention { is_causal: true, ..Attention::default() };
    bench.row("sdpa_causal", Work::default(), &[head.clone(), head.copy()?, head.copy()?], |x| {
        x[0].scaled_dot_product_attention(&x[1], &x[2], None, &causal)
    })?;
    let work = Work { flops: 2.0 * 16.0 * 64.0 * 56.0 * 56.0 * 64.0 * 9.0, ..Work::default() };
    let pair = [random(&[16, 64, 56, 56])?, random(&[64, 64, 3, 3])?];
    let padded = kernels::ConvOptions { padding: [1; 2], ..Default::default() };
    bench.row("conv2d", work, &pair, |x| x[0].conv2d(&x[1], None, &padded))
}

fn cross_entropy(bench: &Bench<'_>) -> Result<()> {
    let (targets, n) = (Var::new(ids(4, 4096, 8192)?), 4096 * 8192 * 4);
    bench.row("cross_entropy", moves(n, 3 * n), &[random(&[4096, 8192])?], |x| {
        x[0].cross_entropy(&targets, &CrossEntropy::default())
    })
}

/// A step over 100 tensors of so many elements: reads p, g, m, v and writes p, m, v.
fn adamw(bench: &Bench<'_>, elements: usize) -> phalanx::nn::Result<()> {
    if !"adamw".contains(bench.only) {
        return Ok(());
    }
    let mut parameters = Vec::new();
    for i in 0..100 {
        let parameter = Parameter::new(i.to_string(), random(&[elements])?)?;
        parameter.set_grad(Some(random(&[elements])?));
        parameters.push(parameter);
    }
    let group = Group::new(parameters, 3e-4).with_weight_decay(0.1);
    let mut optimizer = AdamW::default().with_betas(0.9, 0.95).init(vec![group])?;
    let ms = median_ms(0.6, || assert!(optimizer.step().is_ok()));
    bench.report.emit(bench.workload, "adamw", ms, "ms");
    bench.report.emit(bench.workload, "adamw", 7.0 * 4.0 * 100.0 * elements as f64 / ms / 1e6, "GB/s");
    Ok(())
}
