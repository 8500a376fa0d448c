//! [`Operation`]: an operation that is declared once and pushed often. Its variables are checked, sorted and counted once.

use std::borrow::Cow;
use std::fmt;
use std::sync::Arc;

use super::completion::{Completion, Started};
use super::error::{Cause, Error, Result};
use super::node::{NodeKind, Uses, fill};
use super::op::{Lane, Op};
use super::{Engine, NodeSpec};

/// An operation that [`Engine::declare`] has checked; [`Engine::push_operation`] queues it, any number of times. Clones are
/// handles of one operation; what was pushed runs although the last handle is dropped.
#[derive(Clone)]
pub struct Operation {
    declared: Arc<Declared>,
    priority: i32,
}

struct Declared {
    engine: u64,
    name: Cow<'static, str>,
    uses: Uses,
    lane: (u32, Option<Lane>),
    work: Work,
}

enum Work {
    Plain(Box<dyn Fn() -> Result<(), Cause> + Send + Sync>),
    Async(Box<dyn Fn(Completion) -> Result<(), Cause> + Send + Sync>),
}

impl Operation {
    /// The same operation, to be pushed with another priority.
    pub fn with_priority(&self, priority: i32) -> Operation {
        Operation { declared: self.declared.clone(), priority }
    }
}

impl fmt::Debug for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Operation({})", self.declared.name)
    }
}

impl Engine {
    /// Declares an operation (MXNet's `NewOperator`). Pushes of one that mutates nothing may run at the same time.
    ///
    /// ```
    /// use phalanx_parallel::engine::{Engine, Op};
    /// let engine = Engine::serial();
    /// let count = engine.resource(0);
    /// let (value, variable) = (count.clone(), count.variable().clone());
    /// let step = engine.declare(Op::new("count += 1").mutates(&[&variable]), move || {
    ///     *value.write()? += 1;
    ///     Ok(())
    /// })?;
    /// for _ in 0..10 {
    ///     engine.push_operation(&step)?;
    /// }
    /// engine.wait_for_var(&variable)?;
    /// assert_eq!(*count.read()?, 10);
    /// # Ok::<(), phalanx_parallel::engine::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`Engine::push`], but for deleted variables, which each push looks for.
    pub fn declare<F>(&self, op: Op<'_>, work: F) -> Result<Operation>
    where
        F: Fn() -> Result<(), Cause> + Send + Sync + 'static,
    {
        self.operation(op, Work::Plain(Box::new(work)))
    }

    /// Declares an operation that completes by callback, as those of [`Engine::push_async`] do.
    ///
    /// # Errors
    /// As [`Engine::declare`].
    pub fn declare_async<F>(&self, op: Op<'_>, start: F) -> Result<Operation>
    where
        F: Fn(Completion) -> Result<(), Cause> + Send + Sync + 'static,
    {
        self.operation(op, Work::Async(Box::new(start)))
    }

    fn operation(&self, op: Op<'_>, work: Work) -> Result<Operation> {
        let (engine, lane, mut uses) = (self.runner.core().id, self.check(&op)?, Uses::new());
        fill(&mut uses, op.reads, op.mutates);
        let declared = Declared { engine, name: op.name, uses, lane: (lane, op.lane), work };
        Ok(Operation { declared: Arc::new(declared), priority: op.priority })
    }

    /// Queues a declared operation (MXNet's `Push`); it runs in the caller's [`Context`](phalanx_tensor::Context).
    ///
    /// # Errors
    /// If a variable was deleted, or the operation is another engine's.
    pub fn push_operation(&self, operation: &Operation) -> Result<()> {
        self.flush();
        let (core, declared) = (self.runner.core(), operation.declared.clone());
        if declared.engine != core.id {
            return Err(Error::ForeignOperation { op: declared.name.to_string() });
        }
        let kind = match declared.work {
            Work::Plain(_) => NodeKind::Plain,
            Work::Async(_) => NodeKind::Async,
        };
        let (lane, named_lane) = declared.lane;
        let priority = if core.has_priorities { operation.priority } else { 0 };
        let spec = NodeSpec { name: declared.name.clone(), lane, named_lane, priority, kind };
        let node = core.free_nodes.take(|node| {
            node.uses.clone_from(&declared.uses);
            match kind {
                NodeKind::Async => {
                    let runner = self.runner.clone();
                    node.set(spec, move |given| {
                        Started::begin(given.node, runner, |completion| declared.start(completion));
                        Ok(())
                    });
                }
                _ => node.set(spec, move |_| declared.run()),
            }
        });
        self.queue(node)
    }
}

impl Declared {
    fn run(&self) -> Result<(), Cause> {
        match &self.work {
            Work::Plain(work) => work(),
            Work::Async(_) => unreachable!("it is started"),
        }
    }

    fn start(&self, completion: Completion) -> Result<(), Cause> {
        match &self.work {
            Work::Plain(_) => unreachable!("it is run"),
            Work::Async(start) => start(completion),
        }
    }
}
