//! [`Var::linear`]: products with the weights of linear maps.

use phalanx_kernels::{self as kernels, Gelu};
use phalanx_tensor::{Dims, Tensor};
use smallvec::SmallVec;

use super::matmul::rows;
use super::unary::tanh_gelu_input;
use crate::{Backward, Cx, Grads, Result, SaveContext, SavedVariable, Var, begins, is_recording, record};

/// `y = x Wᵀ + b`: `x` is `[.., in]`, `W` `[out, in]`, `b` `[out]`, `y` `[.., out]`.
///
/// Derivative, with `x` and `dy` as matrices of all rows: `dx = dy W`, `dW = dyᵀ x`, `db` the sum of `dy`'s rows. Saves
/// `x` for `dW` and `W` for `dx`. `dW` goes straight into the weight's gradient buffer where there is one of this
/// dtype. On a GPU `db` of halves comes with `dW`, in one pass.
///
/// Where `x = gelu(z)`, and a GPU multiplies by gelu's slope on the way ([`kernels::fuses_epilogues`]), `z` is an input too, and its
/// gradient is computed in place of `dx`, which is not made:
///
/// ```text
/// z --- gelu --- x --- linear --- y        backward: dy ---------- linear --- dz, by a product with gelu's slope at z
///  \___________________/
/// ```
impl Var {
    /// `self weightᵀ + bias`, with `weight` of shape `[out, in]`.
    ///
    /// # Errors
    /// If the shapes do not fit, or dtypes or devices differ.
    pub fn linear(&self, weight: &Var, bias: Option<&Var>) -> Result<Var> {
        if weight.panels().is_some() && is_recording(&[self, bias.unwrap_or(self)]) {
            return self.linear(&*weight.unpacked()?, bias);
        }
        begins();
        let y = weight.multiply_as_weight(self.tensor(), bias.map(Var::tensor))?;
        self.linear_made(weight, bias, y)
    }

    /// [`Var::linear`] by several weights, each with its bias: where no gradient is recorded, by packed ones together
    /// ([`kernels::WeightPanels::linear_each`]).
    ///
    /// # Errors
    /// As [`Var::linear`].
    pub fn linear_each(&self, maps: &[(Var, Option<Var>)]) -> Result<Vec<Var>> {
        let biases = maps.iter().filter_map(|(_, bias)| bias.as_ref());
        let inputs: SmallVec<[&Var; 4]> = [self].into_iter().chain(biases).collect();
        let are_packed = maps.iter().all(|(weight, _)| weight.panels().is_some());
        if !are_packed || is_recording(&inputs) {
            return maps.iter().map(|(weight, bias)| self.linear(weight, bias.as_ref())).collect();
        }
        begins();
        let outputs = Var::multiply_as_weights(self.tensor(), maps)?;
        let made = |((weight, bias), y): (&(Var, Option<Var>), _)| self.linear_made(weight, bias.as_ref(), y);
        maps.iter().zip(outputs).map(made).collect()
    }

    /// [`Var::linear`], whose result is there already.
    fn linear_made(&self, weight: &Var, bias: Option<&Var>, y: Tensor) -> Result<Var> {
        let gelu_input = self.fused_gelu_input()?;
        let inputs: SmallVec<[&Var; 4]> = [self, weight].into_iter().chain(bias).chain(&gelu_input).collect();
        record("linear", &inputs, y, |s: &SaveContext<'_>| {
            let shape = Dims::from_slice(self.shape());
            let x = s.needs(1).then(|| s.input(0)).transpose()?;
            let weight = s.needs(0).then(|| s.input(1)).transpose()?;
            let has_bias = bias.is_some();
            Ok(Linear { shape, x, weight, has_bias, follows_gelu: gelu_input.is_some() })
        })
    }

    /// [`Var::linear`], then [`Var::gelu`]. Halves on a GPU have gelu by tanh in one pass with the product, which is not rounded before it
    /// ([`kernels::fuses_epilogues`]). Elsewhere both are in one pass where no gradient is recorded, with the bits of two operations.
    ///
    /// # Errors
    /// As [`Var::linear`].
    pub fn linear_gelu(&self, weight: &Var, bias: Option<&Var>, kind: Gelu) -> Result<Var> {
        if weight.panels().is_some() {
            return self.linear(weight, bias)?.gelu(kind);
        }
        let (x, w, b) = (self.tensor(), weight.tensor(), bias.map(Var::tensor));
        let inputs: SmallVec<[&Var; 3]> = [self, weight].into_iter().chain(bias).collect();
        if !is_recording(&inputs) {
            begins();
            let y = kernels::linear_gelu(x, w, b, kind)?;
            return self.linear_made(weight, bias, y.clone())?.gelu_made(y, kind);
        }
        if kind != Gelu::Tanh || !kernels::fuses_epilogues(x) {
            return self.linear(weight, bias)?.gelu(kind);
        }
        begins();
        let (y, z) = kernels::linear_gelu_kept(x, w, b)?;
        self.linear_made(weight, bias, z)?.gelu_made(y, kind)
    }
}

struct Linear {
    shape: Dims,
    x: Option<SavedVariable>,
    weight: Option<SavedVariable>,
    has_bias: bool,
    /// Whether the last input is the input of the gelu that has made `x`.
    follows_gelu: bool,
}

impl Backward for Linear {
    fn backward(&self, cx: &Cx<'_>) -> Result<Grads> {
        let x = self.x.as_ref().filter(|_| cx.needs(1)).map(|x| cx.get(x)).transpose()?;
        self.grads(cx, x)
    }

    fn backward_once(mut self, cx: &mut Cx<'_>) -> Result<Grads> {
        let x = self.x.take().filter(|_| cx.needs(1)).map(|x| cx.take(x)).transpose()?;
        self.grads(cx, x.map(Var::new))
    }
}

impl Linear {
    /// The gradients, given `x` for the weight's.
    fn grads(&self, cx: &Cx<'_>, x: Option<Var>) -> Result<Grads> {
        let dy = rows(cx.dy())?;
        let bias_too = self.has_bias && cx.needs(2);
        // First, so that `x` is gone when `dx` is made, which is as large.
        let (dw, mut db) = match x {
            Some(x) => weight_and_bias_grads(cx, 1, &dy, &rows(&x)?, bias_too)?,
            None => (None, None),
        };
        if bias_too && db.is_none() {
            db = Some(dy.sum(&[0], false)?);
        }
        let (mut dx, mut dz) = (None, None);
        if let Some(weight) = self.weight.as_ref().filter(|_| cx.needs(0)) {
            let weight = cx.get(weight)?;
            let z = if self.follows_gelu { cx.saved_by_input(0, tanh_gelu_input)? } else { None };
            match z {
                Some(z) => {
                    let z = rows(&z)?;
                    let made = kernels::matmul_gelu_backward(dy.tensor(), weight.tensor(), z.tensor())?;
                    dz = Some(Var::new(made).reshape_to(&self.shape)?);
                }
                None => dx = Some(dy.matmul(&weight)?.reshape_to(&self.shape)?),
            }
        }
        let mut grads = Grads::from_buf([dx, dw]);
        grads.extend(self.has_bias.then_some(db));
        grads.extend(self.follows_gelu.then_some(dz));
        Ok(grads)
    }
}

/// The gradient `dyᵀ x` of a linear map's weight, which is input `i` of the operation, of `dy` `[rows, out]` and `x`
/// `[rows, in]`; nothing if it was added to the weight's gradient buffer. For operations that are made of linear maps.
///
/// # Errors
/// If the shapes do not fit.
pub fn linear_weight_grad(cx: &Cx<'_>, i: usize, dy: &Var, x: &Var) -> Result<Option<Var>> {
    Ok(weight_and_bias_grads(cx, i, dy, x, false)?.0)
}

/// [`linear_weight_grad`], and with `bias_too` the bias's gradient if it comes with the weight's: on a GPU, of halves.
fn weight_and_bias_grads(
    cx: &Cx<'_>,
    i: usize,
    dy: &Var,
    x: &Var,
    bias_too: bool,
) -> Result<(Option<Var>, Option<Var>)> {
    let dy = dy.transpose(0, 1)?;
    let bias_too = bias_too && !cx.create_graph() && kernels::fuses_epilogues(dy.tensor());
    let mut db = None;
    let direct = !cx.create_graph()
        && cx.accumulate_into(i, |buffer| {
            let fits = buffer.is_contiguous() && buffer.dtype() == x.dtype();
            match (fits, bias_too) {
                (false, _) => {}
                (true, false) => kernels::matmul_accumulate_(buffer, dy.tensor(), x.tensor())?,
                (true, true) => {
                    db = Some(kernels::matmul_accumulate_row_sums_(buffer, dy.tensor(), x.tensor())?);
                }
            }
            Ok(fits)
        })?;
    if direct {
        return Ok((None, db.map(Var::new)));
    }
    if bias_too {
        let (dw, db) = kernels::matmul_row_sums(dy.tensor(), x.tensor())?;
        return Ok((Some(Var::new(dw)), Some(Var::new(db))));
    }
    Ok((Some(dy.matmul(x)?), None))
}
