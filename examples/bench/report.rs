//! Timing, and the JSON lines.

use std::time::{Duration, Instant};

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
