//! One step from the inside: memory, what ran when, what ranks told each other.

use std::fmt::Write;

use serde::{Deserialize, Serialize, Serializer};

/// The bytes in tensors over one step of a rank. A value holds until the next time.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Memory {
    /// Which rank.
    pub rank: usize,
    /// Which step, from 1.
    pub step: u64,
    /// What the bytes are for, such as `parameters`; the first is drawn at the bottom.
    pub categories: Vec<String>,
    /// When something changed, in milliseconds from the step's start, in order. The last time is where the step ends.
    pub times_ms: Vec<f64>,
    /// For each category a value in bytes for each time.
    pub bytes: Vec<Vec<u64>>,
    /// What the device has, in bytes; 0 where that is not known.
    pub limit_bytes: u64,
}

/// What ran when in one step.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Timeline {
    /// Which step, from 1.
    pub step: u64,
    /// A sentence for the caption, such as the schedule's name; may be empty.
    pub note: String,
    /// From the top down. Lanes of one rank stand together.
    pub lanes: Vec<Lane>,
}

/// A row of spans. Spans that overlap are drawn below each other.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Lane {
    /// Which rank.
    pub rank: usize,
    /// What runs here, such as `compute` or `communication`.
    pub name: String,
    /// In any order.
    pub spans: Vec<Span>,
}

/// Something that ran for a while.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Span {
    /// What ran, such as `forward` or `all_reduce`.
    pub name: String,
    /// Its colour.
    pub kind: SpanKind,
    /// In milliseconds from the step's start.
    #[serde(serialize_with = "time")]
    pub start_ms: f64,
    /// How long, in milliseconds.
    #[serde(serialize_with = "time")]
    pub ms: f64,
    /// Which micro-batch, from 0, where there are several.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub micro_batch: Option<u64>,
    /// Which stage of the pipeline, from 0.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stage: Option<u64>,
    /// What else there is to say, such as `1.2 MB`; may be empty.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub detail: String,
}

/// What a span does: its colour, and whether the rank is busy.
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
    /// A forward pass that is run again for its activations.
    Recompute,
    /// The optimizer's step.
    Optimizer,
    /// Reading a batch.
    Data,
    /// A collective or a message.
    Communication,
    /// Waiting for another rank: not busy.
    Wait,
    /// Something else.
    #[default]
    Other,
}

/// Calls of one kind by one rank over the whole run.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Collective {
    /// Which rank.
    pub rank: usize,
    /// Which call, such as `all_reduce`.
    pub kind: String,
    /// Among whom, such as `data` or `pipeline`; may be empty.
    pub group: String,
    /// How many.
    pub calls: u64,
    /// The bytes that this rank put in or got out, whichever is more.
    pub bytes: u64,
    /// From each call's start until its tensors were free again, in milliseconds, waiting included.
    #[serde(serialize_with = "time")]
    pub ms: f64,
}

/// Seven digits: nanoseconds in a step of a second.
pub(super) fn time<S: Serializer>(value: &f64, to: S) -> Result<S::Ok, S::Error> {
    to.serialize_f64(super::curves::significant(*value, 7))
}

/// The time that operations took.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Profile {
    /// Over how many steps.
    pub steps: u64,
    /// One a rank.
    pub ranks: Vec<Profiled>,
    /// One for each rank, name and pass.
    pub operations: Vec<Operation>,
}

/// The steps of one rank, and what it can do at most.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Profiled {
    /// Which rank.
    pub rank: usize,
    /// All steps together, in milliseconds.
    #[serde(serialize_with = "time")]
    pub ms: f64,
    /// The most floating-point operations a second; 0 where that was not measured.
    pub peak_flops_per_s: f64,
    /// The most bytes a second; 0 where that was not measured.
    pub peak_bytes_per_s: f64,
}

/// All calls of one operation on one rank.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Operation {
    /// Which rank.
    pub rank: usize,
    /// Which operation, such as `linear`; `other` is the time of the steps that none has.
    pub name: String,
    /// Where it ran.
    pub pass: Pass,
    /// How many calls; 0 of what is no call.
    pub calls: u64,
    /// Their time in milliseconds.
    #[serde(serialize_with = "time")]
    pub ms: f64,
    /// Their floating-point operations; 0 where they are not counted.
    pub flops: f64,
    /// The bytes that they read and wrote; 0 where they are not counted.
    pub bytes: f64,
}

/// The part of a step that an operation runs in.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Pass {
    /// The forward pass.
    Forward,
    /// A forward pass that is run again.
    Recompute,
    /// The backward pass.
    Backward,
    /// Outside of them: data, the optimizer.
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
    /// The table as text, rank after rank, what took longest first.
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
