//! Margins around a tensor: of a constant, or of the tensor's own elements.

use phalanx_kernels as kernels;
use phalanx_tensor::{Error, Scalar};
use smallvec::SmallVec;

use super::frame::{composed, named, record_view};
use crate::{Result, Var};

/// Margins of a constant around a tensor, or crops.
///
/// Derivative: `dy` with the margins taken off, and zeros where the input was cropped: the same with negative
/// margins.
impl Var {
    /// Puts `before` elements of `value` before and `after` behind, along each of the last dimensions: `margins[i]`
    /// is `(before, after)` of dimension `rank - 1 - i`. Negative margins crop.
    ///
    /// # Errors
    /// If there are more margins than dimensions, or they crop more than there is.
    pub fn pad(&self, margins: &[(isize, isize)], value: impl Into<Scalar>) -> Result<Var> {
        let y = kernels::pad(self.tensor(), margins, value.into())?;
        let back: SmallVec<[(isize, isize); 4]> = margins.iter().map(|&(b, a)| (-b, -a)).collect();
        record_view("pad", self, y, move |dy| dy.pad(&back, 0))
    }
}

// Margins made of the tensor's own elements: mirrored, the outermost repeated, or from the other end.
//
// Composed of parts, reversals and joins, one dimension after another; the derivative adds up what an element was put to.

/// What [`Var::pad_mode`] puts into a margin.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PadMode {
    /// The elements mirrored at the outermost one, which does not repeat: `c b | a b c | b a`.
    Reflect,
    /// The outermost element: `a a | a b c | c c`.
    Replicate,
    /// The elements at the other end: `b c | a b c | a b`.
    Circular,
}

impl Var {
    /// [`Var::pad`] with margins made of the tensor's elements. `margins[i]` is `(before, after)` of dimension
    /// `rank - 1 - i`; negative margins crop.
    ///
    /// # Errors
    /// If there are more margins than dimensions, or they crop more elements than the dimension has. If a `Reflect`
    /// margin is not smaller than the dimension, a `Circular` margin is larger than the dimension after cropping, or a
    /// `Replicate` margin belongs to an empty dimension.
    pub fn pad_mode(&self, margins: &[(isize, isize)], mode: PadMode) -> Result<Var> {
        const OP: &str = "pad";
        if margins.len() > self.rank() {
            let got = format!("{} margins for shape {:?}", margins.len(), self.shape());
            return Err(Error::shape(OP, got, "at most one pair a dimension").into());
        }
        let all = |x: &Var| {
            let dims = (0..x.rank()).rev();
            dims.zip(margins).try_fold(x.clone(), |x, (dim, &margin)| along(&x, dim, margin, mode))
        };
        // Gradients of the halves are added in f32.
        if self.dtype().is_float() { composed(OP, &[self], |x| all(&x[0])) } else { named(OP, all(self)) }
    }
}

fn along(x: &Var, dim: usize, (before, after): (isize, isize), mode: PadMode) -> Result<Var> {
    let size = x.shape()[dim];
    let wrong = |wanted: &str| {
        let got = format!("{mode:?} margins {before} and {after} of dimension {dim} of size {size}");
        Error::shape("pad", got, wanted)
    };
    let crop = [before.min(0).unsigned_abs(), after.min(0).unsigned_abs()];
    let margin = [before.max(0).unsigned_abs(), after.max(0).unsigned_abs()];
    if margin == [0, 0] && crop == [0, 0] {
        return Ok(x.clone());
    }
    let left = size.checked_sub(crop[0].saturating_add(crop[1]));
    let left = left.ok_or_else(|| wrong("margins that crop no more than there is"))?;
    let inside = x.narrow(dim, crop[0], left)?;
    if margin == [0, 0] {
        return Ok(inside);
    }
    let (first, last) = match mode {
        PadMode::Reflect => {
            if margin.iter().any(|&n| n >= size) {
                return Err(wrong("mirrored margins smaller than the dimension").into());
            }
            let mirrored = |start: usize, n: usize| x.narrow(dim, start, n)?.flip(&[dim]);
            (mirrored(usize::from(margin[0] > 0), margin[0])?, mirrored(size - 1 - margin[1], margin[1])?)
        }
        PadMode::Replicate => {
            if size == 0 {
                return Err(wrong("a dimension with an element to repeat").into());
            }
            let repeated = |at: usize, n: usize| -> Result<Var> {
                let mut sizes = vec![-1; x.rank()];
                sizes[dim] = isize::try_from(n).map_err(|_| wrong("margins below 2^63"))?;
                x.narrow(dim, at, 1)?.expand(&sizes)
            };
            (repeated(0, margin[0])?, repeated(size - 1, margin[1])?)
        }
        PadMode::Circular => {
            if margin.iter().any(|&n| n > left) {
                return Err(wrong("circular margins no larger than what is left of the dimension").into());
            }
            (inside.narrow(dim, left - margin[0], margin[0])?, inside.narrow(dim, 0, margin[1])?)
        }
    };
    let whole = margin[0].checked_add(left).and_then(|n| n.checked_add(margin[1]));
    if whole.is_none_or(|n| isize::try_from(n).is_err()) {
        return Err(wrong("a padded size below 2^63").into());
    }
    let parts: Vec<Var> = [first, inside, last].into_iter().filter(|part| part.shape()[dim] > 0).collect();
    if parts.is_empty() { x.narrow(dim, 0, 0) } else { Var::cat(&parts, dim) }
}

#[cfg(test)]
mod tests {
    use phalanx_tensor::{DType, Device};

    use super::PadMode;
    use crate::Var;
    use crate::ops::testing::check_twice;

    #[test]
    fn constant_margins_have_their_derivatives() {
        check_twice(&[&[2, 3]], |v| {
            let y = v[0].pad(&[(1, 2), (0, 1)], 0.5)?;
            y.mul(&y)
        });
        check_twice(&[&[4, 3]], |v| {
            let y = v[0].pad(&[(-1, 1), (2, -3)], 0.5)?;
            y.mul(&y)
        });
    }

    #[test]
    fn margins_are_pytorchs() {
        let x = Var::from_slice(&[1i64, 2, 3, 4], &[4], Device::CPU).unwrap();
        let padded = |margin, mode| x.pad_mode(&[margin], mode).unwrap().to_vec::<i64>().unwrap();
        assert_eq!(padded((2, 3), PadMode::Reflect), [3, 2, 1, 2, 3, 4, 3, 2, 1]);
        assert_eq!(padded((2, 1), PadMode::Replicate), [1, 1, 1, 2, 3, 4, 4]);
        assert_eq!(padded((4, 1), PadMode::Circular), [1, 2, 3, 4, 1, 2, 3, 4, 1]);
        assert_eq!(padded((-1, 2), PadMode::Reflect), [2, 3, 4, 3, 2]);
        assert_eq!(padded((-1, 2), PadMode::Circular), [2, 3, 4, 2, 3]);
        assert_eq!(padded((1, -2), PadMode::Replicate), [1, 1, 2]);
        assert_eq!(padded((-4, 0), PadMode::Replicate).len(), 0);
    }

    #[test]
    fn margins_have_their_derivatives() {
        for mode in [PadMode::Reflect, PadMode::Replicate, PadMode::Circular] {
            check_twice(&[&[2, 3, 4]], |v| v[0].tanh()?.pad_mode(&[(3, 1), (2, 0)], mode));
            check_twice(&[&[2, 4]], |v| v[0].tanh()?.pad_mode(&[(-1, 2)], mode));
        }
    }

    #[test]
    fn margins_that_have_no_elements_are_refused() {
        let x = Var::arange(0, 3, 1, DType::F32, Device::CPU).unwrap();
        let error = |margin, mode| x.pad_mode(&[margin], mode).unwrap_err().to_string();
        assert!(
            error((3, 0), PadMode::Reflect)
                .contains("pad: got Reflect margins 3 and 0 of dimension 0 of size 3")
        );
        assert!(error((0, 4), PadMode::Circular).contains("circular"));
        assert!(error((isize::MAX, isize::MAX), PadMode::Replicate).starts_with("pad"));
        assert!(error((isize::MIN, 0), PadMode::Replicate).contains("crop"));
        let refused =
            x.narrow(0, 0, 0).unwrap().pad_mode(&[(1, 0)], PadMode::Replicate).err().unwrap().to_string();
        assert!(refused.contains("of dimension 0 of size 0"), "{refused}");
        let refused = x.pad_mode(&[(0, 0); 2], PadMode::Circular).err().unwrap().to_string();
        assert!(refused.contains("pad: got 2 margins for shape [3]"), "{refused}");
    }
}
