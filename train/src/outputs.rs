//! The files that a run makes before its first step is done. They are removed if that step fails. Also removes what a killed run left half
//! written.

use std::path::{Path, PathBuf};

use crate::config::run_folder;
use crate::record::Metrics;
use crate::run::Run;
use crate::{Error, Result, checkpoints};

/// Files and folders that did not exist before; dropping this removes them unless they are to be kept.
#[derive(Default)]
pub(crate) struct Outputs {
    made: Vec<PathBuf>,
}

impl Outputs {
    /// Makes a folder, with those above it.
    pub fn folder(&mut self, path: &Path) -> Result<()> {
        let missing = path.ancestors().take_while(|p| !p.as_os_str().is_empty() && !p.exists());
        let missing: Vec<PathBuf> = missing.map(Path::to_path_buf).collect();
        self.made.extend(missing.into_iter().rev());
        std::fs::create_dir_all(path)
            .map_err(|e| Error::file(path, format!("wanted a folder to write to: {e}")))
    }

    /// Notes a file that is about to be written.
    pub fn file(&mut self, path: &Path) {
        if !path.exists() {
            self.made.push(path.to_path_buf());
        }
    }

    /// Notes the files that `write` adds to a folder.
    fn written(&mut self, folder: &Path, write: impl FnOnce() -> Result<()>) -> Result<()> {
        let files = || std::fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path());
        let before: Vec<PathBuf> = files().collect();
        let done = write();
        self.made.extend(files().filter(|path| !before.contains(path)));
        done
    }

    /// Keeps everything.
    pub fn keep(&mut self) {
        self.made.clear();
    }
}

/// Removes what a run that was killed as it wrote a file left of it, in the run's folder.
pub(crate) fn remove_leftovers(folder: &Path) {
    for folder in [folder, &folder.join("model")] {
        for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
            let name = entry.file_name().to_string_lossy().into_owned();
            let known = [
                "model.safetensors",
                "config.json",
                "tokenizer.json",
                "loss.svg",
                "report.html",
                "metrics.jsonl",
                "config.toml",
            ];
            if name.ends_with(".tmp") && known.iter().any(|known| name.starts_with(&format!(".{known}."))) {
                // What cannot be removed only takes room.
                let _ = std::fs::remove_file(entry.path());
            }
        }
    }
}

/// What the first rank writes while a run goes.
pub(crate) fn files(run: &Run, fresh: &mut Outputs) -> Result<Metrics> {
    let config = &run.means.config;
    let own = config.folder().map(|folder| folder.join("metrics.jsonl"));
    if let Some(out) = config.folder() {
        let continued =
            config.resume.as_deref().map(run_folder).is_some_and(|from| checkpoints::same_folder(from, out));
        if !continued && checkpoints::is_there(out) {
            let out = out.display();
            return Err(Error::Config(format!(
                "{out} holds a run: go on with it by `resume` {out}, or choose another `out`"
            )));
        }
        fresh.folder(out)?;
        remove_leftovers(out);
        fresh.written(out, || run.beside.iter().try_for_each(|write| write(out)))?;
    }
    for path in run.metrics.iter().chain(&own).chain(&config.trace) {
        fresh.file(path);
    }
    let metrics = Metrics::create(&run.metrics, own.as_deref(), run.done)?;
    config.trace.as_ref().map_or(Ok(()), |path| run.lane.open(path))?;
    Ok(metrics)
}

impl Drop for Outputs {
    fn drop(&mut self) {
        for path in self.made.iter().rev() {
            // The error that ends the run is on its way; a folder that holds something else stays.
            let _ = std::fs::remove_file(path).or_else(|_| std::fs::remove_dir(path));
        }
    }
}
