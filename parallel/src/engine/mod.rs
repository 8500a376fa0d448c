//! The read/mutate dependency engine: operations name the variables they read and mutate, and run as soon as those allow.
//!
//! Whoever computes, copies and communicates at the same time needs an order that is right and no stricter than right.
//! Here it follows from what operations use: each variable has a queue, first come, first served, in which reads between two
//! writes run together. An operation that holds all its variables may run. The outcome is that of running everything in
//! the order of the pushes, bit for bit, whatever the threads do:
//!
//! ```text
//! push  a = 1        (writes a)       a:  W │ R R │ W
//! push  b = f(a)     (reads a)              │ └─┴── together, on any threads
//! push  c = g(a)     (reads a)              │
//! push  a = h(b, c)  (reads b, c, writes a)       waits for both
//! ```
//!
//! **Tracking is apart from running.** `track` knows which operations may run; a `Runner` runs them, on the caller
//! ([`Engine::serial`]) or on a pool of threads for each lane ([`Engine::threaded`]).
//!
//! **Failures.** An operation that returns an error or panics poisons what it mutates. An operation that uses something poisoned
//! is skipped and passes the poison on. A wait returns the root cause: the error of the operation that failed, of several
//! that of the one pushed first. [`Engine::wait_for_var`] reports and heals one variable, so nobody can take another one that
//! the same failure spoiled for good; [`Engine::wait_for_all`] reports and heals all.
//!
//! **Nothing hangs.** The queues of an operation's variables are entered all at once, so pushes of several threads cannot wait
//! for each other in a circle; a wait inside an operation is an error; dropping the engine runs all that was pushed.
//!
//! Modules, each using those before it: `error`, `fifo` (one variable's queue), `failure`, `node` (a pushed operation), `spare`, `variable`, `track`;
//! `levels` (priorities), `queue` (a lane's), `progress` (waiting for all), `signal` (waiting for one); `core`, `serial`, `threaded`;
//! `resource`.
#![forbid(unsafe_code)]

mod error;
#[cfg(all(test, feature = "loom"))]
mod models;
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
pub use op::EngineConfig;
pub use op::{Lane, Op};
pub use resource::{Generator, Resource, ResourceRef, ResourceRefMut, Scratch};
pub use variable::Variable;

use error::Failure;
use node::Kind;
use runner::Runner;
use runner::Serial;
use runner::Threaded;
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

/// Numbers for engines and variables.
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

    /// A variable with the value it stands for.
    pub fn resource<T: Send + Sync + 'static>(&self, value: T) -> Resource<T> {
        Resource::new(self.new_variable(), value)
    }

    /// Queues an operation; it runs in the caller's [`Context`](phalanx_tensor::Context). It must not touch anything that
    /// it does not name and that others change.
    ///
    /// # Errors
    /// If a variable was deleted or is another engine's, or the engine does not have the lane. What the operation itself
    /// returns is for the waits.
    pub fn push<F>(&self, op: Op<'_>, work: F) -> Result<()>
    where
        F: FnOnce() -> Result<(), Cause> + Send + 'static,
    {
        self.enter(op, Kind::Plain, move |_| work())
    }

    /// Queues the end of a variable: `free` runs after all that use it, poisoned or not. Nobody can use the variable
    /// after this call.
    ///
    /// # Errors
    /// As [`Engine::push`].
    pub fn delete_variable(&self, variable: &Variable, free: impl FnOnce() + Send + 'static) -> Result<()> {
        self.enter(Op::new("delete").mutates(&[variable]), Kind::Delete, move |_| {
            free();
            Ok(())
        })
    }

    /// Blocks until all operations pushed so far that use the variable have run, readers too. (To wait for what was
    /// written only, see [`Engine::wait_to_read`].)
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

    /// Blocks until everything has run, what operations have pushed included.
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

    /// Blocks until an operation that uses the variable so could run.
    fn wait(&self, wait: &'static str, variable: &Variable, access: Access) -> Result<()> {
        if self.runner.core().inside() {
            return Err(Error::WaitInside { wait });
        }
        let (signal, variables) = (Arc::new(Signal::new()), [variable]);
        let op = match access {
            Access::Read => Op::new(wait).reads(&variables),
            Access::Write => Op::new(wait).mutates(&variables),
        };
        self.enter(op, Kind::Wait, signal.clone().teller())?;
        signal.wait()
    }

    fn enter<F>(&self, op: Op<'_>, kind: Kind, work: F) -> Result<()>
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
        let node = core.spare.take(|node| node.fill(op, lane, kind, work));
        let Some(node) = variable::enter(node, &core.progress.pushed.0)? else { return Ok(()) };
        if kind == Kind::Wait {
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
