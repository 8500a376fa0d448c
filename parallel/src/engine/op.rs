//! [`Op`]: what an operation tells the engine about itself. [`Lane`]: which threads run it. [`EngineConfig`]: the lanes of a
//! threaded engine.

use std::borrow::Cow;
use std::fmt;

use phalanx_tensor::Device;

use super::variable::Variable;

/// An operation's name, the variables it reads and mutates, its priority and its lane.
///
/// A variable named twice counts once, and as mutated if it is in both lists.
#[derive(Clone, Debug)]
pub struct Op<'a> {
    pub(crate) name: Cow<'static, str>,
    pub(crate) reads: &'a [&'a Variable],
    pub(crate) mutates: &'a [&'a Variable],
    pub(crate) priority: i32,
    /// `None`: the engine's first.
    pub(crate) lane: Option<Lane>,
}

impl<'a> Op<'a> {
    /// An operation on the engine's first lane, of priority 0, that uses nothing. Errors call it `name`.
    pub fn new(name: impl Into<Cow<'static, str>>) -> Op<'a> {
        Op { name: name.into(), reads: &[], mutates: &[], priority: 0, lane: None }
    }

    /// The variables it reads.
    pub fn reads(self, reads: &'a [&'a Variable]) -> Op<'a> {
        Op { reads, ..self }
    }

    /// The variables it changes.
    pub fn mutates(self, mutates: &'a [&'a Variable]) -> Op<'a> {
        Op { mutates, ..self }
    }

    /// A lane runs the operation of the highest priority among those that may run; of equals, the one that became ready
    /// first.
    pub fn priority(self, priority: i32) -> Op<'a> {
        Op { priority, ..self }
    }

    /// Where it runs.
    pub fn on(self, lane: impl Into<Lane>) -> Op<'a> {
        Op { lane: Some(lane.into()), ..self }
    }
}

/// Some of an engine's threads, with a queue of their own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Lane {
    /// A device's pool.
    Device(Device),
    /// The lane for copies and communication, so that they do not queue behind computation.
    Priority,
    /// Copies from or to a device, which do not queue behind its computation: each thread is that of a
    /// [`Stream`](phalanx_tensor::Stream), so on a GPU it has a CUDA stream of its own.
    Copies(Device),
}

impl From<Device> for Lane {
    fn from(device: Device) -> Lane {
        Lane::Device(device)
    }
}

impl fmt::Display for Lane {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Lane::Device(device) => write!(f, "a pool of {device}"),
            Lane::Priority => f.write_str("a priority lane"),
            Lane::Copies(device) => write!(f, "a lane for copies of {device}"),
        }
    }
}

/// Lanes and their threads.
///
/// ```
/// # use phalanx_parallel::engine::{Engine, EngineConfig, Lane};
/// # use phalanx_tensor::Device;
/// let config = EngineConfig::new().lane(Device::Cpu(0), 2).lane(Device::Cpu(1), 2).lane(Lane::Priority, 1);
/// let engine = Engine::threaded(&config)?;
/// # Ok::<(), phalanx_parallel::engine::Error>(())
/// ```
#[derive(Clone, Debug, Default)]
pub struct EngineConfig {
    lanes: Vec<(Lane, usize)>,
    is_pooled: bool,
    order: ReadyOrder,
}

/// Which of the operations that may run a lane runs first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ReadyOrder {
    /// The one of the highest priority, of equals the one that became ready first.
    #[default]
    Priority,
    /// The one that became ready first, whatever its priority.
    Fifo,
}

impl EngineConfig {
    /// No lanes yet; an engine without any gets a thread for [`Device::CPU`].
    pub fn new() -> EngineConfig {
        EngineConfig::default()
    }

    /// Gives `lane` this many threads, at least one.
    pub fn lane(mut self, lane: impl Into<Lane>, threads: usize) -> EngineConfig {
        let (lane, threads) = (lane.into(), threads.max(1));
        match self.lanes.iter_mut().find(|(l, _)| *l == lane) {
            Some(known) => known.1 = threads,
            None => self.lanes.push((lane, threads)),
        }
        self
    }

    /// One pool of threads runs the operations of every lane (MXNet's `ThreadedEnginePooled`).
    pub fn pooled(threads: usize) -> EngineConfig {
        EngineConfig { is_pooled: true, ..EngineConfig::new().lane(Device::CPU, threads) }
    }

    /// Which of the operations that may run a lane runs first.
    pub fn ready_order(self, order: ReadyOrder) -> EngineConfig {
        EngineConfig { order, ..self }
    }

    pub(crate) fn is_pooled(&self) -> bool {
        self.is_pooled
    }

    pub(crate) fn order(&self) -> ReadyOrder {
        self.order
    }

    /// The lanes, at least one.
    pub(crate) fn lanes(&self) -> Vec<(Lane, usize)> {
        if self.lanes.is_empty() { vec![(Device::CPU.into(), 1)] } else { self.lanes.clone() }
    }
}
