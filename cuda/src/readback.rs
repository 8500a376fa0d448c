//! Results that reach the host later: faults that kernels report, and bytes that are copied while the host goes on.
//!
//! A kernel cannot return an error, and to ask after every launch would stop the device each time. So each device has one fault
//! record. The first kernel that meets an index beyond its limit writes there. The next wait for the device reads the record and
//! returns the error that the CPU's operation would have returned.
#![allow(unsafe_code)]

use std::sync::{Mutex, OnceLock};

use crate::context::{Context, GpuEvent, lock};
use crate::gpu::Gpu;
use crate::memory::{DeviceBlock, Pinned};
use crate::{Error, Result};

/// CUDA code for kernels that report: `fault(faults, code, item, value, limit)`, the first two being the arguments that
/// [`Gpu::fault_code`] gives.
pub const FAULT: &str = r#"
struct Faults {
    unsigned code;
    unsigned taken;
    long long item, value, limit;
};

__device__ inline void fault(Faults* faults, unsigned code, long long item, long long value, long long limit) {
    if (atomicCAS(&faults->taken, 0u, 1u) == 0u) {
        faults->item = item;
        faults->value = value;
        faults->limit = limit;
        __threadfence();
        atomicExch(&faults->code, code);
    }
}
"#;

/// The record's size. It holds code and taken (32 bits each), item, value, limit.
const RECORD_BYTES: usize = 32;

/// The fault record of one device.
#[derive(Default)]
pub(crate) struct Faults {
    /// There once an operation reports.
    record: OnceLock<DeviceBlock>,
    /// Operations that report. A code is an index here, counted from 1.
    ops: Mutex<Vec<&'static str>>,
}

impl Faults {
    fn opened(&self, context: &'static Context) -> Result<&DeviceBlock> {
        if let Some(record) = self.record.get() {
            return Ok(record);
        }
        let record = context.allocate("faults", RECORD_BYTES)?;
        // SAFETY: the block was just made. Other streams come later: the record is waited for.
        unsafe { context.fill("faults", record.address(), 0, RECORD_BYTES)? };
        context.wait("faults")?;
        Ok(self.record.get_or_init(|| record))
    }

    /// The record's address and the code of `op` there.
    pub(crate) fn code(&self, context: &'static Context, op: &'static str) -> Result<(u64, u32)> {
        let record = self.opened(context)?;
        let mut ops = lock(&self.ops);
        let index = ops.iter().position(|&known| known == op).unwrap_or_else(|| {
            ops.push(op);
            ops.len() - 1
        });
        Ok((record.address(), index as u32 + 1))
    }

    /// Takes the report of a kernel, after its stream was waited for.
    ///
    /// # Errors
    /// That report.
    pub(crate) fn check(&self, context: &Context) -> Result<()> {
        let Some(address) = self.address() else { return Ok(()) };
        let mut record = [0; RECORD_BYTES];
        // SAFETY: the record exists.
        unsafe { context.copy_to_host("faults", &mut record, address)? };
        let Some(error) = self.error(&record) else { return Ok(()) };
        // SAFETY: as above. Other streams look and report here too: they come later.
        unsafe { context.fill("faults", address, 0, RECORD_BYTES)? };
        context.wait("faults")?;
        Err(error)
    }

    /// Where the record is, if any kernel may have written there.
    fn address(&self) -> Option<u64> {
        self.record.get().map(DeviceBlock::address)
    }

    /// The error that a copy of the record holds.
    fn error(&self, record: &[u8]) -> Option<Error> {
        let word = |i: usize| i64::from_le_bytes(std::array::from_fn(|b| record[i * 8 + b]));
        let index = (word(0) as u32 as usize).checked_sub(1)?;
        let op = lock(&self.ops).get(index).copied().unwrap_or("kernel");
        Some(Error::Fault { op, item: word(1), value: word(2), limit: word(3) })
    }
}

/// Pinned memory for bytes of a GPU, used again and again. [`Readback::start`] asks for the bytes as they will be when all work so far
/// is done, and [`Readback::finish`] waits for them. The device may be given more work in between.
#[derive(Debug)]
pub struct Readback {
    gpu: &'static Gpu,
    /// The bytes, then the device's fault record.
    memory: Pinned,
    bytes: usize,
    in_flight: Option<GpuEvent>,
}

impl Readback {
    /// For `bytes` bytes.
    ///
    /// # Errors
    /// If the system has no more memory that can be pinned.
    pub fn new(gpu: &'static Gpu, bytes: usize) -> Result<Readback> {
        Ok(Readback { gpu, memory: Pinned::zeros(gpu, bytes + RECORD_BYTES)?, bytes, in_flight: None })
    }

    /// Queues the copy from `from`. Waits only for a copy that was started before and not finished.
    ///
    /// # Errors
    /// If the device is lost.
    ///
    /// # Safety
    /// There is as much memory at `from`, and it lives until the stream has come so far.
    pub unsafe fn start(&mut self, op: &'static str, from: u64) -> Result<()> {
        self.wait()?;
        self.gpu.bind(op)?;
        let (numbers, faults) = self.memory.split_at_mut(self.bytes);
        // SAFETY: device memory exists. The pinned memory is this value's, which neither reads, writes nor frees it before the event,
        // but where an error here loses the device.
        unsafe {
            self.gpu.start_copy_to_host(op, numbers, from)?;
            if let Some(record) = self.gpu.faults().address() {
                self.gpu.start_copy_to_host(op, faults, record)?;
            }
        }
        self.in_flight = Some(GpuEvent::record(self.gpu)?);
        Ok(())
    }

    /// Waits for the copy and returns the bytes; none if no copy was started.
    ///
    /// # Errors
    /// What kernels have reported before. The report is taken: later waits for the device do not return it again.
    pub fn finish(&mut self) -> Result<Option<&[u8]>> {
        if self.in_flight.is_none() {
            return Ok(None);
        }
        self.wait()?;
        if let Some(error) = self.gpu.faults().error(&self.memory[self.bytes..]) {
            self.memory[self.bytes..].fill(0);
            // Takes the report from the device.
            return Err(self.gpu.synchronize().err().unwrap_or(error));
        }
        Ok(Some(&self.memory[..self.bytes]))
    }

    /// Waits for a copy that is in flight.
    ///
    /// # Errors
    /// If the device is lost.
    pub fn wait(&mut self) -> Result<()> {
        self.in_flight.take().map_or(Ok(()), |event| event.synchronize())
    }
}

impl Drop for Readback {
    fn drop(&mut self) {
        // If it fails the device is lost, and writes nothing any more.
        let _ = self.wait();
    }
}
