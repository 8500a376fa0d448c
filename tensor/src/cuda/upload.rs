//! [`Uploads`]: copies from the host of a batch's size, by way of pinned memory, so that whoever asks goes on at once. From
//! ordinary memory the driver first lets a stream's work end (CUDA driver API, "API synchronization behavior").
#![allow(unsafe_code)]

use std::ops::RangeInclusive;
use std::sync::{Mutex, PoisonError};

use super::{Gpu, GpuEvent, Pinned, driver};
use crate::Result;

/// The copies' bytes. The driver takes smaller ones without waiting; larger ones are rare and would keep much memory.
const BYTES: RangeInclusive<usize> = 64 << 10..=4 << 20;
/// Copies under way at a time.
const ROOMS: usize = 4;

/// A GPU's pinned memory for copies.
#[derive(Default)]
pub(super) struct Uploads(Mutex<Vec<Room>>);

struct Room {
    memory: Pinned,
    /// The end of the copy out of it.
    done: GpuEvent,
}

impl Gpu {
    /// Copies bytes to the device's memory at `to`, in the order of this thread's stream. They may change once this returns.
    ///
    /// # Safety
    /// There is as much memory at `to`, and it lives until the stream has come so far.
    pub(super) unsafe fn upload(&'static self, op: &'static str, to: u64, bytes: &[u8]) -> Result<()> {
        let copy = |from: &[u8]| {
            // SAFETY: stream and memory exist. The driver has read pageable memory before it returns; pinned memory stays as
            // it is until the event below has come, but where an error loses the device.
            self.called(op, unsafe { driver::from_host(to, from, self.stream()) })
        };
        let mut rooms = self.uploads.0.lock().unwrap_or_else(PoisonError::into_inner);
        let memory = if BYTES.contains(&bytes.len()) { self.room(&mut rooms, bytes.len())? } else { None };
        let Some(mut memory) = memory else {
            drop(rooms);
            return copy(bytes);
        };
        memory[..bytes.len()].copy_from_slice(bytes);
        copy(&memory[..bytes.len()])?;
        rooms.push(Room { memory, done: GpuEvent::record(self)? });
        Ok(())
    }

    /// Memory that no copy is using; none if there are as many under way as there may be.
    fn room(&'static self, rooms: &mut Vec<Room>, bytes: usize) -> Result<Option<Pinned>> {
        for i in 0..rooms.len() {
            if rooms[i].done.is_done()? {
                let memory = rooms.swap_remove(i).memory;
                return if memory.len() >= bytes { Ok(Some(memory)) } else { self.more(bytes) };
            }
        }
        if rooms.len() < ROOMS { self.more(bytes) } else { Ok(None) }
    }

    fn more(&'static self, bytes: usize) -> Result<Option<Pinned>> {
        Pinned::zeros(self, bytes.next_power_of_two()).map(Some)
    }
}
