//! [`Layout`]: where a tensor's elements lie in its storage: shape, strides and offset, counted in elements. [`Loops`]: the nest of loops
//! that visits them.

use std::cmp::Reverse;

use smallvec::SmallVec;

use crate::{Error, Result};

/// Sizes or strides, one a dimension; inline up to four dimensions.
pub type Dims = SmallVec<[usize; 4]>;

/// Element `[i0, i1, ..]` of a tensor lies at `offset + i0 * strides[0] + i1 * strides[1] + ..`, in elements.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layout {
    /// Sizes and strides of up to [`FEW`] dimensions, with zeros behind: copied and compared without a loop.
    few: [[usize; FEW]; 2],
    /// Those of more.
    many: Option<Box<[Dims; 2]>>,
    rank: u32,
    contiguous: bool,
    numel: usize,
    offset: usize,
}

/// Dimensions that a layout holds itself.
const FEW: usize = 4;

impl Layout {
    /// Row-major without gaps, from offset 0.
    pub fn contiguous(shape: &[usize]) -> Layout {
        let (few, rank, contiguous, numel) = Default::default();
        let mut out = Layout { few, many: None, rank, contiguous, numel, offset: 0 };
        out.set_contiguous(shape);
        out
    }

    /// [`Layout::contiguous`], made where it stays: to move it would take longer.
    #[inline]
    pub(crate) fn set_contiguous(&mut self, shape: &[usize]) {
        let mut numel = 1;
        if shape.len() <= FEW {
            let mut stride = 1;
            for d in (0..FEW).rev() {
                let size = shape.get(d).copied();
                self.few[0][d] = size.unwrap_or(0);
                self.few[1][d] = if size.is_some() { stride } else { 0 };
                stride *= size.unwrap_or(1).max(1);
                numel *= size.unwrap_or(1);
            }
            self.many = None;
        } else {
            numel = shape.iter().product();
            self.few = Default::default();
            self.many = Some(Box::new([Dims::from_slice(shape), contiguous_strides(shape)]));
        }
        (self.rank, self.contiguous, self.numel, self.offset) = (shape.len() as u32, true, numel, 0);
    }

    /// The same as another, made where it stays.
    #[inline]
    pub(crate) fn set_like(&mut self, other: &Layout) {
        self.few = other.few;
        if self.many.is_some() || other.many.is_some() {
            self.many.clone_from(&other.many);
        }
        (self.rank, self.contiguous, self.numel, self.offset) =
            (other.rank, other.contiguous, other.numel, other.offset);
    }

    /// Any strides. Views that the library makes stay inside their storage; so must this one: see
    /// [`crate::Tensor::as_strided`], which checks it.
    pub(crate) fn strided(shape: Dims, strides: Dims, offset: usize) -> Layout {
        let (rank, numel) = (shape.len() as u32, shape.iter().product());
        let contiguous = is_contiguous(&shape, &strides);
        let (mut few, mut many) = ([[0; FEW]; 2], None);
        if shape.len() <= FEW {
            few[0][..shape.len()].copy_from_slice(&shape);
            few[1][..shape.len()].copy_from_slice(&strides);
        } else {
            many = Some(Box::new([shape, strides]));
        }
        Layout { few, many, rank, contiguous, numel, offset }
    }

    #[inline]
    fn part(&self, part: usize) -> &[usize] {
        match &self.many {
            None => &self.few[part][..self.rank()],
            Some(many) => &many[part],
        }
    }

    /// Sizes, outermost first.
    #[inline]
    pub fn shape(&self) -> &[usize] {
        self.part(0)
    }

    /// Elements between neighbours along each dimension.
    #[inline]
    pub fn strides(&self) -> &[usize] {
        self.part(1)
    }

    /// The sizes, to keep.
    #[inline]
    pub fn dims(&self) -> Dims {
        match &self.many {
            None => Dims::from_buf_and_len(self.few[0], self.rank()),
            Some(many) => many[0].clone(),
        }
    }

    /// Whether the sizes are the same.
    #[inline]
    pub fn same_shape(&self, other: &Layout) -> bool {
        let few = self.rank == other.rank && self.few[0] == other.few[0];
        few && (self.many.is_none() || self.shape() == other.shape())
    }

    /// The first element's position in the storage.
    #[inline]
    pub fn offset(&self) -> usize {
        self.offset
    }

    /// Number of dimensions.
    #[inline]
    pub fn rank(&self) -> usize {
        self.rank as usize
    }

    /// Number of elements.
    #[inline]
    pub fn numel(&self) -> usize {
        self.numel
    }

    /// Whether the elements lie in row-major order without gaps (at any offset). Dimensions of size 1 may have
    /// any stride; a tensor without elements is contiguous.
    #[inline]
    pub fn is_contiguous(&self) -> bool {
        self.contiguous
    }

    /// One past the highest position touched; `offset` if there are no elements.
    pub fn end(&self) -> usize {
        if self.numel() == 0 {
            return self.offset;
        }
        let last: usize = self.shape().iter().zip(self.strides()).map(|(&n, &s)| (n - 1) * s).sum();
        self.offset + last + 1
    }

    /// Whether two indices may name the same position (an expanded dimension).
    pub fn overlaps_itself(&self) -> bool {
        if self.numel() < 2 {
            return false;
        }
        let mut dims: SmallVec<[(usize, usize); 5]> =
            self.strides().iter().copied().zip(self.shape().iter().copied()).filter(|d| d.1 > 1).collect();
        dims.sort_unstable();
        let mut reach = 0;
        for (stride, size) in dims {
            if stride <= reach {
                return true;
            }
            reach += stride * (size - 1);
        }
        false
    }

    /// The dimensions in the order of memory: what to permute the layout by, for its elements to be read as they lie. Sizes of 1 come
    /// first. `None` where that changes nothing, and of a layout that overlaps itself.
    pub fn memory_order(&self) -> Option<Dims> {
        if self.contiguous || self.overlaps_itself() {
            return None;
        }
        let (shape, strides) = (self.shape(), self.strides());
        let mut order: Dims = (0..self.rank()).collect();
        order.sort_by_key(|&d| if shape[d] > 1 { (1, Reverse(strides[d])) } else { (0, Reverse(0)) });
        let same = order.iter().filter(|&&d| shape[d] > 1).is_sorted();
        (!same).then_some(order)
    }

    /// Whether whatever reads all elements in row-major order is quicker with a contiguous copy: neighbours in memory are far apart in
    /// that order, or runs have a few elements only.
    pub fn is_scattered(&self) -> bool {
        const FEW: usize = 16;
        if self.contiguous || self.overlaps_itself() {
            return false;
        }
        let loops = Loops::new(self.shape(), [self.strides()]);
        loops.transposed_axis().is_some() || loops.sizes().len() > 1 && loops.inner() < FEW
    }

    /// Sizes and strides, to make another layout of.
    fn to_parts(&self) -> (Dims, Dims) {
        (self.dims(), Dims::from_slice(self.strides()))
    }

    pub(crate) fn narrow(&self, dim: usize, start: usize, length: usize) -> Layout {
        let (mut shape, strides) = self.to_parts();
        shape[dim] = length;
        // Without elements the offset stays where it is known to lie inside the storage.
        let skipped = if shape.contains(&0) { 0 } else { start * strides[dim] };
        Layout::strided(shape, strides, self.offset + skipped)
    }

    pub(crate) fn step(&self, dim: usize, step: usize) -> Layout {
        let (mut shape, mut strides) = self.to_parts();
        // A larger step picks the same elements, and its stride might overflow.
        let step = step.min(shape[dim].max(1));
        shape[dim] = shape[dim].div_ceil(step);
        strides[dim] *= step;
        Layout::strided(shape, strides, self.offset)
    }

    pub(crate) fn permute(&self, dims: &[usize]) -> Layout {
        let (shape, strides) = (self.shape(), self.strides());
        let picked = |from: &[usize]| dims.iter().map(|&d| from[d]).collect();
        Layout::strided(picked(shape), picked(strides), self.offset)
    }

    pub(crate) fn squeeze(&self, dim: usize) -> Layout {
        let (mut shape, mut strides) = self.to_parts();
        shape.remove(dim);
        strides.remove(dim);
        Layout::strided(shape, strides, self.offset)
    }

    pub(crate) fn unsqueeze(&self, dim: usize) -> Layout {
        let (mut shape, mut strides) = self.to_parts();
        let stride = shape.get(dim).map_or(1, |&n| n * strides[dim]);
        shape.insert(dim, 1);
        strides.insert(dim, stride);
        Layout::strided(shape, strides, self.offset)
    }

    pub(crate) fn broadcast(&self, shape: &[usize]) -> Option<Layout> {
        let lead = shape.len().checked_sub(self.rank())?;
        checked_numel(shape)?;
        let mut strides: Dims = SmallVec::from_elem(0, lead);
        for (i, (&size, &stride)) in self.shape().iter().zip(self.strides()).enumerate() {
            strides.push(match (size, shape[lead + i]) {
                (from, to) if from == to => stride,
                (1, _) => 0,
                _ => return None,
            });
        }
        Some(Layout::strided(Dims::from_slice(shape), strides, self.offset))
    }

    /// The same elements in another shape, if strides can express it.
    pub(crate) fn reshape(&self, shape: &[usize]) -> Option<Layout> {
        if self.is_contiguous() {
            return Some(Layout { offset: self.offset, ..Layout::contiguous(shape) });
        }
        let loops = Loops::new(self.shape(), [self.strides()]);
        let (mut strides, mut dim) = (Dims::from_elem(0, shape.len()), shape.len());
        for axis in (0..loops.sizes().len()).rev() {
            let (mut left, mut stride) = (loops.sizes()[axis], loops.strides()[axis][0]);
            while left > 1 {
                dim = dim.checked_sub(1)?;
                if shape[dim] == 1 {
                    strides[dim] = stride;
                    continue;
                }
                if left % shape[dim] != 0 {
                    return None;
                }
                strides[dim] = stride;
                stride *= shape[dim];
                left /= shape[dim];
            }
        }
        Some(Layout::strided(Dims::from_slice(shape), strides, self.offset))
    }
}

fn is_contiguous(shape: &[usize], strides: &[usize]) -> bool {
    let mut expected = 1;
    shape.contains(&0)
        || shape.iter().zip(strides).rev().all(|(&size, &stride)| {
            let fits = size == 1 || stride == expected;
            expected *= size;
            fits
        })
}

/// The number of elements of a shape; `None` if that of its non-zero sizes overflows, so that no order of the
/// dimensions makes trouble.
pub(crate) fn checked_numel(shape: &[usize]) -> Option<usize> {
    let sizes = shape.iter().filter(|&&n| n > 0);
    let product = sizes.into_iter().try_fold(1usize, |product, &n| product.checked_mul(n))?;
    Some(if shape.contains(&0) { 0 } else { product })
}

/// The row-major strides of a shape.
pub fn contiguous_strides(shape: &[usize]) -> Dims {
    let mut strides = Dims::from_elem(1, shape.len());
    for i in (1..shape.len()).rev() {
        strides[i - 1] = strides[i] * shape[i].max(1);
    }
    strides
}

/// The shape that several shapes broadcast to (as in NumPy: aligned at the last dimension, 1 stretches).
///
/// # Errors
/// [`Error::Shape`] naming `op` if two sizes differ and neither is 1.
pub fn broadcast_shapes(op: &'static str, left: &[usize], right: &[usize]) -> Result<Dims> {
    if left == right {
        return Ok(Dims::from_slice(left));
    }
    let rank = left.len().max(right.len());
    let size = |shape: &[usize], i: usize| (i + shape.len()).checked_sub(rank).map_or(1, |i| shape[i]);
    (0..rank)
        .map(|i| match (size(left, i), size(right, i)) {
            (l, r) if l == r || r == 1 => Ok(l),
            (1, r) => Ok(r),
            _ => Err(Error::shape(
                op,
                format!("shapes {left:?} and {right:?}"),
                "shapes that broadcast: sizes equal or 1, aligned at the last dimension",
            )),
        })
        .collect()
}

/// A nest of loops over `N` layouts of one shape, with neighbouring dimensions merged wherever all layouts allow,
/// and dimensions of size 1 dropped. The innermost loop is a run of [`Loops::inner`] elements.
#[derive(Clone, Debug)]
pub struct Loops<const N: usize> {
    sizes: Dims,
    strides: SmallVec<[[usize; N]; 5]>,
}

impl<const N: usize> Loops<N> {
    /// Loops over `shape`, in row-major order.
    pub fn new(shape: &[usize], strides: [&[usize]; N]) -> Loops<N> {
        let mut loops = Loops { sizes: Dims::new(), strides: SmallVec::new() };
        for (dim, &size) in shape.iter().enumerate() {
            if size == 1 {
                continue;
            }
            let here: [usize; N] = std::array::from_fn(|n| strides[n][dim]);
            match (loops.sizes.last_mut(), loops.strides.last_mut()) {
                (Some(outer), Some(last)) if (0..N).all(|n| last[n] == here[n] * size) => {
                    *outer *= size;
                    *last = here;
                }
                _ => {
                    loops.sizes.push(size);
                    loops.strides.push(here);
                }
            }
        }
        if loops.sizes.is_empty() {
            loops.sizes.push(1);
            loops.strides.push([1; N]);
        }
        loops
    }

    /// Elements in one run.
    pub fn inner(&self) -> usize {
        self.sizes[self.sizes.len() - 1]
    }

    /// Strides along a run.
    pub fn inner_strides(&self) -> [usize; N] {
        self.strides[self.strides.len() - 1]
    }

    /// Number of runs.
    pub fn runs(&self) -> usize {
        self.sizes[..self.sizes.len() - 1].iter().product()
    }

    /// Merged sizes, outermost first; the last is the run.
    pub fn sizes(&self) -> &[usize] {
        &self.sizes
    }

    /// Merged strides, outermost first.
    pub fn strides(&self) -> &[[usize; N]] {
        &self.strides
    }

    /// Where run number `run` begins in each layout, without the layouts' own offsets.
    pub fn start(&self, mut run: usize) -> [usize; N] {
        let mut at = [0; N];
        for axis in (0..self.sizes.len() - 1).rev() {
            // Outermost there is nothing to divide by.
            let index = if axis == 0 { run } else { run % self.sizes[axis] };
            run /= if axis == 0 { 1 } else { self.sizes[axis] };
            for (a, stride) in at.iter_mut().zip(self.strides[axis]) {
                *a += index * stride;
            }
        }
        at
    }
}

/// Fewer rows or columns are not worth a tile: a cache line is then used up within a few runs.
const TILE_MIN: usize = 8;

impl Loops<1> {
    /// The outer loop along which the elements are best read, if that is closer in memory than the innermost one: a copy then transposes
    /// tiles of both. None where plain runs are as good.
    pub(crate) fn transposed_axis(&self) -> Option<usize> {
        let [across] = self.inner_strides();
        let outer = self.sizes().len() - 1;
        let closer = |&axis: &usize| {
            let [down] = self.strides()[axis];
            down > 0 && down < across && self.sizes()[axis] >= TILE_MIN
        };
        let axis = (0..outer).filter(closer).min_by_key(|&axis| self.strides()[axis])?;
        (self.inner() >= TILE_MIN).then_some(axis)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reshape_is_a_view_exactly_where_strides_can_express_it() {
        let base = Layout::contiguous(&[2, 3, 4]);
        let t = base.permute(&[0, 2, 1]);
        assert!(t.reshape(&[2, 12]).is_none());
        assert_eq!(t.reshape(&[2, 2, 2, 3]).unwrap().strides(), &[12, 2, 1, 4]);
        assert_eq!(base.narrow(1, 1, 2).reshape(&[2, 8]).unwrap().strides(), &[12, 1]);
        assert!(base.narrow(1, 1, 2).reshape(&[16]).is_none());
    }

    #[test]
    fn the_order_of_memory_is_that_of_the_strides() {
        let base = Layout::contiguous(&[2, 3, 1, 4]);
        let order = |layout: &Layout| layout.memory_order().map(|order| order.to_vec());
        let channels_last = base.permute(&[0, 3, 1, 2]);
        assert_eq!(order(&channels_last), Some(vec![3, 0, 2, 1]));
        assert!(channels_last.permute(&[3, 0, 2, 1]).is_contiguous());
        // With gaps too; not where the order is row-major already, or two indices name one place.
        assert_eq!(order(&base.narrow(3, 1, 2).permute(&[3, 0, 1, 2])), Some(vec![3, 1, 2, 0]));
        assert_eq!(order(&base.narrow(3, 1, 2)), None);
        assert_eq!(order(&base.permute(&[2, 0, 1, 3])), None);
        let expanded = Layout::contiguous(&[1, 2]).broadcast(&[3, 2]).unwrap();
        assert_eq!(order(&expanded.permute(&[1, 0])), None);
        assert_eq!(order(&Layout::contiguous(&[0, 3]).permute(&[1, 0])), None);
    }

    #[test]
    fn scattered_is_what_tiles_turn_or_has_short_runs() {
        let base = Layout::contiguous(&[33, 5, 33]);
        assert!(base.permute(&[2, 1, 0]).is_scattered() && !base.permute(&[1, 0, 2]).is_scattered());
        assert!(base.narrow(2, 0, 3).is_scattered() && !base.narrow(1, 0, 3).is_scattered());
        assert!(
            !base.is_scattered() && !Layout::contiguous(&[1, 3]).broadcast(&[9, 3]).unwrap().is_scattered()
        );
    }

    #[test]
    fn broadcasting_follows_numpy() {
        assert_eq!(&broadcast_shapes("add", &[3, 1], &[4]).unwrap()[..], &[3, 4]);
        assert_eq!(&broadcast_shapes("add", &[0], &[1]).unwrap()[..], &[0]);
        let error = broadcast_shapes("add", &[3], &[4]).unwrap_err().to_string();
        assert!(error.contains("add") && error.contains("[3]") && error.contains("[4]"), "{error}");
    }

    #[test]
    fn expanded_layouts_overlap_themselves() {
        assert!(Layout::contiguous(&[3, 1]).broadcast(&[3, 2]).unwrap().overlaps_itself());
        assert!(!Layout::contiguous(&[3, 2]).permute(&[1, 0]).overlaps_itself());
    }

    #[test]
    fn loops_merge_what_is_adjacent() {
        let l = Layout::contiguous(&[2, 3, 4]);
        assert_eq!(Loops::new(l.shape(), [l.strides()]).sizes(), &[24]);
        let p = l.permute(&[1, 0, 2]);
        let loops = Loops::new(p.shape(), [p.strides()]);
        assert_eq!((loops.sizes(), loops.runs(), loops.start(3)), (&[3, 2, 4][..], 6, [16]));
    }
}
