//! The same elements in another shape or order: reshape, permute, flip, roll; and differences of neighbours.

use phalanx_kernels as kernels;
use phalanx_tensor::{DType, Dim, Dims, Error, resolve_dims, resolve_shape};

use super::frame::{composed, record_view};
use crate::{Result, Var};

/// The same elements in another shape.
///
/// Derivative: `dy` in the old shape. A view where strides can express it, else a copy.
impl Var {
    /// The elements in row-major order in another shape, in which one size may be -1 and is inferred.
    ///
    /// # Errors
    /// If the number of elements differs.
    pub fn reshape(&self, shape: &[isize]) -> Result<Var> {
        self.reshape_to(&resolve_shape("reshape", self.shape(), shape)?)
    }

    /// [`Var::reshape`] to a shape without -1.
    ///
    /// # Errors
    /// If the number of elements differs.
    pub fn reshape_to(&self, shape: &[usize]) -> Result<Var> {
        let from = Dims::from_slice(self.shape());
        record_view("reshape", self, self.tensor().with_shape(shape)?, move |dy| dy.reshape_to(&from))
    }

    /// Dimensions `start ..= end` made one. A scalar becomes `[1]`.
    ///
    /// # Errors
    /// If there are no such dimensions, or `end` comes before `start`.
    pub fn flatten(&self, start: impl Dim, end: impl Dim) -> Result<Var> {
        let rank = self.rank().max(1);
        let (start, end) = (start.resolve(rank, "flatten")?, end.resolve(rank, "flatten")?);
        if start > end {
            return Err(Error::range("flatten", format!("{start} to {end}"), "a start up to the end").into());
        }
        let mut shape = Dims::from_slice(self.shape());
        if shape.is_empty() {
            shape.push(1);
        }
        let size = shape[start..=end].iter().product();
        shape.drain(start + 1..=end);
        shape[start] = size;
        self.reshape_to(&shape)
    }

    /// A dimension of size 1 put in before `dim`; -1 puts it last.
    ///
    /// # Errors
    /// If there is no such place.
    pub fn unsqueeze(&self, dim: impl Dim) -> Result<Var> {
        let mut shape = Dims::from_slice(self.shape());
        shape.insert(dim.resolve(self.rank() + 1, "unsqueeze")?, 1);
        self.reshape_to(&shape)
    }

    /// Those of `dims` that have size 1 taken out; the others stay.
    ///
    /// # Errors
    /// If a dimension does not exist or is named twice.
    pub fn squeeze<D: Dim>(&self, dims: &[D]) -> Result<Var> {
        let dims = resolve_dims("squeeze", dims, self.rank().max(1))?;
        self.squeeze_where(|d| dims.contains(&d))
    }

    /// Every dimension of size 1 taken out.
    ///
    /// # Errors
    /// None but those of the device.
    pub fn squeeze_all(&self) -> Result<Var> {
        self.squeeze_where(|_| true)
    }

    fn squeeze_where(&self, out: impl Fn(usize) -> bool) -> Result<Var> {
        let sizes = self.shape().iter().enumerate();
        let kept: Dims = sizes.filter(|&(d, &n)| n != 1 || !out(d)).map(|(_, &n)| n).collect();
        self.reshape_to(&kept)
    }
}

/// Dimensions in another order, as views.
///
/// Derivative: `dy` in the old order.
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

/// The order along dimensions reversed.
///
/// Derivative: `dy` reversed in the same way.
impl Var {
    /// The order along each of `dims` reversed.
    ///
    /// # Errors
    /// If a dimension does not exist or is named twice.
    pub fn flip<D: Dim>(&self, dims: &[D]) -> Result<Var> {
        let dims = resolve_dims("flip", dims, self.rank())?;
        record_view("flip", self, kernels::flip(self.tensor(), &dims)?, move |dy| dy.flip(&dims))
    }
}

/// Elements moved along dimensions, those that fall off the end put in at the front.
///
/// `y[(i + shift) mod n] = x[i]`. Derivative: `dy` moved back.
impl Var {
    /// Moves the elements by `shifts[i]` along `dims[i]`, one dimension after another (which may repeat).
    ///
    /// # Errors
    /// If there are not as many shifts as dimensions, or a dimension does not exist.
    pub fn roll<D: Dim>(&self, shifts: &[isize], dims: &[D]) -> Result<Var> {
        if shifts.len() != dims.len() {
            let got = format!("{} shifts for {} dimensions", shifts.len(), dims.len());
            return Err(Error::shape("roll", got, "one shift a dimension").into());
        }
        shifts.iter().zip(dims).try_fold(self.clone(), |x, (&shift, dim)| {
            let dim = dim.resolve(x.rank(), "roll")?;
            let size = x.shape()[dim];
            if size == 0 || shift.rem_euclid(size as isize) == 0 {
                return Ok(x);
            }
            let front = shift.rem_euclid(size as isize).unsigned_abs();
            let (all, rest) = (x.tensor(), size - front);
            let y = kernels::cat(&[&all.narrow(dim, rest, front)?, &all.narrow(dim, 0, rest)?], dim)?;
            record_view("roll", &x, y, move |dy| dy.roll(&[rest as isize], &[dim]))
        })
    }

    /// [`Var::roll`] of the flattened elements, in the shape that they had.
    ///
    /// # Errors
    /// None but those of the device.
    pub fn roll_all(&self, shift: isize) -> Result<Var> {
        let shape = Dims::from_slice(self.shape());
        self.reshape_to(&[self.numel()])?.roll(&[shift], &[0])?.reshape_to(&shape)
    }
}

/// Differences of neighbours along a dimension, composed of views and subtraction.
impl Var {
    /// `y[i] = x[i + 1] - x[i]` along `dim`, `n` times over: each time the dimension has one element less, until there is
    /// none. Of bools, whether neighbours differ. To put something before or behind, use [`Var::cat`] first.
    ///
    /// # Errors
    /// If there is no such dimension.
    pub fn diff(&self, n: usize, dim: impl Dim) -> Result<Var> {
        const NAME: &str = "diff";
        if self.rank() == 0 {
            let wanted = "at least one dimension";
            return Err(Error::shape(NAME, "a tensor without dimensions", wanted).into());
        }
        let dim = dim.resolve(self.rank(), NAME)?;
        let times = n.min(self.shape()[dim]);
        let repeated = |x: &Var| (0..times).try_fold(x.clone(), |x, _| once(&x, dim));
        if self.dtype().is_float() { composed(NAME, &[self], |v| repeated(&v[0])) } else { repeated(self) }
    }
}

fn once(x: &Var, dim: usize) -> Result<Var> {
    let len = x.shape()[dim].saturating_sub(1);
    let (here, next) = (x.narrow(dim, 0, len)?, x.narrow(dim, x.shape()[dim] - len, len)?);
    if x.dtype() == DType::Bool { next.ne(&here) } else { next.sub(&here) }
}

#[cfg(test)]
mod tests {
    use phalanx_tensor::Device;

    use crate::Var;
    use crate::ops::testing::check_twice;

    #[test]
    fn other_shapes_have_their_derivatives() {
        check_twice(&[&[2, 3, 1]], |v| {
            let y = v[0].reshape(&[3, -1])?;
            y.mul(&y)
        });
        check_twice(&[&[2, 3, 1]], |v| {
            let y = v[0].flatten(0, -2)?.squeeze(&[-1])?.unsqueeze(-1)?;
            y.mul(&y)
        });
        check_twice(&[&[1, 3, 1]], |v| {
            let y = v[0].squeeze_all()?;
            y.mul(&y)
        });
    }

    #[test]
    fn quarter_turns_and_moves_are_numpys() {
        let x = Var::from_slice(&[1i64, 2, 3, 4, 5, 6], &[2, 3], Device::CPU).unwrap();
        let turned = |k: isize, dims: [i32; 2]| x.rot90(k, &dims).unwrap().to_vec::<i64>().unwrap();
        assert_eq!(turned(1, [0, 1]), [3, 6, 2, 5, 1, 4]);
        assert_eq!(turned(-1, [0, 1]), [4, 1, 5, 2, 6, 3]);
        assert_eq!(turned(1, [1, 0]), turned(3, [0, -1]));
        assert_eq!(turned(6, [0, 1]), [6, 5, 4, 3, 2, 1]);
        assert_eq!(turned(isize::MIN, [0, 1]), [1, 2, 3, 4, 5, 6]);
        let refused = x.rot90(1, &[0]).err().unwrap().to_string();
        assert!(refused.contains("got 1 dimensions, wanted the two"), "{refused}");
        let refused = x.rot90(1, &[0, 0]).err().unwrap().to_string();
        assert!(refused.contains("rot90: dimension 0 is named twice"), "{refused}");
        let refused = x.rot90(1, &[0, 2]).err().unwrap().to_string();
        assert!(refused.contains("rot90: dimension 2 is out of range"), "{refused}");
        let y = x.reshape(&[1, 2, 3, 1]).unwrap();
        assert_eq!(y.movedim(&[0, -2], &[-1, 0]).unwrap().shape(), [3, 2, 1, 1]);
        assert_eq!(y.movedim(&[1], &[3]).unwrap().shape(), [1, 3, 1, 2]);
        let refused = y.movedim(&[0, 1], &[0]).err().unwrap().to_string();
        assert!(refused.contains("movedim: got 2 dimensions to 1"), "{refused}");
        let refused = y.movedim(&[0, 0], &[0, 1]).err().unwrap().to_string();
        assert!(refused.contains("movedim: dimension 0 is named twice"), "{refused}");
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

    #[test]
    fn reversals_have_their_derivatives() {
        check_twice(&[&[2, 3, 2]], |v| {
            let y = v[0].flip(&[0, -1])?.mul(&v[0])?;
            y.mul(&y)
        });
    }

    #[test]
    fn rolls_have_their_derivatives() {
        check_twice(&[&[3, 4]], |v| {
            let y = v[0].roll(&[1, -6], &[0, 1])?.mul(&v[0])?;
            y.mul(&y)
        });
        check_twice(&[&[3, 2]], |v| {
            let y = v[0].roll_all(-5)?.mul(&v[0])?;
            y.mul(&y)
        });
    }
}
