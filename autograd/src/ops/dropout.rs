//! `y = x / (1 - p)`, but 0 with probability p, element by element.
//!
//! Derivative: the same draws on `dy`. Nothing is saved but the stream of the draws: a function of the run's seed,
//! the step and the site, and of each element's place in the whole tensor, however it is cut. Source: Srivastava et
//! al., Dropout (2014).

use phalanx_kernels::random;
use phalanx_tensor::{Context, Dims, PhiloxStream, Window};

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
        let window = window.cloned().unwrap_or_else(|| rows(self.shape(), context.batch_offset));
        self.drop_out(p, context.rng.site(site), window)
    }

    fn drop_out(&self, p: f64, stream: PhiloxStream, window: Window) -> Result<Var> {
        begins();
        let y = random::dropout(self.tensor(), p, stream, &window)?;
        record("dropout", &[self], y, |_: &SaveContext<'_>| Ok(Dropout { p, stream, window }))
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

struct Dropout {
    p: f64,
    stream: PhiloxStream,
    window: Window,
}

impl Backward for Dropout {
    fn backward(&self, cx: &Cx<'_>) -> Result<Grads> {
        grads1(cx.dy().drop_out(self.p, self.stream, self.window.clone())?)
    }
}

#[cfg(test)]
mod tests {
    use phalanx_tensor::{DType, Device, RngKey};

    use super::*;

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

    #[test]
    fn evaluation_is_the_identity_and_a_probability_is_checked() {
        let x = ones(&[9]);
        let _eval = Context::with(|c| c.set_train(false));
        assert_eq!(x.dropout(0.9, 0, None).unwrap().to_vec::<f32>().unwrap(), [1.0; 9]);
        assert!(x.dropout(1.5, 0, None).is_err());
    }
}
