//! [`Tensor`]: a storage seen through a layout. It stores and views; it never computes.

use std::sync::Arc;

use smallvec::SmallVec;

use crate::copy::copy_strided;
use crate::dim::{Dim, resolve_shape};
use crate::layout::checked_numel;
use crate::storage::{Handle, Read, Storage, Write};
use crate::{Category, DType, Device, Dims, Error, Layout, Result, Value};

/// An n-dimensional array: shared bytes, a layout, a dtype, a device. Cloning shares the bytes, and so do views;
/// writing through one is seen by all.
#[derive(Clone)]
pub struct Tensor {
    storage: Handle,
    /// A view's layout; without one the storage's own.
    view: Option<Arc<Layout>>,
    dtype: DType,
}

/// Making tensors.
impl Tensor {
    /// A tensor whose elements are whatever the memory held.
    ///
    /// # Errors
    /// If the size overflows, or the device cannot be used or has no memory left.
    pub fn empty(shape: &[usize], dtype: DType, device: Device) -> Result<Tensor> {
        Tensor::empty_for("empty", shape, dtype, device)
    }

    /// [`Tensor::empty`] for an operation, which errors name.
    ///
    /// # Errors
    /// As [`Tensor::empty`].
    pub fn empty_for(op: &'static str, shape: &[usize], dtype: DType, device: Device) -> Result<Tensor> {
        let size = |bytes: usize, &n: &usize| bytes.checked_mul(n).filter(|&b| b <= isize::MAX as usize);
        let bytes = shape.iter().filter(|&&n| n > 0).try_fold(dtype.size(), size);
        let bytes = bytes.ok_or_else(|| {
            Error::shape(op, format!("a result of shape {shape:?}"), "a size below 2^63 bytes")
        })?;
        let bytes = if shape.contains(&0) { 0 } else { bytes };
        Ok(Tensor { storage: Storage::allocate(op, shape, bytes, device)?, view: None, dtype })
    }

    /// All zeros.
    ///
    /// # Errors
    /// As [`Tensor::empty`].
    pub fn zeros(shape: &[usize], dtype: DType, device: Device) -> Result<Tensor> {
        Tensor::zeros_for("zeros", shape, dtype, device)
    }

    /// [`Tensor::zeros`] for an operation, which errors name.
    ///
    /// # Errors
    /// As [`Tensor::empty`].
    pub fn zeros_for(op: &'static str, shape: &[usize], dtype: DType, device: Device) -> Result<Tensor> {
        let mut out = Tensor::empty_for(op, shape, dtype, device)?;
        match device {
            Device::Cpu(_) => out.write_bytes(op)?.fill(0),
            Device::Cuda(_) => crate::cuda::zero(op, &mut out)?,
            Device::Meta(_) => (),
        }
        Ok(out)
    }

    /// A tensor whose elements are elsewhere, such as on other ranks: it has a shape, a dtype and a device, and takes no memory.
    /// Whatever reads or writes elements of it or of a view of it is an error that says `why`.
    ///
    /// ```
    /// use phalanx_tensor::{DType, Device, Tensor};
    /// let x = Tensor::withheld(&[2, 3], DType::F32, Device::CPU, "its values are on rank 1")?;
    /// assert_eq!((x.shape(), x.why_withheld()), (&[2, 3][..], Some("its values are on rank 1")));
    /// assert!(x.to_vec::<f32>().unwrap_err().to_string().contains("on rank 1"));
    /// # Ok::<(), phalanx_tensor::Error>(())
    /// ```
    ///
    /// # Errors
    /// If the device cannot be used.
    pub fn withheld(shape: &[usize], dtype: DType, device: Device, why: &'static str) -> Result<Tensor> {
        let whole = Tensor { storage: Storage::withhold(device, why)?, view: None, dtype };
        Ok(whole.view(Layout::contiguous(shape)))
    }

    /// Why its elements are not here, if it is [withheld](Tensor::withheld).
    pub fn why_withheld(&self) -> Option<&'static str> {
        self.storage.why_withheld()
    }

    /// The values in row-major order. On a `meta` device they are dropped.
    ///
    /// # Errors
    /// If their number is not the shape's; else as [`Tensor::empty`].
    pub fn from_slice<T: Value>(values: &[T], shape: &[usize], device: Device) -> Result<Tensor> {
        if device.is_cuda() {
            return Tensor::from_slice(values, shape, device.host())?.to_device(device, true);
        }
        if checked_numel(shape) != Some(values.len()) {
            let got = format!("{} values for shape {shape:?}", values.len());
            let wanted =
                checked_numel(shape).map_or("a size below 2^63 bytes".into(), |n| format!("{n} values"));
            return Err(Error::shape("from_slice", got, wanted));
        }
        let mut out = Tensor::empty_for("from_slice", shape, T::DTYPE, device)?;
        if !device.is_meta() {
            let mut to = out.write_raw::<T::Stored>("from_slice")?;
            for (to, &from) in to.iter_mut().zip(values) {
                *to = from.store();
            }
        }
        Ok(out)
    }

    /// A tensor without dimensions.
    ///
    /// # Errors
    /// As [`Tensor::empty`].
    pub fn scalar<T: Value>(value: T, device: Device) -> Result<Tensor> {
        Tensor::from_slice(&[value], &[], device)
    }

    /// A new tensor of the same shape, dtype and device, contiguous, contents unspecified.
    ///
    /// # Errors
    /// As [`Tensor::empty`].
    #[inline]
    pub fn empty_like(&self) -> Result<Tensor> {
        self.empty_like_for("empty")
    }

    /// [`Tensor::empty_like`] for an operation, which errors name.
    ///
    /// # Errors
    /// As [`Tensor::empty`].
    #[inline]
    pub fn empty_like_for(&self, op: &'static str) -> Result<Tensor> {
        match self.view {
            None => Ok(Tensor { storage: self.storage.like(op)?, view: None, dtype: self.dtype }),
            Some(_) => Tensor::empty_for(op, self.shape(), self.dtype, self.device()),
        }
    }

    /// Zeros of the same shape, dtype and device.
    ///
    /// # Errors
    /// As [`Tensor::empty`].
    pub fn zeros_like(&self) -> Result<Tensor> {
        Tensor::zeros(self.shape(), self.dtype, self.device())
    }
}

/// What it is.
impl Tensor {
    /// Sizes, outermost first.
    #[inline]
    pub fn shape(&self) -> &[usize] {
        self.layout().shape()
    }

    /// Whether the other has the same sizes: quicker than to compare the slices.
    #[inline]
    pub fn same_shape(&self, other: &Tensor) -> bool {
        self.layout().same_shape(other.layout())
    }

    /// Elements between neighbours along each dimension.
    #[inline]
    pub fn strides(&self) -> &[usize] {
        self.layout().strides()
    }

    /// Position of the first element in the storage.
    #[inline]
    pub fn offset(&self) -> usize {
        self.layout().offset()
    }

    /// Where the elements lie.
    #[inline]
    pub fn layout(&self) -> &Layout {
        self.view.as_deref().unwrap_or_else(|| self.storage.layout())
    }

    /// Number of dimensions.
    #[inline]
    pub fn rank(&self) -> usize {
        self.layout().rank()
    }

    /// Number of elements.
    #[inline]
    pub fn numel(&self) -> usize {
        self.layout().numel()
    }

    /// Size of dimension `dim`.
    ///
    /// # Errors
    /// If there is no such dimension.
    pub fn size(&self, dim: impl Dim) -> Result<usize> {
        Ok(self.shape()[dim.resolve(self.rank(), "size")?])
    }

    /// The elements' type.
    #[inline]
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Where it lives.
    #[inline]
    pub fn device(&self) -> Device {
        self.storage.device()
    }

    /// Whether the other is of the same dtype and on the same device: quicker than to compare both.
    #[inline]
    pub fn is_like(&self, other: &Tensor) -> bool {
        self.dtype == other.dtype && self.storage.is_beside(&other.storage)
    }

    /// Whether the elements lie in row-major order without gaps.
    #[inline]
    pub fn is_contiguous(&self) -> bool {
        self.layout().is_contiguous()
    }

    /// The bytes that it shares with its views.
    #[inline]
    pub fn storage(&self) -> &Storage {
        &self.storage
    }

    /// Whether both see the same storage.
    pub fn shares_storage(&self, other: &Tensor) -> bool {
        std::ptr::eq(self.storage(), other.storage())
    }

    /// Whether nothing else refers to the storage, and the tensor covers all of it.
    #[inline]
    pub fn is_sole_owner(&self) -> bool {
        self.storage.is_sole() && self.numel() * self.dtype.size() == self.storage.bytes()
    }

    /// How often the storage was written.
    #[inline]
    pub fn version(&self) -> u64 {
        self.storage.version()
    }

    /// Counts the storage as `category` from now on, and returns the tensor.
    pub fn tagged(self, category: Category) -> Tensor {
        self.storage.set_category(category);
        self
    }
}

/// Views: other layouts of the same bytes.
impl Tensor {
    fn view(&self, layout: Layout) -> Tensor {
        Tensor { storage: self.storage.clone(), view: Some(Arc::new(layout)), dtype: self.dtype }
    }

    /// Elements `start .. start + length` along `dim`.
    ///
    /// # Errors
    /// If the range is not inside the dimension.
    pub fn narrow(&self, dim: impl Dim, start: usize, length: usize) -> Result<Tensor> {
        let dim = dim.resolve(self.rank(), "narrow")?;
        let size = self.shape()[dim];
        if start.checked_add(length).is_none_or(|end| end > size) {
            let got = format!("{length} elements from {start}");
            return Err(Error::range(
                "narrow",
                got,
                format!("a range inside dimension {dim} of size {size}"),
            ));
        }
        Ok(self.view(self.layout().narrow(dim, start, length)))
    }

    /// Every `step`-th element from `start` up to `end` along `dim`. As in Python, what lies beyond the dimension is left
    /// out, and a range that ends before it starts is empty.
    ///
    /// # Errors
    /// If there is no such dimension or `step` is 0.
    pub fn slice(&self, dim: impl Dim, start: usize, end: usize, step: usize) -> Result<Tensor> {
        let dim = dim.resolve(self.rank(), "slice")?;
        if step == 0 {
            return Err(Error::range(
                "slice",
                format!("{start}..{end} by a step of 0"),
                "a step of at least 1",
            ));
        }
        let end = end.min(self.shape()[dim]);
        let start = start.min(end);
        let cut = self.narrow(dim, start, end - start)?;
        Ok(cut.view(cut.layout().step(dim, step)))
    }

    /// The sub-tensor at `index` along `dim`, which goes away.
    ///
    /// # Errors
    /// If there is no such index.
    pub fn select(&self, dim: impl Dim, index: usize) -> Result<Tensor> {
        let dim = dim.resolve(self.rank(), "select")?;
        let size = self.shape()[dim];
        if index >= size {
            let wanted = format!("an index below {size}, the size of dimension {dim}");
            return Err(Error::range("select", index, wanted));
        }
        Ok(self.view(self.layout().narrow(dim, index, 1).squeeze(dim)))
    }

    /// Two dimensions exchanged.
    ///
    /// # Errors
    /// If there is no such dimension.
    pub fn transpose(&self, a: impl Dim, b: impl Dim) -> Result<Tensor> {
        let (a, b) = (a.resolve(self.rank(), "transpose")?, b.resolve(self.rank(), "transpose")?);
        let mut dims: Dims = (0..self.rank()).collect();
        dims.swap(a, b);
        Ok(self.view(self.layout().permute(&dims)))
    }

    /// Dimension `i` of the result is dimension `dims[i]` of this.
    ///
    /// # Errors
    /// If `dims` is not a permutation of the dimensions.
    pub fn permute(&self, dims: &[usize]) -> Result<Tensor> {
        let mut seen: SmallVec<[bool; 8]> = SmallVec::from_elem(false, self.rank());
        let fresh = |&d: &usize| seen.get_mut(d).is_some_and(|s| !std::mem::replace(s, true));
        if dims.len() != self.rank() || !dims.iter().all(fresh) {
            let wanted =
                format!("a permutation of the {} dimensions of shape {:?}", self.rank(), self.shape());
            return Err(Error::invalid("permute", format!("got {dims:?}, wanted {wanted}")));
        }
        Ok(self.view(self.layout().permute(dims)))
    }

    /// Dimensions of size 1 repeated, and dimensions added in front, by strides of 0.
    ///
    /// # Errors
    /// If the shape does not broadcast to `shape`.
    pub fn broadcast_to(&self, shape: &[usize]) -> Result<Tensor> {
        self.broadcast_for("broadcast_to", shape)
    }

    /// [`Tensor::broadcast_to`] for an operation, which errors name.
    ///
    /// # Errors
    /// If the shape does not broadcast to `shape`.
    pub fn broadcast_for(&self, op: &'static str, shape: &[usize]) -> Result<Tensor> {
        let layout = self.layout().broadcast(shape).ok_or_else(|| {
            let got = format!("a tensor of shape {:?}", self.shape());
            Error::shape(op, got, format!("a shape that broadcasts to {shape:?}"))
        })?;
        Ok(self.view(layout))
    }

    /// A dimension of size 1 put in before `dim` (up to the rank, which puts it last).
    ///
    /// # Errors
    /// If there is no such place.
    pub fn unsqueeze(&self, dim: impl Dim) -> Result<Tensor> {
        let dim = dim.resolve(self.rank() + 1, "unsqueeze")?;
        Ok(self.view(self.layout().unsqueeze(dim)))
    }

    /// Dimension `dim` taken out if its size is 1, else no change.
    ///
    /// # Errors
    /// If there is no such dimension.
    pub fn squeeze(&self, dim: impl Dim) -> Result<Tensor> {
        let dim = dim.resolve(self.rank(), "squeeze")?;
        Ok(if self.shape()[dim] == 1 { self.view(self.layout().squeeze(dim)) } else { self.clone() })
    }

    /// The same elements in row-major order in another shape: a view where strides can express it, else a copy.
    /// One size may be -1 and is then inferred.
    ///
    /// # Errors
    /// If the number of elements differs.
    pub fn reshape(&self, shape: &[isize]) -> Result<Tensor> {
        let shape = resolve_shape("reshape", self.shape(), shape)?;
        self.with_shape(&shape)
    }

    /// [`Tensor::reshape`] to a shape without -1.
    ///
    /// # Errors
    /// If the number of elements differs.
    pub fn with_shape(&self, shape: &[usize]) -> Result<Tensor> {
        if checked_numel(shape) != Some(self.numel()) {
            let got = format!("{:?} with {} elements", self.shape(), self.numel());
            return Err(Error::shape("reshape", got, format!("as many elements as {shape:?} has")));
        }
        match self.layout().reshape(shape) {
            Some(layout) => Ok(self.view(layout)),
            None => self.copy_for("reshape", self.device())?.with_shape(shape),
        }
    }

    /// Any layout inside the storage, offset included.
    ///
    /// # Errors
    /// If it reaches beyond the storage.
    pub fn as_strided(&self, shape: &[usize], strides: &[usize], offset: usize) -> Result<Tensor> {
        let held = self.storage.bytes() / self.dtype.size();
        let reach = shape
            .iter()
            .zip(strides)
            .try_fold(0usize, |sum, (&n, &s)| sum.checked_add(n.saturating_sub(1).checked_mul(s)?));
        // Without elements nothing is reached, whatever the strides.
        let end = match shape.contains(&0) {
            true => Some(offset),
            false => reach.and_then(|r| r.checked_add(offset)?.checked_add(1)),
        };
        let numel = checked_numel(shape);
        if shape.len() != strides.len() || numel.is_none() || end.is_none_or(|end| end > held) {
            let got = format!("shape {shape:?}, strides {strides:?}, offset {offset}");
            return Err(Error::range("as_strided", got, format!("a layout inside {held} elements")));
        }
        Ok(self.view(Layout::strided(Dims::from_slice(shape), Dims::from_slice(strides), offset)))
    }

    /// `shape` elements of a flat buffer from `offset` on (in elements): how buckets and shards hold tensors.
    ///
    /// # Errors
    /// If this is not contiguous or too short.
    pub fn view_into(&self, offset: usize, shape: &[usize]) -> Result<Tensor> {
        if !self.is_contiguous() {
            let got = format!("strides {:?}", self.strides());
            return Err(Error::shape("view_into", got, "a contiguous buffer"));
        }
        let flat = self.with_shape(&[self.numel()])?;
        let numel = checked_numel(shape)
            .ok_or_else(|| Error::shape("view_into", format!("{shape:?}"), "a size that fits in memory"))?;
        flat.narrow(0, offset, numel)?.with_shape(shape)
    }
}

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
    fn copy_for(&self, op: &'static str, device: Device) -> Result<Tensor> {
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
    /// a GPU and the host, the caller waits for what leaves the GPU, not for what goes there.
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
            Some(order) => crate::copy::copy_over(op, &mut self.permute(&order)?, &from.permute(&order)?),
            None => crate::copy::copy_over(op, self, from),
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

    /// The whole storage as elements of `T`, to read; [`Tensor::layout`] says which belong to this tensor.
    ///
    /// # Errors
    /// If `T` is not the dtype's (bools are read as `u8`), the device has no elements, or a writer does not finish.
    #[inline]
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

    /// Keeps others from writing while a GPU is given work that reads.
    pub(crate) fn lock_read(&self, op: &'static str) -> Result<Read<'_, u8>> {
        self.storage.read(op)
    }

    /// Keeps others away while a GPU is given work that writes.
    pub(crate) fn lock_write(&mut self, op: &'static str) -> Result<Write<'_, u8>> {
        self.storage.write(op)
    }

    #[inline]
    fn write_raw<T: bytemuck::Pod>(&mut self, op: &'static str) -> Result<Write<'_, T>> {
        self.refuse_without_elements(op)?;
        self.storage.write(op)
    }

    #[inline]
    fn read_raw<T: bytemuck::Pod>(&self, op: &'static str) -> Result<Read<'_, T>> {
        self.refuse_without_elements(op)?;
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
