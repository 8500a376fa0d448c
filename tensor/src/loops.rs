//! Loops over the elements of tensors with any strides.

use smallvec::SmallVec;

use crate::Dims;

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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Layout;

    #[test]
    fn loops_merge_what_is_adjacent() {
        let l = Layout::contiguous(&[2, 3, 4]);
        assert_eq!(Loops::new(l.shape(), [l.strides()]).sizes(), &[24]);
        let p = l.permute(&[1, 0, 2]);
        let loops = Loops::new(p.shape(), [p.strides()]);
        assert_eq!((loops.sizes(), loops.runs(), loops.start(3)), (&[3, 2, 4][..], 6, [16]));
    }
}
