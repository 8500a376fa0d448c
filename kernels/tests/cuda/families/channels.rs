//! Normalisation by channels: batches and groups.

use phalanx_kernels::{
    BatchNorm, batch_norm, batch_norm_backward, batch_norm_update_, group_norm, group_norm_backward,
};
use phalanx_tensor::{DType, Device, Result, Tensor};

use crate::case::{Case, FLOATS, make, spread, tolerance};

const SHAPES: [&[usize]; 6] = [&[7, 3], &[2, 4, 1], &[3, 5, 33], &[2, 6, 4, 16], &[1, 2, 3001], &[40, 12, 7]];

pub fn cases() -> Vec<Case> {
    let mut all = Vec::new();
    for dtype in FLOATS {
        for shape in SHAPES {
            for (training, weighed) in [(true, true), (true, false), (false, true)] {
                let config = BatchNorm { training, momentum: 0.3, eps: 1e-3 };
                all.push(batch(dtype, shape, config, weighed));
            }
        }
        for (shape, groups) in
            [(&[3, 6, 5][..], 2), (&[2, 6, 1], 3), (&[2, 4, 33], 4), (&[2, 4, 20], 1), (&[1, 8, 40, 30], 2)]
        {
            all.push(group(dtype, shape, groups, true));
        }
        all.push(group(dtype, &[2, 4, 8], 2, false));
    }
    all
}

fn some(outputs: impl IntoIterator<Item = Option<Tensor>>) -> Vec<Tensor> {
    outputs.into_iter().flatten().collect()
}

/// x and dy, weight and bias of each channel.
fn operands(shape: &[usize], dtype: DType, device: Device) -> [Tensor; 4] {
    let channels = &shape[1..2];
    [
        make(shape, dtype, device, spread(1, -2.0, 3.0)),
        make(shape, dtype, device, spread(2, -1.0, 1.0)),
        make(channels, dtype, device, spread(3, 0.5, 2.0)),
        make(channels, dtype, device, spread(4, -1.0, 1.0)),
    ]
}

/// The same values behind other strides.
fn turned(x: &Tensor) -> Result<Tensor> {
    x.transpose(0, 1)?.copy()?.transpose(0, 1)
}

fn batch(dtype: DType, shape: &'static [usize], config: BatchNorm, weighed: bool) -> Case {
    let name = format!("batch_norm {dtype} {shape:?} training {} weight {weighed}", config.training);
    let run = move |device| {
        let [x, dy, w, b] = operands(shape, dtype, device);
        let [weight, bias] = [weighed.then_some(&w), weighed.then_some(&b)];
        let mut mean = make(&shape[1..2], DType::F32, device, spread(5, 0.0, 1.0));
        let mut var = make(&shape[1..2], DType::F32, device, spread(6, 0.5, 2.0));
        let (y, stats) = batch_norm(&x, Some([&mean, &var]), weight, bias, &config)?;
        let far = batch_norm(&turned(&x)?, Some([&mean, &var]), weight, bias, &config)?.0;
        let all = batch_norm_backward(&x, &stats, weight, &dy, &config, [true; 3])?;
        let few = batch_norm_backward(&x, &stats, weight, &turned(&dy)?, &config, [true, false, false])?;
        batch_norm_update_([&mut mean, &mut var], &x, &stats, config.momentum)?;
        Ok([vec![y, stats, far, mean, var], some(all), some(few)].concat())
    };
    Case::new(name, dtype, run).within(4.0 * tolerance(dtype))
}

fn group(dtype: DType, shape: &'static [usize], groups: usize, weighed: bool) -> Case {
    let run = move |device| {
        let [x, dy, w, b] = operands(shape, dtype, device);
        let [weight, bias] = [weighed.then_some(&w), weighed.then_some(&b)];
        let (y, stats) = group_norm(&x, groups, weight, bias, 1e-3)?;
        let far = group_norm(&turned(&x)?, groups, weight, bias, 1e-3)?.0;
        let all = group_norm_backward(&x, &stats, groups, weight, &dy, [true; 3])?;
        let few = group_norm_backward(&turned(&x)?, &stats, groups, weight, &dy, [true, false, false])?;
        Ok([vec![y, stats, far], some(all), some(few)].concat())
    };
    let name = format!("group_norm {dtype} {shape:?} groups {groups} weight {weighed}");
    Case::new(name, dtype, run).within(4.0 * tolerance(dtype))
}
