//! Arguments that name a dimension or a shape: negative dimensions count from the end, -1 in a shape is inferred.

use crate::{Dims, Error, Result};

/// Names a dimension: an index from the front, or a negative one from the back (-1 is the last).
pub trait Dim: Copy {
    /// The index from the front.
    ///
    /// # Errors
    /// [`Error::Range`] naming `op` if a tensor of `rank` dimensions has none such.
    fn resolve(self, rank: usize, op: &'static str) -> Result<usize>;
}

impl Dim for isize {
    fn resolve(self, rank: usize, op: &'static str) -> Result<usize> {
        let dim = if self < 0 { self + rank as isize } else { self };
        if dim < 0 || dim >= rank as isize {
            let wanted = match rank {
                0 => "none: the tensor has no dimensions".into(),
                _ => format!("-{rank} to {} for a tensor of {rank} dimensions", rank - 1),
            };
            return Err(Error::range(op, format!("dimension {self}"), wanted));
        }
        Ok(dim as usize)
    }
}

impl Dim for usize {
    fn resolve(self, rank: usize, op: &'static str) -> Result<usize> {
        isize::try_from(self).unwrap_or(isize::MAX).resolve(rank, op)
    }
}

impl Dim for i32 {
    fn resolve(self, rank: usize, op: &'static str) -> Result<usize> {
        (self as isize).resolve(rank, op)
    }
}

impl Dim for i64 {
    fn resolve(self, rank: usize, op: &'static str) -> Result<usize> {
        (self as isize).resolve(rank, op)
    }
}

/// The dimensions as indices from the front, in the order given.
///
/// # Errors
/// [`Error::Range`] for one that does not exist, [`Error::Invalid`] for one named twice.
pub fn resolve_dims<D: Dim>(op: &'static str, dims: &[D], rank: usize) -> Result<Dims> {
    let mut out = Dims::new();
    for dim in dims {
        let dim = dim.resolve(rank, op)?;
        if out.contains(&dim) {
            return Err(Error::invalid(op, format!("dimension {dim} is named twice")));
        }
        out.push(dim);
    }
    Ok(out)
}

/// `wanted` with its -1, if any, inferred from the number of elements of `from`.
///
/// # Errors
/// [`Error::Shape`] if the number of elements cannot agree.
pub fn resolve_shape(op: &'static str, from: &[usize], wanted: &[isize]) -> Result<Dims> {
    let wrong = || {
        let got = format!("{from:?} with {} elements", from.iter().product::<usize>());
        Error::shape(op, got, format!("as many elements as {wanted:?}, in which one size may be -1"))
    };
    let numel: usize = from.iter().product();
    let known = wanted
        .iter()
        .filter(|&&n| n != -1)
        .try_fold(1usize, |product, &n| usize::try_from(n).ok().and_then(|n| product.checked_mul(n)));
    let known = known.ok_or_else(wrong)?;
    let inferred = match wanted.iter().filter(|&&n| n == -1).count() {
        0 if known == numel => 0,
        1 if known > 0 && numel.is_multiple_of(known) => numel / known,
        _ => return Err(wrong()),
    };
    Ok(wanted.iter().map(|&n| if n == -1 { inferred } else { n as usize }).collect())
}
