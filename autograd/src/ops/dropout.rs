//! `y = x / (1 - p)`, but 0 with probability p, element by element.
//!
//! Derivative: the same draws on `dy`. Nothing is saved but the stream of the draws: a function of the run's seed,
//! the step and the site, and of each element's place in the whole tensor, however it is cut. Source: Srivastava et
//! al., Dropout (2014).
//!
//! `y = residual + dropout(x + bias)` as one operation: the end of a transformer's branch.
//!
//! Derivative: `dx` is the dropout of `dy`, `dbias` the sum of `dx` over the rows, `dresidual` is `dy`. Nothing else is
//! saved. Source: Megatron-LM's `bias_dropout_add`.

use phalanx_kernels::random;
use phalanx_tensor::{Context, DType, Dims, PhiloxStream, Window};

use crate::{Backward, ContextMode, Cx, Grads, Result, SaveContext, Var, begins, grads1, record};

impl Var {
    /// Leaves out elements with probability `p` and scales the others by `1 / (1 - p)`. The draws are those of
    /// `site` under the context's key. This is the part of a whole that `window` names; without one, rows of the
    /// global batch from the context's `batch_offset` on. Itself in evaluation ([`ContextMode::train`] unset) and for
    /// `p = 0`.
    ///
    /// # Errors
    /// If `p` is not between 0 and 1, the window does not hold this shape, or the dtype is no floating-point one.
    pub fn dropout(&self, p: f64, site: u64, window: Option<&Window>) -> Result<Var> {
        let context = Context::current();
        if p == 0.0 || (!context.train() && (0.0..=1.0).contains(&p)) {
            return Ok(self.clone());
        }
        self.drop_out(Dropout::of(self, p, site, window))
    }

    /// `residual + (self + bias).dropout(p, site, window)` in one pass, with the bits of the three operations. The bias has the
    /// size of the last dimension. The residual, and so the sum, may have another dtype.
    ///
    /// # Errors
    /// As [`Var::dropout`]; if shapes do not fit, or devices differ.
    pub fn bias_dropout_add(
        &self,
        bias: Option<&Var>,
        residual: &Var,
        p: f64,
        site: u64,
        window: Option<&Window>,
    ) -> Result<Var> {
        begins();
        let evaluates = !Context::current().train() && (0.0..=1.0).contains(&p);
        let dropout = Dropout::of(self, if evaluates { 0.0 } else { p }, site, window);
        let Dropout { p, stream, window } = &dropout;
        let of_bias = bias.map(Var::tensor);
        let y = random::bias_dropout_add(self.tensor(), of_bias, residual.tensor(), *p, *stream, window)?;
        let inputs: Vec<&Var> = [self, residual].into_iter().chain(bias).collect();
        record("bias_dropout_add", &inputs, y, |_: &SaveContext<'_>| {
            Ok(BiasDropoutAdd { dropout, dtype: self.dtype(), has_bias: bias.is_some() })
        })
    }

    fn drop_out(&self, dropout: Dropout) -> Result<Var> {
        begins();
        let y = random::dropout(self.tensor(), dropout.p, dropout.stream, &dropout.window)?;
        record("dropout", &[self], y, |_: &SaveContext<'_>| Ok(dropout))
    }
}

/// Rows `offset ..` of a tensor with as many more.
fn rows(shape: &[usize], offset: u64) -> Window {
    let mut window = Window { global: Dims::from_slice(shape), offset: Dims::from_elem(0, shape.len()) };
    if let (Some(rows), Some(first)) = (window.global.first_mut(), window.offset.first_mut()) {
        *first = offset as usize;
        *rows += offset as usize;
    }
    window
}

#[derive(Clone)]
struct Dropout {
    p: f64,
    stream: PhiloxStream,
    window: Window,
}

impl Dropout {
    /// The draws of a site for `x`, at the window or else at the rows of the context's part of the batch.
    fn of(x: &Var, p: f64, site: u64, window: Option<&Window>) -> Dropout {
        let context = Context::current();
        let window = window.cloned().unwrap_or_else(|| rows(x.shape(), context.batch_offset));
        Dropout { p, stream: context.rng.site(site), window }
    }
}

impl Backward for Dropout {
    fn backward(&self, cx: &Cx<'_>) -> Result<Grads> {
        grads1(cx.dy().drop_out(self.clone())?)
    }
}

/// Inputs: `x`, the residual, perhaps a bias.
struct BiasDropoutAdd {
    dropout: Dropout,
    /// Of `x` and the bias.
    dtype: DType,
    has_bias: bool,
}

impl Backward for BiasDropoutAdd {
    fn backward(&self, cx: &Cx<'_>) -> Result<Grads> {
        let needs_bias = self.has_bias && cx.needs(2);
        let dx = match (cx.needs(0) || needs_bias, self.dropout.p == 0.0) {
            (false, _) => None,
            (true, true) => Some(cx.dy().to(self.dtype)?),
            (true, false) => Some(cx.dy().to(self.dtype)?.drop_out(self.dropout.clone())?),
        };
        let mut grads = Grads::from_elem(None, 2 + usize::from(self.has_bias));
        if let (true, Some(dx)) = (needs_bias, &dx) {
            grads[2] = Some(cx.sum_to_input(2, dx.clone())?);
        }
        grads[0] = dx.filter(|_| cx.needs(0));
        grads[1] = cx.needs(1).then(|| cx.dy().clone());
        Ok(grads)
    }
}

#[cfg(test)]
mod tests {
    use phalanx_tensor::{Device, RngKey};

    use super::*;
    use crate::ops::testing::check_twice;

    fn ones(shape: &[usize]) -> Var {
        Var::new(phalanx_kernels::full(shape, 1.0, DType::F32, Device::CPU).unwrap())
    }

    #[test]
    fn parts_of_the_batch_draw_what_the_whole_draws() {
        let key = |c: &mut Context| c.rng = RngKey { seed: 3, step: 8 };
        let whole: Vec<f32> = {
            let _key = Context::with(key);
            ones(&[10, 7]).dropout(0.5, 2, None).unwrap().to_vec().unwrap()
        };
        let mut parts = Vec::new();
        for (offset, rows) in [(0, 3), (3, 6), (9, 1)] {
            let _part = Context::with(|c| {
                key(c);
                c.batch_offset = offset;
            });
            parts.extend(ones(&[rows, 7]).dropout(0.5, 2, None).unwrap().to_vec::<f32>().unwrap());
        }
        assert_eq!(parts, whole);
        assert!(whole.contains(&0.0) && whole.contains(&2.0));
    }

    #[test]
    fn the_gradient_has_the_mask_of_its_own_forward_pass() {
        let x = Var::leaf(ones(&[50]).into_tensor()).unwrap();
        let y = {
            let _key = Context::with(|c| c.rng.step = 1);
            x.dropout(0.3, 0, None).unwrap()
        };
        y.backward_with(ones(&[50])).unwrap();
        assert_eq!(x.grad().unwrap().to_vec::<f32>().unwrap(), y.to_vec::<f32>().unwrap());
    }

    /// `residual + dropout(x + bias)` by three operations and by one, or without the bias by two and by one.
    fn both(v: &[Var], p: f64) -> [Var; 2] {
        let [x, residual, bias] = [&v[0], &v[1], v.get(2).unwrap_or(&v[0])];
        let bias = (v.len() > 2).then_some(bias);
        let y = bias.map_or_else(|| x.clone(), |bias| x.add(bias).unwrap());
        let apart = residual.add(&y.dropout(p, 4, None).unwrap()).unwrap();
        [apart, x.bias_dropout_add(bias, residual, p, 4, None).unwrap()]
    }

    #[test]
    fn one_operation_has_the_bits_of_three_forward_and_backward() {
        let _key = Context::with(|c| (c.rng.step, c.batch_offset) = (3, 2));
        for (shape, with_bias) in [(&[3, 5, 7][..], true), (&[4, 9], false), (&[0, 3], true), (&[2, 1], true)]
        {
            for p in [0.0, 0.4, 1.0] {
                let width = &shape[shape.len() - 1..];
                let shapes = [shape, shape, width];
                let leaf = |shape: &&[usize]| Var::leaf(spread(shape)).unwrap();
                let inputs = || shapes[..2 + usize::from(with_bias)].iter().map(leaf).collect::<Vec<_>>();
                let grads = |one: usize| {
                    let v = inputs();
                    let y = both(&v, p)[one].clone();
                    y.backward_with(Var::new(spread(shape)).mul_scalar(0.3).unwrap()).unwrap();
                    let of = |v: &Var| v.grad().unwrap().to_vec::<f32>().unwrap();
                    (y.to_vec::<f32>().unwrap(), v.iter().map(of).collect::<Vec<_>>())
                };
                assert_eq!(grads(0), grads(1), "{shape:?} {p}");
            }
        }
    }

    fn spread(shape: &[usize]) -> phalanx_tensor::Tensor {
        let values: Vec<f32> =
            (0..shape.iter().product()).map(|i| (i as f32 * 0.618).fract() - 0.5).collect();
        phalanx_tensor::Tensor::from_slice(&values, shape, Device::CPU).unwrap()
    }

    #[test]
    fn the_derivatives_of_bias_dropout_add_are_those_of_differences() {
        let _key = Context::with(|c| c.rng.step = 5);
        for p in [0.0, 0.3] {
            check_twice(&[&[3, 5], &[3, 5], &[5]], |v| v[0].bias_dropout_add(Some(&v[2]), &v[1], p, 1, None));
            check_twice(&[&[2, 3, 1], &[2, 3, 1]], |v| v[0].bias_dropout_add(None, &v[1], p, 1, None));
            check_twice(&[&[5, 3], &[3, 5], &[5]], |v| {
                v[0].transpose(0, 1)?.bias_dropout_add(Some(&v[2]), &v[1], p, 1, None)
            });
        }
    }

    #[test]
    fn bias_dropout_add_in_evaluation_adds_and_checks() {
        let x = ones(&[3, 2]);
        let _eval = Context::with(|c| c.set_train(false));
        let y = x.bias_dropout_add(Some(&ones(&[2])), &x, 0.9, 1, None).unwrap();
        assert_eq!(y.to_vec::<f32>().unwrap(), [3.0; 6]);
        let error = x.bias_dropout_add(Some(&ones(&[3])), &x, 0.5, 1, None).unwrap_err().to_string();
        assert!(error.contains("bias_dropout_add") && error.contains("a bias of shape [3]"), "{error}");
        let refused = x.bias_dropout_add(None, &x, 1.5, 1, None).err().unwrap().to_string();
        assert!(refused.contains("bias_dropout_add: the probability 1.5"), "{refused}");
    }

    #[test]
    fn evaluation_is_the_identity_and_a_probability_is_checked() {
        let x = ones(&[9]);
        let _eval = Context::with(|c| c.set_train(false));
        assert_eq!(x.dropout(0.9, 0, None).unwrap().to_vec::<f32>().unwrap(), [1.0; 9]);
        let refused = x.dropout(1.5, 0, None).err().unwrap().to_string();
        assert!(refused.contains("dropout: the probability 1.5"), "{refused}");
    }
}
