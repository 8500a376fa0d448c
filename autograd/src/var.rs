//! [`Var`]: a tensor with an optional place in the graph.

use std::sync::Arc;

use phalanx_tensor::{DType, Device, Tensor, Value};

use crate::engine::backward_from;
use crate::hooks::HookHandle;
use crate::leaf::Leaf;
use crate::node::Edge;
use crate::{Options, Result};

/// A tensor that remembers how it was made, if a gradient may be asked of it. All arithmetic is on this type; it
/// is cheap to clone. See the [`crate::ops`] for what can be done with it.
#[derive(Clone)]
pub struct Var {
    tensor: Tensor,
    origin: Origin,
}

/// Where a value comes from.
#[derive(Clone)]
enum Origin {
    /// No gradient is asked of it.
    Constant,
    /// Nor of this one, which a leaf holds.
    Held(Leaf),
    Made(Edge),
}

impl Var {
    /// A constant: no gradient is recorded for it.
    pub fn new(tensor: Tensor) -> Var {
        Var { tensor, origin: Origin::Constant }
    }

    /// A leaf that requires a gradient; see [`Leaf`].
    ///
    /// # Errors
    /// If the dtype is not a floating-point one.
    pub fn leaf(tensor: Tensor) -> Result<Var> {
        Ok(Leaf::new(tensor, false)?.var())
    }

    /// A constant from values in row-major order.
    ///
    /// # Errors
    /// If their number is not the shape's, or the device refuses.
    pub fn from_slice<T: Value>(values: &[T], shape: &[usize], device: Device) -> Result<Var> {
        Ok(Var::new(Tensor::from_slice(values, shape, device)?))
    }

    /// A constant without dimensions.
    ///
    /// # Errors
    /// If the device refuses.
    pub fn scalar<T: Value>(value: T, device: Device) -> Result<Var> {
        Ok(Var::new(Tensor::scalar(value, device)?))
    }

    pub(crate) fn from_parts(tensor: Tensor, edge: Option<Edge>) -> Var {
        Var { tensor, origin: edge.map_or(Origin::Constant, Origin::Made) }
    }

    pub(crate) fn held_by(tensor: Tensor, leaf: Leaf) -> Var {
        Var { tensor, origin: Origin::Held(leaf) }
    }

    /// The leaf that holds it, if it is a constant.
    pub(crate) fn holder(&self) -> Option<&Leaf> {
        match &self.origin {
            Origin::Held(leaf) => Some(leaf),
            Origin::Constant | Origin::Made(_) => None,
        }
    }

    pub(crate) fn edge(&self) -> Option<&Edge> {
        match &self.origin {
            Origin::Made(edge) => Some(edge),
            Origin::Constant | Origin::Held(_) => None,
        }
    }

    /// The values.
    pub fn tensor(&self) -> &Tensor {
        &self.tensor
    }

    /// The values, without the link.
    pub fn into_tensor(self) -> Tensor {
        self.tensor
    }

    /// Sizes, outermost first.
    pub fn shape(&self) -> &[usize] {
        self.tensor.shape()
    }

    /// Number of dimensions.
    pub fn rank(&self) -> usize {
        self.tensor.rank()
    }

    /// Number of elements.
    pub fn numel(&self) -> usize {
        self.tensor.numel()
    }

    /// The elements' type.
    pub fn dtype(&self) -> DType {
        self.tensor.dtype()
    }

    /// Where it lives.
    pub fn device(&self) -> Device {
        self.tensor.device()
    }

    /// Whether a gradient may be asked of it.
    pub fn requires_grad(&self) -> bool {
        self.edge().is_some()
    }

    /// The name of the operation that made it; `leaf` for a leaf, `None` for a constant.
    pub fn op(&self) -> Option<&'static str> {
        Some(self.edge()?.node.name)
    }

    /// The same values as a constant.
    pub fn detach(&self) -> Var {
        Var::new(self.tensor.clone())
    }

    /// Its place in the graph without its elements: what is recorded on that sends gradients of this value's shape, dtype
    /// and device. For operations whose result was computed before they are recorded, so that nobody holds the elements
    /// in between.
    ///
    /// # Errors
    /// If the device refuses.
    pub fn place(&self) -> Result<Var> {
        let tensor = Tensor::empty(&[0], self.dtype(), self.device())?;
        Ok(Var::from_parts(tensor, self.edge().cloned()))
    }

    /// The handle on the leaf that it is, if it is one.
    pub fn as_leaf(&self) -> Option<Leaf> {
        let edge = self.edge()?;
        edge.leaf().map(|_| Leaf(Arc::clone(&edge.node)))
    }

    /// The only element.
    ///
    /// # Errors
    /// If there is not exactly one, or its type is not `T`.
    pub fn item<T: Value>(&self) -> Result<T> {
        Ok(self.tensor.item()?)
    }

    /// All elements in row-major order.
    ///
    /// # Errors
    /// If their type is not `T`.
    pub fn to_vec<T: Value>(&self) -> Result<Vec<T>> {
        Ok(self.tensor.to_vec()?)
    }

    /// Computes the gradient of this one-element value with respect to every leaf behind it, and adds it to the
    /// leaves' slots. The graph can be run once, unless [`Var::backward_options`] says otherwise.
    ///
    /// # Errors
    /// If it has several elements or no graph, or a backward function fails.
    pub fn backward(&self) -> Result<()> {
        backward_from(self, None, Options::default())
    }

    /// [`Var::backward`] for a value of any shape, given the gradient that it has itself.
    ///
    /// # Errors
    /// If the gradient does not fit, there is no graph, or a backward function fails.
    pub fn backward_with(&self, grad: Var) -> Result<()> {
        backward_from(self, Some(grad), Options::default())
    }

    /// [`Var::backward`] that treats the graph as the options say: keeps it for another pass, or records the gradients' own.
    ///
    /// ```
    /// use phalanx_autograd::{Options, Var, tensor::{Device, Tensor}};
    /// let x = Var::leaf(Tensor::scalar(3f64, Device::CPU)?)?;
    /// let loss = x.square()?;
    /// loss.backward_options(Options { retain_graph: true, ..Options::default() })?;
    /// loss.backward()?; // adds to the first pass's gradient
    /// assert_eq!(x.grad().unwrap().item::<f64>()?, 12.0);
    /// # Ok::<(), phalanx_autograd::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`Var::backward`].
    pub fn backward_options(&self, options: Options) -> Result<()> {
        backward_from(self, None, options)
    }

    /// The gradient: a leaf's accumulated one, or that of a value on which [`Var::retain_grad`] was called.
    pub fn grad(&self) -> Option<Var> {
        let edge = self.edge()?;
        match self.as_leaf() {
            Some(leaf) => leaf.grad(),
            None => edge.node.retained_grad(edge.output()),
        }
    }

    /// Lets the next backward passes keep this value's gradient for [`Var::grad`].
    pub fn retain_grad(&self) {
        if let Some(edge) = self.edge()
            && edge.leaf().is_none()
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

impl Leaf {
    /// Calls `hook` after a backward pass has added its gradient to the slot.
    pub fn on_accumulate(&self, hook: impl Fn(&Var) -> Result<()> + Send + Sync + 'static) -> HookHandle {
        self.0.add_accumulate_hook(Arc::new(hook))
    }
}

impl std::fmt::Debug for Var {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:?}", self.tensor)?;
        self.op().map_or(Ok(()), |op| write!(f, " <- {op}"))
    }
}
