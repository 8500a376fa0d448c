//! The windows of images as columns (`unfold`, im2col), and columns added up to images (`fold`, col2im), each the
//! other's transpose.

use phalanx_tensor::{DType, Error, Result, Tensor};

use super::conv2d::ConvOptions;
use super::in_place::{accumulate_, copy_};
use super::tap_range::TapRange;
use crate::check;
use crate::ops::cast::cast;

/// The windows of `[n, channels, h, w]`, zeros outside the image: `[n, channels kh kw, windows]`, a window's place in
/// row-major order.
///
/// # Errors
/// If `x` has another rank, the kernel exceeds the padded image, or a stride, dilation or kernel is 0.
pub fn unfold(x: &Tensor, kernel: [usize; 2], options: &ConvOptions) -> Result<Tensor> {
    const OP: &str = "unfold";
    let [n, channels, height, width] = four(OP, x)?;
    let image = [height, width];
    let columns = Columns { kernel, image, grid: options.size(OP, image, kernel)?, options };
    let shape = [n, channels, kernel[0], kernel[1], columns.grid[0], columns.grid[1]];
    let out = match options.padding {
        [0, 0] => Tensor::empty(&shape, x.dtype(), x.device())?,
        _ => Tensor::zeros(&shape, x.dtype(), x.device())?,
    };
    columns.each(&out, x, |mut column, place| copy_(&mut column, &place))?;
    out.with_shape(&columns.folded(&shape)?)
}

/// The transpose of [`unfold`]: `[n, channels kh kw, windows]` added up to images of `size`, the halves in f32 and
/// rounded once.
///
/// # Errors
/// If the dtype is no floating-point one, the shape is not that of the windows, or as [`unfold`].
pub fn fold(x: &Tensor, size: [usize; 2], kernel: [usize; 2], options: &ConvOptions) -> Result<Tensor> {
    const OP: &str = "fold";
    check::float(OP, x)?;
    let columns = Columns { kernel, image: size, grid: options.size(OP, size, kernel)?, options };
    let (taps, windows) = (kernel[0].checked_mul(kernel[1]), columns.grid[0].checked_mul(columns.grid[1]));
    let channels = match (x.shape(), taps) {
        (&[_, rows, count], Some(taps)) if rows.is_multiple_of(taps) && Some(count) == windows => rows / taps,
        _ => {
            let wanted = format!(
                "[n, channels * {} * {}, {} * {}]",
                kernel[0], kernel[1], columns.grid[0], columns.grid[1]
            );
            return Err(Error::shape(OP, format!("{:?}", x.shape()), wanted));
        }
    };
    let n = x.shape()[0];
    let x = x.with_shape(&[n, channels, kernel[0], kernel[1], columns.grid[0], columns.grid[1]])?;
    let wide = if matches!(x.dtype(), DType::F64) { DType::F64 } else { DType::F32 };
    let out = Tensor::zeros(&[n, channels, size[0], size[1]], wide, x.device())?;
    columns.each(&x, &out, |column, mut place| accumulate_(&mut place, &column))?;
    cast(&out, x.dtype())
}

/// The windows of an image.
struct Columns<'a> {
    kernel: [usize; 2],
    image: [usize; 2],
    grid: [usize; 2],
    options: &'a ConvOptions,
}

impl Columns<'_> {
    /// Calls `f` for each kernel element with that part of `columns` `[n, c, kh, kw, gh, gw]` and of `images`
    /// `[n, c, h, w]` which are the same places.
    fn each(
        &self,
        columns: &Tensor,
        images: &Tensor,
        mut f: impl FnMut(Tensor, Tensor) -> Result<()>,
    ) -> Result<()> {
        let ConvOptions { stride, padding, dilation, .. } = *self.options;
        let tap = |axis: usize, nth: usize| {
            let numbers = [stride[axis], padding[axis], dilation[axis]];
            TapRange::of_kernel(nth, numbers, self.grid[axis], self.image[axis])
        };
        for (row, column) in (0..self.kernel[0]).flat_map(|i| (0..self.kernel[1]).map(move |j| (i, j))) {
            let (down, right) = (tap(0, row), tap(1, column));
            if down.count == 0 || right.count == 0 {
                continue;
            }
            let part = columns.select(2, row)?.select(2, column)?;
            let part = part.narrow(2, down.first, down.count)?.narrow(3, right.first, right.count)?;
            let place = images.slice(2, down.start, down.end(stride[0]), stride[0])?;
            f(part, place.slice(3, right.start, right.end(stride[1]), stride[1])?)?;
        }
        Ok(())
    }

    /// The shape in which kernel elements go with the channels, windows in one dimension.
    fn folded(&self, &[n, channels, kh, kw, gh, gw]: &[usize; 6]) -> Result<[usize; 3]> {
        let product = |sizes: [usize; 3]| {
            let too_large = || Error::shape("unfold", format!("{sizes:?}"), "a product below 2^63");
            sizes.iter().try_fold(1_usize, |product, &n| product.checked_mul(n)).ok_or_else(too_large)
        };
        Ok([n, product([channels, kh, kw])?, product([gh, gw, 1])?])
    }
}

/// A tensor's four sizes.
fn four(op: &'static str, x: &Tensor) -> Result<[usize; 4]> {
    let wrong = |_| Error::shape(op, format!("{:?}", x.shape()), "[n, channels, h, w]");
    <[usize; 4]>::try_from(x.shape()).map_err(wrong)
}

#[cfg(test)]
mod tests {
    use phalanx_tensor::DType;

    use super::{fold, unfold};
    use crate::ops::{ConvOptions, conv2d, mul, sum};
    use crate::testing::{make, values};

    const OPTIONS: ConvOptions = ConvOptions { stride: [2, 1], padding: [1, 2], dilation: [1, 2], groups: 1 };

    #[test]
    fn columns_times_a_weight_are_the_convolution() {
        let x = make(&[2, 3, 5, 4], DType::F64, &|i| (i as f64 * 0.7).sin());
        let w = make(&[4, 3, 2, 3], DType::F64, &|i| (i as f64 * 0.3).cos());
        let grid = OPTIONS.size("test", [5, 4], [2, 3]).unwrap();
        let columns = unfold(&x, [2, 3], &OPTIONS).unwrap();
        assert_eq!(columns.shape(), [2, 18, grid[0] * grid[1]]);
        let product = crate::ops::matmul(&w.with_shape(&[4, 18]).unwrap(), &columns).unwrap();
        let wanted = conv2d(&x, &w, None, &OPTIONS, grid).unwrap();
        let pairs = values(&product).into_iter().zip(values(&wanted));
        assert!(pairs.into_iter().all(|(a, b)| (a - b).abs() < 1e-12));
    }

    #[test]
    fn folding_is_the_transpose_and_halves_are_rounded_once() {
        let x = make(&[1, 2, 5, 4], DType::F64, &|i| (i as f64 * 0.7).sin());
        let columns = unfold(&x, [2, 3], &OPTIONS).unwrap();
        let y = make(columns.shape(), DType::F64, &|i| (i as f64 * 1.1).cos());
        let inner = |a, b| values(&sum(&mul(a, b).unwrap(), &[0, 1, 2], false).unwrap())[0];
        let folded = fold(&y, [5, 4], [2, 3], &OPTIONS).unwrap();
        let flat = |t: &phalanx_tensor::Tensor| t.with_shape(&[1, 1, t.numel()]).unwrap();
        assert!((inner(&columns, &y) - inner(&flat(&x), &flat(&folded))).abs() < 1e-12);
        let ones = make(&[1, 4, 1], DType::F16, &|i| if i == 0 { 2048.0 } else { 0.6 });
        let all = ConvOptions::default();
        assert_eq!(values(&fold(&ones, [2, 2], [2, 2], &all).unwrap())[0], 2048.0);
        assert!(fold(&ones, [3, 2], [2, 2], &all).unwrap_err().to_string().starts_with("fold"));
        assert!(unfold(&x, [7, 1], &all).is_err() && unfold(&x, [0, 1], &all).is_err());
    }
}
