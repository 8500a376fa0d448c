//! Broadcasting and its reverse, the sum over what was repeated.

use phalanx_kernels as kernels;
use phalanx_tensor::{DType, Dim, Dims, Error};

use super::frame::{named, product, record_linear, record_view};
use crate::{Result, Var, begins};

impl Var {
    /// Repeats dimensions of size 1, and adds dimensions in front, to reach `shape`; no copy is made.
    ///
    /// Derivative: the sum over the repeated dimensions.
    ///
    /// # Errors
    /// If the shape does not broadcast to `shape`.
    pub fn broadcast_to(&self, shape: &[usize]) -> Result<Var> {
        self.broadcast_for("broadcast_to", shape)
    }

    fn broadcast_for(&self, name: &'static str, shape: &[usize]) -> Result<Var> {
        let y = self.tensor().broadcast_for(name, shape)?;
        let from = Dims::from_slice(self.shape());
        record_view(name, self, y, move |dy| dy.sum_to(&from))
    }

    /// [`Var::broadcast_to`] where a size of -1 keeps the dimension's.
    ///
    /// # Errors
    /// If the shape does not broadcast to `sizes`, or a dimension added in front is -1.
    pub fn expand(&self, sizes: &[isize]) -> Result<Var> {
        let wrong = || {
            let wanted = format!("a shape that broadcasts to {sizes:?}, in which -1 keeps a size");
            Error::shape("expand", format!("a tensor of shape {:?}", self.shape()), wanted)
        };
        let lead = sizes.len().checked_sub(self.rank()).ok_or_else(wrong)?;
        let size = |(i, &n): (usize, &isize)| match n {
            -1 => i.checked_sub(lead).map(|i| self.shape()[i]),
            n => usize::try_from(n).ok(),
        };
        let shape: Option<Dims> = sizes.iter().enumerate().map(size).collect();
        self.broadcast_for("expand", &shape.ok_or_else(wrong)?)
    }

    /// The tensor `repeats[i]` times along dimension `i`; more repeats than dimensions add dimensions in front.
    ///
    /// # Errors
    /// If there are fewer repeats than dimensions.
    pub fn repeat(&self, repeats: &[usize]) -> Result<Var> {
        let Some(lead) = repeats.len().checked_sub(self.rank()) else {
            let wanted = format!("at least {}, one a dimension of {:?}", self.rank(), self.shape());
            return Err(Error::shape("repeat", format!("{} repeats", repeats.len()), wanted).into());
        };
        let sizes = || {
            repeats.iter().enumerate().map(|(i, &r)| (r, i.checked_sub(lead).map_or(1, |i| self.shape()[i])))
        };
        let once: Dims = sizes().flat_map(|(_, n)| [1, n]).collect();
        let apart: Dims = sizes().flat_map(|(r, n)| [r, n]).collect();
        let merged: Option<Dims> = sizes().map(|(r, n)| r.checked_mul(n)).collect();
        let merged = merged.ok_or_else(|| {
            let got = format!("repeats {repeats:?} of shape {:?}", self.shape());
            Error::shape("repeat", got, "a size below 2^63")
        })?;
        self.reshape_to(&once)?.broadcast_for("repeat", &apart)?.reshape_to(&merged)
    }

    /// [`Var::repeat`], where fewer repeats than dimensions are those of the last ones: PyTorch's and NumPy's `tile`.
    ///
    /// # Errors
    /// If a size is too large.
    pub fn tile(&self, repeats: &[usize]) -> Result<Var> {
        let mut all = Dims::from_elem(1, self.rank().saturating_sub(repeats.len()));
        all.extend_from_slice(repeats);
        named("tile", self.repeat(&all))
    }

    /// Each element (along `dim`; without, of the flattened tensor) `repeats` times in a row.
    ///
    /// # Errors
    /// If there is no such dimension, or the result is too large.
    pub fn repeat_interleave(&self, repeats: usize, dim: Option<isize>) -> Result<Var> {
        const OP: &str = "repeat_interleave";
        let Some(dim) = dim else {
            return self.reshape_to(&[self.numel()])?.repeat_interleave(repeats, Some(0));
        };
        let dim = dim.resolve(self.rank(), OP)?;
        let mut shape = Dims::from_slice(self.shape());
        let size = product(OP, &[shape[dim], repeats])?;
        shape.insert(dim + 1, repeats);
        let apart = self.unsqueeze(dim + 1)?.broadcast_to(&shape)?;
        shape.remove(dim + 1);
        shape[dim] = size;
        named(OP, apart.reshape_to(&shape))
    }

    /// [`Var::repeat_interleave`] with a number of its own (i64 or i32) for each element along `dim`, or one for all.
    ///
    /// The host waits for the device, since the numbers decide the size.
    ///
    /// # Errors
    /// If there is no such dimension, the numbers are not as many as its elements, or one is negative. On a `meta`
    /// device, which has no values.
    pub fn repeat_interleave_each(&self, repeats: &Var, dim: Option<isize>) -> Result<Var> {
        const OP: &str = "repeat_interleave";
        let Some(dim) = dim else {
            return self.reshape_to(&[self.numel()])?.repeat_interleave_each(repeats, Some(0));
        };
        let dim = dim.resolve(self.rank(), OP)?;
        if repeats.device().is_meta() {
            let why = "the repeats decide the result's size, and a meta tensor has no values".into();
            return Err(Error::Unsupported { op: OP, device: repeats.device(), why }.into());
        }
        if !matches!(repeats.dtype(), DType::I64 | DType::I32) {
            return Err(Error::dtype(OP, repeats.dtype(), "i64 or i32 for the repeats").into());
        }
        let counts = repeats.to(DType::I64)?.to_vec::<i64>()?;
        let size = self.shape()[dim];
        if repeats.rank() > 1 || (counts.len() != size && counts.len() != 1) {
            let got = format!("repeats of shape {:?}", repeats.shape());
            return Err(
                Error::shape(OP, got, format!("[{size}], the size of dimension {dim}, or [1]")).into()
            );
        }
        if let Some(negative) = counts.iter().find(|&&count| count < 0) {
            return Err(Error::range(OP, format!("{negative} repeats"), "0 or more").into());
        }
        let sum = counts.iter().try_fold(0_i64, |sum, &count| sum.checked_add(count));
        product(OP, &[sum.map_or(usize::MAX, |sum| sum as usize), if counts.len() == 1 { size } else { 1 }])?;
        let count = |i: usize| counts[if counts.len() == 1 { 0 } else { i }] as usize;
        let places: Vec<i64> = (0..size).flat_map(|i| std::iter::repeat_n(i as i64, count(i))).collect();
        let places = Var::from_slice(&places, &[places.len()], self.device())?;
        named(OP, self.index_select(dim, &places))
    }

    /// The reverse of [`Var::broadcast_to`]: sums over what was repeated from `shape`. Itself if the shapes agree.
    ///
    /// # Errors
    /// If `shape` does not broadcast to this shape.
    pub fn sum_to(&self, shape: &[usize]) -> Result<Var> {
        begins();
        if self.shape() == shape {
            return Ok(self.clone());
        }
        let lead = self.rank().saturating_sub(shape.len());
        let stretches = |(&n, &whole): (&usize, &usize)| n == whole || n == 1;
        if shape.len() > self.rank() || !shape.iter().zip(&self.shape()[lead..]).all(stretches) {
            let wanted = format!("a shape that broadcasts to {:?}", self.shape());
            return Err(Error::shape("sum_to", format!("{shape:?}"), wanted).into());
        }
        let repeated = |d: &usize| *d < lead || (shape[*d - lead] == 1 && self.shape()[*d] != 1);
        let dims: Dims = (0..self.rank()).filter(repeated).collect();
        let y = kernels::sum(self.tensor(), &dims, true)?.with_shape(shape)?;
        let from = Dims::from_slice(self.shape());
        record_linear("sum_to", self, y, move |dy| dy.broadcast_to(&from))
    }
}

#[cfg(test)]
mod tests {
    use phalanx_tensor::Device;

    use crate::Var;
    use crate::ops::testing::check_twice;

    #[test]
    fn interleaved_repeats_stand_side_by_side() {
        let x = Var::from_slice(&[1i64, 2, 3], &[3], Device::CPU).unwrap();
        let vec = |y: Var| y.to_vec::<i64>().unwrap();
        assert_eq!(vec(x.repeat_interleave(2, None).unwrap()), [1, 1, 2, 2, 3, 3]);
        let counts = Var::from_slice(&[2i64, 0, 1], &[3], Device::CPU).unwrap();
        assert_eq!(vec(x.repeat_interleave_each(&counts, Some(0)).unwrap()), [1, 1, 3]);
        assert_eq!(vec(x.repeat_interleave_each(&counts.narrow(0, 0, 1).unwrap(), None).unwrap()).len(), 6);
        let error = |e: crate::Result<Var>| e.unwrap_err().to_string();
        assert!(error(x.repeat_interleave(usize::MAX, None)).starts_with("repeat_interleave"));
        assert!(error(x.repeat_interleave_each(&counts.neg().unwrap(), None)).contains("-2 repeats"));
        assert!(error(x.repeat_interleave_each(&counts.narrow(0, 0, 2).unwrap(), None)).contains("[3]"));
        let refused = x.repeat(&[usize::MAX]).err().unwrap().to_string();
        assert!(refused.contains("repeat: got repeats"), "{refused}");
        let refused = x.tile(&[usize::MAX, 2]).err().unwrap().to_string();
        assert!(refused.contains("tile: got a tensor"), "{refused}");
    }

    #[test]
    fn repetitions_have_their_derivatives() {
        check_twice(&[&[2, 1]], |v| {
            let y = v[0].expand(&[3, -1, 4])?;
            y.mul(&y)
        });
        check_twice(&[&[2, 3]], |v| {
            let y = v[0].repeat(&[2, 1, 3])?;
            y.mul(&y)
        });
        check_twice(&[&[2, 3]], |v| v[0].tanh()?.tile(&[2]));
        check_twice(&[&[2, 3]], |v| v[0].tanh()?.tile(&[2, 1, 2]));
        check_twice(&[&[2, 3]], |v| v[0].tanh()?.repeat_interleave(2, Some(-1)));
        check_twice(&[&[2, 3]], |v| v[0].tanh()?.repeat_interleave(0, None));
        let counts = Var::from_slice(&[2i64, 0, 1], &[3], Device::CPU).unwrap();
        check_twice(&[&[2, 3]], |v| v[0].tanh()?.repeat_interleave_each(&counts, Some(1)));
        check_twice(&[&[2, 3]], |v| {
            let y = v[0].sum_to(&[3])?;
            y.mul(&y)
        });
    }
}
