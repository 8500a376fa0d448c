//! Rotary position embedding.

mod cpu;
mod cuda;

use phalanx_tensor::{DType, Error, Result, Tensor};

use crate::check;
use crate::dispatch::Kernels;
use crate::real::{Real, for_real};
use crate::rows::{self, Outputs, Shape};
use crate::wide::elements;

const ROTATE: Kernels<Rotate> = Kernels { cpu: rotate_on_cpu, cuda: cuda::rotate };

type Rotate = fn(&'static str, &Tensor, Option<&Tensor>, &Rope, f64, &mut Tensor) -> Result<()>;

/// What a rotary embedding is told beside its tensors.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rope {
    /// The ratio of the slowest to the fastest wavelength, about.
    pub base: f64,
    /// The first position, where positions are not given.
    pub offset: i64,
}

impl Default for Rope {
    fn default() -> Rope {
        Rope { base: 10000.0, offset: 0 }
    }
}

/// Rotates each row of `x` [.., T, D] by its position: with `a, b` the row's halves and
/// `angle[i] = position * base^(-2i/D)` it becomes `a cos - b sin, b cos + a sin`. Positions are `offset, offset + 1, ..`
/// or `position_ids`, i64 `[T]` or `[B, T]` for `x` `[B, .., T, D]`. Angles are computed in f64, so that late positions are
/// as exact as early ones.
///
/// # Errors
/// If D is odd, or shapes, dtypes or devices do not fit.
pub fn rope(x: &Tensor, position_ids: Option<&Tensor>, config: &Rope) -> Result<Tensor> {
    rotate("rope", x, position_ids, config, 1.0)
}

/// The gradient of [`rope`]: the rotation back.
///
/// # Errors
/// As [`rope`].
pub fn rope_backward(dy: &Tensor, position_ids: Option<&Tensor>, config: &Rope) -> Result<Tensor> {
    rotate("rope_backward", dy, position_ids, config, -1.0)
}

fn rotate(
    op: &'static str,
    x: &Tensor,
    position_ids: Option<&Tensor>,
    config: &Rope,
    sense: f64,
) -> Result<Tensor> {
    check::float(op, x)?;
    let [.., length, depth] = *x.shape() else {
        return Err(Error::shape(op, format!("{:?}", x.shape()), "[.., T, D]"));
    };
    if depth % 2 != 0 {
        return Err(Error::shape(op, format!("{:?}", x.shape()), "an even last dimension"));
    }
    if let Some(ids) = position_ids {
        check::same_device(op, &[x, ids])?;
        check::dtype(op, ids, DType::I64)?;
        let fits = ids.shape() == [length] || (x.rank() > 2 && ids.shape() == [x.shape()[0], length]);
        if !fits {
            let got = format!("positions of shape {:?} for {:?}", ids.shape(), x.shape());
            return Err(Error::shape(op, got, "positions [T] or [B, T] for [B, .., T, D]"));
        }
    }
    let mut y = x.empty_like_for(op)?;
    if y.numel() > 0 {
        ROTATE.run(y.device(), |rotate| rotate(op, x, position_ids, config, sense, &mut y))?;
    }
    Ok(y)
}

fn rotate_on_cpu(
    op: &'static str,
    x: &Tensor,
    position_ids: Option<&Tensor>,
    config: &Rope,
    sense: f64,
    y: &mut Tensor,
) -> Result<()> {
    let length = x.size(-2)?;
    let positions = match position_ids {
        Some(ids) => elements::<i64>(op, ids)?,
        None => (0..length as i64).map(|t| config.offset + t).collect(),
    };
    for_real!(op, x.dtype(), T => run::<T>(op, x, &positions, config.base, sense, y))
}

fn run<T: Real>(
    op: &'static str,
    x: &Tensor,
    positions: &[i64],
    base: f64,
    sense: f64,
    y: &mut Tensor,
) -> Result<()> {
    let (length, width) = (x.size(-2)?, x.size(-1)?);
    let pool = x.device().pool()?;
    let table = cpu::table::<T::Wide>(&pool, positions, base, width / 2, sense);
    let rows = x.numel() / width;
    // Rows that share a row of position numbers: all of them, or one batch item's.
    let shared = rows / (positions.len() / length);
    let kernel = cpu::Rotate { table: &table, length, shared };
    rows::run::<T, 1>(
        op,
        &kernel,
        Shape { rows, width, stats: 0, sums: 0 },
        [x],
        Outputs { y: Some(y), stats: &mut [] },
    )?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use phalanx_tensor::{DType, Device, Tensor};

    use super::{Rope, rope, rope_backward};
    use crate::testing::{FLOATS, assert_close, floats, make, tolerance, values};

    #[test]
    fn equals_the_formula_and_turns_back() {
        let ids = Tensor::from_slice(&[0i64, 7, 100_003, 1 << 22, 3, 5], &[2, 3], Device::CPU).unwrap();
        for dtype in FLOATS {
            let x = make(&[2, 3, 4, 22], dtype, &floats(-2.0, 3.0)).transpose(1, 2).unwrap();
            for (ids, offset) in [(Some(&ids), 0), (None, 4)] {
                let config = Rope { base: 500.0, offset };
                let y = rope(&x, ids, &config).unwrap();
                let back = rope_backward(&y, ids, &config).unwrap();
                let (xs, ys, backs) = (values(&x), values(&y), values(&back));
                for (row, x) in xs.chunks(22).enumerate() {
                    let (b, t) = (row / 12, row % 3);
                    let position =
                        ids.map_or(offset + t as i64, |ids| ids.to_vec::<i64>().unwrap()[b * 3 + t]);
                    for i in 0..11 {
                        let angle = position as f64 * 500f64.powf(-2.0 * i as f64 / 22.0);
                        let near = |got: f64, want: f64| assert_close(got, want, 2.0 * tolerance(dtype));
                        near(ys[row * 22 + i], x[i] * angle.cos() - x[i + 11] * angle.sin());
                        near(ys[row * 22 + i + 11], x[i + 11] * angle.cos() + x[i] * angle.sin());
                        near(backs[row * 22 + i], x[i]);
                    }
                }
            }
        }
    }

    #[test]
    fn odd_depths_and_foreign_positions_are_refused() {
        let x = make(&[2, 3, 5], DType::F32, &|_| 0.0);
        assert!(rope(&x, None, &Rope::default()).is_err());
        let ids = Tensor::from_slice(&[1i64, 2], &[2], Device::CPU).unwrap();
        let x = make(&[2, 3, 4], DType::F32, &|_| 0.0);
        assert!(rope(&x, Some(&ids), &Rope::default()).is_err());
    }
}
