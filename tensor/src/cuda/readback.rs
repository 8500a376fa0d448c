//! [`Readback`]: a few numbers on their way from a GPU to the host, which goes on meanwhile.
#![allow(unsafe_code)]

use super::fault::RECORD_BYTES;
use super::{Gpu, GpuEvent, Pinned, driver};
use crate::{DType, Device, Error, Result, Tensor};

/// Room in the host's memory for f64 numbers of a GPU, used again and again: what [`Readback::start`] asks for,
/// [`Readback::finish`] gives, whatever the device was given in between.
#[derive(Debug)]
pub struct Readback {
    gpu: &'static Gpu,
    /// The numbers, then the device's fault record.
    memory: Pinned,
    count: usize,
    under_way: Option<GpuEvent>,
}

impl Readback {
    /// For `count` numbers of a CUDA device.
    ///
    /// # Errors
    /// If it is no such device, or the system has no more memory that can be pinned.
    pub fn new(device: Device, count: usize) -> Result<Readback> {
        let gpu = device.gpu()?;
        let memory = Pinned::zeros(gpu, count * size_of::<f64>() + RECORD_BYTES)?;
        Ok(Readback { gpu, memory, count, under_way: None })
    }

    /// Asks for what a tensor will hold when everything that the device was given so far is done: f64, contiguous, of as many
    /// elements as there is room for. Waits for nothing but what was asked for before and was not taken.
    ///
    /// # Errors
    /// If the tensor is another, or the device is lost.
    pub fn start(&mut self, from: &Tensor) -> Result<()> {
        const OP: &str = "readback";
        self.end()?;
        let fits = from.numel() == self.count && from.is_contiguous();
        if from.device() != self.gpu.device() || from.dtype() != DType::F64 || !fits {
            let got = format!("{:?} {} on {}", from.shape(), from.dtype(), from.device());
            let wanted = format!("{} contiguous f64 on {}", self.count, self.gpu.device());
            return Err(Error::shape(OP, got, wanted));
        }
        self.gpu.bind(OP)?;
        let _lock = from.lock_read(OP)?;
        let (stream, record) = (self.gpu.stream(), self.gpu.fault_record());
        let (numbers, faults) = self.memory.split_at_mut(self.count * size_of::<f64>());
        // SAFETY: stream and device memory exist. The host's memory is this value's, which neither reads, writes nor frees it
        // before the event has come, but where an error here loses the device.
        unsafe {
            self.gpu.called(OP, driver::to_host(numbers, from.device_address(), stream))?;
            if let Some(record) = record {
                self.gpu.called(OP, driver::to_host(faults, record, stream))?;
            }
        }
        self.under_way = Some(GpuEvent::record(self.gpu)?);
        Ok(())
    }

    /// Waits for what was asked for, and gives it.
    ///
    /// # Errors
    /// If nothing was, or what kernels have found wrong before: whoever waits for the device later does not hear of it again.
    pub fn finish(&mut self) -> Result<Vec<f64>> {
        if self.under_way.is_none() {
            return Err(Error::invalid("readback", "nothing was asked for"));
        }
        self.end()?;
        let (numbers, faults) = self.memory.split_at(self.count * size_of::<f64>());
        if let Some(error) = self.gpu.fault_of(faults) {
            self.memory[self.count * size_of::<f64>()..].fill(0);
            // Takes the report from the device.
            return Err(self.gpu.synchronize().err().unwrap_or(error));
        }
        let number = |bytes: &[u8]| f64::from_le_bytes(std::array::from_fn(|i| bytes[i]));
        Ok(numbers.chunks_exact(size_of::<f64>()).map(number).collect())
    }

    fn end(&mut self) -> Result<()> {
        self.under_way.take().map_or(Ok(()), |event| event.synchronize())
    }
}

impl Drop for Readback {
    fn drop(&mut self) {
        // If it fails the device is lost, and writes nothing any more.
        let _ = self.end();
    }
}
