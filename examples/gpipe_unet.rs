//! A U-Net with long skip connections over two devices as a pipeline (torchgpipe, arXiv:2004.09910).
//!
//! ```text
//! cargo run --release --example gpipe_unet [TIMELINE.svg [STEPS]]
//! ```
//! A small one learns to find discs, on two logical CPU devices of one thread each. The layers are balanced by time, and PipeDream's
//! planner says what it would do with the same profile. The skips go straight from the first stage to the second; all micro-batches
//! but the last are recomputed. The picture shows the last step. One device does the same micro-batches, with the same bits.
//!
//! Then meta devices count the memory of torchgpipe's U-Nets, up to 15.8 billion parameters on eight devices.

#[path = "gpipe_unet/memory.rs"]
mod memory;
#[path = "gpipe_unet/timeline.rs"]
mod timeline;
#[path = "gpipe_unet/unet.rs"]
mod unet;

use std::io::Write;
use std::num::NonZeroU64;
use std::path::Path;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use phalanx::nn::models::RecomputeMode;
use phalanx::nn::{AdamW, BceWithLogitsLoss, Group, Loss, Module, Parameters, Rule};
use phalanx::parallel::pipeline::gpipe::{GPipe, GPipeConfig, Partition, Timeline, bubble};
use phalanx::parallel::planning::{Level, balance_by_time, plan, profile};
use phalanx::tensor::RngKey;
use phalanx::{Context, Device, Var};
use unet::{INPUTS, OUTPUTS, UNet};

const NET: UNet = UNet { depth: 3, convs: 2, channels: 8 };
const DEVICES: [Device; 2] = [Device::Cpu(0), Device::Cpu(1)];
const IMAGES: usize = 16;
const MICRO_BATCHES: usize = 8;
/// For measuring layers.
const BUDGET: Duration = Duration::from_millis(500);
/// Bytes a second between the devices, which share the machine's memory.
const BANDWIDTH: f64 = 5e9;

/// A line on stdout; a closed stdout is no error.
fn say(line: &str) {
    let _ = writeln!(std::io::stdout(), "{line}");
}

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

fn main() -> ExitCode {
    let mut arguments = std::env::args().skip(1);
    let path = arguments.next().unwrap_or_else(|| "target/gpipe_unet.svg".into());
    if path.starts_with('-') {
        say("gpipe_unet [FILE.svg [STEPS]]");
        return ExitCode::from(if ["-h", "--help"].contains(&&*path) { 0 } else { 2 });
    }
    match run(Path::new(&path), arguments.next().as_deref().unwrap_or("30")) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::from(1),
        Err(error) => {
            eprintln!("gpipe_unet: {error}");
            ExitCode::from(2)
        }
    }
}

fn run(path: &Path, steps: &str) -> Result<bool> {
    let steps = steps.parse::<NonZeroU64>().map_err(|e| format!("got {steps:?} steps: {e}"))?.get();
    for device in DEVICES {
        device.set_threads(1)?; // the pipeline's workers are the threads
    }
    let layers = NET.layers().len();
    let one = Partition::new(&[layers], &DEVICES)?;
    let sample = disc_images(0, IMAGES / MICRO_BATCHES, DEVICES[0])?.0;
    let balance = balance_by_time(DEVICES.len(), &NET.build(&one)?, sample.clone(), BUDGET)?;
    say(&format!("{layers} layers, balanced by time: {balance:?}"));
    let levels = [Level { width: DEVICES.len(), bandwidth: BANDWIDTH }];
    let planned = plan(&profile(&NET.build(&one)?, sample, BUDGET)?, &levels)?;
    let stages =
        planned.stages.iter().map(|stage| format!("layers {:?} on {}", stage.layers, stage.replicas));
    say(&format!(
        "PipeDream's planner, which may replicate stages: {}",
        stages.collect::<Vec<_>>().join(", ")
    ));

    let timeline = Timeline::new();
    let piped = train(Partition::new(&balance, &DEVICES)?, RecomputeMode::ExceptLast, &timeline, steps)?;
    let spans = timeline.take();
    timeline::draw(path, &spans)?;
    let (m, n) = (MICRO_BATCHES as f64, DEVICES.len() as f64);
    let (bubble, formula) = (100.0 * bubble(&spans), 100.0 * (n - 1.0) / (m + n - 1.0));
    say(&format!("loss {:.4} -> {:.4} in {steps} steps", piped.losses[0], piped.losses[steps as usize - 1]));
    say(&format!(
        "bubble {bubble:.0} % of the last step ({formula:.0} % were all stages equal): {}",
        path.display()
    ));

    let plain = train(one, RecomputeMode::Never, &Timeline::new(), steps)?;
    say(&format!("{:.0} ms a step over two devices, {:.0} ms on one", piped.step_ms, plain.step_ms));
    let equal = piped.losses == plain.losses;
    say(&format!("one device's losses: {}", if equal { "equal, bit for bit" } else { "DIFFERENT" }));
    say("");
    memory::table()?;
    Ok(equal)
}

/// A run's losses, and how long a step took.
struct Outcome {
    losses: Vec<f32>,
    step_ms: f64,
}

/// Trains the small net; the timeline is that of the last step.
fn train(partition: Partition, recompute: RecomputeMode, timeline: &Timeline, steps: u64) -> Result<Outcome> {
    let devices = partition.devices();
    let model = NET.build(&partition)?;
    let config = GPipeConfig::new(MICRO_BATCHES).with_recompute(recompute).with_observer(timeline.observer());
    let model = GPipe::new(model, partition, config)?;
    let mut optimizer = AdamW::default().init(vec![Group::new(model.parameters(), 1e-2)])?;
    let (mut losses, begin) = (Vec::new(), Instant::now());
    for step in 0..steps {
        timeline.take();
        let _step = Context::with(|c| c.rng = RngKey { seed: 1, step });
        let (x, _) = disc_images(step, IMAGES, devices[0])?;
        let (_, target) = disc_images(step, IMAGES, devices[devices.len() - 1])?;
        let loss = BceWithLogitsLoss::default().forward(&model.forward(&x)?, &target)?;
        loss.backward()?;
        optimizer.step()?;
        optimizer.zero_grad()?;
        losses.push(loss.item()?);
    }
    Ok(Outcome { losses, step_ms: 1e3 * begin.elapsed().as_secs_f64() / steps as f64 })
}

const SIDE: usize = 32;

/// Something to learn: noisy images with a disc each, and where it is. Images `[count, 3, 32, 32]`, and 1 for each pixel of a disc `[count, 1, 32, 32]`; a function of the step.
fn disc_images(step: u64, count: usize, device: Device) -> Result<(Var, Var)> {
    let mut noise = Noise(step.wrapping_mul(0x9e37_79b9_7f4a_7c15).wrapping_add(1));
    let (mut images, mut discs) = (Vec::new(), Vec::new());
    for _ in 0..count {
        let [x, y, radius] = [11.0, 11.0, 4.0].map(|span: f32| span * (1.0 + noise.next()));
        let inside = |pixel: usize| {
            let (dx, dy) = ((pixel % SIDE) as f32 - x, (pixel / SIDE) as f32 - y);
            f32::from(u8::from(dx * dx + dy * dy < radius * radius))
        };
        let disc: Vec<f32> = (0..SIDE * SIDE).map(inside).collect();
        (0..INPUTS).for_each(|_| images.extend(disc.iter().map(|d| 0.5 * d + noise.next())));
        discs.extend(disc);
    }
    let shape = |channels| [count, channels, SIDE, SIDE];
    let images = Var::from_slice(&images, &shape(INPUTS), device)?;
    Ok((images, Var::from_slice(&discs, &shape(OUTPUTS), device)?))
}

/// Uniform numbers in [0, 1): a linear congruence.
struct Noise(u64);

impl Noise {
    fn next(&mut self) -> f32 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (self.0 >> 40) as f32 / (1u64 << 24) as f32
    }
}
