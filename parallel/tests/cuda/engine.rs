//! The dependency engine over two devices: operations that end when a stream comes to them, and copies beside computation.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

use phalanx_kernels::random::normal;
use phalanx_kernels::{add_scaled_, matmul, relu, relu_backward, sub};
use phalanx_parallel::engine::{self, Cause, Engine, EngineConfig, Lane, Op, Profile, Resource, Variable};
use phalanx_tensor::{DType, Device, Result, RngKey, Tensor, Window};

use crate::Test;

pub const TESTS: [Test; 4] = [
    ("two devices train on the engine with the bits of a plain loop", trains),
    ("a gradient is copied while its device's backward pass goes on", overlaps),
    ("plain tensor code of two devices in a scope of the engine has the bits of plain calls", scopes),
    ("a wait of the engine comes after a stream's work, and returns what a device refuses", waits),
];

const DEVICES: [Device; 2] = [Device::Cuda(0), Device::Cuda(1)];
const STEPS: usize = 3;
const BATCH: usize = 9;
const INPUTS: usize = 5;
const HIDDEN: usize = 17;
const OUTPUTS: usize = 6;

type Value = Resource<Tensor>;
type Outcome<T> = std::result::Result<T, Cause>;

/// A device's half of the batch, its copy of the weights, and what a step computes.
struct Half {
    device: Device,
    x: Value,
    target: Value,
    w: [Value; 2],
    dw: [Value; 2],
    /// The other device's gradients, here.
    arrived: [Value; 2],
    h: Value,
    dh: Value,
    dy: Value,
}

fn random(rows: usize, columns: usize, site: u64, device: Device) -> Result<Tensor> {
    let (shape, stream) = ([rows, columns], RngKey { seed: 7, step: 0 }.site(site));
    normal(&shape, &Window::whole(&shape), stream, [0.0, 0.5], DType::F32, Device::CPU)?
        .to_device(device, false)
}

fn weights(device: Device) -> Result<[Tensor; 2]> {
    Ok([random(INPUTS, HIDDEN, 0, device)?, random(HIDDEN, OUTPUTS, 1, device)?])
}

fn batch(half: u64, device: Device) -> Result<[Tensor; 2]> {
    Ok([random(BATCH, INPUTS, 2 + half, device)?, random(BATCH, OUTPUTS, 4 + half, device)?])
}

impl Half {
    fn new(engine: &Engine, half: u64, device: Device) -> Result<Half> {
        let [x, target] = batch(half, device)?;
        let none = Tensor::empty(&[0], DType::F32, device)?;
        let later = || engine.resource(none.clone());
        Ok(Half {
            device,
            x: engine.resource(x),
            target: engine.resource(target),
            w: weights(device)?.map(|w| engine.resource(w)),
            dw: [later(), later()],
            arrived: [later(), later()],
            h: later(),
            dh: later(),
            dy: later(),
        })
    }
}

/// Queues an operation that computes one tensor, and ends when the device has done it.
fn push<const N: usize>(
    engine: &Engine,
    (name, lane, device): (&'static str, Lane, Device),
    reads: [&Value; N],
    out: &Value,
    compute: impl FnOnce([&Tensor; N], &mut Tensor) -> Outcome<()> + Send + 'static,
) -> Outcome<()> {
    let variables: [&Variable; N] = reads.map(Resource::variable);
    let (values, result) = (reads.map(Resource::clone), out.clone());
    let op = Op::new(name).on(lane).reads(&variables);
    engine.push_async(op.mutates(&[out.variable()]), move |completion| {
        let values = values.iter().map(Resource::read).collect::<std::result::Result<Vec<_>, _>>()?;
        compute(std::array::from_fn(|i| &*values[i]), &mut *result.write()?)?;
        completion.after(device);
        Ok(())
    })?;
    Ok(())
}

/// Queues a step. `hold` is called by the second device's last operation, before that gives the device its work.
fn step(
    engine: &Engine,
    halves: &[Half; 2],
    hold: Option<Receiver<()>>,
    seen: Option<Sender<()>>,
) -> Outcome<()> {
    for Half { device, x, target, w: [w1, w2], h, dy, dw: [_, dw2], dh, .. } in halves {
        let on = |name| (name, Lane::from(*device), *device);
        push(engine, on("forward h"), [x, w1], h, |[x, w1], h| {
            *h = relu(&matmul(x, w1)?)?;
            Ok(())
        })?;
        push(engine, on("forward y"), [h, w2, target], dy, |[h, w2, target], dy| {
            *dy = sub(&matmul(h, w2)?, target)?;
            Ok(())
        })?;
        push(engine, on("backward dw2"), [h, dy], dw2, |[h, dy], dw2| {
            *dw2 = matmul(&h.transpose(0, 1)?, dy)?;
            Ok(())
        })?;
        push(engine, on("backward dh"), [h, dy, w2], dh, |[h, dy, w2], dh| {
            *dh = relu_backward(h, &matmul(dy, &w2.transpose(0, 1)?)?)?;
            Ok(())
        })?;
    }
    copy(engine, ["copy dw2", "copy dw2 back"], halves, 1)?;
    if let Some(seen) = seen {
        let arrived = halves[0].arrived[1].variable();
        engine.push(Op::new("seen").on(Lane::Priority).reads(&[arrived]), move || Ok(seen.send(())?))?;
    }
    let mut hold = hold;
    for Half { device, x, dh, dw: [dw1, _], .. } in halves.iter().rev() {
        let (wait, name) =
            (hold.take(), if *device == DEVICES[1] { "backward dw1 of 1" } else { "backward dw1" });
        push(engine, (name, Lane::from(*device), *device), [x, dh], dw1, move |[x, dh], dw1| {
            wait.map_or(Ok(()), |wait| wait.recv_timeout(Duration::from_secs(60)))?;
            *dw1 = matmul(&x.transpose(0, 1)?, dh)?;
            Ok(())
        })?;
    }
    copy(engine, ["copy dw1", "copy dw1 back"], halves, 0)?;
    for half in halves {
        for layer in 0..2 {
            let (dw, arrived) = (&half.dw[layer], &half.arrived[layer]);
            let on = ("update", Lane::from(half.device), half.device);
            push(engine, on, [dw, arrived], &half.w[layer], |[dw, arrived], w| {
                // The same order of additions on both devices.
                let (first, second) = if dw.device() == DEVICES[0] { (dw, arrived) } else { (arrived, dw) };
                add_scaled_(w, first, -0.1)?;
                Ok(add_scaled_(w, second, -0.1)?)
            })?;
        }
    }
    Ok(())
}

/// Queues the exchange of a layer's gradients, each on its source's lane for copies.
fn copy(engine: &Engine, names: [&'static str; 2], [first, second]: &[Half; 2], layer: usize) -> Outcome<()> {
    for (name, from, to) in [(names[0], second, first), (names[1], first, second)] {
        let (target, lane) = (to.device, Lane::Copies(from.device));
        // The copy is the target's work.
        push(engine, (name, lane, target), [&from.dw[layer]], &to.arrived[layer], move |[dw], arrived| {
            *arrived = dw.to_device(target, false)?;
            Ok(())
        })?;
    }
    Ok(())
}

fn engine() -> Outcome<Engine> {
    let config = DEVICES
        .iter()
        .fold(EngineConfig::new(), |config, &device| config.lane(device, 1).lane(Lane::Copies(device), 1));
    Ok(Engine::threaded(&config.lane(Lane::Priority, 1))?)
}

fn bits(halves: &[Half; 2]) -> Outcome<Vec<Vec<f32>>> {
    halves.iter().flat_map(|half| &half.w).map(|w| Ok(w.read()?.to_vec()?)).collect()
}

/// The same arithmetic in a plain loop, one device after the other.
fn plain() -> Outcome<Vec<Vec<f32>>> {
    let mut w = [weights(DEVICES[0])?, weights(DEVICES[1])?];
    for _ in 0..STEPS {
        let mut gradients = Vec::new();
        for ((half, device), [w1, w2]) in (0..).zip(DEVICES).zip(&w) {
            let [x, target] = batch(half, device)?;
            let h = relu(&matmul(&x, w1)?)?;
            let dy = sub(&matmul(&h, w2)?, &target)?;
            let dh = relu_backward(&h, &matmul(&dy, &w2.transpose(0, 1)?)?)?;
            gradients.push([matmul(&x.transpose(0, 1)?, &dh)?, matmul(&h.transpose(0, 1)?, &dy)?]);
        }
        for (w, device) in w.iter_mut().zip(DEVICES) {
            for (layer, w) in w.iter_mut().enumerate() {
                for gradients in &gradients {
                    add_scaled_(w, &gradients[layer].to_device(device, false)?, -0.1)?;
                }
            }
        }
    }
    w.iter().flatten().map(|w| Ok(w.to_vec()?)).collect()
}

fn trains() -> std::result::Result<(), String> {
    let run = || -> Outcome<()> {
        let wanted = plain()?;
        for engine in [engine()?, Engine::serial()] {
            let halves = [Half::new(&engine, 0, DEVICES[0])?, Half::new(&engine, 1, DEVICES[1])?];
            DEVICES.iter().try_for_each(|device| device.synchronize())?;
            (0..STEPS).try_for_each(|_| step(&engine, &halves, None, None))?;
            engine.wait_for_all()?;
            if bits(&halves)? != wanted {
                return Err("the weights differ from the plain loop's".into());
            }
        }
        Ok(())
    };
    run().map_err(|e| e.to_string())
}

fn overlaps() -> std::result::Result<(), String> {
    let run = || -> Outcome<Profile> {
        let engine = engine()?;
        let halves = [Half::new(&engine, 0, DEVICES[0])?, Half::new(&engine, 1, DEVICES[1])?];
        DEVICES.iter().try_for_each(|device| device.synchronize())?;
        step(&engine, &halves, None, None)?; // compiles the kernels
        engine.wait_for_all()?;
        engine.start_profile();
        let (seen, hold) = channel();
        // The backward pass of device 1 ends only after the copy has ended, so the two run at the same time or never.
        step(&engine, &halves, Some(hold), Some(seen))?;
        engine.wait_for_all()?;
        Ok(engine.take_profile())
    };
    let profile = run().map_err(|e| e.to_string())?;
    let named =
        |name: &str| profile.events.iter().find(|event| event.name == name).ok_or(format!("no {name}"));
    let (copy, backward) = (named("copy dw2")?, named("backward dw1 of 1")?);
    match copy.end < backward.end && named("seen")?.begin > copy.end {
        true => Ok(()),
        false => Err(format!("the copy {copy:?} does not end before the backward pass {backward:?}")),
    }
}

fn waits() -> std::result::Result<(), String> {
    let run = || -> Outcome<String> {
        let engine = engine()?;
        let [a, b] = [0.0f32, 1.0].map(|x| Tensor::from_slice(&[x; 1000], &[1000], DEVICES[0]));
        let (a, b) = (engine.resource(a?), engine.resource(b?));
        DEVICES[0].synchronize()?; // the lane for copies has a stream of its own
        let on = ("copy", Lane::Copies(DEVICES[0]), DEVICES[0]);
        for _ in 0..20 {
            push(&engine, on, [&b], &a, |[b], a| Ok(add_scaled_(a, b, 1.0)?))?;
        }
        engine.wait_to_read(a.variable())?;
        assert_eq!(a.read()?.to_vec::<f32>()?, [20.0; 1000]);
        let other = engine.resource(Tensor::zeros(&[3], DType::F32, DEVICES[1])?);
        push(&engine, on, [&other], &a, |[other], a| Ok(add_scaled_(a, other, 1.0)?))?;
        Ok(engine.wait_for_var(a.variable()).map_or_else(|e| e.to_string(), |()| "no error".into()))
    };
    match run().map_err(|e| e.to_string())? {
        said if said.starts_with("engine: `copy` failed: ") => Ok(()),
        said => Err(said),
    }
}

type Work = Box<dyn FnMut() -> Outcome<()> + Send>;

type LanesAndTensors = (Vec<(Lane, Work)>, [Tensor; 4]);

/// Operations of plain code over both devices, and the tensors that they change.
fn plain_code() -> Outcome<LanesAndTensors> {
    let [x, y] = [6, 7].map(|site| random(HIDDEN, HIDDEN, site, DEVICES[0]));
    let [there, sum] = [8, 9].map(|site| random(HIDDEN, HIDDEN, site, DEVICES[1]));
    let tensors = [x?, y?, there?, sum?];
    DEVICES.iter().try_for_each(|device| device.synchronize())?;
    let ([x, y, there, sum], [mut x_to, mut y_to, mut there_to, mut sum_to]) =
        (tensors.clone(), tensors.clone());
    let (from, same) = (y.clone(), sum.clone());
    let works: Vec<(Lane, Work)> = vec![
        (DEVICES[0].into(), Box::new(move || Ok(y_to.copy_from(&relu(&matmul(&x, &y)?)?)?))),
        (Lane::Copies(DEVICES[0]), Box::new(move || Ok(there_to.copy_from(&from)?))),
        (DEVICES[1].into(), Box::new(move || Ok(add_scaled_(&mut sum_to, &there, 0.5)?))),
        (Lane::Copies(DEVICES[1]), Box::new(move || Ok(x_to.copy_from(&same)?))),
    ];
    Ok((works, tensors))
}

fn scopes() -> std::result::Result<(), String> {
    let values = |tensors: &[Tensor]| tensors.iter().map(|t| t.to_vec::<f32>()).collect::<Result<Vec<_>>>();
    let run = || -> Outcome<()> {
        let order = [0, 1, 2, 0, 3, 2, 1, 2, 3, 0, 1, 2, 3];
        let (mut works, tensors) = plain_code()?;
        for at in order {
            works[at].1()?;
        }
        let wanted = values(&tensors)?;
        for engine in [engine()?, Engine::serial()].map(Arc::new) {
            let (works, tensors) = plain_code()?;
            engine::scope(&engine, |scope| {
                let operation = |(lane, work)| scope.operation(Op::new("step").on(lane), work);
                let operations: Vec<_> = works.into_iter().map(operation).collect();
                order.iter().try_for_each(|&at| scope.push(&operations[at]))
            })??;
            if values(&tensors)? != wanted {
                return Err("the tensors differ from those of plain calls".into());
            }
        }
        Ok(())
    };
    run().map_err(|e| e.to_string())
}
