//! Losses over classes: cross entropy and the negative log likelihood.

use phalanx_kernels::{
    CrossEntropy, NllLoss, Reduction, cast, cat, cross_entropy, cross_entropy_backward,
    cross_entropy_backward_over, cross_entropy_backward_part, cross_entropy_items, cross_entropy_reduce,
    cross_entropy_targets, nll_loss, nll_loss_backward,
};
use phalanx_tensor::{DType, Device, Result, Tensor};

use crate::case::{Case, FLOATS, make, spread, tolerance};

const REDUCTIONS: [Reduction; 3] = [Reduction::None, Reduction::Mean, Reduction::Sum];

pub fn cases() -> Vec<Case> {
    let mut all = Vec::new();
    for dtype in FLOATS {
        for (items, classes) in [(0, 3), (1, 1), (37, 10), (5, 129), (3, 1027), (2, 4096), (2, 9001)] {
            all.push(loss(dtype, [items, classes], Reduction::Mean, [false; 3]));
            if [DType::F16, DType::BF16].contains(&dtype) {
                all.push(loss(dtype, [items, classes], Reduction::Sum, [false, false, true]));
            }
        }
        for reduction in REDUCTIONS {
            for [weighed, smoothed] in [[true, false], [false, true], [true, true]] {
                all.push(loss(dtype, [11, 33], reduction, [weighed, smoothed, false]));
            }
            if [DType::F16, DType::BF16].contains(&dtype) {
                all.push(loss(dtype, [11, 33], reduction, [true; 3]));
            }
        }
        all.push(Case::new(
            format!("cross_entropy {dtype} of items that all are ignored"),
            dtype,
            move |device| {
                let x = make(&[3, 4], dtype, device, spread(1, -1.0, 1.0));
                let target = make(&[3], DType::I64, device, |_| -100.0);
                let (loss, stats) = cross_entropy(&x, &target, &CrossEntropy::default())?;
                Ok(vec![loss, stats, nll_loss(&x, &target, &NllLoss::default())?])
            },
        ));
        all.push(Case::new(format!("cross_entropy {dtype} with places"), dtype, move |device| {
            let x = make(&[2, 5, 3], dtype, device, spread(1, -4.0, 4.0));
            let target = make(&[2, 3], DType::I64, device, |i| (i % 5) as f64);
            let config = CrossEntropy { reduction: Reduction::None, ..CrossEntropy::default() };
            let (loss, stats) = cross_entropy(&x, &target, &config)?;
            let dx = cross_entropy_backward(&x, &target, &stats, &loss, &config)?;
            Ok(vec![loss, stats, dx, nll_loss(&x, &target, &NllLoss::default())?])
        }));
    }
    for class in [-1.0, 4.0, 1e12] {
        let operands = move |device| {
            let x = make(&[3, 4], DType::F32, device, spread(1, -1.0, 1.0));
            (x, make(&[3], DType::I64, device, move |i| if i == 1 { class } else { 2.0 }))
        };
        all.push(Case::new(format!("cross_entropy f32 of a target {class}"), DType::F32, move |device| {
            let (x, target) = operands(device);
            Ok(vec![cross_entropy(&x, &target, &CrossEntropy::default())?.0])
        }));
        all.push(Case::new(format!("nll_loss f32 of a target {class}"), DType::F32, move |device| {
            let (x, target) = operands(device);
            Ok(vec![nll_loss(&x, &target, &NllLoss::default())?])
        }));
    }
    all
}

/// Cross entropy and negative log likelihood, forward and backward; some items are ignored. `wide`: the former's in f32.
fn loss(dtype: DType, shape: [usize; 2], reduction: Reduction, [weighed, smoothed, wide]: [bool; 3]) -> Case {
    let what = format!("weight {weighed} smoothing {smoothed} wide {wide}");
    let name = format!("cross_entropy {dtype} {shape:?} {reduction:?} {what}");
    let run = move |device: Device| -> Result<Vec<Tensor>> {
        let [items, classes] = shape;
        let x = make(&shape, dtype, device, spread(1, -6.0, 6.0));
        let target =
            make(
                &[items],
                DType::I64,
                device,
                move |i| {
                    if i % 5 == 3 { -7.0 } else { (i * 7 % classes) as f64 }
                },
            );
        let weight = weighed.then(|| make(&[classes], dtype, device, spread(2, 0.5, 2.0)));
        let dy_shape: &[usize] = if reduction == Reduction::None { &shape[..1] } else { &[] };
        let dy = make(dy_shape, dtype, device, spread(3, 0.5, 1.5));
        let nll = NllLoss { weight: weight.clone(), ignore_index: -7, reduction, scale: 0.5 };
        let label_smoothing = if smoothed { 0.1 } else { 0.0 };
        let config = CrossEntropy { weight, ignore_index: -7, label_smoothing, reduction, scale: 0.5, wide };
        let (loss, stats) = cross_entropy(&x, &target, &config)?;
        let slope = cast(&dy, config.result_dtype(dtype))?;
        let dx = cross_entropy_backward(&x, &target, &stats, &slope, &config)?;
        let q = cross_entropy_targets(&x, &target, &config)?;
        let likelihood = nll_loss(&x, &target, &nll)?;
        let nll_dx = nll_loss_backward(&x, &target, &dy, &nll)?;
        // The same in two parts.
        let half = items / 2;
        let part = |at: usize, len: usize| {
            cross_entropy_items(&x.narrow(0, at, len)?, &target, at..at + len, &config)
        };
        let (first, second) = (part(0, half)?, part(half, items - half)?);
        let losses = cat(&[&first.0, &second.0], 0)?;
        let again = cross_entropy_reduce(&losses, &target, (dtype, classes), &config)?;
        let right = x.narrow(1, classes / 3, classes - classes / 3)?;
        let right =
            cross_entropy_backward_part(right, (classes / 3, classes), [&target, &stats, &slope], &config)?;
        let over = cross_entropy_backward_over(x, &target, &stats, &slope, &config)?;
        Ok(vec![loss, stats, dx, q, likelihood, nll_dx, over, again, second.1, right])
    };
    Case::new(name, dtype, run).within(2.0 * tolerance(dtype))
}
