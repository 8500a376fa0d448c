//! Pooling of sequences: that of images of height 1, whose derivatives it has.

use phalanx_kernels::PoolOptions;
use phalanx_tensor::Error;

use super::composed::named;
use crate::{Result, Var};

/// [`PoolOptions`] along one dimension.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pool1dOptions {
    /// Elements of a window.
    pub kernel: usize,
    /// Elements from one window to the next.
    pub stride: usize,
    /// Margin at both ends: minus infinity for a maximum, zeros for a mean.
    pub padding: usize,
    /// Elements from one of a window's elements to the next.
    pub dilation: usize,
    /// Whether a last window that does not fit is kept, if it begins inside the sequence or its margin in front.
    pub ceil_mode: bool,
}

impl Pool1dOptions {
    /// Windows side by side.
    pub fn new(kernel: usize) -> Pool1dOptions {
        Pool1dOptions { kernel, stride: kernel, padding: 0, dilation: 1, ceil_mode: false }
    }

    fn of_rows(&self) -> PoolOptions {
        let Pool1dOptions { kernel, stride, padding, dilation, ceil_mode } = *self;
        PoolOptions {
            kernel: [1, kernel],
            stride: [1, stride],
            padding: [0, padding],
            dilation: [1, dilation],
            ceil_mode,
        }
    }
}

impl Var {
    /// The largest element of each window of `[channels, length]` or `[n, channels, length]`; NaN wins.
    ///
    /// # Errors
    /// If the windows do not fit, or the dtype is no floating-point one.
    pub fn max_pool1d(&self, options: &Pool1dOptions) -> Result<Var> {
        of_rows("max_pool1d", self, |x| x.max_pool2d(&options.of_rows()))
    }

    /// The mean of each window of `[channels, length]` or `[n, channels, length]`. With `count_include_pad` the zeros of the
    /// margin count as elements.
    ///
    /// # Errors
    /// If the windows do not fit or are dilated.
    pub fn avg_pool1d(&self, options: &Pool1dOptions, count_include_pad: bool) -> Result<Var> {
        of_rows("avg_pool1d", self, |x| x.avg_pool2d(&options.of_rows(), count_include_pad))
    }

    /// The means of `size` windows that cover the sequence, as equal as they can be.
    ///
    /// # Errors
    /// If the sequences have no elements.
    pub fn adaptive_avg_pool1d(&self, size: usize) -> Result<Var> {
        of_rows("adaptive_avg_pool1d", self, |x| x.adaptive_avg_pool2d([1, size]))
    }
}

/// `f` of the sequences as images of height 1.
fn of_rows(op: &'static str, x: &Var, f: impl FnOnce(&Var) -> Result<Var>) -> Result<Var> {
    if !(2..=3).contains(&x.rank()) {
        let wanted = "[channels, length] or [n, channels, length]";
        return Err(Error::shape(op, format!("{:?}", x.shape()), wanted).into());
    }
    named(op, f(&x.unsqueeze(-2)?))?.squeeze(&[-2])
}

#[cfg(test)]
mod tests {
    use phalanx_tensor::{DType, Device};

    use super::Pool1dOptions;
    use crate::Var;
    use crate::ops::testing::check_twice;

    #[test]
    fn first_and_second_derivatives_hold() {
        let options = Pool1dOptions { stride: 2, padding: 1, ceil_mode: true, ..Pool1dOptions::new(3) };
        for shape in [&[2, 3, 7][..], &[3, 6], &[0, 2, 5]] {
            check_twice(&[shape], |v| v[0].tanh()?.max_pool1d(&Pool1dOptions { dilation: 2, ..options }));
            check_twice(&[shape], |v| v[0].tanh()?.avg_pool1d(&options, false));
            check_twice(&[shape], |v| v[0].tanh()?.avg_pool1d(&options, true));
            check_twice(&[shape], |v| v[0].tanh()?.adaptive_avg_pool1d(4));
        }
    }

    #[test]
    fn windows_that_do_not_fit_are_errors_that_name_the_operation() {
        let x = Var::arange(0, 6, 1, DType::F32, Device::CPU).unwrap().reshape(&[2, 3]).unwrap();
        let run = |o: Pool1dOptions| x.max_pool1d(&o).unwrap_err().to_string();
        for options in [
            Pool1dOptions::new(4),
            Pool1dOptions::new(0),
            Pool1dOptions { stride: 0, ..Pool1dOptions::new(2) },
        ] {
            assert!(run(options).starts_with("max_pool1d: "));
        }
        assert!(x.select(0, 0).unwrap().avg_pool1d(&Pool1dOptions::new(1), true).is_err());
    }
}
