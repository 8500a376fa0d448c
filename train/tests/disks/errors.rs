//! Disks that refuse: the run says which file and why, the checkpoint before stays, and the run goes on from it when the disk is well.

use super::*;
use phalanx_train::checkpoints::latest;

const EINTR: i32 = 4;
const EIO: i32 = 5;
const ENOSPC: i32 = 28;
const EROFS: i32 = 30;
const EDQUOT: i32 = 122;

/// What an error says of an errno.
fn cause(errno: i32) -> String {
    std::io::Error::from_raw_os_error(errno).to_string()
}

/// The names in a folder. Those of TensorBoard's events have times.
fn names(folder: &Path) -> Vec<String> {
    let names = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let mut names: Vec<String> =
        names.filter(|name| !name.starts_with("events") && name != "flight").collect();
    names.sort();
    names
}

/// A run, undisturbed, and the calls with which it changes files whose paths have `of`.
struct Case {
    shim: &'static Path,
    folder: Folder,
    flags: &'static str,
    losses: Vec<(u64, u64)>,
    names: Vec<String>,
}

impl Case {
    fn new(test: &str, flags: &'static str) -> Option<Case> {
        let (shim, folder) = (shim(test)?, Folder::new());
        let out = folder.path("whole");
        train(&format!("{flags} --out {}", out.display())).unwrap();
        Some(Case { shim, losses: losses(&out), names: names(&out), folder, flags })
    }

    /// Runs over a disk with these variables; how that ended, and the run's folder.
    fn run(&self, variables: &[(&str, String)]) -> (String, PathBuf) {
        let out = self.folder.path("disk/run");
        let _ = fs::remove_dir_all(self.folder.path("disk"));
        fs::create_dir_all(out.parent().unwrap()).unwrap();
        let flags = format!("{} --out {}", self.flags, out.display());
        (outcome(&start(self.shim, &self.folder.path("disk"), &flags, variables)), out)
    }

    /// Calls number `from` and on fail. The run ends well, or with an error that has `cause`; it goes on when the disk is well.
    /// Returns the error; none if the run has ended well.
    fn fails(&self, from: usize, count: usize, error: &str, of: &str, cause: &str) -> Option<String> {
        let variables = [("SHIM_FROM", from), ("SHIM_COUNT", count)].map(|(name, n)| (name, n.to_string()));
        let more = [("SHIM_ERROR", error.to_string()), ("SHIM_MATCH", of.to_string())];
        let (said, out) = self.run(&[variables, more].concat());
        let case = format!("{} {error} at call {from} of {of:?}: {said}", self.flags);
        let done = losses(&out);
        if !done.is_empty() {
            // A save waits for the one before it.
            let reported = ((done.len() as u64 - 1) / EVERY * EVERY).saturating_sub(EVERY);
            let found = latest(&out);
            let step = found.as_ref().map_or(0, |saved| saved.settings()["step"].parse().unwrap());
            assert!(step >= reported, "{case}: {step} is found, {reported} was saved: {found:?}");
            found.iter().for_each(|saved| saved.verify().unwrap());
        }
        let text = said.strip_prefix("with: ");
        match text {
            Some(text) => assert!(text.contains("/run") && text.contains(cause), "{case}"),
            None => assert_eq!((said.as_str(), done.len()), ("well", self.losses.len()), "{case}"),
        }
        train(&format!("{} --out {} --resume auto", self.flags, out.display())).expect(&case);
        assert_eq!(losses(&out), self.losses, "{case}");
        assert_eq!(names(&out), self.names, "{case}: files are left");
        text.map(String::from)
    }
}

/// Calls in the folder of a checkpoint that is being saved.
const SAVING: &str = ".checkpoint.saving";

#[test]
fn an_error_at_any_call_of_a_save_is_named_and_the_checkpoint_before_stays() {
    let Some(case) = Case::new("errors", "--steps 4 --dp 2 --zero 1") else { return };
    // Two ranks: the folder, two files with header, data and sync each, the index, the folder's sync, the rename.
    for from in 0..24 {
        if let Some(text) = case.fails(from, 1, &EIO.to_string(), SAVING, &cause(EIO)) {
            assert!(text.contains("rank "), "{text}");
        }
    }
    let mut failed = 0;
    for errno in [ENOSPC, EDQUOT, EROFS] {
        // From some call on nothing is taken any more.
        for from in [0, 3, 9] {
            failed += case.fails(from, 1000, &errno.to_string(), SAVING, &cause(errno)).iter().count();
        }
    }
    assert!(failed > 6, "only {failed} runs have failed");
}

#[test]
fn calls_that_are_interrupted_or_cut_short_are_repeated() {
    let Some(case) = Case::new("short writes", "--steps 4") else { return };
    for error in [EINTR.to_string(), "short".into()] {
        for (from, count) in [(0, 1), (2, 1), (0, 1000)] {
            // A call that is interrupted without end is repeated without end.
            let count = if error == "short" { count } else { count.min(3) };
            assert_eq!(case.fails(from, count, &error, "/run", "none"), None);
        }
    }
}

#[test]
fn an_error_at_any_call_in_a_runs_folder_is_named() {
    let Some(case) = Case::new("errors", "--steps 2 --keep-last 2") else { return };
    // An unoptimised run takes long.
    let stride = if cfg!(debug_assertions) { 3 } else { 1 };
    let calls = (0..70).step_by(stride);
    let failed: usize = calls.map(|n| case.fails(n, 1, "5", "/run", &cause(EIO)).iter().count()).sum();
    assert!(failed * stride > 40, "only {failed} runs have failed");
}

#[test]
fn a_disk_that_is_full_for_the_metrics_is_named() {
    let Some(case) = Case::new("a full disk", "--steps 4") else { return };
    let text = case.fails(4, 1, &ENOSPC.to_string(), "metrics.jsonl", &cause(ENOSPC)).unwrap();
    assert!(text.contains("metrics.jsonl"), "{text}");
}

#[test]
fn a_checkpoint_that_cannot_be_read_is_named() {
    let Some(case) = Case::new("reads", "--steps 4") else { return };
    let out = case.folder.path("whole");
    let flags = format!("--steps 6 --out {} --resume auto", out.display());
    for of in ["checkpoint.json", "rank-0.safetensors"] {
        let variables = [("SHIM_READS", "1"), ("SHIM_ERROR", "5"), ("SHIM_FROM", "0"), ("SHIM_MATCH", of)];
        let variables = variables.map(|(name, value)| (name, value.to_string()));
        let said = outcome(&start(case.shim, &case.folder.0, &flags, &variables));
        assert!(said.starts_with("with: ") && said.contains(of) && said.contains(&cause(EIO)), "{said}");
    }
    train(&flags).unwrap();
}

/// As on NFS, whose server gives locks.
#[test]
fn a_lock_is_asked_for_again_and_a_run_without_one_says_so() {
    let Some(case) = Case::new("locks", "--steps 2") else { return };
    for (refused, warned) in [(3, false), (1000, true)] {
        let out = case.folder.path(&format!("run-{refused}"));
        let flags = format!("--steps 2 --out {}", out.display());
        let variables = [("SHIM_NO_LOCKS", refused.to_string())];
        let output = start(case.shim, &case.folder.0, &flags, &variables);
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!((outcome(&output).as_str(), said.contains("goes on without a lock")), ("well", warned));
        assert!(!warned || said.contains(&out.display().to_string()), "{said}");
    }
}

#[test]
fn a_slow_disk_changes_nothing() {
    let Some(case) = Case::new("a slow disk", "--dp 2 --steps 4 --timeout 2") else { return };
    let (said, out) = case.run(&[("SHIM_DELAY_US", "30000".to_string())]);
    assert_eq!((said.as_str(), losses(&out)), ("well", case.losses));
}
