//! Folders that a run has saved, and transformers as their reader (`read_back.py`).

use std::path::{Path, PathBuf};
use std::process::Command;

/// A folder with what was saved of each case, until it is dropped.
pub struct Saved(PathBuf);

impl Saved {
    pub fn new() -> Saved {
        Saved(std::env::temp_dir().join(format!("phalanx-golden-{}", std::process::id())))
    }

    /// The folder of a case.
    pub fn of(&self, case: &str) -> PathBuf {
        self.0.join(case)
    }

    /// Lets transformers read what was saved of a set, if `PHALANX_PYTHON`, or else `python3`, has it.
    pub fn read_back(&self, set: &Path) -> Result<(), String> {
        if !self.0.exists() {
            return Ok(()); // a filter has left all models out
        }
        let named = std::env::var_os("PHALANX_PYTHON");
        let python = named.clone().unwrap_or("python3".into());
        let asked = Command::new(&python).args(["-c", "import peft, torch, transformers"]).output();
        if !asked.is_ok_and(|asked| asked.status.success()) {
            let lacks = format!(
                "{} has no torch, transformers and peft to read saved folders with",
                python.display()
            );
            if named.is_some() {
                return Err(lacks);
            }
            println!("skipped: {lacks} (PHALANX_PYTHON names another one)");
            return Ok(());
        }
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/read_back.py");
        let run = Command::new(python).arg(script).arg(set).arg(&self.0).env("HF_HUB_OFFLINE", "1").output();
        let run = run.map_err(|e| e.to_string())?;
        print!("{}", String::from_utf8_lossy(&run.stdout));
        match run.status.success() {
            true => Ok(()),
            false => Err(format!("{}: {}", run.status, String::from_utf8_lossy(&run.stderr))),
        }
    }
}

impl Drop for Saved {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}
