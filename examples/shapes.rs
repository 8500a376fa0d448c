//! A residual convolution net that tells discs, squares and crosses apart, under any layout:
//!
//! ```text
//! cargo run --release --example shapes -- --dp 2 --zero 3
//! cargo run --release --example shapes -- --pp 2 --micro-batches 4 --out run
//! ```

use clap::Parser;
use phalanx::nn;
use phalanx::parallel::hybrid::Layout;
use phalanx::prelude::*;
use phalanx::tensor::RngKey;
use phalanx::train::data::{Dataset, TensorDataset};
use phalanx::train::{self, Config, Trainer};

#[derive(Parser)]
struct Flags {
    #[arg(long, default_value_t = 1)]
    dp: usize,
    #[arg(long, default_value_t = 1)]
    pp: usize,
    #[arg(long, default_value_t = 0)]
    zero: u8,
    #[arg(long, default_value_t = 1)]
    micro_batches: usize,
    #[arg(long, default_value_t = 150)]
    steps: u64,
    /// Folder for checkpoints and the report; a run that is there is gone on with.
    #[arg(long)]
    out: Option<std::path::PathBuf>,
}

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
            let inside =
                [dx * dx + dy * dy < 26, dx.max(dy) < 5, dx.min(dy) < 2 && dx.max(dy) < 7][kind as usize];
            pixels.push(f32::from(u8::from(inside)) + draw(3 + at as u64, 1000) as f32 / 1000.0);
        }
        labels.push(i64::from(kind));
    }
    let pixels = Tensor::from_slice(&pixels, &[n, 1, SIDE, SIDE], Device::CPU)?;
    TensorDataset::new(vec![pixels, Tensor::from_slice(&labels, &[n], Device::CPU)?])
}

/// `relu(x + f(x))`, where f is two convolutions.
fn residual(width: usize) -> impl FnOnce(&Scope) -> nn::Result<Residual> + Send {
    let conv = move || Conv2dConfig::new(width, width, [3, 3]).with_padding([1, 1]);
    let norm = move || GroupNormConfig::new(4, width);
    let layers = SequentialConfig::new().with(conv()).with(norm()).with(Relu).with(conv()).with(norm());
    move |scope| layers.init(scope).map(|inner| Residual { inner })
}

struct Residual {
    inner: Sequential,
}

phalanx::nn::parameters!(Residual { inner });

impl Module for Residual {
    fn forward(&self, x: &Var) -> nn::Result<Var> {
        Ok((x + self.inner.forward(x)?)?.relu()?)
    }
}

fn main() -> train::Result<()> {
    let Flags { dp, pp, zero, micro_batches, steps, out } = Flags::parse();
    let [training, held_out] = pictures(3000)?.split(0.9, 1)?;
    let layers = || {
        let stem =
            SequentialConfig::new().with(Conv2dConfig::new(1, 16, [3, 3]).with_padding([1, 1])).with(Relu);
        let body = stem
            .with_fn(residual(16))
            .with(MaxPool2d::new([2, 2]))
            .with_fn(residual(16))
            .with(MaxPool2d::new([2, 2]));
        body.with(Flatten::default()).with(LinearConfig::new(16 * 36, 3))
    };
    let layout = Layout { dp, pp, micro_batches, ..Layout::default() };
    let lr = Schedule::Cosine { lr: 3e-3, warmup: 10, total: steps, cycles: 0.5, min: 0.0 };
    let config = Config {
        steps,
        batch: 64,
        lr,
        layout,
        zero,
        validate_every: 50,
        save_every: 50,
        out,
        ..Config::default()
    };
    let trainer = Trainer::new(config).data(training).validation(held_out).resume_if_there();
    let summary = trainer.run_layers(layers, |output, batch| {
        let [_, labels] = batch.vars()?;
        Ok(CrossEntropyLoss::default().forward(output, &labels)?)
    })?;
    println!("{}", serde_json::to_string_pretty(&summary).unwrap_or_default());
    Ok(())
}
