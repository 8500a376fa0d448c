//! torchgpipe's memory table on meta devices: the same training steps, counted and not computed.

use phalanx::nn::autograd::Reduction;
use phalanx::nn::{BceWithLogitsLoss, Group, Loss, Module, Parameter, Parameters, Rule, Sgd};
use phalanx::parallel::pipeline::gpipe::{Checkpoint, GPipe, GPipeConfig, Partition};
use phalanx::{DType, Device, Tensor, Var};

use crate::Result;
use crate::unet::{INPUTS, OUTPUTS, UNet};

/// Images of a batch, and their pixels along each side.
const BATCH: usize = 32;
const SIDE: usize = 192;

/// A row of torchgpipe's table (`benchmarks/unet-memory`).
struct Row {
    name: &'static str,
    convs: usize,
    channels: usize,
    balance: &'static [usize],
    micro_batches: usize,
    checkpoint: Checkpoint,
    /// What torchgpipe measured on Tesla P40s, all devices together.
    theirs_gib: f64,
}

const ROWS: [Row; 5] = [
    row("baseline", 6, 72, &[285], 1, Checkpoint::Never, 20.3),
    row("pipeline-1", 11, 128, &[505], 32, Checkpoint::ExceptLast, 20.5),
    row("pipeline-2", 24, 128, &[526, 551], 32, Checkpoint::ExceptLast, 43.4),
    row("pipeline-4", 24, 160, &[472, 54, 36, 515], 32, Checkpoint::ExceptLast, 79.1),
    row("pipeline-8", 48, 160, &[800, 140, 62, 36, 36, 36, 36, 987], 128, Checkpoint::ExceptLast, 154.1),
];

const fn row(
    name: &'static str,
    convs: usize,
    channels: usize,
    balance: &'static [usize],
    micro_batches: usize,
    checkpoint: Checkpoint,
    theirs_gib: f64,
) -> Row {
    Row { name, convs, channels, balance, micro_batches, checkpoint, theirs_gib }
}

/// Prints the table, a row as soon as it is known.
pub fn table() -> Result<()> {
    println!("memory of training with {BATCH} images of {SIDE} x {SIDE} in f32, all devices together");
    println!(
        "{:<12}{:>10}{:>9}{:>17}{:>8}{:>12}{:>13}",
        "", "U-Net", "devices", "parameters", "", "GiB", "torchgpipe"
    );
    for row in &ROWS {
        let Row { name, convs, channels, balance, theirs_gib, .. } = row;
        let (parameters, bytes) = measure(row)?;
        let (net, gib) = (format!("({convs}, {channels})"), bytes as f64 / f64::from(1 << 30));
        let devices = balance.len();
        let short = in_words(parameters);
        println!("{name:<12}{net:>10}{devices:>9}{parameters:>17}{short:>8}{gib:>12.1}{theirs_gib:>13.1}");
    }
    println!(
        "GiB: the tensors' bytes at the peak of each device; theirs has the allocator's rest and cuDNN's workspaces too"
    );
    Ok(())
}

/// Parameters, and the sum of the devices' peaks in bytes, of two training steps.
fn measure(row: &Row) -> Result<(usize, usize)> {
    let devices: Vec<Device> = (0..row.balance.len() as u16).map(Device::Meta).collect();
    let partition = Partition::new(row.balance, &devices)?;
    let model = UNet { depth: 5, convs: row.convs, channels: row.channels }.build(&partition)?;
    let config = GPipeConfig::new(row.micro_batches).with_checkpoint(row.checkpoint);
    let model = GPipe::new(model, partition, config)?;
    let last = devices[devices.len() - 1];
    let x = Var::new(Tensor::zeros(&[BATCH, INPUTS, SIDE, SIDE], DType::F32, devices[0])?);
    let target = Var::new(Tensor::zeros(&[BATCH, OUTPUTS, SIDE, SIDE], DType::F32, last)?);
    for device in &devices {
        device.ledger()?.reset_peak();
    }
    let mut optimizer = Sgd::default().init(vec![Group::new(model.parameters(), 0.1)])?;
    let loss = BceWithLogitsLoss { reduction: Reduction::Mean, ..Default::default() };
    for _ in 0..2 {
        loss.forward(&model.forward(&x)?, &target)?.backward()?;
        optimizer.step()?;
        optimizer.zero_grad()?;
    }
    let elements = |p: &Parameter| p.tensor().numel();
    let peaks = devices.iter().map(|device| Ok(device.ledger()?.total().peak)).sum::<Result<usize>>()?;
    Ok((model.parameters().iter().map(elements).sum(), peaks))
}

/// `362.2M`, `2.21B`.
fn in_words(count: usize) -> String {
    match count as f64 {
        count if count < 1e9 => format!("{:.1}M", count / 1e6),
        count => format!("{:.2}B", count / 1e9),
    }
}
