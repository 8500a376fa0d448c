//! [`StridedView`]: a tensor as the kernels take it, [batch items, heads, rows, columns] by four strides.

use phalanx_tensor::cuda::{Args, Boxes, Scratch, Traffic};
use phalanx_tensor::{Result, Tensor};

/// A tensor of any strides. If four numbers do not describe them, a contiguous copy is made first.
pub(super) struct StridedView {
    tensor: Tensor,
    gathered: Option<Scratch>,
    strides: [usize; 4],
}

impl StridedView {
    /// An operand, whose columns are to lie together.
    pub(super) fn operand(op: &'static str, tensor: &Tensor) -> Result<StridedView> {
        StridedView::new(op, tensor.clone(), true)
    }

    /// An operand of which boxes are copied: every step is a multiple of 16 bytes, and none is 0.
    pub(super) fn of_boxes(op: &'static str, tensor: &Tensor) -> Result<StridedView> {
        let view = StridedView::operand(op, tensor)?;
        let repeats =
            tensor.shape().iter().zip(tensor.strides()).any(|(&size, &stride)| size > 1 && stride == 0);
        match view.is_packed() && !repeats {
            true => Ok(view),
            false => StridedView::gathered(op, tensor.clone()),
        }
    }

    /// A mask, seen in the scores' shape.
    pub(super) fn mask(op: &'static str, tensor: &Tensor, scores: &[usize]) -> Result<StridedView> {
        StridedView::new(op, tensor.broadcast_for(op, scores)?, false)
    }

    fn new(op: &'static str, tensor: Tensor, together: bool) -> Result<StridedView> {
        let strides = four(tensor.shape(), tensor.strides());
        let fits = strides.filter(|strides| !together || strides[3] == 1);
        match fits {
            Some(strides) => Ok(StridedView { tensor, gathered: None, strides }),
            None => StridedView::gathered(op, tensor),
        }
    }

    /// A contiguous copy.
    fn gathered(op: &'static str, tensor: Tensor) -> Result<StridedView> {
        let (gathered, strides) = (Some(Scratch::of(op, &tensor)?), contiguous(tensor.shape()));
        Ok(StridedView { tensor, gathered, strides })
    }

    /// Whether all rows are whole packets of 16 bytes.
    pub(super) fn is_packed(&self) -> bool {
        let packet = 16 / self.tensor.dtype().size();
        let columns = self.tensor.shape().last().copied().unwrap_or(1);
        let offset = if self.gathered.is_some() { 0 } else { self.tensor.offset() };
        self.strides[..3].iter().chain([&columns, &offset]).all(|n| n.is_multiple_of(packet))
    }

    /// The pointer.
    pub(super) fn pointer<'a>(&'a self, args: Args<'a>) -> Result<Args<'a>> {
        match &self.gathered {
            Some(scratch) => Ok(args.scratch(scratch)),
            None => args.read(&self.tensor),
        }
    }

    /// The map of boxes of 64 columns and so many rows.
    pub(super) fn boxes<'a>(&'a self, args: Args<'a>, rows: usize) -> Result<Args<'a>> {
        let shape = self.tensor.shape();
        let size = |back: usize| if shape.len() >= back { shape[shape.len() - back] as u64 } else { 1 };
        let items = shape[..shape.len().saturating_sub(3)].iter().product::<usize>() as u64;
        let sizes = [size(1), size(2), size(3), items];
        let [batch, head, row, _] = self.strides;
        // The driver wants a stride of a single place too.
        let strides = [row, head, batch].map(|stride| (stride.max(8) * size_of::<u16>()) as u64);
        let boxes = Boxes { sizes, strides, window: [64, rows as u32] };
        match &self.gathered {
            Some(scratch) => args.scratch_boxes(scratch, &boxes),
            None => args.read_boxes(&self.tensor, 0, &boxes),
        }
    }

    /// The kernel does not read what its arguments point to here.
    pub(super) fn unread<'a>(&self, args: Args<'a>) -> Args<'a> {
        let bytes = (self.tensor.numel() * self.tensor.dtype().size()) as u64;
        args.with_traffic(|t| Traffic { read: t.read.saturating_sub(bytes), ..t })
    }

    /// The first `N` strides: batch, head, row, column.
    pub(super) fn strides<const N: usize>(&self) -> [u64; N] {
        std::array::from_fn(|i| self.strides[i] as u64)
    }
}

/// The strides of a contiguous tensor, as [`StridedView::strides`].
fn contiguous(shape: &[usize]) -> [usize; 4] {
    let size = |back: usize| if shape.len() >= back { shape[shape.len() - back] } else { 1 };
    [size(1) * size(2) * size(3), size(1) * size(2), size(1), 1]
}

/// Strides in four numbers: all dimensions before the heads as one. Those of a single place say nothing, and are the
/// least there are.
pub(super) fn four(shape: &[usize], strides: &[usize]) -> Option<[usize; 4]> {
    let rank = shape.len();
    let of = |back: usize| if rank >= back && shape[rank - back] > 1 { strides[rank - back] } else { 0 };
    let columns = if shape[rank - 1] > 1 { strides[rank - 1] } else { 1 };
    let lead = rank.saturating_sub(3);
    Some([collapsed(&shape[..lead], &strides[..lead])?, of(3), of(2), columns])
}

/// The stride of dimensions walked as one, if they have one.
fn collapsed(shape: &[usize], strides: &[usize]) -> Option<usize> {
    let mut known: Option<(usize, usize)> = None; // the innermost stride, and the next one's
    for (&size, &stride) in shape.iter().zip(strides).rev().filter(|(size, _)| **size > 1) {
        known = match known {
            None => Some((stride, stride * size)),
            Some((first, next)) if next == stride => Some((first, stride * size)),
            Some(_) => return None,
        };
    }
    Some(known.map_or(0, |(first, _)| first))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dimensions_before_the_heads_are_one_if_their_strides_allow_it() {
        assert_eq!(four(&[5, 7], &[7, 1]), Some([0, 0, 7, 1]));
        assert_eq!(four(&[2, 3, 5, 7], &[105, 7, 21, 1]), Some([105, 7, 21, 1]));
        assert_eq!(four(&[4, 2, 3, 5, 7], &[210, 105, 35, 7, 1]), Some([105, 35, 7, 1]));
        assert_eq!(four(&[4, 2, 3, 5, 7], &[105, 420, 35, 7, 1]), None);
        assert_eq!(four(&[4, 2, 3, 5, 7], &[0, 0, 35, 0, 1]), Some([0, 35, 0, 1]));
        assert_eq!(four(&[1, 1, 3, 1, 1], &[9, 9, 9, 9, 9]), Some([0, 9, 0, 1]));
        assert_eq!(contiguous(&[4, 2, 3, 5, 7]), [105, 35, 7, 1]);
        assert_eq!(contiguous(&[5, 7]), [35, 35, 7, 1]);
    }
}
