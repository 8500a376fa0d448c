//! Power cuts: whatever a disk holds of the changes that were not synced, a run finds a complete checkpoint that is as new as the last
//! one that was reported.

use std::collections::HashMap;

use super::journal::{Change, Disk, Journal, LOSSES, Tree, write};
use super::*;
use phalanx_train::checkpoints;

/// A xorshift generator.
fn draws(mut state: u64) -> impl FnMut(usize) -> usize {
    move |below| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 33) as usize % below.max(1)
    }
}

/// What the metrics tell: a step's record, or the summary.
enum Told {
    Step(u64),
    End,
}

fn told(change: &Change) -> Option<Told> {
    let Change::Write(_, _, data) = change else { return None };
    let of_line = |line: &str| match line.strip_prefix("{\"step\":") {
        Some(rest) => rest.split(',').next().and_then(|step| step.parse().ok()).map(Told::Step),
        None => line.starts_with("{\"summary\":").then_some(Told::End),
    };
    String::from_utf8_lossy(data).lines().filter_map(of_line).next_back()
}

/// The step that a run would go on from; everything that it would read is sound.
fn found(folder: &Path) -> std::result::Result<u64, String> {
    let saved = checkpoints::latest(folder).map_err(|error| error.to_string())?;
    saved.verify().map_err(|error| format!("damaged: {error}"))?;
    let step = saved.settings()["step"].parse().unwrap();
    let recorded: Vec<u64> = numbers_in(&folder.join("metrics.jsonl"), "loss").iter().map(|n| n.0).collect();
    match recorded.iter().filter(|&&at| at < step).count() as u64 == step {
        true => Ok(step),
        false => Err(format!("damaged: goes on from {step}, and the metrics have {recorded:?}")),
    }
}

/// The files that decide from where a run goes on: not those of its report.
fn of_checkpoints(tree: &Tree) -> Tree {
    let reports = ["report", ".report", "loss.svg", ".loss.svg", "metrics.csv", ".metrics.csv", "events"];
    let is_report = |path: &Path| {
        let name = path.file_name().unwrap().to_str().unwrap();
        reports.iter().any(|report| name.starts_with(report))
    };
    tree.iter()
        .filter(|(path, _)| !is_report(path))
        .map(|(path, file)| (path.clone(), file.clone()))
        .collect()
}

/// Cuts the power after every change. Returns some of the states with the step that is found there.
fn cut(journal: &Journal, scratch: &Folder, case: &str) -> Vec<(Tree, u64)> {
    let (mut disk, mut known, mut done, mut newest) = (Disk::default(), HashMap::new(), 0, 0);
    let (mut draw, mut states, mut sample) = (draws(0x9e37_79b9_7f4a_7c15), 0, Vec::new());
    for (number, change) in journal.changes.iter().enumerate() {
        disk.apply(change, &journal.folders);
        // A save waits for the one before it, and the record of a step follows the save before the step; the summary follows the last save.
        match told(change) {
            Some(Told::Step(step)) => {
                (done, newest) = (step + 1, newest.max((step / EVERY * EVERY).saturating_sub(EVERY)))
            }
            Some(Told::End) => newest = done,
            None => {}
        }
        for loss in LOSSES {
            let tree = disk.after(loss, &mut draw, &journal.folders);
            states += 1;
            let found = known.entry(of_checkpoints(&tree)).or_insert_with_key(|tree| {
                let folder = scratch.path("cut");
                write(tree, &folder);
                let found = found(&folder.join("run"));
                let _ = fs::remove_dir_all(folder);
                found
            });
            let is_sound = match &*found {
                Ok(step) => *step >= newest,
                Err(why) => newest == 0 && !why.starts_with("damaged"),
            };
            let at = journal.changes.len();
            if let Ok(step) = *found
                && sample.len() < 3
                && draw(100) == 0
            {
                sample.push((tree, step));
            }
            assert!(
                is_sound,
                "{case}: change {number} of {at} ({}), {loss:?}: {newest} was reported; {found:?}",
                format!("{change:?}").chars().take(120).collect::<String>()
            );
        }
    }
    println!("{case}: {} changes, {states} states, {} unlike", journal.changes.len(), known.len());
    assert!(!sample.is_empty());
    sample
}

/// The journal of a run, which is killed before the calls of these numbers and goes on, one process after another.
fn journal_of(shim: &Path, folder: &Folder, flags: &str, kills: &[u64]) -> Journal {
    let (root, journal) = (folder.path("disk"), folder.path("journal"));
    let flags = format!("{flags} --out {}", root.join("run").display());
    let of = |more: &str, kill: Option<u64>| {
        let kill = kill.map(|kill| ("SHIM_KILL", kill.to_string()));
        let variables: Vec<_> =
            [("SHIM_JOURNAL", journal.display().to_string())].into_iter().chain(kill).collect();
        outcome(&start(shim, &root, &format!("{flags} {more}"), &variables))
    };
    fs::create_dir(&root).unwrap();
    for &kill in kills {
        let said = of("--resume auto", Some(kill));
        assert!(said.is_empty() || said == "well", "{flags}, killed before call {kill}: {said}");
    }
    assert_eq!(of("--resume auto", None), "well", "{flags}");
    Journal::read(&journal, &root)
}

/// Cuts the power in runs with these flags. From some states the run goes on with the losses of an undisturbed one.
fn survives(test: &str, flags: &str, kills: &[u64]) {
    let Some(shim) = shim(test) else { return };
    let folder = Folder::new();
    let journal = journal_of(shim, &folder, flags, kills);
    let undisturbed = losses(&folder.path("disk/run"));
    assert_eq!(undisturbed.len() as u64, STEPS);
    for (tree, step) in cut(&journal, &folder, flags) {
        let again = folder.path("again");
        write(&tree, &again);
        let run = again.join("run");
        train(&format!("{flags} --out {} --resume auto", run.display())).unwrap();
        assert_eq!(losses(&run), undisturbed, "{flags}: goes on from {step}");
        fs::remove_dir_all(again).unwrap();
    }
}

#[test]
fn a_power_cut_leaves_the_last_checkpoint_that_was_reported() {
    survives("a power cut", "--keep-last 2 --keep-best --validate-every 2", &[]);
}

#[test]
fn a_power_cut_leaves_the_last_checkpoint_that_ranks_wrote_together() {
    survives("a power cut", "--dp 2 --zero 3", &[]);
    survives("a power cut", "--pp 2 --micro-batches 2 --zero 1 --keep-last 3", &[]);
}

/// What a killed process has done need not be on disk when the next one goes on.
#[test]
fn a_power_cut_after_kills_leaves_the_last_checkpoint_that_was_reported() {
    survives("a power cut", "", &[45, 32, 34, 36, 38, 40]);
    survives("a power cut", "--keep-last 2", &[50, 34, 37, 40, 43]);
}
