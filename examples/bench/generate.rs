//! Generation by a model of Qwen2-0.5B's shape: a prompt's tokens a second beside the peak of multiply-adds, and one stream's new tokens
//! a second beside what memory gives, both measured here.

use std::error::Error;
use std::hint::black_box;
use std::time::Instant;

use phalanx::autograd::no_grad;
use phalanx::kernels;
use phalanx::nn::models::{Family, ModelConfig, TransformerConfig};
use phalanx::nn::{Parameters, Scope};
use phalanx::{DType, Device};

use crate::measure::{Report, median_ms};

const PROMPT: usize = 512;
/// Prompts, of which the fastest counts.
const PROMPTS: usize = 3;
/// New tokens of a measured stretch.
const TOKENS: usize = 8;

/// Qwen2-0.5B: 24 blocks of width 896, 14 heads for queries and 2 for keys, a tied table of 151,936 tokens.
fn config() -> ModelConfig {
    let size = TransformerConfig::new(Family::Qwen2, 151_936, 2048, 24, 14, 896);
    ModelConfig::from(TransformerConfig { key_heads: 2, inner: 4864, tied: true, qkv_bias: true, ..size })
}

/// Elements of a line of a cache.
const LINE: usize = 8;

/// Bytes that threads read from memory in a second, from where the model's weights lie too: the most of one, two and four streams for each
/// thread, as one alone is far from it on some machines.
fn memory_speed(threads: usize) -> Result<f64, Box<dyn Error>> {
    let data = kernels::full(&[1 << 26], 1_i64, DType::I64, Device::CPU)?;
    let data = data.read::<i64>("memory_speed")?;
    // An element brings its whole line, and leaves the core nothing else to do.
    let read = |part: &[i64], streams: usize| {
        let (each, mut all) = (part.len() / streams, [0; 4]);
        for line in (0..each).step_by(LINE) {
            all[..streams].iter_mut().enumerate().for_each(|(i, all)| *all ^= part[i * each + line]);
        }
        black_box(all);
    };
    let ms = [1, 2, 4].map(|streams| {
        median_ms(1.0, || {
            std::thread::scope(|scope| {
                data.chunks(data.len() / threads).for_each(|part| {
                    scope.spawn(move || read(part, streams));
                });
            });
        })
    });
    Ok(8e3 * data.len() as f64 / ms.into_iter().fold(f64::INFINITY, f64::min))
}

/// Emits both rates of the model in a dtype.
fn measure(report: &Report, dtype: DType) -> Result<(), Box<dyn Error>> {
    let (config, name) = (config(), format!("generate-{dtype}"));
    let model = config.init(&Scope::new(1, dtype, Device::CPU))?;
    model.eval();
    let bytes: usize = model.parameters().iter().map(|p| p.tensor().numel() * dtype.size()).sum();
    let prompt: Vec<i64> = (0..PROMPT as i64).map(|i| i * 7919 % 151_936).collect();
    let _no_grad = no_grad();
    let pass = |caches: &mut Vec<_>, tokens: &[i64]| {
        black_box(model.extend_rows(&mut [(&mut caches[..], tokens)]).unwrap());
    };
    let (mut caches, mut times, before) = (Vec::new(), Vec::new(), kernels::flops());
    for _ in 0..PROMPTS {
        caches = model.row_caches(64)?;
        let start = Instant::now();
        pass(&mut caches, &prompt);
        times.push(start.elapsed().as_secs_f64());
    }
    // Products with weights, and attention of what is seen.
    let flops = (kernels::flops() - before) / PROMPTS as f64;
    let seconds = times.into_iter().fold(f64::INFINITY, f64::min);
    report.emit(&name, "prompt", PROMPT as f64 / seconds, "tokens/s");
    // Of bf16 the processor may have faster instructions than multiply-adds.
    let kinds = [("prompt of the peak", dtype), ("prompt of the multiply-adds' peak", DType::F32)];
    for (metric, dtype) in kinds {
        let peak = kernels::peak_flops(dtype, Device::CPU)?;
        report.emit(&name, metric, 100.0 * flops / seconds / peak, "%");
    }
    let ms = median_ms(4.0, || (0..TOKENS).for_each(|_| pass(&mut caches, &[17]))) / TOKENS as f64;
    report.emit(&name, "stream", 1e3 / ms, "tokens/s");
    let speed = memory_speed(report.threads)?;
    report.emit(&name, "memory", speed / 1e9, "GB/s");
    report.emit(&name, "stream of the memory's", 100.0 * bytes as f64 / (ms / 1e3) / speed, "%");
    Ok(())
}

pub fn run(report: &Report) -> Result<bool, Box<dyn Error>> {
    measure(report, DType::F32)?;
    measure(report, DType::BF16)?;
    Ok(true)
}
