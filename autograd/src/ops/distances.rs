//! How far vectors are from each other, or how far they point the same way. Composed of norms.

use phalanx_tensor::{Dim, Dims, Error, Tensor, broadcast_shapes};

use super::composed::{broadcasts, composed, floats};
use crate::{Result, Var};

impl Var {
    /// The cosine of the angle between vectors along `dim`, which goes away; both broadcast. Norms below `eps` count as
    /// `eps`.
    ///
    /// # Errors
    /// If the shapes do not broadcast, there is no such dimension, the dtype is no floating-point one, or dtypes or devices
    /// differ.
    pub fn cosine_similarity(&self, other: &Var, dim: impl Dim, eps: f64) -> Result<Var> {
        const NAME: &str = "cosine_similarity";
        floats(NAME, &[self, other])?;
        broadcasts(NAME, &[self, other])?;
        let shape = broadcast_shapes(NAME, self.shape(), other.shape())?;
        let dim = dim.resolve(shape.len().max(1), NAME)?;
        composed(NAME, &[self, other], |v| {
            let (a, b) = (v[0].broadcast_to(&shape)?, v[1].broadcast_to(&shape)?);
            let unit = |x: &Var| x.div(&x.norm(2.0, &[dim], true)?.clamp(Some(eps.into()), None)?);
            unit(&a)?.mul(&unit(&b)?)?.sum(&[dim], false)
        })
    }

    /// The distance, in the norm of order `p`, of each of the points [.., n, m] from each of `other` [.., k, m]:
    /// [.., n, k]; leading dimensions broadcast. `p` is 0 (how many coordinates differ) or more, or infinite. The derivative
    /// where the distance is 0 is 0.
    ///
    /// All differences are made, n k m numbers.
    ///
    /// # Errors
    /// If the shapes do not fit, `p` is negative or NaN, the dtype is no floating-point one, or dtypes or devices differ.
    pub fn cdist(&self, other: &Var, p: f64) -> Result<Var> {
        const NAME: &str = "cdist";
        if p.is_nan() || p < 0.0 {
            return Err(Error::invalid(NAME, format!("got p = {p}, wanted a number from 0 up")).into());
        }
        let fits = self.rank() >= 2 && other.rank() >= 2 && self.shape().last() == other.shape().last();
        if !fits {
            let got = format!("{:?} and {:?}", self.shape(), other.shape());
            return Err(Error::shape(NAME, got, "[.., n, m] and [.., k, m]").into());
        }
        floats(NAME, &[self, other])?;
        let (a, b) = (self.shape(), other.shape());
        let lead = broadcast_shapes(NAME, &a[..a.len() - 2], &b[..b.len() - 2])?;
        if a.last() == Some(&0) && p.is_infinite() {
            // The largest of no differences.
            let shape: Dims = lead.iter().copied().chain([a[a.len() - 2], b[b.len() - 2]]).collect();
            return Ok(Var::new(Tensor::zeros(&shape, self.dtype(), self.device())?));
        }
        composed(NAME, &[self, other], |v| {
            v[0].unsqueeze(-2)?.sub(&v[1].unsqueeze(-3)?)?.norm(p, &[-1], false)
        })
    }
}
