//! Page-locked memory that copies which have run still own in the host's eyes: the host has not waited for them.
//!
//! A copy that has run as soon as it was queued hides a missing wait of the host. So what a copy brings to page-locked
//! memory is held back until the host waits for the copy; until then the memory reads as [`Memory::POISON`]. Where a copy
//! has read such memory, the host must leave it as it is until then. Copies on the device that are ordered behind others
//! see what those brought.

use std::collections::hash_map::DefaultHasher;
use std::hash::Hasher;
use std::sync::Arc;

use phalanx_emulator_link::pointer::{Bytes, BytesMut};
use phalanx_ptx::Memory;

use crate::context::Context;
use crate::race::{Clock, Origin};
use crate::settings::Report;
use crate::status::{Status, say};

/// Rows of bytes, each with its address in the host's memory.
pub(crate) type HostRows = Vec<(usize, Vec<u8>)>;

/// A use of page-locked memory by a copy that has run.
#[derive(Debug)]
struct Use {
    origin: Origin,
    context: Arc<Context>,
    start: usize,
    end: usize,
    kind: UseKind,
}

#[derive(Debug)]
enum UseKind {
    /// What it brings.
    Brings(HostRows),
    /// The sum of what it has read.
    Read(u64),
}

/// The uses that the host has not waited for, in the order in which they ran.
#[derive(Debug, Default)]
pub(crate) struct Unwaited {
    uses: Vec<Use>,
}

/// The sum by which a change of bytes is noticed.
pub(crate) fn sum(bytes: &[u8]) -> u64 {
    let mut hasher = DefaultHasher::new();
    hasher.write(bytes);
    hasher.finish()
}

/// Puts rows into the host's memory.
pub(crate) fn write(rows: &HostRows) {
    for (address, row) in rows {
        BytesMut::at(*address, row.len()).write(|bytes| bytes.copy_from_slice(row));
    }
}

fn is_poison(rows: &HostRows) -> bool {
    rows.iter().all(|(at, row)| Bytes::at(*at, row.len()).read(|b| b.iter().all(|&x| x == Memory::POISON)))
}

/// Reports a mistake as the settings say.
pub(crate) fn mistake(context: &Context, report: Report, why: String, what: &str) {
    match report {
        Report::Error => context.lose(Status::LAUNCH_FAILED.because(why), what),
        Report::Warn => say(&format!("{what}: {why}")),
        Report::Off => {}
    }
}

impl Unwaited {
    /// A copy has run that brings rows to `start .. end`.
    pub(crate) fn brings(
        &mut self,
        origin: Origin,
        context: Arc<Context>,
        (start, end): (usize, usize),
        rows: HostRows,
    ) {
        // What earlier copies brought there comes first; what they read may change now.
        self.uses.retain(|other| {
            let touches = other.start < end && start < other.end;
            if let (true, UseKind::Brings(rows)) = (touches, &other.kind) {
                write(rows);
            }
            !touches
        });
        write(&rows.iter().map(|(at, row)| (*at, vec![Memory::POISON; row.len()])).collect());
        self.uses.push(Use { origin, context, start, end, kind: UseKind::Brings(rows) });
    }

    /// A copy has run that has read `start .. end`.
    pub(crate) fn has_read(
        &mut self,
        origin: Origin,
        context: Arc<Context>,
        (start, end): (usize, usize),
        sum: u64,
    ) {
        self.uses.push(Use { origin, context, start, end, kind: UseKind::Read(sum) });
    }

    /// A copy is about to read `start .. end`: it sees what copies brought that are ordered before it.
    pub(crate) fn is_read(&mut self, clock: &Clock, (start, end): (usize, usize)) {
        self.uses.retain(|other| {
            let touches = other.start < end && start < other.end;
            match &other.kind {
                UseKind::Brings(rows) if touches && clock.covers(other.origin.stamp) => write(rows),
                _ => return true,
            }
            false
        });
    }

    /// Whether a copy has brought something to `start .. end`.
    pub(crate) fn is_brought(&self, start: usize, end: usize) -> bool {
        let brings = |other: &&Use| matches!(other.kind, UseKind::Brings(_));
        self.uses.iter().filter(brings).any(|other| other.start < end && start < other.end)
    }

    /// The host has waited for all that `host` covers.
    pub(crate) fn waited(&mut self, host: &Clock, report: Report) {
        let (over, rest) =
            std::mem::take(&mut self.uses).into_iter().partition(|one: &Use| host.covers(one.origin.stamp));
        self.uses = rest;
        for Use { origin, context, start, end, kind } in over {
            let kept = match &kind {
                UseKind::Brings(rows) => is_poison(rows),
                UseKind::Read(before) => Bytes::at(start, end - start).read(sum) == *before,
            };
            if let UseKind::Brings(rows) = &kind {
                write(rows);
            }
            if !kept {
                let verb = if matches!(kind, UseKind::Read(_)) { "from" } else { "to" };
                let why = format!(
                    "the host wrote to the page-locked memory that it copies {verb} before it had waited for the copy"
                );
                mistake(&context, report, why, &origin.what);
            }
        }
    }

    /// The memory `start .. end` is given back: the uses of it, which end.
    pub(crate) fn freed(&mut self, start: usize, end: usize) -> Vec<Arc<str>> {
        let (over, rest) = std::mem::take(&mut self.uses)
            .into_iter()
            .partition(|one: &Use| one.start < end && start < one.end);
        self.uses = rest;
        over.into_iter().map(|one: Use| one.origin.what).collect()
    }
}
