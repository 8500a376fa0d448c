//! torchgpipe's memory table on meta devices: the same training steps, counted and not computed.

use phalanx::nn::{BceWithLogitsLoss, Group, Loss, Module, Parameter, Parameters, Rule, Sgd};
use phalanx::parallel::pipeline::gpipe::{GPipe, GPipeConfig, Partition};
use phalanx::{DType, Device, Tensor, Var};

use crate::Result;
use crate::unet::{INPUTS, OUTPUTS, UNet};

/// Images of a batch, and their pixels along each side.
const IMAGES: [usize; 2] = [32, 192];
/// Halvings of an image.
const DEPTH: usize = 5;

/// A row of torchgpipe's table (`benchmarks/unet-memory`).
struct Row {
    /// Convolutions in a row, and channels.
    net: [usize; 2],
    balance: &'static [usize],
    micro_batches: usize,
    /// What torchgpipe measured on Tesla P40s, all devices together.
    gib: f64,
}

const ROWS: [Row; 5] = [
    Row { net: [6, 72], balance: &[285], micro_batches: 1, gib: 20.3 },
    Row { net: [11, 128], balance: &[505], micro_batches: 32, gib: 20.5 },
    Row { net: [24, 128], balance: &[526, 551], micro_batches: 32, gib: 43.4 },
    Row { net: [24, 160], balance: &[472, 54, 36, 515], micro_batches: 32, gib: 79.1 },
    Row { net: [48, 160], balance: &[800, 140, 62, 36, 36, 36, 36, 987], micro_batches: 128, gib: 154.1 },
];

/// Prints the table, a row as soon as it is known.
pub fn table() -> Result<()> {
    let [images, side] = IMAGES;
    crate::say(&format!(
        "memory of training with {images} images of {side} x {side} in f32, all devices together"
    ));
    crate::say(&format!(
        "{:<12}{:>10}{:>9}{:>17}{:>8}{:>12}{:>13}",
        "", "U-Net", "devices", "parameters", "", "GiB", "torchgpipe"
    ));
    for row in &ROWS {
        let [convs, channels] = row.net;
        let net = UNet { depth: DEPTH, convs, channels };
        let devices: Vec<Device> = (0..row.balance.len() as u16).map(Device::Meta).collect();
        let (parameters, bytes) = measure(net, row.balance, &devices, row.micro_batches, IMAGES)?;
        let (sizes, gib, theirs) =
            (format!("({convs}, {channels})"), bytes as f64 / f64::from(1 << 30), row.gib);
        let devices = devices.len();
        let name = if row.micro_batches == 1 { "baseline".into() } else { format!("pipeline-{devices}") };
        let short = in_words(parameters);
        crate::say(&format!(
            "{name:<12}{sizes:>10}{devices:>9}{parameters:>17}{short:>8}{gib:>12.1}{theirs:>13.1}"
        ));
    }
    crate::say(
        "GiB: the tensors' bytes at the peak of each device; theirs has the allocator's rest and cuDNN's workspaces too",
    );
    Ok(())
}

/// Parameters, and the sum of the devices' peaks in bytes, of two training steps with some images of some pixels a side.
pub fn measure(
    net: UNet,
    balance: &[usize],
    devices: &[Device],
    micro_batches: usize,
    [images, side]: [usize; 2],
) -> Result<(usize, usize)> {
    let partition = Partition::new(balance, devices)?;
    let model = net.build(&partition)?;
    // All but the last micro-batch are recomputed: of one alone, none.
    let model = GPipe::new(model, partition, GPipeConfig::new(micro_batches))?;
    let last = devices[devices.len() - 1];
    let x = Var::new(Tensor::zeros(&[images, INPUTS, side, side], DType::F32, devices[0])?);
    let target = Var::new(Tensor::zeros(&[images, OUTPUTS, side, side], DType::F32, last)?);
    for device in devices {
        device.ledger()?.reset_peak();
    }
    let mut optimizer = Sgd::default().init(vec![Group::new(model.parameters(), 0.1)])?;
    let loss = BceWithLogitsLoss::default();
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
