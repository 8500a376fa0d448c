//! [`open_files`] makes a run's folder and opens its metrics and its trace. [`NewFiles`] removes the files that did not exist before, if the
//! first step fails. [`remove_leftovers`] removes files that a killed run left incomplete.

use std::path::{Path, PathBuf};

use phalanx_tensor::io::atomic::create_folder;

use crate::config::run_folder;
use crate::record::Metrics;
use crate::run::Run;
use crate::{Error, Result, checkpoints};

/// Files and folders that did not exist before the run. Dropping this removes them, unless [`NewFiles::keep`] was called.
#[derive(Default)]
pub(crate) struct NewFiles {
    made: Vec<PathBuf>,
}

impl NewFiles {
    /// Makes a folder and its parents.
    pub fn folder(&mut self, path: &Path) -> Result<()> {
        let missing = path.ancestors().take_while(|p| !p.as_os_str().is_empty() && !p.exists());
        let missing: Vec<PathBuf> = missing.map(Path::to_path_buf).collect();
        self.made.extend(missing.into_iter().rev());
        create_folder(path).map_err(|e| Error::file(path, format!("wanted a folder to write to: {e}")))
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

/// Removes temporary files of a run that was killed while it wrote them, in the run's folder.
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
                "report.json",
                "metrics.jsonl",
                "metrics.csv",
                "config.toml",
            ];
            if name.ends_with(".tmp") && known.iter().any(|known| name.starts_with(&format!(".{known}."))) {
                // A file that cannot be removed only takes space.
                let _ = std::fs::remove_file(entry.path());
            }
        }
    }
}

/// Opens the files that the first rank writes during a run.
pub(crate) fn open_files(run: &Run, new_files: &mut NewFiles) -> Result<Metrics> {
    let config = &run.setup.config;
    let own = config.folder().map(|folder| folder.join("metrics.jsonl"));
    if let Some(out) = config.folder() {
        let continued =
            config.resume.as_deref().map(run_folder).is_some_and(|from| checkpoints::same_folder(from, out));
        if !continued && run.recovered.is_none() && checkpoints::is_there(out) {
            let out = out.display();
            return Err(Error::Config(format!(
                "{out} holds a run: go on with it by `resume` {out}, or choose another `out`"
            )));
        }
        new_files.folder(out)?;
        if let Some(resumed) = config.resume.as_deref().filter(|_| continued && run.recovered.is_none()) {
            checkpoints::abandon_later(out, resumed)?;
        }
        remove_leftovers(out);
        new_files.written(out, || run.extra_files.iter().try_for_each(|write| write(out)))?;
    }
    for path in run.metrics.iter().chain(&own).chain(&config.trace) {
        new_files.file(path);
    }
    let (fresh, continued) = match run.recovered {
        None => (&run.metrics[..], own.into_iter().collect()),
        Some(_) => (&[][..], run.metrics.iter().cloned().chain(own).collect::<Vec<_>>()),
    };
    let metrics = Metrics::create(fresh, &continued, run.done)?;
    config.trace.as_ref().map_or(Ok(()), |path| run.trace.open(path))?;
    Ok(metrics)
}

impl Drop for NewFiles {
    fn drop(&mut self) {
        for path in self.made.iter().rev() {
            // The run returns its own error. A folder with other files is not removed.
            let _ = std::fs::remove_file(path).or_else(|_| std::fs::remove_dir(path));
        }
    }
}
