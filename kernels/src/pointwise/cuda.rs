//! Pointwise operations on a GPU: the launches of `pointwise.cu` (bodies over vectors, as traced text) and of `expression.cu` (scalar functions as
//! CUDA text).

use phalanx_tensor::cuda::{Args, Grid, Program, Traffic};
use phalanx_tensor::{DType, Element, Result, Tensor};
use smallvec::SmallVec;

use super::trace::{self, Trace, Traced, VECTOR};
use super::{Pointwise, refuse_overlap};
use crate::cuda::{File, LAYOUT, PRELUDE, Strided, type_name};

const ELEMENTS: File = ("elements.cuh", include_str!("elements.cuh"));
const FUNCTION: &[File] =
    &[PRELUDE, LAYOUT, VECTOR, ELEMENTS, ("pointwise.cu", include_str!("pointwise.cu"))];
const EXPRESSION: &[File] = &[PRELUDE, LAYOUT, ELEMENTS, ("expression.cu", include_str!("expression.cu"))];

/// What a scalar function is on a GPU: CUDA text of `x[0]`, `x[1]`, .., the inputs converted to the type `value`, of the
/// numbers `k[0]`, `k[1]`, .. and of the element's number `i`. `expression.cu` has functions for it.
#[derive(Clone, Copy)]
pub(crate) struct Expression<'a> {
    pub(crate) text: &'static str,
    pub(crate) value: &'static str,
    pub(crate) numbers: Numbers<'a>,
}

/// An expression's numbers; there may be none.
#[derive(Clone, Copy)]
pub(crate) enum Numbers<'a> {
    Integers(&'a [i64]),
    Floats(&'a [f64]),
}

impl<'a> Expression<'a> {
    /// Of integers, wherever they come from.
    pub(crate) fn of_integers(text: &'static str, numbers: &'a [i64]) -> Expression<'a> {
        Expression { text, value: "i64", numbers: Numbers::Integers(numbers) }
    }

    /// Of elements that are moved and not computed with.
    pub(crate) fn of_bits(text: &'static str, dtype: DType, numbers: &'a [i64]) -> Expression<'a> {
        Expression { text, value: bits_name(dtype), numbers: Numbers::Integers(numbers) }
    }
}

/// The type that elements of a dtype are stored in.
pub(crate) fn storage_name(dtype: DType) -> &'static str {
    if dtype == DType::Bool { "u8" } else { type_name(dtype) }
}

/// The unsigned integer of a dtype's size.
pub(crate) fn bits_name(dtype: DType) -> &'static str {
    match dtype.size() {
        1 => "u8",
        2 => "u16",
        4 => "u32",
        _ => "u64",
    }
}

/// An element's bits, as an expression of bits takes them.
pub(crate) fn bits<T: Element>(value: T) -> i64 {
    let mut bytes = [0; 8];
    bytes[..size_of::<T>()].copy_from_slice(bytemuck::bytes_of(&value));
    i64::from_le_bytes(bytes)
}

/// The type that elements of a dtype are compared in.
pub(crate) fn computed_name(dtype: DType) -> &'static str {
    match dtype {
        DType::BF16 | DType::F16 => "f32",
        other => storage_name(other),
    }
}

/// The type that elements of a dtype are converted by way of.
pub(crate) fn converted_name(dtype: DType) -> &'static str {
    if dtype.is_float() { computed_name(dtype) } else { "i64" }
}

/// Sets `out` to `f` of the inputs, which broadcast to it. An input may be `out` itself.
pub(super) fn map<const N: usize>(
    op: &'static str,
    f: impl Pointwise<N>,
    inputs: [&Tensor; N],
    out: &mut Tensor,
) -> Result<()> {
    map_traced(op, &trace::function(|x: [Trace; N]| [f.eval(x)]), &inputs, out)
}

fn map_traced(op: &'static str, traced: &Traced, inputs: &[&Tensor], out: &mut Tensor) -> Result<()> {
    let (dtype, t) = (out.dtype(), type_name(out.dtype()));
    let family = ProgramFamily { files: FUNCTION, name: "pointwise.cu", types: [t, t, t] };
    let layout = Arrangement::new(op, inputs, out, &[dtype.size()])?;
    family.launch(op, layout, inputs, out, &[("FUNCTION", traced.text)], &|args| traced.pass(args, dtype))
}

/// Sets `out` to the expression of the inputs, which broadcast to it. An input may be `out` itself.
pub(crate) fn evaluate<const N: usize>(
    op: &'static str,
    expression: &Expression<'_>,
    inputs: [&Tensor; N],
    out: &mut Tensor,
) -> Result<()> {
    const { assert!(N >= 1) };
    evaluate_all(op, expression, &inputs, out)
}

fn evaluate_all(
    op: &'static str,
    expression: &Expression<'_>,
    inputs: &[&Tensor],
    out: &mut Tensor,
) -> Result<()> {
    let moved = expression.value == bits_name(out.dtype());
    let name = |t: &Tensor| if moved { bits_name(t.dtype()) } else { storage_name(t.dtype()) };
    let types = [name(inputs[0]), name(inputs[inputs.len() - 1]), name(out)];
    let sizes: SmallVec<[usize; 4]> = inputs.iter().map(|t| t.dtype().size()).collect();
    let layout = Arrangement::new(op, inputs, out, &sizes)?;
    evaluate_in(op, expression, layout, types, inputs, out)
}

/// [`evaluate`] of inputs that lie otherwise than their strides say.
pub(crate) fn evaluate_in(
    op: &'static str,
    expression: &Expression<'_>,
    layout: Arrangement,
    types: [&str; 3],
    inputs: &[&Tensor],
    out: &mut Tensor,
) -> Result<()> {
    const COUNTS: [&str; 5] = ["1", "1", "2", "3", "4"];
    let family = ProgramFamily { files: EXPRESSION, name: "expression.cu", types };
    let Expression { text, value, numbers } = *expression;
    let (number, count) = match numbers {
        Numbers::Integers(k) => ("i64", k.len()),
        Numbers::Floats(k) => ("f64", k.len()),
    };
    let defines = [("EXPRESSION", text), ("VALUE", value), ("NUMBER", number), ("NUMBERS", COUNTS[count])];
    family.launch(op, layout, inputs, out, &defines, &|args| {
        // An expression that names no input reads none.
        let reads = text.contains("x[");
        let args = args.with_traffic(|t| Traffic { read: if reads { t.read } else { 0 }, ..t });
        match numbers {
            // A kernel takes one number at least.
            _ if count == 0 => args.value(0u64),
            Numbers::Integers(k) => k.iter().fold(args, |args, &k| args.value(k)),
            Numbers::Floats(k) => k.iter().fold(args, |args, &k| args.value(k)),
        }
    })
}

/// How a kernel finds the elements: the layout of inputs and output.
pub(crate) enum Arrangement {
    /// There are no elements.
    Empty,
    /// All contiguous and aligned.
    Contiguous { lanes: usize },
    /// By strides; with aligned packets of `lanes`.
    Strided { layout: Box<Strided>, lanes: usize },
}

impl Arrangement {
    /// Of inputs with elements of these sizes, and of an output that does not overlap itself.
    fn new(op: &'static str, inputs: &[&Tensor], out: &Tensor, input_bytes: &[usize]) -> Result<Arrangement> {
        refuse_overlap(op, out)?;
        if out.numel() == 0 {
            return Ok(Arrangement::Empty);
        }
        let widest = input_bytes.iter().fold(out.dtype().size(), |a, &b| a.max(b));
        let lanes = 16 / widest;
        let aligned = |t: &Tensor| t.offset().is_multiple_of(lanes);
        let plain = |t: &Tensor| t.is_contiguous() && t.same_shape(out) && aligned(t);
        if plain(out) && inputs.iter().all(|t| plain(t)) {
            return Ok(Arrangement::Contiguous { lanes });
        }
        // Absent inputs lie as the output does, which changes nothing.
        let all: [&Tensor; 5] = std::array::from_fn(|n| inputs.get(n).copied().unwrap_or(out));
        let layout = Strided::new(op, out.shape(), all)?;
        let packed = layout.is_packed(lanes) && all.iter().all(|t| aligned(t));
        Ok(Arrangement::Strided { layout: Box::new(layout), lanes: if packed { lanes } else { 1 } })
    }

    /// One by one, by a layout whose tensors are the inputs and the output.
    pub(crate) fn singly(layout: Strided) -> Arrangement {
        Arrangement::Strided { layout: Box::new(layout), lanes: 1 }
    }
}

/// A family of programs, and the types of one: of the first input, of the others, of the output.
struct ProgramFamily<'a> {
    files: &'static [File],
    name: &'static str,
    types: [&'a str; 3],
}

/// Threads of a block.
const THREADS: u32 = 256;

impl ProgramFamily<'_> {
    fn launch<'a>(
        &self,
        op: &'static str,
        arrangement: Arrangement,
        inputs: &[&'a Tensor],
        out: &'a mut Tensor,
        own: &[(&str, &str)],
        pass: &dyn Fn(Args<'a>) -> Args<'a>,
    ) -> Result<()> {
        let [first, rest, result] = self.types;
        let (contiguous, entry, lanes) = match &arrangement {
            Arrangement::Empty => {
                out.bump_version();
                return Ok(());
            }
            Arrangement::Contiguous { lanes } => ("1", "contiguous", *lanes),
            Arrangement::Strided { lanes: 1, .. } => ("0", "singles", 1),
            Arrangement::Strided { lanes, .. } => ("0", "packets", *lanes),
        };
        let shared = [
            ("FIRST", first),
            ("REST", rest),
            ("OUT", result),
            ("INPUTS", ["1", "2", "3", "4"][inputs.len() - 1]),
            ("CONTIGUOUS", contiguous),
        ];
        let defines: SmallVec<[(&str, &str); 9]> = shared.iter().chain(own).copied().collect();
        let program = Program { name: self.name, files: self.files, defines: &defines };
        let (gpu, numel) = (out.device().gpu()?, out.numel());
        let kernel = gpu.kernel(op, &program, entry)?;
        let mut args = Args::new(op, gpu).write(out)?;
        for input in inputs {
            args = args.read(input)?;
        }
        if let Arrangement::Strided { layout, .. } = &arrangement {
            args = args.value(**layout);
        }
        kernel.launch(Grid::over(gpu, numel.div_ceil(lanes), THREADS), pass(args.value(numel as u64)))
    }
}
