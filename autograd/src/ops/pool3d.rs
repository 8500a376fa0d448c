//! Pooling of volumes: the planes of each volume first, then the depth.
//!
//! The largest of the largest is the largest (and the first of equal ones in row-major order the first), and so is the mean of
//! means, since a window's divisor is the product of those along each dimension. Composed of the pools of images, whose derivatives
//! it has; means of the halves are computed in f32.

use phalanx_kernels::PoolOptions;

use super::composed::{batched, composed, product};
use crate::{Result, Var};

/// [`PoolOptions`] along depth, height and width.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pool3dOptions {
    /// Places of a window.
    pub kernel: [usize; 3],
    /// Places from one window to the next.
    pub stride: [usize; 3],
    /// Margin around the volume: minus infinity for a maximum, zeros for a mean.
    pub padding: [usize; 3],
    /// Places from one of a window's places to the next.
    pub dilation: [usize; 3],
    /// Whether a last window that does not fit is kept, if it begins inside the volume or its margin in front.
    pub ceil_mode: bool,
}

impl Pool3dOptions {
    /// Windows side by side.
    pub fn new(kernel: [usize; 3]) -> Pool3dOptions {
        Pool3dOptions { kernel, stride: kernel, padding: [0; 3], dilation: [1; 3], ceil_mode: false }
    }

    /// Those along height and width.
    fn plane(&self) -> PoolOptions {
        self.of(|[_, height, width], _| [height, width])
    }

    /// Those along depth, of images whose rows are whole planes.
    fn depth(&self) -> PoolOptions {
        self.of(|[depth, ..], neutral| [depth, neutral])
    }

    fn of(&self, pick: impl Fn([usize; 3], usize) -> [usize; 2]) -> PoolOptions {
        PoolOptions {
            kernel: pick(self.kernel, 1),
            stride: pick(self.stride, 1),
            padding: pick(self.padding, 0),
            dilation: pick(self.dilation, 1),
            ceil_mode: self.ceil_mode,
        }
    }
}

impl Var {
    /// The largest element of each window of `[channels, d, h, w]` or `[n, channels, d, h, w]`; NaN wins.
    ///
    /// # Errors
    /// If the windows do not fit, or the dtype is no floating-point one.
    pub fn max_pool3d(&self, options: &Pool3dOptions) -> Result<Var> {
        const OP: &str = "max_pool3d";
        composed(OP, &[self], |x| {
            pool(OP, &x[0], |x| x.max_pool2d(&options.plane()), |x| x.max_pool2d(&options.depth()))
        })
    }

    /// The mean of each window of `[channels, d, h, w]` or `[n, channels, d, h, w]`. With `count_include_pad` the zeros of the
    /// margin count as elements.
    ///
    /// # Errors
    /// If the windows do not fit or are dilated.
    pub fn avg_pool3d(&self, options: &Pool3dOptions, count_include_pad: bool) -> Result<Var> {
        const OP: &str = "avg_pool3d";
        let mean = |x: &Var, options: PoolOptions| x.avg_pool2d(&options, count_include_pad);
        composed(OP, &[self], |x| pool(OP, &x[0], |x| mean(x, options.plane()), |x| mean(x, options.depth())))
    }
}

/// The volumes `[n, channels, d, h, w]` pooled by planes and then by depth.
fn pool(
    op: &'static str,
    x: &Var,
    planes: impl FnOnce(&Var) -> Result<Var>,
    depth: impl FnOnce(&Var) -> Result<Var>,
) -> Result<Var> {
    batched(op, x, 5, |x| {
        let &[n, channels, frames, height, width] = x.shape() else {
            unreachable!("a batch of volumes has five dimensions")
        };
        let volumes = product(op, &[n, channels])?;
        let y = planes(&x.reshape_to(&[volumes, frames, height, width])?)?;
        let [height, width] = [y.shape()[2], y.shape()[3]];
        let y = depth(&y.reshape_to(&[volumes, frames, product(op, &[height, width])?])?)?;
        y.reshape_to(&[n, channels, y.shape()[1], height, width])
    })
}

#[cfg(test)]
mod tests {
    use phalanx_tensor::{DType, Device};

    use super::Pool3dOptions;
    use crate::Var;
    use crate::ops::testing::check_twice;

    const OPTIONS: Pool3dOptions = Pool3dOptions {
        kernel: [2, 3, 2],
        stride: [2, 2, 1],
        padding: [1, 1, 0],
        dilation: [1; 3],
        ceil_mode: true,
    };

    #[test]
    fn windows_are_what_the_formula_says() {
        let x = Var::arange(0, 24, 1, DType::F64, Device::CPU).unwrap().reshape(&[1, 2, 3, 4]).unwrap();
        let means = x.avg_pool3d(&OPTIONS, false).unwrap();
        assert_eq!(means.shape(), [1, 2, 2, 3]);
        // Frame 0 and 1 apart (the margin in front has no frame), rows 0 and 1 or 1 and 2, two columns.
        let first = [2.5, 3.5, 4.5, 6.5, 7.5, 8.5];
        let all: Vec<f64> = first.iter().copied().chain(first.map(|x| x + 12.0)).collect();
        assert_eq!(means.to_vec::<f64>().unwrap(), all);
        let halved: Vec<f64> = means.to_vec::<f64>().unwrap().iter().map(|x| x / 3.0).collect();
        let with_zeros = x.avg_pool3d(&OPTIONS, true).unwrap().to_vec::<f64>().unwrap();
        assert!(with_zeros.iter().zip(halved).all(|(a, b)| (a - b).abs() < 1e-12));
        let largest = x.max_pool3d(&OPTIONS).unwrap().to_vec::<f64>().unwrap();
        assert_eq!(largest, [5.0, 6.0, 7.0, 9.0, 10.0, 11.0, 17.0, 18.0, 19.0, 21.0, 22.0, 23.0]);
    }

    #[test]
    fn first_and_second_derivatives_hold() {
        for shape in [&[1, 2, 3, 4, 3][..], &[2, 3, 3, 2], &[0, 1, 2, 3, 2]] {
            check_twice(&[shape], |v| v[0].tanh()?.max_pool3d(&OPTIONS));
            check_twice(&[shape], |v| v[0].tanh()?.avg_pool3d(&OPTIONS, true));
            check_twice(&[shape], |v| v[0].tanh()?.avg_pool3d(&OPTIONS, false));
        }
        let x = Var::arange(0, 24, 1, DType::F32, Device::CPU).unwrap().reshape(&[1, 2, 3, 4]).unwrap();
        let error = x.max_pool3d(&Pool3dOptions::new([3, 1, 1])).unwrap_err().to_string();
        assert!(error.starts_with("max_pool3d: "), "{error}");
    }
}
