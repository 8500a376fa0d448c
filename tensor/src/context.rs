//! The one ambient thing: what an operation finds around it, scoped by a guard, per thread.

use std::cell::Cell;
use std::marker::PhantomData;

use crate::{Category, RngKey};

/// What operations on this thread take from their surroundings. A thread that works on another's behalf captures
/// it there ([`Context::current`]) and enters it here ([`Context::enter`]).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Context {
    /// Whether operations record the graph.
    pub grad: bool,
    /// Whether layers such as dropout and batch norm behave as in training.
    pub train: bool,
    /// The key of random draws: the run's seed and the step's number; a site adds its own.
    pub rng: RngKey,
    /// Where the first row of this thread's share of the batch lies in the global batch, so that a random draw
    /// over activations is the same however the batch is cut.
    pub batch_offset: u64,
    /// Inside the forward pass of a checkpoint, whose graph is not kept.
    pub checkpointing: bool,
    /// Inside a forward pass that repeats an earlier one for the sake of its saved values.
    pub recomputing: bool,
    /// The ledger's category for new storage.
    pub category: Category,
}

impl Context {
    /// What a thread starts with.
    const START: Context = Context {
        grad: true,
        train: true,
        rng: RngKey { seed: 0, step: 0 },
        batch_offset: 0,
        checkpointing: false,
        recomputing: false,
        category: Category::Activations,
    };
}

impl Default for Context {
    fn default() -> Context {
        Context::START
    }
}

thread_local! {
    static CURRENT: Cell<Context> = const { Cell::new(Context::START) };
}

impl Context {
    /// This thread's context.
    #[inline]
    pub fn current() -> Context {
        CURRENT.get()
    }

    /// Makes this the thread's context until the guard is dropped.
    pub fn enter(self) -> ContextGuard {
        ContextGuard { before: CURRENT.replace(self), thread: PhantomData }
    }

    /// Changes the current context until the guard is dropped.
    ///
    /// ```
    /// use phalanx_tensor::Context;
    /// let guard = Context::with(|c| c.train = false);
    /// assert!(!Context::current().train);
    /// drop(guard);
    /// assert!(Context::current().train);
    /// ```
    pub fn with(change: impl FnOnce(&mut Context)) -> ContextGuard {
        let mut context = Context::current();
        change(&mut context);
        context.enter()
    }
}

/// Restores the context that was current before it.
#[must_use = "the context is restored when the guard is dropped"]
#[derive(Debug)]
pub struct ContextGuard {
    before: Context,
    thread: PhantomData<*const ()>,
}

impl Drop for ContextGuard {
    fn drop(&mut self) {
        CURRENT.set(self.before);
    }
}
