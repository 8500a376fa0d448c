//! The gradients of a normalisation as differentiable operations, for all of them: layer, root mean square, group and
//! batch.

use phalanx_tensor::Dims;

use crate::{Result, Var};

/// A normalisation `y = xhat w + b`, shaped so that `w` broadcasts to `x`.
pub(super) struct Normalization<'a> {
    pub(super) x: &'a Var,
    pub(super) weight: Option<&'a Var>,
    pub(super) dy: &'a Var,
    /// The dimensions that a mean is taken over.
    pub(super) dims: &'a [usize],
    /// Whether the mean is subtracted.
    pub(super) centred: bool,
    pub(super) eps: f64,
}

impl Normalization<'_> {
    /// The gradients of x, weight and bias; the latter two in the shape `affine`.
    pub(super) fn gradients(&self, affine: &[usize], needs: [bool; 3]) -> Result<[Option<Var>; 3]> {
        let (x, dy) = (self.x, self.dy);
        let mean = |v: &Var| v.mean(self.dims, true);
        let centre = |v: &Var| if self.centred { v.sub(&mean(v)?) } else { Ok(v.clone()) };
        let centred = centre(x)?;
        let inverse = mean(&centred.mul(&centred)?)?.add_scalar(self.eps)?.rsqrt()?;
        let hat = centred.mul(&inverse)?;
        let dx = || {
            let g = self.weight.map_or_else(|| Ok(dy.clone()), |w| dy.mul(w))?;
            let along = hat.mul(&mean(&g.mul(&hat)?)?)?;
            centre(&g)?.sub(&along)?.mul(&inverse)
        };
        Ok([
            needs[0].then(dx).transpose()?,
            needs[1].then(|| dy.mul(&hat)?.sum_to(affine)).transpose()?,
            needs[2].then(|| dy.sum_to(affine)).transpose()?,
        ])
    }
}

/// The shape of a weight a channel that broadcasts to [N, C, ...] of this rank.
pub(super) fn beside(channels: usize, rank: usize) -> Dims {
    (0..rank).map(|d| if d == 1 { channels } else { 1 }).collect()
}
