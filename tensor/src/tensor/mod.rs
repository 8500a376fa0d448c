//! [`Tensor`]: a storage seen through a layout. It stores and views; it never computes.
//!
//! ```text
//! mod       making tensors, and their properties       index     `tensor.i((.., 1..3))`, dimensions counted from the end
//! views     other layouts of the same storage          display   tensors as text
//! elements  copies, values, guards, raw bytes
//! ```

mod display;
mod elements;
mod index;
mod views;

use std::sync::Arc;

use crate::layout::checked_numel;
use crate::storage::{Handle, Storage};
use crate::{Category, DType, Device, Error, Layout, Result, Value};

pub use index::{Dim, Index, Pick, resolve_dims, resolve_shape};

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
        Ok(Tensor { storage: Storage::allocate(op, shape, bytes, device)?, view: None, dtype }.tell_made())
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
    /// Reading or writing it, or a view of it, is an error whose message says `why`.
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

    /// [`Tensor::from_slice`] of a vector.
    ///
    /// # Errors
    /// If the number of values is not the shape's; else as [`Tensor::empty`].
    pub fn from_vec<T: Value>(values: Vec<T>, shape: &[usize], device: Device) -> Result<Tensor> {
        Tensor::from_slice(&values, shape, device)
    }

    /// A tensor of little-endian elements in row-major order. Any bytes are elements; of a bool, every byte but 0
    /// is true. On a `meta` device the bytes are dropped.
    ///
    /// # Errors
    /// If their number is not the shape's; else as [`Tensor::empty`].
    pub fn from_bytes(bytes: &[u8], shape: &[usize], dtype: DType, device: Device) -> Result<Tensor> {
        let wrong = |wanted: usize| {
            let got = format!("{} bytes for shape {shape:?} of {dtype}", bytes.len());
            Error::shape("from_bytes", got, format!("{wanted} bytes"))
        };
        let sizes = || shape.iter().filter(|&&n| n > 0);
        let wanted = sizes().try_fold(dtype.size(), |product, &n| product.checked_mul(n));
        let wanted = if shape.contains(&0) { 0 } else { wanted.unwrap_or(usize::MAX) };
        // Before the allocation, so that a shape out of a damaged file asks for no memory.
        if bytes.len() != wanted {
            return Err(wrong(wanted));
        }
        if device.is_cuda() {
            return Tensor::from_bytes(bytes, shape, dtype, device.host())?.to_device(device, true);
        }
        let mut out = Tensor::empty(shape, dtype, device)?;
        if !device.is_meta() {
            let mut to = out.write_bytes("from_bytes")?;
            match dtype {
                DType::Bool => to.iter_mut().zip(bytes).for_each(|(to, &from)| *to = u8::from(from != 0)),
                _ => to.copy_from_slice(bytes),
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
            None => Ok(Tensor { storage: self.storage.like(op)?, view: None, dtype: self.dtype }.tell_made()),
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
        self.dtype == other.dtype && self.storage.is_on_device_of(&other.storage)
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
