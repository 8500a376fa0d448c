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
//! `Runner` runs them, as the engine's [`Policy`] says: on the calling thread ([`Engine::serial`]), on a pool of threads for
//! each lane ([`Engine::threaded`]; a lane is a device, or copies and communication: [`Lane`]), or where a program's own
//! [`Executor`] wants.
//!
//! **An operation may end later than its closure.** [`Engine::push_async`] gives the closure a [`Completion`], which a stream
//! calls when it has copied or computed, while no thread waits.
//!
//! **Failures.** An operation that returns an error or panics poisons the variables that it mutates. An operation that uses
//! a poisoned variable is skipped and poisons what it would have mutated. A wait returns the root cause: the error of the
//! operation that failed; of several, that of the one pushed first. [`Engine::wait_for_var`] reports the failure and removes
//! the poison of one variable; other variables that the same failure poisoned stay so ([`ErrorClearing`] has MXNet's rule, by
//! which they do not). [`Engine::wait_for_all`] does so for all variables.
//!
//! **No deadlock.** An operation enters the queues of all its variables at once, so operations pushed by several threads
//! cannot wait for each other in a circle. A wait inside an operation is an error. Dropping the engine runs everything that
//! was pushed.
//!
//! ```text
//! mod (Engine) ──► policy ──► threaded ──► runner ──► variable ◄──► node ──► op      resource: a value with its variable
//!      │                          └──► queue   │                       │
//!      ├──► completion ────────────────────────┘                       └──► error   sync: locks and atomics, loom's in
//!      └──► wait                                                                    `loom_models`
//! ```
#![forbid(unsafe_code)]

mod bulk;
mod completion;
mod declared;
mod error;
#[cfg(all(test, feature = "loom"))]
mod loom_models;
mod node;
mod op;
mod policy;
mod profile;
mod queue;
mod resource;
mod runner;
mod scope;
mod sync;
#[cfg(all(test, not(feature = "loom")))]
mod tests;
mod threaded;
mod variable;
mod wait;

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use smallvec::smallvec;

pub use bulk::Bulk;
pub use completion::Completion;
pub use declared::Operation;
pub use error::{Cause, Error, ErrorClearing, Result};
pub use op::{EngineConfig, Lane, Op, ReadyOrder};
pub use policy::{Executor, Policy, Task};
pub use profile::{Ending, OpEvent, Profile};
pub use resource::{Generator, Resource, ResourceRef, ResourceRefMut, Scratch};
pub use scope::{Scope, TensorOp, scope};
pub use variable::Variable;

use completion::Started;
use node::{Given, Node, NodeKind, NodeSpec};
use runner::Runner;
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
    runner: Arc<dyn Runner>,
}

/// The next number of an engine or variable, unique in the process.
fn next_id() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

impl Engine {
    /// An engine that runs operations as `policy` says.
    ///
    /// # Errors
    /// If the system refuses a thread, or the device of a lane for copies cannot be used.
    pub fn new(policy: Policy) -> Result<Engine> {
        Ok(Engine { runner: policy.runner(next_id())? })
    }

    /// An engine of [`Policy::Serial`], without threads: `push` returns when the operation has run. An operation that is pushed
    /// by an operation runs after that one. It has every lane.
    pub fn serial() -> Engine {
        Engine { runner: policy::serial(next_id()) }
    }

    /// An engine of [`Policy::Threaded`], with threads of its own.
    ///
    /// # Errors
    /// As [`Engine::new`].
    pub fn threaded(config: &EngineConfig) -> Result<Engine> {
        Engine::new(Policy::Threaded(config.clone()))
    }

    /// With another rule by which a wait for one variable heals variables.
    pub fn with_error_clearing(self, clearing: ErrorClearing) -> Engine {
        let clears = clearing == ErrorClearing::Failure;
        self.runner.core().clears_failures.store(clears, Ordering::Relaxed);
        self
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
        if self.has_bulk() {
            return self.add_to_bulk(op, work);
        }
        self.enter(op, NodeKind::Plain, move |_| work())
    }

    /// Queues an operation that ends when its [`Completion`] is called: a copy or a kernel on a stream, a request that is
    /// answered later. `start` runs as the closure of [`Engine::push`] does; the thread that ran it goes on with other
    /// operations. On an engine of [`Policy::Serial`] `push_async` returns when the completion has come, so it must come without
    /// the caller's help.
    ///
    /// The operation fails if `start` returns an error or panics, and if its completion reports an error or is dropped. Until
    /// both have come its variables are in use.
    ///
    /// On a GPU an operation that computes or copies belongs here, with [`Completion::after`]: one of [`Engine::push`] ends when
    /// its work has been queued, which is too early for dependents on other streams and devices.
    ///
    /// ```
    /// use phalanx_parallel::engine::{Engine, EngineConfig, Op};
    /// let engine = Engine::threaded(&EngineConfig::new())?;
    /// let answer = engine.resource(0);
    /// let (later, variable) = (answer.clone(), answer.variable().clone());
    /// engine.push_async(Op::new("ask").mutates(&[&variable]), move |completion| {
    ///     std::thread::spawn(move || {
    ///         completion.complete(later.write().map(|mut answer| *answer = 42).map_err(Into::into));
    ///     });
    ///     Ok(())
    /// })?;
    /// engine.wait_for_var(&variable)?;
    /// assert_eq!(*answer.read()?, 42);
    /// # Ok::<(), phalanx_parallel::engine::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`Engine::push`].
    pub fn push_async<F>(&self, op: Op<'_>, start: F) -> Result<()>
    where
        F: FnOnce(Completion) -> Result<(), Cause> + Send + 'static,
    {
        self.flush();
        let runner = self.runner.clone();
        self.enter(op, NodeKind::Async, move |given| {
            Started::begin(given.node, runner, start);
            Ok(())
        })
    }

    /// Queues the end of a variable: `free` runs after all that use it, poisoned or not. An
    /// operation that names the variable after this call is refused.
    ///
    /// # Errors
    /// As [`Engine::push`].
    pub fn delete_variable(&self, variable: &Variable, free: impl FnOnce() + Send + 'static) -> Result<()> {
        self.flush();
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
        self.flush();
        core.progress.wait();
        core.failures.report_all()
    }

    /// Begins to record the operations; what was recorded before is gone.
    pub fn start_profile(&self) {
        self.runner.core().recorder.start();
    }

    /// Ends the recording that [`Engine::start_profile`] began; waits for nothing, so what runs still is not in it.
    pub fn take_profile(&self) -> Profile {
        self.flush();
        self.runner.core().recorder.take()
    }

    /// Blocks until the variable would grant this access to an operation pushed now.
    fn wait(&self, wait: &'static str, variable: &Variable, access: Access) -> Result<()> {
        if self.runner.core().inside() {
            return Err(Error::WaitInside { wait });
        }
        self.flush();
        let (signal, variables) = (Arc::new(Signal::new()), [variable]);
        let op = match access {
            Access::Read => Op::new(wait).reads(&variables),
            Access::Write => Op::new(wait).mutates(&variables),
        };
        self.enter(op, NodeKind::Wait, signal.clone().notifier())?;
        let Some(failure) = signal.wait() else { return Ok(()) };
        if self.runner.core().clears_failures.load(Ordering::Relaxed) {
            failure.lift();
        }
        Err(failure.report())
    }

    fn enter<F>(&self, op: Op<'_>, kind: NodeKind, work: F) -> Result<()>
    where
        F: FnOnce(Given<'_>) -> Result<(), Cause> + Send + 'static,
    {
        let (core, lane) = (self.runner.core(), self.check(&op)?);
        let op = if core.has_priorities { op } else { op.priority(0) };
        self.queue(core.free_nodes.take(|node| node.fill(op, lane, kind, work)))
    }

    /// The number of an operation's lane, if the engine has it and the variables are the engine's.
    fn check(&self, op: &Op<'_>) -> Result<u32> {
        let core = self.runner.core();
        if let Some(foreign) = op.reads.iter().chain(op.mutates).find(|v| v.0.engine != core.id) {
            return Err(Error::Foreign { op: op.name.to_string(), variable: foreign.0.id });
        }
        match op.lane {
            None => Ok(0),
            Some(lane) => self.runner.lane(lane).map_err(|known| {
                let (op, lane) = (op.name.to_string(), lane.to_string());
                Error::NoLane { op, lane, known }
            }),
        }
    }

    /// Enters an operation's queues, and runs it if it waits for none.
    fn queue(&self, node: Arc<Node>) -> Result<()> {
        let (core, kind) = (self.runner.core(), node.kind);
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

impl Drop for Engine {
    /// Runs all that was pushed.
    fn drop(&mut self) {
        if self.runner.core().inside() {
            // An operation held the last handle; it cannot wait for itself, so a thread waits. If there is no thread for that,
            // the workers run what was pushed and then sleep.
            let runner = self.runner.clone();
            let _ = std::thread::Builder::new().name("engine: end".into()).spawn(move || runner.shut_down());
        } else {
            self.runner.shut_down();
        }
    }
}

impl fmt::Debug for Engine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Engine({})", self.runner.core().id)
    }
}
