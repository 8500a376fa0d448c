//! How many floating-point operations a thread has had done: those of products, convolutions and attention, by their shapes.

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
/// let [a, b] = [[3, 5], [5, 7]].map(|shape| Tensor::ones(&shape, DType::F32, Device::CPU));
/// let before = flops();
/// matmul(&a?, &b?)?;
/// assert_eq!(flops() - before, 2.0 * 3.0 * 5.0 * 7.0);
/// # Ok::<(), phalanx_tensor::Error>(())
/// ```
pub fn flops() -> f64 {
    FLOPS.get()
}

/// A call of so many multiplications, each with an addition.
#[inline]
pub(crate) fn count<const N: usize>(factors: [usize; N]) {
    let product: f64 = factors.into_iter().map(|factor| factor as f64).product();
    FLOPS.set(FLOPS.get() + 2.0 * product);
}

#[cfg(test)]
mod tests {
    use phalanx_tensor::{DType, Device, Tensor};

    use super::flops;
    use crate::ops::{
        Attention, ConvOptions, conv_transpose2d, conv2d, conv2d_weight, full, scaled_dot_product_attention,
        scaled_dot_product_attention_backward,
    };

    fn ones(shape: &[usize]) -> Tensor {
        full(shape, 1.0, DType::F32, Device::Meta(0)).unwrap()
    }

    fn counted<T>(call: impl FnOnce() -> phalanx_tensor::Result<T>) -> (f64, T) {
        let before = flops();
        let made = call().unwrap();
        (flops() - before, made)
    }

    /// Of a convolution that pads, each point of the result is a product over the whole kernel.
    #[test]
    fn the_three_convolutions_of_a_layer_take_the_same() {
        let options = ConvOptions { padding: [1, 1], groups: 2, ..ConvOptions::default() };
        let (image, weight, grid) = (ones(&[3, 4, 6, 5]), ones(&[8, 2, 3, 3]), ones(&[3, 8, 6, 5]));
        let wanted = 2.0 * (3 * 8 * 6 * 5 * 2 * 3 * 3) as f64;
        assert_eq!(counted(|| conv2d(&image, &weight, None, &options, [6, 5])).0, wanted);
        assert_eq!(counted(|| conv_transpose2d(&grid, &weight, None, &options, [6, 5])).0, wanted);
        assert_eq!(counted(|| conv2d_weight(&image, &grid, &options, [3, 3])).0, wanted);
    }

    #[test]
    fn attention_counts_the_scores_that_are_seen() {
        for (queries, keys) in [(5, 5), (3, 7), (7, 3)] {
            for is_causal in [false, true] {
                let config = Attention { is_causal, ..Attention::default() };
                let (q, k, v) = (ones(&[2, 3, queries, 4]), ones(&[2, 3, keys, 4]), ones(&[2, 3, keys, 6]));
                let seen =
                    (0..queries).flat_map(|i| (0..keys).filter(move |&j| !is_causal || j <= i)).count();
                let each = 2.0 * 6.0 * seen as f64;
                let (count, (y, stats)) = counted(|| scaled_dot_product_attention(&q, &k, &v, None, &config));
                assert_eq!(count, each * (4 + 6) as f64, "{queries} x {keys}");
                let needs = [true, false, true, false];
                let backward = || {
                    scaled_dot_product_attention_backward(
                        [&q, &k, &v],
                        None,
                        [&y, &stats],
                        &y,
                        &config,
                        needs,
                    )
                };
                assert_eq!(counted(backward).0, each * (4 + 6 + 4 + 6) as f64, "{queries} x {keys}");
            }
        }
    }
}
