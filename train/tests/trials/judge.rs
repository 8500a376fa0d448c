//! What a trial has to come to.

use std::fs;
use std::path::Path;
use std::sync::OnceLock;

use serde_json::Value;

use crate::rank::STEPS;
use crate::ranks::{Ended, Folder, Start, run};
use crate::trial::{Fault, Faults, LAYOUTS, Trial};

/// The steps of undisturbed runs, by layout.
#[derive(Default)]
pub struct Undisturbed([OnceLock<Vec<String>>; LAYOUTS.len()]);

impl Undisturbed {
    fn steps(&self, layout: usize) -> &[String] {
        self.0[layout].get_or_init(|| {
            let folder = Folder::new(&format!("layout{layout}"), false);
            let ended = run(layout, &[], &folder, Start::Anew);
            let steps = recorded(&folder.run());
            assert!(
                ended.well() && steps.len() as u64 == STEPS,
                "{}: {:#?}",
                LAYOUTS[layout].flags,
                ended.said
            );
            steps
        })
    }
}

/// What the metrics say of each step that depends on no clock: losses, norms, and digests of gradients and parameters. A last line that was
/// not written whole counts for nothing.
fn recorded(run: &Path) -> Vec<String> {
    let text = fs::read_to_string(run.join("metrics.jsonl")).unwrap_or_default();
    let whole = text.split_inclusive('\n').filter_map(|line| line.strip_suffix('\n'));
    let records =
        whole.map(|line| serde_json::from_str::<Value>(line).unwrap_or_else(|e| panic!("{line}: {e}")));
    let steps = records.filter(|record| record.get("step").is_some());
    let fields = ["step", "loss", "grad_norm", "lr", "digests"];
    steps.map(|record| fields.map(|field| format!("{field} {}", record[field])).join(", ")).collect()
}

/// What is wrong with a trial, and what its ranks said.
pub struct Verdict {
    pub complaints: Vec<String>,
    pub said: Vec<String>,
}

impl Verdict {
    fn new(complaints: Vec<String>, said: &[String]) -> Verdict {
        let lines = said.iter().flat_map(|said| said.lines());
        let lines = lines.filter(|line| !line.trim().is_empty() && *line != "running 1 test");
        Verdict { complaints, said: lines.map(String::from).collect() }
    }
}

/// The complaint about steps that are not those that were wanted.
fn unlike(what: &str, steps: &[String], wanted: &[String]) -> Option<String> {
    let at = (0..steps.len().max(wanted.len())).find(|&at| steps.get(at) != wanted.get(at))?;
    Some(format!("{what}: {:?}, wanted {:?}", steps.get(at), wanted.get(at)))
}

/// Makes a trial with ranks that no process watches over: they end, and a run that goes on ends as if nothing had happened.
pub fn try_ranks(trial: &Trial, undisturbed: &Undisturbed) -> Verdict {
    let wanted = undisturbed.steps(trial.layout);
    let folder = Folder::new(&trial.number.to_string(), trial.mounts());
    let (mut complaints, mut said) = (Vec::new(), Vec::new());
    for (faults, how) in trial.rounds.iter().zip([Start::Anew, Start::Resumed]) {
        let ended = run(trial.layout, faults, &folder, how);
        let steps = recorded(&folder.run());
        complaints.extend(judge(faults, &ended, steps.len() as u64));
        complaints.extend(unlike("wrong losses", &steps, &wanted[..steps.len().min(wanted.len())]));
        said.extend(ended.said);
        folder.mend();
    }
    if recorded(&folder.run()).len() as u64 != STEPS || !complaints.is_empty() {
        let ended = run(trial.layout, &[], &folder, Start::Resumed);
        complaints.extend((!ended.well()).then(|| "the resumed run fails".to_string()));
        complaints.extend(unlike("wrong after the resume", &recorded(&folder.run()), wanted));
        said.extend(ended.said);
    }
    Verdict::new(complaints, &said)
}

/// Makes a trial under the launcher: the run ends by itself as if nothing had happened.
pub fn try_launched(trial: &Trial, undisturbed: &Undisturbed) -> Verdict {
    let folder = Folder::new(&format!("launched{}", trial.number), false);
    let ended = run(trial.layout, &trial.rounds[0], &folder, Start::Launched);
    let mut complaints = Vec::new();
    // A rank that is killed between the run's end and its own is started again and refused.
    let is_over = ended.said[0].contains("the run has ended: all of its ranks have ended well");
    if !ended.well() && !is_over {
        complaints.push(format!("the launcher ends with {:?}", ended.statuses[0]));
    }
    complaints.extend(ended.said[0].contains("panicked").then(|| "a process panics".to_string()));
    complaints.extend(unlike("wrong losses", &recorded(&folder.run()), undisturbed.steps(trial.layout)));
    Verdict::new(complaints, &ended.said)
}

/// What is wrong with how the disturbed run ended.
fn judge(faults: &Faults, ended: &Ended, steps: u64) -> Vec<String> {
    let ranks = ended.statuses.len();
    let mut complaints = Vec::new();
    let survivors: Vec<usize> = (0..ranks).filter(|&rank| !ended.was_killed(rank)).collect();
    let mut failed = Vec::new();
    for &rank in &survivors {
        match ended.statuses[rank] {
            None => complaints.push(format!("rank {rank} hangs")),
            Some(status) if status.code().is_none() => complaints.push(format!("rank {rank} died: {status}")),
            Some(status) if !status.success() => failed.push(rank),
            Some(_) => {}
        }
        if ended.said[rank].contains("panicked") {
            complaints.push(format!("rank {rank} panics"));
        }
    }
    // A rank that a signal ends before it listens to signals is like one that is killed.
    let interrupted = ended.met.iter().any(|fault| matches!(fault, Fault::Interrupt(..)));
    if failed.is_empty() {
        if steps != STEPS && !interrupted && !survivors.is_empty() && complaints.is_empty() {
            complaints.push(format!("the run ends well after {steps} steps of {STEPS}"));
        }
        return complaints;
    }
    let starts = faults.iter().map(|(fault, _)| fault).filter(|fault| acts_from_the_start(fault));
    let met: Vec<Fault> = ended.met.iter().chain(starts).copied().collect();
    let guilty: Vec<usize> = met.iter().flat_map(|fault| fault.guilty(ranks)).collect();
    let messages: Vec<(usize, &str)> =
        failed.iter().flat_map(|&rank| messages(&ended.said[rank]).map(move |m| (rank, m))).collect();
    if messages.is_empty() {
        complaints.push("no rank says what went wrong".to_string());
    }
    let causes: Vec<&str> = met.iter().flat_map(causes).collect();
    for (rank, message) in &messages {
        let blamed = blamed(message);
        // A rank that stood still while the others met finds that they are gone.
        let slept =
            faults.iter().any(|(fault, _)| matches!(fault, Fault::Stop(stopped, None) if stopped == rank));
        let gone = [" did not come to ", " has gone while the ranks connected", " is lost: "];
        if slept && gone.iter().any(|gone| message.contains(gone)) {
            continue;
        }
        if let Some(innocent) = blamed.iter().find(|rank| !guilty.contains(rank)) {
            complaints.push(format!("rank {rank} blames rank {innocent}"));
        }
        if blamed.is_empty() && !causes.iter().any(|cause| message.contains(cause)) {
            complaints.push(format!("rank {rank} names neither a rank nor a cause"));
        }
    }
    if let [only] = &met[..] {
        complaints.extend(unnamed(only, &messages));
    }
    complaints
}

fn acts_from_the_start(fault: &Fault) -> bool {
    matches!(fault, Fault::ReadOnlyDisk | Fault::FileLimit(_) | Fault::Unlike(..))
}

/// The words of which the message of a fault has one, besides the ranks that are blamed.
fn causes(fault: &Fault) -> Vec<&'static str> {
    match fault {
        Fault::FullDisk => vec!["No space left on device"],
        Fault::ReadOnlyDisk => vec!["Read-only file system"],
        Fault::FileLimit(_) => vec!["File too large"],
        Fault::Unlike(_, unlike) => unlike.named.to_vec(),
        _ => vec![],
    }
}

/// The complaint that no message has the cause.
fn unnamed(fault: &Fault, messages: &[(usize, &str)]) -> Option<String> {
    let causes = causes(fault);
    let named = causes.is_empty()
        || messages.iter().any(|(_, message)| causes.iter().any(|cause| message.contains(cause)));
    (!named).then(|| format!("no message has one of {causes:?}"))
}

/// What a rank says that it ended with.
fn messages(said: &str) -> impl Iterator<Item = &str> {
    said.lines().filter_map(|line| line.strip_prefix("ended with: "))
}

/// The ranks that a message says are lost, late, gone or failed.
fn blamed(message: &str) -> Vec<usize> {
    const VERBS: [&str; 6] =
        ["is lost", "did not ", "has ended without", "failed: ", "has gone", "does not begin"];
    let mut blamed = Vec::new();
    for (at, _) in message.match_indices("rank") {
        let rest = message[at + 4..].trim_start_matches('s').trim_start_matches(' ').trim_start_matches('[');
        let end = rest.find(|c: char| !c.is_ascii_digit() && c != ',' && c != ' ').unwrap_or(rest.len());
        let numbers: Vec<usize> =
            rest[..end].split(',').filter_map(|number| number.trim().parse().ok()).collect();
        // `rank 1 of 2 did not come`, `ranks [1] did not arrive`, `rank 0 at 127.0.0.1:29500 did not answer`.
        let mut what = rest[end..].trim_start_matches(']').trim_start();
        for word in ["of ", "at "] {
            what =
                what.strip_prefix(word).and_then(|rest| rest.split_once(' ')).map_or(what, |(_, rest)| rest);
        }
        if VERBS.iter().any(|verb| what.starts_with(verb)) {
            blamed.extend(numbers);
        }
    }
    blamed
}
