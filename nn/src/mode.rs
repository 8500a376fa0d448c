//! [`Mode`]: whether one layer is in training mode, independently of the model around it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use phalanx_autograd::{ContextMode, repeated};
use phalanx_tensor::{Context, ContextGuard};

/// Whether a layer, and its clones, may be in training mode. A layer is in training mode if both its mode and the context
/// ([`eval`](crate::eval), [`inference`](crate::inference)) allow it. A recomputation has the mode of its forward pass, whatever was
/// set in between.
///
/// Layers of this crate that behave otherwise in training than in evaluation have the methods `eval` and `train`. A module of your
/// own stores a mode and enters it:
///
/// ```
/// use phalanx_nn::{Dropout, Mode, Module, Result, Scope, autograd::Var, tensor::{DType, Device}};
/// struct Noisy { dropout: Dropout, mode: Mode }
/// phalanx_nn::parameters!(Noisy {});
/// impl Module for Noisy {
///     fn forward(&self, x: &Var) -> Result<Var> {
///         let _mode = self.mode.enter();
///         self.dropout.forward(x)
///     }
/// }
/// let dropout = Dropout::new(1.0, &Scope::new(1, DType::F32, Device::CPU))?;
/// let noisy = Noisy { dropout, mode: Mode::default() };
/// let x = Var::from_slice(&[3f32], &[1], Device::CPU)?;
/// assert_eq!(noisy.forward(&x)?.item::<f32>()?, 0.0);
/// noisy.mode.set(false);
/// assert_eq!(noisy.forward(&x)?.item::<f32>()?, 3.0);
/// # Ok::<(), phalanx_nn::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Mode(Arc<AtomicBool>);

impl Default for Mode {
    fn default() -> Mode {
        Mode(Arc::new(AtomicBool::new(true)))
    }
}

impl Mode {
    /// Lets the layer follow the context, or keeps it in evaluation mode.
    pub fn set(&self, training: bool) {
        self.0.store(training, Ordering::Relaxed);
    }

    /// Whether the layer is in training mode now. A layer's forward pass asks it.
    pub fn is_training(&self) -> bool {
        Context::current().train() && repeated(|| self.0.load(Ordering::Relaxed).into()) != 0
    }

    /// Applies this mode to all layers that are called until the guard is dropped. A forward pass that calls other layers enters it.
    pub fn enter(&self) -> ContextGuard {
        phalanx_autograd::with_train(self.is_training())
    }
}

/// Gives layers with a field `mode` PyTorch's methods `eval` and `train`.
macro_rules! modes {
    ([$($generics:tt)*] $layer:ty) => {
        impl<$($generics)*> $layer {
            /// Puts this layer and its clones into evaluation mode, until [`train`](Self::train). For a whole model, and for a while,
            /// [`nn::eval`](crate::eval) and [`nn::inference`](crate::inference) are guards.
            pub fn eval(&self) {
                self.mode.set(false);
            }

            /// Takes this layer and its clones out of evaluation mode.
            pub fn train(&self) {
                self.mode.set(true);
            }
        }
    };
    ($layer:ty) => {
        $crate::mode::modes!([] $layer);
    };
}
pub(crate) use modes;
