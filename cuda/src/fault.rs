//! Faults that kernels report: errors that only a kernel can find, such as an index beyond its table.
//!
//! A kernel cannot return an error, and checking after every launch would synchronize the device each time. So each
//! device has one fault record. The first kernel that meets an index beyond its limit writes there. The next wait for
//! the device reads the record and returns the error that the CPU's operation would have returned.
#![allow(unsafe_code)]

use std::sync::{Mutex, OnceLock};

use crate::context::{Context, lock};
use crate::memory::DeviceBlock;
use crate::{Error, Result};

/// CUDA code for kernels that report: `fault(faults, code, item, value, limit)`, the first two being the arguments that
/// [`Gpu::fault_code`](crate::Gpu::fault_code) gives.
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
pub(crate) const RECORD_BYTES: usize = 32;

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
    pub(crate) fn check(&self, context: &'static Context) -> Result<()> {
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
    pub(crate) fn address(&self) -> Option<u64> {
        self.record.get().map(DeviceBlock::address)
    }

    /// The error that a copy of the record holds.
    pub(crate) fn error(&self, record: &[u8]) -> Option<Error> {
        let word = |i: usize| i64::from_le_bytes(std::array::from_fn(|b| record[i * 8 + b]));
        let index = (word(0) as u32 as usize).checked_sub(1)?;
        let op = lock(&self.ops).get(index).copied().unwrap_or("kernel");
        Some(Error::Fault { op, item: word(1), value: word(2), limit: word(3) })
    }
}
