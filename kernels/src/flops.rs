//! [`flops`]: a counter for each thread of the floating-point operations of products, convolutions and attention, by their shapes. The profiler of
//! autograd reads it before and after an operation.

use std::cell::Cell;

thread_local! {
    static FLOPS: Cell<f64> = const { Cell::new(0.0) };
}

/// The floating-point operations of the products, convolutions and attention that this thread has called since it began, on any device,
/// a meta device too. A multiplication and its addition are two. What one call takes is the difference.
///
/// ```
/// use phalanx_kernels::{flops, matmul};
/// use phalanx_tensor::{DType, Device, Tensor};
/// let [a, b] = [[3, 5], [5, 7]].map(|shape| Tensor::zeros(&shape, DType::F32, Device::CPU));
/// let before = flops();
/// matmul(&a?, &b?)?;
/// assert_eq!(flops() - before, 2.0 * 3.0 * 5.0 * 7.0);
/// # Ok::<(), phalanx_tensor::Error>(())
/// ```
pub fn flops() -> f64 {
    FLOPS.get()
}

/// Counts a call whose multiplications, each with an addition, are the product of `factors`: `[m, n, k]` of a matrix product.
#[inline]
pub(crate) fn count_multiply_adds<const N: usize>(factors: [usize; N]) {
    let product: f64 = factors.into_iter().map(|factor| factor as f64).product();
    FLOPS.set(FLOPS.get() + 2.0 * product);
}
