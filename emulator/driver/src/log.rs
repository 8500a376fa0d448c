//! A log of the work that a run without execution queues: what each operation is, how much it reads, writes and computes,
//! on which stream it is, and which operations come before it.
//!
//! Sizes come from those who know them. Copies, fills and allocations have theirs in the call. cuBLASLt and NCCL describe
//! each operation before they queue it ([`note`]). Of a kernel the driver sees nothing but its arguments, so a program
//! says before the launch what the kernel reads, writes and computes; if it does not, the row has zeros.

use std::cell::RefCell;
use std::ffi::{CString, c_char};
use std::fmt::Write;
use std::sync::Mutex;

use phalanx_emulator_link::lock;

use crate::device::devices;
use crate::queue::{Point, Ticket};

/// What an operation would have a GPU do.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Work {
    /// `kernel`, `library`, `upload`, `download`, `copy`, `peer`, `fill`, `allocate`, `free`; empty for what only keeps order.
    pub kind: &'static str,
    /// What the program calls the operation.
    pub op: String,
    /// The kernel, or what a library does.
    pub name: String,
    pub grid: [u32; 3],
    pub block: [u32; 3],
    /// Dynamic shared memory of a block, in bytes.
    pub shared_bytes: u32,
    pub read_bytes: u64,
    pub written_bytes: u64,
    pub flops: u64,
}

impl Work {
    pub(crate) fn new(kind: &'static str, read_bytes: u64, written_bytes: u64) -> Work {
        Work { kind, read_bytes, written_bytes, ..Work::default() }
    }
}

thread_local! {
    /// What is known of the operation that this thread queues next.
    static NEXT: RefCell<Work> = RefCell::default();
}

/// Describes the operation that this thread queues next. Numbers are added to those of earlier calls; a text that is `None` keeps the
/// earlier text.
pub(crate) fn note(op: Option<String>, name: Option<String>, [read, written, flops]: [u64; 3]) {
    NEXT.with_borrow_mut(|next| {
        next.op = op.unwrap_or_else(|| std::mem::take(&mut next.op));
        next.name = name.unwrap_or_else(|| std::mem::take(&mut next.name));
        next.read_bytes += read;
        next.written_bytes += written;
        next.flops += flops;
    });
}

/// What was noted since the last operation of this thread.
pub(crate) fn noted(kind: &'static str) -> Work {
    Work { kind, ..NEXT.take() }
}

/// The rows so far.
static ROWS: Mutex<String> = Mutex::new(String::new());
/// The text that was taken last, which its reader may still have.
static TAKEN: Mutex<Option<CString>> = Mutex::new(None);

/// Where an operation stands among all others.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Place<'a> {
    pub ticket: Ticket,
    pub device: usize,
    /// The chain of operations that it belongs to: a stream, or a branch of a graph.
    pub chain: u64,
    pub in_graph: bool,
    pub before: &'a [Point],
}

/// Logs an operation: its fields in the order of [`Place`] and [`Work`], with tabs between them.
pub(crate) fn log(work: &Work, place: Place<'_>) {
    let before: Vec<String> =
        place.before.iter().filter(|point| point.ticket != 0).map(|point| point.ticket.to_string()).collect();
    let [gx, gy, gz] = work.grid;
    let [bx, by, bz] = work.block;
    let mut rows = lock(&ROWS);
    // Writing to a string does not fail.
    let _ = writeln!(
        rows,
        "{}\t{}\t{}\t{}\t{}\t{}\t{}\t{}\t{gx},{gy},{gz}\t{bx},{by},{bz}\t{}\t{}\t{}\t{}",
        place.ticket,
        place.device,
        place.chain,
        u8::from(place.in_graph),
        before.join(","),
        work.kind,
        work.op,
        work.name,
        work.shared_bytes,
        work.read_bytes,
        work.written_bytes,
        work.flops,
    );
}

/// Takes the log: its rows, then a row `peak` for each device: the most bytes that were allocated on it since the log was taken
/// the last time, and those that are now. The text stays until the next call.
pub(crate) fn take() -> *const c_char {
    let mut text = std::mem::take(&mut *lock(&ROWS));
    for device in devices().unwrap_or_default() {
        let memory = &device.memory;
        let _ = writeln!(text, "peak\t{}\t{}\t{}", device.ordinal, memory.peak(), memory.used());
        device.memory.restart_peak();
    }
    let mut taken = lock(&TAKEN);
    // Names from C have no zeros.
    taken.insert(CString::new(text).unwrap_or_default()).as_ptr()
}
