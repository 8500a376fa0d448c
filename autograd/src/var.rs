//! [`Var`]: a tensor with an optional place in the graph.

use std::borrow::Cow;
use std::sync::Arc;

use phalanx_kernels::{self as kernels, WeightPanels};
use phalanx_tensor::{DType, Device, Tensor, Value};

use crate::Result;
use crate::graph::node::{Edge, Node};
use crate::graph::rematerialized::Rematerialized;

/// A tensor, with the node of the operation that made it if it requires a gradient. All arithmetic is on this type; it
/// is cheap to clone. See the [`crate::ops`] for what can be done with it.
#[derive(Clone)]
pub struct Var {
    tensor: Tensor,
    origin: Origin,
}

/// Why the tensor of a packed constant has no elements.
const PACKED: &str = "the weight lies in panels, which linear maps and lookups alone read: `Var::unpacked` or `Parameter::values` makes its values";

/// Where a value comes from.
#[derive(Clone)]
enum Origin {
    /// A constant: it has no gradient.
    Constant,
    /// The tensor of a leaf, used as a constant.
    Held(Arc<Node>),
    /// A constant that is computed again in backward rather than kept.
    MadeAgain(Arc<Rematerialized>),
    /// A constant whose elements lie in panels.
    Packed(Arc<WeightPanels>),
    /// An output of a node.
    Made(Edge),
}

impl Var {
    /// A constant: no gradient is recorded for it.
    pub fn new(tensor: Tensor) -> Var {
        Var { tensor, origin: Origin::Constant }
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

    /// A constant weight that lies in panels. [`Var::linear`] multiplies by them and [`Var::embedding`] reads rows from them; for other operations its
    /// values are withheld, and [`Var::unpacked`] makes them.
    ///
    /// # Errors
    /// If the device refuses.
    pub fn packed(panels: WeightPanels) -> Result<Var> {
        let tensor = Tensor::withheld(&panels.shape(), panels.dtype(), panels.device(), PACKED)?;
        Ok(Var { tensor, origin: Origin::Packed(Arc::new(panels)) })
    }

    /// Its panels, if it is [packed](Var::packed).
    pub fn panels(&self) -> Option<&WeightPanels> {
        match &self.origin {
            Origin::Packed(panels) => Some(panels),
            _ => None,
        }
    }

    /// The same value with its elements in its tensor: this one, unless it is [packed](Var::packed).
    ///
    /// # Errors
    /// If memory is short.
    pub fn unpacked(&self) -> Result<Cow<'_, Var>> {
        Ok(match self.panels() {
            Some(panels) => Cow::Owned(Var::new(panels.values()?)),
            None => Cow::Borrowed(self),
        })
    }

    /// `x selfᵀ + bias` for a weight, packed or not, as tensors: the step of [`Var::linear`] that computes.
    ///
    /// # Errors
    /// As [`Var::linear`].
    pub fn multiply_as_weight(&self, x: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
        Ok(match self.panels() {
            Some(panels) => panels.linear(x, bias)?,
            None => kernels::linear(x, &self.tensor, bias)?,
        })
    }

    /// [`Var::multiply_as_weight`] by several weights, each with its bias: by packed ones together ([`WeightPanels::linear_each`]).
    ///
    /// # Errors
    /// As [`Var::linear`].
    pub fn multiply_as_weights(x: &Tensor, maps: &[(Var, Option<Var>)]) -> Result<Vec<Tensor>> {
        let packed =
            maps.iter().map(|(weight, bias)| Some((weight.panels()?, bias.as_ref().map(Var::tensor))));
        if let Some(packed) = packed.collect::<Option<Vec<_>>>() {
            return Ok(WeightPanels::linear_each(x, &packed)?);
        }
        maps.iter()
            .map(|(weight, bias)| weight.multiply_as_weight(x, bias.as_ref().map(Var::tensor)))
            .collect()
    }

    pub(crate) fn from_parts(tensor: Tensor, edge: Option<Edge>) -> Var {
        Var { tensor, origin: edge.map_or(Origin::Constant, Origin::Made) }
    }

    pub(crate) fn held_by(tensor: Tensor, leaf: Arc<Node>) -> Var {
        Var { tensor, origin: Origin::Held(leaf) }
    }

    /// A constant that operations do not keep for backward.
    pub(crate) fn made_again(tensor: Tensor, again: Arc<Rematerialized>) -> Var {
        Var { tensor, origin: Origin::MadeAgain(again) }
    }

    /// How it is computed again, if it is a constant of this kind.
    pub(crate) fn constant_again(&self) -> Option<&Arc<Rematerialized>> {
        match &self.origin {
            Origin::MadeAgain(again) => Some(again),
            Origin::Constant | Origin::Held(_) | Origin::Packed(_) | Origin::Made(_) => None,
        }
    }

    /// The node of the leaf that holds it, if it is a constant.
    pub(crate) fn holding_node(&self) -> Option<&Arc<Node>> {
        match &self.origin {
            Origin::Held(leaf) => Some(leaf),
            Origin::Constant | Origin::MadeAgain(_) | Origin::Packed(_) | Origin::Made(_) => None,
        }
    }

    pub(crate) fn edge(&self) -> Option<&Edge> {
        match &self.origin {
            Origin::Made(edge) => Some(edge),
            Origin::Constant | Origin::Held(_) | Origin::MadeAgain(_) | Origin::Packed(_) => None,
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

    /// Whether it requires a gradient.
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

    /// A value with the same node in the graph and no elements: gradients of this value's shape, dtype and device can
    /// flow through it, while its memory is free. For operations whose result is computed before they are recorded.
    ///
    /// # Errors
    /// If the device refuses.
    pub fn place(&self) -> Result<Var> {
        let tensor = Tensor::empty(&[0], self.dtype(), self.device())?;
        Ok(Var::from_parts(tensor, self.edge().cloned()))
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
}

impl std::fmt::Debug for Var {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:?}", self.tensor)?;
        self.op().map_or(Ok(()), |op| write!(f, " <- {op}"))
    }
}
