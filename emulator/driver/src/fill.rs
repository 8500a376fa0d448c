//! Filling memory with a pattern of 1, 2 or 4 bytes, at once and in stream order.

use crate::access::Access;
use crate::context::here;
use crate::memory::failure;
use crate::status::{Result, Status};
use crate::stream::submit;
use crate::task::{Progress, Task};
use crate::world::world;

/// Rows of patterns.
#[derive(Debug, Clone, Copy)]
struct Rows {
    /// Bytes from one row to the next.
    pitch: usize,
    /// Patterns a row.
    width: usize,
    height: usize,
}

fn task(address: u64, pattern: Vec<u8>, rows: Rows) -> Result<Task> {
    if !address.is_multiple_of(pattern.len() as u64) {
        return Err(
            Status::INVALID_VALUE.because(format!("{address:#x} is no multiple of the pattern's size"))
        );
    }
    let unknown = || Status::INVALID_VALUE.because(format!("{address:#x} is no device's address"));
    let memory = &world()?.device_of(address).ok_or_else(unknown)?.memory;
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
    Ok(Task::new(what, &here()?, run).touching([Access::write(address, bytes as u64)]))
}

/// A fill that need not be over when the call returns, as CUDA documents it for device memory.
fn fill(address: u64, pattern: Vec<u8>, rows: Rows) -> Result<()> {
    crate::capture::forbidden("a fill that is not asynchronous")?;
    submit(0, task(address, pattern, rows)?).map(|_| ())
}

fn fill_async(address: u64, pattern: Vec<u8>, rows: Rows, stream: usize) -> Result<()> {
    submit(stream, task(address, pattern, rows)?).map(|_| ())
}

fn line(width: usize) -> Rows {
    Rows { pitch: 0, width, height: 1 }
}

export! {
    fn cuMemsetD8_v2(address: u64, value: u8, count: usize) { fill(address, vec![value], line(count)) }
    fn cuMemsetD16_v2(address: u64, value: u16, count: usize) {
        fill(address, value.to_le_bytes().to_vec(), line(count))
    }
    fn cuMemsetD32_v2(address: u64, value: u32, count: usize) {
        fill(address, value.to_le_bytes().to_vec(), line(count))
    }
    fn cuMemsetD8Async(address: u64, value: u8, count: usize, stream: usize) {
        fill_async(address, vec![value], line(count), stream)
    }
    fn cuMemsetD16Async(address: u64, value: u16, count: usize, stream: usize) {
        fill_async(address, value.to_le_bytes().to_vec(), line(count), stream)
    }
    fn cuMemsetD32Async(address: u64, value: u32, count: usize, stream: usize) {
        fill_async(address, value.to_le_bytes().to_vec(), line(count), stream)
    }
    fn cuMemsetD2D8_v2(address: u64, pitch: usize, value: u8, width: usize, height: usize) {
        fill(address, vec![value], Rows { pitch, width, height })
    }
    fn cuMemsetD2D16_v2(address: u64, pitch: usize, value: u16, width: usize, height: usize) {
        fill(address, value.to_le_bytes().to_vec(), Rows { pitch, width, height })
    }
    fn cuMemsetD2D32_v2(address: u64, pitch: usize, value: u32, width: usize, height: usize) {
        fill(address, value.to_le_bytes().to_vec(), Rows { pitch, width, height })
    }
    fn cuMemsetD2D8Async(address: u64, pitch: usize, value: u8, width: usize, height: usize, stream: usize) {
        fill_async(address, vec![value], Rows { pitch, width, height }, stream)
    }
    fn cuMemsetD2D16Async(address: u64, pitch: usize, value: u16, width: usize, height: usize, stream: usize) {
        fill_async(address, value.to_le_bytes().to_vec(), Rows { pitch, width, height }, stream)
    }
    fn cuMemsetD2D32Async(address: u64, pitch: usize, value: u32, width: usize, height: usize, stream: usize) {
        fill_async(address, value.to_le_bytes().to_vec(), Rows { pitch, width, height }, stream)
    }
}
