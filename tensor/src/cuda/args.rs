//! [`Args`]: the arguments of a launch, with guards on the tensors that they point to. [`Scratch`]: memory between the launches of one
//! operation. [`DevicePointer`]: a tensor's address for a library that this crate does not know.

use std::sync::atomic::{AtomicBool, Ordering};

use phalanx_cuda::{Arguments, captured_step};
use smallvec::SmallVec;

use super::copy::gather_into;
use super::{Boxes, DeviceBlock, Gpu, Traffic};
use crate::storage::{Read, Write};
use crate::{Error, PhiloxStream, Result, RngKey, ScratchUse, Tensor};

/// A kernel's arguments, and guards on the tensors that they point to, held until the launch is queued.
pub struct Args<'a> {
    op: &'static str,
    gpu: &'static Gpu,
    packed: Arguments,
    readers: SmallVec<[Read<'a, u8>; 8]>,
    writers: SmallVec<[Write<'a, u8>; 4]>,
}

impl<'a> Args<'a> {
    /// No arguments yet.
    pub fn new(op: &'static str, gpu: &'static Gpu) -> Args<'a> {
        let (readers, writers) = Default::default();
        Args { op, gpu, packed: Arguments::default(), readers, writers }
    }

    /// The operation that launches.
    pub(super) fn op(&self) -> &'static str {
        self.op
    }

    /// A pointer to the first element of a tensor to read.
    ///
    /// # Errors
    /// If it is on another device, or is being written.
    pub fn read(mut self, tensor: &'a Tensor) -> Result<Args<'a>> {
        self.check(tensor)?;
        let known = self.readers.iter().any(|r| r.is_of(tensor.storage()))
            || self.writers.iter().any(|w| w.is_of(tensor.storage()));
        if !known {
            self.readers.push(tensor.lock_read(self.op)?);
        }
        self.packed.traffic.read += moved_bytes(tensor);
        Ok(self.value(tensor.device_address()))
    }

    /// [`Args::read`], with a pointer to the element that lies `start` elements after the first.
    ///
    /// # Errors
    /// As [`Args::read`].
    pub fn read_at(self, tensor: &'a Tensor, start: usize) -> Result<Args<'a>> {
        Ok(self.read(tensor)?.moved(start * tensor.dtype().size()))
    }

    /// [`Args::read`], or a null pointer.
    ///
    /// # Errors
    /// As [`Args::read`].
    pub fn read_if(self, tensor: Option<&'a Tensor>) -> Result<Args<'a>> {
        match tensor {
            Some(tensor) => self.read(tensor),
            None => Ok(self.value(0u64)),
        }
    }

    /// A pointer to the first element of a tensor to write. Several views of one storage may be given; the caller knows that the kernel
    /// writes none of their common elements twice.
    ///
    /// # Errors
    /// If it is on another device, or others use it.
    pub fn write(mut self, tensor: &'a mut Tensor) -> Result<Args<'a>> {
        self.check(tensor)?;
        let address = tensor.device_address();
        self.packed.traffic.written += moved_bytes(tensor);
        if !self.writers.iter().any(|w| w.is_of(tensor.storage())) {
            self.writers.push(tensor.lock_write(self.op)?);
        }
        Ok(self.value(address))
    }

    /// Sets what the kernel moves and computes, given what its operands are: tensors that are read or written once as a whole, scratch
    /// memory that the first launch writes and the others read. For kernels that do otherwise, as those that pick rows of a table,
    /// and for those that compute. Dry runs alone look at it ([`crate::cuda::take_dry_log`]).
    #[must_use]
    pub fn with_traffic(mut self, change: impl FnOnce(Traffic) -> Traffic) -> Args<'a> {
        self.packed.traffic = change(self.packed.traffic);
        self
    }

    /// The kernel reads as many bytes more as it writes: it adds to what is there.
    #[must_use]
    pub fn reading_outputs(self) -> Args<'a> {
        self.with_traffic(|t| Traffic { read: t.read + t.written, ..t })
    }

    /// [`Args::write`], with a pointer to the element that lies `start` elements after the first.
    ///
    /// # Errors
    /// As [`Args::write`].
    pub fn write_at(self, tensor: &'a mut Tensor, start: usize) -> Result<Args<'a>> {
        let bytes = start * tensor.dtype().size();
        Ok(self.write(tensor)?.moved(bytes))
    }

    /// [`Args::write`], or a null pointer.
    ///
    /// # Errors
    /// As [`Args::write`].
    pub fn write_if(self, tensor: Option<&'a mut Tensor>) -> Result<Args<'a>> {
        match tensor {
            Some(tensor) => self.write(tensor),
            None => Ok(self.value(0u64)),
        }
    }

    /// The last argument, a pointer, so many bytes further.
    fn moved(mut self, bytes: usize) -> Args<'a> {
        self.packed.advance_last(bytes);
        self
    }

    /// The map of boxes of a tensor to read, whose first element [`Args::read_at`] would point to; for a `__grid_constant__` argument.
    ///
    /// # Errors
    /// As [`Args::read`], and if the GPU has no such maps.
    pub fn read_boxes(self, tensor: &'a Tensor, start: usize, boxes: &Boxes) -> Result<Args<'a>> {
        self.read_at(tensor, start)?.boxes(boxes)
    }

    /// [`Args::read_boxes`] of scratch memory.
    ///
    /// # Errors
    /// If the GPU has no such maps.
    pub fn scratch_boxes(self, scratch: &Scratch, boxes: &Boxes) -> Result<Args<'a>> {
        self.scratch(scratch).boxes(boxes)
    }

    /// The last argument, a pointer, as a map.
    fn boxes(mut self, boxes: &Boxes) -> Result<Args<'a>> {
        let address = self.packed.pop_pointer();
        self.packed.push_map(self.gpu.tensor_map(self.op, address, boxes).map_err(Error::of_gpu)?);
        Ok(self)
    }

    /// A number, or a structure laid out as in C.
    pub fn value<T: bytemuck::Pod>(mut self, value: T) -> Args<'a> {
        self.packed.push(value);
        self
    }

    /// The record for errors that the kernel finds, and this operation's code there: `Faults* faults, unsigned code`.
    ///
    /// # Errors
    /// If the device is lost.
    pub fn faults(self) -> Result<Args<'a>> {
        let (address, code) = self.gpu.fault_code(self.op).map_err(Error::of_gpu)?;
        Ok(self.value(address).value(code))
    }

    /// The random draws of a site: the prelude's `Draws`. In a captured step ([`super::Graph`]) each launch has its own step's number.
    pub fn draws(self, stream: PhiloxStream) -> Args<'a> {
        let RngKey { seed, step } = stream.of();
        self.value([seed, stream.site(), step, captured_step(step)])
    }

    fn check(&self, tensor: &Tensor) -> Result<()> {
        let (left, right) = (self.gpu.device(), tensor.device());
        if left == right { Ok(()) } else { Err(Error::Device { op: self.op, left, right }) }
    }

    pub(super) fn packed(&mut self) -> &mut Arguments {
        &mut self.packed
    }
}

/// The bytes of a tensor's elements, each once where a view repeats them.
fn moved_bytes(tensor: &Tensor) -> u64 {
    let distinct = tensor.shape().iter().zip(tensor.strides()).filter(|(_, stride)| **stride != 0);
    (distinct.map(|(size, _)| size).product::<usize>() * tensor.dtype().size()) as u64
}

/// Device memory that is no tensor. The ledger counts it as scratch, apart from the tensors, which a `meta` device counts too. It is freed
/// in the order of the stream, so it may be dropped as soon as the last kernel that uses it was launched.
pub struct Scratch {
    block: DeviceBlock,
    bytes: usize,
    /// Whether a launch was given it: the first one writes it, the others read it.
    is_written: AtomicBool,
    _use: ScratchUse<'static>,
}

impl Scratch {
    /// The elements of a tensor on a GPU in row-major order, for kernels that need them together.
    ///
    /// # Errors
    /// If the device has no more memory, or the tensor more than eight dimensions that do not lie together.
    pub fn of(op: &'static str, tensor: &Tensor) -> Result<Scratch> {
        let scratch = tensor.device().gpu()?.scratch(op, tensor.numel() * tensor.dtype().size())?;
        gather_into(op, &scratch, tensor)?;
        Ok(scratch)
    }
}

impl Gpu {
    /// `bytes` of memory, whatever it holds.
    ///
    /// # Errors
    /// If the device has no more.
    pub fn scratch(&'static self, op: &'static str, bytes: usize) -> Result<Scratch> {
        let block = self.allocate(op, bytes.max(1)).map_err(Error::of_gpu)?;
        let is_written = AtomicBool::new(false);
        Ok(Scratch { block, bytes, is_written, _use: self.device().ledger()?.scratch_of(bytes) })
    }
}

impl Args<'_> {
    /// A pointer to scratch memory. The kernel may read and write it.
    pub fn scratch(mut self, scratch: &Scratch) -> Self {
        let Traffic { read, written, .. } = &mut self.packed.traffic;
        let moved = if scratch.is_written.swap(true, Ordering::Relaxed) { read } else { written };
        *moved += scratch.bytes as u64;
        self.value(scratch.block.address())
    }
}

/// A tensor's memory on a GPU, with a guard on the tensor. It is held while work that uses the memory is given to the device's stream, and
/// not while that work runs.
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
