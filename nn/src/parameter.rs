//! [`Parameter`]: a trained tensor.

#[cfg(test)]
mod tests;

use std::ops::Range;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use phalanx_autograd::{Leaf, Slot, Var};
use phalanx_kernels as kernels;
use phalanx_tensor::{Category, DType, Device, Dims, Tensor, Window};

use crate::{Error, Result};

/// A handle on a trained tensor: cloning shares it, an optimizer updates it in place, its storage can be released
/// and re-pointed between forward and backward.
///
/// It knows its name in the whole model and, if it is a shard, its place in the whole tensor. A parameter used at
/// several *sites* (tied embeddings) keeps one chain of gradients for each, so that the order of additions is the
/// same whether the sites sit on one device or on two: [`Parameter::grad`] adds the chains, site 0 first.
#[derive(Clone)]
pub struct Parameter(Arc<State>);

struct State {
    name: String,
    part: Shard,
    range: Range<usize>,
    rank: usize,
    /// [`TRAINED`], [`HELD`], [`HEARD`].
    flags: AtomicU8,
    sites: Vec<Leaf>,
    holder: Mutex<Option<Arc<dyn Holder>>>,
}

/// Gradients are recorded for it.
const TRAINED: u8 = 1;
/// It has a holder.
const HELD: u8 = 2;
/// Its holder hears of uses.
const HEARD: u8 = 4;

impl Parameter {
    /// A whole parameter.
    ///
    /// # Errors
    /// If the dtype is no floating-point one.
    pub fn new(name: impl Into<String>, tensor: Tensor) -> Result<Parameter> {
        let part = Shard::whole(tensor.shape());
        Parameter::shard(name, tensor, part)
    }

    /// A part of a parameter. `tensor` may have another shape than the part, with as many elements.
    ///
    /// # Errors
    /// If the dtype is no floating-point one, or the number of elements is not the part's.
    pub fn shard(name: impl Into<String>, tensor: Tensor, part: Shard) -> Result<Parameter> {
        let name = name.into();
        if tensor.numel() != part.extent.iter().product::<usize>() {
            let why = format!("got a tensor of shape {:?} for a part of {:?}", tensor.shape(), part.extent);
            return Err(Error::invalid(name, why));
        }
        let (range, rank) = (0..tensor.numel(), tensor.rank());
        Parameter::build(name, tensor, (part, range), 1, rank)
    }

    /// The same parameter for use at `sites` places. To be called before it is used.
    ///
    /// # Errors
    /// If `sites` is 0.
    pub fn with_sites(self, sites: usize) -> Result<Parameter> {
        if sites == 0 {
            return Err(Error::invalid(self.name(), "a parameter has at least one site, got 0"));
        }
        let place = (self.0.part.clone(), self.range());
        Parameter::build(self.0.name.clone(), self.tensor(), place, sites, self.0.rank)
    }

    /// Elements `range` of this one's part, in row-major order, held by `tensor` (one dimension, any floating-point dtype) and
    /// updated there: what an optimizer gets of a parameter that is spread over ranks. It is a matrix if this one is, and has
    /// its sites and its part.
    ///
    /// # Errors
    /// If the range is not inside, or the tensor has another number of elements.
    pub fn piece(&self, tensor: Tensor, range: Range<usize>) -> Result<Parameter> {
        let whole = self.0.part.extent.iter().product();
        if range.end > whole || range.len() != tensor.numel() {
            let why = format!("got {:?} for elements {range:?} of {whole}", tensor.shape());
            return Err(Error::invalid(self.name(), why));
        }
        let place = (self.0.part.clone(), range);
        Parameter::build(self.0.name.clone(), tensor, place, self.0.sites.len(), self.0.rank)
    }

    fn build(
        name: String,
        tensor: Tensor,
        (part, range): (Shard, Range<usize>),
        sites: usize,
        rank: usize,
    ) -> Result<Parameter> {
        tensor.storage().set_category(Category::Parameters);
        let sites = (0..sites).map(|_| Leaf::new(tensor.clone(), true)).collect::<Result<_, _>>()?;
        let (flags, holder) = (AtomicU8::new(TRAINED), Mutex::default());
        Ok(Parameter(Arc::new(State { name, part, range, rank, flags, sites, holder })))
    }

    /// The name in the whole model, such as `h.0.attn.c_attn.weight`.
    pub fn name(&self) -> &str {
        &self.0.name
    }

    /// Which part of the whole it is.
    pub fn part(&self) -> &Shard {
        &self.0.part
    }

    /// Which elements of the part it holds, in row-major order: all, unless it is a [`Parameter::piece`].
    pub fn range(&self) -> Range<usize> {
        self.0.range.clone()
    }

    /// The whole tensor's shape, as its cut sees it.
    pub fn global_shape(&self) -> &[usize] {
        &self.0.part.window.global
    }

    /// Whether it is a matrix or more: what weight decay is commonly applied to.
    pub fn is_matrix(&self) -> bool {
        self.0.rank >= 2
    }

    /// The values.
    pub fn tensor(&self) -> Tensor {
        self.0.sites[0].tensor()
    }

    /// The values' dtype.
    pub fn dtype(&self) -> DType {
        self.tensor().dtype()
    }

    /// Where the values live.
    pub fn device(&self) -> Device {
        self.tensor().device()
    }

    /// The value to compute with, at the first site.
    pub fn var(&self) -> Var {
        self.site(0)
    }

    /// The value to compute with, at one of the sites; a constant while the parameter is frozen.
    ///
    /// # Panics
    /// If there is no such site, which is fixed where the model is written.
    pub fn site(&self, site: usize) -> Var {
        let (leaf, flags) = (&self.0.sites[site], self.flags());
        if flags & HEARD != 0
            && let Some(holder) = self.holder()
        {
            holder.before_use(self);
        }
        if flags & TRAINED != 0 { leaf.var() } else { leaf.constant() }
    }

    /// The sites' leaves, for hooks and gradient slots.
    pub fn leaves(&self) -> &[Leaf] {
        &self.0.sites
    }

    /// Whether both are handles on the same parameter.
    pub fn is(&self, other: &Parameter) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    /// Whether gradients are recorded for it.
    pub fn is_trained(&self) -> bool {
        self.flags() & TRAINED != 0
    }

    fn flags(&self) -> u8 {
        self.0.flags.load(Ordering::Relaxed)
    }

    /// Records no gradients for it from now on.
    pub fn freeze(&self) {
        self.0.flags.fetch_and(!TRAINED, Ordering::Relaxed);
    }

    /// Undoes [`Parameter::freeze`].
    pub fn unfreeze(&self) {
        self.0.flags.fetch_or(TRAINED, Ordering::Relaxed);
    }
}

/// Wrappers that have it in hand.
impl Parameter {
    /// Lets a wrapper have a say from now on in what others do with it, in the place of an earlier one, which is told.
    pub fn hand_to(&self, holder: Arc<dyn Holder>) {
        let earlier = self.hold(Some(holder.clone())).filter(|earlier| !same(earlier, &holder));
        earlier.iter().for_each(|earlier| earlier.lost());
    }

    /// Undoes [`Parameter::hand_to`], unless another wrapper has taken it in hand since.
    pub fn take_from(&self, holder: &Arc<dyn Holder>) {
        if self.holder().is_some_and(|own| same(&own, holder)) {
            self.hold(None);
        }
    }

    /// The wrapper that has it in hand.
    pub fn holder(&self) -> Option<Arc<dyn Holder>> {
        match self.flags() & HELD {
            0 => None,
            _ => self.0.holder.lock().unwrap_or_else(PoisonError::into_inner).clone(),
        }
    }

    /// Returns the earlier one.
    fn hold(&self, holder: Option<Arc<dyn Holder>>) -> Option<Arc<dyn Holder>> {
        let flags = match &holder {
            None => 0,
            Some(holder) if holder.hears_of_uses() => HELD | HEARD,
            Some(_) => HELD,
        };
        let mut held = self.0.holder.lock().unwrap_or_else(PoisonError::into_inner);
        self.0.flags.fetch_and(!(HELD | HEARD), Ordering::Relaxed);
        self.0.flags.fetch_or(flags, Ordering::Relaxed);
        std::mem::replace(&mut *held, holder)
    }

    /// Refuses what the wrapper that has it in hand does not let others do.
    ///
    /// # Errors
    /// The wrapper's reason, and what is to be done instead.
    pub fn check_usage(&self, op: &str, usage: Usage) -> Result<()> {
        match self.holder().and_then(|holder| holder.refusal(usage)) {
            None => Ok(()),
            Some(why) => Err(Error::invalid(op, format!("{:?} {why}", self.name()))),
        }
    }
}

fn same(a: &Arc<dyn Holder>, b: &Arc<dyn Holder>) -> bool {
    std::ptr::addr_eq(Arc::as_ptr(a), Arc::as_ptr(b))
}

/// Values.
impl Parameter {
    /// Lets it hold another tensor, at every site; see [`Leaf::set_tensor`].
    ///
    /// # Errors
    /// If dtype, device or shape differ.
    pub fn set_tensor(&self, tensor: Tensor) -> Result<()> {
        tensor.storage().set_category(Category::Parameters);
        Ok(self.0.sites.iter().try_for_each(|leaf| leaf.set_tensor(tensor.clone()))?)
    }

    /// Copies values into the tensor it holds, converted to its dtype and moved to its device.
    ///
    /// # Errors
    /// If the shape differs.
    pub fn load(&self, values: &Tensor) -> Result<()> {
        let mut held = self.tensor();
        let values = kernels::cast(&values.to_device(held.device(), false)?, held.dtype())?;
        Ok(kernels::copy_(&mut held, &values)?)
    }
}

/// Gradients.
impl Parameter {
    /// The gradient: the sites' chains added in the order of the sites.
    ///
    /// # Errors
    /// If there are several chains and their sum cannot be allocated.
    pub fn grad(&self) -> Result<Option<Tensor>> {
        let mut chains = self.0.sites.iter().filter_map(Leaf::grad).map(Var::into_tensor);
        let Some(first) = chains.next() else { return Ok(None) };
        let mut sum = None;
        for chain in chains {
            kernels::accumulate_(sum.get_or_insert(first.copy()?), &chain)?;
        }
        Ok(Some(sum.unwrap_or(first)))
    }

    /// Adds the sites' chains into the first, which then holds the gradient, and returns it. For the end of a step:
    /// what accumulates afterwards would be added in another order.
    ///
    /// # Errors
    /// If a chain cannot be written.
    pub fn finish_grad(&self) -> Result<Option<Tensor>> {
        let (first, rest) = self.0.sites.split_at(1);
        let mut sum = first[0].grad().map(Var::into_tensor);
        for leaf in rest {
            let Some(chain) = leaf.grad() else { continue };
            match &mut sum {
                Some(sum) => kernels::accumulate_(sum, chain.tensor())?,
                None => {
                    first[0].set_grad(Some(chain.clone()));
                    sum = Some(chain.into_tensor());
                }
            }
            leaf.zero_grad()?;
        }
        Ok(sum)
    }

    /// Takes the gradient away and returns it.
    ///
    /// # Errors
    /// As [`Parameter::finish_grad`].
    pub fn take_grad(&self) -> Result<Option<Tensor>> {
        let mut grad = self.finish_grad()?;
        if let Slot::Into(_) = self.0.sites[0].slot() {
            // The buffer stays where it is, and is zeroed.
            grad = grad.map(|grad| grad.copy()).transpose()?;
        }
        self.0.sites[0].set_grad(None);
        Ok(grad)
    }

    /// Replaces the gradient.
    pub fn set_grad(&self, grad: Option<Tensor>) {
        if let Some(grad) = &grad {
            grad.storage().set_category(Category::Gradients);
        }
        self.0.sites[1..].iter().for_each(|leaf| leaf.set_grad(None));
        self.0.sites[0].set_grad(grad.map(Var::new));
    }

    /// Forgets the gradient, of every site.
    ///
    /// # Errors
    /// If a gradient buffer cannot be written, or the gradient is not here ([`Parameter::hand_to`]).
    pub fn zero_grad(&self) -> Result<()> {
        self.check_usage("zero_grad", Usage::ZeroGrad)?;
        Ok(self.0.sites.iter().try_for_each(Leaf::zero_grad)?)
    }

    /// Keeps gradients in `dtype` from now on, whatever the parameter's.
    ///
    /// # Errors
    /// If it is no dtype of floats, or a wrapper has the gradients in hand ([`Parameter::hand_to`]).
    pub fn set_grad_dtype(&self, dtype: DType) -> Result<()> {
        if !dtype.is_float() {
            return Err(Error::invalid(
                self.name(),
                format!("got gradients of dtype {dtype}, wanted a floating-point dtype"),
            ));
        }
        self.check_usage("set_grad_dtype", Usage::Gradients)?;
        Ok(self.0.sites.iter().try_for_each(|leaf| leaf.set_slot(Slot::Owned(Some(dtype))))?)
    }
}

impl std::fmt::Debug for Parameter {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Parameter({} {:?} {})", self.name(), self.tensor().shape(), self.dtype())
    }
}

/// The part of a whole tensor that a parameter is: `extent` elements from `window.offset` on.
///
/// The whole may be seen in a finer shape than the tensor's own, where that is what the cut is regular in: the joint
/// map of queries, keys and values as `[3, out, in]`, of which a rank has `[3, out / ranks, in]`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shard {
    /// The whole's shape, and where the part begins in it.
    pub window: Window,
    /// The part's shape, with as many dimensions.
    pub extent: Dims,
}

impl Shard {
    /// The part that is the whole.
    pub fn whole(shape: &[usize]) -> Shard {
        Shard { window: Window::whole(shape), extent: Dims::from_slice(shape) }
    }

    /// Whether it is the whole.
    pub fn is_whole(&self) -> bool {
        self.extent == self.window.global
    }

    /// The shape of the whole tensor, which has `rank` dimensions: where the cut sees a finer one, the first sizes are one.
    pub fn whole_shape(&self, rank: usize) -> Vec<usize> {
        let seen = &self.window.global;
        let (first, rest) = seen.split_at((seen.len() + 1).saturating_sub(rank.max(1)));
        if first.is_empty() { seen.to_vec() } else { [&[first.iter().product()], rest].concat() }
    }

    /// This part of a whole tensor, as a view.
    ///
    /// # Errors
    /// If the tensor is not the whole.
    pub fn of(&self, whole: &Tensor) -> Result<Tensor> {
        let mut cuts = self.window.offset.iter().zip(&self.extent).enumerate();
        let seen = whole.with_shape(&self.window.global)?;
        Ok(cuts.try_fold(seen, |part, (dim, (&offset, &length))| part.narrow(dim, offset, length))?)
    }
}

/// What somebody is about to do with a parameter itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Usage {
    /// To update it, or to build an optimizer over it.
    Update,
    /// To take the norm of its gradient, or of several.
    Norm,
    /// To forget its gradient.
    ZeroGrad,
    /// To choose the dtype or the place of its gradients.
    Gradients,
}

/// A wrapper that spreads parameters, or what belongs to them, over ranks: it is asked before others use them
/// ([`Parameter::hand_to`]).
pub trait Holder: Send + Sync {
    /// Why a parameter is not to be used so, and what is to be done instead: the end of a sentence that begins with the parameter's
    /// name. `None` if it may be.
    fn refusal(&self, usage: Usage) -> Option<&'static str>;

    /// Another wrapper has taken one of its parameters in hand.
    fn lost(&self) {}

    /// Whether it wants to hear of each use of a parameter's values ([`Holder::before_use`]).
    fn hears_of_uses(&self) -> bool {
        false
    }

    /// A parameter's values are about to be computed with ([`Parameter::site`]): the last moment to bring them here. What goes
    /// wrong is told by what computes with values that are not here, and by the holder when it is asked next.
    fn before_use(&self, _parameter: &Parameter) {}
}
