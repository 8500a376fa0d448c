//! Images rearranged: their windows as columns, and channels spread over pixels.

use phalanx_kernels::{self as kernels, ConvOptions};
use phalanx_tensor::{Dims, Error};

use super::frame::{batched, named, product, record_linear};
use crate::{Result, Var, begins};

// The windows of images as columns (`unfold`, im2col), and columns added up to images (`fold`, col2im).
//
// Derivative: each is the other's transpose. Nothing is saved.

/// How the windows of [`Var::unfold`] and [`Var::fold`] lie on an image, along height and width.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FoldOptions {
    /// Pixels of a window.
    pub kernel: [usize; 2],
    /// Pixels from one window to the next.
    pub stride: [usize; 2],
    /// Zeros around the image.
    pub padding: [usize; 2],
    /// Pixels from one of a window's pixels to the next.
    pub dilation: [usize; 2],
}

impl FoldOptions {
    /// Windows one pixel apart, without padding or dilation.
    pub fn new(kernel: [usize; 2]) -> FoldOptions {
        FoldOptions { kernel, stride: [1; 2], padding: [0; 2], dilation: [1; 2] }
    }

    fn conv(&self) -> ConvOptions {
        let FoldOptions { stride, padding, dilation, .. } = *self;
        ConvOptions { stride, padding, dilation, groups: 1 }
    }
}

impl Var {
    /// The windows of `[n, channels, h, w]` (or of one image without `n`) as columns: `[n, channels * kh * kw, windows]`,
    /// PyTorch's `functional.unfold`.
    ///
    /// # Errors
    /// If there are other dimensions, the window exceeds the padded image, or a number that must be positive is 0.
    pub fn unfold(&self, options: &FoldOptions) -> Result<Var> {
        batched("unfold", self, 4, |x| columns("unfold", x, *options))
    }

    /// `[n, channels * kh * kw, windows]` (or without `n`) added up to images of `size`, `[n, channels, ..size]`: the
    /// transpose of [`Var::unfold`], and PyTorch's `functional.fold`.
    ///
    /// # Errors
    /// If the dtype is no floating-point one, or the shape is not that of the windows of such images.
    pub fn fold(&self, size: [usize; 2], options: &FoldOptions) -> Result<Var> {
        batched("fold", self, 3, |x| images("fold", x, size, *options))
    }
}

fn columns(op: &'static str, x: &Var, options: FoldOptions) -> Result<Var> {
    begins();
    let y = kernels::unfold(x.tensor(), options.kernel, &options.conv())?;
    let size = [x.shape()[2], x.shape()[3]];
    record_linear(op, x, y, move |dy| images(op, dy, size, options))
}

fn images(op: &'static str, x: &Var, size: [usize; 2], options: FoldOptions) -> Result<Var> {
    begins();
    let y = kernels::fold(x.tensor(), size, options.kernel, &options.conv())?;
    record_linear(op, x, y, move |dy| columns(op, dy, options))
}

/// Channels spread over the pixels of a larger image, and back.
///
/// `y[c, h r + i, w r + j] = x[c r² + i r + j, h, w]`. Views and one copy; derivative: the other of the two.
/// Source: Shi et al.: Real-Time Single Image and Video Super-Resolution (2016).
impl Var {
    /// `[.., channels r², h, w]` to `[.., channels, h r, w r]` for the factor `r`.
    ///
    /// # Errors
    /// If there are fewer than three dimensions, `r` is 0, or `r²` does not divide the channels.
    pub fn pixel_shuffle(&self, factor: usize) -> Result<Var> {
        const OP: &str = "pixel_shuffle";
        let square = factor.checked_mul(factor).filter(|&n| n > 0);
        let &[ref lead @ .., channels, h, w] = self.shape() else { return Err(few(OP, self)) };
        let Some(square) = square.filter(|&n| channels.is_multiple_of(n)) else {
            let wanted = format!("a factor r of at least 1 whose square divides the {channels} channels");
            return Err(Error::range(OP, format!("factor {factor} for {:?}", self.shape()), wanted).into());
        };
        let shape = |tail: &[usize]| -> Dims { lead.iter().chain(tail).copied().collect() };
        let apart = self.reshape_to(&shape(&[channels / square, factor, factor, h, w]))?;
        let n = lead.len();
        let order: Dims = (0..n).chain([0, 3, 1, 4, 2].map(|d| n + d)).collect();
        let tail = [channels / square, product(OP, &[h, factor])?, product(OP, &[w, factor])?];
        named(OP, apart.permute(&order)?.reshape_to(&shape(&tail)))
    }

    /// The reverse of [`Var::pixel_shuffle`]: `[.., channels, h r, w r]` to `[.., channels r², h, w]`.
    ///
    /// # Errors
    /// If there are fewer than three dimensions, `r` is 0, or does not divide height and width.
    pub fn pixel_unshuffle(&self, factor: usize) -> Result<Var> {
        const OP: &str = "pixel_unshuffle";
        let &[ref lead @ .., channels, h, w] = self.shape() else { return Err(few(OP, self)) };
        if factor == 0 || !h.is_multiple_of(factor) || !w.is_multiple_of(factor) {
            let wanted = "a factor of at least 1 that divides height and width";
            return Err(Error::range(OP, format!("factor {factor} for {:?}", self.shape()), wanted).into());
        }
        let shape = |tail: &[usize]| -> Dims { lead.iter().chain(tail).copied().collect() };
        let apart = self.reshape_to(&shape(&[channels, h / factor, factor, w / factor, factor]))?;
        let n = lead.len();
        let order: Dims = (0..n).chain([0, 2, 4, 1, 3].map(|d| n + d)).collect();
        let tail = [product(OP, &[channels, factor, factor])?, h / factor, w / factor];
        named(OP, apart.permute(&order)?.reshape_to(&shape(&tail)))
    }
}

fn few(op: &'static str, x: &Var) -> crate::Error {
    Error::shape(op, format!("{:?}", x.shape()), "[.., channels, h, w]").into()
}

#[cfg(test)]
mod tests {
    use phalanx_tensor::Device;

    use super::FoldOptions;
    use crate::Var;
    use crate::ops::testing::check_twice;

    #[test]
    fn first_and_second_derivatives_hold() {
        let wide =
            FoldOptions { stride: [2, 1], padding: [1, 2], dilation: [1, 2], ..FoldOptions::new([2, 3]) };
        check_twice(&[&[2, 2, 5, 4]], |v| v[0].tanh()?.unfold(&wide));
        check_twice(&[&[2, 5, 4]], |v| v[0].tanh()?.unfold(&wide));
        check_twice(&[&[2, 6, 6]], |v| v[0].tanh()?.fold([4, 3], &FoldOptions::new([3, 1])));
        check_twice(&[&[12, 12]], |v| v[0].tanh()?.fold([5, 4], &wide));
    }

    #[test]
    fn shuffling_follows_the_formula_and_goes_back() {
        let x = Var::from_slice(&[0i64, 1, 2, 3, 4, 5, 6, 7], &[4, 1, 2], Device::CPU).unwrap();
        let y = x.pixel_shuffle(2).unwrap();
        assert_eq!((y.shape(), y.to_vec::<i64>().unwrap()), (&[1, 2, 4][..], vec![0, 2, 1, 3, 4, 6, 5, 7]));
        assert_eq!(y.pixel_unshuffle(2).unwrap().to_vec::<i64>().unwrap(), x.to_vec::<i64>().unwrap());
        check_twice(&[&[2, 9, 1, 2]], |v| v[0].tanh()?.pixel_shuffle(3));
        check_twice(&[&[2, 1, 4, 2]], |v| v[0].tanh()?.pixel_unshuffle(2));
        for factor in [0, 3, usize::MAX] {
            assert!(x.pixel_shuffle(factor).unwrap_err().to_string().starts_with("pixel_shuffle: factor"));
            let refused = x.pixel_unshuffle(factor).err().unwrap().to_string();
            assert!(refused.contains("pixel_unshuffle: factor "), "{refused}");
        }
        let refused = x.select(0, 0).unwrap().pixel_shuffle(1).err().unwrap().to_string();
        assert!(refused.contains("pixel_shuffle: got [1, 2]"), "{refused}");
    }
}
