//! Where each living object was made: for reports about it, and for the list of what is left when a context or the process
//! ends.
//!
//! The place is the call and the thread. With `RUST_BACKTRACE=1`, or if leaks are reported, it is the functions of the program
//! that led to the call too.

use std::backtrace::{Backtrace, BacktraceStatus};
use std::collections::BTreeMap;
use std::fmt;
use std::sync::{LazyLock, Mutex, MutexGuard};

use phalanx_emulator_link::lock;

use crate::context::{Context, current};
use crate::settings::settings;
use crate::status::say;

/// Kinds of objects that a program has to give back.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Kind {
    Allocation,
    PageLocked,
    Stream,
    Event,
    Module,
    Graph,
    ExecutableGraph,
}

impl Kind {
    fn name(self) -> &'static str {
        match self {
            Kind::Allocation => "allocation",
            Kind::PageLocked => "page-locked allocation",
            Kind::Stream => "stream",
            Kind::Event => "event",
            Kind::Module => "module",
            Kind::Graph => "graph",
            Kind::ExecutableGraph => "executable graph",
        }
    }
}

/// How an object came to be.
#[derive(Debug)]
struct Made {
    /// Objects of all kinds are counted from 1.
    number: u64,
    bytes: u64,
    call: &'static str,
    thread: String,
    context: u64,
    trace: Backtrace,
}

#[derive(Debug, Default)]
struct Ledger {
    last: u64,
    living: BTreeMap<(Kind, usize), Made>,
}

static LEDGER: LazyLock<Mutex<Ledger>> = LazyLock::new(Mutex::default);

fn ledger() -> MutexGuard<'static, Ledger> {
    lock(&LEDGER)
}

/// An object was made; `key` is its handle or address.
pub(crate) fn made(kind: Kind, key: usize, bytes: u64, call: &'static str) {
    let trace = if settings().leaks { Backtrace::force_capture() } else { Backtrace::capture() };
    let thread = std::thread::current();
    let thread = thread.name().map_or_else(|| format!("{:?}", thread.id()), |name| format!("{name:?}"));
    let context = current().map_or(0, |context| context.id);
    let mut ledger = ledger();
    ledger.last += 1;
    let number = ledger.last;
    ledger.living.insert((kind, key), Made { number, bytes, call, thread, context, trace });
}

/// An object was given back.
pub(crate) fn gone(kind: Kind, key: usize) {
    ledger().living.remove(&(kind, key));
}

/// Where an object was made, for reports; empty if that is not known.
pub(crate) fn place(kind: Kind, key: usize) -> String {
    ledger().living.get(&(kind, key)).map_or(String::new(), |made| format!(", made {made}"))
}

/// A context has ended: what was made in it and is left.
pub(crate) fn context_ended(context: &Context) {
    let mut ledger = ledger();
    if settings().leaks {
        let whose = format!("context {} of device {} has ended", context.id, context.ordinal);
        report(&whose, ledger.living.iter().filter(|(_, made)| made.context == context.id));
    }
    ledger.living.retain(|_, made| made.context != context.id);
}

/// The process ends: what is left of contexts that have not ended.
pub(crate) fn process_ended() {
    if settings().leaks {
        report("the process has ended", ledger().living.iter());
    }
}

/// Objects that a list names one by one.
const NAMED_MAX: usize = 50;

fn report<'l>(whose: &str, left: impl Iterator<Item = (&'l (Kind, usize), &'l Made)>) {
    let left: Vec<_> = left.collect();
    if left.is_empty() {
        return say(&format!("leaks: {whose}, and nothing is left"));
    }
    let bytes: u64 =
        left.iter().filter(|((kind, _), _)| *kind == Kind::Allocation).map(|(_, m)| m.bytes).sum();
    let mut text =
        format!("leaks: {whose}, and {} objects are left, {bytes} bytes of device memory:", left.len());
    for ((kind, key), made) in left.iter().take(NAMED_MAX) {
        let size = if made.bytes > 0 { format!(" of {} bytes", made.bytes) } else { String::new() };
        text += &format!("\n    {} {key:#x}{size}, made {made}", kind.name());
    }
    if left.len() > NAMED_MAX {
        text += &format!("\n    and {} more", left.len() - NAMED_MAX);
    }
    say(&text);
}

impl fmt::Display for Made {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "by {} (object {}) on thread {}", self.call, self.number, self.thread)?;
        let frames = frames(&self.trace);
        if frames.is_empty() { Ok(()) } else { write!(f, ", from {}", frames.join(", from ")) }
    }
}

/// Functions that a report names.
const FRAMES_MAX: usize = 6;

/// The innermost functions of the program on the way to the call: those of the driver, of bindings and of the standard
/// library say nothing.
fn frames(trace: &Backtrace) -> Vec<String> {
    if trace.status() != BacktraceStatus::Captured {
        return Vec::new();
    }
    let text = trace.to_string();
    let mut found: Vec<String> = Vec::new();
    let mut named = false;
    for line in text.lines().map(str::trim) {
        if let Some(place) = line.strip_prefix("at ") {
            if let (true, Some(last)) = (named, found.last_mut()) {
                *last += &format!(" at {place}");
            }
            named = false;
            continue;
        }
        let Some((_, function)) = line.split_once(": ") else { continue };
        let silent = ["phalanx_emulat", "cudarc::", "std::", "core::", "alloc::", "__rust", "cu", "<", "_"];
        named = !silent.iter().any(|start| function.starts_with(start)) && found.len() < FRAMES_MAX;
        if named {
            found.push(function.to_string());
        }
    }
    found
}
