//! What a product computes besides multiplying: transpositions, types, and the epilogue, which makes D of
//! `alpha op(A) op(B) + beta C`.
//!
//! Formulas of epilogues, for the element in row i and column j, z being the product after alpha and beta:
//! - bias: z + bias\[i\]
//! - ReLU: max(z, 0); GELU: z (1 + tanh(u)) / 2 with u = sqrt(2/π) (z + 0.044715 z³), with z kept in aux if asked
//! - dGELU: z times the derivative of GELU at aux\[i, j\]
//! - bias gradients: of D, the sum of a row of D; of A, the sum of a row of op(A); of B, the sum of a column of op(B)

use phalanx_emulator_link::handle::Handles;
use phalanx_emulator_link::pointer::Host;

use crate::element::{ElementType, InputRounding};
use crate::layout::value;
use crate::status::{Result, Status};

/// A product's description.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Description {
    /// What inputs are rounded to, and whether everything is f64.
    pub inputs: InputRounding,
    pub double: bool,
    /// The type of alpha and beta.
    pub scale: ElementType,
    /// Whether alpha and beta are in device memory.
    pub scale_on_device: bool,
    pub transposed: [bool; 2],
    pub epilogue: Epilogue,
    /// Device addresses; 0 for none. The types are those of D if not set.
    pub bias: u64,
    pub bias_kind: Option<ElementType>,
    pub bias_stride: i64,
    pub aux: u64,
    pub aux_kind: Option<ElementType>,
    pub aux_leading: usize,
    pub aux_stride: i64,
}

/// All descriptions.
pub(crate) static DESCRIPTIONS: Handles<Description> = Handles::new("matmul description", 18);

/// What a compute type means for inputs, and whether it is f64's.
pub(crate) fn compute(number: i32) -> Result<(InputRounding, bool)> {
    match number {
        68 | 69 => Ok((InputRounding::AsTheyAre, false)),
        74 => Ok((InputRounding::F16, false)),
        75 => Ok((InputRounding::Bf16, false)),
        77 => Ok((InputRounding::Tf32, false)),
        70 | 71 => Ok((InputRounding::AsTheyAre, true)),
        _ => Err(Status::NOT_SUPPORTED.because(format!("compute type {number} is not emulated"))),
    }
}

fn transposition(name: &str, at: Host, bytes: usize) -> Result<bool> {
    match value::<i32>(name, at, bytes)? {
        0 => Ok(false),
        // Of real numbers the conjugate transpose is the transpose.
        1 | 2 => Ok(true),
        other => Err(Status::INVALID_VALUE.because(format!("{name} is {other}"))),
    }
}

fn kind(name: &str, at: Host, bytes: usize) -> Result<Option<ElementType>> {
    match value::<i32>(name, at, bytes)? {
        -1 => Ok(None),
        number => ElementType::from_number(number).map(Some),
    }
}

/// Sets an attribute, by its number in `cublasLtMatmulDescAttributes_t`.
pub(crate) fn set(d: &mut Description, attribute: i32, at: Host, bytes: usize) -> Result<()> {
    match attribute {
        0 => (d.inputs, d.double) = compute(value("compute type", at, bytes)?)?,
        1 => d.scale = ElementType::from_number(value("scale type", at, bytes)?)?,
        2 => {
            d.scale_on_device = match value::<i32>("pointer mode", at, bytes)? {
                0 => false,
                1 => true,
                mode => {
                    return Err(Status::NOT_SUPPORTED.because(format!("pointer mode {mode} is not emulated")));
                }
            }
        }
        3 => d.transposed[0] = transposition("transa", at, bytes)?,
        4 => d.transposed[1] = transposition("transb", at, bytes)?,
        5 if !transposition("transc", at, bytes)? => {}
        7 => d.epilogue = Epilogue::from_number(value("epilogue", at, bytes)?)?,
        8 => d.bias = value("bias pointer", at, bytes)?,
        10 => d.bias_stride = value("bias batch stride", at, bytes)?,
        11 => d.aux = value("aux pointer", at, bytes)?,
        12 => {
            let leading: i64 = value("aux leading dimension", at, bytes)?;
            let wrong = |_| Status::INVALID_VALUE.because(format!("an aux leading dimension of {leading}"));
            d.aux_leading = usize::try_from(leading).map_err(wrong)?;
        }
        13 => d.aux_stride = value("aux batch stride", at, bytes)?,
        // How many multiprocessors to use, and whether sums may be less exact: no matter here.
        15 | 25 => {}
        22 => d.aux_kind = kind("aux type", at, bytes)?,
        26 => d.bias_kind = kind("bias type", at, bytes)?,
        _ => {
            return Err(
                Status::NOT_SUPPORTED.because(format!("matmul attribute {attribute} is not emulated"))
            );
        }
    }
    Ok(())
}

impl Description {
    /// A description with the defaults of `cublasLtMatmulDescCreate`.
    pub(crate) fn new(compute_type: i32, scale: i32) -> Result<Description> {
        let (inputs, double) = compute(compute_type)?;
        Ok(Description {
            inputs,
            double,
            scale: ElementType::from_number(scale)?,
            scale_on_device: false,
            transposed: [false; 2],
            epilogue: Epilogue::default(),
            bias: 0,
            bias_kind: None,
            bias_stride: 0,
            aux: 0,
            aux_kind: None,
            aux_leading: 0,
            aux_stride: 0,
        })
    }
}

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
