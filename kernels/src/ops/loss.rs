//! Pointwise losses of predictions `x` and targets `t`, before they are reduced: each in one pass, rounded once.

use super::activation::ln_1p_exp;
use crate::pointwise::{c, elementwise};
use crate::simd::Vector;

elementwise! {
    /// `(x - t)²`.
    mse_loss(x, t) = (x - t) * (x - t);
    /// `dx` of [`mse_loss`]; `dt` is its negative, as for every loss of the difference.
    mse_loss_backward(x, t, dy) = dy * ((x - t) + (x - t));
    /// `|x - t|`.
    l1_loss(x, t) = (x - t).abs();
    /// `dx` of [`l1_loss`], 0 for `x = t`.
    l1_loss_backward(x, t, dy) = signed(x - t, dy);
    /// With `d = |x - t|`: `d² / (2 beta)` for `d < beta`, else `d - beta / 2`.
    smooth_l1_loss(x, t) { beta } = {
    let d = (x - t).abs();
    V::select(d.lt(c(beta)), d * d * c(0.5) / c(beta), d - c(0.5 * beta))
};
    /// `dx` of [`smooth_l1_loss`].
    smooth_l1_loss_backward(x, t, dy) { beta } = {
    let d = x - t;
    V::select(d.abs().lt(c(beta)), dy * d / c(beta), signed(d, dy))
};
    /// With `d = |x - t|`: `d² / 2` for `d < delta`, else `delta (d - delta / 2)`.
    huber_loss(x, t) { delta } = {
    let d = (x - t).abs();
    V::select(d.lt(c(delta)), d * d * c(0.5), (d - c(0.5 * delta)) * c(delta))
};
    /// `dx` of [`huber_loss`].
    huber_loss_backward(x, t, dy) { delta } = {
    let d = x - t;
    V::select(d.abs().lt(c(delta)), dy * d, signed(d, dy * c(delta)))
};
    /// `(1 - t) x + (1 + (w - 1) t) ln(1 + e^-x)` for the weight `w` of the positive class: the binary cross entropy
    /// of the probability `sigmoid(x)`.
    binary_cross_entropy_with_logits(x, t, w) = {
    let positive = (w - c(1.0)).mul_add(t, c(1.0));
    (c::<V>(1.0) - t).mul_add(x, positive * ln_1p_exp(-x))
};
    /// `dx` of [`binary_cross_entropy_with_logits`].
    binary_cross_entropy_with_logits_backward(x, t, w, dy) = {
    let positive = (w - c(1.0)).mul_add(t, c(1.0));
    dy * positive.mul_add(x.sigmoid(), -(w * t))
};
    /// `t (ln t - x)`, 0 where `t` is.
    kl_div(x, t) = V::select(t.eq(V::zero()), V::zero(), t * (t.ln() - x));
    /// `dt` of [`kl_div`].
    kl_div_backward_target(x, t, dy) = dy * (t.ln() + c(1.0) - x);
    /// `e^t (t - x)`.
    kl_div_log_target(x, t) = t.exp() * (t - x);
    /// `dx` of [`kl_div_log_target`].
    kl_div_log_target_backward(t, dy) = -dy * t.exp();
    /// `dt` of [`kl_div_log_target`].
    kl_div_log_target_backward_target(x, t, dy) = dy * t.exp() * (t - x + c(1.0));
}

/// `dy sign(d)`, 0 at 0; NaN for NaN.
#[inline(always)]
fn signed<V: Vector>(d: V, dy: V) -> V {
    let sign = V::select(d.eq(V::zero()), d, c::<V>(1.0).copysign(d));
    dy * V::select(d.is_nan(), d, sign)
}
