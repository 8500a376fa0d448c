//! [`ReduceView`]: a tensor seen as `[outer, n, inner]`, to be reduced over `n`. Reduced dimensions that do not lie together are permuted so.

use phalanx_tensor::{Dim, Dims, Result, Tensor, resolve_dims};

/// Fewer columns than this do not fill vectors: such a tensor is read with the reduced dimension innermost.
const COLUMNS_MIN: usize = 8;

/// The input and the shapes of one reduction.
pub(crate) struct ReduceView {
    /// The input, dimensions permuted so that its elements come in the order of `[outer, n, inner]`.
    pub(crate) input: Tensor,
    /// Outputs along the dimensions before the reduced ones.
    pub(crate) outer: usize,
    /// Elements of an output.
    pub(crate) n: usize,
    /// Outputs along the dimensions after the reduced ones: 1, or at least [`COLUMNS_MIN`].
    pub(crate) inner: usize,
    /// The result's shape.
    pub(crate) shape: Dims,
    /// The dimensions of `input` that are reduced.
    pub(crate) reduced: Dims,
}

impl ReduceView {
    /// A reduction of `x` over `dims`, which stay with size 1 if `keepdim`.
    ///
    /// # Errors
    /// If a dimension does not exist or is named twice.
    pub(crate) fn new<D: Dim>(op: &'static str, x: &Tensor, dims: &[D], keepdim: bool) -> Result<ReduceView> {
        // A scalar may be reduced over its only dimension, as it were.
        let mut dims = resolve_dims(op, dims, x.rank().max(1))?;
        dims.retain(|d| *d < x.rank());
        ReduceView::of(x, &dims, keepdim)
    }

    fn of(x: &Tensor, dims: &[usize], keepdim: bool) -> Result<ReduceView> {
        let size = |d: usize| x.shape()[d];
        let kept: Dims = (0..x.rank()).filter(|d| !dims.contains(d)).collect();
        let reduced: Dims = (0..x.rank()).filter(|d| dims.contains(d)).collect();
        let shape = match keepdim {
            true => (0..x.rank()).map(|d| if dims.contains(&d) { 1 } else { size(d) }).collect(),
            false => kept.iter().map(|&d| size(d)).collect(),
        };
        let n = reduced.iter().map(|&d| size(d)).product();
        // Kept dimensions, the reduced ones, kept ones: what lies between the first and the last reduced one
        // (dimensions of size 1 aside) must be reduced.
        let wide: Dims = reduced.iter().copied().filter(|&d| size(d) != 1).collect();
        let (first, last) =
            (wide.first().copied().unwrap_or(x.rank()), wide.last().copied().unwrap_or(x.rank()));
        let product = |from: usize, to: usize| (from..to).map(size).product::<usize>();
        let inner = product((last + 1).min(x.rank()), x.rank());
        let together = kept.iter().all(|&d| d < first || d > last || size(d) == 1);
        if together && (inner == 1 || inner >= COLUMNS_MIN) {
            return Ok(ReduceView { input: x.clone(), outer: product(0, first), n, inner, shape, reduced });
        }
        let order: Dims = kept.iter().chain(&reduced).copied().collect();
        let (outer, reduced) = (kept.iter().map(|&d| size(d)).product(), (kept.len()..x.rank()).collect());
        Ok(ReduceView { input: x.permute(&order)?, outer, n, inner: 1, shape, reduced })
    }

    /// The same reduction, each output's elements in the order in which they lie: for a result that does not depend on it.
    pub(crate) fn in_any_order(&self) -> Result<ReduceView> {
        let (sizes, strides) = (self.input.shape(), self.input.strides());
        let wide = |d: &usize| sizes[*d] != 1;
        let ones = (0..sizes.len()).filter(|d| !wide(d));
        let kept: Dims = (0..sizes.len()).filter(|d| wide(d) && !self.reduced.contains(d)).collect();
        let mut reduced: Dims = self.reduced.iter().copied().filter(wide).collect();
        reduced.sort_by_key(|&d| std::cmp::Reverse(strides[d]));
        let most = reduced.first().map_or(0, |&d| strides[d]);
        let least = reduced.last().map_or(0, |&d| strides[d]);
        let product = |dims: &[usize]| dims.iter().map(|&d| sizes[d]).product::<usize>();
        // Kept dimensions that lie beyond the reduced ones, and those that lie within.
        let (beyond, within) = kept.split_at(kept.iter().take_while(|&&d| strides[d] >= most).count());
        let columns = within.last().is_some_and(|&d| strides[d] < least) && product(within) >= COLUMNS_MIN;
        let within = if columns { within } else { &[] };
        let beyond = if columns { beyond } else { &kept[..] };
        let order: Dims = ones.chain(beyond.iter().chain(&reduced).chain(within).copied()).collect();
        let first = sizes.len() - within.len() - reduced.len();
        Ok(ReduceView {
            input: self.input.permute(&order)?,
            outer: product(beyond),
            n: self.n,
            inner: product(within),
            shape: self.shape.clone(),
            reduced: (first..first + reduced.len()).collect(),
        })
    }

    /// The number of results.
    pub(crate) fn outputs(&self) -> usize {
        self.outer * self.inner
    }

    /// The result, yet to be computed, and whether there is anything to compute here.
    pub(crate) fn output(&self, op: &'static str, dtype: phalanx_tensor::DType) -> Result<(Tensor, bool)> {
        let out = Tensor::empty_for(op, &self.shape, dtype, self.input.device())?;
        let computes = !out.device().is_meta() && out.numel() > 0;
        Ok((out, computes))
    }
}

#[cfg(test)]
mod tests {
    use phalanx_tensor::{DType, Device, Tensor};

    use super::ReduceView;

    #[test]
    fn what_may_come_in_any_order_is_read_as_it_lies() {
        let viewed = |shape: &[usize], order: &[usize], dims: &[usize]| {
            let x = Tensor::empty(shape, DType::F32, Device::Meta(0)).unwrap().permute(order).unwrap();
            let f = ReduceView::new("sum", &x, dims, false).unwrap().in_any_order().unwrap();
            (f.outer, f.n, f.inner, f.input.is_contiguous())
        };
        assert_eq!(viewed(&[40, 50], &[1, 0], &[1]), (1, 40, 50, true));
        assert_eq!(viewed(&[40, 50], &[1, 0], &[0]), (40, 50, 1, true));
        assert_eq!(viewed(&[40, 50], &[1, 0], &[0, 1]), (1, 2000, 1, true));
        assert_eq!(viewed(&[2, 5, 6, 9], &[0, 3, 1, 2], &[0, 2, 3]), (1, 60, 9, true));
        assert_eq!(viewed(&[2, 5, 6, 9], &[0, 3, 1, 2], &[2, 3]), (2, 30, 9, true));
        assert_eq!(viewed(&[4, 5], &[0, 1], &[0]), (5, 4, 1, false));
    }

    #[test]
    fn a_tensor_is_permuted_only_where_reduced_dimensions_lie_apart_or_columns_are_few() {
        let viewed = |shape: &[usize], dims: &[usize]| {
            let x = Tensor::empty(shape, DType::F32, Device::Meta(0)).unwrap();
            let f = ReduceView::new("sum", &x, dims, false).unwrap();
            (f.outer, f.n, f.inner, f.input.shape() == x.shape())
        };
        assert_eq!(viewed(&[4, 5], &[1]), (4, 5, 1, true));
        assert_eq!(viewed(&[4, 50], &[0]), (1, 4, 50, true));
        assert_eq!(viewed(&[4, 5], &[0]), (5, 4, 1, false));
        assert_eq!(viewed(&[2, 3, 40], &[1]), (2, 3, 40, true));
        assert_eq!(viewed(&[2, 3, 4], &[0, 2]), (3, 8, 1, false));
        assert_eq!(viewed(&[2, 3, 1, 4], &[1, 3]), (2, 12, 1, true));
        assert_eq!(viewed(&[1, 9, 1], &[0, 2]), (9, 1, 1, true));
        assert_eq!(viewed(&[0, 3], &[0]), (3, 0, 1, false));
        assert_eq!(viewed(&[], &[]), (1, 1, 1, true));
    }
}
