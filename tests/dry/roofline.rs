//! How long logged operations take on a GPU: the roofline, and the order that streams and events prescribe.
//!
//! An operation takes the time of what it moves or of what it computes, whichever is longer (Williams, Waterman, Patterson: Roofline,
//! 2009), at the share of the GPU's peak that its class reaches ([`SHARES`]) or that the instructions of its kernel allow ([`Ceilings`]),
//! whichever is less, and a moment to begin. What the model leaves out: the
//! cache between operations, tiles that do not fill the processors, and what operations that run side by side take from each other.

use std::cmp::Ordering;
use std::collections::{BTreeMap, BinaryHeap, HashMap};
use std::error::Error;
use std::path::Path;

use phalanx::tensor::cuda::LoggedOperation;

/// A GPU's peaks, from NVIDIA's data sheets.
pub struct Machine {
    pub name: &'static str,
    /// Bytes a second of the device's memory.
    pub memory: f64,
    /// bf16 operations a second on dense tensor cores.
    pub tensor: f64,
    /// Bytes a second in one direction to the other GPUs (NVLink), and to the host (PCIe 5, 16 lanes).
    pub link: f64,
    pub host: f64,
    pub processors: f64,
}

pub const MACHINES: [Machine; 2] = [
    Machine { name: "H100", memory: 3.35e12, tensor: 989e12, link: 450e9, host: 64e9, processors: 132.0 },
    Machine { name: "H200", memory: 4.8e12, tensor: 989e12, link: 450e9, host: 64e9, processors: 132.0 },
];

/// 16-bit operations of a processor's dense tensor cores in a cycle.
pub const TENSOR_FLOPS: f64 = 4096.0;
/// Cycles from a load to its value. Assumed.
pub const LATENCY_CYCLES: f64 = 800.0;

/// What limits operations of one kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Class {
    Product,
    AttentionForward,
    AttentionBackward,
    /// Neighbours in memory, each moved once.
    Stream,
    /// Rows that are summed, or found by an index.
    Rows,
    Collective,
    /// To or from the host.
    Transfer,
    /// Memory and order: no time.
    None,
}

/// Shares of the peak of tensor cores and of the memory that a class reaches, and where that comes from.
struct Share {
    class: Class,
    tensor: f64,
    moved: f64,
}

const SHARES: [Share; 7] = [
    // cuBLASLt with wgmma: 769 to 798 TFLOP/s were measured for 8192^3 on an H200.
    Share { class: Class::Product, tensor: 0.78, moved: 0.90 },
    // FlashAttention-3, which has products of warpgroups and copies by tensor maps too, reaches 27 % (1,024 tokens, causal, heads of 64)
    // to 66 % (16,384 tokens, heads of 128) forward, and 37 to 57 % backward (Shah et al., 2024, figures 5 and 6). The lowest counts.
    Share { class: Class::AttentionForward, tensor: 0.27, moved: 0.90 },
    Share { class: Class::AttentionBackward, tensor: 0.37, moved: 0.90 },
    // A copy on an H200 was measured at 4.3 of 4.8 TB/s.
    Share { class: Class::Stream, tensor: 1.0, moved: 0.90 },
    // Assumed until a GPU has measured it: sums and barriers of a row keep loads waiting.
    Share { class: Class::Rows, tensor: 1.0, moved: 0.80 },
    // Assumed until GPUs have measured it: NCCL's rings on NVLink reach some 80 % of one direction.
    Share { class: Class::Collective, tensor: 1.0, moved: 0.80 },
    Share { class: Class::Transfer, tensor: 1.0, moved: 0.80 },
];

/// The share of a GPU's links that collectives reach.
pub fn collective_share() -> f64 {
    shares(Class::Collective)[1]
}

/// The shares of the tensor cores' peak and of the memory's that a class reaches.
pub fn shares(class: Class) -> [f64; 2] {
    SHARES.iter().find(|share| share.class == class).map_or([1.0; 2], |share| [share.tensor, share.moved])
}

/// The shares of the peaks that the instructions of kernels allow, by operation and kernel: of the memory's and of the tensor cores'. They
/// come from `tests/sass/kernels.jsonl`, the table of kernels' assembly, where there is one. The log does not tell the variants of a
/// kernel apart, so the best one's share counts.
#[derive(Default)]
pub struct Ceilings(HashMap<(String, String), Vec<Ceiling>>);

/// Of a variant of a kernel, with its macros.
struct Ceiling {
    macros: String,
    tensor: bool,
    share: f64,
}

impl Ceilings {
    pub fn read() -> Result<Ceilings, Box<dyn Error>> {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/sass/kernels.jsonl");
        if !path.is_file() {
            return Ok(Ceilings::default());
        }
        let mut found = HashMap::<_, Vec<Ceiling>>::new();
        for line in std::fs::read_to_string(&path)?.lines() {
            let row: serde_json::Value = serde_json::from_str(line)?;
            let text = |name: &str| row[name].as_str().map(String::from);
            let (Some(op), Some(entry), Some(macros), Some(share)) =
                (text("op"), text("entry"), text("macros"), row["peak_share"].as_f64())
            else {
                continue;
            };
            if text("arch").is_some_and(|arch| arch.starts_with("sm_9")) {
                let tensor = row["peak_of"] == "tensor";
                found.entry((op, entry)).or_default().push(Ceiling { macros, tensor, share });
            }
        }
        if found.is_empty() {
            return Err(format!("{}: no row has the share of a kernel for sm_90", path.display()).into());
        }
        Ok(Ceilings(found))
    }

    /// Of the tensor cores' peak and of the memory's; 1 where nothing is known.
    fn of(&self, operation: &LoggedOperation) -> [f64; 2] {
        self.of_variants(&operation.op, &operation.name, "")
    }

    /// The same of those variants whose macros have this text.
    pub fn of_variants(&self, op: &str, entry: &str, text: &str) -> [f64; 2] {
        let known = self.0.get(&(op.to_string(), entry.to_string()));
        [true, false].map(|tensor| {
            let alike = known.into_iter().flatten().filter(|c| c.tensor == tensor && c.macros.contains(text));
            alike.map(|ceiling| ceiling.share).reduce(f64::max).unwrap_or(1.0)
        })
    }
}

/// Milliseconds from the end of an operation to the begin of one that waits for it. Assumed.
pub const GAP_MS: f64 = 1e-3;
/// Milliseconds that a collective takes besides its bytes. Assumed.
const COLLECTIVE_MS: f64 = 20e-3;
/// Milliseconds that the host takes to queue an operation outside of a graph, and to launch a graph. Assumed.
const HOST_MS: f64 = 4e-3;

/// Kernels that go over rows; all that are not named move neighbours.
const ROWS: [&str; 8] =
    ["norm", "cross_entropy", "softmax", "sum", "embedding", "index", "sums_of_squares", "attention_sums"];

pub fn class(operation: &LoggedOperation) -> Class {
    let (op, name) = (operation.op.as_str(), operation.name.as_str());
    match operation.kind.as_str() {
        "kernel" if name == "attention_forward" => Class::AttentionForward,
        "kernel" if name.starts_with("attention_backward") => Class::AttentionBackward,
        "kernel" if operation.traffic.flops > 0 => Class::Product,
        "kernel" if ROWS.iter().any(|rows| op.contains(rows) || name == *rows) => Class::Rows,
        "kernel" | "copy" | "fill" => Class::Stream,
        "library" if name.starts_with("product") => Class::Product,
        "library" | "peer" => Class::Collective,
        "upload" | "download" => Class::Transfer,
        _ => Class::None,
    }
}

/// Bytes that go over a GPU's links in the direction that has more of them: for a collective those of a ring, for sends and receives
/// what they move.
fn sent_bytes(operation: &LoggedOperation) -> f64 {
    let ranks =
        operation.name.split_once(" of ").and_then(|(_, rest)| rest.split(' ').next()?.parse::<f64>().ok());
    let others = ranks.map_or(1.0, |ranks| (ranks - 1.0) / ranks);
    let (read, written) = (operation.traffic.read as f64, operation.traffic.written as f64);
    match operation.name.split(' ').next() {
        Some("all_reduce") => 2.0 * others * read,
        Some("all_gather" | "reduce_scatter" | "all_to_all") => others * read.max(written),
        _ => read.max(written),
    }
}

/// How long an operation takes, whether what it computes decides that, and the share of the peak that it reaches.
pub fn milliseconds(operation: &LoggedOperation, machine: &Machine, ceilings: &Ceilings) -> (f64, bool, f64) {
    let class = class(operation);
    if class == Class::None {
        return (0.0, false, 1.0);
    }
    let ([tensor, moved], [tensor_max, moved_max]) = (shares(class), ceilings.of(operation));
    let share = Share { class, tensor: tensor.min(tensor_max), moved: moved.min(moved_max) };
    let bytes = (operation.traffic.read + operation.traffic.written) as f64;
    let moved = match class {
        Class::Collective => COLLECTIVE_MS + 1e3 * sent_bytes(operation) / (machine.link * share.moved),
        Class::Transfer => 1e3 * bytes / (machine.host * share.moved),
        _ => 1e3 * bytes / (machine.memory * share.moved),
    };
    let computed = 1e3 * operation.traffic.flops as f64 / (machine.tensor * share.tensor);
    let computes = computed > moved;
    (moved.max(computed) + GAP_MS, computes, if computes { share.tensor } else { share.moved })
}

/// What a GPU does one after the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Engine {
    Compute,
    Links,
    Host,
}

fn engine(operation: &LoggedOperation) -> Engine {
    match class(operation) {
        Class::Collective => Engine::Links,
        Class::Transfer => Engine::Host,
        _ => Engine::Compute,
    }
}

/// A stream, or a branch of a graph.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Lane {
    pub operations: usize,
    /// Of kernels and products, of collectives, of copies to and from the host.
    pub busy_ms: [f64; 3],
    pub begin_ms: f64,
    pub end_ms: f64,
}

/// What a GPU computes while it exchanges: the forward pass until the first derivative, the backward pass until the last one, with what it
/// recomputes, and the update.
pub const PHASES: [&str; 3] = ["forward", "backward", "update"];

/// Collectives of one name: what hides them, and what does not.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Exchange {
    /// Over a GPU's links, in one direction.
    pub bytes: f64,
    pub ms: f64,
    /// Of these, those in which kernels of each of [`PHASES`] run.
    pub hidden_ms: [f64; 3],
}

impl Exchange {
    /// In which the GPU computes nothing.
    pub fn exposed_ms(&self) -> f64 {
        // The sums of many spans differ in their last bits.
        (self.ms - self.hidden_ms.iter().sum::<f64>()).max(0.0)
    }
}

/// When operations of one GPU run.
#[derive(Clone, Debug, Default)]
pub struct Timeline {
    pub total_ms: f64,
    pub compute_ms: f64,
    /// Collectives by their names.
    pub exchanges: BTreeMap<String, Exchange>,
    /// The most bytes that are allocated at a time, besides those from before.
    pub peak_bytes: i64,
    /// By the first operation.
    pub lanes: Vec<Lane>,
}

/// An operation's begin and end.
type Span = (f64, f64);

/// Runs the operations of a device: each when those that it waits for have ended, the host has queued it, and its engine has done what was
/// ready before.
pub fn timeline(operations: &[&LoggedOperation], machine: &Machine, ceilings: &Ceilings) -> Timeline {
    let spans = schedule(operations, machine, ceilings);
    let mut done = Timeline::default();
    let (mut lanes, mut changes) = (HashMap::<u64, usize>::new(), Vec::new());
    let (mut kernels, mut exchanges) = (Vec::new(), Vec::new());
    for (operation, &(begin, end)) in operations.iter().zip(&spans) {
        done.total_ms = done.total_ms.max(end);
        match operation.kind.as_str() {
            "allocate" => changes.push((begin, operation.traffic.written as i64)),
            "free" => changes.push((end, -(operation.traffic.written as i64))),
            _ => {}
        }
        if begin == end {
            continue;
        }
        match engine(operation) {
            Engine::Compute => kernels.push((*operation, (begin, end))),
            Engine::Links => exchanges.push((*operation, (begin, end))),
            Engine::Host => {}
        }
        let lane = *lanes.entry(operation.chain).or_insert(done.lanes.len());
        if lane == done.lanes.len() {
            done.lanes.push(Lane { begin_ms: begin, ..Lane::default() });
        }
        let lane = &mut done.lanes[lane];
        lane.operations += 1;
        lane.busy_ms[engine(operation) as usize] += end - begin;
        lane.end_ms = end;
    }
    // What is freed at a moment is free for what is allocated then.
    changes.sort_by(|a: &(f64, i64), b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)));
    let mut used = 0;
    for (_, change) in changes {
        used += change;
        done.peak_bytes = done.peak_bytes.max(used);
    }
    done.compute_ms = kernels.iter().fold(0.0, |sum, (_, (begin, end))| sum + (end - begin));
    let work = phases(&kernels);
    let shared = |a: &Span, b: &Span| (a.1.min(b.1) - a.0.max(b.0)).max(0.0);
    for (operation, span) in exchanges {
        let sums = done.exchanges.entry(operation.name.clone()).or_default();
        sums.bytes += sent_bytes(operation);
        sums.ms += span.1 - span.0;
        work.iter().for_each(|(phase, kernel)| sums.hidden_ms[*phase] += shared(&span, kernel));
    }
    done
}

/// Spans of kernels, with the number of their phase in [`PHASES`]. Kernels that add what was received are the exchange's own and hide
/// none of it.
fn phases(kernels: &[(&LoggedOperation, Span)]) -> Vec<(usize, Span)> {
    let derivatives = || kernels.iter().filter(|(operation, _)| operation.op.ends_with("_backward"));
    let begin = derivatives().fold(f64::INFINITY, |first, (_, (begin, _))| first.min(*begin));
    let end = derivatives().fold(0.0, |last: f64, (_, (_, end))| last.max(*end));
    let phase = |span: &Span| usize::from(span.0 >= begin) + usize::from(span.0 >= end.max(begin));
    let work = kernels.iter().filter(|(operation, _)| operation.name != "combine");
    work.map(|(_, span)| (phase(span), *span)).collect()
}

/// A moment at which an operation may begin, and its place in the list; the earliest first.
#[derive(PartialEq)]
struct Ready(f64, usize);

impl Eq for Ready {}

impl PartialOrd for Ready {
    fn partial_cmp(&self, other: &Ready) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Ready {
    fn cmp(&self, other: &Ready) -> Ordering {
        other.0.total_cmp(&self.0).then(other.1.cmp(&self.1))
    }
}

fn schedule(operations: &[&LoggedOperation], machine: &Machine, ceilings: &Ceilings) -> Vec<Span> {
    let places: HashMap<u64, usize> = operations.iter().enumerate().map(|(i, o)| (o.ticket, i)).collect();
    let mut waits = vec![0; operations.len()];
    let mut after: Vec<Vec<usize>> = vec![Vec::new(); operations.len()];
    for (i, operation) in operations.iter().enumerate() {
        let mut before: Vec<usize> =
            operation.before.iter().filter_map(|ticket| places.get(ticket)).copied().collect();
        before.sort_unstable();
        before.dedup();
        waits[i] = before.len();
        before.into_iter().for_each(|earlier| after[earlier].push(i));
    }
    let mut begins = queued(operations);
    let first = (0..operations.len()).filter(|&i| waits[i] == 0);
    let mut ready: BinaryHeap<Ready> = first.map(|i| Ready(begins[i], i)).collect();
    let (mut spans, mut free) = (vec![(0.0, 0.0); operations.len()], HashMap::<Engine, f64>::new());
    while let Some(Ready(moment, i)) = ready.pop() {
        let (length, ..) = milliseconds(operations[i], machine, ceilings);
        let free = free.entry(engine(operations[i])).or_default();
        let begin = if length > 0.0 { moment.max(*free) } else { moment };
        spans[i] = (begin, begin + length);
        if length > 0.0 {
            *free = begin + length;
        }
        for &later in &after[i] {
            begins[later] = begins[later].max(begin + length);
            waits[later] -= 1;
            if waits[later] == 0 {
                ready.push(Ready(begins[later], later));
            }
        }
    }
    spans
}

/// When the host queues each operation. A thread of the host feeds each stream; a graph's launch is one call.
fn queued(operations: &[&LoggedOperation]) -> Vec<f64> {
    let (mut hosts, mut was_in_graph) = (HashMap::<u64, f64>::new(), false);
    let mut moment = |operation: &LoggedOperation| {
        let goes_on = operation.in_graph && was_in_graph;
        was_in_graph = operation.in_graph;
        let host = hosts.entry(if operation.in_graph { 0 } else { operation.chain }).or_default();
        if !goes_on && class(operation) != Class::None {
            *host += HOST_MS;
        }
        *host
    };
    operations.iter().map(|operation| moment(operation)).collect()
}
