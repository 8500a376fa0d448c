//! One JSON object a step, flushed as it goes, and a summary at the end.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

use serde::Serialize;

/// What is known of a step once it is done.
#[derive(Clone, Debug, Serialize)]
pub struct Record {
    /// From 0.
    pub step: u64,
    /// Mean loss of the global batch, in nats a token.
    pub loss: f64,
    /// Global norm of the gradients before clipping.
    pub grad_norm: f64,
    pub lr: f64,
    pub step_ms: f64,
    pub tokens_per_s: f64,
    /// The most bytes in tensors at one time, one a rank.
    pub peak_bytes: Vec<usize>,
}

/// The last line.
#[derive(Serialize)]
pub struct Summary {
    pub steps: u64,
    pub parameters: usize,
    pub first_loss: f64,
    pub last_loss: f64,
    pub seconds: f64,
    pub tokens_per_s: f64,
    pub peak_bytes: Vec<usize>,
}

/// The steps in a file and their losses.
pub fn losses(path: &Path) -> Vec<(u64, f64)> {
    let point = |line: &str| {
        let record: serde_json::Value = serde_json::from_str(line).ok()?;
        Some((record.get("step")?.as_u64()?, record.get("loss")?.as_f64()?))
    };
    std::fs::read_to_string(path).unwrap_or_default().lines().filter_map(point).collect()
}

/// Files that get every line.
pub struct Metrics {
    files: Vec<(PathBuf, BufWriter<File>)>,
}

impl Metrics {
    /// `fresh` files begin anew; `continued` ones keep their steps before `from`.
    pub fn create(fresh: Option<&Path>, continued: Option<&Path>, from: u64) -> Result<Metrics, String> {
        let mut files = Vec::new();
        if let Some(path) = fresh {
            files.push((path.to_path_buf(), create(path, "")?));
        }
        if let Some(path) = continued {
            let before = std::fs::read_to_string(path).unwrap_or_default();
            let step_of =
                |line: &&str| serde_json::from_str::<serde_json::Value>(line).ok()?.get("step")?.as_u64();
            let kept: String = before
                .lines()
                .filter(|l| step_of(l).is_some_and(|s| s < from))
                .map(|l| format!("{l}\n"))
                .collect();
            files.push((path.to_path_buf(), create(path, &kept)?));
        }
        Ok(Metrics { files })
    }

    pub fn step(&mut self, record: &Record) -> Result<(), String> {
        self.line(&serde_json::to_string(record).map_err(|e| e.to_string())?)
    }

    pub fn summary(&mut self, summary: &Summary) -> Result<(), String> {
        self.line(&serde_json::json!({ "summary": summary }).to_string())
    }

    fn line(&mut self, line: &str) -> Result<(), String> {
        for (path, file) in &mut self.files {
            let written = writeln!(file, "{line}").and_then(|()| file.flush());
            written.map_err(|e| format!("{}: {e}", path.display()))?;
        }
        Ok(())
    }
}

fn create(path: &Path, content: &str) -> Result<BufWriter<File>, String> {
    let file = File::create(path).map_err(|e| format!("{}: {e}", path.display()))?;
    let mut file = BufWriter::new(file);
    file.write_all(content.as_bytes()).map_err(|e| format!("{}: {e}", path.display()))?;
    Ok(file)
}
