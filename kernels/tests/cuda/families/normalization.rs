//! Operations on rows (softmax, layer and RMS norms), and normalisation by channels: batches and groups.

use phalanx_kernels::{
    BatchNorm, add_layer_norm, add_layer_norm_backward, add_rms_norm, add_rms_norm_backward, batch_norm,
    batch_norm_backward, batch_norm_update_, group_norm, group_norm_backward, layer_norm,
    layer_norm_backward, layer_norm_to, log_softmax, log_softmax_backward, rms_norm, rms_norm_backward,
    rms_norm_to, softmax, softmax_backward,
};
use phalanx_tensor::{DType, Device, Result, Tensor};

use crate::case::{Case, FLOATS, launches, make, spread, tolerance};

pub fn cases() -> Vec<Case> {
    let mut all = rows_cases();
    all.extend(channels_cases());
    all
}

/// Rows and widths, as short as nothing and longer than a team of 256 threads keeps.
const ROWS: [(usize, usize); 10] =
    [(0, 5), (1, 1), (3, 7), (5, 33), (6, 129), (2, 768), (1, 1100), (2, 5003), (1, 9001), (67, 8)];

fn rows_cases() -> Vec<Case> {
    let mut all = Vec::new();
    for dtype in FLOATS {
        let many = [DType::F32, DType::BF16].contains(&dtype);
        for (rows, width) in ROWS.into_iter().filter(|&(rows, width)| many || rows * width < 5000) {
            all.push(alike(
                format!("softmax {dtype} [{rows}, {width}]"),
                dtype,
                [rows, width],
                (softmax, softmax_backward),
            ));
            let both: (Forward, Backward) = (log_softmax, log_softmax_backward);
            all.push(alike(format!("log_softmax {dtype} [{rows}, {width}]"), dtype, [rows, width], both));
            all.push(layer(dtype, [rows, width], [true, true]));
            all.push(rms(dtype, [rows, width], true));
            all.push(added([dtype; 2], [rows, width], true));
            if dtype.size() == 2 {
                all.push(added([DType::F32, dtype], [rows, width], true));
            }
        }
        all.push(added([dtype; 2], [9, 40], false));
        let other = if dtype == DType::F32 { DType::BF16 } else { DType::F32 };
        all.extend([[dtype, other], [other, dtype]].map(|dtypes| added(dtypes, [9, 40], false)));
        all.push(layer(dtype, [9, 40], [true, false]));
        all.push(layer(dtype, [9, 40], [false, true]));
        all.push(rms(dtype, [9, 40], false));
        all.push(Case::new(format!("softmax {dtype} of infinities and NaN"), dtype, move |device| {
            let (inf, nan) = (f64::INFINITY, f64::NAN);
            let rows =
                [[0.0, inf, 1.0], [-inf, -inf, -inf], [-inf, 1.0, 2.0], [nan, 1.0, 2.0], [nan, -inf, -inf]];
            let x = make(&[5, 3], dtype, device, |i| rows[i / 3][i % 3]);
            Ok(vec![softmax(&x, 1)?, log_softmax(&x, 1)?])
        }));
        all.push(Case::new(format!("softmax {dtype} along other dimensions"), dtype, move |device| {
            let x = make(&[3, 10, 7], dtype, device, spread(1, -5.0, 5.0));
            let rows = x.narrow(2, 1, 5)?;
            Ok(vec![
                softmax(&x, 0)?,
                log_softmax(&x, 1)?,
                softmax(&rows, 2)?,
                softmax(&rows.transpose(0, 1)?, 2)?,
            ])
        }));
    }
    all.push(Case::new("layer_norm f32 of a part of each row, over two dimensions", DType::F32, |device| {
        let x = make(&[5, 4, 9], DType::F32, device, spread(1, -2.0, 3.0)).narrow(2, 1, 7)?;
        let part = make(&[3, 7, 12], DType::F32, device, spread(2, -2.0, 3.0)).narrow(2, 3, 8)?;
        let w = make(&[4, 7], DType::F32, device, spread(3, 0.5, 2.0));
        let (y, stats) = layer_norm(&x, &[4, 7], Some(&w), None, 1e-5)?;
        let dy = make(&[1], DType::F32, device, |_| 0.5).broadcast_to(&[5, 4, 7])?;
        let all = layer_norm_backward(&x, &stats, &[4, 7], Some(&w), &dy, [true; 3])?;
        Ok([vec![y, stats, rms_norm(&part, &[8], None, 1e-5)?.0], some(all)].concat())
    }));
    all.extend([DType::BF16, DType::F16].map(|branch| {
        let name = format!("norms of an f32 stream and a {branch} branch, of parts of rows at odd addresses");
        Case::new(name, DType::F32, move |device| strided(branch, device)).within(2.0 * tolerance(branch))
    }));
    all.extend([DType::BF16, DType::F16].map(|branch| {
        let name =
            format!("a norm of an f32 stream and a {branch} branch is one launch, its gradients are two");
        Case::new(name, DType::I64, move |device| in_one_pass(branch, device))
    }));
    all.push(Case::new(
        "add_rms_norm f32 of parts of rows, beside one that is broadcast",
        DType::F32,
        |device| {
            let wide = |seed| make(&[3, 7, 12], DType::F32, device, spread(seed, -2.0, 3.0));
            let (x, dy) =
                (wide(1).narrow(2, 3, 8)?, wide(2).transpose(0, 1)?.narrow(2, 1, 8)?.transpose(0, 1)?);
            let residual = make(&[8], DType::F32, device, spread(3, -1.0, 1.0)).broadcast_to(&[3, 7, 8])?;
            let [sum, y, stats] = add_rms_norm(&x, &residual, &[8], None, 1e-5)?;
            let all = add_rms_norm_backward(&sum, &stats, &[8], None, (&dy, Some(&residual)), [true; 3])?;
            Ok([vec![sum, y, stats], some(all)].concat())
        },
    ));
    all.push(
        Case::new("layer_norm f32 of a small spread beside its mean", DType::F32, |device| {
            let x = make(&[4, 3000], DType::F32, device, spread(1, 9999.9, 10000.1));
            Ok(vec![layer_norm(&x, &[3000], None, None, 0.0)?.0])
        })
        .within(1e-3),
    );
    all
}

type Forward = fn(&Tensor, i32) -> Result<Tensor>;
type Backward = fn(&Tensor, &Tensor, i32) -> Result<Tensor>;

fn alike(name: String, dtype: DType, shape: [usize; 2], (forward, backward): (Forward, Backward)) -> Case {
    Case::new(name, dtype, move |device| {
        let y = forward(&make(&shape, dtype, device, spread(1, -6.0, 6.0)), 1)?;
        let dy = make(&shape, dtype, device, spread(2, -1.0, 1.0));
        let dx = backward(&y, &dy, 1)?;
        Ok(vec![y, dx])
    })
}

/// The operands of a normalisation: x, dy, weight, bias.
fn operands(shape: [usize; 2], dtype: DType, device: Device) -> [Tensor; 4] {
    let width = &shape[1..];
    [
        make(&shape, dtype, device, spread(1, -2.0, 3.0)),
        make(&shape, dtype, device, spread(2, -1.0, 1.0)),
        make(width, dtype, device, spread(3, 0.5, 2.0)),
        make(width, dtype, device, spread(4, -1.0, 1.0)),
    ]
}

fn some(outputs: impl IntoIterator<Item = Option<Tensor>>) -> Vec<Tensor> {
    outputs.into_iter().flatten().collect()
}

fn layer(dtype: DType, shape: [usize; 2], [weighed, biased]: [bool; 2]) -> Case {
    let name = format!("layer_norm {dtype} {shape:?} weight {weighed} bias {biased}");
    let run = move |device| {
        let [x, dy, w, b] = operands(shape, dtype, device);
        let weight = weighed.then_some(&w);
        let (y, stats) = layer_norm(&x, &shape[1..], weight, biased.then_some(&b), 1e-3)?;
        let all = layer_norm_backward(&x, &stats, &shape[1..], weight, &dy, [true; 3])?;
        let few = layer_norm_backward(&x, &stats, &shape[1..], weight, &dy, [!weighed, weighed, false])?;
        Ok([vec![y, stats], some(all), some(few)].concat())
    };
    Case::new(name, dtype, run).within(2.0 * tolerance(dtype))
}

/// A sum and its normalisations, of a stream and a branch of these dtypes.
fn added([dtype, branch]: [DType; 2], shape: [usize; 2], weighed: bool) -> Case {
    let run = move |device| {
        let [x, _, w, b] = operands(shape, dtype, device);
        let [_, dy, ..] = operands(shape, branch, device);
        let residual = make(&shape, branch, device, spread(5, -0.5, 0.25));
        let dsum = make(&shape, dtype, device, spread(6, -2.0, 1.0));
        let (width, weight) = (&shape[1..], weighed.then_some(&w));
        let layer = add_layer_norm(&x, &residual, width, weight, weighed.then_some(&b), 1e-3)?;
        let rms = add_rms_norm(&x, &residual, width, weight, 1e-3)?;
        let slopes = (&dy, Some(&dsum));
        let of_layer = |needs| add_layer_norm_backward(&layer[0], &layer[2], width, weight, slopes, needs);
        let (all, few) = (of_layer([true; 4])?, of_layer([false, false, true, true])?);
        let (whole, part) = (of_layer([true, false, false, false])?, of_layer([false, true, false, false])?);
        let of_rms = add_rms_norm_backward(&rms[0], &rms[2], width, weight, (&dy, None), [true; 3])?;
        let slopes = [some(all), some(few), some(whole), some(part), some(of_rms)].concat();
        Ok([layer.to_vec(), rms.to_vec(), slopes].concat())
    };
    let name = format!("add_layer_norm and add_rms_norm {dtype} {branch} {shape:?} weight {weighed}");
    Case::new(name, dtype, run).within(2.0 * tolerance(dtype).max(tolerance(branch)))
}

/// Parts of longer rows, of which those of the branch begin between packets.
fn strided(branch: DType, device: Device) -> Result<Vec<Tensor>> {
    let mut all = Vec::new();
    for width in [7, 33, 130] {
        let part = |dtype, seed, first| {
            make(&[3, 5, width + 5], dtype, device, spread(seed, -2.0, 3.0)).narrow(2, first, width)
        };
        let (x, dsum) = (part(DType::F32, 1, 3)?, part(DType::F32, 2, 1)?.transpose(0, 1)?.copy()?);
        let (residual, dy) = (part(branch, 3, 1)?, part(branch, 4, 5)?);
        let dsum = dsum.transpose(0, 1)?;
        let w = make(&[width], DType::F32, device, spread(5, 0.5, 2.0));
        let (y, stats) = layer_norm_to(&x, &[width], Some(&w), Some(&w), 1e-3, branch)?;
        let grads = layer_norm_backward(&x, &stats, &[width], Some(&w), &dy, [true; 3])?;
        all.extend([vec![y], some(grads), vec![rms_norm_to(&x, &[width], None, 1e-3, branch)?.0]].concat());
        let [sum, y, stats] = add_rms_norm(&x, &residual, &[width], Some(&w), 1e-3)?;
        let grads = add_rms_norm_backward(&sum, &stats, &[width], Some(&w), (&dy, Some(&dsum)), [true; 3])?;
        all.extend([vec![sum, y], some(grads)].concat());
    }
    Ok(all)
}

/// The launches of norms of an f32 stream whose branch is narrower: no cast, addition or copy beside them.
fn in_one_pass(branch: DType, device: Device) -> Result<Vec<Tensor>> {
    let shape = [6, 129];
    let [x, _, w, b] = operands(shape, DType::F32, device);
    let [residual, dy, ..] = operands(shape, branch, device);
    let width = &shape[1..];
    let mut made = Vec::new();
    let add = launches(device, 1, || {
        made = add_layer_norm(&x, &residual, width, Some(&w), Some(&b), 1e-3)?.to_vec();
        Ok(())
    })?;
    let to = launches(device, 1, || layer_norm_to(&x, width, Some(&w), None, 1e-3, branch).map(drop))?;
    let rms = launches(device, 1, || rms_norm_to(&x, width, Some(&w), 1e-3, branch).map(drop))?;
    let (of, slopes) = ((&made[0], &made[2]), (&dy, Some(&x)));
    let backward = launches(device, 2, || {
        add_layer_norm_backward(of.0, of.1, width, Some(&w), slopes, [true; 4]).map(drop)
    })?;
    Ok(vec![add, to, rms, backward])
}

fn rms(dtype: DType, shape: [usize; 2], weighed: bool) -> Case {
    let run = move |device| {
        let [x, dy, w, _] = operands(shape, dtype, device);
        let weight = weighed.then_some(&w);
        let (y, stats) = rms_norm(&x, &shape[1..], weight, 1e-3)?;
        let all = rms_norm_backward(&x, &stats, &shape[1..], weight, &dy, [true; 2])?;
        Ok([vec![y, stats], some(all)].concat())
    };
    Case::new(format!("rms_norm {dtype} {shape:?} weight {weighed}"), dtype, run)
        .within(2.0 * tolerance(dtype))
}

const SHAPES: [&[usize]; 6] = [&[7, 3], &[2, 4, 1], &[3, 5, 33], &[2, 6, 4, 16], &[1, 2, 3001], &[40, 12, 7]];

fn channels_cases() -> Vec<Case> {
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

/// x and dy, weight and bias of each channel.
fn channel_operands(shape: &[usize], dtype: DType, device: Device) -> [Tensor; 4] {
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
        let [x, dy, w, b] = channel_operands(shape, dtype, device);
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
        let [x, dy, w, b] = channel_operands(shape, dtype, device);
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
