//! The engine against plain loops, and against everything that can go wrong.

mod failures;
mod order;
mod random;
mod resources;
mod waits;

use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

use phalanx_tensor::Device;

use super::{Engine, EngineConfig, Lane, Op, Variable};

/// Long enough for anything that ends at all.
const LONG: Duration = Duration::from_secs(60);

/// Engines of every kind; threaded ones have this many threads in each of three lanes.
fn engines() -> Vec<(String, Engine)> {
    let threaded = [1, 2, 8].map(|threads| (format!("{threads} threads"), threaded(threads)));
    std::iter::once(("serial".to_string(), Engine::serial())).chain(threaded).collect()
}

fn threaded(threads: usize) -> Engine {
    let config = EngineConfig::new().lane(Device::CPU, threads).lane(Device::Cpu(1), threads);
    Engine::threaded(&config.lane(Lane::Priority, threads)).unwrap()
}

/// A threaded engine of one lane with one thread, which is held up until the sender sends or is dropped.
fn held_up() -> (Engine, Sender<()>) {
    let engine = Engine::threaded(&EngineConfig::new().lane(Device::CPU, 1)).unwrap();
    let (release, held): (_, Receiver<()>) = channel();
    let (started, running) = channel();
    let hold = move || {
        started.send(())?;
        let _ = held.recv();
        Ok(())
    };
    engine.push(Op::new("hold"), hold).unwrap();
    running.recv_timeout(LONG).unwrap();
    (engine, release)
}

/// Pushes an operation that mutates a variable and fails.
fn fail(engine: &Engine, name: &'static str, variable: &Variable) {
    engine.push(Op::new(name).mutates(&[variable]), move || Err(format!("{name} said no").into())).unwrap();
}
