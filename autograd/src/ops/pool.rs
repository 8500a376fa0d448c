//! Pooling: means and maxima of windows of sequences, images and volumes.

use std::ops::Range;
use std::sync::Arc;

use phalanx_kernels::{self as kernels, PoolOptions, Windows};
use phalanx_tensor::{Error, Tensor};

use super::frame::{batched, composed, named, product, record_linear};
use crate::{Result, Var, begins};

/// `y` = the mean of each window of an image.
///
/// Derivative: each pixel's sum of `dy` over its windows, each over its divisor: the transposed map, whose derivative is
/// the mean again. Nothing is saved but the windows.
impl Var {
    /// The mean of each window of `[channels, h, w]` or `[n, channels, h, w]`. With `count_include_pad` the zeros of
    /// the margin count as pixels.
    ///
    /// # Errors
    /// If the windows do not fit the images or are dilated.
    pub fn avg_pool2d(&self, options: &PoolOptions, count_include_pad: bool) -> Result<Var> {
        let windows = Windows::fixed("avg_pool2d", image("avg_pool2d", self)?, options, count_include_pad)?;
        mean_pool("avg_pool2d", self, Arc::new(windows))
    }

    /// The means of `size` windows that cover the image, as equal as they can be.
    ///
    /// # Errors
    /// If the images have no pixels.
    pub fn adaptive_avg_pool2d(&self, size: [usize; 2]) -> Result<Var> {
        const OP: &str = "adaptive_avg_pool2d";
        mean_pool(OP, self, Arc::new(Windows::adaptive(OP, image(OP, self)?, size)?))
    }
}

/// Height and width.
pub(super) fn image(op: &'static str, x: &Var) -> Result<[usize; 2]> {
    match x.shape() {
        [_, h, w] | [_, _, h, w] => Ok([*h, *w]),
        other => {
            let wanted = "[channels, h, w] or [n, channels, h, w]";
            Err(phalanx_tensor::Error::shape(op, format!("{other:?}"), wanted).into())
        }
    }
}

fn mean_pool(op: &'static str, x: &Var, windows: Arc<[Windows; 2]>) -> Result<Var> {
    begins();
    let y = kernels::mean_pool2d(x.tensor(), &windows)?;
    record_linear(op, x, y, move |dy| mean_unpool(op, dy, windows.clone()))
}

fn mean_unpool(op: &'static str, dy: &Var, windows: Arc<[Windows; 2]>) -> Result<Var> {
    begins();
    let dx = kernels::mean_unpool2d(dy.tensor(), &windows)?;
    record_linear(op, dy, dx, move |x| mean_pool(op, x, windows.clone()))
}

/// `y` = the largest pixel of each window of an image; the margin is minus infinity.
///
/// Derivative: `dy` at that pixel, summed where several windows chose one; its derivative picks those pixels again. Saves
/// the places, an i32 each. Of equal pixels the first is the largest; a NaN is larger than all.
impl Var {
    /// The largest pixel of each window of `[channels, h, w]` or `[n, channels, h, w]`.
    ///
    /// # Errors
    /// If the windows do not fit the images, or the dtype is no floating-point one.
    pub fn max_pool2d(&self, options: &PoolOptions) -> Result<Var> {
        begins();
        let (y, places) = kernels::max_pool2d(self.tensor(), options)?;
        let size = image("max_pool2d", self)?;
        record_linear("max_pool2d", self, y, move |dy| max_unpool(dy, &places, size))
    }
}

fn pick(x: &Var, places: &Tensor) -> Result<Var> {
    begins();
    let size = image("max_pool2d", x)?;
    let (y, places) = (kernels::max_pick2d(x.tensor(), places)?, places.clone());
    record_linear("max_pool2d", x, y, move |dy| max_unpool(dy, &places, size))
}

fn max_unpool(dy: &Var, places: &Tensor, size: [usize; 2]) -> Result<Var> {
    begins();
    let (dx, places) = (kernels::max_unpool2d(dy.tensor(), places, size)?, places.clone());
    record_linear("max_pool2d", dy, dx, move |x| pick(x, &places))
}

// The largest pixels of windows that cover an image: window i of n holds rows `i h / n` to `ceil((i + 1) h / n)`.
//
// Along each dimension the windows are laid side by side, the shorter ones with their last pixel repeated, and pooled by
// `max_pool2d`, whose derivative it has.

const OP: &str = "adaptive_max_pool2d";

impl Var {
    /// The largest pixels of `size` windows that cover the images `[channels, h, w]` or `[n, channels, h, w]`, as equal as
    /// they can be; NaN wins.
    ///
    /// # Errors
    /// If the images have no pixels, or the dtype is no floating-point one.
    pub fn adaptive_max_pool2d(&self, size: [usize; 2]) -> Result<Var> {
        let from = image(OP, self)?;
        if (0..2).any(|i| from[i] == 0 && size[i] > 0) {
            return Err(Error::shape(OP, format!("an image of {from:?}"), "one of at least one pixel").into());
        }
        composed(OP, &[self], |x| {
            let columns = x[0].pooled_to(x[0].rank() - 1, size[1])?;
            columns.pooled_to(x[0].rank() - 2, size[0])
        })
    }

    /// The largest of `size` windows along one of the last two dimensions.
    fn pooled_to(&self, dim: usize, size: usize) -> Result<Var> {
        if size == 0 {
            return self.narrow(dim, 0, 0);
        }
        let windows = windows(self.shape()[dim], size)?;
        let longest = windows.iter().map(Range::len).max().unwrap_or(1);
        let side_by_side = match windows.iter().all(|window| window.len() == longest)
            && longest * size == self.shape()[dim]
        {
            true => self.clone(),
            false => {
                let place = |window: &Range<usize>, i: usize| (window.start + i).min(window.end - 1) as i64;
                let places: Vec<i64> =
                    windows.iter().flat_map(|window| (0..longest).map(|i| place(window, i))).collect();
                self.index_select(dim, &Var::from_slice(&places, &[places.len()], self.device())?)?
            }
        };
        let kernel = if dim + 1 == self.rank() { [1, longest] } else { [longest, 1] };
        side_by_side.max_pool2d(&PoolOptions::new(kernel))
    }
}

fn windows(image: usize, size: usize) -> Result<Vec<Range<usize>>> {
    let mut windows = Vec::new();
    let room = windows.try_reserve_exact(size);
    room.map_err(|_| Error::range(OP, format!("a size of {size}"), "one that fits in memory"))?;
    let bound = |at: usize, up: u128| ((at as u128 * image as u128 + up) / size as u128) as usize;
    windows.extend((0..size).map(|at| bound(at, 0)..bound(at + 1, size as u128 - 1)));
    Ok(windows)
}

// Pooling of sequences: that of images of height 1, whose derivatives it has.

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

    /// The mean of each window of `[channels, length]` or `[n, channels, length]`. With `count_include_pad` the zeros
    /// of the margin count as elements.
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

// Pooling of volumes: the planes of each volume first, then the depth.
//
// The largest of the largest is the largest (and the first of equal ones in row-major order the first), and so is the
// mean of means, since a window's divisor is the product of those along each dimension. Composed of the pools of
// images, whose derivatives it has; means of the halves are computed in f32.

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
            pool_planes_and_depth(
                OP,
                &x[0],
                |x| x.max_pool2d(&options.plane()),
                |x| x.max_pool2d(&options.depth()),
            )
        })
    }

    /// The mean of each window of `[channels, d, h, w]` or `[n, channels, d, h, w]`. With `count_include_pad` the zeros
    /// of the margin count as elements.
    ///
    /// # Errors
    /// If the windows do not fit or are dilated.
    pub fn avg_pool3d(&self, options: &Pool3dOptions, count_include_pad: bool) -> Result<Var> {
        const OP: &str = "avg_pool3d";
        let mean = |x: &Var, options: PoolOptions| x.avg_pool2d(&options, count_include_pad);
        composed(OP, &[self], |x| {
            pool_planes_and_depth(OP, &x[0], |x| mean(x, options.plane()), |x| mean(x, options.depth()))
        })
    }
}

/// The volumes `[n, channels, d, h, w]` pooled by planes and then by depth.
fn pool_planes_and_depth(
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
    use phalanx_kernels::PoolOptions;
    use phalanx_tensor::{DType, Device};

    use super::{Pool1dOptions, Pool3dOptions};
    use crate::Var;
    use crate::ops::testing::check_twice;

    #[test]
    fn first_and_second_derivatives_of_avg_pool2d_hold() {
        let options =
            PoolOptions { stride: [2, 1], padding: [1, 1], ceil_mode: true, ..PoolOptions::new([3, 2]) };
        for count_include_pad in [false, true] {
            check_twice(&[&[2, 5, 4]], |v| v[0].tanh()?.avg_pool2d(&options, count_include_pad));
        }
        check_twice(&[&[1, 2, 5, 4]], |v| v[0].tanh()?.adaptive_avg_pool2d([2, 3]));
    }

    #[test]
    fn first_and_second_derivatives_of_max_pool2d_hold() {
        let options =
            PoolOptions { stride: [2, 1], padding: [1, 1], ceil_mode: true, ..PoolOptions::new([3, 2]) };
        check_twice(&[&[2, 5, 4]], |v| v[0].tanh()?.max_pool2d(&options));
    }

    #[test]
    fn windows_cover_the_image_and_derivatives_hold() {
        let x = Var::from_slice(&[5.0, 1.0, 2.0, 9.0, 3.0, 4.0, 8.0, 0.0, 7.0, 6.0], &[1, 2, 5], Device::CPU)
            .unwrap();
        let y = x.adaptive_max_pool2d([1, 3]).unwrap();
        assert_eq!(y.to_vec::<f64>().unwrap(), [8.0, 9.0, 9.0]);
        assert_eq!(x.adaptive_max_pool2d([2, 1]).unwrap().to_vec::<f64>().unwrap(), [9.0, 8.0]);
        assert_eq!(x.adaptive_max_pool2d([0, 3]).unwrap().shape(), [1, 0, 3]);
        for size in [[1, 1], [2, 3], [4, 2], [3, 7], [5, 4]] {
            check_twice(&[&[2, 2, 5, 4]], |v| v[0].tanh()?.adaptive_max_pool2d(size));
        }
        assert!(x.narrow(2, 0, 0).unwrap().adaptive_max_pool2d([1, 1]).is_err());
        assert!(x.adaptive_max_pool2d([1, usize::MAX]).is_err());
        assert!(x.to(DType::I64).unwrap().adaptive_max_pool2d([1, 1]).is_err());
    }

    #[test]
    fn first_and_second_derivatives_of_pool1d_hold() {
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
        let refused =
            x.select(0, 0).unwrap().avg_pool1d(&Pool1dOptions::new(1), true).err().unwrap().to_string();
        assert!(refused.contains("avg_pool1d: got [3]"), "{refused}");
    }

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
    fn first_and_second_derivatives_of_pool3d_hold() {
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
