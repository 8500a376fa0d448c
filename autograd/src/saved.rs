//! Values kept for backward, and the check that nobody changed them.

use std::any::Any;
use std::cell::RefCell;
use std::sync::Arc;

use phalanx_tensor::Tensor;

use crate::node::{Edge, Node};
use crate::remade::Remade;
use crate::{Error, Leaf, Result, Var};

/// A value saved in the forward pass. A leaf is saved by its *handle*: backward reads whatever tensor the leaf
/// holds then, so its storage can be released and filled again in between, as FSDP does.
pub struct Saved {
    value: Value,
    place: Place,
    version: u64,
}

enum Value {
    Tensor(Tensor),
    /// In the leaf that the node's edge leads to.
    Leaf,
    /// In a leaf whose gradient nobody wants.
    Held(Leaf),
    Packed(Box<Packed>),
    /// Made again when it is asked for.
    Remade(Arc<Remade>),
}

struct Packed {
    hooks: Arc<dyn SavedHooks>,
    packed: Box<dyn Any + Send + Sync>,
}

#[derive(Clone, Copy)]
enum Place {
    Input(u32),
    Output(u32),
}

/// Turns saved values into something else and back, for example by moving them to another device.
pub trait SavedHooks: Send + Sync {
    /// Called in the forward pass.
    fn pack(&self, tensor: &Tensor) -> Result<Box<dyn Any + Send + Sync>>;
    /// Called in the backward pass, with what `pack` returned.
    fn unpack(&self, packed: &(dyn Any + Send + Sync)) -> Result<Tensor>;
}

thread_local! {
    static HOOKS: RefCell<Vec<Arc<dyn SavedHooks>>> = const { RefCell::new(Vec::new()) };
}

/// Applies `hooks` to the values saved on this thread until the guard is dropped; the innermost guard wins.
/// Leaves are not packed: they are saved by handle.
pub fn saved_hooks(hooks: Arc<dyn SavedHooks>) -> SavedHooksGuard {
    HOOKS.with_borrow_mut(|stack| stack.push(hooks));
    SavedHooksGuard { thread: std::marker::PhantomData }
}

/// Ends the effect of [`saved_hooks`].
#[must_use = "the hooks apply until the guard is dropped"]
pub struct SavedHooksGuard {
    thread: std::marker::PhantomData<*const ()>,
}

impl Drop for SavedHooksGuard {
    fn drop(&mut self) {
        HOOKS.with_borrow_mut(|stack| stack.pop());
    }
}

impl Saved {
    pub(crate) fn input(index: usize, var: &Var) -> Result<Saved> {
        let place = Place::Input(index as u32);
        if var.edge().is_some_and(|e| e.leaf().is_some()) {
            return Ok(Saved::as_it_is(index, var));
        }
        if let Some(remade) = Remade::behind(var)
            && HOOKS.with_borrow(Vec::is_empty)
        {
            return Ok(Saved { version: remade.version, value: Value::Remade(remade), place });
        }
        if let Some(leaf) = var.holder() {
            return Ok(Saved { value: Value::Held(leaf.clone()), place, version: leaf.version() });
        }
        Saved::tensor(var.tensor(), place)
    }

    /// Whether it is made again when it is asked for.
    pub(crate) fn is_remade(&self) -> bool {
        matches!(self.value, Value::Remade(_))
    }

    /// A value that somebody else keeps alive, for the check that it does not change.
    pub(crate) fn as_it_is(index: usize, var: &Var) -> Saved {
        let (value, version) = match var.edge().and_then(Edge::leaf) {
            Some(leaf) => (Value::Leaf, leaf.version()),
            None => (Value::Tensor(var.tensor().clone()), var.tensor().version()),
        };
        Saved { value, place: Place::Input(index as u32), version }
    }

    /// The same as another input.
    pub(crate) fn at(self, index: usize) -> Saved {
        Saved { place: Place::Input(index as u32), ..self }
    }

    pub(crate) fn output(index: usize, tensor: &Tensor) -> Result<Saved> {
        Saved::tensor(tensor, Place::Output(index as u32))
    }

    fn tensor(tensor: &Tensor, place: Place) -> Result<Saved> {
        let version = tensor.version();
        let hooks = HOOKS.with_borrow(|stack| stack.last().cloned());
        let value = match hooks {
            Some(hooks) => Value::Packed(Box::new(Packed { packed: hooks.pack(tensor)?, hooks })),
            None => Value::Tensor(tensor.clone()),
        };
        Ok(Saved { value, place, version })
    }

    /// The value, linked into the graph if the result is to be differentiated again.
    pub(crate) fn unpack(&self, node: &Arc<Node>, link: bool) -> Result<Var> {
        let (tensor, now) = match (&self.value, self.place) {
            (Value::Held(leaf), _) => leaf.tensor_and_version(),
            (Value::Tensor(tensor), _) => (tensor.clone(), tensor.version()),
            (Value::Packed(kept), _) => (kept.hooks.unpack(kept.packed.as_ref())?, self.version),
            (Value::Remade(remade), _) => (remade.tensor()?, self.version),
            (Value::Leaf, Place::Input(i)) => {
                let leaf = node.inputs[i as usize].as_ref().and_then(Edge::leaf);
                let leaf = leaf.unwrap_or_else(|| unreachable!("saved as a leaf, so the edge leads to one"));
                leaf.tensor_and_version()
            }
            (Value::Leaf, Place::Output(_)) => unreachable!("a leaf is no operation's output"),
        };
        self.check(node, now)?;
        let edge = match self.place {
            _ if !link => None,
            Place::Input(i) => node.inputs[i as usize].clone(),
            Place::Output(output) => Some(Edge::new(node.clone(), output as usize)),
        };
        Ok(Var::from_parts(tensor, edge))
    }

    /// The value, for the last time.
    pub(crate) fn take(self, node: &Arc<Node>) -> Result<Tensor> {
        let Value::Tensor(tensor) = &self.value else {
            return self.unpack(node, false).map(Var::into_tensor);
        };
        self.check(node, tensor.version())?;
        match self.value {
            Value::Tensor(tensor) => Ok(tensor),
            _ => unreachable!("it was a tensor two lines above"),
        }
    }

    /// An error if the value is of another version than it was.
    #[inline]
    fn check(&self, node: &Node, now: u64) -> Result<()> {
        if now == self.version {
            return Ok(());
        }
        let value = match self.place {
            Place::Input(i) => format!("input {i}"),
            Place::Output(i) => format!("output {i}"),
        };
        Err(modified(node.name, value, self.version, now))
    }
}

#[cold]
pub(crate) fn modified(op: &'static str, value: String, saved: u64, now: u64) -> Error {
    Error::Modified { op, value, saved, now }
}
