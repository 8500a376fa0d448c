//! [`WrappedUnit`]: a module with hooks around its forward and backward pass. It is the unit of FSDP wrapping
//! (torch: a submodule that FSDP wraps): ZeRO gathers and frees a unit's parameters in these hooks.
//!
//! ```text
//! forward     pre_forward   enter --> module --> leave   post_forward
//! backward    post_backward enter <-- module <-- leave   pre_backward
//! ```
//! `enter` and `leave` are identity nodes of the graph that run hooks in backward. They are recorded only if there are hooks.

use std::any::TypeId;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, RwLock, Weak};

use phalanx_autograd::{
    Backward, Cx, Grads, Result as GradResult, SaveContext, Var, checkpoint, is_recomputing, is_recording,
    phony, record,
};
use smallvec::smallvec;

use phalanx_tensor::unpoisoned;

use crate::{Entry, Module, Parameter, Parameters, Result};

/// Callbacks around a unit's passes. Sharded training gathers and frees parameters in them.
pub trait UnitHooks: Send + Sync {
    /// Before the forward pass.
    ///
    /// # Errors
    /// An error ends the pass.
    fn pre_forward(&self) -> Result<()> {
        Ok(())
    }
    /// After the forward pass.
    ///
    /// # Errors
    /// An error ends the pass.
    fn post_forward(&self) -> Result<()> {
        Ok(())
    }
    /// Before the forward pass is repeated by recomputation.
    ///
    /// # Errors
    /// An error ends the pass.
    fn pre_recompute(&self) -> Result<()> {
        Ok(())
    }
    /// When the gradient of the unit's output has arrived.
    ///
    /// # Errors
    /// An error ends the pass.
    fn pre_backward(&self) -> Result<()> {
        Ok(())
    }
    /// When the unit's gradients are complete.
    ///
    /// # Errors
    /// An error ends the pass.
    fn post_backward(&self) -> Result<()> {
        Ok(())
    }
}

type Hooks = Arc<dyn UnitHooks>;

type HookList = RwLock<Vec<Hooks>>;

/// A module and the hooks around it.
///
/// A model that is to be trained by sharded data parallelism has fields of this type: they are called as the modules in them are, and
/// ZeRO gathers and frees the parameters of one together. A unit may contain units. It can be switched off
/// ([`WrappedUnit::part`], [`AnyUnit::set_wrapped`]); then its parameters belong to the unit around it. [`wrap_by`](crate::wrap_by)
/// and [`wrap_by_size`](crate::wrap_by_size) do so for all units of a model.
///
/// ```
/// use phalanx_nn::autograd::Var;
/// use phalanx_nn::tensor::{DType, Device};
/// use phalanx_nn::{Linear, LinearConfig, Module, Result, Scope, WrappedUnit, parameters, wrap_by_size};
/// struct Mlp { up: WrappedUnit<Linear>, down: WrappedUnit<Linear> }
/// parameters!(Mlp { up, down });
/// impl Module for Mlp {
///     fn forward(&self, x: &Var) -> Result<Var> {
///         self.down.forward(&self.up.forward(x)?.relu()?)
///     }
/// }
/// let scope = Scope::new(1, DType::F32, Device::CPU);
/// let map = |name: &str, inputs, outputs| -> Result<WrappedUnit<Linear>> {
///     Ok(WrappedUnit::of(LinearConfig::new(inputs, outputs).init(&scope.child(name))?))
/// };
/// let model = Mlp { up: map("up", 4, 100)?, down: map("down", 100, 4)? };
/// wrap_by_size(&model, 450); // `up` has 500 elements, `down` 404
/// assert!(model.up.is_wrapped() && !model.down.is_wrapped());
/// # Ok::<(), phalanx_nn::Error>(())
/// ```
pub struct WrappedUnit<M: ?Sized> {
    hooks: Arc<HookList>,
    wrapped: AtomicBool,
    module: Arc<M>,
}

/// A [`WrappedUnit`], whatever its module.
pub trait AnyUnit: Parameters {
    /// Whether it is a unit. If not, it is a plain module, and the wrappers that are made from now on add no hooks.
    fn is_wrapped(&self) -> bool;

    /// Switches it on or off, before a wrapper is made: one that exists keeps its units.
    fn set_wrapped(&self, wrapped: bool);

    /// The type of its module, such as `TypeId::of::<Linear>()`, or `TypeId::of::<dyn Block>()` for a block of a
    /// [`Decoder`](crate::models::Decoder).
    fn module_type(&self) -> TypeId;

    /// Adds hooks. Those that begin something run in order of their registration, those that end it in reverse.
    fn add_hooks(&self, hooks: Arc<dyn UnitHooks>) -> UnitHooksHandle;

    /// Calls `visitor` with every unit directly inside this one, in order of registration.
    fn visit_inner_units(&self, visitor: &mut dyn FnMut(&dyn AnyUnit));
}

/// A handle on hooks that were added to a unit.
pub struct UnitHooksHandle {
    list: Weak<HookList>,
    hooks: Hooks,
}

impl UnitHooksHandle {
    /// Removes the hooks. A second call does nothing.
    pub fn remove(&self) {
        if let Some(list) = self.list.upgrade() {
            unpoisoned(list.write()).retain(|h| !Arc::ptr_eq(h, &self.hooks));
        }
    }
}

impl<M: Send + Sync + 'static> WrappedUnit<M> {
    /// A unit of this module, without hooks. For the layers of a [`Sequential`](crate::Sequential) see
    /// [`Sequential::into_units`](crate::Sequential::into_units).
    pub fn of(module: M) -> WrappedUnit<M> {
        WrappedUnit::new(Arc::new(module))
    }

    /// A module that is no unit until [`AnyUnit::set_wrapped`].
    pub fn part(module: M) -> WrappedUnit<M> {
        WrappedUnit { hooks: Arc::default(), wrapped: AtomicBool::new(false), module: Arc::new(module) }
    }
}

impl<M: ?Sized + Send + Sync + 'static> WrappedUnit<M> {
    /// A unit without hooks, of a module that may be shared; [`WrappedUnit::of`] takes one that is not.
    pub fn new(module: Arc<M>) -> WrappedUnit<M> {
        WrappedUnit { hooks: Arc::default(), wrapped: AtomicBool::new(true), module }
    }

    /// Whether it is a unit; see [`AnyUnit::is_wrapped`].
    pub fn is_wrapped(&self) -> bool {
        self.wrapped.load(Ordering::Relaxed)
    }

    /// The module itself.
    pub fn module(&self) -> &M {
        &self.module
    }

    /// See [`AnyUnit::add_hooks`].
    pub fn add_hooks(&self, hooks: Arc<dyn UnitHooks>) -> UnitHooksHandle {
        unpoisoned(self.hooks.write()).push(hooks.clone());
        UnitHooksHandle { list: Arc::downgrade(&self.hooks), hooks }
    }

    /// Calls the module through `forward`. With `recompute` its activations are not kept but computed again in backward.
    ///
    /// # Errors
    /// Those of `forward` and of the hooks.
    pub fn call(
        &self,
        x: &Var,
        recompute: bool,
        forward: impl Fn(&M, &Var) -> Result<Var> + Send + Sync + 'static,
    ) -> Result<Var> {
        self.call_once(x.clone(), |module, x| {
            if !recompute {
                return forward(module, &x);
            }
            let (module, hooks) = (self.module.clone(), unpoisoned(self.hooks.read()).clone());
            let again = move |vars: &[Var]| {
                if is_recomputing() {
                    hooks.iter().try_for_each(|h| h.pre_recompute())?;
                }
                Ok(forward(&module, &vars[0])?)
            };
            Ok(checkpoint(again, &[&x])?)
        })
    }

    /// Calls the module through `forward`, which may borrow and may drop its input when it is no longer needed.
    ///
    /// # Errors
    /// Those of `forward` and of the hooks.
    pub fn call_once(&self, x: Var, forward: impl FnOnce(&M, Var) -> Result<Var>) -> Result<Var> {
        let hooks = unpoisoned(self.hooks.read()).clone();
        if hooks.is_empty() {
            return forward(&self.module, x);
        }
        let (input, anchor) = enter(x, &hooks)?;
        leave(forward(&self.module, input)?, anchor, &hooks)
    }
}

impl<M: ?Sized + Parameters + Send + Sync + 'static> Parameters for WrappedUnit<M> {
    fn visit(&self, path: &str, visitor: &mut dyn FnMut(&str, Entry<'_>)) {
        self.module.visit(path, visitor);
    }

    fn visit_units(&self, visitor: &mut dyn FnMut(&dyn AnyUnit)) {
        visitor(self);
    }

    fn borrowed(&self) -> Vec<Parameter> {
        self.module.borrowed()
    }
}

impl<M: ?Sized + Module + 'static> Module for WrappedUnit<M> {
    fn forward(&self, x: &Var) -> Result<Var> {
        self.call(x, false, |module, x| module.forward(x))
    }
}

impl<M: ?Sized + Parameters + Send + Sync + 'static> AnyUnit for WrappedUnit<M> {
    fn is_wrapped(&self) -> bool {
        WrappedUnit::is_wrapped(self)
    }

    fn set_wrapped(&self, wrapped: bool) {
        self.wrapped.store(wrapped, Ordering::Relaxed);
    }

    fn module_type(&self) -> TypeId {
        TypeId::of::<M>()
    }

    fn add_hooks(&self, hooks: Arc<dyn UnitHooks>) -> UnitHooksHandle {
        WrappedUnit::add_hooks(self, hooks)
    }

    fn visit_inner_units(&self, visitor: &mut dyn FnMut(&dyn AnyUnit)) {
        self.module.visit_units(visitor);
    }
}

#[derive(Clone, Copy)]
enum Side {
    Enter,
    Leave,
}

/// What a unit's module is called with, once its hooks have run. If the input needs no gradient, `enter` is recorded on a value of its own,
/// the anchor.
fn enter(x: Var, hooks: &[Hooks]) -> Result<(Var, Option<Var>)> {
    hooks.iter().try_for_each(|h| h.pre_forward())?;
    // `enter` is recorded before the unit's operations, so backward runs it after them.
    match x.requires_grad() {
        true => Ok((boundary("enter", &[&x], hooks, Side::Enter)?, None)),
        false => {
            let entered = boundary("enter", &[&phony(x.device(), true)?], hooks, Side::Enter)?;
            Ok((x, Some(entered)))
        }
    }
}

/// What a unit gives, of what its module gave.
fn leave(y: Var, anchor: Option<Var>, hooks: &[Hooks]) -> Result<Var> {
    hooks.iter().rev().try_for_each(|h| h.post_forward())?;
    if !is_recording(&[&y]) {
        return Ok(y);
    }
    let inputs: Vec<&Var> = [&y].into_iter().chain(&anchor).collect();
    boundary("leave", &inputs, hooks, Side::Leave)
}

/// The identity of the first input, with hooks in backward. A second input is an anchor without elements; it gets a gradient so that
/// backward reaches the `enter` node behind it.
fn boundary(name: &'static str, inputs: &[&Var], hooks: &[Hooks], side: Side) -> Result<Var> {
    let hooks = hooks.to_vec();
    let (output, anchor) = (inputs[0].tensor().clone(), inputs.get(1).map(|v| v.detach()));
    Ok(record(name, inputs, output, |_: &SaveContext<'_>| Ok(Boundary { hooks, side, anchor }))?)
}

struct Boundary {
    hooks: Vec<Hooks>,
    side: Side,
    anchor: Option<Var>,
}

impl Backward for Boundary {
    fn backward(&self, cx: &Cx<'_>) -> GradResult<Grads> {
        match self.side {
            Side::Enter => self.hooks.iter().rev().try_for_each(|h| h.post_backward())?,
            Side::Leave => self.hooks.iter().try_for_each(|h| h.pre_backward())?,
        }
        let mut grads: Grads = smallvec![Some(cx.dy().clone())];
        grads.extend(self.anchor.clone().map(Some));
        Ok(grads)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use phalanx_tensor::{DType, Device};

    use super::*;
    use crate::{Embedding, EmbeddingConfig, Linear, LinearConfig, Scope};

    /// Records calls.
    struct Notes(&'static str, Arc<Mutex<Vec<String>>>);

    impl Notes {
        fn note(&self, what: &str) -> Result<()> {
            self.1.lock().unwrap().push(format!("{}.{what}", self.0));
            Ok(())
        }
    }

    impl UnitHooks for Notes {
        fn pre_forward(&self) -> Result<()> {
            self.note("pre_forward")
        }
        fn post_forward(&self) -> Result<()> {
            self.note("post_forward")
        }
        fn pre_recompute(&self) -> Result<()> {
            self.note("pre_recompute")
        }
        fn pre_backward(&self) -> Result<()> {
            self.note("pre_backward")
        }
        fn post_backward(&self) -> Result<()> {
            self.note("post_backward")
        }
    }

    fn model() -> (WrappedUnit<Embedding>, WrappedUnit<Linear>, Arc<Mutex<Vec<String>>>) {
        let scope = Scope::new(1, DType::F64, Device::CPU);
        let notes = Arc::new(Mutex::new(Vec::new()));
        let embedding =
            WrappedUnit::new(Arc::new(EmbeddingConfig::new(5, 3).init(&scope.child("e")).unwrap()));
        let linear = WrappedUnit::new(Arc::new(LinearConfig::new(3, 2).init(&scope.child("l")).unwrap()));
        for (name, parameters) in [("e", embedding.parameters()), ("l", linear.parameters())] {
            for parameter in parameters {
                let notes = Notes(name, notes.clone());
                parameter.leaves()[0].on_accumulate(move |_| Ok(notes.note("grad")?));
            }
        }
        (embedding, linear, notes)
    }

    fn run(embedding: &WrappedUnit<Embedding>, linear: &WrappedUnit<Linear>, recompute: bool) {
        let tokens = Var::from_slice(&[1i64, 4, 1], &[3], Device::CPU).unwrap();
        let x = embedding.call(&tokens, false, |m, x| m.forward(x)).unwrap();
        let y = linear.call(&x, recompute, |m, x| m.forward(x)).unwrap();
        y.sum_all().unwrap().backward().unwrap();
    }

    #[test]
    fn hooks_surround_the_passes_and_all_gradients_come_before_the_end() {
        let (embedding, linear, notes) = model();
        embedding.add_hooks(Arc::new(Notes("e", notes.clone())));
        linear.add_hooks(Arc::new(Notes("l", notes.clone())));
        run(&embedding, &linear, false);
        let forward = ["e.pre_forward", "e.post_forward", "l.pre_forward", "l.post_forward"];
        let backward = ["l.pre_backward", "l.grad", "l.grad", "l.post_backward"];
        let rest = ["e.pre_backward", "e.grad", "e.post_backward"];
        let wanted: Vec<&str> = forward.into_iter().chain(backward).chain(rest).collect();
        assert_eq!(*notes.lock().unwrap(), wanted);
        notes.lock().unwrap().clear();
        run(&embedding, &linear, true);
        let notes = notes.lock().unwrap();
        assert_eq!(notes.iter().filter(|n| *n == "l.pre_recompute").count(), 1);
        let place = |what: &str| notes.iter().position(|n| n == what).unwrap();
        assert!(place("l.pre_recompute") < place("l.grad") && place("l.grad") < place("l.post_backward"));
    }

    #[test]
    fn hooks_and_recomputation_change_no_gradient() {
        let grads = |hooks: bool, recompute: bool| -> Vec<Vec<f64>> {
            let (embedding, linear, notes) = model();
            if hooks {
                embedding.add_hooks(Arc::new(Notes("e", notes.clone())));
                linear.add_hooks(Arc::new(Notes("l", notes.clone())));
            }
            run(&embedding, &linear, recompute);
            let all = embedding.parameters().into_iter().chain(linear.parameters());
            all.map(|p| p.grad().unwrap().unwrap().to_vec().unwrap()).collect()
        };
        let plain = grads(false, false);
        for (hooks, recompute) in [(true, false), (false, true), (true, true)] {
            assert_eq!(grads(hooks, recompute), plain);
        }
    }

    #[test]
    fn an_error_of_a_hook_ends_the_pass() {
        struct Refuse;
        impl UnitHooks for Refuse {
            fn pre_backward(&self) -> Result<()> {
                Err(crate::Error::invalid("hook", "refused"))
            }
        }
        let (_, linear, _) = model();
        linear.add_hooks(Arc::new(Refuse));
        let x = Var::from_slice(&[1f64, 2.0, 3.0], &[3], Device::CPU).unwrap();
        let y = linear.call(&x, false, |m, x| m.forward(x)).unwrap();
        let error = y.sum_all().unwrap().backward().unwrap_err();
        assert!(error.to_string().contains("refused"), "{error}");
    }
}
