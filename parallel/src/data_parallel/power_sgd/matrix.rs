//! [`Matrix`]: a gradient that is sent as factors. [`Flat`]: tensors of one message.

use phalanx_tensor::Tensor;

use super::PowerSgdConfig;
use crate::Result;

pub(super) struct Matrix {
    /// Of the parameter.
    pub(super) number: usize,
    /// Its gradient, in the bucket.
    pub(super) view: Tensor,
    /// [n, m]: gradient and residual.
    pub(super) m: Tensor,
    /// [m, r]: where this pass begins.
    pub(super) q: Tensor,
}

/// Rows and columns of a gradient of this shape, and of its factors; `None` if it goes whole.
pub(super) fn worth(config: &PowerSgdConfig, shape: &[usize]) -> Option<(usize, usize, usize)> {
    let [rows, ref others @ ..] = *shape else { return None };
    let columns = others.iter().product::<usize>();
    if others.is_empty() || rows.min(columns) == 0 {
        return None;
    }
    let rank = config.rank.min(rows).min(columns);
    let sent = ((rows + columns) * rank) as f64;
    (sent * config.min_rate < (rows * columns) as f64).then_some((rows, columns, rank))
}

/// Tensors side by side.
pub(super) struct Flat {
    pub(super) all: Tensor,
    pub(super) parts: Vec<Tensor>,
}

impl Flat {
    /// Of these shapes, in the dtype and on the device of another tensor.
    pub(super) fn new<S: AsRef<[usize]>>(shapes: impl Iterator<Item = S>, like: &Tensor) -> Result<Flat> {
        let shapes: Vec<S> = shapes.collect();
        let elements = |shape: &S| shape.as_ref().iter().product::<usize>();
        let all = Tensor::empty(&[shapes.iter().map(elements).sum()], like.dtype(), like.device())?;
        let mut at = 0;
        let mut part = |shape: &S| -> Result<Tensor> {
            let part = all.narrow(0, at, elements(shape))?;
            at += elements(shape);
            Ok(part.with_shape(shape.as_ref())?)
        };
        let parts = shapes.iter().map(&mut part).collect::<Result<_>>()?;
        Ok(Flat { all, parts })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_saves_little_goes_whole() {
        let config = PowerSgdConfig { rank: 2, min_rate: 2.0, ..PowerSgdConfig::default() };
        assert_eq!(worth(&config, &[100]), None);
        assert_eq!(worth(&config, &[8, 8]), None, "2 (8 + 8) 2 = 64");
        assert_eq!(worth(&config, &[8, 9]), Some((8, 9, 2)), "2 (8 + 9) 2 = 68");
        assert_eq!(worth(&config, &[30, 3, 5, 5]), Some((30, 75, 2)));
        assert_eq!(worth(&config, &[0, 5]), None);
        let all = PowerSgdConfig { rank: 50, min_rate: 0.0, ..config };
        assert_eq!(worth(&all, &[4, 7]), Some((4, 7, 4)));
    }
}
