//! Diagonals and triangles of matrices.

use phalanx_kernels as kernels;
use phalanx_tensor::{Dim, Dims, Error, Tensor, resolve_dims};

use super::frame::{named, record_linear};
use super::slicing::{place, subset};
use crate::{Result, Var, begins};

/// A diagonal of two dimensions, as a view; and matrices with a given diagonal.
///
/// Derivative: zeros of the input's shape with `dy` on the diagonal; of `diag_embed` the diagonal of `dy`.
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

    /// Zeros with the last dimension on the diagonal of two new ones, which are dimensions `a` and `b` of the result:
    /// [`Var::diagonal`] with the same arguments gives this back.
    ///
    /// # Errors
    /// If there are no such two dimensions, this has none, or the result is too large.
    pub fn diag_embed<D: Dim>(&self, offset: isize, a: D, b: D) -> Result<Var> {
        const OP: &str = "diag_embed";
        let dims = resolve_dims(OP, &[a, b], self.rank() + 1)?;
        let Some((&length, others)) = self.shape().split_last() else {
            return Err(Error::shape(OP, "[]", "at least one dimension").into());
        };
        let too_large = || Error::range(OP, format!("offset {offset}"), "sizes below 2^63");
        let size = length.checked_add(offset.unsigned_abs()).ok_or_else(too_large)?;
        let mut others = others.iter().copied();
        let new = |d: usize| if dims.contains(&d) { Some(size) } else { others.next() };
        let shape: Dims = (0..=self.rank()).filter_map(new).collect();
        named(OP, place(OP, self, &shape, move |t| view(t, offset, dims[0], dims[1])))
    }

    /// Of a vector the matrix that has it on a diagonal, of a matrix that diagonal. Diagonal 0 is the main one, positive
    /// ones lie above it.
    ///
    /// # Errors
    /// If this has neither one nor two dimensions.
    pub fn diag(&self, diagonal: isize) -> Result<Var> {
        match self.rank() {
            1 => named("diag", self.diag_embed(diagonal, 0, 1)),
            2 => named("diag", self.diagonal(diagonal, 0, 1)),
            _ => Err(Error::shape("diag", format!("{:?}", self.shape()), "one or two dimensions").into()),
        }
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

/// The lower and the upper triangle of matrices, zero elsewhere.
///
/// Derivative: the same triangle of `dy`.
impl Var {
    /// Of each matrix (the last two dimensions) the elements on and below a diagonal, 0 above it. Diagonal 0 is the
    /// main one, positive ones lie above it.
    ///
    /// # Errors
    /// If there are fewer than two dimensions.
    pub fn tril(&self, diagonal: isize) -> Result<Var> {
        begins();
        record_linear("tril", self, kernels::tril(self.tensor(), diagonal)?, move |dy| dy.tril(diagonal))
    }

    /// Of each matrix the elements on and above a diagonal, 0 below it.
    ///
    /// # Errors
    /// If there are fewer than two dimensions.
    pub fn triu(&self, diagonal: isize) -> Result<Var> {
        begins();
        record_linear("triu", self, kernels::triu(self.tensor(), diagonal)?, move |dy| dy.triu(diagonal))
    }
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

    #[test]
    fn embedding_a_diagonal_is_the_reverse_of_taking_it() {
        let x = Var::from_slice(&[1i64, 2, 3, 4, 5, 6], &[2, 3], Device::CPU).unwrap();
        for (offset, a, b) in [(0, 1, 2), (2, 0, -1), (-1, 2, 0), (1, -1, 1)] {
            let y = x.diag_embed(offset, a, b).unwrap();
            assert_eq!(y.sum_all().unwrap().item::<i64>().unwrap(), 21);
            let back = y.diagonal(offset, a, b).unwrap();
            assert_eq!(back.to_vec::<i64>().unwrap(), x.to_vec::<i64>().unwrap());
        }
        let vector = x.select(0, 0).unwrap().diag(-1).unwrap();
        assert_eq!(vector.diag(-1).unwrap().to_vec::<i64>().unwrap(), [1, 2, 3]);
        assert_eq!(x.narrow(1, 0, 0).unwrap().diag_embed(0, 1, 2).unwrap().shape(), [2, 0, 0]);
        let refused = x.unsqueeze(0).unwrap().diag(0).err().unwrap().to_string();
        assert!(refused.contains("diag: got [1, 2, 3]"), "{refused}");
        for far in [isize::MIN, isize::MAX] {
            assert!(x.diag_embed(far, 1, 2).unwrap_err().to_string().starts_with("diag_embed"));
        }
        check_twice(&[&[2, 3]], |v| v[0].tanh()?.diag_embed(1, 0, -1));
        check_twice(&[&[3]], |v| v[0].tanh()?.diag(-2));
    }

    #[test]
    fn triangles_have_their_derivatives() {
        check_twice(&[&[2, 3, 4]], |v| {
            let y = v[0].tril(1)?;
            y.mul(&y)
        });
        check_twice(&[&[4, 3]], |v| {
            let y = v[0].triu(-1)?;
            y.mul(&y)
        });
    }
}
