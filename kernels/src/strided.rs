//! Runs of elements in a strided destination, for kernels that write in place.

use phalanx_tensor::{Layout, Loops};

use crate::moves::fill;

/// A run of a destination: every `stride`-th element of a slice that begins at the run's first.
pub(crate) struct RunMut<'a, T> {
    elements: &'a mut [T],
    stride: usize,
    len: usize,
}

impl<T: bytemuck::Pod> RunMut<'_, T> {
    /// Sets every element.
    pub(crate) fn set(self, value: T) {
        match self.stride {
            1 => fill(&mut self.elements[..self.len], value),
            _ => self.for_each(|_, x| *x = value),
        }
    }

    /// Calls `f` with each element's index in row-major order, counted from the run's first, and the element.
    pub(crate) fn for_each(self, mut f: impl FnMut(usize, &mut T)) {
        if self.stride == 1 {
            self.elements[..self.len].iter_mut().enumerate().for_each(|(i, x)| f(i, x));
        } else {
            let strided = self.elements.iter_mut().step_by(self.stride.max(1));
            strided.take(self.len).enumerate().for_each(|(i, x)| f(i, x));
        }
    }
}

/// Calls `f` with each run of the layout, in row-major order. The layout must not overlap itself.
pub(crate) fn for_each_run_mut<T>(elements: &mut [T], layout: &Layout, mut f: impl FnMut(RunMut<'_, T>)) {
    if layout.numel() == 0 {
        return;
    }
    let loops = Loops::new(layout.shape(), [layout.strides()]);
    let (len, [stride]) = (loops.inner(), loops.inner_strides());
    for run in 0..loops.runs() {
        let start = layout.offset() + loops.start(run)[0];
        f(RunMut { elements: &mut elements[start..], stride, len });
    }
}
