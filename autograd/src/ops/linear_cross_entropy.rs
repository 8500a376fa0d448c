//! A linear map and the cross entropy of its outputs, the end of a language model, without its outputs (the logits) ever being whole.
//!
//! ```text
//!           classes                     forward    rows of logits, one chunk after another: each item's loss, and two numbers an item
//!          +---------------+ ^ rows     backward   columns of logits, computed again: their gradient, in place; from it
//!  items   | logits        | v                     - those rows of the weight's gradient, complete
//!          +---------------+                       - their part of the input's gradient, whose chains of additions go on
//!          <--> columns                                from chunk to chunk (`matmul_continue_`)
//! ```
//!
//! Each sum has the terms and the order that it has in [`Var::linear`] and [`Var::cross_entropy`], so the size of the chunks changes no bit
//! on a CPU. It costs the product of the logits once more. Derivatives of derivatives hold all logits.

use std::ops::Range;

use phalanx_kernels::{self as kernels, PART_STEPS};
use phalanx_tensor::{Error, Tensor, even_piece};

use super::classification_losses::{CrossEntropy, slope};
use super::frame::named;
use crate::{Backward, Cx, Grads, Result, SaveContext, SavedVariable, Var, begins, grads2, record};

const OP: &str = "linear_cross_entropy";

impl Var {
    /// [`Var::cross_entropy`] of the logits `self weightᵀ`, for `self` [N, in], `weight` [classes, in] and i64 targets `[N]`, of which at most
    /// `logits_max` are held at a time, but one row, and backward [`kernels::PART_STEPS`] columns, at least. If that many are all of them, they
    /// are saved as usual. On a CPU the bits do not depend on it.
    ///
    /// # Errors
    /// If shapes, dtypes or devices do not fit, or a target is no class.
    pub fn linear_cross_entropy(
        &self,
        weight: &Var,
        target: &Var,
        config: &CrossEntropy,
        logits_max: usize,
    ) -> Result<Var> {
        let (&[items, inputs], &[classes, columns]) = (self.shape(), weight.shape()) else {
            return Err(misfit(self, weight, target));
        };
        if inputs != columns || target.shape() != [items] {
            return Err(misfit(self, weight, target));
        }
        // A gradient of one column has an order of additions of its own.
        if items.saturating_mul(classes) <= logits_max || inputs == 1 || items == 0 {
            let logits = named(OP, self.linear(weight, None))?;
            return named(OP, logits.cross_entropy(target, config));
        }
        named(OP, self.in_chunks(&*weight.unpacked()?, target, config, logits_max))
    }

    /// [`Var::linear_cross_entropy`] whose logits are not held whole.
    fn in_chunks(&self, weight: &Var, target: &Var, config: &CrossEntropy, logits_max: usize) -> Result<Var> {
        begins();
        let (items, classes) = (self.shape()[0], weight.shape()[0]);
        let (x, w, t) = (self.tensor(), weight.tensor(), target.tensor());
        let (mut losses, mut stats) = (Vec::new(), Vec::new());
        for rows in logit_rows([items, classes], logits_max) {
            let logits = kernels::linear(&x.narrow(0, rows.start, rows.len())?, w, None)?;
            let (of_items, kept) = kernels::cross_entropy_items(&logits, t, rows, config)?;
            losses.push(of_items);
            stats.push(kept);
        }
        let whole = |parts: Vec<Tensor>| kernels::cat(&parts.iter().collect::<Vec<_>>(), 0);
        let loss = kernels::cross_entropy_reduce(&whole(losses)?, t, (x.dtype(), classes), config)?;
        let stats = whole(stats)?;
        record(OP, &[self, weight], loss, |s: &SaveContext<'_>| {
            let (x, weight, target, config) = (s.input(0)?, s.input(1)?, t.clone(), config.clone());
            Ok(LinearCrossEntropy { x, weight, target, stats, config, logits_max })
        })
    }
}

fn misfit(x: &Var, weight: &Var, target: &Var) -> crate::Error {
    let shapes = [x, weight, target].map(Var::shape);
    let got = format!(
        "an input of shape {:?}, a weight of {:?} and targets of {:?}",
        shapes[0], shapes[1], shapes[2]
    );
    Error::shape(OP, got, "[N, in], [classes, in] and [N]").into()
}

struct LinearCrossEntropy {
    x: SavedVariable,
    weight: SavedVariable,
    target: Tensor,
    /// What the loss keeps of each row of logits.
    stats: Tensor,
    config: CrossEntropy,
    logits_max: usize,
}

impl Backward for LinearCrossEntropy {
    /// Both gradients need the logits, which are computed again of the weight.
    const SPLITS: bool = false;

    fn backward(&self, cx: &Cx<'_>) -> Result<Grads> {
        let (x, weight) = (cx.get(&self.x)?, cx.get(&self.weight)?);
        if cx.create_graph() {
            let slope = slope(&x.linear(&weight, None)?, &self.target, &self.config, cx.dy())?;
            return linear_grads(cx, &slope, [&x, &weight]);
        }
        linear_loss_grads(cx, [x.tensor(), weight.tensor()], self.logits_max, |logits, columns| {
            let known = [&self.target, &self.stats, cx.dy().tensor()];
            let at = (columns.start, weight.shape()[0]);
            Ok(kernels::cross_entropy_backward_part(logits, at, known, &self.config)?)
        })
    }
}

/// The rows of logits [items, classes] in chunks of at most `logits_max` logits, but one row at least.
pub fn logit_rows([items, classes]: [usize; 2], logits_max: usize) -> impl Iterator<Item = Range<usize>> {
    let pieces = items.div_ceil((logits_max / classes.max(1)).max(1));
    (0..pieces).map(move |piece| even_piece(items, pieces, piece))
}

/// The gradients of a linear map's input `x` [items, in] and weight [classes, in], inputs 0 and 1 of the operation, of differentiable
/// operations; `slope` is the gradient of all its outputs.
///
/// # Errors
/// If the shapes do not fit.
pub fn linear_grads(cx: &Cx<'_>, slope: &Var, [x, weight]: [&Var; 2]) -> Result<Grads> {
    let dx = cx.needs(0).then(|| slope.matmul(weight)).transpose()?;
    let dw = cx.needs(1).then(|| slope.transpose(0, 1)?.matmul(x)).transpose()?;
    grads2(dx, dw)
}

/// The gradients of a linear map's input `x` [items, in] and weight [classes, in], inputs 0 and 1 of the operation, whose loss needs the
/// outputs (logits) by columns only. Chunks of at most `logits_max` logits, but [`kernels::PART_STEPS`] columns at least, are computed again.
/// `slope` makes the gradient of each, given the classes that its columns are.
///
/// # Errors
/// If the shapes do not fit, or those of `slope`.
pub fn linear_loss_grads(
    cx: &Cx<'_>,
    [x, weight]: [&Tensor; 2],
    logits_max: usize,
    slope: impl Fn(Tensor, Range<usize>) -> Result<Tensor>,
) -> Result<Grads> {
    let (items, classes) = (x.shape()[0], weight.shape()[0]);
    let dtype = kernels::optim::optim_state_dtype(x.dtype());
    let mut dx = cx.needs(0).then(|| kernels::full(x.shape(), 0.0, dtype, x.device())).transpose()?;
    // Columns are steps of the input's gradient. A product of one column has an order of additions of its own: the last block has no single one.
    let (blocks, most) =
        (classes.saturating_sub(2) / PART_STEPS + 1, logits_max / (items.max(1) * PART_STEPS));
    let pieces = blocks.div_ceil(most.max(1));
    let columns = |piece: usize| {
        let blocks_here = even_piece(blocks, pieces, piece);
        let end = if blocks_here.end == blocks { classes } else { blocks_here.end * PART_STEPS };
        blocks_here.start * PART_STEPS..end
    };
    // `take` gets the gradient of some columns, and which they are.
    let mut each = |take: &mut dyn FnMut(Range<usize>, &Tensor) -> Result<()>| -> Result<()> {
        for columns in (0..pieces).map(columns) {
            let rows = weight.narrow(0, columns.start, columns.len())?;
            let slope = slope(kernels::linear(x, &rows, None)?, columns.clone())?;
            if let Some(dx) = &mut dx {
                kernels::matmul_continue_(dx, &slope, &rows)?;
            }
            take(columns, &slope)?;
        }
        Ok(())
    };
    let mut dw = None;
    let direct = cx.accumulate_into(1, |buffer| {
        let fits = buffer.is_contiguous() && buffer.dtype() == weight.dtype();
        if fits {
            each(&mut |columns, slope| {
                let mut rows = buffer.narrow(0, columns.start, columns.len())?;
                Ok(kernels::matmul_accumulate_(&mut rows, &slope.transpose(0, 1)?, x)?)
            })?;
        }
        Ok(fits)
    })?;
    if !direct && cx.needs(1) {
        let made = Tensor::empty(weight.shape(), weight.dtype(), weight.device())?;
        each(&mut |columns, slope| {
            let mut rows = made.narrow(0, columns.start, columns.len())?;
            Ok(kernels::matmul_into(&mut rows, &slope.transpose(0, 1)?, x)?)
        })?;
        dw = Some(Var::new(made));
    } else if !direct {
        each(&mut |_, _| Ok(()))?;
    }
    let dx = dx.map(|dx| kernels::cast(&dx, x.dtype())).transpose()?.map(Var::new);
    grads2(dx, dw)
}

#[cfg(test)]
mod tests {
    use phalanx_kernels as kernels;
    use phalanx_tensor::{DType, Device, Tensor};

    use crate::ops::testing::check_twice;
    use crate::{CrossEntropy, Leaf, Options, Reduction, Var, backward_inputs};

    /// Numbers with full mantissas.
    fn random(shape: &[usize], seed: u64, dtype: DType) -> Tensor {
        let mut state = seed;
        let mut next = || {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (state >> 33) as f64 / (1u64 << 30) as f64 - 1.0
        };
        let values: Vec<f64> = (0..shape.iter().product()).map(|_| next()).collect();
        kernels::cast(&Tensor::from_vec(values, shape, Device::CPU).unwrap(), dtype).unwrap()
    }

    fn targets(items: usize, classes: usize) -> Var {
        let of = |i: usize| if i % 5 == 3 { -100 } else { (i * 7 % classes) as i64 };
        Var::from_slice(&(0..items).map(of).collect::<Vec<_>>(), &[items], Device::CPU).unwrap()
    }

    fn bits(x: &Var) -> Vec<u64> {
        kernels::cast(x.tensor(), DType::F64)
            .unwrap()
            .to_vec::<f64>()
            .unwrap()
            .iter()
            .map(|x| x.to_bits())
            .collect()
    }

    #[test]
    fn first_and_second_derivatives_hold() {
        for (items, classes, inputs) in [(1, 1, 1), (7, 5, 3), (1, 7, 2), (3, 33, 7)] {
            let target = targets(items, classes);
            for reduction in [Reduction::Mean, Reduction::Sum, Reduction::None] {
                let config = CrossEntropy { reduction, label_smoothing: 0.1, ..CrossEntropy::default() };
                for logits_max in [0, 12, usize::MAX] {
                    check_twice(&[&[items, inputs], &[classes, inputs]], |v| {
                        v[0].linear_cross_entropy(&v[1], &target, &config, logits_max)
                    });
                }
            }
        }
    }

    /// The slow twin is the linear map and the loss one after the other, with all logits.
    #[test]
    fn any_chunk_has_the_bits_of_the_whole() {
        for dtype in [DType::F32, DType::F64, DType::BF16, DType::F16] {
            for (items, classes, inputs) in
                [(1, 2, 2), (7, 33, 5), (7, 33, 70), (33, 129, 33), (129, 1030, 7)]
            {
                let (target, wide) = (targets(items, classes), dtype.size() == 2);
                let config = CrossEntropy { wide, scale: 0.5, ..CrossEntropy::default() };
                let run = |logits_max: Option<usize>, passes: usize| {
                    let x = Var::leaf(random(&[items, inputs], 1, dtype)).unwrap();
                    let weight = Var::leaf(random(&[classes, inputs], 2, dtype)).unwrap();
                    let mut losses = Vec::new();
                    for _ in 0..passes {
                        let loss = match logits_max {
                            Some(max) => x.linear_cross_entropy(&weight, &target, &config, max),
                            None => x.linear(&weight, None).unwrap().cross_entropy(&target, &config),
                        };
                        let loss = loss.unwrap();
                        loss.backward().unwrap();
                        losses.extend(bits(&loss));
                    }
                    (losses, bits(&x.grad().unwrap()), bits(&weight.grad().unwrap()))
                };
                // The second pass adds to the weight's gradient in place.
                for passes in [1, 2] {
                    let whole = run(None, passes);
                    for logits_max in [0, 1, classes, 3 * classes + 1, items * classes - 1, items * classes] {
                        assert_eq!(
                            run(Some(logits_max), passes),
                            whole,
                            "{dtype} {items} {classes} {logits_max}"
                        );
                    }
                }
            }
        }
    }

    /// The weight's gradient needs the weight, which may be gone when the second half runs. Of a cast weight only the cast is left.
    #[test]
    fn the_first_half_of_a_split_backward_computes_both_gradients() {
        let run = |split: bool, dtype: DType| {
            let x = Var::leaf(random(&[7, 5], 1, dtype)).unwrap();
            let weight = Leaf::new(random(&[33, 5], 2, DType::F32), true).unwrap();
            let (cast, config) = (weight.var().to(dtype).unwrap(), CrossEntropy::default());
            let loss = x.linear_cross_entropy(&cast, &targets(7, 33), &config, 40).unwrap();
            if split {
                let later = backward_inputs(&[(loss, None)]).unwrap();
                assert_eq!(later.len(), usize::from(dtype != DType::F32));
                later.run().unwrap();
            } else {
                loss.backward().unwrap();
            }
            [x.grad(), weight.grad()].map(|grad| bits(&grad.unwrap()))
        };
        for dtype in [DType::F32, DType::BF16] {
            assert_eq!(run(true, dtype), run(false, dtype), "{dtype}");
        }
    }

    #[test]
    fn what_needs_no_gradient_gets_none_and_empty_batches_run() {
        let (x, weight) = (random(&[7, 5], 1, DType::F32), random(&[9, 5], 2, DType::F32));
        let (target, config) = (targets(7, 9), CrossEntropy::default());
        let (leaf, other) = (Var::leaf(x.clone()).unwrap(), Var::new(weight.clone()));
        leaf.linear_cross_entropy(&other, &target, &config, 10).unwrap().backward().unwrap();
        assert!(leaf.grad().is_some() && other.grad().is_none());
        let (leaf, other) = (Var::leaf(weight).unwrap(), Var::new(x));
        other.linear_cross_entropy(&leaf, &target, &config, 10).unwrap().backward().unwrap();
        assert!(leaf.grad().is_some());
        let none = Var::new(random(&[0, 5], 1, DType::F32));
        let config = CrossEntropy { reduction: Reduction::Sum, ..config };
        let loss = none.linear_cross_entropy(&leaf, &targets(0, 9), &config, 10).unwrap();
        assert_eq!(loss.item::<f32>().unwrap(), 0.0);
        let options = Options { create_graph: true, ..Options::default() };
        assert!(crate::grad(&[(loss, None)], &[&leaf], options).is_ok());
    }

    #[test]
    fn what_does_not_fit_is_an_error_that_names_the_operation() {
        let make = |shape: &[usize]| Var::new(random(shape, 1, DType::F32));
        let config = CrossEntropy::default();
        for (x, weight, items) in [(&[7, 5][..], &[9, 4][..], 7), (&[7, 5], &[9, 5], 6), (&[7], &[9, 5], 7)] {
            let loss = make(x).linear_cross_entropy(&make(weight), &targets(items, 9), &config, 10);
            let error = loss.unwrap_err().to_string();
            assert!(
                error.starts_with("linear_cross_entropy: ") && error.contains(&format!("{weight:?}")),
                "{error}"
            );
        }
        for logits_max in [10, usize::MAX] {
            let weight = Var::new(random(&[9, 5], 1, DType::F64));
            let loss = make(&[7, 5]).linear_cross_entropy(&weight, &targets(7, 9), &config, logits_max);
            let error = loss.unwrap_err().to_string();
            assert!(error.starts_with("linear_cross_entropy: ") && error.contains("f64"), "{error}");
        }
        let wrong = Var::from_slice(&[0i64, 1, 9], &[3], Device::CPU).unwrap();
        let error =
            make(&[3, 5]).linear_cross_entropy(&make(&[9, 5]), &wrong, &config, 10).unwrap_err().to_string();
        assert!(error.contains("target 9 (item 2)"), "{error}");
    }

    /// On a device that stores nothing: the peak falls by the logits and their gradient.
    #[test]
    fn logits_are_never_whole() {
        let (items, classes, inputs) = (4096, 50_000, 64);
        let peak = |logits_max: usize| {
            let device = Device::Meta(7);
            let ledger = device.ledger().unwrap();
            let make =
                |shape: &[usize]| Var::leaf(Tensor::empty(shape, DType::F32, device).unwrap()).unwrap();
            let (x, weight) = (make(&[items, inputs]), make(&[classes, inputs]));
            let target = Var::new(Tensor::empty(&[items], DType::I64, device).unwrap());
            ledger.reset_peak();
            let before = ledger.total().now;
            let loss =
                x.linear_cross_entropy(&weight, &target, &CrossEntropy::default(), logits_max).unwrap();
            loss.backward().unwrap();
            ledger.total().peak - before
        };
        let (whole, chunked) = (peak(usize::MAX), peak(1 << 20));
        let gradients = 4 * inputs * (items + classes);
        assert!(whole >= 4 * items * classes + gradients, "{whole}");
        assert!(chunked <= gradients + 4 * (1 << 20) + (1 << 18), "{chunked}");
    }
}
