//! [`ChromeTrace`]: Chrome's trace format, which Perfetto and `about:tracing` read.

use serde_json::{Value, json};

/// Where a span is drawn: the group of rows and the row.
pub type Row = (u64, u64);

/// Spans on rows, and arrows between them. Times are in microseconds.
#[derive(Debug, Default)]
pub struct ChromeTrace {
    events: Vec<Value>,
}

impl ChromeTrace {
    /// Names a group of rows.
    pub fn name_group(&mut self, group: u64, name: &str) {
        let args = json!({ "name": name });
        self.events.push(json!({ "ph": "M", "name": "process_name", "pid": group, "args": args }));
    }

    /// Names a row.
    pub fn name_row(&mut self, (group, row): Row, name: &str) {
        let args = json!({ "name": name });
        self.events.push(json!({ "ph": "M", "name": "thread_name", "pid": group, "tid": row, "args": args }));
    }

    /// What a row did from a time on, for how long. `args` is what a viewer shows of it besides.
    pub fn span(&mut self, (group, row): Row, name: &str, from: f64, length: f64, args: Value) {
        self.events.push(json!({
            "ph": "X", "name": name, "pid": group, "tid": row, "ts": from, "dur": length, "args": args
        }));
    }

    /// An arrow from a time on a row to a time on another; `id` tells it from others.
    pub fn arrow(&mut self, name: &str, id: &str, from: (Row, f64), to: (Row, f64)) {
        for (ph, ((group, row), time)) in [("s", from), ("f", to)] {
            self.events.push(json!({
                "ph": ph, "bp": "e", "name": name, "cat": name, "id": id, "pid": group, "tid": row, "ts": time
            }));
        }
    }

    /// The trace as JSON: a list of events.
    pub fn into_json(self) -> Value {
        Value::Array(self.events)
    }
}
