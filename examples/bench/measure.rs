//! The inputs that every measured system gets, timing, and the JSON lines.
//!
//! Inputs come of one counter-based generator, splitmix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators,
//! OOPSLA 2014), and of windows of a text drawn with it.

use std::path::Path;
use std::time::{Duration, Instant};

use phalanx::{Device, Tensor};

/// Output number `n` (from 0) of the stream that begins at `seed`.
pub fn hash64(seed: u64, n: u64) -> u64 {
    let mut z = seed.wrapping_add((n + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15));
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

/// Uniform in `[-bound, bound)`, 24 random bits each.
pub fn uniform(seed: u64, shape: &[usize], bound: f32) -> phalanx::tensor::Result<Tensor> {
    let unit = |n| (hash64(seed, n) >> 40) as f32 * 2f32.powi(-23) - 1.0;
    let values: Vec<f32> = (0..shape.iter().product::<usize>() as u64).map(|n| unit(n) * bound).collect();
    Tensor::from_slice(&values, shape, Device::CPU)
}

/// Uniform ids below `end`.
pub fn ids(seed: u64, len: usize, end: u64) -> phalanx::tensor::Result<Tensor> {
    let ids: Vec<i64> = (0..len as u64).map(|n| (hash64(seed, n) % end) as i64).collect();
    Tensor::from_slice(&ids, &[len], Device::CPU)
}

/// Random contiguous windows of a file's bytes, with the byte that follows as the target.
pub struct Windows {
    bytes: Vec<u8>,
    batch: usize,
    context: usize,
}

impl Windows {
    pub fn open(path: &Path, batch: usize, context: usize) -> Result<Windows, String> {
        let bytes = std::fs::read(path).map_err(|e| format!("{}: {e}", path.display()))?;
        if bytes.len() <= context {
            return Err(format!(
                "{}: {} bytes, wanted more than the context {context}",
                path.display(),
                bytes.len()
            ));
        }
        Ok(Windows { bytes, batch, context })
    }

    /// Inputs and targets of step `step`, each `[batch, context]`.
    pub fn batch(&self, step: usize) -> phalanx::tensor::Result<(Tensor, Tensor)> {
        let (mut x, mut y) = (Vec::new(), Vec::new());
        for row in 0..self.batch {
            let span = (self.bytes.len() - self.context) as u64;
            let at = (hash64(1337, (step * self.batch + row) as u64) % span) as usize;
            let window = &self.bytes[at..=at + self.context];
            x.extend(window[..self.context].iter().map(|&b| i64::from(b)));
            y.extend(window[1..].iter().map(|&b| i64::from(b)));
        }
        let tensor = |ids: &[i64]| Tensor::from_slice(ids, &[self.batch, self.context], Device::CPU);
        Ok((tensor(&x)?, tensor(&y)?))
    }
}

/// Writes measurements.
pub struct Report {
    pub threads: usize,
}

impl Report {
    pub fn emit(&self, workload: &str, metric: &str, value: f64, unit: &str) {
        let threads = self.threads;
        println!(
            r#"{{"peer": "phalanx", "workload": "{workload}", "metric": "{metric}", "value": {value:.5}, "unit": "{unit}", "threads": {threads}}}"#
        );
    }
}

/// Median milliseconds of `f` over about `budget_s` seconds, after two warm-ups; at least five runs.
pub fn median_ms(budget_s: f64, mut f: impl FnMut()) -> f64 {
    f();
    f();
    let (mut times, begin) = (Vec::new(), Instant::now());
    while times.len() < 5 || (begin.elapsed().as_secs_f64() < budget_s && times.len() < 1000) {
        let start = Instant::now();
        f();
        times.push(millis(start.elapsed()));
    }
    median(&mut times)
}

pub fn median(times: &mut [f64]) -> f64 {
    times.sort_by(f64::total_cmp);
    let half = times.len() / 2;
    if times.len() % 2 == 1 { times[half] } else { (times[half - 1] + times[half]) / 2.0 }
}

pub fn millis(d: Duration) -> f64 {
    d.as_secs_f64() * 1e3
}

/// This process's peak resident set in MiB.
pub fn peak_rss() -> f64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|l| l.strip_prefix("VmHWM:"));
    let kib = line.and_then(|l| l.split_whitespace().next()?.parse::<f64>().ok());
    kib.unwrap_or(f64::NAN) / 1024.0
}
