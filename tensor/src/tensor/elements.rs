//! A tensor's elements: copies, values, guards on the storage, raw little-endian bytes.

use super::Tensor;
use crate::copy::{copy_over, copy_strided};
use crate::storage::guard::Hold;
use crate::{DType, Device, Error, GuardAccess, Read, Result, Value, Write};

/// Elements in and out.
impl Tensor {
    /// This, if contiguous, else a contiguous copy.
    ///
    /// # Errors
    /// If the copy cannot be allocated.
    pub fn contiguous(&self) -> Result<Tensor> {
        if self.is_contiguous() { Ok(self.clone()) } else { self.copy_for("contiguous", self.device()) }
    }

    /// A contiguous copy with a storage of its own.
    ///
    /// # Errors
    /// If it cannot be allocated.
    pub fn copy(&self) -> Result<Tensor> {
        self.copy_for("copy", self.device())
    }

    /// A contiguous copy on `device`; with `always` unset, this itself if it is there already.
    ///
    /// # Errors
    /// If the copy cannot be allocated, or elements are wanted of a `meta` tensor.
    pub fn to_device(&self, device: Device, always: bool) -> Result<Tensor> {
        if device == self.device() && !always {
            return Ok(self.clone());
        }
        self.copy_for("to_device", device)
    }

    /// A contiguous copy on `device`, for an operation that errors name.
    pub(super) fn copy_for(&self, op: &'static str, device: Device) -> Result<Tensor> {
        let mut out = Tensor::empty_for(op, self.shape(), self.dtype, device)?;
        if !device.is_meta() && self.numel() > 0 {
            match device.is_cuda() || self.device().is_cuda() {
                true => crate::cuda::copy_strided(op, &mut out, self)?,
                false => copy_strided(op, &mut out, self)?,
            }
        }
        Ok(out)
    }

    /// Overwrites all elements by those of a tensor of the same shape and dtype on any device. This one is contiguous; between
    /// a GPU and the host, the caller waits for a copy from the GPU, not for one to it.
    ///
    /// # Errors
    /// If they differ in shape or dtype, this is not contiguous, elements are wanted of a `meta` tensor, or others use this
    /// one's storage.
    pub fn copy_from(&mut self, from: &Tensor) -> Result<()> {
        const OP: &str = "copy_from";
        if from.shape() != self.shape() {
            return Err(Error::shape(OP, format!("{:?}", from.shape()), format!("{:?}", self.shape())));
        }
        if from.dtype != self.dtype {
            return Err(Error::dtype(OP, from.dtype, self.dtype.name()));
        }
        if !self.is_contiguous() {
            let why = format!("got strides {:?} to write to, wanted a contiguous tensor", self.strides());
            return Err(Error::invalid(OP, why));
        }
        match (self.device().is_meta(), self.device().is_cuda() || from.device().is_cuda()) {
            (true, _) => self.bump_version(),
            _ if self.numel() == 0 => {}
            _ if self.shares_storage(from) => return self.copy_from(&from.copy()?),
            (false, true) => crate::cuda::copy_strided(OP, self, from)?,
            (false, false) => copy_strided(OP, self, from)?,
        }
        Ok(())
    }

    /// [`Tensor::copy_from`] into a view that may lie in any order, as long as it does not overlap itself, between CPU tensors of one
    /// device and of two storages; for kernels.
    ///
    /// # Errors
    /// If they differ in shape or dtype, the view overlaps itself, or others use this one's storage.
    pub fn copy_over(&mut self, op: &'static str, from: &Tensor) -> Result<()> {
        if from.shape() != self.shape() {
            return Err(Error::shape(op, format!("{:?}", from.shape()), format!("{:?}", self.shape())));
        }
        if from.dtype != self.dtype {
            return Err(Error::dtype(op, from.dtype, self.dtype.name()));
        }
        if self.layout().overlaps_itself() {
            return Err(Error::invalid(op, "got a view to write to that overlaps itself"));
        }
        match self.layout().memory_order() {
            Some(order) => copy_over(op, &mut self.permute(&order)?, &from.permute(&order)?),
            None => copy_over(op, self, from),
        }
    }

    /// All elements in row-major order.
    ///
    /// # Errors
    /// If the dtype is not `T`'s, or the device has no elements.
    pub fn to_vec<T: Value>(&self) -> Result<Vec<T>> {
        self.values("to_vec")
    }

    fn values<T: Value>(&self, op: &'static str) -> Result<Vec<T>> {
        if self.dtype != T::DTYPE {
            return Err(Error::dtype(op, self.dtype, format!("{0}, as {0} is what is read", T::DTYPE)));
        }
        self.refuse_meta(op)?;
        let dense = self.on_host()?.contiguous()?;
        let elements = dense.read_raw::<T::Stored>(op)?;
        Ok(elements[dense.offset()..][..dense.numel()].iter().map(|&x| T::load(x)).collect())
    }

    /// The only element.
    ///
    /// # Errors
    /// If there is not exactly one, the dtype is not `T`'s, or the device has no elements.
    pub fn item<T: Value>(&self) -> Result<T> {
        if self.numel() != 1 {
            return Err(Error::shape("item", format!("{:?}", self.shape()), "a tensor of one element"));
        }
        Ok(self.values("item")?[0])
    }

    /// All elements in row-major order, little-endian; a bool is a byte of 0 or 1.
    ///
    /// # Errors
    /// If the device has no elements.
    pub fn to_bytes(&self) -> Result<Vec<u8>> {
        self.with_bytes("to_bytes", <[u8]>::to_vec)
    }

    /// Calls `f` with what [`Tensor::to_bytes`] returns, without a copy where this is contiguous.
    pub(crate) fn with_bytes<R>(&self, op: &'static str, f: impl FnOnce(&[u8]) -> R) -> Result<R> {
        let dense = self.on_host()?.contiguous()?;
        let size = self.dtype().size();
        let bytes = dense.read_bytes(op)?;
        let bytes = &bytes[dense.offset() * size..][..dense.numel() * size];
        if self.dtype() == DType::Bool && bytes.iter().any(|&b| b > 1) {
            let normal: Vec<u8> = bytes.iter().map(|&b| u8::from(b != 0)).collect();
            return Ok(f(&normal));
        }
        Ok(f(bytes))
    }

    /// The whole storage as elements of `T`, to read; [`Tensor::layout`] says which belong to this tensor.
    ///
    /// # Errors
    /// If `T` is not the dtype's (bools are read as `u8`), the device has no elements, or a writer does not finish.
    #[inline(always)] // as a call it takes a tenth of a tiny operation's time
    pub fn read<T: crate::Element>(&self, op: &'static str) -> Result<Read<'_, T>> {
        self.check_element::<T>(op)?;
        self.read_raw(op)
    }

    /// The whole storage as elements of `T`, to write; [`Tensor::layout`] says which belong to this tensor. Counts
    /// as a write: the version goes up.
    ///
    /// # Errors
    /// If `T` is not the dtype's (bools are written as `u8`), the device has no elements, or others use the storage.
    #[inline]
    pub fn write<T: crate::Element>(&mut self, op: &'static str) -> Result<Write<'_, T>> {
        self.check_element::<T>(op)?;
        self.write_raw(op)
    }

    /// Counts a write on a device without bytes, where there is nothing to write.
    pub fn bump_version(&mut self) {
        self.storage.bump_version();
    }

    /// The whole storage as bytes, to read.
    ///
    /// # Errors
    /// If the device has no elements, or a writer does not finish.
    pub fn read_bytes(&self, op: &'static str) -> Result<Read<'_, u8>> {
        self.read_raw(op)
    }

    /// The whole storage as bytes, to write.
    ///
    /// # Errors
    /// If the device has no elements, or others use the storage.
    pub fn write_bytes(&mut self, op: &'static str) -> Result<Write<'_, u8>> {
        self.write_raw(op)
    }

    /// This, or a copy where the host can read it. A GPU's work is waited for.
    pub(crate) fn on_host(&self) -> Result<Tensor> {
        if self.device().is_cuda() { self.to_device(self.device().host(), false) } else { Ok(self.clone()) }
    }

    /// Where its first element is on a GPU.
    pub(crate) fn device_address(&self) -> u64 {
        self.storage.device_address() + (self.offset() * self.dtype.size()) as u64
    }

    /// A read guard, held while a GPU is given work that reads.
    pub(crate) fn lock_read(&self, op: &'static str) -> Result<Read<'_, u8>> {
        self.tell_guard(GuardAccess::Read, op)?;
        self.storage.read(op)
    }

    /// Keeps the elements as they are until the result is dropped.
    pub(crate) fn hold(&self, op: &'static str) -> Result<Hold> {
        self.tell_guard(GuardAccess::Read, op)?;
        self.storage.hold(op)
    }

    /// A write guard, held while a GPU is given work that writes.
    pub(crate) fn lock_write(&mut self, op: &'static str) -> Result<Write<'_, u8>> {
        self.tell_guard(GuardAccess::Write, op)?;
        self.storage.write(op)
    }

    #[inline]
    pub(super) fn write_raw<T: bytemuck::Pod>(&mut self, op: &'static str) -> Result<Write<'_, T>> {
        self.refuse_without_elements(op)?;
        self.tell_guard(GuardAccess::Write, op)?;
        self.storage.write(op)
    }

    #[inline(always)]
    fn read_raw<T: bytemuck::Pod>(&self, op: &'static str) -> Result<Read<'_, T>> {
        self.refuse_without_elements(op)?;
        self.tell_guard(GuardAccess::Read, op)?;
        self.storage.read(op)
    }

    fn refuse_meta(&self, op: &'static str) -> Result<()> {
        if self.device().is_meta() { self.refuse_without_elements(op) } else { Ok(()) }
    }

    #[inline]
    fn refuse_without_elements(&self, op: &'static str) -> Result<()> {
        #[cold]
        fn refuse(op: &'static str, device: Device) -> Error {
            let why = match device.is_meta() {
                true => "a meta tensor has no elements to read",
                false => "its elements are the GPU's; copy it with `to_device`",
            };
            Error::Unsupported { op, device, why: why.into() }
        }
        if let Device::Cpu(_) = self.device() { Ok(()) } else { Err(refuse(op, self.device())) }
    }

    #[inline]
    fn check_element<T: crate::Element>(&self, op: &'static str) -> Result<()> {
        #[cold]
        fn refuse(op: &'static str, got: DType, wanted: DType) -> Error {
            Error::dtype(op, got, wanted.name())
        }
        let (wanted, stored) = (<T as crate::Element>::DTYPE, self.dtype);
        let fits = stored == wanted || (stored == DType::Bool && wanted == DType::U8);
        if fits { Ok(()) } else { Err(refuse(op, stored, wanted)) }
    }
}

/// Values on their way.
impl Tensor {
    /// Marks the storage, and lets `start` begin to bring values into it. What `start` returns waits until they are here, or says why they
    /// do not come: the first thread that takes a guard on the storage calls it, and others wait meanwhile. If the values do not come,
    /// every guard is refused with [`Error::NotArrived`] from then on. The version goes up once, at the start. `start` is
    /// [`delivering`](crate::delivering); other threads that bring the values say so.
    ///
    /// On a GPU the waiting makes this thread's later work come after the values. It is done in the device's own stream, and a lane that the
    /// reader has entered comes after that.
    ///
    /// ```
    /// use phalanx_tensor::{DType, Device, Tensor, delivering};
    /// let x = Tensor::zeros(&[1], DType::F32, Device::CPU)?;
    /// let mut target = x.clone();
    /// x.arriving(|| {
    ///     let bringing = std::thread::spawn(move || {
    ///         let _delivering = delivering();
    ///         target.copy_from(&Tensor::from_slice(&[5f32], &[1], Device::CPU)?)
    ///     });
    ///     move || bringing.join().unwrap().map_err(|error| error.to_string())
    /// })?;
    /// assert_eq!(x.item::<f32>()?, 5.0);
    /// # Ok::<(), phalanx_tensor::Error>(())
    /// ```
    ///
    /// # Errors
    /// If values that were on their way before do not come.
    pub fn arriving<W>(&self, start: impl FnOnce() -> W) -> Result<()>
    where
        W: FnOnce() -> std::result::Result<(), String> + Send + 'static,
    {
        self.storage.begin_arrival(start)
    }

    /// Waits for values that are on their way into the storage, if there are any that this thread does not bring, for the operation
    /// `op`.
    ///
    /// # Errors
    /// If they do not come.
    pub fn arrived(&self, op: &'static str) -> Result<()> {
        self.storage.await_arrival(op)
    }

    /// Whether values that were on their way did not come, so that it has none.
    pub fn has_not_arrived(&self) -> bool {
        self.storage.arrival_has_failed()
    }
}
