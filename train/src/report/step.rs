//! One step from the inside: memory, what ran when, what ranks told each other.

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
