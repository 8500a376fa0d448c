//! Copies, in every direction, at once and in stream order.
//!
//! Ordinary memory of the host is read when the copy is queued, and written before the call returns, as CUDA
//! documents it for pageable memory. Page-locked memory is read and written when it is the copy's turn; changing it
//! in between is found.

use std::collections::hash_map::DefaultHasher;
use std::hash::Hasher;

use phalanx_emulator_link::pointer::{Host, In};
use phalanx_emulator_link::{Bytes, BytesMut};
use phalanx_ptx::Memory;

use crate::access::Access;
use crate::context::here;
use crate::device::Device;
use crate::memory::failure;
use crate::status::{Failure, Result, Status, present};
use crate::stream::{submit, submit_and_wait};
use crate::task::{Progress, Task};
use crate::world::world;

/// One end of a copy.
#[derive(Debug, Clone, Copy)]
enum End {
    Device(u64),
    Host(usize),
}

/// Anything that has an address, as unified addressing tells them apart.
fn end(address: u64) -> Result<End> {
    let on_device = world()?.device_of(address).is_some();
    Ok(if on_device { End::Device(address) } else { End::Host(address as usize) })
}

/// Rows of bytes, `pitch` apart at either end; a plain copy has one row.
#[derive(Debug, Clone, Copy)]
struct Shape {
    width: usize,
    height: usize,
    to_pitch: usize,
    from_pitch: usize,
}

impl Shape {
    fn line(bytes: usize) -> Shape {
        Shape { width: bytes, height: 1, to_pitch: bytes, from_pitch: bytes }
    }

    /// From the first byte to behind the last, of rows that far apart.
    fn span(self, pitch: usize) -> usize {
        if self.width == 0 || self.height == 0 { 0 } else { (self.height - 1) * pitch + self.width }
    }
}

fn memory_of(address: u64) -> Result<&'static Device> {
    let unknown = || Status::INVALID_VALUE.because(format!("{address:#x} is no device's address"));
    world()?.device_of(address).ok_or_else(unknown)
}

/// A range of device memory that must be in one allocation, checked when the copy is queued, as the driver does.
fn check(address: u64, bytes: usize) -> Result<()> {
    if bytes == 0 {
        return Ok(());
    }
    let device = memory_of(address)?;
    match device.memory.allocation(address) {
        Some((start, size)) if address - start + bytes as u64 <= size => Ok(()),
        Some((start, size)) => Err(Status::INVALID_VALUE.because(format!(
            "a copy of {bytes} bytes at offset {} of an allocation of {size} bytes",
            address - start
        ))),
        None => Err(Status::INVALID_VALUE.because(format!("{address:#x} is in no allocation"))),
    }
}

fn told(fault: phalanx_ptx::Fault) -> Failure {
    failure(&fault)
}

/// What is done with each row of a copy.
fn rows(shape: Shape, mut row: impl FnMut(usize, usize) -> Result<()>) -> Progress {
    Progress::from((0..shape.height).try_for_each(|y| row(y * shape.to_pitch, y * shape.from_pitch)))
}

fn to_device(to: u64, from: usize, shape: Shape, capturing: bool) -> Result<Task> {
    let span = shape.span(shape.from_pitch);
    let locked = world()?.host.holds(from, span);
    let what = format!("a copy of {} bytes from the host to {to:#x}", shape.width * shape.height);
    let memory = &memory_of(to)?.memory;
    let write = move |bytes: &[u8]| {
        rows(shape, |t, f| memory.write(to + t as u64, &bytes[f..f + shape.width]).map_err(told))
    };
    if !locked && !capturing {
        let staged = Bytes::at(from, span).to_vec();
        return Ok(Task::new(what, &here()?, move |_| write(&staged)));
    }
    // A graph reads what is there whenever it is launched; a copy what was there when it was queued.
    let sum = (!capturing).then(|| Bytes::at(from, span).read(sum));
    let run = move |_| {
        Bytes::at(from, span).read(|bytes| {
            if sum.is_some_and(|before| before != self::sum(bytes)) {
                let why =
                    "the page-locked memory it copies from was changed after it was queued and before it ran";
                return Progress::Failed(Status::LAUNCH_FAILED.because(why));
            }
            write(bytes)
        })
    };
    Ok(Task { host: Some((from, from + span)), ..Task::new(what, &here()?, run) })
}

fn sum(bytes: &[u8]) -> u64 {
    let mut hasher = DefaultHasher::new();
    hasher.write(bytes);
    hasher.finish()
}

fn to_host(to: usize, from: u64, shape: Shape) -> Result<Task> {
    let span = shape.span(shape.to_pitch);
    let what = format!("a copy of {} bytes from {from:#x} to the host", shape.width * shape.height);
    let memory = &memory_of(from)?.memory;
    let run = move |_| {
        BytesMut::at(to, span).write(|bytes| {
            rows(shape, |t, f| memory.read(from + f as u64, &mut bytes[t..t + shape.width]).map_err(told))
        })
    };
    Ok(Task { host: Some((to, to + span)), ..Task::new(what, &here()?, run) })
}

fn on_device(to: u64, from: u64, shape: Shape) -> Result<Task> {
    let what = format!("a copy of {} bytes from {from:#x} to {to:#x}", shape.width * shape.height);
    let (target, source): (&Memory, &Memory) = (&memory_of(to)?.memory, &memory_of(from)?.memory);
    let run = move |_| {
        rows(shape, |t, f| {
            target.copy_from(to + t as u64, source, from + f as u64, shape.width as u64).map_err(told)
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
    let (written, read) = (|a| Access::write(a, to_span as u64), |a| Access::read(a, from_span as u64));
    match (to, from) {
        (End::Device(to), End::Host(from)) => {
            host(from, from_span)?;
            Ok(to_device(to, from, shape, capturing)?.touching([written(to)]))
        }
        (End::Host(to), End::Device(from)) => {
            host(to, to_span)?;
            Ok(to_host(to, from, shape)?.touching([read(from)]))
        }
        (End::Device(to), End::Device(from)) => {
            Ok(on_device(to, from, shape)?.touching([written(to), read(from)]))
        }
        (End::Host(to), End::Host(from)) => {
            let run = move |_| {
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

fn copy(to: End, from: End, shape: Shape) -> Result<()> {
    submit_and_wait("a copy that is not asynchronous", task(to, from, shape, false)?)
}

fn copy_async(to: End, from: End, shape: Shape, stream: usize) -> Result<()> {
    let capturing = crate::stream::is_captured(stream)?;
    let task = task(to, from, shape, capturing)?;
    let context = task.context.clone();
    let pageable = match to {
        End::Host(address) => !world()?.host.holds(address, shape.span(shape.to_pitch)),
        End::Device(_) => false,
    };
    let point = submit(stream, task)?;
    if pageable && !capturing {
        world()?.executor.wait(&point);
        return context.lost().map_or(Ok(()), |status| Err(status.into()));
    }
    Ok(())
}

/// `CUDA_MEMCPY2D`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(crate) struct Rectangle {
    from: Side,
    to: Side,
    width: usize,
    height: usize,
}

#[repr(C)]
#[derive(Debug, Clone, Copy)]
struct Side {
    x: usize,
    y: usize,
    kind: i32,
    host: usize,
    device: u64,
    array: usize,
    pitch: usize,
}

impl Side {
    fn end(self) -> Result<End> {
        let offset = self.y * self.pitch + self.x;
        match self.kind {
            1 => Ok(End::Host(self.host + offset)),
            2 => Ok(End::Device(self.device + offset as u64)),
            4 => end(self.device + offset as u64),
            _ => Err(Status::NOT_SUPPORTED.because("arrays are not emulated")),
        }
    }
}

fn rectangle(copy: In<Rectangle>) -> Result<(End, End, Shape)> {
    let Rectangle { from, to, width, height } = present(copy.get(), "copy")?;
    let pitch = |side: Side| if side.pitch == 0 { width } else { side.pitch };
    let shape = Shape { width, height, to_pitch: pitch(to), from_pitch: pitch(from) };
    if shape.to_pitch < width || shape.from_pitch < width {
        return Err(Status::INVALID_VALUE.because("rows are wider than they are apart"));
    }
    Ok((to.end()?, from.end()?, shape))
}

export! {
    fn cuMemcpy(to: u64, from: u64, bytes: usize) { copy(end(to)?, end(from)?, Shape::line(bytes)) }
    fn cuMemcpyAsync(to: u64, from: u64, bytes: usize, stream: usize) {
        copy_async(end(to)?, end(from)?, Shape::line(bytes), stream)
    }
    fn cuMemcpyHtoD_v2(to: u64, from: Host, bytes: usize) {
        copy(End::Device(to), End::Host(from.address()), Shape::line(bytes))
    }
    fn cuMemcpyHtoDAsync_v2(to: u64, from: Host, bytes: usize, stream: usize) {
        copy_async(End::Device(to), End::Host(from.address()), Shape::line(bytes), stream)
    }
    fn cuMemcpyDtoH_v2(to: Host, from: u64, bytes: usize) {
        copy(End::Host(to.address()), End::Device(from), Shape::line(bytes))
    }
    fn cuMemcpyDtoHAsync_v2(to: Host, from: u64, bytes: usize, stream: usize) {
        copy_async(End::Host(to.address()), End::Device(from), Shape::line(bytes), stream)
    }
    fn cuMemcpyDtoD_v2(to: u64, from: u64, bytes: usize) {
        copy(End::Device(to), End::Device(from), Shape::line(bytes))
    }
    fn cuMemcpyDtoDAsync_v2(to: u64, from: u64, bytes: usize, stream: usize) {
        copy_async(End::Device(to), End::Device(from), Shape::line(bytes), stream)
    }
    fn cuMemcpyPeer(to: u64, to_context: usize, from: u64, from_context: usize, bytes: usize) {
        copy(End::Device(to), End::Device(from), Shape::line(bytes))
    }
    fn cuMemcpyPeerAsync(
        to: u64, to_context: usize, from: u64, from_context: usize, bytes: usize, stream: usize,
    ) {
        copy_async(End::Device(to), End::Device(from), Shape::line(bytes), stream)
    }
    fn cuMemcpy2D_v2(wanted: In<Rectangle>) {
        let (to, from, shape) = rectangle(wanted)?;
        copy(to, from, shape)
    }
    fn cuMemcpy2DUnaligned_v2(wanted: In<Rectangle>) {
        let (to, from, shape) = rectangle(wanted)?;
        copy(to, from, shape)
    }
    fn cuMemcpy2DAsync_v2(wanted: In<Rectangle>, stream: usize) {
        let (to, from, shape) = rectangle(wanted)?;
        copy_async(to, from, shape, stream)
    }
}
