//! Functions that run during backward: on a value's gradient, on a node, after a leaf has accumulated.

use std::sync::{Arc, Mutex, MutexGuard, Weak};

use phalanx_tensor::unpoisoned;

use crate::graph::node::Node;
use crate::{Result, Var};

/// Gets a gradient and may replace it.
type GradHook = Arc<dyn Fn(&Var) -> Result<Option<Var>> + Send + Sync>;
/// Gets the gradients of a node's outputs, and those that it made of its inputs.
type NodeHook = Arc<dyn Fn(&[Option<Var>], &[Option<Var>]) -> Result<()> + Send + Sync>;
/// Runs after a leaf's gradient slot has taken a gradient.
pub(crate) type AccumulateHook = Arc<dyn Fn(&Var) -> Result<()> + Send + Sync>;

/// A node's hooks, in order of registration.
#[derive(Default)]
pub(crate) struct Hooks {
    next: u64,
    grad: Vec<(u64, usize, GradHook)>,
    node: Vec<(u64, NodeHook)>,
    accumulated: Vec<(u64, AccumulateHook)>,
    /// Gradients of outputs that were asked to be kept: (output, gradient).
    retained: Vec<(usize, Option<Var>)>,
}

/// Removes its hook when [`HookHandle::remove`] is called. Dropping the handle leaves the hook in place.
#[derive(Clone)]
pub struct HookHandle {
    node: Weak<Node>,
    id: u64,
}

impl HookHandle {
    /// Takes the hook away; does nothing the second time.
    pub fn remove(&self) {
        if let Some(node) = self.node.upgrade() {
            let mut hooks = lock(node.hooks());
            hooks.grad.retain(|h| h.0 != self.id);
            hooks.node.retain(|h| h.0 != self.id);
            hooks.accumulated.retain(|h| h.0 != self.id);
        }
    }
}

fn lock(hooks: &Mutex<Hooks>) -> MutexGuard<'_, Hooks> {
    unpoisoned(hooks.lock())
}

/// Registration.
impl Node {
    fn add_hook(self: &Arc<Node>, add: impl FnOnce(&mut Hooks, u64)) -> HookHandle {
        let mut hooks = lock(self.hooks());
        let id = hooks.next;
        hooks.next += 1;
        add(&mut hooks, id);
        HookHandle { node: Arc::downgrade(self), id }
    }

    fn add_grad_hook(self: &Arc<Node>, output: usize, hook: GradHook) -> HookHandle {
        self.add_hook(|hooks, id| hooks.grad.push((id, output, hook)))
    }

    fn add_node_hook(self: &Arc<Node>, hook: NodeHook) -> HookHandle {
        self.add_hook(|hooks, id| hooks.node.push((id, hook)))
    }

    pub(crate) fn add_accumulate_hook(self: &Arc<Node>, hook: AccumulateHook) -> HookHandle {
        self.add_hook(|hooks, id| hooks.accumulated.push((id, hook)))
    }

    pub(crate) fn has_grad_hooks(&self) -> bool {
        self.hooks.get().is_some_and(|table| !lock(table).grad.is_empty())
    }

    pub(crate) fn has_accumulate_hooks(&self) -> bool {
        self.hooks.get().is_some_and(|table| !lock(table).accumulated.is_empty())
    }

    fn retain_grad(&self, output: usize) {
        let mut hooks = lock(self.hooks());
        if !hooks.retained.iter().any(|r| r.0 == output) {
            hooks.retained.push((output, None));
        }
    }

    pub(crate) fn retained_grad(&self, output: usize) -> Option<Var> {
        let hooks = lock(self.hooks.get()?);
        hooks.retained.iter().find(|r| r.0 == output)?.1.clone()
    }
}

/// Running. The table is not locked while user code runs, so a hook may add and remove hooks.
impl Node {
    /// Passes the gradients of the outputs through their hooks.
    #[inline]
    pub(crate) fn run_grad_hooks(&self, grads: &mut [Option<Var>]) -> Result<()> {
        self.hooks.get().map_or(Ok(()), |table| self.run_grad_hooks_of(table, grads))
    }

    #[cold]
    fn run_grad_hooks_of(&self, table: &Mutex<Hooks>, grads: &mut [Option<Var>]) -> Result<()> {
        let hooks: Vec<_> =
            lock(table).grad.iter().map(|(_, output, hook)| (*output, hook.clone())).collect();
        for (output, hook) in hooks {
            let Some(grad) = &mut grads[output] else { continue };
            if let Some(replacement) = hook(grad)? {
                self.outputs[output].check(self.name, &replacement)?;
                *grad = replacement;
            }
        }
        for (output, kept) in &mut lock(table).retained {
            if let Some(grad) = &grads[*output] {
                *kept = Some(grad.clone());
            }
        }
        Ok(())
    }

    pub(crate) fn run_node_hooks(&self, outputs: &[Option<Var>], inputs: &[Option<Var>]) -> Result<()> {
        let Some(table) = self.hooks.get() else { return Ok(()) };
        let hooks: Vec<_> = lock(table).node.iter().map(|h| h.1.clone()).collect();
        hooks.iter().try_for_each(|hook| hook(outputs, inputs))
    }

    pub(crate) fn accumulate_hooks(&self) -> Vec<AccumulateHook> {
        let Some(table) = self.hooks.get() else { return Vec::new() };
        lock(table).accumulated.iter().map(|h| h.1.clone()).collect()
    }
}

impl Var {
    /// Lets the next backward passes keep this value's gradient for [`Var::grad`].
    pub fn retain_grad(&self) {
        if let Some(edge) = self.edge()
            && !edge.is_to_leaf()
        {
            edge.node.retain_grad(edge.output());
        }
    }

    /// Calls `hook` with this value's gradient whenever a backward pass has completed it, before it is used; what
    /// it returns takes the gradient's place. `None` if the value requires no gradient.
    pub fn on_grad(
        &self,
        hook: impl Fn(&Var) -> Result<Option<Var>> + Send + Sync + 'static,
    ) -> Option<HookHandle> {
        let edge = self.edge()?;
        Some(edge.node.add_grad_hook(edge.output(), Arc::new(hook)))
    }

    /// Calls `hook` after the operation that made this value has run backward, with the gradients of its outputs
    /// and those of its inputs. `None` if the value requires no gradient.
    pub fn on_backward(
        &self,
        hook: impl Fn(&[Option<Var>], &[Option<Var>]) -> Result<()> + Send + Sync + 'static,
    ) -> Option<HookHandle> {
        Some(self.edge()?.node.add_node_hook(Arc::new(hook)))
    }
}
