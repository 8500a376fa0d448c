//! Tensors from and to vectors and raw little-endian bytes.

use crate::{DType, Device, Error, Result, Tensor, Value};

/// Raw bytes and vectors.
impl Tensor {
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
}
