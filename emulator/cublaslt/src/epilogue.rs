//! What is done to `alpha op(A) op(B) + beta C` before it is D.
//!
//! Formulas, for the element in row i and column j, z being the product after alpha and beta:
//! - bias: z + bias\[i\]
//! - ReLU: max(z, 0); GELU: z (1 + tanh(u)) / 2 with u = sqrt(2/π) (z + 0.044715 z³), with z kept in aux if asked
//! - dGELU: z times the derivative of GELU at aux\[i, j\]
//! - bias gradients: of D, the sum of a row of D; of A, the sum of a row of op(A); of B, the sum of a column of op(B)

use crate::call::{Result, Status};

/// What is applied to each element, after the bias.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) enum Activation {
    #[default]
    None,
    Relu,
    Gelu,
    /// The derivative of GELU at aux, times the element.
    GeluGradient,
}

/// What the bias pointer is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) enum Bias {
    #[default]
    None,
    /// It is added.
    Added,
    /// Sums of D's rows are written there.
    GradientOfD,
    /// Sums of op(A)'s rows are written there.
    GradientOfA,
    /// Sums of op(B)'s columns are written there.
    GradientOfB,
}

/// An epilogue.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Epilogue {
    pub activation: Activation,
    pub bias: Bias,
    /// Whether GELU's input is kept in aux.
    pub keeps_input: bool,
}

impl Epilogue {
    /// The epilogue of a `cublasLtEpilogue_t`.
    pub(crate) fn from_number(number: i32) -> Result<Epilogue> {
        use {Activation as A, Bias as B};
        let (activation, bias, keeps_input) = match number {
            1 => (A::None, B::None, false),
            2 => (A::Relu, B::None, false),
            4 => (A::None, B::Added, false),
            6 => (A::Relu, B::Added, false),
            32 => (A::Gelu, B::None, false),
            36 => (A::Gelu, B::Added, false),
            160 => (A::Gelu, B::None, true),
            164 => (A::Gelu, B::Added, true),
            192 => (A::GeluGradient, B::None, false),
            208 => (A::GeluGradient, B::GradientOfD, false),
            256 => (A::None, B::GradientOfA, false),
            512 => (A::None, B::GradientOfB, false),
            _ => return Err(Status::NOT_SUPPORTED.because(format!("epilogue {number} is not emulated"))),
        };
        Ok(Epilogue { activation, bias, keeps_input })
    }

    /// Whether it reads or writes aux.
    pub(crate) fn uses_aux(self) -> bool {
        self.keeps_input || self.activation == Activation::GeluGradient
    }

    /// Whether it does nothing.
    pub(crate) fn is_default(self) -> bool {
        self == Epilogue::default()
    }
}

const SQRT_2_OVER_PI: f64 = 0.797_884_560_802_865_4;
const CUBIC: f64 = 0.044_715;

/// GELU in its tanh form.
pub(crate) fn gelu(z: f64) -> f64 {
    0.5 * z * (1.0 + (SQRT_2_OVER_PI * (z + CUBIC * z * z * z)).tanh())
}

/// Its derivative.
pub(crate) fn gelu_derivative(z: f64) -> f64 {
    let tanh = (SQRT_2_OVER_PI * (z + CUBIC * z * z * z)).tanh();
    let inner = SQRT_2_OVER_PI * (1.0 + 3.0 * CUBIC * z * z);
    0.5 * (1.0 + tanh) + 0.5 * z * (1.0 - tanh * tanh) * inner
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_derivative_is_that_of_gelu() {
        for i in -40..=40 {
            let (z, h) = (f64::from(i) * 0.1, 1e-5);
            let slope = (gelu(z + h) - gelu(z - h)) / (2.0 * h);
            assert!((gelu_derivative(z) - slope).abs() < 1e-8, "{z}: {} {slope}", gelu_derivative(z));
        }
    }
}
