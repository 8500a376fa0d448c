//! Runs that execute nothing (`PHALANX_CUDA=dry`): what a program would have its GPUs do, read from the stand-in driver's log.
//!
//! The driver accounts memory to the byte, logs each kernel, product, collective and copy, and executes none. Copies to the host give
//! zeros. A launch says what its kernel moves and computes ([`Traffic`]), by default the operands that it is given, each moved once;
//! cuBLASLt's and NCCL's stand-ins know it from their descriptions.
#![allow(unsafe_code)]

use std::ffi::{CStr, CString, c_char};
use std::ptr::null;
use std::sync::OnceLock;

use crate::library::{Mode, mode, symbol};
use crate::vendor::Library;

/// What a kernel moves between the device's memory and its processors, and computes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    /// Bytes that it reads.
    pub read: u64,
    /// Bytes that it writes.
    pub written: u64,
    /// Floating-point operations, a multiplication and its addition being two. Of kernels that only move data 0.
    pub flops: u64,
}

/// An operation that was queued.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct LoggedOperation {
    /// Its number. Later operations have larger ones.
    pub ticket: u64,
    /// The GPU.
    pub device: usize,
    /// The chain of operations that it belongs to, each after the one before: a stream, or a branch of a graph.
    pub chain: u64,
    /// Whether a graph launched it.
    pub in_graph: bool,
    /// Operations that must have run before.
    pub before: Vec<u64>,
    /// `kernel`, `library` (a product or a collective), `upload`, `download`, `copy`, `peer`, `fill`, `allocate`, `free`; empty for
    /// what only keeps order.
    pub kind: String,
    /// The operation of the program, as its errors name it.
    pub op: String,
    /// The kernel's name, or the product's or collective's description.
    pub name: String,
    /// Blocks along x, y and z.
    pub grid: [u32; 3],
    /// Threads of a block along x, y and z.
    pub block: [u32; 3],
    /// Dynamic shared memory of a block, in bytes.
    pub shared_bytes: u32,
    /// What it moves and computes. Of an allocation or a free its bytes are `written`.
    pub traffic: Traffic,
}

/// What was queued, and the memory that it took.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct DryLog {
    /// The operations, in the order in which they were queued.
    pub operations: Vec<LoggedOperation>,
    /// The most bytes of each GPU that were allocated at a time, in the order in which the host allocated and freed.
    pub peak_bytes: Vec<u64>,
    /// The bytes that were allocated when the log was taken.
    pub used_bytes: Vec<u64>,
}

type Note = extern "C" fn(*const c_char, *const c_char, u64, u64, u64);
type Take = extern "C" fn() -> *const c_char;

/// Whether `PHALANX_CUDA=dry`. Reading it costs one load.
pub(crate) fn is_dry() -> bool {
    static DRY: OnceLock<bool> = OnceLock::new();
    *DRY.get_or_init(|| mode() == Mode::Dry)
}

/// Tells the driver of what the operation `op` gives to a GPU next.
#[cold]
pub(crate) fn note(op: &str, traffic: Traffic) {
    static NOTE: OnceLock<Option<Note>> = OnceLock::new();
    // SAFETY: the stand-in driver's function of this name has this type.
    let found = NOTE.get_or_init(|| unsafe { symbol::<Note>(Library::Driver, "phalanx_driver_note") }.ok());
    if let (Some(note), Ok(op)) = (found, CString::new(op)) {
        note(op.as_ptr(), null(), traffic.read, traffic.written, traffic.flops);
    }
}

/// What was queued since the log was taken the last time. A run that executes its work has none.
///
/// ```no_run
/// // In a program that was started with PHALANX_CUDA=dry:
/// let log = phalanx_cuda::take_dry_log()?;
/// let bytes: u64 = log.operations.iter().map(|o| o.traffic.read + o.traffic.written).sum();
/// println!("{} operations, {bytes} bytes, peaks {:?}", log.operations.len(), log.peak_bytes);
/// # Ok::<(), String>(())
/// ```
///
/// # Errors
/// Without `PHALANX_CUDA=dry`, or without the stand-in driver.
pub fn take_dry_log() -> Result<DryLog, String> {
    if !is_dry() {
        return Err("there is a log of work only with PHALANX_CUDA=dry".into());
    }
    // SAFETY: the stand-in driver's function of this name has this type.
    let take = unsafe { symbol::<Take>(Library::Driver, "phalanx_driver_take_log") }?;
    // SAFETY: the driver gives a text with a zero at its end, which stays until the next call. Another thread's call at the same time
    // would end it: this lock has one call at a time.
    let text = {
        static ONE: std::sync::Mutex<()> = std::sync::Mutex::new(());
        let _one = crate::context::lock(&ONE);
        // SAFETY: as above.
        unsafe { CStr::from_ptr(take()) }.to_string_lossy().into_owned()
    };
    let mut log = DryLog::default();
    for row in text.lines() {
        let fields: Vec<&str> = row.split('\t').collect();
        match fields[..] {
            ["peak", _, peak, used] => {
                log.peak_bytes.push(peak.parse().unwrap_or(0));
                log.used_bytes.push(used.parse().unwrap_or(0));
            }
            _ => {
                log.operations.push(operation(&fields).ok_or_else(|| format!("a row of the log is {row:?}"))?)
            }
        }
    }
    Ok(log)
}

fn operation(fields: &[&str]) -> Option<LoggedOperation> {
    let [ticket, device, chain, in_graph, before, kind, op, name, grid, block, shared, read, written, flops] =
        fields
    else {
        return None;
    };
    Some(LoggedOperation {
        ticket: ticket.parse().ok()?,
        device: device.parse().ok()?,
        chain: chain.parse().ok()?,
        in_graph: *in_graph == "1",
        before: before.split(',').filter_map(|ticket| ticket.parse().ok()).collect(),
        kind: (*kind).into(),
        op: (*op).into(),
        name: (*name).into(),
        grid: sides(grid)?,
        block: sides(block)?,
        shared_bytes: shared.parse().ok()?,
        traffic: Traffic {
            read: read.parse().ok()?,
            written: written.parse().ok()?,
            flops: flops.parse().ok()?,
        },
    })
}

fn sides(text: &str) -> Option<[u32; 3]> {
    let sides: Vec<u32> = text.split(',').map_while(|side| side.parse().ok()).collect();
    sides.try_into().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_is_read_field_by_field() {
        let row = "7\t1\t4\t1\t5,6\tkernel\tgelu\tcontiguous\t12,1,1\t256,1,1\t64\t100\t50\t0";
        let read = operation(&row.split('\t').collect::<Vec<_>>()).unwrap();
        let wanted = LoggedOperation {
            ticket: 7,
            device: 1,
            chain: 4,
            in_graph: true,
            before: vec![5, 6],
            kind: "kernel".into(),
            op: "gelu".into(),
            name: "contiguous".into(),
            grid: [12, 1, 1],
            block: [256, 1, 1],
            shared_bytes: 64,
            traffic: Traffic { read: 100, written: 50, flops: 0 },
        };
        assert_eq!(read, wanted);
        assert_eq!(operation(&["7", "1"]), None);
    }
}
