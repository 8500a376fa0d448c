//! Addresses and handles for libraries that this crate does not know: NCCL, an embedder's own kernels.

use std::ffi::c_void;

use super::Gpu;
use crate::storage::{Read, Write};
use crate::{Error, Result, Tensor};

/// A tensor's memory on a GPU, which nobody else may write while this is there: for the time in which work that uses it is
/// handed to the device's stream, not for the time in which it runs.
pub struct DevicePointer<'a> {
    address: u64,
    _guard: Guard<'a>,
}

enum Guard<'a> {
    Read(#[expect(dead_code, reason = "held for its drop")] Read<'a, u8>),
    Write(#[expect(dead_code, reason = "held for its drop")] Write<'a, u8>),
}

impl DevicePointer<'_> {
    /// Where the tensor's first element is, in the device's address space.
    pub fn address(&self) -> u64 {
        self.address
    }
}

impl Tensor {
    /// Where its elements are on the GPU, for work that reads them.
    ///
    /// # Errors
    /// If it is not on a GPU, or is being written.
    pub fn device_read(&self, op: &'static str) -> Result<DevicePointer<'_>> {
        refuse_others(self, op)?;
        Ok(DevicePointer { address: self.device_address(), _guard: Guard::Read(self.lock_read(op)?) })
    }

    /// Where its elements are on the GPU, for work that writes them. Counts as a write: the version goes up.
    ///
    /// # Errors
    /// If it is not on a GPU, or others use it.
    pub fn device_write(&mut self, op: &'static str) -> Result<DevicePointer<'_>> {
        refuse_others(self, op)?;
        let address = self.device_address();
        Ok(DevicePointer { address, _guard: Guard::Write(self.lock_write(op)?) })
    }
}

fn refuse_others(tensor: &Tensor, op: &'static str) -> Result<()> {
    let device = tensor.device();
    let why = || "its elements are not on a GPU; copy it with `to_device`".into();
    if device.is_cuda() { Ok(()) } else { Err(Error::Unsupported { op, device, why: why() }) }
}

impl Gpu {
    /// Makes this device's context the thread's: to be called before a library is.
    ///
    /// # Errors
    /// If the device is lost.
    pub fn make_current(&self) -> Result<()> {
        self.bind("make_current")
    }

    /// The handle (`CUstream`) of the stream that this thread's work goes to.
    pub fn stream_handle(&self) -> *mut c_void {
        self.stream().cast()
    }
}
