//! Launches of `optim.cu`: as many tensors at a time as a kernel's arguments hold.

use phalanx_tensor::cuda::{Args, Grid, Program, Traffic};
use phalanx_tensor::{DType, Device, Error, Result, Tensor};
use smallvec::SmallVec;

use super::{Numbers, Ready, Rule};
use crate::check;
use crate::cuda::{File, PRELUDE, type_name};
use crate::pointwise::trace::{Traced, VECTOR, function_of};

const FILES: &[File] = &[PRELUDE, VECTOR, ("optim.cu", include_str!("optim.cu"))];

/// Rows of a launch's table: with those of the largest rule, arguments stay below 4 KiB.
const TENSORS: usize = 56;
const _: () = assert!(TENSORS == 56); // the same number as text is in the defines
/// Threads of a block, and how often each takes 16 bytes of the parameter, as in `optim.cu`.
const THREADS: usize = 256;
const TURNS: usize = 4;

/// Items that one program updates.
type Form = (Device, DType, DType, bool, u64);

/// The numbers that a step of this rule passes to the kernel, and the gradient's scale.
pub(super) fn numbers<const N: usize>(rule: impl Rule<N>, scale: f64) -> Vec<f64> {
    let traced = trace(rule);
    // The kernel's structure has one number at least.
    let unused = if traced.numbers.is_empty() { &[0.0][..] } else { &[] };
    traced.numbers.iter().chain(unused).copied().chain([scale]).collect()
}

fn trace<const N: usize>(rule: impl Rule<N>) -> Traced {
    function_of(2 + N, |x| {
        let (param, state) = rule.eval(x[0], x[1], std::array::from_fn(|n| x[2 + n]));
        std::iter::once(param).chain(state).collect()
    })
}

/// Runs the rule over items on GPUs.
pub(super) fn run<const N: usize>(
    op: &'static str,
    rule: impl Rule<N>,
    items: Vec<Ready<'_, N>>,
    factor: Option<&Tensor>,
    numbers: &Numbers<'_>,
) -> Result<()> {
    if items.is_empty() {
        return Ok(());
    }
    let traced = trace(rule);
    let numbers = match numbers {
        Numbers::OnDevice(tensor) => {
            check::dtype(op, tensor, DType::F64)?;
            let wanted = self::numbers(rule, 1.0).len();
            if tensor.numel() < wanted || !tensor.is_contiguous() {
                let got = format!("numbers of shape {:?}", tensor.shape());
                return Err(Error::shape(op, got, format!("{wanted} numbers, contiguous")));
            }
            Some(*tensor)
        }
        _ => None,
    };
    let mut groups: SmallVec<[(Form, Vec<Ready<'_, N>>); 2]> = SmallVec::new();
    for item in items.into_iter().filter(|item| item.param.numel() > 0) {
        let (param, grad) = (&*item.param, &item.grad);
        let form = (param.device(), param.dtype(), grad.dtype(), item.master.is_some(), item.scale.to_bits());
        match groups.iter_mut().find(|(known, _)| *known == form) {
            Some((_, group)) => group.push(item),
            None => groups.push((form, vec![item])),
        }
    }
    for (form, mut group) in groups {
        for items in group.chunks_mut(TENSORS) {
            launch(op, &traced, form, items, factor, numbers)?;
        }
    }
    Ok(())
}

fn launch<const N: usize>(
    op: &'static str,
    traced: &Traced,
    (device, dtype, grad_dtype, has_master, scale): Form,
    items: &mut [Ready<'_, N>],
    factor: Option<&Tensor>,
    numbers: Option<&Tensor>,
) -> Result<()> {
    const COUNTS: [&str; 4] = ["0", "1", "2", "3"];
    let gpu = device.gpu()?;
    let defines = [
        ("PARAM", type_name(dtype)),
        ("GRAD", type_name(grad_dtype)),
        ("MASTER", COUNTS[usize::from(has_master)]),
        ("STATES", COUNTS[N]),
        ("TENSORS", "56"),
        ("FUNCTION", traced.text),
    ];
    let program = Program { name: "optim.cu", files: FILES, defines: &defines };
    let stretch = THREADS * TURNS * (16 / dtype.size());
    let (count, mut blocks, mut args) = (items.len(), 0, Args::new(op, gpu));
    let parameters: usize = items.iter().map(|item| item.param.numel()).sum();
    for Ready { param, master, grad, state, .. } in items {
        let length = param.numel();
        args = args.write(param)?.write_if(master.as_deref_mut())?.read(grad)?;
        for state in state {
            args = args.write(state)?;
        }
        if N == 0 {
            args = args.value(0u64);
        }
        args = args.value(length as u64).value(blocks as u64);
        blocks += length.div_ceil(stretch);
    }
    for _ in 0..(TENSORS - count) * (5 + N.max(1)) {
        args = args.value(0u64);
    }
    let args = traced.pass(args.value(count as u64), dtype).value(f64::from_bits(scale));
    let of = |dtype| factor.filter(|factor| factor.dtype() == dtype);
    if let Some(factor) = factor {
        check::shape(op, "a factor", &factor.view_into(0, &[])?, &[])?;
    }
    let args = args.read_if(numbers)?.read_if(of(DType::F32))?.read_if(of(DType::F64))?;
    // Masters and states are read and written; parameters that have a master are only written.
    let not_read = if has_master { parameters * dtype.size() } else { 0 };
    let args = args.reading_outputs().with_traffic(|t| Traffic { read: t.read - not_read as u64, ..t });
    gpu.kernel(op, &program, "update")?.launch(Grid::new(blocks, THREADS as u32), args)
}
