//! Hooks that see a module's input and output, and may replace the output: [`Hooked`], and
//! [`Sequential::on_forward`](crate::Sequential::on_forward).
//!
//! If a part of the model is [computed again](phalanx_autograd::checkpoint()) for its backward pass, its hooks are called again with
//! the same values. A hook finds out by [`is_recomputing`](phalanx_autograd::is_recomputing).

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, RwLock, Weak};

use phalanx_autograd::Var;

use phalanx_tensor::unpoisoned;

use crate::{Module, Parameters, Result};

/// Sees a module's input and output, and may return another output.
type Hook = Arc<dyn Fn(&Var, &Var) -> Result<Option<Var>> + Send + Sync>;

struct Registered {
    id: u64,
    layer: usize,
    hook: Hook,
}

type List = RwLock<Vec<Registered>>;

/// The hooks of the layers of one module, by the layers' numbers. A pass without hooks reads one pointer. Clones share the hooks.
#[derive(Clone, Default)]
pub(crate) struct ForwardHooks(OnceLock<Arc<List>>);

impl ForwardHooks {
    pub(crate) fn add(
        &self,
        layer: usize,
        hook: impl Fn(&Var, &Var) -> Result<Option<Var>> + Send + Sync + 'static,
    ) -> ForwardHookHandle {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let list = self.0.get_or_init(Arc::default);
        let id = NEXT.fetch_add(1, Ordering::Relaxed);
        let registered = Registered { id, layer, hook: Arc::new(hook) };
        unpoisoned(list.write()).push(registered);
        ForwardHookHandle { list: Arc::downgrade(list), id }
    }

    /// The output of a layer after its hooks, in order of their registration.
    pub(crate) fn run(&self, layer: usize, x: &Var, y: Var) -> Result<Var> {
        let Some(list) = self.0.get() else { return Ok(y) };
        // A hook may add or remove hooks.
        let hooks: Vec<Hook> = {
            let list = unpoisoned(list.read());
            list.iter()
                .filter(|registered| registered.layer == layer)
                .map(|registered| registered.hook.clone())
                .collect()
        };
        hooks.into_iter().try_fold(y, |y, hook| Ok(hook(x, &y)?.unwrap_or(y)))
    }
}

/// A handle by which a hook is removed. Dropping the handle keeps the hook.
#[derive(Clone)]
pub struct ForwardHookHandle {
    list: Weak<List>,
    id: u64,
}

impl ForwardHookHandle {
    /// Removes the hook. A second call does nothing.
    pub fn remove(&self) {
        if let Some(list) = self.list.upgrade() {
            unpoisoned(list.write()).retain(|registered| registered.id != self.id);
        }
    }
}

/// A module whose inputs and outputs can be seen, and outputs replaced: PyTorch's `register_forward_hook`. Its parameters
/// have the paths that they have without it.
///
/// ```
/// use phalanx_nn::autograd::Var;
/// use phalanx_nn::tensor::Device;
/// use phalanx_nn::{Hooked, Module, Relu};
/// let relu = Hooked::new(Relu);
/// let handle = relu.on_forward(|x, y| {
///     println!("{:?} became {:?}", x.to_vec::<f32>()?, y.to_vec::<f32>()?);
///     Ok(None) // or `Some` output in place of `y`
/// });
/// relu.forward(&Var::from_slice(&[-1f32, 2.0], &[2], Device::CPU)?)?;
/// handle.remove();
/// # Ok::<(), phalanx_nn::Error>(())
/// ```
pub struct Hooked<M> {
    module: M,
    hooks: ForwardHooks,
}

impl<M> Hooked<M> {
    /// The module, without hooks yet.
    pub fn new(module: M) -> Hooked<M> {
        Hooked { module, hooks: ForwardHooks::default() }
    }

    /// The module itself.
    pub fn module(&self) -> &M {
        &self.module
    }

    /// The module without its hooks.
    pub fn into_module(self) -> M {
        self.module
    }

    /// Calls `hook` with the input and the output of every forward pass from now on. A value that it returns replaces the output.
    /// Hooks are called in order of registration. An error of a hook ends the pass.
    pub fn on_forward(
        &self,
        hook: impl Fn(&Var, &Var) -> Result<Option<Var>> + Send + Sync + 'static,
    ) -> ForwardHookHandle {
        self.hooks.add(0, hook)
    }
}

crate::parameters!([M: Parameters] Hooked<M> { module = "" });

impl<M: Module> Module for Hooked<M> {
    fn forward(&self, x: &Var) -> Result<Var> {
        self.hooks.run(0, x, self.module.forward(x)?)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use phalanx_autograd::{checkpoint, is_recomputing};
    use phalanx_tensor::{DType, Device, Tensor};

    use super::*;
    use crate::{Error, LinearConfig, Relu, Scope, SequentialConfig, state_dict};

    fn x() -> Var {
        Var::from_slice(&[-1.0, 2.0], &[1, 2], Device::CPU).unwrap()
    }

    #[test]
    fn hooks_see_inputs_and_outputs_in_order_and_replace_outputs_until_they_are_removed() {
        let relu = Hooked::new(Relu);
        let seen = Arc::new(Mutex::new(Vec::new()));
        let note = |seen: &Arc<Mutex<Vec<f64>>>| {
            let seen = seen.clone();
            move |x: &Var, y: &Var| {
                let sum = x.sum_all()?.item::<f64>()? + 10.0 * y.sum_all()?.item::<f64>()?;
                seen.lock().unwrap().push(sum);
                Ok(Some(y.mul_scalar(3.0)?))
            }
        };
        let (first, second) = (relu.on_forward(note(&seen)), relu.on_forward(note(&seen)));
        assert_eq!(relu.forward(&x()).unwrap().to_vec::<f64>().unwrap(), [0.0, 18.0]);
        assert_eq!(*seen.lock().unwrap(), [21.0, 61.0]);
        first.remove();
        first.remove();
        assert_eq!(relu.forward(&x()).unwrap().to_vec::<f64>().unwrap(), [0.0, 6.0]);
        second.remove();
        assert_eq!(relu.forward(&x()).unwrap().to_vec::<f64>().unwrap(), [0.0, 2.0]);
    }

    #[test]
    fn a_sequentials_layers_are_hooked_by_their_paths() {
        let scope = Scope::new(1, DType::F64, Device::CPU);
        let inner = SequentialConfig::new().with(LinearConfig::new(2, 3)).with(Relu);
        let model = SequentialConfig::new().with(Relu).with(inner).init(&scope).unwrap();
        let seen = Arc::new(Mutex::new(Vec::new()));
        for path in ["0", "1", "1.0", "1.1"] {
            let seen = seen.clone();
            model
                .on_forward(path, move |x, y| {
                    seen.lock().unwrap().push((path, x.shape().to_vec(), y.shape().to_vec()));
                    Ok(None)
                })
                .unwrap();
        }
        model.forward(&x()).unwrap();
        let (two, three) = (vec![1, 2], vec![1, 3]);
        let want = [
            ("0", two.clone(), two.clone()),
            ("1.0", two.clone(), three.clone()),
            ("1.1", three.clone(), three.clone()),
            ("1", two, three),
        ];
        assert_eq!(*seen.lock().unwrap(), want);
        for path in ["2", "x", "0.1", "1.7", ""] {
            let error = model.on_forward(path, |_, _| Ok(None)).err().unwrap().to_string();
            assert!(error.contains("on_forward") && error.contains(&format!("{path:?}")), "{error}");
        }
    }

    #[test]
    fn hooks_change_no_path_and_gradients_flow_through_what_they_return() {
        let linear = LinearConfig::new(2, 1).with_bias(false);
        let hooked = Hooked::new(linear.init(&Scope::new(1, DType::F64, Device::CPU)).unwrap());
        assert_eq!(state_dict(&hooked)[0].0, "weight");
        hooked.on_forward(|_, y| Ok(Some(y.mul_scalar(2.0)?)));
        hooked.forward(&x()).unwrap().sum_all().unwrap().backward().unwrap();
        let grad = hooked.module().weight.grad().unwrap().unwrap();
        assert_eq!(grad.to_vec::<f64>().unwrap(), [-2.0, 4.0]);
        hooked.on_forward(|_, _| Err(Error::invalid("hook", "refused")));
        assert!(hooked.forward(&x()).unwrap_err().to_string().contains("refused"));
    }

    #[test]
    fn a_recomputation_calls_hooks_again_and_says_so() {
        let tanh = Arc::new(Hooked::new(crate::Tanh));
        let seen = Arc::new(Mutex::new(Vec::new()));
        let note = seen.clone();
        tanh.on_forward(move |_, _| {
            note.lock().unwrap().push(is_recomputing());
            Ok(None)
        });
        let x = Var::leaf(Tensor::from_slice(&[0.5], &[1], Device::CPU).unwrap()).unwrap();
        let y = checkpoint(move |v: &[Var]| Ok(tanh.forward(&v[0])?), &[&x]).unwrap();
        y.backward().unwrap();
        assert_eq!(*seen.lock().unwrap(), [false, true]);
    }
}
