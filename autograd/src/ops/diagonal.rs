//! A diagonal of two dimensions, as a view.
//!
//! Derivative: zeros of the input's shape with `dy` on the diagonal.

use phalanx_tensor::{Dim, Dims, Tensor, resolve_dims};

use super::subset::subset;
use crate::{Result, Var};

impl Var {
    /// The elements whose index in dimension `b` is that in dimension `a` plus `offset`: the two dimensions go away,
    /// and the diagonal becomes the last.
    ///
    /// # Errors
    /// If there are no such two dimensions.
    pub fn diagonal<D: Dim>(&self, offset: isize, a: D, b: D) -> Result<Var> {
        let dims = resolve_dims("diagonal", &[a, b], self.rank())?;
        subset("diagonal", self, move |t| view(t, offset, dims[0], dims[1]))
    }
}

fn view(t: &Tensor, offset: isize, a: usize, b: usize) -> phalanx_tensor::Result<Tensor> {
    let (down, right) = (offset.min(0).unsigned_abs(), offset.max(0).unsigned_abs());
    let len = t.shape()[a].saturating_sub(down).min(t.shape()[b].saturating_sub(right));
    let others = (0..t.rank()).filter(|&d| d != a && d != b);
    let mut shape: Dims = others.clone().map(|d| t.shape()[d]).collect();
    let mut strides: Dims = others.map(|d| t.strides()[d]).collect();
    shape.push(len);
    strides.push(t.strides()[a] + t.strides()[b]);
    let skipped = if len == 0 { 0 } else { down * t.strides()[a] + right * t.strides()[b] };
    t.as_strided(&shape, &strides, t.offset() + skipped)
}

#[cfg(test)]
mod tests {
    use phalanx_tensor::Device;

    use crate::Var;
    use crate::ops::testing::check_twice;

    #[test]
    fn every_offset_gives_its_diagonal_and_derivatives_hold() {
        let x = Var::from_slice(&[0i64, 1, 2, 3, 4, 5], &[2, 3], Device::CPU).unwrap();
        for (offset, want) in
            [(0, &[0i64, 4][..]), (1, &[1, 5]), (2, &[2]), (3, &[]), (-1, &[3]), (-2, &[]), (-9, &[])]
        {
            assert_eq!(x.diagonal(offset, 0, 1).unwrap().to_vec::<i64>().unwrap(), want);
        }
        check_twice(&[&[3, 2, 4]], |v| v[0].tanh()?.diagonal(1, -1, 0));
    }
}
