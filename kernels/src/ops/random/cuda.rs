//! Random numbers on a GPU: the CPU's, since both are functions of the place.

use phalanx_tensor::cuda::{Args, Grid, Kernel, Program, Scratch};
use phalanx_tensor::{DType, PhiloxStream, Result, Tensor};

use super::bias_dropout_add::Draw;
use super::words::Words;
use crate::cuda::{File, LAYOUT, PRELUDE, Strided, type_name};
use crate::pointwise::Pointwise;
use crate::pointwise::trace::{self, Trace, Traced, VECTOR};

const FILES: &[File] = &[PRELUDE, LAYOUT, VECTOR, ("random.cu", include_str!("random.cu"))];

/// Elements that a thread makes at a time.
fn group(dtype: DType) -> usize {
    if dtype.size() == 2 { 8 } else { 4 }
}

/// A kernel of elements of `dtype`, which may be narrower than those of `out` in `bias_dropout_add`.
fn kernel(
    op: &'static str,
    (dtype, out): (DType, &Tensor),
    function: Option<&Traced>,
    entry: &str,
) -> Result<Kernel> {
    let dropout = if function.is_some() { "0" } else { "1" };
    let text = function.map_or("", |f| f.text);
    let [elem, stream] = [dtype, out.dtype()].map(type_name);
    let defines = [("ELEM", elem), ("STREAM", stream), ("DROPOUT", dropout), ("FUNCTION", text)];
    out.device().gpu()?.kernel(op, &Program { name: "random.cu", files: FILES, defines: &defines }, entry)
}

/// A number of the type that `dtype` is computed in.
fn wide<'a>(args: Args<'a>, dtype: DType, x: f64) -> Args<'a> {
    if dtype == DType::F64 { args.value(x) } else { args.value(x as f32) }
}

/// Where the elements are in the whole: the layout, the first place, whether groups are whole blocks of the generator.
struct Places(Strided, u64, bool);

impl Places {
    fn of(op: &'static str, words: &Words, dtype: DType) -> Result<Places> {
        let layout = Strided::of(op, words.loops())?;
        let group = group(dtype);
        let [stride] = words.loops().inner_strides();
        let together = stride == 1 && layout.is_packed(group) && words.first().is_multiple_of(4);
        Ok(Places(layout, words.first(), together))
    }
}

/// Sets the contiguous `out` to `make` of two numbers between 0 and 1 for each element.
pub(super) fn fill(
    op: &'static str,
    make: impl Pointwise<2>,
    (words, stream): (&Words, PhiloxStream),
    out: &mut Tensor,
) -> Result<()> {
    let (dtype, n, gpu) = (out.dtype(), out.numel(), out.device().gpu()?);
    if n == 0 {
        return Ok(());
    }
    let f = trace::function(|uv: [Trace; 2]| [make.eval(uv)]);
    let Places(layout, first, together) = Places::of(op, words, dtype)?;
    let kernel = kernel(op, (dtype, out), Some(&f), "fill")?;
    let args = Args::new(op, gpu).write(out)?.value(layout).value(first).value(u32::from(together));
    let args = f.pass(args.value(n as u64).draws(stream), dtype);
    kernel.launch(Grid::over(gpu, n.div_ceil(group(dtype)), 256), args)
}

/// Sets the contiguous `out` to `mean + std z` for the first z that `make` draws within `bound` of 0, or to the mean after
/// so many tries.
pub(super) fn fill_truncated(
    op: &'static str,
    make: impl Pointwise<2>,
    ([mean, std], bound, tries): ([f64; 2], f64, u64),
    (words, stream): (&Words, PhiloxStream),
    out: &mut Tensor,
) -> Result<()> {
    let (dtype, n, gpu) = (out.dtype(), out.numel(), out.device().gpu()?);
    if n == 0 {
        return Ok(());
    }
    let f = trace::function(|uv: [Trace; 2]| [make.eval(uv)]);
    let Places(layout, first, _) = Places::of(op, words, dtype)?;
    let kernel = kernel(op, (dtype, out), Some(&f), "truncated")?;
    let args = Args::new(op, gpu).write(out)?.value(layout).value(first).value(n as u64);
    let args = wide(f.pass(args.draws(stream), dtype), dtype, bound).value(tries as u32);
    let args = wide(wide(args, dtype, mean), dtype, std);
    kernel.launch(Grid::over(gpu, n, 256), args)
}

/// Sets the contiguous `out` to `scale x` where the element's word is at least the threshold, else to 0.
pub(super) fn drop_out(
    op: &'static str,
    x: &Tensor,
    (threshold, scale): (u32, f64),
    (words, stream): (&Words, PhiloxStream),
    out: &mut Tensor,
) -> Result<()> {
    let (dtype, n, gpu) = (out.dtype(), out.numel(), out.device().gpu()?);
    if n == 0 {
        return Ok(());
    }
    let gathered = gathered(op, x)?;
    let Places(layout, first, together) = Places::of(op, words, dtype)?;
    let kernel = kernel(op, (dtype, out), None, "dropout")?;
    let args = Args::new(op, gpu).write(out)?;
    let args = read(args, x, &gathered)?;
    let args = args.value(layout).value(first).value(u32::from(together));
    let args = wide(args.value(n as u64).draws(stream).value(threshold), dtype, scale);
    kernel.launch(Grid::over(gpu, n.div_ceil(group(dtype)), 256), args)
}

/// Sets the contiguous `out` to `residual + dropout(x + bias)`.
pub(super) fn bias_dropout_add(
    [x, residual]: [&Tensor; 2],
    bias: Option<&Tensor>,
    draw: Draw,
    (words, stream): (&Words, PhiloxStream),
    out: &mut Tensor,
) -> Result<()> {
    const OP: &str = "bias_dropout_add";
    let (dtype, n, gpu) = (x.dtype(), out.numel(), out.device().gpu()?);
    if n == 0 {
        return Ok(());
    }
    let entry = match (bias.is_some(), draw.is_drawn) {
        (true, true) => "bias_dropout_add",
        (true, false) => "bias_add",
        (false, true) => "dropout_add",
        (false, false) => "branch_add",
    };
    let width = bias.map_or(0, Tensor::numel) as u64;
    let inputs = [Some(x), Some(residual), bias];
    let gathered = |input: Option<&Tensor>| input.map_or(Ok(None), |input| gathered(OP, input));
    let [x, residual, bias] = inputs.map(gathered);
    let gathered = [x?, residual?, bias?];
    let Places(layout, first, together) = Places::of(OP, words, dtype)?;
    let kernel = kernel(OP, (dtype, out), None, entry)?;
    let mut args = Args::new(OP, gpu).write(out)?;
    for (input, gathered) in inputs.into_iter().zip(&gathered) {
        args = match input {
            Some(input) => read(args, input, gathered)?,
            None => args.read_if(None)?,
        };
    }
    let args = args.value(width).value(layout).value(first).value(u32::from(together)).value(n as u64);
    let args = args.draws(stream).value(draw.threshold);
    kernel.launch(Grid::over(gpu, n.div_ceil(group(dtype)), 256), wide(args, dtype, draw.scale))
}

/// A copy of the elements, unless they lie together and groups of them are aligned.
fn gathered(op: &'static str, x: &Tensor) -> Result<Option<Scratch>> {
    let fits = x.is_contiguous() && x.offset().is_multiple_of(group(x.dtype()));
    (!fits).then(|| Scratch::of(op, x)).transpose()
}

fn read<'a>(args: Args<'a>, x: &'a Tensor, gathered: &'a Option<Scratch>) -> Result<Args<'a>> {
    match gathered {
        Some(gathered) => Ok(args.scratch(gathered)),
        None => args.read(x),
    }
}
