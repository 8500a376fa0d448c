//! Convolutions whose kernel covers the whole image, without padding or groups: the output has one pixel, so each of the three functions is a
//! matrix product over all pixels and channels, as in a linear layer. (Not pointwise convolutions, whose kernel is 1 x 1.)

use phalanx_tensor::{Result, Tensor};

use super::{ConvArgs, ConvOptions};
use crate::ops::{linear, matmul};

/// Whether the grid has one point, at which the kernel covers the whole image.
pub(super) fn covers_image(
    options: &ConvOptions,
    image: [usize; 2],
    grid: [usize; 2],
    kernel: [usize; 2],
) -> bool {
    grid == [1; 2]
        && image == kernel
        && options.groups == 1
        && options.padding == [0; 2]
        && (0..2).all(|i| options.dilation[i] == 1 || kernel[i] == 1)
}

/// `[n, in, h, w]` and a weight `[out, in, h, w]` to `[n, out, 1, 1]`.
pub(super) fn direct(args: &ConvArgs<'_>, weight: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
    let (n, outputs) = (args.source.shape()[0], weight.shape()[0]);
    args.bias(bias, outputs)?;
    let y = linear(&flat(&args.source, n)?, &flat(weight, outputs)?, bias)?;
    y.with_shape(&[n, outputs, 1, 1])
}

/// `[n, in, 1, 1]` and a weight `[in, out, h, w]` to `[n, out, h, w]`.
pub(super) fn transposed(args: &ConvArgs<'_>, weight: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
    let (n, &[inputs, outputs, h, w]) = (args.source.shape()[0], weight.shape()) else {
        unreachable!("a weight has four dimensions")
    };
    let bias = match args.bias(bias, outputs)? {
        Some(bias) => {
            let every = bias.with_shape(&[outputs, 1])?.broadcast_to(&[outputs, h * w])?;
            Some(every.with_shape(&[outputs * h * w])?)
        }
        None => None,
    };
    let weight = flat(weight, inputs)?.transpose(0, 1)?;
    linear(&flat(&args.source, n)?, &weight, bias.as_ref())?.with_shape(&[n, outputs, h, w])
}

/// The weight's gradient, `[out, in, h, w]`, of `[n, in, h, w]` and a grid `[n, out, 1, 1]`.
pub(super) fn weight(args: &ConvArgs<'_>, grid: &Tensor) -> Result<Tensor> {
    let (n, outputs) = (args.source.shape()[0], grid.shape()[1]);
    let product = matmul(&flat(grid, n)?.transpose(0, 1)?, &flat(&args.source, n)?)?;
    let &[_, inputs, h, w] = args.source.shape() else { unreachable!("an image has four dimensions") };
    product.with_shape(&[outputs, inputs, h, w])
}

/// `x` as a matrix of `rows` rows.
fn flat(x: &Tensor, rows: usize) -> Result<Tensor> {
    x.with_shape(&[rows, x.shape()[1..].iter().product()])
}
