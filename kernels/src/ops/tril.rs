//! Triangles of matrices.

use phalanx_tensor::{Element, Error, Result, Tensor};

use crate::pointwise::cuda::Expression;
use crate::pointwise::evaluate;
use crate::real::for_element;
use crate::source::Source;

/// The elements of each matrix (the last two dimensions) on and below a diagonal, zero above it. Diagonal 0 is the
/// main one, positive ones lie above it.
///
/// # Errors
/// If there are fewer than two dimensions.
pub fn tril(x: &Tensor, diagonal: isize) -> Result<Tensor> {
    let cuda = "(i64)(i % k[0]) - (i64)(i / k[0] % k[1]) <= k[2] ? x[0] : X(0)";
    triangle("tril", x, (diagonal, cuda), |row, columns| {
        (0, (row + 1).saturating_add(diagonal).clamp(0, columns))
    })
}

/// The elements of each matrix on and above a diagonal, zero below it.
///
/// # Errors
/// If there are fewer than two dimensions.
pub fn triu(x: &Tensor, diagonal: isize) -> Result<Tensor> {
    let cuda = "(i64)(i % k[0]) - (i64)(i / k[0] % k[1]) >= k[2] ? x[0] : X(0)";
    triangle("triu", x, (diagonal, cuda), |row, columns| {
        (row.saturating_add(diagonal).clamp(0, columns), columns)
    })
}

/// Keeps columns `keep(row, columns)` of each row; on a GPU, what the text says for the columns, the rows and the
/// diagonal.
fn triangle(
    op: &'static str,
    x: &Tensor,
    (diagonal, text): (isize, &'static str),
    keep: impl Fn(isize, isize) -> (isize, isize) + Sync,
) -> Result<Tensor> {
    let &[.., rows, columns] = x.shape() else {
        return Err(Error::shape(op, format!("{:?}", x.shape()), "at least two dimensions"));
    };
    let mut out = x.empty_like_for(op)?;
    let numbers = [columns as i64, rows as i64, (diagonal as i64).clamp(-(rows as i64), columns as i64)];
    evaluate(op, &Expression::of_bits(text, x.dtype(), &numbers), [x], &mut out, |out| {
        if out.numel() == 0 {
            return Ok(());
        }
        let keep = |row: usize| {
            let (start, end) = keep((row % rows) as isize, columns as isize);
            start as usize..end as usize
        };
        for_element!(x.dtype(), T => cut::<T>(op, x, columns, keep, out))
    })?;
    Ok(out)
}

fn cut<T: Element>(
    op: &'static str,
    x: &Tensor,
    columns: usize,
    keep: impl Fn(usize) -> std::ops::Range<usize> + Sync,
    out: &mut Tensor,
) -> Result<()> {
    let (source, pool, numel) = (Source::<T>::open(op, x, x.shape())?, x.device().pool()?, out.numel());
    let mut target = out.write::<T>(op)?;
    let rows_a_piece = crate::pointwise::PIECE.div_ceil(columns);
    pool.for_each_chunk(&mut target[..numel], rows_a_piece * columns, |piece, target| {
        for (i, target) in target.chunks_mut(columns).enumerate() {
            let row = piece * rows_a_piece + i;
            let kept = keep(row);
            target.fill(T::zeroed());
            source.copy_to(row * columns + kept.start, &mut target[kept]);
        }
    });
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::{tril, triu};
    use crate::testing::{tensors, values};

    #[test]
    fn triangles_are_cut_at_the_diagonal() {
        for x in tensors(&|i| i as f64 % 50.0 + 1.0).iter().filter(|x| x.rank() > 1) {
            let [.., rows, columns] = *x.shape() else { unreachable!() };
            for diagonal in [isize::MIN, -200, -1, 0, 2, 200, isize::MAX] {
                let (low, high) = (values(&tril(x, diagonal).unwrap()), values(&triu(x, diagonal).unwrap()));
                for (at, x) in values(x).into_iter().enumerate() {
                    let above = (at % columns) as isize - (at / columns % rows) as isize;
                    assert_eq!(low[at], if above <= diagonal { x } else { 0.0 });
                    assert_eq!(high[at], if above >= diagonal { x } else { 0.0 });
                }
            }
        }
    }
}
