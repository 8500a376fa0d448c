//! Two devices train a two-layer network on half a batch each, and the dependency engine finds the overlap.
//!
//! ```text
//! cargo run --release --example engine [TRACE.json]
//! ```
//! Each operation says what it reads and mutates, in the order in which one would write the step down, and nothing about
//! when to run. So the copy of the second layer's gradient starts when that gradient is there, beside the rest of the
//! backward pass:
//!
//! ```text
//! cpu:0     forward  backward w2  backward h   backward w1   update w2        update w1
//! cpu:1     forward  backward w2  backward h   backward w1
//! priority                        copy dw2                       copy w2  copy dw1      copy w1
//! ```
//! The trace opens in Perfetto or in a browser's `about:tracing`. The serial engine then repeats the run: the same bits. The
//! program fails if the bits differ, or if the copies did not run beside the backward pass: by the order of beginnings and
//! ends, which depends on no clock.

use std::process::ExitCode;
use std::time::Instant;

use phalanx::kernels::random::normal;
use phalanx::kernels::{add_scaled_, matmul, mean, relu, relu_backward, square, sub};
use phalanx::parallel::engine::{Engine, EngineConfig, Lane, Op, Profile, Resource, Variable};
use phalanx::tensor::{Result as Computed, RngKey, Window};
use phalanx::{DType, Device, Tensor};

const DEVICES: [Device; 2] = [Device::Cpu(0), Device::Cpu(1)];
const STEPS: usize = 40;
/// Steps in which the copy of the second layer's gradient has to run beside the backward pass. On a machine of its own nearly
/// all do; a busy one may wake the copying thread late.
const OVERLAPS_MIN: usize = STEPS / 4;

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

fn main() -> ExitCode {
    let path = std::env::args().nth(1).unwrap_or_else(|| "target/engine.trace.json".into());
    match run(&path) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::from(1),
        Err(error) => {
            eprintln!("engine: {error}");
            ExitCode::from(2)
        }
    }
}

fn run(path: &str) -> Result<bool> {
    for device in DEVICES {
        device.set_threads(1)?; // the engine's workers are the threads
    }
    let config = EngineConfig::new().lane(DEVICES[0], 1).lane(DEVICES[1], 1).lane(Lane::Priority, 1);
    let start = Instant::now();
    let (threaded, profile) = train(&Engine::threaded(&config)?)?;
    let threaded_s = start.elapsed().as_secs_f64();
    let start = Instant::now();
    let (serial, serial_profile) = train(&Engine::serial())?;
    let serial_s = start.elapsed().as_secs_f64();

    println!("loss {:.4} -> {:.4} in {STEPS} steps", threaded.0[0], threaded.0[STEPS - 1]);
    println!("threaded engine {threaded_s:.2} s, serial engine {serial_s:.2} s");
    for (copies, layers) in
        [("copy dw2", "second layer"), ("copy dw1", "first layer"), ("copy dw", "both layers")]
    {
        let (overlap, total) = profile.overlap(copies, "backward");
        let (share, total_ms) =
            (100.0 * overlap.as_secs_f64() / total.as_secs_f64(), 1e3 * total.as_secs_f64());
        println!("gradient copies, {layers}: {share:.0} % of {total_ms:.1} ms beside the backward pass");
    }
    profile.write_chrome_trace(path)?;
    println!("trace: {path}");
    let equal = threaded == serial;
    println!(
        "the serial engine's losses and weights: {}",
        if equal { "equal, bit for bit" } else { "DIFFERENT" }
    );
    let (overlaps, serially) = (overlaps(&profile), overlaps(&serial_profile));
    println!(
        "the second layer's copy ran beside the backward pass in {overlaps} of {STEPS} steps, serially in {serially}"
    );
    if overlaps < OVERLAPS_MIN {
        println!("NO OVERLAP: {OVERLAPS_MIN} steps were expected");
    }
    Ok(equal && overlaps >= OVERLAPS_MIN && serially == 0)
}

/// The steps in which the copy of the second layer's gradient began before the second device's backward pass ended.
fn overlaps(profile: &Profile) -> usize {
    let copies = profile.named("copy dw2");
    copies.filter(|copy| profile.named("backward").any(|backward| backward.overlaps(copy))).count()
}

/// The losses and all weights of both devices.
type Outcome = (Vec<f32>, Vec<Vec<f32>>);

fn train(engine: &Engine) -> Result<(Outcome, Profile)> {
    let net = Net::new(engine, DEVICES)?;
    engine.start_profile();
    for _ in 0..STEPS {
        net.step()?;
    }
    engine.wait_for_all()?;
    Ok((net.outcome()?, engine.take_profile()))
}

/// Rows on each device.
const BATCH: usize = 512;
const INPUTS: usize = 256;
const HIDDEN: usize = 768;
const OUTPUTS: usize = 512;
const LEARNING_RATE: f64 = 0.01;

type Value = Resource<Tensor>;

/// A device's half of the batch, its copy of the weights, and what a step computes.
struct Half {
    lane: Lane,
    /// (BATCH, INPUTS)
    x: Value,
    /// (BATCH, OUTPUTS)
    target: Value,
    /// (INPUTS, HIDDEN) and (HIDDEN, OUTPUTS)
    w: [Value; 2],
    /// Their gradients, and on the first device those that arrive from the second.
    dw: [Value; 2],
    arrived: [Value; 2],
    /// (BATCH, HIDDEN)
    h: Value,
    dh: Value,
    /// The gradient of half the squared error: what `y` has too much. (BATCH, OUTPUTS)
    dy: Value,
}

/// Both halves, on one engine.
struct Net<'a> {
    engine: &'a Engine,
    devices: [Device; 2],
    halves: [Half; 2],
    losses: Resource<Vec<f32>>,
}

/// Numbers that depend on `site` only.
fn random(shape: [usize; 2], std: f64, site: u64, device: Device) -> Computed<Tensor> {
    let stream = RngKey { seed: 7, step: 0 }.site(site);
    normal(&shape, &Window::whole(&shape), stream, [0.0, std], DType::F32, device)
}

fn weights(site: u64, device: Device) -> Computed<[Tensor; 2]> {
    let std = (1.0 / HIDDEN as f64).sqrt();
    let first = random([INPUTS, HIDDEN], std, site, device)?;
    Ok([first, random([HIDDEN, OUTPUTS], std, site + 1, device)?])
}

impl Half {
    fn new(engine: &Engine, index: u64, device: Device) -> Computed<Half> {
        let x = random([BATCH, INPUTS], 1.0, 4 + index, device)?;
        let [first, second] = weights(2, device)?;
        let target = matmul(&relu(&matmul(&x, &first)?)?, &second)?;
        let none = Tensor::empty(&[0], DType::F32, device)?;
        let later = || engine.resource(none.clone());
        Ok(Half {
            lane: device.into(),
            x: engine.resource(x),
            target: engine.resource(target),
            w: weights(0, device)?.map(|w| engine.resource(w)),
            dw: [later(), later()],
            arrived: [later(), later()],
            h: later(),
            dh: later(),
            dy: later(),
        })
    }
}

impl<'a> Net<'a> {
    fn new(engine: &'a Engine, devices: [Device; 2]) -> Result<Net<'a>> {
        let halves = [Half::new(engine, 0, devices[0])?, Half::new(engine, 1, devices[1])?];
        Ok(Net { engine, devices, halves, losses: engine.resource(Vec::new()) })
    }

    /// Queues a training step, in the order in which one would write it down.
    fn step(&self) -> Result<()> {
        self.halves.iter().try_for_each(|half| self.forward(half))?;
        self.loss()?;
        for layer in [1, 0] {
            self.halves.iter().try_for_each(|half| self.backward(half, layer))?;
            self.exchange(layer)?;
        }
        Ok(())
    }

    fn forward(&self, half: &Half) -> Result<()> {
        let Half { lane, x, target, w: [w1, w2], h, dy, .. } = half;
        self.push("forward h", *lane, [x, w1], h, |[x, w1], h| {
            *h = relu(&matmul(x, w1)?)?;
            Ok(())
        })?;
        self.push("forward y", *lane, [h, w2, target], dy, |[h, w2, target], dy| {
            *dy = sub(&matmul(h, w2)?, target)?;
            Ok(())
        })
    }

    fn backward(&self, half: &Half, layer: usize) -> Result<()> {
        let Half { lane, x, w: [_, w2], dw: [dw1, dw2], h, dh, dy, .. } = half;
        if layer == 0 {
            return self.push("backward dw1", *lane, [x, dh], dw1, |[x, dh], dw1| {
                *dw1 = matmul(&x.transpose(0, 1)?, dh)?;
                Ok(())
            });
        }
        self.push("backward dw2", *lane, [h, dy], dw2, |[h, dy], dw2| {
            *dw2 = matmul(&h.transpose(0, 1)?, dy)?;
            Ok(())
        })?;
        self.push("backward dh", *lane, [h, dy, w2], dh, |[h, dy, w2], dh| {
            *dh = relu_backward(h, &matmul(dy, &w2.transpose(0, 1)?)?)?;
            Ok(())
        })
    }

    /// Adds the second device's gradient to the first one's, and sends the new weights back.
    fn exchange(&self, layer: usize) -> Result<()> {
        let [first, second] = &self.halves;
        let ([to_first, to_second], pick) = (self.devices, |names: [&'static str; 2]| names[layer]);
        let (arrived, w) = (&first.arrived[layer], &first.w[layer]);
        let copy = pick(["copy dw1", "copy dw2"]);
        self.push(copy, Lane::Priority, [&second.dw[layer]], arrived, move |[dw], arrived| {
            *arrived = dw.to_device(to_first, true)?;
            Ok(())
        })?;
        let update = pick(["update w1", "update w2"]);
        self.push(update, first.lane, [&first.dw[layer], arrived], w, |[dw, arrived], w| {
            let rate = -LEARNING_RATE / (2 * BATCH) as f64;
            add_scaled_(w, dw, rate)?;
            add_scaled_(w, arrived, rate)
        })?;
        let copy = pick(["copy w1", "copy w2"]);
        self.push(copy, Lane::Priority, [w], &second.w[layer], move |[w], copy| {
            *copy = w.to_device(to_second, true)?;
            Ok(())
        })
    }

    /// Queues the step's loss, the mean squared error.
    fn loss(&self) -> Result<()> {
        let (dys, losses) = (self.halves.each_ref().map(|half| half.dy.clone()), self.losses.clone());
        let (reads, mutated) = (dys.each_ref().map(|dy| dy.variable().clone()), losses.variable().clone());
        let work = move || {
            let mut loss = 0.0;
            for dy in &dys {
                loss += mean(&square(&*dy.read()?)?, &[0, 1], false)?.item::<f32>()? / 2.0;
            }
            losses.write()?.push(loss);
            Ok(())
        };
        let op = Op::new("loss").on(self.halves[0].lane);
        Ok(self.engine.push(op.reads(&[&reads[0], &reads[1]]).mutates(&[&mutated]), work)?)
    }

    /// Queues an operation that computes one tensor.
    fn push<const N: usize>(
        &self,
        name: &'static str,
        lane: Lane,
        reads: [&Value; N],
        out: &Value,
        compute: impl FnOnce([&Tensor; N], &mut Tensor) -> Computed<()> + Send + 'static,
    ) -> Result<()> {
        let variables: [&Variable; N] = reads.map(Resource::variable);
        let (values, result) = (reads.map(Resource::clone), out.clone());
        let work = move || {
            let values =
                values.iter().map(Resource::read).collect::<phalanx::parallel::engine::Result<Vec<_>>>()?;
            let mut result = result.write()?;
            let values = std::array::from_fn(|i| &*values[i]);
            Ok(compute(values, &mut result)?)
        };
        Ok(self.engine.push(Op::new(name).on(lane).reads(&variables).mutates(&[out.variable()]), work)?)
    }

    /// What the steps have left: the losses, and all weights of both devices. After a wait.
    fn outcome(&self) -> Result<(Vec<f32>, Vec<Vec<f32>>)> {
        let weights = self.halves.iter().flat_map(|half| &half.w);
        let weights = weights.map(|w| Ok(w.read()?.to_vec()?)).collect::<Result<_>>()?;
        Ok((self.losses.read()?.clone(), weights))
    }
}
