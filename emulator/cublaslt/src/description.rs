//! What a product computes besides multiplying: transpositions, types, the epilogue.

use std::sync::LazyLock;

use phalanx_emulator_link::pointer::{Host, Out};

use crate::call::{Result, Status, present};
use crate::element::{Inputs, Kind};
use crate::epilogue::Epilogue;
use crate::handle::{Handles, value};

/// A product's description.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Description {
    /// What inputs are rounded to, and whether everything is f64.
    pub inputs: Inputs,
    pub double: bool,
    /// The type of alpha and beta.
    pub scale: Kind,
    /// Whether alpha and beta are in device memory.
    pub scale_on_device: bool,
    pub transposed: [bool; 2],
    pub epilogue: Epilogue,
    /// Device addresses; 0 for none. The types are those of D if not set.
    pub bias: u64,
    pub bias_kind: Option<Kind>,
    pub bias_stride: i64,
    pub aux: u64,
    pub aux_kind: Option<Kind>,
    pub aux_leading: usize,
    pub aux_stride: i64,
}

static DESCRIPTIONS: LazyLock<Handles<Description>> =
    LazyLock::new(|| Handles::new("matmul description", 18));

/// The description of a handle.
pub(crate) fn description(handle: usize) -> Result<Description> {
    DESCRIPTIONS.get(handle)
}

/// What a compute type means for inputs, and whether it is f64's.
fn compute(number: i32) -> Result<(Inputs, bool)> {
    match number {
        68 | 69 => Ok((Inputs::AsTheyAre, false)),
        74 => Ok((Inputs::F16, false)),
        75 => Ok((Inputs::Bf16, false)),
        77 => Ok((Inputs::Tf32, false)),
        70 | 71 => Ok((Inputs::AsTheyAre, true)),
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

fn kind(name: &str, at: Host, bytes: usize) -> Result<Option<Kind>> {
    match value::<i32>(name, at, bytes)? {
        -1 => Ok(None),
        number => Kind::from_number(number).map(Some),
    }
}

fn set(d: &mut Description, attribute: i32, at: Host, bytes: usize) -> Result<()> {
    match attribute {
        0 => (d.inputs, d.double) = compute(value("compute type", at, bytes)?)?,
        1 => d.scale = Kind::from_number(value("scale type", at, bytes)?)?,
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

export! {
    fn cublasLtMatmulDescCreate(out: Out<usize>, compute_type: i32, scale: i32) {
        let (inputs, double) = compute(compute_type)?;
        let description = Description {
            inputs,
            double,
            scale: Kind::from_number(scale)?,
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
        };
        present(out.set(DESCRIPTIONS.add(description)), "matmulDesc")
    }
    fn cublasLtMatmulDescDestroy(description: usize) { DESCRIPTIONS.remove(description) }
    fn cublasLtMatmulDescSetAttribute(description: usize, attribute: i32, at: Host, bytes: usize) {
        DESCRIPTIONS.change(description, |d| set(d, attribute, at, bytes))
    }
}
