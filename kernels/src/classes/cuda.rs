//! Targets on a GPU: they stay there, and with them what depends on them, the mean's denominator too.

use phalanx_tensor::cuda::{Args, Gpu, Grid, Kernel, Program, Scratch};
use phalanx_tensor::{Result, Tensor};

use super::Weighing;
use crate::cuda::{FAULT, File, PRELUDE, type_name};
use crate::reduction::Reduction;

/// `Targets` and `Factor`.
pub(crate) const CLASSES: File = ("classes.cuh", include_str!("classes.cuh"));
const PROGRAM: &[File] = &[PRELUDE, FAULT, CLASSES, ("classes.cu", include_str!("classes.cu"))];

/// The targets of one call.
pub(crate) struct Targets<'a> {
    op: &'static str,
    gpu: &'static Gpu,
    weighing: Weighing<'a>,
    target: Tensor,
    weight: Option<Tensor>,
    classes: usize,
    element: &'static str,
}

impl<'a> Targets<'a> {
    /// Of logits `x` of so many classes.
    pub(crate) fn new(
        op: &'static str,
        weighing: Weighing<'a>,
        x: &Tensor,
        target: &Tensor,
        classes: usize,
    ) -> Result<Targets<'a>> {
        let weight = weighing.weight.map(Tensor::contiguous).transpose()?;
        let (gpu, target, element) = (x.device().gpu()?, target.contiguous()?, type_name(x.dtype()));
        Ok(Targets { op, gpu, weighing, target, weight, classes, element })
    }

    /// How many there are.
    pub(crate) fn items(&self) -> usize {
        self.target.numel()
    }

    /// A thread an item.
    pub(crate) fn grid(&self) -> Grid {
        Grid::new(self.items().div_ceil(256), 256)
    }

    /// No arguments yet.
    pub(crate) fn args(&self) -> Args<'_> {
        Args::new(self.op, self.gpu)
    }

    /// The last argument of a kernel: `Targets`.
    pub(crate) fn put<'b>(&'b self, args: Args<'b>) -> Result<Args<'b>> {
        let args = args.read(&self.target)?.read_if(self.weight.as_ref())?;
        let args = args.value(self.weighing.ignore_index).value(self.classes as u64);
        Ok(args.value(self.items() as u64).faults()?.value(0u32))
    }

    /// The argument `Factor`, of which the first part is here if it is known to the device alone.
    pub(crate) fn put_factor<'b>(&self, args: Args<'b>, found: Option<&Scratch>) -> Args<'b> {
        match found {
            Some(found) => args.scratch(found).value(0f64),
            None => args.value(0u64).value(self.weighing.scale),
        }
    }

    /// The mean's factor.
    pub(crate) fn factor(&self) -> Result<Option<Scratch>> {
        if self.weighing.reduction != Reduction::Mean {
            return Ok(None);
        }
        let factor = self.gpu.scratch(self.op, size_of::<f64>())?;
        let args = self.put(self.args().scratch(&factor).value(self.weighing.scale))?;
        self.kernel("factor", self.element)?.launch(Grid::new(1, 1024), args)?;
        Ok(Some(factor))
    }

    /// Room for a loss an item.
    pub(crate) fn losses(&self) -> Result<Scratch> {
        self.gpu.scratch(self.op, self.items() * size_of::<f64>())
    }

    /// What the items' losses become.
    pub(crate) fn reduce(&self, losses: &Scratch, loss: &mut Tensor) -> Result<()> {
        let (reduction, scale) = (self.weighing.reduction, self.weighing.scale);
        let result = type_name(loss.dtype());
        let args = self.args().write(loss)?.scratch(losses);
        if reduction == Reduction::None {
            let args = args.value(scale).value(self.items() as u64);
            return self.kernel("each", result)?.launch(self.grid(), args);
        }
        let args = self.put(args.value(u64::from(reduction == Reduction::Mean)).value(scale))?;
        self.kernel("reduce", result)?.launch(Grid::new(1, 1024), args)
    }

    /// How far apart the gradients of two items' losses lie: 0 if there is but one.
    pub(crate) fn slope_step(&self) -> u64 {
        u64::from(self.weighing.reduction == Reduction::None)
    }

    /// For a result of that type.
    fn kernel(&self, entry: &str, result: &str) -> Result<Kernel> {
        let defines = &[("ELEMENT", self.element), ("RESULT", result)];
        let program = Program { name: "classes.cu", files: PROGRAM, defines };
        self.gpu.kernel(self.op, &program, entry)
    }
}
