//! Channels spread over the pixels of a larger image, and back.
//!
//! `y[c, h r + i, w r + j] = x[c r² + i r + j, h, w]`. Views and one copy; derivative: the other of the two.
//! Source: Shi et al.: Real-Time Single Image and Video Super-Resolution (2016).

use phalanx_tensor::{Dims, Error};

use super::composed::{named, product};
use crate::{Result, Var};

impl Var {
    /// `[.., channels r², h, w]` to `[.., channels, h r, w r]` for the factor `r`.
    ///
    /// # Errors
    /// If there are fewer than three dimensions, `r` is 0, or `r²` does not divide the channels.
    pub fn pixel_shuffle(&self, factor: usize) -> Result<Var> {
        const OP: &str = "pixel_shuffle";
        let square = factor.checked_mul(factor).filter(|&n| n > 0);
        let &[ref lead @ .., channels, h, w] = self.shape() else { return Err(few(OP, self)) };
        let Some(square) = square.filter(|&n| channels.is_multiple_of(n)) else {
            let wanted = format!("a factor r of at least 1 whose square divides the {channels} channels");
            return Err(Error::range(OP, format!("factor {factor} for {:?}", self.shape()), wanted).into());
        };
        let shape = |tail: &[usize]| -> Dims { lead.iter().chain(tail).copied().collect() };
        let apart = self.reshape_to(&shape(&[channels / square, factor, factor, h, w]))?;
        let n = lead.len();
        let order: Dims = (0..n).chain([0, 3, 1, 4, 2].map(|d| n + d)).collect();
        let tail = [channels / square, product(OP, &[h, factor])?, product(OP, &[w, factor])?];
        named(OP, apart.permute(&order)?.reshape_to(&shape(&tail)))
    }

    /// The reverse of [`Var::pixel_shuffle`]: `[.., channels, h r, w r]` to `[.., channels r², h, w]`.
    ///
    /// # Errors
    /// If there are fewer than three dimensions, `r` is 0, or does not divide height and width.
    pub fn pixel_unshuffle(&self, factor: usize) -> Result<Var> {
        const OP: &str = "pixel_unshuffle";
        let &[ref lead @ .., channels, h, w] = self.shape() else { return Err(few(OP, self)) };
        if factor == 0 || !h.is_multiple_of(factor) || !w.is_multiple_of(factor) {
            let wanted = "a factor of at least 1 that divides height and width";
            return Err(Error::range(OP, format!("factor {factor} for {:?}", self.shape()), wanted).into());
        }
        let shape = |tail: &[usize]| -> Dims { lead.iter().chain(tail).copied().collect() };
        let apart = self.reshape_to(&shape(&[channels, h / factor, factor, w / factor, factor]))?;
        let n = lead.len();
        let order: Dims = (0..n).chain([0, 2, 4, 1, 3].map(|d| n + d)).collect();
        let tail = [product(OP, &[channels, factor, factor])?, h / factor, w / factor];
        named(OP, apart.permute(&order)?.reshape_to(&shape(&tail)))
    }
}

fn few(op: &'static str, x: &Var) -> crate::Error {
    Error::shape(op, format!("{:?}", x.shape()), "[.., channels, h, w]").into()
}

#[cfg(test)]
mod tests {
    use phalanx_tensor::Device;

    use crate::Var;
    use crate::ops::testing::check_twice;

    #[test]
    fn shuffling_follows_the_formula_and_goes_back() {
        let x = Var::from_slice(&[0i64, 1, 2, 3, 4, 5, 6, 7], &[4, 1, 2], Device::CPU).unwrap();
        let y = x.pixel_shuffle(2).unwrap();
        assert_eq!((y.shape(), y.to_vec::<i64>().unwrap()), (&[1, 2, 4][..], vec![0, 2, 1, 3, 4, 6, 5, 7]));
        assert_eq!(y.pixel_unshuffle(2).unwrap().to_vec::<i64>().unwrap(), x.to_vec::<i64>().unwrap());
        check_twice(&[&[2, 9, 1, 2]], |v| v[0].tanh()?.pixel_shuffle(3));
        check_twice(&[&[2, 1, 4, 2]], |v| v[0].tanh()?.pixel_unshuffle(2));
        for factor in [0, 3, usize::MAX] {
            assert!(x.pixel_shuffle(factor).unwrap_err().to_string().starts_with("pixel_shuffle: factor"));
            assert!(x.pixel_unshuffle(factor).is_err());
        }
        assert!(x.select(0, 0).unwrap().pixel_shuffle(1).is_err());
    }
}
