//! A residual convolution net that tells discs, squares and crosses apart, under any layout:
//! `cargo run --release --example shapes -- --dp 2 --zero 3`, or `-- --pp 2 --micro-batches 4`.

use std::process::ExitCode;

use phalanx::nn;
use phalanx::prelude::*;
use phalanx::tensor::RngKey;
use phalanx::train::data::{Dataset, TensorDataset};
use phalanx::train::{self, Config, Settings, Trainer};

const SIDE: usize = 24;

/// Noisy pictures `[n, 1, SIDE, SIDE]` and what they show, `[n]`: a disc (0), a square (1) or a cross (2).
fn pictures(n: usize) -> train::Result<TensorDataset> {
    let draws = RngKey { seed: 7, step: 0 }.site(1);
    let (mut pixels, mut labels) = (Vec::new(), Vec::new());
    for picture in 0..n {
        let draw = |i: u64, below: u32| draws.block(picture as u64, i)[0] % below;
        let (kind, x, y) = (draw(0, 3), 7 + draw(1, 10) as i32, 7 + draw(2, 10) as i32);
        for at in 0..(SIDE * SIDE) as i32 {
            let (dx, dy) = ((at % SIDE as i32 - x).abs(), (at / SIDE as i32 - y).abs());
            let shapes = [dx * dx + dy * dy < 26, dx.max(dy) < 5, dx.min(dy) < 2 && dx.max(dy) < 7];
            let noise = draw(3 + at as u64, 1000) as f32 / 1000.0;
            pixels.push(noise + f32::from(u8::from(shapes[kind as usize])));
        }
        labels.push(i64::from(kind));
    }
    let pixels = Tensor::from_slice(&pixels, &[n, 1, SIDE, SIDE], Device::CPU)?;
    TensorDataset::new(vec![pixels, Tensor::from_slice(&labels, &[n], Device::CPU)?])
}

/// `relu(x + f(x))`, where f is two convolutions.
struct Residual {
    f: Sequential,
}

phalanx::nn::parameters!(Residual { f });

impl Module for Residual {
    fn forward(&self, x: &Var) -> nn::Result<Var> {
        Ok((x + self.f.forward(x)?)?.relu()?)
    }
}

fn residual(scope: &Scope) -> nn::Result<Residual> {
    let conv = || Conv2dConfig::new(16, 16, [3, 3]).with_padding([1, 1]);
    let (first, second) = (GroupNormConfig::new(4, 16), GroupNormConfig::new(4, 16));
    let f = SequentialConfig::new().with(conv()).with(first).with(Relu).with(conv()).with(second);
    f.init(scope).map(|f| Residual { f })
}

fn layers() -> SequentialConfig {
    let stem = SequentialConfig::new().with(Conv2dConfig::new(1, 16, [3, 3]).with_padding([1, 1])).with(Relu);
    let body =
        stem.with_fn(residual).with(MaxPool2d::new([2, 2])).with_fn(residual).with(MaxPool2d::new([2, 2]));
    body.with(Flatten::default()).with(LinearConfig::new(16 * 36, 3))
}

/// Any key of [`Config`] is a flag.
fn run() -> train::Result<()> {
    let lr = Schedule::Cosine { lr: 3e-3, warmup: 10, total: 150, cycles: 0.5, min: 0.0 };
    let config = Config { steps: 150, batch: 64, lr, validate_every: 50, ..Config::default() };
    let config = Settings::new(config).words(std::env::args().skip(1))?.resolve()?;
    let [training, held_out] = pictures(3000)?.split(0.9, 1)?;
    let trainer = Trainer::new(config).data(training).validation(held_out).resume_if_there();
    let summary = trainer.run_layers(layers, |output, batch| {
        let [_, labels] = batch.vars()?;
        Ok(CrossEntropyLoss::default().forward(output, &labels)?)
    })?;
    println!("{summary:#?}");
    Ok(())
}

fn main() -> ExitCode {
    let Err(error) = run() else { return ExitCode::SUCCESS };
    eprintln!("shapes: {error}");
    ExitCode::from(2)
}
