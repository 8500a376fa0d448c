//! [`Args`] and [`Grid`]: what a launch hands to a kernel, and how many threads run it.

use smallvec::SmallVec;

use super::Gpu;
use crate::storage::{Read, Write};
use crate::{Error, Result, RngKey, Stream4, Tensor};

/// How a kernel is spread over the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Grid {
    /// Blocks along x, y and z. With a 0 nothing is launched.
    pub blocks: [u32; 3],
    /// Threads of a block along x, y and z.
    pub threads: [u32; 3],
    /// Dynamic shared memory of a block, in bytes.
    pub shared_bytes: u32,
}

impl Grid {
    /// `blocks` blocks of `threads` threads.
    pub fn new(blocks: usize, threads: u32) -> Grid {
        let blocks = u32::try_from(blocks).unwrap_or(u32::MAX).min(i32::MAX as u32);
        Grid { blocks: [blocks, 1, 1], threads: [threads, 1, 1], shared_bytes: 0 }
    }

    /// Blocks of `threads` threads, one thread for each of `items`, but no more blocks than keep the device busy: the
    /// kernel strides by the grid.
    pub fn over(gpu: &Gpu, items: usize, threads: u32) -> Grid {
        let enough = gpu.processors() as usize * (2048 / threads as usize).max(1) * 2;
        Grid::new(items.div_ceil(threads as usize).min(enough), threads)
    }

    /// The same with other block counts along y and z.
    pub fn by(mut self, y: usize, z: usize) -> Grid {
        let clamp = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
        (self.blocks[1], self.blocks[2]) = (clamp(y), clamp(z));
        self
    }

    /// The same with as much dynamic shared memory.
    pub fn shared(mut self, bytes: usize) -> Grid {
        self.shared_bytes = u32::try_from(bytes).unwrap_or(u32::MAX);
        self
    }
}

/// A kernel's arguments, and the tensors behind them, which nobody else may write until the launch.
pub struct Args<'a> {
    op: &'static str,
    gpu: &'static Gpu,
    /// Laid out as the kernel's parameters are: each aligned to its own size's alignment.
    packed: SmallVec<[u64; 24]>,
    bytes: usize,
    readers: SmallVec<[Read<'a, u8>; 8]>,
    writers: SmallVec<[Write<'a, u8>; 4]>,
}

impl<'a> Args<'a> {
    /// None yet.
    pub fn new(op: &'static str, gpu: &'static Gpu) -> Args<'a> {
        let (readers, writers) = Default::default();
        Args { op, gpu, packed: SmallVec::new(), bytes: 0, readers, writers }
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

    /// A pointer to the first element of a tensor to write. Several views of one storage may be given: that they do not
    /// overlap is the kernel's business.
    ///
    /// # Errors
    /// If it is on another device, or others use it.
    pub fn write(mut self, tensor: &'a mut Tensor) -> Result<Args<'a>> {
        self.check(tensor)?;
        let address = tensor.device_address();
        if !self.writers.iter().any(|w| w.is_of(tensor.storage())) {
            self.writers.push(tensor.lock_write(self.op)?);
        }
        Ok(self.value(address))
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
        if let Some(address) = self.packed.last_mut() {
            *address += bytes as u64;
        }
        self
    }

    /// A number, or a structure laid out as in C.
    pub fn value<T: bytemuck::Pod>(mut self, value: T) -> Args<'a> {
        let start = self.bytes.next_multiple_of(align_of::<T>());
        self.bytes = start + size_of::<T>();
        self.packed.resize(self.bytes.div_ceil(8), 0);
        bytemuck::cast_slice_mut::<u64, u8>(&mut self.packed)[start..self.bytes]
            .copy_from_slice(bytemuck::bytes_of(&value));
        self
    }

    /// The record for errors that the kernel finds, and this operation's code there: `Faults* faults, unsigned code`.
    ///
    /// # Errors
    /// If the device is lost.
    pub fn faults(self) -> Result<Args<'a>> {
        let (address, code) = self.gpu.fault_code(self.op)?;
        Ok(self.value(address).value(code))
    }

    /// The random draws of a site: the prelude's `Draws`. In a captured step ([`super::Graph`]) the step's number is the one
    /// of each launch.
    pub fn draws(self, stream: Stream4) -> Args<'a> {
        let RngKey { seed, step } = stream.of();
        let cell = self.gpu.captured_step(step);
        self.value([seed, stream.site(), step, cell])
    }

    fn check(&self, tensor: &Tensor) -> Result<()> {
        let (left, right) = (self.gpu.device(), tensor.device());
        if left == right { Ok(()) } else { Err(Error::Device { op: self.op, left, right }) }
    }

    /// Where the arguments lie, and how many bytes they are.
    pub(super) fn packed(&mut self) -> (*mut u64, usize) {
        (self.packed.as_mut_ptr(), self.bytes)
    }
}
