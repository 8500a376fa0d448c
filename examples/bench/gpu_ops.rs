//! Operations on a GPU at the sizes where its limits show: arrays of 256 MiB, attention of long contexts, large products.
//!
//! A row's time is that of many launches between two waits, divided by their number; so it has no launch's latency in it.

use std::time::Instant;

use phalanx::autograd::ops::Attention;
use phalanx::autograd::{Options, Result, grad, no_grad};
use phalanx::nn::{AdamW, Group, Parameter, Rule};
use phalanx::tensor::{RngKey, Window};
use phalanx::{DType, Device, Tensor, Var, kernels};

use crate::measure::{Report, median, millis};

struct Bench<'a> {
    report: &'a Report,
    device: Device,
    only: &'a str,
    size: &'a Size,
}

/// How much there is to do.
struct Size {
    /// Launches between two waits.
    launches: usize,
    /// Measurements, of which the median counts.
    times: usize,
    /// Of an array.
    bytes: usize,
    /// Sides of products of bf16, bf16 and f32.
    sides: [usize; 3],
    /// Sequences and their length, of attention.
    attention: [(usize, usize); 2],
    heads: usize,
    /// Elements of a parameter.
    elements: usize,
}

/// Where a GPU's limits show.
const WHOLE: Size = Size {
    launches: 20,
    times: 5,
    bytes: 256 << 20,
    sides: [8192, 4096, 4096],
    attention: [(64, 1024), (16, 4096)],
    heads: 12,
    elements: 16 << 20,
};
/// What an emulator can do: the same programs.
const SMALL: Size = Size {
    launches: 1,
    times: 1,
    bytes: 64 << 10,
    sides: [64, 32, 32],
    attention: [(1, 128), (1, 256)],
    heads: 1,
    elements: 4 << 10,
};

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
        for _ in 0..self.size.times {
            let start = Instant::now();
            (0..self.size.launches).try_for_each(|_| f())?;
            self.device.synchronize()?;
            times.push(millis(start.elapsed()) / self.size.launches as f64);
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
        if !self.wants(&[name]) {
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

    /// Whether there may be a row whose name begins so: else its tensors are not made.
    fn wants(&self, names: &[&str]) -> bool {
        names.iter().any(|name| name.contains(self.only) || self.only.starts_with(name))
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
    small: bool,
) -> std::result::Result<(), Box<dyn std::error::Error>> {
    let bench = Bench { report, device, only, size: if small { &SMALL } else { &WHOLE } };
    if device.is_cuda() {
        eprintln!("{:?} by {}", device.gpu()?, phalanx::tensor::cuda::driver_name()?);
    }
    memory(&bench)?;
    products(&bench)?;
    attention(&bench)?;
    adamw(&bench)?;
    Ok(())
}

/// Rows that move memory.
fn memory(bench: &Bench<'_>) -> Result<()> {
    let moved = bench.size.bytes as f64;
    for dtype in [DType::F32, DType::BF16] {
        let names = ["copy", "gelu", "layer_norm", "softmax"].map(|name| format!("{name}_{dtype}"));
        if !bench.wants(&names.each_ref().map(String::as_str)) {
            continue;
        }
        let (width, rows) = (1024, bench.size.bytes / 1024 / dtype.size());
        let x = bench.random(&[rows, width], dtype)?;
        let [w, b] = [bench.random(&[width], dtype)?, bench.random(&[width], dtype)?];
        bench.row(&format!("copy_{dtype}"), Work::Bytes(2.0 * moved), || Ok(x.copy().map(drop)?))?;
        let (forward, both) = (|| Work::Bytes(2.0 * moved), || Work::Bytes(5.0 * moved));
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
    for (dtype, n) in [DType::BF16, DType::BF16, DType::F32].into_iter().zip(bench.size.sides) {
        if !bench.wants(&[&format!("matmul_{dtype}_{n}")]) {
            continue;
        }
        let (a, b) = (bench.random(&[n, n], dtype)?, bench.random(&[n, n], dtype)?);
        let work = Work::Flops(2.0 * (n as f64).powi(3));
        bench.row(&format!("matmul_{dtype}_{n}"), work, || Ok(kernels::matmul(&a, &b).map(drop)?))?;
    }
    Ok(())
}

/// Causal attention, head size 64: a product of the forward pass counts for half, the other half being masked.
fn attention(bench: &Bench<'_>) -> Result<()> {
    for (batch, tokens) in bench.size.attention {
        if !bench.wants(&[&format!("attention_{tokens}")]) {
            continue;
        }
        let (heads, size) = (bench.size.heads, 64);
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

/// A step over 8 f32 tensors (of 64 MiB): reads p, g, m, v and writes p, m, v.
fn adamw(bench: &Bench<'_>) -> std::result::Result<(), Box<dyn std::error::Error>> {
    if !bench.wants(&["adamw"]) {
        return Ok(());
    }
    let elements = bench.size.elements;
    let mut parameters = Vec::new();
    for i in 0..8 {
        let parameter = Parameter::new(i.to_string(), bench.random(&[elements], DType::F32)?)?;
        parameter.set_grad(Some(bench.random(&[elements], DType::F32)?));
        parameters.push(parameter);
    }
    let group = Group::new(parameters, 3e-4).with_weight_decay(0.1);
    let mut optimizer = AdamW::default().with_betas(0.9, 0.95).init(vec![group])?;
    let bytes = Work::Bytes(7.0 * 4.0 * 8.0 * elements as f64);
    bench.row("adamw", bytes, || {
        optimizer.step().map_err(|e| phalanx::autograd::Error::Custom(e.to_string()))
    })?;
    Ok(())
}
