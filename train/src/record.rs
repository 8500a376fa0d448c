//! What a run reports: a [`Record`] for each step, a [`Summary`] at the end, and [`Metrics`], the file of both.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::{Error, Result};

/// The numbers of a finished step.
#[derive(Clone, Debug, Serialize)]
pub struct Record {
    /// From 0.
    pub step: u64,
    /// Mean loss of the global batch; of a language model in nats a token.
    pub loss: f64,
    /// Global norm of the gradients before clipping.
    pub grad_norm: f64,
    /// The schedule's learning rate.
    pub lr: f64,
    /// How long the step took, in milliseconds.
    pub step_ms: f64,
    /// Tokens of the global batch a second; rows, if a row is no sequence.
    pub tokens_per_s: f64,
    /// The share of the machine's measured peak that the model's arithmetic used (MFU), if the operations of a row are known
    /// ([`Run::with_flops`](crate::Run::with_flops)). Source: Chowdhery and others: PaLM (2022), appendix B.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mfu: Option<f64>,
    /// Floating-point operations of all ranks a second, recomputed ones included, by Megatron-LM's formula. Source: Narayanan and others:
    /// Efficient large-scale language model training on GPU clusters (2021), equation 3.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub flops_per_s: Option<f64>,
    /// As `mfu`, by Megatron-LM's formula, in which every position attends to the whole sequence. Source: Korthikanti and others: Reducing
    /// activation recomputation (2022), appendix A.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub megatron_mfu: Option<f64>,
    /// The most bytes in tensors at one time, one a rank.
    pub peak_bytes: Vec<usize>,
    /// The mean loss over the validation data after this step, if it was measured.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub validation_loss: Option<f64>,
    /// Whether the update was skipped, because the loss or a gradient was not finite or the loss exploded.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub skipped: bool,
    /// The step's digests, if the configuration asks for them ([`Config::digests`](crate::Config::digests)).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub digests: Option<StepDigests>,
    /// The share of the time since the last such record that the other ranks, on average, waited for each rank. At pauses, and every 100
    /// steps, of a run on several ranks.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub waited_for: Option<Vec<f64>>,
}

/// The digests of a step, as hexadecimal numbers. They do not depend on the layout: the same bits under another layout have the same
/// digests.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct StepDigests {
    /// The bits of the loss.
    pub loss: String,
    /// Of each parameter's gradient before clipping, added over all ranks.
    pub gradients: BTreeMap<String, String>,
    /// Of each parameter after the update.
    pub parameters: BTreeMap<String, String>,
}

/// Digests by name.
pub(crate) type ByName = BTreeMap<String, String>;

impl StepDigests {
    pub(crate) fn new(
        loss: f64,
        gradients: Option<ByName>,
        parameters: Option<ByName>,
    ) -> Option<StepDigests> {
        let loss = format!("{:016x}", loss.to_bits());
        Some(StepDigests { loss, gradients: gradients?, parameters: parameters? })
    }

    /// What differs from another run's digests of this step, the first thing by name; names are searched in this order.
    pub(crate) fn difference(&self, recorded: &StepDigests, order: &[String]) -> Option<String> {
        let unlike = |now: &ByName, before: &ByName| {
            let all = order.iter().chain(now.keys()).chain(before.keys());
            let mut names: Vec<String> = Vec::new();
            for name in all.filter(|name| now.get(*name) != before.get(*name)) {
                if !names.contains(name) {
                    names.push(name.clone());
                }
            }
            names
        };
        let gradients = unlike(&self.gradients, &recorded.gradients);
        let parameters = unlike(&self.parameters, &recorded.parameters);
        let first = match (gradients.first(), parameters.first()) {
            (Some(name), _) => format!("the gradient of {name}"),
            (None, Some(name)) => format!("the updated parameter {name}"),
            (None, None) if self.loss != recorded.loss => "the loss, but no gradient".to_string(),
            (None, None) => return None,
        };
        let loss = if self.loss == recorded.loss { "is the same" } else { "differs" };
        Some(format!(
            "the first difference is in {first}; {} gradients and {} parameters differ, and the loss {loss}",
            gradients.len(),
            parameters.len()
        ))
    }
}

/// The summary of a run, the last line of its metrics.
#[derive(Clone, Debug, Serialize)]
pub struct Summary {
    /// Steps that this process ran.
    pub steps: u64,
    /// Elements of the whole model's parameters.
    pub parameters: usize,
    /// The first of these steps' losses.
    pub first_loss: f64,
    /// The last one.
    pub last_loss: f64,
    /// The last validation's.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub validation_loss: Option<f64>,
    /// The lowest validation loss of the whole run.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub best_validation_loss: Option<f64>,
    /// How long they took together, validations and checkpoints included.
    pub seconds: f64,
    /// Tokens (or rows) a second.
    pub tokens_per_s: f64,
    /// The most bytes in tensors at one time, one a rank.
    pub peak_bytes: Vec<usize>,
    /// Why the run ended before its last step, if it did.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stopped: Option<String>,
}

/// The steps in a metrics file with one of their numbers, such as `loss` or `validation_loss`.
pub fn numbers_in(path: &Path, name: &str) -> Vec<(u64, f64)> {
    let content = std::fs::read(path).unwrap_or_default();
    let point = |(step, record, _): (u64, serde_json::Value, _)| Some((step, record.get(name)?.as_f64()?));
    records(&content).filter_map(point).collect()
}

/// The digests in a metrics file, by their steps.
pub(crate) fn digests_in(path: &Path) -> BTreeMap<u64, StepDigests> {
    let content = std::fs::read(path).unwrap_or_default();
    let of = |(step, mut record, _): (u64, serde_json::Value, _)| {
        Some((step, serde_json::from_value(record.get_mut("digests")?.take()).ok()?))
    };
    records(&content).filter_map(of).collect()
}

/// The lines that are records of steps: the step, the record and the line's bytes. Other lines, such as damaged ones, are left out.
fn records(content: &[u8]) -> impl Iterator<Item = (u64, serde_json::Value, &[u8])> {
    content.split(|&byte| byte == b'\n').filter_map(|line| {
        let record: serde_json::Value = serde_json::from_slice(line).ok()?;
        Some((record.get("step")?.as_u64()?, record, line))
    })
}

/// The metrics files. Each line is flushed when it is written.
pub(crate) struct Metrics {
    files: Vec<(PathBuf, BufWriter<File>)>,
}

impl Metrics {
    /// `fresh` files begin anew; `continued` ones keep their steps before `from`.
    pub fn create(fresh: &[PathBuf], continued: &[PathBuf], from: u64) -> Result<Metrics> {
        let mut files = Vec::new();
        for path in fresh {
            files.push((path.to_path_buf(), create(path, b"")?));
        }
        for path in continued {
            files.push((path.to_path_buf(), create(path, &kept(path, from)?)?));
        }
        Ok(Metrics { files })
    }

    /// Removes the steps from `from` on, which will run again.
    pub fn rewind(&mut self, from: u64) -> Result<()> {
        for (path, file) in self.files.iter_mut().filter(|(path, _)| path.is_file()) {
            *file = create(path, &kept(path, from)?)?;
        }
        Ok(())
    }

    pub fn step(&mut self, record: &Record) -> Result<()> {
        self.line(&serde_json::to_string(record).map_err(|e| Error::data("metrics", e.to_string()))?)
    }

    pub fn summary(&mut self, summary: &Summary) -> Result<()> {
        self.line(&serde_json::json!({ "summary": summary }).to_string())
    }

    /// The files, to be put on disk.
    pub fn to_sync(&self) -> Result<Vec<(PathBuf, File)>> {
        let regular = self.files.iter().filter(|(path, _)| path.is_file());
        let again = |(path, file): &(PathBuf, BufWriter<File>)| {
            Ok((path.clone(), file.get_ref().try_clone().map_err(|e| Error::file(path, e))?))
        };
        regular.map(again).collect()
    }

    fn line(&mut self, line: &str) -> Result<()> {
        for (path, file) in &mut self.files {
            let written = writeln!(file, "{line}").and_then(|()| file.flush());
            written.map_err(|e| Error::file(path, e))?;
        }
        Ok(())
    }
}

/// The lines of the steps before `from`.
fn kept(path: &Path, from: u64) -> Result<Vec<u8>> {
    let before = match std::fs::read(path) {
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => Vec::new(),
        read => read.map_err(|e| Error::file(path, e))?,
    };
    let mut kept = Vec::new();
    for (_, _, line) in records(&before).filter(|(step, ..)| *step < from) {
        kept.extend_from_slice(line);
        kept.push(b'\n');
    }
    Ok(kept)
}

/// Opens a file with this content. If the process is killed meanwhile, the file has either the new content or the old. A device or a
/// pipe, such as `/dev/stdout`, is opened as it is.
fn create(path: &Path, content: &[u8]) -> Result<BufWriter<File>> {
    let opened = if path.exists() && !path.is_file() {
        File::options().write(true).open(path)
    } else {
        phalanx_tensor::io::atomic::write(path, |file| file.write_all(content))?;
        File::options().append(true).open(path)
    };
    Ok(BufWriter::new(opened.map_err(|e| Error::file(path, e))?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[cfg(unix)]
    fn a_device_is_written_to_and_stays_one() {
        let path = PathBuf::from("/dev/null");
        let mut metrics = Metrics::create(std::slice::from_ref(&path), &[], 0).unwrap();
        metrics.line("{}").unwrap();
        assert!(!path.is_file());
    }

    /// A kill at any moment leaves the steps that were done.
    #[test]
    fn a_file_that_is_gone_on_with_has_its_lines_at_once() {
        let path = std::env::temp_dir().join(format!("phalanx-metrics-{}.jsonl", std::process::id()));
        std::fs::write(&path, "{\"step\":0,\"loss\":2.5}\n{\"step\":1,\"loss\":2.0}\n{\"sum").unwrap();
        let metrics = Metrics::create(&[], std::slice::from_ref(&path), 1).unwrap();
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "{\"step\":0,\"loss\":2.5}\n");
        drop(metrics);
        std::fs::remove_file(&path).unwrap();
    }

    #[test]
    fn bytes_that_are_no_text_cost_their_own_line_only() {
        let path = std::env::temp_dir().join(format!("phalanx-metrics-odd-{}.jsonl", std::process::id()));
        let lines: [&[u8]; 4] =
            [b"{\"step\":0,\"loss\":2.5}", b"{\"st\xff", b"{\"step\":1,\"loss\":2.0}", b"{\"step\":2}\n"];
        std::fs::write(&path, lines.join(&b'\n')).unwrap();
        assert_eq!(numbers_in(&path, "loss"), [(0, 2.5), (1, 2.0)]);
        let mut metrics = Metrics::create(&[], std::slice::from_ref(&path), 2).unwrap();
        metrics.line("{\"step\":2,\"loss\":1.0}").unwrap();
        assert_eq!(numbers_in(&path, "loss"), [(0, 2.5), (1, 2.0), (2, 1.0)]);
        assert_eq!(std::fs::read_to_string(&path).unwrap().lines().count(), 3);
        std::fs::remove_file(&path).unwrap();
        // What cannot be read is not replaced.
        std::fs::create_dir(&path).unwrap();
        assert!(Metrics::create(&[], std::slice::from_ref(&path), 2).is_err());
        std::fs::remove_dir(&path).unwrap();
    }
}
