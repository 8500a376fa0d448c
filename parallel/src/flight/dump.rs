//! [`Dump`]: the file of a rank's flight recorder, `rank-I.jsonl`. Its first line is a [`Head`], each further line an [`Entry`], so a file
//! that was cut keeps its whole lines. Fields that a reader does not know are ignored, and missing ones have their default value.
//!
//! Times are in microseconds since the recorder was made; `unix_us` is that moment by the machine's clock.

use std::collections::{BTreeMap, HashMap};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};

use super::recorder::{FlightRecorder, Noted, What};

/// The version of the format, which a change of a field's meaning raises.
pub(super) const VERSION: u32 = 1;

/// The most ranks of a run of which dumps are read: the text and the picture have a line for each.
const RANKS_MAX: usize = 65_535;

/// The first line of a dump.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Head {
    /// The version of the format.
    pub version: u32,
    /// The rank.
    pub rank: usize,
    /// How many ranks the run has.
    pub ranks: usize,
    /// The process's number on its machine.
    pub process: u32,
    /// Why the dump was written.
    pub cause: String,
    /// The training step under way.
    pub step: Option<u64>,
    /// The machine's clock at time 0, in microseconds since 1970.
    pub unix_us: f64,
    /// When the dump was written.
    pub written_us: f64,
    /// How many operations came before the ones in the dump.
    pub before: u64,
    /// The members of the groups in the dump, by their numbers in the whole run.
    pub groups: BTreeMap<String, Vec<usize>>,
}

/// An operation in a dump.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Entry {
    /// The operation's number among those of this rank, from 0.
    pub number: u64,
    /// The collective, `send` or `recv`, or an action of a pipeline's schedule.
    pub kind: String,
    /// The training step under way.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub step: Option<u64>,
    /// The group's number, hexadecimal; empty if this is an action.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub group: String,
    /// The group's members, as the first line names them.
    #[serde(skip)]
    pub members: Arc<[usize]>,
    /// The call's number in the group; of a send or receive, among those of the pair in that direction.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sequence: Option<u64>,
    /// The root, or the other rank of a send or receive, by its number in the whole run.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub root: Option<usize>,
    /// The reduction.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub by: Option<String>,
    /// The elements' type.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dtype: Option<String>,
    /// The elements of each rank's chunk, or one number where there are no chunks; of an all-to-all what is sent to each rank.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub counts: Vec<usize>,
    /// Of an all-to-all, the elements from each rank.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub wanted: Vec<usize>,
    /// The shape of the tensor that is given.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub input: Option<Vec<usize>>,
    /// The shape of the tensor that is written.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub output: Option<Vec<usize>>,
    /// The stage of an action.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stage: Option<usize>,
    /// The micro-batch of an action.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub micro_batch: Option<usize>,
    /// The line of the program that called it.
    pub site: String,
    /// When it was called.
    pub started_us: f64,
    /// When a thread began to wait for it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub waited_us: Option<f64>,
    /// When all ranks had come to it, as this rank learned.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub complete_us: Option<f64>,
    /// The rank that came last.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub last: Option<usize>,
    /// When it ended; absent while it is under way.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ended_us: Option<f64>,
    /// Why it failed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

/// The dump of a rank.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Dump {
    /// The rank and the cause.
    pub head: Head,
    /// The operations, in order.
    pub entries: Vec<Entry>,
    /// Lines that could not be read.
    pub damaged: usize,
}

/// The name of a rank's file.
pub(super) fn name(rank: usize) -> String {
    format!("rank-{rank}.jsonl")
}

/// A rank's last operations at one moment. It is taken quickly, since calls wait for the ring's lock, and written later.
pub(super) struct Snapshot {
    recorder: FlightRecorder,
    taken: Instant,
    /// Operations before the first one in the ring.
    before: u64,
    noted: Vec<(u64, Noted)>,
}

impl Snapshot {
    pub(super) fn of(recorder: FlightRecorder) -> Snapshot {
        let (before, noted) = {
            let ring = recorder.ring();
            let open = ring.open.iter().map(|(number, noted)| (*number, noted.clone()));
            let last = (ring.first..).zip(ring.last.iter().cloned());
            (ring.first, open.chain(last).collect())
        };
        Snapshot { recorder, taken: Instant::now(), before, noted }
    }
}

/// Writes the dump of a rank into a folder, which is made.
pub(super) fn write(snapshot: Snapshot, folder: &Path, cause: &str) -> std::io::Result<()> {
    let path = folder.join(name(snapshot.recorder.0.rank));
    let text = text(&of(snapshot, cause))?;
    std::fs::create_dir_all(folder)?;
    // Not synced: a failing run should not wait for a slow disk. A failure and a signal may both write now.
    static WRITTEN: AtomicU64 = AtomicU64::new(0);
    let new = path.with_extension(format!("jsonl.{}.tmp", WRITTEN.fetch_add(1, Ordering::Relaxed)));
    std::fs::write(&new, text)?;
    std::fs::rename(new, path)
}

fn text(dump: &Dump) -> std::io::Result<String> {
    let mut text = serde_json::to_string(&dump.head)? + "\n";
    for entry in &dump.entries {
        text += &(serde_json::to_string(entry)? + "\n");
    }
    Ok(text)
}

fn of(snapshot: Snapshot, cause: &str) -> Dump {
    let Snapshot { recorder, taken, before, noted } = snapshot;
    let rank = &recorder.0;
    let begin = rank.process.begin;
    let us = |at: Instant| (at.saturating_duration_since(begin).as_nanos() as f64 / 100.0).round() / 10.0;
    let groups = phalanx_tensor::unpoisoned(rank.groups.lock()).clone();
    let mut named: BTreeMap<String, Vec<usize>> = BTreeMap::new();
    let entry = |(number, noted): (u64, Noted)| {
        let Noted { operation, step, started, complete, waited, ended, error } = noted;
        let mut entry = Entry {
            number,
            kind: operation.kind.into(),
            step,
            site: operation.site.to_string(),
            started_us: us(started),
            waited_us: waited.map(us),
            complete_us: complete.map(|(at, _)| us(at)),
            last: complete.map(|(_, last)| last),
            ended_us: ended.map(us),
            error: error.as_deref().map(String::from),
            ..Entry::default()
        };
        match &operation.what {
            What::Action { stage, micro_batch } => {
                (entry.stage, entry.micro_batch) = (Some(*stage), Some(*micro_batch));
            }
            What::Call { group, sequence, root, by, dtype, counts, wanted, shapes } => {
                let members: Arc<[usize]> = groups.get(group).cloned().unwrap_or_default();
                let name = format!("{group:x}");
                if !named.contains_key(&name) {
                    named.insert(name.clone(), members.to_vec());
                }
                let [input, output] = shapes.each_ref().map(|shape| shape.as_deref().map(Vec::from));
                entry = Entry {
                    group: name,
                    sequence: Some(*sequence),
                    root: root.and_then(|root| members.get(root).copied()),
                    members,
                    by: by.map(String::from),
                    dtype: dtype.map(|dtype| dtype.to_string()),
                    counts: counts.to_vec(),
                    wanted: wanted.to_vec(),
                    input,
                    output,
                    ..entry
                };
            }
        }
        entry
    };
    let entries = noted.into_iter().map(entry).collect();
    let now = Instant::now();
    let unix = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let head = Head {
        version: VERSION,
        rank: rank.rank,
        ranks: rank.size,
        process: std::process::id(),
        cause: cause.into(),
        step: recorder.step(),
        unix_us: (unix.saturating_sub(now - begin)).as_micros() as f64,
        written_us: us(taken),
        before,
        groups: named,
    };
    Dump { head, entries, damaged: 0 }
}

impl Dump {
    /// Reads a dump. What cannot be read is counted and left out; a file without a readable first line is no dump.
    pub(super) fn parse(content: &[u8]) -> Result<Dump, String> {
        let mut lines = content.split(|&byte| byte == b'\n');
        let first = lines.next().unwrap_or_default();
        let head: Head = serde_json::from_slice(first).map_err(|e| format!("its first line: {e}"))?;
        if head.version == 0 || head.version > VERSION {
            return Err(format!("got version {} of the format, wanted 1 to {VERSION}", head.version));
        }
        if head.ranks > RANKS_MAX {
            return Err(format!("got {} ranks, wanted at most {RANKS_MAX}", head.ranks));
        }
        let groups = head.groups.iter().map(|(group, members)| (group.clone(), members[..].into()));
        let groups: HashMap<String, Arc<[usize]>> = groups.collect();
        let mut dump = Dump { head, ..Dump::default() };
        for line in lines.filter(|line| !line.is_empty()) {
            match serde_json::from_slice::<Entry>(line) {
                Ok(mut entry) => {
                    entry.members = groups.get(&entry.group).cloned().unwrap_or_default();
                    dump.entries.push(entry);
                }
                Err(_) => dump.damaged += 1,
            }
        }
        Ok(dump)
    }
}
