//! The trilinear form behind convolutions of images (`conv2d`) and volumes (`conv3d`), and its derivatives.
//!
//! The form is `sum of x[p s - m + e d] w[e] y[p]` over grid points p and kernel elements e, for an input x, a weight w and a
//! grid y. An operation is the form solved for one of the three: `y = conv(x, w)`, `x = conv_transpose(w, y)` and
//! `w = conv_weight(x, y)`. Derivative: the same form solved for the two others. Each operand is saved for the other's gradient,
//! if that is wanted. No zero-stuffed or unfolded image is made or saved.

use phalanx_kernels::{self as kernels, Conv3dOptions, ConvOptions};
use phalanx_tensor::{Result as TensorResult, Tensor};
use smallvec::SmallVec;

use crate::{Backward, Cx, Grads, Result, SaveContext, SavedVariable, Var, begins, record};

/// A tensor of the form.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Part {
    Input,
    Weight,
    Grid,
}

impl Part {
    /// The two others, in the form's order.
    fn others(self) -> [Part; 2] {
        match self {
            Part::Input => [Part::Weight, Part::Grid],
            Part::Weight => [Part::Input, Part::Grid],
            Part::Grid => [Part::Input, Part::Weight],
        }
    }
}

/// The kernels of convolutions over N dimensions, by their options.
pub(super) trait Convolution<const N: usize>: Copy + Send + Sync + 'static {
    /// The operation that solves the form for this part.
    fn name(part: Part) -> &'static str;

    /// The form solved for `part`, of the two others in the form's order. `sizes` are those of input, weight and grid.
    fn solve(
        &self,
        part: Part,
        operands: [&Tensor; 2],
        bias: Option<&Tensor>,
        sizes: [[usize; N]; 3],
    ) -> TensorResult<Tensor>;
}

impl Convolution<2> for ConvOptions {
    fn name(part: Part) -> &'static str {
        match part {
            Part::Input => "conv_transpose2d",
            Part::Weight => "conv2d_weight",
            Part::Grid => "conv2d",
        }
    }

    fn solve(
        &self,
        part: Part,
        [a, b]: [&Tensor; 2],
        bias: Option<&Tensor>,
        [input, weight, grid]: [[usize; 2]; 3],
    ) -> TensorResult<Tensor> {
        match part {
            Part::Input => kernels::conv_transpose2d(b, a, bias, self, input),
            Part::Weight => kernels::conv2d_weight(a, b, self, weight),
            Part::Grid => kernels::conv2d(a, b, bias, self, grid),
        }
    }
}

impl Convolution<3> for Conv3dOptions {
    fn name(part: Part) -> &'static str {
        match part {
            Part::Input => "conv_transpose3d",
            Part::Weight => "conv3d_weight",
            Part::Grid => "conv3d",
        }
    }

    fn solve(
        &self,
        part: Part,
        [a, b]: [&Tensor; 2],
        bias: Option<&Tensor>,
        [input, weight, grid]: [[usize; 3]; 3],
    ) -> TensorResult<Tensor> {
        match part {
            Part::Input => kernels::conv_transpose3d(b, a, bias, self, input),
            Part::Weight => kernels::conv3d_weight(a, b, self, weight),
            Part::Grid => kernels::conv3d(a, b, bias, self, grid),
        }
    }
}

/// The form solved for `part`, of the two others in the form's order, plus a bias for each channel.
pub(super) fn solve<C: Convolution<N>, const N: usize>(
    part: Part,
    [a, b]: [&Var; 2],
    bias: Option<&Var>,
    options: &C,
    sizes: [[usize; N]; 3],
) -> Result<Var> {
    begins();
    let out = options.solve(part, [a.tensor(), b.tensor()], bias.map(Var::tensor), sizes)?;
    let inputs: SmallVec<[&Var; 3]> = [a, b].into_iter().chain(bias).collect();
    record(C::name(part), &inputs, out, |s: &SaveContext<'_>| {
        let for_other = |i: usize| s.needs(1 - i).then(|| s.input(i)).transpose();
        let operands = [for_other(0)?, for_other(1)?];
        Ok(Form { part, options: *options, sizes, operands, has_bias: bias.is_some() })
    })
}

struct Form<C, const N: usize> {
    part: Part,
    options: C,
    sizes: [[usize; N]; 3],
    operands: [Option<SavedVariable>; 2],
    has_bias: bool,
}

impl<C: Convolution<N>, const N: usize> Backward for Form<C, N> {
    fn backward(&self, cx: &Cx<'_>) -> Result<Grads> {
        let dy = cx.dy();
        let grad = |i: usize| -> Result<Option<Var>> {
            let Some(other) = self.operands[1 - i].as_ref().filter(|_| cx.needs(i)) else { return Ok(None) };
            let (wanted, other) = (self.part.others()[i], cx.get(other)?);
            let known = wanted.others().map(|part| if part == self.part { dy } else { &other });
            solve(wanted, known, None, &self.options, self.sizes).map(Some)
        };
        let mut grads = Grads::from_buf([grad(0)?, grad(1)?]);
        if self.has_bias {
            let but_channels: SmallVec<[isize; 4]> =
                (0..dy.rank() as isize).filter(|&dim| dim != 1).collect();
            grads.push(cx.needs(2).then(|| dy.sum(&but_channels, false)).transpose()?);
        }
        Ok(grads)
    }
}
