//! [`Policy`]: where and in which order an engine runs the operations that may run. [`Executor`]: a policy of the program's own.

use std::fmt;
use std::sync::{Arc, Weak};

use super::error::{Reason, Result};
use super::node::{Node, Outcome, recycled};
use super::op::{EngineConfig, Lane};
use super::runner::{Ender, EngineCore, Runner, Serial};
use super::threaded::Threaded;
use super::variable::Ready;

/// How an engine runs operations. All policies give the same values, versions and errors.
#[non_exhaustive]
pub enum Policy {
    /// On the thread that pushes, before `push` returns (MXNet's `NaiveEngine`).
    Serial,
    /// On the engine's own threads: for each lane (MXNet's `ThreadedEnginePerDevice`), or in one pool
    /// ([`EngineConfig::pooled`]), by priority or in the order in which they become ready ([`EngineConfig::ready_order`]).
    Threaded(EngineConfig),
    /// Where the executor runs them.
    Custom(Box<dyn Executor>),
}

impl Default for Policy {
    /// A thread for [`Device::CPU`](phalanx_tensor::Device::CPU).
    fn default() -> Policy {
        Policy::Threaded(EngineConfig::new())
    }
}

impl Policy {
    pub(crate) fn runner(self, id: u64) -> Result<Arc<dyn Runner>> {
        Ok(match self {
            Policy::Serial => serial(id),
            Policy::Threaded(config) => Threaded::new(id, &config)?,
            Policy::Custom(executor) => Custom::new(id, executor),
        })
    }
}

pub(crate) fn serial(id: u64) -> Arc<dyn Runner> {
    Arc::new(Serial::new(id))
}

impl fmt::Debug for Policy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Policy::Serial => f.write_str("Serial"),
            Policy::Threaded(config) => write!(f, "Threaded({config:?})"),
            Policy::Custom(_) => f.write_str("Custom"),
        }
    }
}

/// Runs the operations that may run: on a pool that the program has already, on an event loop, in an order of its own.
///
/// ```
/// use phalanx_parallel::engine::{Engine, Executor, Op, Policy, Task};
/// /// A thread for each operation.
/// struct Spawn;
/// impl Executor for Spawn {
///     fn execute(&self, task: Task) {
///         std::thread::spawn(move || task.run());
///     }
/// }
/// let engine = Engine::new(Policy::Custom(Box::new(Spawn)))?;
/// let sum = engine.resource(0);
/// for n in 1..=3 {
///     let (value, variable) = (sum.clone(), sum.variable().clone());
///     engine.push(Op::new("add").mutates(&[&variable]), move || {
///         *value.write()? += n;
///         Ok(())
///     })?;
/// }
/// engine.wait_for_all()?;
/// assert_eq!(*sum.read()?, 6);
/// # Ok::<(), phalanx_parallel::engine::Error>(())
/// ```
pub trait Executor: Send + Sync + 'static {
    /// Takes an operation that was granted all its variables, to run it soon on some thread. It is called by threads that
    /// push, by [`Task::run`], and by the callbacks of streams, so it should queue the task and not run it.
    fn execute(&self, task: Task);
}

/// An operation that may run. If it is dropped and was not run, it fails.
#[must_use = "an operation that is not run fails"]
pub struct Task {
    /// `None` once it has run.
    node: Option<Arc<Node>>,
    runner: Arc<Custom>,
}

impl Task {
    /// Runs it on this thread.
    pub fn run(mut self) {
        let Some(node) = self.node.take() else { return };
        let mut ready = Ready::new();
        if self.runner.core.run(&node, Ender::Other, &mut ready) {
            self.runner.goes_on(node, ready);
        }
    }

    /// The operation's name.
    pub fn name(&self) -> &str {
        self.node.as_ref().map_or("", |node| &node.name)
    }

    /// Its priority.
    pub fn priority(&self) -> i32 {
        self.node.as_ref().map_or(0, |node| node.priority)
    }

    /// The lane it was pushed on; `None` if it named none.
    pub fn lane(&self) -> Option<Lane> {
        self.node.as_ref().and_then(|node| node.named_lane)
    }
}

impl Drop for Task {
    fn drop(&mut self) {
        if let Some(node) = self.node.take() {
            let why = "its executor dropped it before it ran".into();
            self.runner.ended(node, Outcome::Failed(Reason::Error(why)));
        }
    }
}

impl fmt::Debug for Task {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Task({})", self.name())
    }
}

/// Runs operations by an [`Executor`].
struct Custom {
    core: EngineCore,
    executor: Box<dyn Executor>,
    this: Weak<Custom>,
}

impl Custom {
    fn new(id: u64, executor: Box<dyn Executor>) -> Arc<Custom> {
        let core = EngineCore::new(id, 0);
        Arc::new_cyclic(|this| Custom { core, executor, this: this.clone() })
    }

    /// Starts what an operation has made ready, which has ended.
    fn goes_on(&self, node: Arc<Node>, ready: Ready) {
        ready.into_iter().for_each(|node| self.start(node));
        self.core.free_nodes.keep(recycled(node));
        self.core.progress.idle();
    }
}

impl Runner for Custom {
    fn core(&self) -> &EngineCore {
        &self.core
    }

    /// It has every lane: [`Task::lane`] is the executor's to honour.
    fn lane(&self, _: Lane) -> Result<u32, String> {
        Ok(0)
    }

    fn start(&self, node: Arc<Node>) {
        // The caller holds a handle, so there is one to clone.
        let Some(runner) = self.this.upgrade() else { return };
        self.executor.execute(Task { node: Some(node), runner });
    }

    fn ended(&self, node: Arc<Node>, outcome: Outcome) {
        let mut ready = Ready::new();
        self.core.end(&node, outcome, Ender::Other, &mut ready);
        self.goes_on(node, ready);
    }

    fn shut_down(&self) {
        self.core.progress.wait();
    }
}
