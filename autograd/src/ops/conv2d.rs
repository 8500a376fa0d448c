//! Convolutions of `[n, channels, h, w]` (or one image without `n`), plain and transposed, plus a bias for each output
//! channel. Their derivatives are in `convolution`.

use phalanx_kernels::{Conv1dOptions, ConvOptions};
use phalanx_tensor::Error;

use super::convolution::{Part, solve};
use super::frame::named;
use crate::{Result, Var};

impl Var {
    /// The convolution with `weight` `[out, in / groups, kh, kw]`, plus `bias` `[out]`.
    ///
    /// # Errors
    /// If the shapes do not fit, or dtypes or devices differ.
    pub fn conv2d(&self, weight: &Var, bias: Option<&Var>, options: &ConvOptions) -> Result<Var> {
        const OP: &str = "conv2d";
        batched(OP, self, weight, |x, [_, _, kh, kw]| {
            let size = options.size(OP, image(x), [kh, kw])?;
            solve(Part::Grid, [x, weight], bias, options, [image(x), [kh, kw], size])
        })
    }

    /// The transposed convolution with `weight` `[in, out / groups, kh, kw]`, plus `bias` `[out]`; `output_padding` more
    /// pixels on one side choose among the sizes that a convolution would have brought to this one.
    ///
    /// # Errors
    /// If the shapes do not fit, or dtypes or devices differ.
    pub fn conv_transpose2d(
        &self,
        weight: &Var,
        bias: Option<&Var>,
        options: &ConvOptions,
        output_padding: [usize; 2],
    ) -> Result<Var> {
        const OP: &str = "conv_transpose2d";
        batched(OP, self, weight, |y, [_, _, kh, kw]| {
            let size = options.transposed_size(OP, image(y), [kh, kw], output_padding)?;
            solve(Part::Input, [weight, y], bias, options, [size, [kh, kw], image(y)])
        })
    }

    /// [`Var::conv2d`] along one dimension: `[n, in, length]` (or without `n`) with `weight` `[out, in / groups, k]`.
    ///
    /// # Errors
    /// As [`Var::conv2d`].
    pub fn conv1d(&self, weight: &Var, bias: Option<&Var>, options: &Conv1dOptions) -> Result<Var> {
        if weight.rank() != 3 || !(2..=3).contains(&self.rank()) {
            let got =
                format!("an input of shape {:?} and a weight of shape {:?}", self.shape(), weight.shape());
            let wanted = "[n, in, length] or [in, length], and [out, in / groups, k]";
            return Err(Error::shape("conv1d", got, wanted).into());
        }
        let wide = ConvOptions::from(*options);
        let &[.., channels, length] = self.shape() else { unreachable!("it has two or three dimensions") };
        wide.size("conv1d", [1, length], [1, weight.shape()[2]])?;
        if weight.shape()[1].checked_mul(options.groups) != Some(channels) {
            let got = format!(
                "{channels} channels, {} groups and a weight of shape {:?}",
                options.groups,
                weight.shape()
            );
            return Err(Error::shape("conv1d", got, "[out, channels / groups, k]").into());
        }
        let y = self.unsqueeze(-2)?.conv2d(&weight.unsqueeze(-2)?, bias, &wide)?;
        y.squeeze(&[-2])
    }

    /// [`Var::conv_transpose2d`] along one dimension: `[n, in, length]` (or without `n`) with `weight`
    /// `[in, out / groups, k]`.
    ///
    /// # Errors
    /// As [`Var::conv_transpose2d`].
    pub fn conv_transpose1d(
        &self,
        weight: &Var,
        bias: Option<&Var>,
        options: &Conv1dOptions,
        output_padding: usize,
    ) -> Result<Var> {
        const OP: &str = "conv_transpose1d";
        if weight.rank() != 3 || !(2..=3).contains(&self.rank()) {
            let got =
                format!("an input of shape {:?} and a weight of shape {:?}", self.shape(), weight.shape());
            let wanted = "[n, in, length] or [in, length], and [in, out / groups, k]";
            return Err(Error::shape(OP, got, wanted).into());
        }
        let (x, weight) = (self.unsqueeze(-2)?, weight.unsqueeze(-2)?);
        let y = x.conv_transpose2d(&weight, bias, &(*options).into(), [0, output_padding]);
        named(OP, y)?.squeeze(&[-2])
    }
}

/// Height and width of a tensor of four dimensions.
fn image(x: &Var) -> [usize; 2] {
    [x.shape()[2], x.shape()[3]]
}

/// Calls `f` with the images as a batch and the weight's shape; of one image, the result is one too.
fn batched(
    op: &'static str,
    x: &Var,
    weight: &Var,
    f: impl FnOnce(&Var, [usize; 4]) -> Result<Var>,
) -> Result<Var> {
    let kernel = <[usize; 4]>::try_from(weight.shape());
    match (x.rank(), kernel) {
        (4, Ok(kernel)) => f(x, kernel),
        (3, Ok(kernel)) => f(&x.unsqueeze(0)?, kernel)?.squeeze(&[0]),
        _ => {
            let got = format!("an input of shape {:?} and a weight of shape {:?}", x.shape(), weight.shape());
            let wanted = "[n, channels, h, w] or [channels, h, w], and a weight of 4 dimensions";
            Err(Error::shape(op, got, wanted).into())
        }
    }
}

#[cfg(test)]
mod tests {
    use phalanx_kernels::{Conv1dOptions, ConvOptions};

    use crate::ops::testing::check_twice;

    #[test]
    fn first_and_second_derivatives_hold() {
        let plain = ConvOptions::default();
        let strided = ConvOptions { stride: [2, 1], padding: [1, 2], dilation: [1, 2], groups: 2 };
        check_twice(&[&[2, 2, 4, 3], &[3, 2, 2, 2], &[3]], |v| v[0].conv2d(&v[1], Some(&v[2]), &plain));
        check_twice(&[&[2, 5, 4], &[4, 1, 2, 3]], |v| v[0].conv2d(&v[1], None, &strided));
        check_twice(&[&[2, 3, 2, 2], &[3, 2, 2, 2], &[2]], |v| {
            v[0].conv_transpose2d(&v[1], Some(&v[2]), &plain, [0, 0])
        });
        check_twice(&[&[1, 2, 2, 3], &[2, 1, 3, 3]], |v| {
            v[0].conv_transpose2d(&v[1], None, &strided, [1, 1])
        });
    }

    #[test]
    fn an_output_padding_beyond_the_stride_has_derivatives_too() {
        let options = ConvOptions { dilation: [3, 1], ..ConvOptions::default() };
        check_twice(&[&[1, 1, 2, 2], &[1, 1, 2, 2]], |v| {
            v[0].conv_transpose2d(&v[1], None, &options, [2, 0])
        });
    }

    #[test]
    fn along_one_dimension_too() {
        let options = Conv1dOptions { stride: 2, padding: 1, ..Conv1dOptions::default() };
        for x in [&[2, 3, 5][..], &[3, 5]] {
            check_twice(&[x, &[2, 3, 3], &[2]], |v| v[0].conv1d(&v[1], Some(&v[2]), &options));
            check_twice(&[x, &[3, 2, 3], &[2]], |v| v[0].conv_transpose1d(&v[1], Some(&v[2]), &options, 1));
        }
    }
}
