//! `--trace`: what ran when, as trace events that browsers draw.
//!
//! Source: Trace Event Format, the JSON array form, whose closing bracket may be missing: a killed run's file is valid.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};
use std::time::Instant;

/// A file of spans, or nothing.
pub struct Trace {
    file: Option<(PathBuf, BufWriter<File>)>,
    begin: Instant,
}

impl Trace {
    pub fn create(path: Option<&Path>) -> Result<Trace, String> {
        let create = |path: &Path| {
            let file = File::create(path).map_err(|e| format!("{}: {e}", path.display()))?;
            Ok::<_, String>((path.to_path_buf(), BufWriter::new(file)))
        };
        let mut trace = Trace { file: path.map(create).transpose()?, begin: Instant::now() };
        trace.write("[")?;
        Ok(trace)
    }

    /// Runs `work` and notes when it ran, under the step's number.
    pub fn span<T>(
        &mut self,
        name: &str,
        step: u64,
        work: impl FnOnce() -> Result<T, String>,
    ) -> Result<T, String> {
        let start = self.begin.elapsed();
        let done = work()?;
        let (start, end) = (start.as_secs_f64() * 1e6, self.begin.elapsed().as_secs_f64() * 1e6);
        let event = serde_json::json!({
            "name": name, "ph": "X", "ts": start, "dur": end - start, "pid": 0, "tid": 0, "args": {"step": step}
        });
        self.write(&format!("{event},"))?;
        Ok(done)
    }

    fn write(&mut self, line: &str) -> Result<(), String> {
        let Some((path, file)) = &mut self.file else { return Ok(()) };
        let written = writeln!(file, "{line}").and_then(|()| file.flush());
        written.map_err(|e| format!("{}: {e}", path.display()))
    }

    /// Closes the array, so that any JSON parser reads it.
    pub fn finish(mut self) -> Result<(), String> {
        self.write(r#"{"name": "end", "ph": "i", "ts": 0, "pid": 0, "tid": 0, "s": "g"}]"#)
    }
}
