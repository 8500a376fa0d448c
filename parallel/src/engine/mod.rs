//! The dependency engine: operations name the variables that they read and mutate, and run as soon as those allow it.
//!
//! Each variable has a queue of accesses, first come, first served; reads between two writes are granted together. An
//! operation runs when all its variables have granted it access. The result is that of running the operations one by one
//! in the order in which they were pushed, bit for bit, however the threads interleave:
//!
//! ```text
//! push  a = 1        (writes a)        queue of a:   W1 │ R2 R3 │ W4
//! push  b = f(a)     (reads a)                       │    └──┴──── granted together when W1 has run
//! push  c = g(a)     (reads a)                       │
//! push  a = h(b, c)  (writes a,                      └ granted at once
//!                     reads b, c)                    W4 is granted when R2 and R3 have run
//! ```
//!
//! **Tracking is separate from running.** `variable` grants access and so finds which operations may run. A
//! `Runner` runs them, on the calling thread ([`Engine::serial`]) or on a pool of threads for each lane
//! ([`Engine::threaded`]; a lane is a device, or copies and communication: [`Lane`]).
//!
//! **Failures.** An operation that returns an error or panics poisons the variables that it mutates. An operation that uses
//! a poisoned variable is skipped and poisons what it would have mutated. A wait returns the root cause: the error of the
//! operation that failed; of several, that of the one pushed first. [`Engine::wait_for_var`] reports the failure and removes
//! the poison of one variable; other variables that the same failure poisoned stay so. [`Engine::wait_for_all`] does so for
//! all variables.
//!
//! **No deadlock.** An operation enters the queues of all its variables at once, so operations pushed by several threads
//! cannot wait for each other in a circle. A wait inside an operation is an error. Dropping the engine runs everything that
//! was pushed.
//!
//! ```text
//! mod (Engine) ──► runner ──► variable ◄──► node ──► op        resource: a value with its variable
//!      │             └──► queue                │
//!      └──► wait ◄─────────┘                 error             sync: locks and atomics, loom's in `loom_models`
//! ```
#![forbid(unsafe_code)]

mod error;
#[cfg(all(test, feature = "loom"))]
mod loom_models;
mod node;
mod op;
mod queue;
mod resource;
mod runner;
mod sync;
#[cfg(all(test, not(feature = "loom")))]
mod tests;
mod variable;
mod wait;

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use smallvec::smallvec;

pub use error::{Cause, Error, Result};
pub use op::{EngineConfig, Lane, Op};
pub use resource::{Generator, Resource, ResourceRef, ResourceRefMut, Scratch};
pub use variable::Variable;

use error::Failure;
use node::NodeKind;
use runner::{Runner, Serial, Threaded};
use variable::Access;
use wait::Signal;

/// Runs operations in an order that their variables allow.
///
/// ```
/// use phalanx_parallel::engine::{Engine, Op};
/// let engine = Engine::serial();
/// let (a, b) = (engine.resource(1), engine.resource(0));
/// let (from, to) = (a.clone(), b.clone());
/// engine.push(Op::new("b += a").reads(&[a.variable()]).mutates(&[b.variable()]), move || {
///     *to.write()? += *from.read()?;
///     Ok(())
/// })?;
/// engine.wait_for_var(b.variable())?;
/// assert_eq!((*b.read()?, b.variable().version()), (1, 1));
/// # Ok::<(), phalanx_parallel::engine::Error>(())
/// ```
pub struct Engine {
    runner: Box<dyn Runner>,
}

/// The next number of an engine or variable, unique in the process.
fn next_id() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

impl Engine {
    /// An engine without threads: `push` returns when the operation has run. An operation that is pushed by an operation
    /// runs after that one. It has every lane.
    pub fn serial() -> Engine {
        Engine { runner: Box::new(Serial::new(next_id())) }
    }

    /// An engine with threads of its own.
    ///
    /// # Errors
    /// If the system refuses a thread.
    pub fn threaded(config: &EngineConfig) -> Result<Engine> {
        Ok(Engine { runner: Box::new(Threaded::new(next_id(), config)?) })
    }

    /// A new variable, at version 0.
    pub fn new_variable(&self) -> Variable {
        Variable::new(next_id(), self.runner.core().id)
    }

    /// A value with a variable of its own.
    pub fn resource<T: Send + Sync + 'static>(&self, value: T) -> Resource<T> {
        Resource::new(self.new_variable(), value)
    }

    /// Queues an operation; it runs in the caller's [`Context`](phalanx_tensor::Context). It must not touch data that it does
    /// not name and that other operations change.
    ///
    /// # Errors
    /// If a variable was deleted or is another engine's, or the engine does not have the lane. An error of
    /// the operation itself is returned by the waits.
    pub fn push<F>(&self, op: Op<'_>, work: F) -> Result<()>
    where
        F: FnOnce() -> Result<(), Cause> + Send + 'static,
    {
        self.enter(op, NodeKind::Plain, move |_| work())
    }

    /// Queues the end of a variable: `free` runs after all that use it, poisoned or not. An
    /// operation that names the variable after this call is refused.
    ///
    /// # Errors
    /// As [`Engine::push`].
    pub fn delete_variable(&self, variable: &Variable, free: impl FnOnce() + Send + 'static) -> Result<()> {
        self.enter(Op::new("delete").mutates(&[variable]), NodeKind::Delete, move |_| {
            free();
            Ok(())
        })
    }

    /// Blocks until all operations pushed so far that use the variable have run, readers too. (To wait for
    /// writes only, see [`Engine::wait_to_read`].)
    ///
    /// # Errors
    /// The root cause, if the variable is poisoned, which it is not afterwards; or if it was deleted or is another
    /// engine's, or an operation of this engine calls this.
    pub fn wait_for_var(&self, variable: &Variable) -> Result<()> {
        self.wait("wait_for_var", variable, Access::Write)
    }

    /// Blocks until all operations pushed so far that mutate the variable have run.
    ///
    /// # Errors
    /// As [`Engine::wait_for_var`].
    pub fn wait_to_read(&self, variable: &Variable) -> Result<()> {
        self.wait("wait_to_read", variable, Access::Read)
    }

    /// Blocks until everything has run, operations that other operations have pushed included.
    ///
    /// # Errors
    /// Of the failures that no wait has returned or that still poison a variable, the one pushed first. Afterwards no
    /// variable is poisoned. Or if an operation of this engine calls this.
    pub fn wait_for_all(&self) -> Result<()> {
        let core = self.runner.core();
        if core.inside() {
            return Err(Error::WaitInside { wait: "wait_for_all" });
        }
        core.progress.wait();
        core.failures.report_all()
    }

    /// Blocks until the variable would grant this access to an operation pushed now.
    fn wait(&self, wait: &'static str, variable: &Variable, access: Access) -> Result<()> {
        if self.runner.core().inside() {
            return Err(Error::WaitInside { wait });
        }
        let (signal, variables) = (Arc::new(Signal::new()), [variable]);
        let op = match access {
            Access::Read => Op::new(wait).reads(&variables),
            Access::Write => Op::new(wait).mutates(&variables),
        };
        self.enter(op, NodeKind::Wait, signal.clone().notifier())?;
        signal.wait()
    }

    fn enter<F>(&self, op: Op<'_>, kind: NodeKind, work: F) -> Result<()>
    where
        F: FnOnce(Option<Arc<Failure>>) -> Result<(), Cause> + Send + 'static,
    {
        let core = self.runner.core();
        if let Some(foreign) = op.reads.iter().chain(op.mutates).find(|v| v.0.engine != core.id) {
            return Err(Error::Foreign { op: op.name.into(), variable: foreign.0.id });
        }
        let lane = match op.lane {
            None => 0,
            Some(lane) => self.runner.lane(lane).map_err(|known| {
                let (op, lane) = (op.name.to_string(), lane.to_string());
                Error::NoLane { op, lane, known }
            })?,
        };
        let node = core.free_nodes.take(|node| node.fill(op, lane, kind, work));
        let Some(node) = variable::enter(node, &core.progress.pushed.0)? else { return Ok(()) };
        if kind == NodeKind::Wait {
            let mut ready = smallvec![node];
            runner::end_waits(&mut ready);
            ready.into_iter().for_each(|node| self.runner.start(node));
        } else {
            self.runner.start(node);
        }
        Ok(())
    }
}

impl fmt::Debug for Engine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Engine({})", self.runner.core().id)
    }
}
