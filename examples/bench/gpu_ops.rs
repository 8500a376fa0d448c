//! Operations on a GPU at the sizes where its limits show: arrays of 256 MiB, attention of long contexts, large products.
//!
//! A row's time is that of many launches between two waits, divided by their number; so it has no launch's latency in it.

use std::time::Instant;

use phalanx::autograd::ops::Attention;
use phalanx::autograd::{Options, Result, grad, no_grad};
use phalanx::nn::{AdamW, Group, Parameter, Rule};
use phalanx::tensor::{RngKey, Window};
use phalanx::{DType, Device, Tensor, Var, kernels};

use crate::report::{Report, median, millis};

/// Launches between two waits.
const LAUNCHES: usize = 20;
/// Measurements, of which the median counts.
const TIMES: usize = 5;

struct Bench<'a> {
    report: &'a Report,
    device: Device,
    only: &'a str,
}

/// How a row's work is counted.
enum Work {
    /// Bytes moved, for GB/s.
    Bytes(f64),
    /// Floating-point operations, for TFLOP/s.
    Flops(f64),
}

impl Bench<'_> {
    fn row(&self, name: &str, work: Work, mut f: impl FnMut() -> Result<()>) -> Result<()> {
        if !name.contains(self.only) {
            return Ok(());
        }
        f()?;
        f()?;
        self.device.synchronize()?;
        let mut times = Vec::new();
        for _ in 0..TIMES {
            let start = Instant::now();
            (0..LAUNCHES).try_for_each(|_| f())?;
            self.device.synchronize()?;
            times.push(millis(start.elapsed()) / LAUNCHES as f64);
        }
        let ms = median(&mut times);
        self.report.emit("gpu-ops", name, ms, "ms");
        match work {
            Work::Bytes(bytes) => self.report.emit("gpu-ops", name, bytes / ms / 1e6, "GB/s"),
            Work::Flops(flops) => self.report.emit("gpu-ops", name, flops / ms / 1e9, "TFLOP/s"),
        }
        Ok(())
    }

    /// A row for the forward pass and one for both passes, the backward one from ones.
    fn passes(
        &self,
        name: &str,
        [forward, both]: [Work; 2],
        inputs: &[Tensor],
        f: impl Fn(&[Var]) -> Result<Var>,
    ) -> Result<()> {
        if !name.contains(self.only) {
            return Ok(());
        }
        let leaves = inputs.iter().map(|t| Var::leaf(t.clone())).collect::<Result<Vec<_>>>()?;
        let wanted: Vec<&Var> = leaves.iter().collect();
        let y = f(&leaves)?;
        let ones = Var::new(kernels::full(y.shape(), 1.0, y.dtype(), y.device())?);
        drop(y);
        self.row(&format!("{name}/fwd"), forward, || {
            let _guard = no_grad();
            f(&leaves).map(drop)
        })?;
        self.row(&format!("{name}/fwd+bwd"), both, || {
            grad(&[(f(&leaves)?, Some(ones.clone()))], &wanted, Options::default()).map(drop)
        })
    }

    fn random(&self, shape: &[usize], dtype: DType) -> Result<Tensor> {
        let (window, key) = (Window::whole(shape), RngKey { seed: 1, step: 0 });
        let x = kernels::random::normal(shape, &window, key.site(0), [0.0, 1.0], DType::F32, self.device)?;
        Ok(kernels::cast(&x, dtype)?)
    }
}

/// Every row whose name contains `only`.
pub fn run(
    report: &Report,
    device: Device,
    only: &str,
) -> std::result::Result<(), Box<dyn std::error::Error>> {
    let bench = Bench { report, device, only };
    if device.is_cuda() {
        eprintln!("{:?} by {}", device.gpu()?, phalanx::tensor::cuda::driver_name()?);
    }
    memory(&bench)?;
    products(&bench)?;
    attention(&bench)?;
    adamw(&bench)?;
    Ok(())
}

/// Rows that move memory: 256 MiB an array.
fn memory(bench: &Bench<'_>) -> Result<()> {
    const BYTES: f64 = (256 << 20) as f64;
    for dtype in [DType::F32, DType::BF16] {
        let (width, rows) = (1024, (256 << 20) / 1024 / dtype.size());
        let x = bench.random(&[rows, width], dtype)?;
        let [w, b] = [bench.random(&[width], dtype)?, bench.random(&[width], dtype)?];
        bench.row(&format!("copy_{dtype}"), Work::Bytes(2.0 * BYTES), || Ok(x.copy().map(drop)?))?;
        let (forward, both) = (|| Work::Bytes(2.0 * BYTES), || Work::Bytes(5.0 * BYTES));
        bench.passes(&format!("gelu_{dtype}"), [forward(), both()], std::slice::from_ref(&x), |x| {
            x[0].gelu(kernels::Gelu::Tanh)
        })?;
        let normed = [x.clone(), w, b];
        bench.passes(&format!("layer_norm_{dtype}"), [forward(), both()], &normed, |x| {
            x[0].layer_norm(&[width], Some(&x[1]), Some(&x[2]), 1e-5)
        })?;
        bench.passes(&format!("softmax_{dtype}"), [forward(), both()], &[x], |x| x[0].softmax(-1))?;
    }
    Ok(())
}

fn products(bench: &Bench<'_>) -> Result<()> {
    for (dtype, n) in [(DType::BF16, 8192), (DType::BF16, 4096), (DType::F32, 4096)] {
        let (a, b) = (bench.random(&[n, n], dtype)?, bench.random(&[n, n], dtype)?);
        let work = Work::Flops(2.0 * (n as f64).powi(3));
        bench.row(&format!("matmul_{dtype}_{n}"), work, || Ok(kernels::matmul(&a, &b).map(drop)?))?;
    }
    Ok(())
}

/// Causal attention, head size 64: a product of the forward pass counts for half, the other half being masked.
fn attention(bench: &Bench<'_>) -> Result<()> {
    for (batch, tokens) in [(64, 1024), (16, 4096)] {
        let (heads, size) = (12, 64);
        let q = bench.random(&[batch, heads, tokens, size], DType::BF16)?;
        let flops = 2.0 * 2.0 * (batch * heads * tokens * tokens * size) as f64 / 2.0;
        let causal = Attention { is_causal: true, ..Attention::default() };
        let passes = [Work::Flops(flops), Work::Flops(3.5 * flops)];
        bench.passes(&format!("attention_{tokens}"), passes, &[q.clone(), q.copy()?, q.copy()?], |x| {
            x[0].scaled_dot_product_attention(&x[1], &x[2], None, &causal)
        })?;
    }
    Ok(())
}

/// A step over 8 f32 tensors of 64 MiB: reads p, g, m, v and writes p, m, v.
fn adamw(bench: &Bench<'_>) -> std::result::Result<(), Box<dyn std::error::Error>> {
    const ELEMENTS: usize = 16 << 20;
    let mut parameters = Vec::new();
    for i in 0..8 {
        let parameter = Parameter::new(i.to_string(), bench.random(&[ELEMENTS], DType::F32)?)?;
        parameter.set_grad(Some(bench.random(&[ELEMENTS], DType::F32)?));
        parameters.push(parameter);
    }
    let group = Group::new(parameters, 3e-4).with_weight_decay(0.1);
    let mut optimizer = AdamW::default().with_betas(0.9, 0.95).init(vec![group])?;
    let bytes = Work::Bytes(7.0 * 4.0 * 8.0 * ELEMENTS as f64);
    bench.row("adamw", bytes, || {
        optimizer.step().map_err(|e| phalanx::autograd::Error::Custom(e.to_string()))
    })?;
    Ok(())
}
