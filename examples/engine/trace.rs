//! What ran when, and the picture of it.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use phalanx::parallel::engine::Lane;
use serde_json::json;

use crate::Result;

/// A record of operations; clones share it.
#[derive(Clone)]
pub struct Trace {
    begin: Instant,
    spans: Arc<Mutex<Vec<Span>>>,
}

/// An operation that has run, in seconds since the beginning.
#[derive(Clone, Copy)]
struct Span {
    name: &'static str,
    lane: Lane,
    start: f64,
    end: f64,
}

impl Trace {
    pub fn new() -> Trace {
        Trace { begin: Instant::now(), spans: Arc::default() }
    }

    /// Runs `work` and records it.
    pub fn timed<T>(&self, name: &'static str, lane: Lane, work: impl FnOnce() -> T) -> T {
        let start = self.begin.elapsed().as_secs_f64();
        let value = work();
        let span = Span { name, lane, start, end: self.begin.elapsed().as_secs_f64() };
        self.spans.lock().unwrap_or_else(PoisonError::into_inner).push(span);
        value
    }

    fn spans(&self, prefix: &str) -> Vec<Span> {
        let spans = self.spans.lock().unwrap_or_else(PoisonError::into_inner);
        let mut spans: Vec<Span> =
            spans.iter().filter(|span| span.name.starts_with(prefix)).copied().collect();
        spans.sort_by(|a, b| a.start.total_cmp(&b.start));
        spans
    }

    /// For how many seconds operations whose names begin with `ours` ran beside others whose names begin with `beside`,
    /// and for how many in all.
    pub fn overlap(&self, ours: &str, beside: &str) -> (f64, f64) {
        let (ours, others) = (self.spans(ours), self.spans(beside));
        let both = |span: &Span| {
            let (mut seconds, mut from) = (0.0, span.start);
            for other in &others {
                let end = other.end.min(span.end);
                seconds += (end - other.start.max(from)).max(0.0);
                from = from.max(end); // what two others cover counts once
            }
            seconds
        };
        (ours.iter().map(both).sum(), ours.iter().map(|span| span.end - span.start).sum())
    }

    /// Writes it in Chrome's format, which Perfetto reads too.
    pub fn write(&self, path: &str) -> Result<()> {
        let spans = self.spans("");
        let mut lanes: Vec<Lane> = Vec::new();
        let mut events = Vec::new();
        for span in spans {
            let lane = lanes.iter().position(|lane| *lane == span.lane).unwrap_or_else(|| {
                let (lane, name) = (lanes.len(), json!({ "name": span.lane.to_string() }));
                lanes.push(span.lane);
                events.push(json!({ "ph": "M", "name": "thread_name", "pid": 0, "tid": lane, "args": name }));
                lane
            });
            let (start, length) = (span.start * 1e6, (span.end - span.start) * 1e6);
            events.push(json!({
                "ph": "X", "name": span.name, "pid": 0, "tid": lane, "ts": start, "dur": length
            }));
        }
        let text = serde_json::to_string(&events)?;
        std::fs::write(path, text).map_err(|e| format!("{path}: {e}").into())
    }
}
