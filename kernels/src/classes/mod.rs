//! Class-index targets of cross entropy and NLL: range check, class weights, `ignore_index`, and the [`Reduction`] of
//! the items' losses. A CPU reads the targets into [`Classes`]. On a GPU the targets stay on the device ([`Targets`]), and so does the mean's
//! denominator, which depends on them.

use phalanx_tensor::cuda::{Args, Gpu, Grid, Kernel, Program, Scratch};
use phalanx_tensor::{DType, Dims, Error, Result, Tensor};

use crate::block_reader::{elements, values_f64};
use crate::check;
use crate::cuda::{FAULT, File, PRELUDE, type_name};

/// How the items of a loss over classes are weighed and combined.
#[derive(Clone, Copy)]
pub(crate) struct Weighing<'a> {
    /// A weight for each class.
    pub(crate) weight: Option<&'a Tensor>,
    /// Items with this target are ignored.
    pub(crate) ignore_index: i64,
    /// How the items' losses are reduced.
    pub(crate) reduction: Reduction,
    /// A factor on the result.
    pub(crate) scale: f64,
}

impl Weighing<'_> {
    /// Checks shapes, dtypes and devices: `x` is [N, C, ...], `target` [N, ...].
    pub(crate) fn check(&self, op: &'static str, x: &Tensor, target: &Tensor) -> Result<()> {
        check::float(op, x)?;
        check::same_device(op, &[x, target])?;
        if target.dtype() != DType::I64 {
            return Err(Error::dtype(op, target.dtype(), "i64 for the targets, the numbers of the classes"));
        }
        if x.rank() < 2 || x.shape()[1] == 0 {
            let got = format!("an input of shape {:?}", x.shape());
            return Err(Error::shape(op, got, "[N, C, ...] with at least one class"));
        }
        let mut items = Dims::from_slice(x.shape());
        items.remove(1);
        check::shape(op, "a target", target, &items)?;
        let Some(weight) = self.weight else { return Ok(()) };
        check::same(op, &[x, weight])?;
        check::shape(op, "a weight", weight, &x.shape()[1..2])
    }

    /// The result's shape.
    pub(crate) fn result_shape(&self, target: &Tensor) -> Dims {
        if self.reduction == Reduction::None { Dims::from_slice(target.shape()) } else { Dims::new() }
    }

    /// Reads the targets of `classes` classes.
    pub(crate) fn read(&self, op: &'static str, target: &Tensor, classes: usize) -> Result<Classes> {
        let weight = self.weight.map(|w| values_f64(op, w)).transpose()?;
        if let Some(odd) = weight.iter().flatten().find(|w| w.is_nan() || **w < 0.0) {
            return Err(Error::invalid(op, format!("got a class weight of {odd}, wanted 0 or more")));
        }
        let class = |(at, index): (usize, i64)| match usize::try_from(index) {
            _ if index == self.ignore_index => Ok(None),
            Ok(class) if class < classes => Ok(Some(class)),
            _ => Err(Error::range(
                op,
                format!("target {index} (item {at})"),
                format!("a class below {classes}, or {} for an item to ignore", self.ignore_index),
            )),
        };
        let targets = elements::<i64>(op, target)?.into_iter().enumerate().map(class);
        let mut classes = Classes { targets: targets.collect::<Result<_>>()?, weight, factor: self.scale };
        if self.reduction == Reduction::Mean {
            let counted = classes.targets.iter().flatten();
            classes.factor /= match &classes.weight {
                Some(weight) => counted.map(|&class| weight[class]).sum(),
                None => counted.count() as f64,
            };
        }
        Ok(classes)
    }
}

/// The targets of one call on a CPU, with the factor of the reduction.
pub(crate) struct Classes {
    /// Each item's class; none if it is ignored.
    pub(crate) targets: Vec<Option<usize>>,
    /// Each class's weight; 1 if absent.
    pub(crate) weight: Option<Vec<f64>>,
    /// What an item's loss is multiplied with in the result.
    pub(crate) factor: f64,
}

impl Classes {
    pub(crate) fn weight_of(&self, class: usize) -> f64 {
        self.weight.as_ref().map_or(1.0, |w| w[class])
    }

    /// The reduced losses times the factor: their sum, or each of them. Items are added in order, in f64.
    pub(crate) fn reduce(&self, reduction: Reduction, losses: impl Iterator<Item = f64>) -> Vec<f64> {
        match reduction {
            Reduction::None => losses.map(|loss| loss * self.factor).collect(),
            // Without counted items the factor is infinite, and makes the empty sum NaN.
            _ => vec![losses.sum::<f64>() * self.factor],
        }
    }

    /// The factor of each item's gradient: the result's gradient `dy` (one number, or one an item) times the factor;
    /// 0 for ignored items.
    pub(crate) fn slopes(&self, reduction: Reduction, dy: &[f64]) -> Vec<f64> {
        let dy = |item: usize| if reduction == Reduction::None { dy[item] } else { dy[0] };
        let slope = |(item, class): (usize, &Option<usize>)| class.map_or(0.0, |_| dy(item) * self.factor);
        self.targets.iter().enumerate().map(slope).collect()
    }
}

/// `x` with its classes last, and the number of items.
pub(crate) fn classes_last(x: &Tensor) -> Result<Tensor> {
    let order: Dims = (0..x.rank()).filter(|&d| d != 1).chain([1]).collect();
    x.permute(&order)
}

/// The reverse of [`classes_last`].
pub(crate) fn classes_second(x: &Tensor) -> Result<Tensor> {
    let last = x.rank() - 1;
    let order: Dims = [0, last].into_iter().chain(1..last).collect();
    x.permute(&order)
}

/// The CUDA types `Targets` and `Factor`.
pub(crate) const CLASSES: File = ("classes.cuh", include_str!("classes.cuh"));
const PROGRAM: &[File] = &[PRELUDE, FAULT, CLASSES, ("classes.cu", include_str!("classes.cu"))];

/// The targets of one call on a GPU.
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
    /// The targets for logits of this dtype and `classes` classes, on the device of `target`.
    pub(crate) fn new(
        op: &'static str,
        weighing: Weighing<'a>,
        dtype: DType,
        target: &Tensor,
        classes: usize,
    ) -> Result<Targets<'a>> {
        let weight = weighing.weight.map(Tensor::contiguous).transpose()?;
        let (gpu, target, element) = (target.device().gpu()?, target.contiguous()?, type_name(dtype));
        Ok(Targets { op, gpu, weighing, target, weight, classes, element })
    }

    /// The number of items.
    pub(crate) fn items(&self) -> usize {
        self.target.numel()
    }

    /// A grid with a thread for each item.
    pub(crate) fn grid(&self) -> Grid {
        Grid::new(self.items().div_ceil(256), 256)
    }

    /// An empty argument list.
    pub(crate) fn args(&self) -> Args<'_> {
        Args::new(self.op, self.gpu)
    }

    /// Adds a kernel's last argument, `Targets`.
    pub(crate) fn put<'b>(&'b self, args: Args<'b>) -> Result<Args<'b>> {
        let args = args.read(&self.target)?.read_if(self.weight.as_ref())?;
        let args = args.value(self.weighing.ignore_index).value(self.classes as u64);
        Ok(args.value(self.items() as u64).faults()?.value(0u32))
    }

    /// Adds the argument `Factor`: `found`, if the factor is computed on the device, else the scale.
    pub(crate) fn put_factor<'b>(&self, args: Args<'b>, found: Option<&Scratch>) -> Args<'b> {
        match found {
            Some(found) => args.scratch(found).value(0f64),
            None => args.value(0u64).value(self.weighing.scale),
        }
    }

    /// Computes the mean's factor on the device; `None` for other reductions.
    pub(crate) fn factor(&self) -> Result<Option<Scratch>> {
        if self.weighing.reduction != Reduction::Mean {
            return Ok(None);
        }
        let factor = self.gpu.scratch(self.op, size_of::<f64>())?;
        let args = self.put(self.args().scratch(&factor).value(self.weighing.scale))?;
        self.kernel("factor", self.element)?.launch(Grid::new(1, 1024), args)?;
        Ok(Some(factor))
    }

    /// Scratch memory for the losses of all items.
    pub(crate) fn losses(&self) -> Result<Scratch> {
        self.gpu.scratch(self.op, self.items() * size_of::<f64>())
    }

    /// Reduces the items' losses into `loss`.
    pub(crate) fn reduce<'b>(
        &'b self,
        put_losses: impl FnOnce(Args<'b>) -> Result<Args<'b>>,
        loss: &'b mut Tensor,
    ) -> Result<()> {
        let (reduction, scale) = (self.weighing.reduction, self.weighing.scale);
        let result = type_name(loss.dtype());
        let args = put_losses(self.args().write(loss)?)?;
        if reduction == Reduction::None {
            let args = args.value(scale).value(self.items() as u64);
            return self.kernel("each", result)?.launch(self.grid(), args);
        }
        let args = self.put(args.value(u64::from(reduction == Reduction::Mean)).value(scale))?;
        self.kernel("reduce", result)?.launch(Grid::new(1, 1024), args)
    }

    /// The stride of `dy` from an item to the next: 0 if the result is a single number.
    pub(crate) fn slope_step(&self) -> u64 {
        u64::from(self.weighing.reduction == Reduction::None)
    }

    /// A kernel of `classes.cu`, for a result of type `result`.
    fn kernel(&self, entry: &str, result: &str) -> Result<Kernel> {
        let defines = &[("ELEMENT", self.element), ("RESULT", result)];
        let program = Program { name: "classes.cu", files: PROGRAM, defines };
        self.gpu.kernel(self.op, &program, entry)
    }
}

/// How the losses of items are reduced to the result.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Reduction {
    /// No reduction: a loss for each item.
    None,
    /// Their mean; losses with class weights divide by the sum of the weights.
    #[default]
    Mean,
    /// Their sum.
    Sum,
}
