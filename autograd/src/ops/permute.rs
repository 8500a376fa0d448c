//! Dimensions in another order, as views.
//!
//! Derivative: `dy` in the old order.

use phalanx_tensor::{Dim, Dims, Error, resolve_dims};

use super::linear_map::record_view;
use crate::{Result, Var};

impl Var {
    /// Dimension `i` of the result is dimension `dims[i]` of this.
    ///
    /// # Errors
    /// If `dims` is not a permutation of the dimensions.
    pub fn permute<D: Dim>(&self, dims: &[D]) -> Result<Var> {
        let dims = resolve_dims("permute", dims, self.rank())?;
        let y = self.tensor().permute(&dims)?;
        let mut inverse = Dims::from_elem(0, dims.len());
        dims.iter().enumerate().for_each(|(i, &d)| inverse[d] = i);
        record_view("permute", self, y, move |dy| dy.permute(&inverse))
    }

    /// Two dimensions exchanged.
    ///
    /// # Errors
    /// If there is no such dimension.
    pub fn transpose(&self, a: impl Dim, b: impl Dim) -> Result<Var> {
        let (a, b) = (a.resolve(self.rank(), "transpose")?, b.resolve(self.rank(), "transpose")?);
        record_view("transpose", self, self.tensor().transpose(a, b)?, move |dy| dy.transpose(a, b))
    }

    /// Dimension `source[i]` moved to place `destination[i]`; the others keep their order.
    ///
    /// # Errors
    /// If there are not as many of both, or a dimension does not exist or is named twice.
    pub fn movedim<D: Dim>(&self, source: &[D], destination: &[D]) -> Result<Var> {
        const OP: &str = "movedim";
        if source.len() != destination.len() {
            let got = format!("{} dimensions to {} places", source.len(), destination.len());
            return Err(Error::shape(OP, got, "as many of both").into());
        }
        let source = resolve_dims(OP, source, self.rank())?;
        let destination = resolve_dims(OP, destination, self.rank())?;
        let mut others = (0..self.rank()).filter(|d| !source.contains(d));
        let from = |place: usize| match destination.iter().position(|&d| d == place) {
            Some(i) => Some(source[i]),
            None => others.next(),
        };
        let order: Dims = (0..self.rank()).filter_map(from).collect();
        self.permute(&order)
    }

    /// `k` quarter turns in the plane of two dimensions, from the first towards the second; backwards if `k` is negative.
    ///
    /// # Errors
    /// If the dimensions are not two different ones.
    pub fn rot90<D: Dim>(&self, k: isize, dims: &[D]) -> Result<Var> {
        let &[a, b] = resolve_dims("rot90", dims, self.rank())?.as_slice() else {
            let got = format!("{} dimensions", dims.len());
            return Err(Error::shape("rot90", got, "the two dimensions of a plane").into());
        };
        match k.rem_euclid(4) {
            0 => Ok(self.clone()),
            1 => self.flip(&[b])?.transpose(a, b),
            2 => self.flip(&[a, b]),
            _ => self.flip(&[a])?.transpose(a, b),
        }
    }
}

#[cfg(test)]
mod tests {
    use phalanx_tensor::Device;

    use crate::Var;
    use crate::ops::testing::check_twice;

    #[test]
    fn quarter_turns_and_moves_are_numpys() {
        let x = Var::from_slice(&[1i64, 2, 3, 4, 5, 6], &[2, 3], Device::CPU).unwrap();
        let turned = |k: isize, dims: [i32; 2]| x.rot90(k, &dims).unwrap().to_vec::<i64>().unwrap();
        assert_eq!(turned(1, [0, 1]), [3, 6, 2, 5, 1, 4]);
        assert_eq!(turned(-1, [0, 1]), [4, 1, 5, 2, 6, 3]);
        assert_eq!(turned(1, [1, 0]), turned(3, [0, -1]));
        assert_eq!(turned(6, [0, 1]), [6, 5, 4, 3, 2, 1]);
        assert_eq!(turned(isize::MIN, [0, 1]), [1, 2, 3, 4, 5, 6]);
        assert!(x.rot90(1, &[0]).is_err() && x.rot90(1, &[0, 0]).is_err() && x.rot90(1, &[0, 2]).is_err());
        let y = x.reshape(&[1, 2, 3, 1]).unwrap();
        assert_eq!(y.movedim(&[0, -2], &[-1, 0]).unwrap().shape(), [3, 2, 1, 1]);
        assert_eq!(y.movedim(&[1], &[3]).unwrap().shape(), [1, 3, 1, 2]);
        assert!(y.movedim(&[0, 1], &[0]).is_err() && y.movedim(&[0, 0], &[0, 1]).is_err());
        check_twice(&[&[2, 3, 2]], |v| v[0].tanh()?.rot90(3, &[2, 1]));
        check_twice(&[&[2, 3, 2]], |v| v[0].tanh()?.movedim(&[2, 0], &[0, 1]));
    }

    #[test]
    fn permutations_have_their_derivatives() {
        check_twice(&[&[2, 3, 4]], |v| {
            let y = v[0].permute(&[2, 0, 1])?;
            y.mul(&y)
        });
        check_twice(&[&[2, 3]], |v| {
            let y = v[0].transpose(0, -1)?;
            y.mul(&y)
        });
    }
}
