//! The body of an operation's node: its backward function with the values that it saved, until they are freed.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::Result;
use crate::backward::{Backward, Cx, Grads};
use crate::node::{Body, Kind};
use crate::remade::Remade;

/// A backward function that can be freed.
pub(crate) trait Operation: Send + Sync {
    /// Runs it, if it was not freed; frees it unless it is kept for another time.
    fn run(&self, cx: &Cx<'_>, keeps: bool) -> Option<Result<Grads>>;

    /// Frees what it saved.
    fn free(&self);

    /// [`Backward::release`]. Where another pass is using the function, nothing is freed.
    fn release(&self, later: &dyn Fn(usize) -> bool);

    /// [`Backward::keeps_gradient`].
    fn keeps_gradient(&self, i: usize) -> bool;

    /// [`Backward::remade`].
    fn remade(&self, output: usize) -> Option<Arc<Remade>>;
}

/// An operation as a node holds it.
pub(crate) struct Recorded<B>(Mutex<State<B>>);

enum State<B> {
    Own(B),
    /// One that was run and kept; it may be running again.
    Shared(Arc<B>),
    Freed,
}

impl<B> Recorded<B> {
    pub(crate) fn new(backward: B) -> Recorded<B> {
        Recorded(Mutex::new(State::Own(backward)))
    }

    /// Puts a function in the place of one that was freed.
    pub(crate) fn set(&mut self, backward: B) {
        *self.state() = State::Own(backward);
    }

    fn state(&mut self) -> &mut State<B> {
        self.0.get_mut().unwrap_or_else(PoisonError::into_inner)
    }

    fn lock(&self) -> MutexGuard<'_, State<B>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn take(&self) -> State<B> {
        std::mem::replace(&mut *self.lock(), State::Freed)
    }

    fn share(&self) -> Option<Arc<B>> {
        let mut state = self.lock();
        let shared = match std::mem::replace(&mut *state, State::Freed) {
            State::Own(backward) => Arc::new(backward),
            State::Shared(backward) => backward,
            State::Freed => return None,
        };
        *state = State::Shared(shared.clone());
        Some(shared)
    }
}

impl<B: Backward> Operation for Recorded<B> {
    fn run(&self, cx: &Cx<'_>, keeps: bool) -> Option<Result<Grads>> {
        if keeps {
            return Some(self.share()?.backward(cx));
        }
        match self.take() {
            State::Own(backward) => Some(backward.backward_once(cx)),
            State::Shared(backward) => Some(backward.backward(cx)),
            State::Freed => None,
        }
    }

    fn free(&self) {
        drop(self.take());
    }

    fn release(&self, later: &dyn Fn(usize) -> bool) {
        match &mut *self.lock() {
            State::Own(backward) => backward.release(later),
            State::Shared(backward) => {
                if let Some(backward) = Arc::get_mut(backward) {
                    backward.release(later);
                }
            }
            State::Freed => {}
        }
    }

    fn keeps_gradient(&self, i: usize) -> bool {
        match &*self.lock() {
            State::Own(backward) => backward.keeps_gradient(i),
            State::Shared(backward) => backward.keeps_gradient(i),
            State::Freed => true,
        }
    }

    fn remade(&self, output: usize) -> Option<Arc<Remade>> {
        if !B::REMAKES {
            return None;
        }
        match &*self.lock() {
            State::Own(backward) => backward.remade(output).cloned(),
            State::Shared(backward) => backward.remade(output).cloned(),
            State::Freed => None,
        }
    }
}

impl<B: Backward + 'static> Body for Recorded<B> {
    fn kind(&self) -> Kind<'_> {
        Kind::Operation(self)
    }

    fn empty(&mut self) -> bool {
        *self.state() = State::Freed;
        true
    }
}
