//! Pointwise losses of predictions `x` and targets `t`, before they are reduced: each in one pass, rounded once.

use phalanx_tensor::{Result, Tensor};

use super::softplus::ln_1p_exp;
use crate::pointwise::{c, map, pointwise};
use crate::simd::Vector;

macro_rules! losses {
    ($($(#[$doc:meta])* $name:ident($($x:ident),+) $({ $beta:ident })? = $function:ident;)*) => {$(
        $(#[$doc])*
        ///
        /// # Errors
        /// If the shapes do not broadcast, dtypes or devices differ, or the dtype is no floating-point one.
        pub fn $name($($x: &Tensor),+ $(, $beta: f64)?) -> Result<Tensor> {
            map(stringify!($name), $function $({ $beta })?, [$($x),+])
        }
    )*};
}

losses! {
    /// `(x - t)²`.
    mse_loss(x, t) = Mse;
    /// `dx` of [`mse_loss`]; `dt` is its negative, as for every loss of the difference.
    mse_loss_backward(x, t, dy) = MseGradient;
    /// `|x - t|`.
    l1_loss(x, t) = L1;
    /// `dx` of [`l1_loss`], 0 for `x = t`.
    l1_loss_backward(x, t, dy) = L1Gradient;
    /// With `d = |x - t|`: `d² / (2 beta)` for `d < beta`, else `d - beta / 2`.
    smooth_l1_loss(x, t) { beta } = SmoothL1;
    /// `dx` of [`smooth_l1_loss`].
    smooth_l1_loss_backward(x, t, dy) { beta } = SmoothL1Gradient;
    /// With `d = |x - t|`: `d² / 2` for `d < delta`, else `delta (d - delta / 2)`.
    huber_loss(x, t) { delta } = Huber;
    /// `dx` of [`huber_loss`].
    huber_loss_backward(x, t, dy) { delta } = HuberGradient;
    /// `(1 - t) x + (1 + (w - 1) t) ln(1 + e^-x)` for the weight `w` of the positive class: the binary cross entropy
    /// of the probability `sigmoid(x)`.
    binary_cross_entropy_with_logits(x, t, w) = Bce;
    /// `dx` of [`binary_cross_entropy_with_logits`].
    binary_cross_entropy_with_logits_backward(x, t, w, dy) = BceGradient;
    /// `t (ln t - x)`, 0 where `t` is.
    kl_div(x, t) = Kl;
    /// `dt` of [`kl_div`].
    kl_div_backward_target(x, t, dy) = KlTargetGradient;
    /// `e^t (t - x)`.
    kl_div_log_target(x, t) = KlLog;
    /// `dx` of [`kl_div_log_target`].
    kl_div_log_target_backward(t, dy) = KlLogGradient;
    /// `dt` of [`kl_div_log_target`].
    kl_div_log_target_backward_target(x, t, dy) = KlLogTargetGradient;
}

/// `dy sign(d)`, 0 at 0; NaN for NaN.
#[inline(always)]
fn signed<V: Vector>(d: V, dy: V) -> V {
    let sign = V::select(d.eq(V::zero()), d, c::<V>(1.0).copysign(d));
    dy * V::select(d.is_nan(), d, sign)
}

pointwise!(Mse, |x, t| (x - t) * (x - t));
pointwise!(MseGradient, |x, t, dy| dy * ((x - t) + (x - t)));
pointwise!(L1, |x, t| (x - t).abs());
pointwise!(L1Gradient, |x, t, dy| signed(x - t, dy));
pointwise!(SmoothL1 { beta }, |x, t| {
    let d = (x - t).abs();
    V::select(d.lt(c(beta)), d * d * c(0.5) / c(beta), d - c(0.5 * beta))
});
pointwise!(SmoothL1Gradient { beta }, |x, t, dy| {
    let d = x - t;
    V::select(d.abs().lt(c(beta)), dy * d / c(beta), signed(d, dy))
});
pointwise!(Huber { delta }, |x, t| {
    let d = (x - t).abs();
    V::select(d.lt(c(delta)), d * d * c(0.5), (d - c(0.5 * delta)) * c(delta))
});
pointwise!(HuberGradient { delta }, |x, t, dy| {
    let d = x - t;
    V::select(d.abs().lt(c(delta)), dy * d, signed(d, dy * c(delta)))
});
pointwise!(Bce, |x, t, w| {
    let positive = (w - c(1.0)).mul_add(t, c(1.0));
    (c::<V>(1.0) - t).mul_add(x, positive * ln_1p_exp(-x))
});
pointwise!(BceGradient, |x, t, w, dy| {
    let positive = (w - c(1.0)).mul_add(t, c(1.0));
    dy * positive.mul_add(x.sigmoid(), -(w * t))
});
pointwise!(Kl, |x, t| V::select(t.eq(V::zero()), V::zero(), t * (t.ln() - x)));
pointwise!(KlTargetGradient, |x, t, dy| dy * (t.ln() + c(1.0) - x));
pointwise!(KlLog, |x, t| t.exp() * (t - x));
pointwise!(KlLogGradient, |t, dy| -dy * t.exp());
pointwise!(KlLogTargetGradient, |x, t, dy| dy * t.exp() * (t - x + c(1.0)));
