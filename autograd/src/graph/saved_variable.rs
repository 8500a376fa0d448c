//! [`SavedVariable`]: a value that a node keeps for backward, and the check that it was not modified since.
//! [`saved_hooks`]: packing and unpacking of such values, as PyTorch's `saved_tensors_hooks`.

use std::any::Any;
use std::cell::RefCell;
use std::sync::Arc;

use phalanx_tensor::Tensor;

use crate::graph::node::{Edge, Node};
use crate::graph::rematerialized::Rematerialized;
use crate::{Error, Leaf, Result, Var};

/// A value saved in the forward pass. A leaf is saved by its *handle*: backward reads whatever tensor the leaf
/// holds then, so its storage can be released and filled again in between, as FSDP does.
pub struct SavedVariable {
    value: Value,
    at: Argument,
    version: u64,
}

enum Value {
    Tensor(Tensor),
    /// In the leaf that the node's edge leads to.
    Leaf,
    /// In a leaf that was used as a constant.
    Held(Leaf),
    Packed(Box<Packed>),
    /// Computed again when backward asks for it.
    Rematerialized(Arc<Rematerialized>),
}

struct Packed {
    hooks: Arc<dyn SavedHooks>,
    packed: Box<dyn Any + Send + Sync>,
}

#[derive(Clone, Copy)]
enum Argument {
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

impl Var {
    /// How this value is computed again, if its operation offers that and the value was not written to since.
    pub(crate) fn rematerialized(&self) -> Option<Arc<Rematerialized>> {
        let value = match self.constant_again() {
            Some(again) => Some(again.clone()),
            None => self.edge().and_then(|edge| edge.node.grad_fn.rematerialized(edge.output())),
        };
        value.filter(|value| value.version == self.tensor().version())
    }
}

impl SavedVariable {
    pub(crate) fn input(index: usize, var: &Var) -> Result<SavedVariable> {
        let at = Argument::Input(index as u32);
        if var.edge().is_some_and(|e| e.leaf().is_some()) {
            return Ok(SavedVariable::as_it_is(index, var));
        }
        if let Some(value) = var.rematerialized()
            && (var.constant_again().is_some() || HOOKS.with_borrow(Vec::is_empty))
        {
            return Ok(SavedVariable { version: value.version, value: Value::Rematerialized(value), at });
        }
        if let Some(leaf) = var.holder() {
            let version = leaf.version();
            return Ok(SavedVariable { value: Value::Held(leaf), at, version });
        }
        SavedVariable::tensor(var.tensor(), at)
    }

    /// Whether it is computed again when backward asks for it.
    pub(crate) fn is_rematerialized(&self) -> bool {
        matches!(self.value, Value::Rematerialized(_))
    }

    /// Records the version of a value that something else keeps alive, so that a later modification is found.
    pub(crate) fn as_it_is(index: usize, var: &Var) -> SavedVariable {
        let (value, version) = match var.edge().and_then(Edge::leaf) {
            Some(leaf) => (Value::Leaf, leaf.version()),
            None => (Value::Tensor(var.tensor().clone()), var.tensor().version()),
        };
        SavedVariable { value, at: Argument::Input(index as u32), version }
    }

    /// The same saved value, as input number `index`.
    pub(crate) fn at(self, index: usize) -> SavedVariable {
        SavedVariable { at: Argument::Input(index as u32), ..self }
    }

    pub(crate) fn output(index: usize, tensor: &Tensor) -> Result<SavedVariable> {
        SavedVariable::tensor(tensor, Argument::Output(index as u32))
    }

    fn tensor(tensor: &Tensor, at: Argument) -> Result<SavedVariable> {
        let version = tensor.version();
        let hooks = HOOKS.with_borrow(|stack| stack.last().cloned());
        let value = match hooks {
            Some(hooks) => Value::Packed(Box::new(Packed { packed: hooks.pack(tensor)?, hooks })),
            None => Value::Tensor(tensor.clone()),
        };
        Ok(SavedVariable { value, at, version })
    }

    /// The value, linked into the graph if the result is to be differentiated again.
    pub(crate) fn unpack(&self, node: &Arc<Node>, link: bool) -> Result<Var> {
        let (tensor, now) = match (&self.value, self.at) {
            (Value::Held(leaf), _) => leaf.tensor_and_version(),
            (Value::Tensor(tensor), _) => (tensor.clone(), tensor.version()),
            (Value::Packed(kept), _) => (kept.hooks.unpack(kept.packed.as_ref())?, self.version),
            (Value::Rematerialized(value), _) => (value.tensor()?, self.version),
            (Value::Leaf, Argument::Input(i)) => {
                let leaf = node.inputs[i as usize].as_ref().and_then(Edge::leaf);
                let leaf = leaf.unwrap_or_else(|| unreachable!("saved as a leaf, so the edge leads to one"));
                leaf.tensor_and_version()
            }
            (Value::Leaf, Argument::Output(_)) => unreachable!("a leaf is no operation's output"),
        };
        self.check(node, now)?;
        let edge = match self.at {
            _ if !link => None,
            Argument::Input(i) => node.inputs[i as usize].clone(),
            Argument::Output(output) => Some(Edge::new(node.clone(), output as usize)),
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

    /// Returns an error if the value's version has changed since it was saved (an in-place modification).
    #[inline]
    fn check(&self, node: &Node, now: u64) -> Result<()> {
        if now == self.version {
            return Ok(());
        }
        let value = match self.at {
            Argument::Input(i) => format!("input {i}"),
            Argument::Output(i) => format!("output {i}"),
        };
        Err(Error::modified(node.name, value, self.version, now))
    }
}
