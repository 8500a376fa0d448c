//! A two-layer network on two devices: `y = relu(x w1) w2`, which learns what another such network does.

use phalanx::kernels::random::normal;
use phalanx::kernels::{add_scaled_, matmul, mean, relu, relu_backward, square, sub};
use phalanx::parallel::engine::{Engine, Lane, Op, Resource, Variable};
use phalanx::tensor::{Result as Computed, RngKey, Window};
use phalanx::{DType, Device, Tensor};

use crate::Result;
use crate::trace::Trace;

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
pub struct Net<'a> {
    engine: &'a Engine,
    trace: &'a Trace,
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
    pub fn new(engine: &'a Engine, trace: &'a Trace, devices: [Device; 2]) -> Result<Net<'a>> {
        let halves = [Half::new(engine, 0, devices[0])?, Half::new(engine, 1, devices[1])?];
        Ok(Net { engine, trace, devices, halves, losses: engine.resource(Vec::new()) })
    }

    /// Queues a training step, in the order in which one would write it down.
    pub fn step(&self) -> Result<()> {
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
        let (values, result, trace) = (reads.map(Resource::clone), out.clone(), self.trace.clone());
        let work = move || {
            let values =
                values.iter().map(Resource::read).collect::<phalanx::parallel::engine::Result<Vec<_>>>()?;
            let mut result = result.write()?;
            let values = std::array::from_fn(|i| &*values[i]);
            Ok(trace.timed(name, lane, || compute(values, &mut result))?)
        };
        Ok(self.engine.push(Op::new(name).on(lane).reads(&variables).mutates(&[out.variable()]), work)?)
    }

    /// What the steps have left: the losses, and all weights of both devices. After a wait.
    pub fn outcome(&self) -> Result<(Vec<f32>, Vec<Vec<f32>>)> {
        let weights = self.halves.iter().flat_map(|half| &half.w);
        let weights = weights.map(|w| Ok(w.read()?.to_vec()?)).collect::<Result<_>>()?;
        Ok((self.losses.read()?.clone(), weights))
    }
}
