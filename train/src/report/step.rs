//! The inside of one step: memory, spans, communication, times of operations.

use std::fmt::Write;

use serde::{Deserialize, Serialize, Serializer};

/// The bytes in tensors over one step of a rank. A value is valid until the next time.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Memory {
    /// The rank.
    pub rank: usize,
    /// The step, from 1.
    pub step: u64,
    /// The categories, such as `parameters`; the first is drawn at the bottom.
    pub categories: Vec<String>,
    /// The times of changes, ascending, in milliseconds from the step's start. The last is the step's end.
    pub times_ms: Vec<f64>,
    /// The bytes of each category at each time.
    pub bytes: Vec<Vec<u64>>,
    /// The device's memory in bytes; 0 if unknown.
    pub limit_bytes: u64,
}

/// The spans of one step, by lanes.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Timeline {
    /// The step, from 1.
    pub step: u64,
    /// A sentence for the caption, such as the schedule's name; may be empty.
    pub note: String,
    /// From the top down. Lanes of one rank are adjacent.
    pub lanes: Vec<Lane>,
}

/// A row of spans. Spans that overlap are drawn below each other.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Lane {
    /// The rank.
    pub rank: usize,
    /// Its name, such as `compute` or `communication`.
    pub name: String,
    /// In any order.
    pub spans: Vec<Span>,
}

/// An interval in which something ran.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Span {
    /// Its name, such as `forward` or `all_reduce`.
    pub name: String,
    /// Its kind, which gives its colour.
    pub kind: SpanKind,
    /// Its start, in milliseconds from the step's start.
    #[serde(serialize_with = "time")]
    pub start_ms: f64,
    /// Its duration in milliseconds.
    #[serde(serialize_with = "time")]
    pub ms: f64,
    /// The micro-batch, from 0, if there are several.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub micro_batch: Option<u64>,
    /// The pipeline's stage, from 0.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stage: Option<u64>,
    /// A note, such as `1.2 MB`; may be empty.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub detail: String,
}

/// The kind of a span: gives its colour, and whether the rank is busy.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SpanKind {
    /// A forward pass.
    Forward,
    /// A backward pass.
    Backward,
    /// The part of a backward pass that computes the gradients of inputs.
    BackwardInput,
    /// The part of a backward pass that computes the gradients of weights.
    BackwardWeight,
    /// A recomputed forward pass.
    Recompute,
    /// The optimizer's step.
    Optimizer,
    /// Reading a batch.
    Data,
    /// A collective or a message.
    Communication,
    /// Waiting for another rank: not busy.
    Wait,
    /// Another kind.
    #[default]
    Other,
}

/// Calls of one kind by one rank over the whole run.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Collective {
    /// The rank.
    pub rank: usize,
    /// The call, such as `all_reduce`.
    pub kind: String,
    /// The group, such as `data` or `pipeline`; may be empty.
    pub group: String,
    /// The number of calls.
    pub calls: u64,
    /// The bytes that this rank sent or received, the larger of both.
    pub bytes: u64,
    /// The time in milliseconds from each call's start until its tensors were free again, including waits.
    #[serde(serialize_with = "time")]
    pub ms: f64,
}

/// Rounds to seven digits: nanoseconds in a step of a second.
pub(super) fn time<S: Serializer>(value: &f64, to: S) -> Result<S::Ok, S::Error> {
    to.serialize_f64(super::curves::significant(*value, 7))
}

/// The times of operations.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Profile {
    /// The number of steps that were profiled.
    pub steps: u64,
    /// One for each rank.
    pub ranks: Vec<Profiled>,
    /// One for each rank, name and pass.
    pub operations: Vec<Operation>,
}

/// The steps of one rank, and its peaks.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Profiled {
    /// The rank.
    pub rank: usize,
    /// The time of all steps in milliseconds.
    #[serde(serialize_with = "time")]
    pub ms: f64,
    /// The peak of floating-point operations per second; 0 if it was not measured.
    pub peak_flops_per_s: f64,
    /// The peak of bytes per second; 0 if it was not measured.
    pub peak_bytes_per_s: f64,
}

/// All calls of one operation on one rank.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Operation {
    /// The rank.
    pub rank: usize,
    /// The operation, such as `linear`; `other` is the rest of the steps' time.
    pub name: String,
    /// The part of the step.
    pub pass: Pass,
    /// The number of calls; 0 for `other`.
    pub calls: u64,
    /// Their time in milliseconds.
    #[serde(serialize_with = "time")]
    pub ms: f64,
    /// Their floating-point operations; 0 if not counted.
    pub flops: f64,
    /// The bytes that they read and wrote; 0 if not counted.
    pub bytes: f64,
}

/// The part of a step in which an operation runs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Pass {
    /// The forward pass.
    Forward,
    /// A recomputed forward pass.
    Recompute,
    /// The backward pass.
    Backward,
    /// The rest: data, the optimizer.
    #[default]
    Step,
}

impl Pass {
    fn name(self) -> &'static str {
        match self {
            Pass::Forward => "forward",
            Pass::Recompute => "recompute",
            Pass::Backward => "backward",
            Pass::Step => "step",
        }
    }
}

impl Profile {
    /// The table as text, by ranks, the longest time first.
    pub fn table(&self) -> String {
        self.ranks.iter().map(|rank| self.of(rank)).collect::<Vec<_>>().join("\n")
    }

    fn of(&self, rank: &Profiled) -> String {
        let steps = self.steps.max(1) as f64;
        let giga = |value: f64, unit: &str| format!("{:.1} G{unit}/s", value / 1e9);
        let peaks = [(rank.peak_flops_per_s, "FLOP"), (rank.peak_bytes_per_s, "B")];
        let peaks: Vec<String> =
            peaks.into_iter().filter(|(peak, _)| *peak > 0.0).map(|(peak, unit)| giga(peak, unit)).collect();
        let mut text = format!("rank {}: {} steps of {:.2} ms", rank.rank, self.steps, rank.ms / steps);
        if !peaks.is_empty() {
            let _ = write!(text, "; at most {}", peaks.join(" and "));
        }
        let _ = writeln!(
            text,
            "\n{:<30} {:<9} {:>8} {:>10} {:>7} {:>9} {:>7} {:>9} {:>7}",
            "operation", "pass", "calls", "ms/step", "share", "GFLOP/s", "of peak", "GB/s", "of peak"
        );
        let mut own: Vec<&Operation> = self.operations.iter().filter(|o| o.rank == rank.rank).collect();
        own.sort_by(|a, b| b.ms.total_cmp(&a.ms));
        for operation in own {
            let Operation { name, pass, calls, ms, flops, bytes, .. } = operation;
            let _ = write!(
                text,
                "{name:<30} {:<9} {:>8} {:>10.3} {:>5.1} %",
                pass.name(),
                (*calls as f64 / steps).round(),
                ms / steps,
                100.0 * ms / rank.ms
            );
            for (done, peak) in [(flops, rank.peak_flops_per_s), (bytes, rank.peak_bytes_per_s)] {
                let rate = 1e3 * done / ms;
                let of_peak =
                    if peak > 0.0 { format!("{:.1} %", 100.0 * rate / peak) } else { String::new() };
                match *done > 0.0 && *ms > 0.0 {
                    true => {
                        let _ = write!(text, " {:>9.2} {of_peak:>7}", rate / 1e9);
                    }
                    false => {
                        let _ = write!(text, " {:>9} {:>7}", "", "");
                    }
                }
            }
            text.truncate(text.trim_end().len());
            text.push('\n');
        }
        text
    }
}

/// A rank is conspicuous if the others waited for it for this share of the time, and twice as long as for any other rank.
const SHARE_MIN: f64 = 0.2;

/// The rank for which the others waited much longer than for any other.
pub(crate) fn conspicuous(shares: &[f64]) -> Option<usize> {
    let (rank, most) = shares.iter().copied().enumerate().max_by(|a, b| a.1.total_cmp(&b.1))?;
    let rest = shares.iter().enumerate().filter(|(other, _)| *other != rank).map(|(_, share)| *share);
    (most > SHARE_MIN && most > 2.0 * rest.fold(0.0, f64::max)).then_some(rank)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_has_rates_and_shares_of_the_peaks() {
        let operation = |name: &str, ms, flops, bytes| Operation {
            name: name.into(),
            calls: 4,
            ms,
            flops,
            bytes,
            pass: Pass::Backward,
            ..Operation::default()
        };
        let rank = Profiled { rank: 0, ms: 20.0, peak_flops_per_s: 1e11, peak_bytes_per_s: 1e10 };
        let operations = vec![operation("add", 5.0, 0.0, 2.5e7), operation("linear", 10.0, 5e8, 0.0)];
        let table = Profile { steps: 2, ranks: vec![rank], operations }.table();
        let lines: Vec<String> =
            table.lines().map(|l| l.split_whitespace().collect::<Vec<_>>().join(" ")).collect();
        assert_eq!(lines[0], "rank 0: 2 steps of 10.00 ms; at most 100.0 GFLOP/s and 10.0 GB/s");
        assert_eq!(lines[2], "linear backward 2 5.000 50.0 % 50.00 50.0 %");
        assert_eq!(lines[3], "add backward 2 2.500 25.0 % 5.00 50.0 %");
    }
}
