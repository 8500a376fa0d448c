//! Copies, in every direction, and fills: at once and in stream order.
//!
//! Ordinary memory of the host is read when the copy is queued, and written before the call returns, as CUDA
//! documents it for pageable memory. Page-locked memory is read when the copy runs, and written when the host has waited for
//! it ([`unwaited`](crate::unwaited)); changing it in between is found.

use phalanx_emulator_link::pointer::{Bytes, BytesMut};
use phalanx_ptx::Memory;

use crate::capture::forbidden;
use crate::context::here;
use crate::device::{Device, device_of};
use crate::executor::executor;
use crate::host;
use crate::ledger::{self, Kind};
use crate::log::Work;
use crate::queue::{Progress, Task};
use crate::race::Access;
use crate::settings::{Report, settings};
use crate::status::{Result, Status, failure, say};
use crate::streams::{is_captured, submit, submit_and_wait};
use crate::unwaited::{self, HostRows, sum};

/// One end of a copy.
#[derive(Debug, Clone, Copy)]
pub(crate) enum End {
    Device(u64),
    Host(usize),
}

/// The end of a copy at an address that may be a device's or the host's.
pub(crate) fn end(address: u64) -> Result<End> {
    let on_device = device_of(address).is_some();
    Ok(if on_device { End::Device(address) } else { End::Host(address as usize) })
}

/// Rows of bytes, `pitch` apart at either end; a plain copy has one row.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Shape {
    pub width: usize,
    pub height: usize,
    pub to_pitch: usize,
    pub from_pitch: usize,
}

impl Shape {
    pub(crate) fn line(bytes: usize) -> Shape {
        Shape { width: bytes, height: 1, to_pitch: bytes, from_pitch: bytes }
    }

    /// Bytes from the first to behind the last, of rows that are `pitch` bytes apart.
    fn span(self, pitch: usize) -> usize {
        if self.width == 0 || self.height == 0 { 0 } else { (self.height - 1) * pitch + self.width }
    }
}

fn owner_of(address: u64) -> Result<&'static Device> {
    let unknown = || Status::INVALID_VALUE.because(format!("{address:#x} is no device's address"));
    device_of(address).ok_or_else(unknown)
}

/// A range of device memory that must be in one allocation, checked when the copy is queued, as the driver does.
pub(crate) fn check(address: u64, bytes: usize) -> Result<()> {
    if bytes == 0 {
        return Ok(());
    }
    let device = owner_of(address)?;
    match device.memory.allocation(address) {
        Some((start, size)) if address - start + bytes as u64 <= size => Ok(()),
        Some((start, size)) => Err(Status::INVALID_VALUE.because(format!(
            "a copy of {bytes} bytes at offset {} of an allocation of {size} bytes",
            address - start
        ))),
        None => Err(Status::INVALID_VALUE.because(format!("{address:#x} is in no allocation"))),
    }
}

/// What is done with each row of a copy.
fn rows(shape: Shape, mut row: impl FnMut(usize, usize) -> Result<()>) -> Progress {
    Progress::from((0..shape.height).try_for_each(|y| row(y * shape.to_pitch, y * shape.from_pitch)))
}

fn to_device(to: u64, from: usize, shape: Shape, capturing: bool) -> Result<Task> {
    let span = shape.span(shape.from_pitch);
    let locked = host::holds(from, span);
    let what = format!("a copy of {} bytes from the host to {to:#x}", shape.width * shape.height);
    let memory = &owner_of(to)?.memory;
    let write = move |bytes: &[u8]| {
        rows(shape, |t, f| {
            memory.write(to + t as u64, &bytes[f..f + shape.width]).map_err(|fault| failure(&fault))
        })
    };
    if !locked && !capturing {
        let staged = Bytes::at(from, span).to_vec();
        return Ok(Task::new(what, &here()?, move |_| write(&staged)));
    }
    // A graph's copy reads the host's memory at each launch. Any other copy reads the bytes of the time at which it was queued, unless an
    // earlier copy in the queue writes them.
    let range = (from, from + span);
    let changes = capturing || executor().queue().writes_host(range.0, range.1);
    let before = (!changes).then(|| Bytes::at(from, span).read(sum));
    let run = move |ticket| {
        executor().queue().reads_host(ticket, range);
        let (now, progress) = Bytes::at(from, span).read(|bytes| {
            let now = sum(bytes);
            if before.is_some_and(|before| before != now) {
                let why =
                    "the page-locked memory it copies from was changed after it was queued and before it ran";
                return (now, Progress::Failed(Status::LAUNCH_FAILED.because(why)));
            }
            (now, write(bytes))
        });
        if locked && settings().races != Report::Off {
            executor().queue().has_read_host(ticket, range, now);
        }
        progress
    };
    Ok(Task { host: Some(range), ..Task::new(what, &here()?, run) })
}

/// Where bytes that nothing has written come to the host: a failure or a warning, as the settings say.
fn check_written(memory: &Memory, from: u64, bytes: usize) -> Result<()> {
    let found = match settings().unwritten {
        Report::Off => return Ok(()),
        _ => memory.check_written(from, bytes as u64),
    };
    let (Err(fault), Some((start, _))) = (found, memory.allocation(from)) else { return Ok(()) };
    let place = ledger::place(Kind::Allocation, start as usize);
    let why = Status::LAUNCH_FAILED.because(format!("{fault}; the allocation is at {start:#x}{place}"));
    if settings().unwritten == Report::Error {
        return Err(why);
    }
    say(&format!("a copy to the host: {}", why.message));
    Ok(())
}

fn to_host(to: usize, from: u64, shape: Shape) -> Result<Task> {
    let span = shape.span(shape.to_pitch);
    let locked = host::holds(to, span);
    let what = format!("a copy of {} bytes from {from:#x} to the host", shape.width * shape.height);
    let memory = &owner_of(from)?.memory;
    let run = move |ticket| {
        let mut taken: HostRows = Vec::with_capacity(shape.height);
        let progress = rows(shape, |t, f| {
            let (from, mut row) = (from + f as u64, vec![0; shape.width]);
            check_written(memory, from, shape.width)?;
            memory.read(from, &mut row).map_err(|fault| failure(&fault))?;
            taken.push((to + t, row));
            Ok(())
        });
        if locked && settings().races != Report::Off {
            executor().queue().brings_host(ticket, (to, to + span), taken);
        } else {
            unwaited::write(&taken);
        }
        progress
    };
    Ok(Task { host: Some((to, to + span)), writes_host: true, ..Task::new(what, &here()?, run) })
}

fn on_device(to: u64, from: u64, shape: Shape) -> Result<Task> {
    let what = format!("a copy of {} bytes from {from:#x} to {to:#x}", shape.width * shape.height);
    let (target, source): (&Memory, &Memory) = (&owner_of(to)?.memory, &owner_of(from)?.memory);
    let run = move |_| {
        rows(shape, |t, f| {
            target
                .copy_from(to + t as u64, source, from + f as u64, shape.width as u64)
                .map_err(|fault| failure(&fault))
        })
    };
    Ok(Task::new(what, &here()?, run))
}

fn task(to: End, from: End, shape: Shape, capturing: bool) -> Result<Task> {
    let (to_span, from_span) = (shape.span(shape.to_pitch), shape.span(shape.from_pitch));
    if let End::Device(address) = to {
        check(address, to_span)?;
    }
    if let End::Device(address) = from {
        check(address, from_span)?;
    }
    let host = |address: usize, bytes: usize| match address == 0 && bytes > 0 {
        true => Err(Status::INVALID_VALUE.because("the host's pointer is null")),
        false => Ok(()),
    };
    let bytes = (shape.width * shape.height) as u64;
    let (written, read) = (|a| Access::write(a, to_span as u64), |a| Access::read(a, from_span as u64));
    match (to, from) {
        (End::Device(to), End::Host(from)) => {
            host(from, from_span)?;
            let task = to_device(to, from, shape, capturing)?.touching([written(to)]);
            Ok(task.with_work(Work::new("upload", 0, bytes)))
        }
        (End::Host(to), End::Device(from)) => {
            host(to, to_span)?;
            let task = to_host(to, from, shape)?.touching([read(from)]);
            Ok(task.with_work(Work::new("download", bytes, 0)))
        }
        (End::Device(to), End::Device(from)) => {
            let task = on_device(to, from, shape)?.touching([written(to), read(from)]);
            let kind = if owner_of(to)?.ordinal == owner_of(from)?.ordinal { "copy" } else { "peer" };
            Ok(task.with_work(Work::new(kind, bytes, bytes)))
        }
        (End::Host(to), End::Host(from)) => {
            let run = move |ticket| {
                executor().queue().reads_host(ticket, (from, from + from_span));
                let bytes = Bytes::at(from, from_span).to_vec();
                BytesMut::at(to, to_span).write(|out| {
                    rows(shape, |t, f| {
                        out[t..t + shape.width].copy_from_slice(&bytes[f..f + shape.width]);
                        Ok(())
                    })
                })
            };
            Ok(Task::new("a copy within the host", &here()?, run))
        }
    }
}

/// Copies before the call returns.
pub(crate) fn copy(to: End, from: End, shape: Shape) -> Result<()> {
    let task = task(to, from, shape, false)?;
    forbidden("a copy that is not asynchronous")?;
    submit_and_wait(task)
}

/// Copies in stream order.
pub(crate) fn copy_async(to: End, from: End, shape: Shape, stream: usize) -> Result<()> {
    let capturing = is_captured(stream)?;
    let task = task(to, from, shape, capturing)?;
    let context = task.context.clone();
    let pageable = match to {
        End::Host(address) => !host::holds(address, shape.span(shape.to_pitch)),
        End::Device(_) => false,
    };
    let point = submit(stream, task)?;
    if pageable && !capturing {
        executor().wait(&point);
        return context.check();
    }
    Ok(())
}

/// Rows of a pattern of 1, 2 or 4 bytes, to be filled.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Rows {
    /// Bytes from one row to the next.
    pub pitch: usize,
    /// Patterns a row.
    pub width: usize,
    pub height: usize,
}

fn fill_task(address: u64, pattern: Vec<u8>, rows: Rows) -> Result<Task> {
    if !address.is_multiple_of(pattern.len() as u64) {
        return Err(
            Status::INVALID_VALUE.because(format!("{address:#x} is no multiple of the pattern's size"))
        );
    }
    let memory = &owner_of(address)?.memory;
    let filled = (rows.height * rows.width * pattern.len()) as u64;
    let bytes = match rows.height {
        0 => 0,
        height => (height - 1) * rows.pitch + rows.width * pattern.len(),
    };
    match memory.allocation(address) {
        Some((start, size)) if address - start + bytes as u64 <= size => {}
        found => {
            let place = found.map_or("in no allocation".into(), |(start, size)| {
                format!("at offset {} of an allocation of {size} bytes", address - start)
            });
            return Err(Status::INVALID_VALUE.because(format!("a fill of {bytes} bytes {place}")));
        }
    }
    let run = move |_| {
        Progress::from((0..rows.height).try_for_each(|y| {
            let row = address + (y * rows.pitch) as u64;
            memory.fill(row, &pattern, rows.width as u64).map_err(|fault| failure(&fault))
        }))
    };
    let what = format!("a fill of {bytes} bytes");
    let task = Task::new(what, &here()?, run).touching([Access::write(address, bytes as u64)]);
    Ok(task.with_work(Work::new("fill", 0, filled)))
}

/// A fill that need not be over when the call returns, as CUDA documents it for device memory.
pub(crate) fn fill(address: u64, pattern: Vec<u8>, rows: Rows) -> Result<()> {
    forbidden("a fill that is not asynchronous")?;
    submit(0, fill_task(address, pattern, rows)?).map(|_| ())
}

/// Fills in stream order.
pub(crate) fn fill_async(address: u64, pattern: Vec<u8>, rows: Rows, stream: usize) -> Result<()> {
    submit(stream, fill_task(address, pattern, rows)?).map(|_| ())
}

impl Rows {
    /// One row.
    pub(crate) fn line(width: usize) -> Rows {
        Rows { pitch: 0, width, height: 1 }
    }
}
