//! Generation by a model of Qwen2-0.5B's shape: a prompt's tokens a second beside what multiply-adds reach, and one stream's new tokens
//! a second, each of which reads all weights and the keys and values so far, beside what memory gives. Both are measured before and after each of them, since a machine that others use too is not
//! as fast in one second as in the next; the median of these ratios counts. A prompt takes seconds, so it is compared with the multiply-adds of as
//! long a stretch; their peak is that of a good millisecond.

use std::error::Error;
use std::hint::black_box;
use std::time::{Duration, Instant};

use phalanx::autograd::no_grad;
use phalanx::kernels;
use phalanx::nn::models::{Family, ModelConfig, TransformerConfig};
use phalanx::nn::{Parameters, Scope, pack_weights};
use phalanx::{DType, Device};

use crate::measure::Report;

const PROMPT: usize = 512;
/// How many prompts are measured, and stretches of so many new tokens.
const PROMPTS: usize = 5;
const STRETCHES: usize = 11;
/// How long multiply-adds are measured before a prompt, and after it.
const STRETCH: Duration = Duration::from_millis(500);
const TOKENS: usize = 8;
/// Features of the keys of a position, in a block.
const KEY_FEATURES: usize = 2 * 64;

/// Qwen2-0.5B: 24 blocks of width 896, 14 heads for queries and 2 for keys, a tied table of 151,936 tokens.
fn config() -> ModelConfig {
    let size = TransformerConfig::new(Family::Qwen2, 151_936, 2048, 24, 14, 896);
    ModelConfig::from(TransformerConfig { key_heads: 2, inner: 4864, tied: true, qkv_bias: true, ..size })
}

/// Elements of a line of a cache.
const LINE: usize = 8;

/// Bytes that threads read from memory in a second, from where the model's weights lie too: the most of one, two and four streams for each
/// thread, as one alone is far from it on some machines.
fn memory_speed(data: &[i64], threads: usize) -> f64 {
    // An element brings its whole line, and leaves the core nothing else to do.
    let read = |part: &[i64], streams: usize| {
        let (each, mut all) = (part.len() / streams, [0; 4]);
        for line in (0..each).step_by(LINE) {
            all[..streams].iter_mut().enumerate().for_each(|(i, all)| *all ^= part[i * each + line]);
        }
        black_box(all);
    };
    let seconds = [1, 2, 4].map(|streams| {
        seconds_of(|| {
            std::thread::scope(|scope| {
                data.chunks(data.len() / threads).for_each(|part| {
                    scope.spawn(move || read(part, streams));
                });
            });
        })
    });
    size_of_val(data) as f64 / seconds.into_iter().fold(f64::INFINITY, f64::min)
}

fn seconds_of(work: impl FnOnce()) -> f64 {
    let start = Instant::now();
    work();
    start.elapsed().as_secs_f64()
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// Emits both rates of the model in a dtype.
fn measure(report: &Report, dtype: DType) -> Result<(), Box<dyn Error>> {
    let (config, name) = (config(), format!("generate-{dtype}"));
    let model = config.init(&Scope::new(1, dtype, Device::CPU))?;
    model.eval();
    pack_weights(&model.parameters())?;
    let bytes: usize = model.parameters().iter().map(|p| p.tensor().numel() * dtype.size()).sum();
    let prompt: Vec<i64> = (0..PROMPT as i64).map(|i| i * 7919 % 151_936).collect();
    let _no_grad = no_grad();
    let pass = |caches: &mut Vec<_>, tokens: &[i64]| {
        black_box(model.extend_rows(&mut [(&mut caches[..], tokens)]).unwrap());
    };
    // Of bf16 the processor may have faster instructions than multiply-adds.
    let limits: [(&str, &dyn Fn() -> phalanx::tensor::Result<f64>); 3] = [
        ("prompt of the peak", &|| kernels::peak_flops(dtype, Device::CPU)),
        ("prompt of the multiply-adds' peak", &|| kernels::peak_flops(DType::F32, Device::CPU)),
        ("prompt of sustained multiply-adds", &|| kernels::sustained_flops(DType::F32, Device::CPU, STRETCH)),
    ];
    let measured = || limits.map(|(_, limit)| limit());
    let mut caches = Vec::new();
    let (mut rates, mut shares) = (Vec::new(), limits.map(|_| Vec::new()));
    for _ in 0..PROMPTS {
        caches = model.row_caches(64)?;
        let (all_before, done_before) = (measured(), kernels::flops());
        let seconds = seconds_of(|| pass(&mut caches, &prompt));
        // Products with weights, and attention of what is seen.
        let flops = kernels::flops() - done_before;
        for (shares, (before, after)) in shares.iter_mut().zip(all_before.into_iter().zip(measured())) {
            shares.push(200.0 * flops / seconds / (before? + after?));
        }
        rates.push(PROMPT as f64 / seconds);
    }
    report.emit(&name, "prompt", median(rates), "tokens/s");
    for ((metric, _), shares) in limits.iter().zip(shares) {
        report.emit(&name, metric, median(shares), "%");
    }
    let data = kernels::full(&[1 << 26], 1_i64, DType::I64, Device::CPU)?;
    let data = data.read::<i64>("memory_speed")?;
    let memory = || memory_speed(&data, report.threads);
    let (mut rates, mut speeds, mut shares) = (Vec::new(), Vec::new(), Vec::new());
    memory();
    for _ in 0..STRETCHES {
        let before = memory();
        let seconds = seconds_of(|| (0..TOKENS).for_each(|_| pass(&mut caches, &[17])));
        let (rate, speed) = (TOKENS as f64 / seconds, f64::midpoint(before, memory()));
        let keys_and_values: usize =
            caches.iter().map(|cache| 2 * cache.len() * KEY_FEATURES * dtype.size()).sum();
        shares.push(100.0 * (bytes + keys_and_values) as f64 * rate / speed);
        rates.push(rate);
        speeds.push(speed);
    }
    report.emit(&name, "stream", median(rates), "tokens/s");
    report.emit(&name, "memory", median(speeds) / 1e9, "GB/s");
    report.emit(&name, "stream of the memory's", median(shares), "%");
    Ok(())
}

pub fn run(report: &Report) -> Result<bool, Box<dyn Error>> {
    measure(report, DType::F32)?;
    measure(report, DType::BF16)?;
    Ok(true)
}
