//! Convolutions of `[n, channels, d, h, w]` (or one volume without `n`), plain and transposed, plus a bias for each
//! output channel. Their derivatives are in `convolution`.

use phalanx_kernels::Conv3dOptions;
use phalanx_tensor::Error;

use super::convolution::{Part, solve};
use super::frame::named;
use crate::{Result, Var};

impl Var {
    /// The convolution with `weight` `[out, in / groups, kd, kh, kw]`, plus `bias` `[out]`.
    ///
    /// # Errors
    /// If the shapes do not fit, or dtypes or devices differ.
    pub fn conv3d(&self, weight: &Var, bias: Option<&Var>, options: &Conv3dOptions) -> Result<Var> {
        const OP: &str = "conv3d";
        let channels = |kernel: &[usize; 5]| [kernel[1].checked_mul(options.groups), Some(kernel[0])];
        batched(OP, [self, weight], bias, options, channels, |x, kernel| {
            let size = options.size(OP, volume(x), tail(kernel))?;
            solve(Part::Grid, [x, weight], bias, options, [volume(x), tail(kernel), size])
        })
    }

    /// The transposed convolution with `weight` `[in, out / groups, kd, kh, kw]`, plus `bias` `[out]`; `output_padding`
    /// more places on one side choose among the sizes that a convolution would have brought to this one.
    ///
    /// # Errors
    /// If the shapes do not fit, or dtypes or devices differ.
    pub fn conv_transpose3d(
        &self,
        weight: &Var,
        bias: Option<&Var>,
        options: &Conv3dOptions,
        output_padding: [usize; 3],
    ) -> Result<Var> {
        const OP: &str = "conv_transpose3d";
        let channels = |kernel: &[usize; 5]| [Some(kernel[0]), kernel[1].checked_mul(options.groups)];
        batched(OP, [self, weight], bias, options, channels, |y, kernel| {
            let size = options.transposed_size(OP, volume(y), tail(kernel), output_padding)?;
            solve(Part::Input, [weight, y], bias, options, [size, tail(kernel), volume(y)])
        })
    }
}

/// Depth, height and width of a tensor of five dimensions.
fn volume(x: &Var) -> [usize; 3] {
    [x.shape()[2], x.shape()[3], x.shape()[4]]
}

fn tail(kernel: [usize; 5]) -> [usize; 3] {
    [kernel[2], kernel[3], kernel[4]]
}

/// Calls `f` with the volumes as a batch and the weight's shape, once the channels (those of input and output that the
/// weight is for) fit; of one volume, the result is one too.
fn batched(
    op: &'static str,
    [x, weight]: [&Var; 2],
    bias: Option<&Var>,
    options: &Conv3dOptions,
    channels: impl Fn(&[usize; 5]) -> [Option<usize>; 2],
    f: impl FnOnce(&Var, [usize; 5]) -> Result<Var>,
) -> Result<Var> {
    let wrong = |wanted: String| {
        let bias = bias.map(|bias| format!(", a bias of shape {:?}", bias.shape())).unwrap_or_default();
        let shapes =
            format!("an input of shape {:?}, a weight of shape {:?}{bias}", x.shape(), weight.shape());
        Error::shape(op, shapes, wanted)
    };
    let (Ok(kernel), 4 | 5) = (<[usize; 5]>::try_from(weight.shape()), x.rank()) else {
        let wanted = "[n, channels, d, h, w] or [channels, d, h, w], and a weight of 5 dimensions";
        return Err(wrong(wanted.into()).into());
    };
    let found = x.shape()[x.rank() - 4];
    let ([inputs, outputs], groups) = (channels(&kernel), options.groups);
    let divides = groups > 0 && found.is_multiple_of(groups) && kernel[0].is_multiple_of(groups);
    if inputs != Some(found) || !divides || bias.is_some_and(|bias| Some(bias.numel()) != outputs) {
        let wanted = format!("channels that fit the weight and its bias for {groups} groups");
        return Err(wrong(wanted).into());
    }
    if x.rank() == 5 {
        return named(op, f(x, kernel));
    }
    named(op, f(&x.unsqueeze(0)?, kernel))?.squeeze(&[0])
}

#[cfg(test)]
mod tests {
    use phalanx_kernels::Conv3dOptions;
    use phalanx_tensor::{DType, Device};

    use crate::Var;
    use crate::ops::testing::check_twice;

    #[test]
    fn first_and_second_derivatives_hold() {
        let plain = Conv3dOptions::default();
        let strided = Conv3dOptions { stride: [2, 1, 2], padding: [1, 0, 1], dilation: [1, 2, 1], groups: 2 };
        check_twice(&[&[2, 2, 3, 2, 3], &[2, 2, 2, 1, 2], &[2]], |v| v[0].conv3d(&v[1], Some(&v[2]), &plain));
        check_twice(&[&[2, 3, 3, 2], &[4, 1, 2, 2, 2]], |v| v[0].conv3d(&v[1], None, &strided));
        check_twice(&[&[1, 2, 2, 1, 2], &[2, 2, 2, 1, 2], &[2]], |v| {
            v[0].conv_transpose3d(&v[1], Some(&v[2]), &plain, [0; 3])
        });
        check_twice(&[&[2, 2, 1, 2], &[2, 1, 2, 2, 1]], |v| {
            v[0].conv_transpose3d(&v[1], None, &strided, [1, 1, 1])
        });
        check_twice(&[&[0, 2, 3, 2, 3], &[2, 2, 2, 1, 2], &[2]], |v| v[0].conv3d(&v[1], Some(&v[2]), &plain));
    }

    #[test]
    fn what_does_not_fit_is_an_error_that_names_the_operation() {
        let make = |shape: &[usize]| {
            Var::new(phalanx_tensor::Tensor::zeros(shape, DType::F32, Device::CPU).unwrap())
        };
        let (x, w) = (make(&[1, 2, 3, 3, 3]), make(&[4, 2, 2, 2, 2]));
        let run = |x: &Var, w: &Var, o: Conv3dOptions| x.conv3d(w, None, &o).unwrap_err().to_string();
        let plain = Conv3dOptions::default();
        for error in [
            run(&x, &make(&[4, 3, 2, 2, 2]), plain),
            run(&x, &make(&[4, 2, 2, 2]), plain),
            run(&make(&[2, 3, 3]), &w, plain),
            run(&x, &make(&[4, 2, 5, 1, 1]), plain),
            run(&x, &w, Conv3dOptions { groups: 0, ..plain }),
            run(&x, &w, Conv3dOptions { groups: 2, ..plain }),
            run(&x, &w, Conv3dOptions { stride: [0, 1, 1], ..plain }),
            run(&x, &w, Conv3dOptions { padding: [usize::MAX; 3], ..plain }),
            run(&x, &w.to(DType::F64).unwrap(), plain),
            x.conv3d(&w, Some(&make(&[3])), &plain).unwrap_err().to_string(),
        ] {
            assert!(error.starts_with("conv3d: "), "{error}");
        }
        let error = x.conv_transpose3d(&w, None, &plain, [0; 3]).unwrap_err().to_string();
        assert!(error.starts_with("conv_transpose3d: "), "{error}");
    }
}
