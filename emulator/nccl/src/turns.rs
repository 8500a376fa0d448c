//! Whose turn it is on a GPU: calls of several communicators, and ranks whose turns wait for each other.
//!
//! An NCCL operation that has begun holds its GPU's multiprocessors, and all that is behind it on its stream, until the
//! other ranks come. So operations of two communicators that are queued in one order on some rank and in another one
//! elsewhere can wait for each other for ever:
//!
//! ```text
//! GPU 0   communicator 1: begun, waits for rank 1 ───┐      communicator 2: its turn does not come
//! GPU 1   communicator 2: begun, waits for rank 0    └────> communicator 1: its turn does not come
//! ```
//!
//! The turn does not come behind an operation of the same stream, or if as many operations have begun as the GPU runs at
//! a time (`PHALANX_EMULATOR_NCCL_AT_ONCE`). Such a circle is an error of its communicators that names all in it. Graphs
//! and other processes are not looked at: there only the time ends the waiting.

use std::collections::BTreeMap;
use std::env;
use std::sync::{Arc, LazyLock, Mutex, MutexGuard};

use phalanx_emulator_link::driver::Progress;
use phalanx_emulator_link::lock;

use crate::rendezvous::Rendezvous;

/// How many operations of communicators a GPU runs at a time; any number if unset.
const AT_ONCE: &str = "PHALANX_EMULATOR_NCCL_AT_ONCE";

fn at_once() -> usize {
    static AT_ONCE_MAX: LazyLock<usize> = LazyLock::new(|| {
        let Ok(text) = env::var(AT_ONCE) else { return usize::MAX };
        let number = text.parse().ok().filter(|number| *number > 0);
        number.unwrap_or_else(|| {
            eprintln!(
                "phalanx emulated NCCL: {AT_ONCE}={text} is no number of operations, so there is no bound"
            );
            usize::MAX
        })
    });
    *AT_ONCE_MAX
}

/// An operation of a rank that is queued and not done.
#[derive(Debug)]
struct Entry {
    device: i32,
    stream: usize,
    rendezvous: Arc<Rendezvous>,
    rank: usize,
    what: String,
    /// The ticket with which it has begun.
    begun: Option<u64>,
}

/// By the order in which they were queued.
type Entries = BTreeMap<u64, Entry>;

fn entries() -> MutexGuard<'static, Entries> {
    static ENTRIES: Mutex<Entries> = Mutex::new(BTreeMap::new());
    lock(&ENTRIES)
}

/// The place of an operation among those of its GPU, until it is dropped.
#[derive(Debug)]
pub(crate) struct Turn(Option<u64>);

impl Turn {
    /// Of an operation that is about to be queued on a stream of a device.
    pub(crate) fn new(
        (device, stream): (i32, usize),
        rendezvous: &Arc<Rendezvous>,
        rank: usize,
        what: String,
    ) -> Turn {
        let mut entries = entries();
        let id = entries.last_key_value().map_or(0, |(last, _)| last + 1);
        let rendezvous = Arc::clone(rendezvous);
        entries.insert(id, Entry { device, stream, rendezvous, rank, what, begun: None });
        Turn(Some(id))
    }

    /// Of an operation for which no order is looked at.
    pub(crate) fn any() -> Turn {
        Turn(None)
    }

    /// The stream has come to the operation: runs it if it has begun or its GPU has room, else it waits.
    pub(crate) fn take(&self, ticket: u64, run: impl FnOnce() -> Progress) -> Progress {
        let Some(id) = self.0 else { return run() };
        let progress = if begins(&mut entries(), id, ticket) { run() } else { Progress::Waiting };
        let mut entries = entries();
        if progress != Progress::Waiting {
            entries.remove(&id);
        } else if let Some(why) = circle(&entries) {
            let why = format!("ranks wait for each other's turns on their GPUs: {why}");
            eprintln!("phalanx emulated NCCL: {why}");
            stuck(&entries).iter().for_each(|id| entries[id].rendezvous.fail(&why));
        }
        progress
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        self.0.map(|id| entries().remove(&id));
    }
}

/// Whether an operation to which its stream has come begins, or has begun.
fn begins(entries: &mut Entries, id: u64, ticket: u64) -> bool {
    let Some(entry) = entries.get(&id) else { return true };
    // What has failed, or is given up, needs no room.
    let ends = entry.rendezvous.error().is_some() || entry.rendezvous.has_left(entry.rank);
    let begun = entries.values().filter(|other| other.device == entry.device && other.begun.is_some());
    let begins = entry.begun.is_some() || ends || begun.count() < at_once();
    if let Some(entry) = entries.get_mut(&id).filter(|_| begins) {
        entry.begun = Some(ticket);
    }
    begins
}

/// An operation that another one waits for, or that comes before that.
type Missing<'a> = (&'a u64, &'a Entry);

/// The next operations of the ranks that a begun operation waits for.
fn waits_for<'a>(entries: &'a Entries, entry: &Entry) -> Vec<Missing<'a>> {
    let Some(ticket) = entry.begun else { return Vec::new() };
    let first = |rank: usize| {
        let of_rank = |(_, other): &Missing<'_>| {
            Arc::ptr_eq(&other.rendezvous, &entry.rendezvous) && other.rank == rank
        };
        entries.iter().find(of_rank)
    };
    entry.rendezvous.missing_of(entry.rank, ticket).into_iter().filter_map(first).collect()
}

/// The begun operations of `among` that keep another one from ending: itself, one before it on its stream, or all that its
/// GPU runs at a time.
fn kept_by(entries: &Entries, (id, waiting): Missing<'_>, among: &[u64]) -> Vec<u64> {
    if waiting.begun.is_some() {
        return among.iter().copied().filter(|other| other == id).collect();
    }
    let begun = |(_, other): &Missing<'_>| other.begun.is_some() && other.device == waiting.device;
    let begun: Vec<u64> = entries.iter().filter(begun).map(|(id, _)| *id).collect();
    let before = begun.iter().filter(|other| *other < id && entries[other].stream == waiting.stream);
    let before: Vec<u64> = before.copied().filter(|other| among.contains(other)).collect();
    let is_full = begun.len() >= at_once() && begun.iter().all(|other| among.contains(other));
    if before.is_empty() && is_full { begun } else { before }
}

/// The begun operations that never end: each waits for one whose turn does not come because of others among them.
fn stuck(entries: &Entries) -> Vec<u64> {
    let mut stuck: Vec<u64> = entries.iter().filter(|(_, e)| e.begun.is_some()).map(|(id, _)| *id).collect();
    loop {
        let (before, among) = (stuck.len(), stuck.clone());
        let waits = |id: &u64| {
            let missing = waits_for(entries, &entries[id]);
            missing.into_iter().any(|missing| !kept_by(entries, missing, &among).is_empty())
        };
        stuck.retain(waits);
        if stuck.len() == before {
            return stuck;
        }
    }
}

/// Who waits for whom, if operations wait for each other.
fn circle(entries: &Entries) -> Option<String> {
    let stuck = stuck(entries);
    let name = |entry: &Entry| format!("{} of communicator {}", entry.what, entry.rendezvous.number);
    let line = |id: &u64| {
        let entry = &entries[id];
        let missing = waits_for(entries, entry);
        let (waiting, keeping) = missing.into_iter().find_map(|missing| {
            let keeping = kept_by(entries, missing, &stuck);
            (!keeping.is_empty()).then_some((missing.1, keeping))
        })?;
        let keeping: Vec<String> = keeping.iter().map(|id| name(&entries[id])).collect();
        Some(format!(
            "GPU {} runs {}, which waits for rank {}, whose turn on GPU {} comes after {}",
            entry.device,
            name(entry),
            waiting.rank,
            waiting.device,
            keeping.join(" and "),
        ))
    };
    let lines: Vec<String> = stuck.iter().filter_map(line).collect();
    (!lines.is_empty()).then(|| lines.join("; "))
}
