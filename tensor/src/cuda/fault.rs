//! Errors that only a kernel can find, such as an index beyond its table: noted on the device, told at the next wait.
//!
//! A kernel cannot return an error, and asking after every launch would stop the device each time. So each device has one
//! record. The first kernel that finds something writes there; whoever waits for the device (a copy to the host,
//! [`Gpu::synchronize`]) looks, and gets the error that the CPU's operation would have returned.
#![allow(unsafe_code)]

use std::sync::{Mutex, PoisonError};

use super::memory::DeviceBlock;
use super::{Gpu, driver};
use crate::{Error, Result};

/// CUDA code for kernels that report: `fault(faults, code, item, value, limit)` with the first two as
/// [`super::Args::faults`] gives them.
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

/// The record of one device.
pub(super) struct Faults {
    block: DeviceBlock,
    /// Operations that report; a code is a place here, counted from 1.
    ops: Mutex<Vec<&'static str>>,
}

/// The record's size, and what it holds: code, taken (32 bits each), item, value, limit.
pub(super) const RECORD_BYTES: usize = 32;

impl Gpu {
    fn faults(&'static self) -> Result<&'static Faults> {
        if let Some(faults) = self.faults.get() {
            return Ok(faults);
        }
        let block = self.allocate("faults", RECORD_BYTES)?;
        // SAFETY: the block and the stream exist. Other streams come later: the record is waited for.
        unsafe {
            self.called("faults", driver::fill(block.address(), 0, RECORD_BYTES, self.stream()))?;
            self.called("faults", driver::synchronize(self.stream()))?;
        }
        Ok(self.faults.get_or_init(|| Faults { block, ops: Mutex::default() }))
    }

    /// The record's address and the code of `op` there.
    pub(super) fn fault_code(&'static self, op: &'static str) -> Result<(u64, u32)> {
        let faults = self.faults()?;
        let mut ops = faults.ops.lock().unwrap_or_else(PoisonError::into_inner);
        let place = ops.iter().position(|&known| known == op).unwrap_or_else(|| {
            ops.push(op);
            ops.len() - 1
        });
        Ok((faults.block.address(), place as u32 + 1))
    }

    /// Takes what a kernel has reported, after its stream was waited for.
    ///
    /// # Errors
    /// That report.
    pub(super) fn check_faults(&'static self) -> Result<()> {
        let Some(faults) = self.faults.get() else { return Ok(()) };
        let mut record = [0; RECORD_BYTES];
        let (address, stream) = (faults.block.address(), self.stream());
        // SAFETY: the record and the stream exist, and the copy is waited for.
        unsafe {
            self.called("faults", driver::to_host(&mut record, address, stream))?;
            self.called("faults", driver::synchronize(stream))?;
        }
        let Some(error) = self.fault_of(&record) else { return Ok(()) };
        // SAFETY: as above. Other streams look and report here too: they come later.
        unsafe {
            self.called("faults", driver::fill(address, 0, RECORD_BYTES, stream))?;
            self.called("faults", driver::synchronize(stream))?;
        }
        Err(error)
    }

    /// Where the record is, if any kernel may have written there.
    pub(super) fn fault_record(&self) -> Option<u64> {
        self.faults.get().map(|faults| faults.block.address())
    }

    /// What a copy of the record says.
    pub(super) fn fault_of(&self, record: &[u8]) -> Option<Error> {
        let word = |i: usize| i64::from_le_bytes(std::array::from_fn(|b| record[i * 8 + b]));
        let place = (word(0) as u32 as usize).checked_sub(1)?;
        let ops = &self.faults.get()?.ops;
        let op = ops.lock().unwrap_or_else(PoisonError::into_inner).get(place).copied();
        let got = format!("index {} (item {})", word(2), word(1));
        Some(Error::range(op.unwrap_or("kernel"), got, format!("an index below {}", word(3))))
    }
}
