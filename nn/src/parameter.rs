//! [`Parameter`]: a trained tensor.

mod int8;
mod owner;
mod packed;
mod replica_sites;
mod shard;
#[cfg(test)]
mod tests;

use std::ops::Range;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, Mutex};

use phalanx_autograd::{Int8Blocks, Leaf, Slot, Var};
use phalanx_kernels as kernels;
use phalanx_tensor::{Category, DType, Device, Tensor};

use crate::scope::{DEFERRED, Initial};
use crate::{Error, Result};

pub use owner::{ParameterOwner, Usage};
pub use packed::pack_weights;
pub(crate) use replica_sites::in_replica;
pub use shard::Shard;

/// A handle on a trained tensor. Clones share it, an optimizer updates it in place, and a wrapper may release and replace its
/// storage between forward and backward.
///
/// It knows its name in the whole model and, if it is a shard, its place in the whole tensor. A parameter that a
/// model uses at several places, its *sites* (a table tied between embedding and head), keeps one chain of
/// gradients (a sum of contributions in a fixed order) for each, so that the order of additions is the same whether
/// the sites sit on one device or on two: [`Parameter::grad`] adds the chains, site 0 first.
#[derive(Clone)]
pub struct Parameter(Arc<State>);

struct State {
    name: String,
    part: Shard,
    /// The elements of the part that it stores.
    range: Range<usize>,
    /// The dimensions of the tensor before a wrapper cut it into pieces.
    rank: usize,
    /// The bits [`TRAINED`], [`OWNED`], [`OBSERVED`], [`REPLICA_SITES`], [`INT8`], [`MULTIPLIES`], [`PACKED`].
    flags: AtomicU8,
    sites: Vec<Leaf>,
    /// How its values are drawn, if that is deferred.
    initial: Option<Initial>,
    owner: Mutex<Option<Arc<dyn ParameterOwner>>>,
    /// What holds its values instead of its tensor.
    int8: Mutex<Option<Int8Blocks>>,
    packed: Mutex<Option<Var>>,
}

/// Gradients are recorded for it.
const TRAINED: u8 = 1;
/// An owner is set.
const OWNED: u8 = 2;
/// The owner asks to be called before each use.
const OBSERVED: u8 = 4;
/// Each site is for one replica's rows.
const REPLICA_SITES: u8 = 8;
/// The values are in 8-bit blocks.
const INT8: u8 = 16;
/// It is the weight of a linear map.
const MULTIPLIES: u8 = 32;
/// The values lie in panels.
const PACKED: u8 = 64;

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
        Parameter::build(name, tensor, (part, range), 1, rank, None)
    }

    /// The same parameter, whose values are drawn when [`Parameter::materialize`] is called. To be called before it is used.
    pub(crate) fn with_initial(self, initial: Initial) -> Result<Parameter> {
        let (stored, sites) = ((self.0.part.clone(), self.range()), self.0.sites.len());
        Parameter::build(self.0.name.clone(), self.tensor(), stored, sites, self.0.rank, Some(initial))
    }

    /// The same parameter with a row of 0, now or when its values are drawn. To be called before it is used.
    ///
    /// # Errors
    /// If there is no such row, or it cannot be written.
    pub fn with_zero_row(self, row: usize) -> Result<Parameter> {
        if let Some(mut initial) = self.0.initial.filter(|_| self.is_deferred()) {
            initial.zero_row = Some(row);
            return self.with_initial(initial);
        }
        kernels::fill_(&mut self.tensor().narrow(0, row, 1)?, 0.0)?;
        Ok(self)
    }

    /// The same parameter for use at `sites` places. To be called before it is used.
    ///
    /// # Errors
    /// If `sites` is 0.
    pub fn with_sites(self, sites: usize) -> Result<Parameter> {
        if sites == 0 {
            return Err(Error::invalid(self.name(), "a parameter has at least one site, got 0"));
        }
        let stored = (self.0.part.clone(), self.range());
        Parameter::build(self.0.name.clone(), self.tensor(), stored, sites, self.0.rank, self.0.initial)
    }

    /// The shard of this parameter that an optimizer updates on this rank, where a wrapper shards parameters over
    /// ranks: elements `range` of this one's part, in row-major order, stored in `tensor` (one dimension, any
    /// floating-point dtype). It keeps this one's part, its number of sites (one of all [replicas](Parameter::with_replica_sites)) and
    /// whether it is a matrix.
    ///
    /// # Errors
    /// If the range is not inside, or the tensor has another number of elements.
    pub fn piece(&self, tensor: Tensor, range: Range<usize>) -> Result<Parameter> {
        let whole = self.0.part.extent.iter().product();
        if range.end > whole || range.len() != tensor.numel() {
            let why = format!("got {:?} for elements {range:?} of {whole}", tensor.shape());
            return Err(Error::invalid(self.name(), why));
        }
        let (stored, sites) = ((self.0.part.clone(), range), self.0.sites.len());
        let sites = if self.has_replica_sites() { 1 } else { sites };
        Parameter::build(self.0.name.clone(), tensor, stored, sites, self.0.rank, None)
    }

    fn build(
        name: String,
        tensor: Tensor,
        (part, range): (Shard, Range<usize>),
        sites: usize,
        rank: usize,
        initial: Option<Initial>,
    ) -> Result<Parameter> {
        tensor.storage().set_category(Category::Parameters);
        let sites = (0..sites).map(|_| Leaf::new(tensor.clone(), true)).collect::<Result<_, _>>()?;
        let (flags, owner) = (AtomicU8::new(TRAINED), Mutex::default());
        let (int8, packed) = (Mutex::default(), Mutex::default());
        Ok(Parameter(Arc::new(State { name, part, range, rank, flags, sites, initial, owner, int8, packed })))
    }

    /// The name in the whole model, such as `h.0.attn.c_attn.weight`.
    pub fn name(&self) -> &str {
        &self.0.name
    }

    /// Which part of the whole it is.
    pub fn part(&self) -> &Shard {
        &self.0.part
    }

    /// Which elements of the part it stores, in row-major order. They are all, unless it is a [`Parameter::piece`].
    pub fn range(&self) -> Range<usize> {
        self.0.range.clone()
    }

    /// The whole tensor's shape, as its cut sees it.
    pub fn global_shape(&self) -> &[usize] {
        &self.0.part.window.global
    }

    /// The shape of the whole tensor, before ranks split it.
    pub fn whole_shape(&self) -> Vec<usize> {
        self.0.part.whole_shape(self.0.rank)
    }

    /// Whether it has all elements of the whole tensor.
    pub fn is_whole(&self) -> bool {
        self.0.part.is_whole() && self.0.range.len() == self.0.part.extent.iter().product::<usize>()
    }

    /// Whether it has two dimensions or more. Weight decay is commonly applied to these parameters only.
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

    /// The device of the values.
    pub fn device(&self) -> Device {
        self.tensor().device()
    }

    /// The value to compute with, at the first site, or at that of the [replica](Parameter::with_replica_sites) whose rows are computed.
    pub fn var(&self) -> Var {
        self.site(self.current_site())
    }

    /// The value to compute with, at one of the sites; a constant while the parameter is frozen.
    ///
    /// # Panics
    /// If there is no such site. A model's code fixes the number of sites.
    pub fn site(&self, site: usize) -> Var {
        let (leaf, flags) = (&self.0.sites[site], self.flags());
        if flags & OBSERVED != 0
            && let Some(owner) = self.owner()
        {
            owner.before_use(self);
        }
        if flags & INT8 != 0
            && let Some(var) = self.int8_var()
        {
            return var;
        }
        if flags & PACKED != 0
            && let Some(var) = self.packed_var()
        {
            return var;
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

    /// Undoes [`Parameter::freeze`], but of a parameter [in 8-bit blocks](Parameter::hold_in_int8) or [in panels](Parameter::pack), which stays
    /// frozen.
    pub fn unfreeze(&self) {
        if self.flags() & (INT8 | PACKED) == 0 {
            self.0.flags.fetch_or(TRAINED, Ordering::Relaxed);
        }
    }
}

/// Access to the values.
impl Parameter {
    /// Replaces its tensor at every site; see [`Leaf::set_tensor`].
    ///
    /// # Errors
    /// If dtype, device or shape differ.
    pub fn set_tensor(&self, tensor: Tensor) -> Result<()> {
        tensor.storage().set_category(Category::Parameters);
        self.0.sites.iter().try_for_each(|leaf| leaf.set_tensor(tensor.clone()))?;
        if self.is_packed() {
            self.unpack();
        }
        Ok(())
    }

    /// Whether it was made in a [deferred](crate::Scope::deferred) scope and has no values yet.
    pub fn is_deferred(&self) -> bool {
        self.tensor().why_withheld() == Some(DEFERRED)
    }

    /// Draws its initial values if that was [deferred](crate::Scope::deferred), and does nothing otherwise.
    ///
    /// # Errors
    /// If they cannot be allocated.
    pub fn materialize(&self) -> Result<()> {
        if self.is_deferred() && self.0.initial.is_some() {
            self.set_tensor(self.drawn()?)?;
        }
        Ok(())
    }

    /// Its values, or those that it is to get where that is [deferred](crate::Scope::deferred).
    pub(crate) fn drawn(&self) -> Result<Tensor> {
        let held = self.tensor();
        let Some(initial) = self.0.initial.filter(|_| self.is_deferred()) else { return self.values() };
        Ok(initial.values(self.part(), held.dtype(), held.device())?.with_shape(held.shape())?)
    }

    /// Copies values into its tensor, converted to its dtype and moved to its device.
    ///
    /// # Errors
    /// If the shape differs.
    pub fn load(&self, values: &Tensor) -> Result<()> {
        let mut held = self.tensor();
        let values = kernels::cast(&values.to_device(held.device(), false)?, held.dtype())?;
        if self.is_in_int8() {
            check_shape(self.name(), &values, held.shape())?;
            return self.set_int8(&values);
        }
        if self.is_packed() {
            check_shape(self.name(), &values, held.shape())?;
            return self.set_packed(&values).map(drop);
        }
        if self.is_deferred() || held.arrived("load").is_err() {
            return self.set_tensor(values.copy()?);
        }
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

    /// Adds the sites' chains into the first, which then is the gradient, and returns it. Call it at the end of a step: gradients
    /// that are accumulated afterwards are added in another order.
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

    /// Removes the gradient and returns it.
    ///
    /// # Errors
    /// As [`Parameter::finish_grad`].
    pub fn take_grad(&self) -> Result<Option<Tensor>> {
        let mut grad = self.finish_grad()?;
        if let Slot::Into(_) = self.0.sites[0].slot() {
            // The leaf keeps its buffer, which is zeroed below.
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

    /// Removes the gradients of all sites.
    ///
    /// # Errors
    /// If a gradient buffer cannot be written, or the owner has the gradient ([`Parameter::set_owner`]).
    pub fn zero_grad(&self) -> Result<()> {
        self.check_usage("zero_grad", Usage::ZeroGrad)?;
        Ok(self.0.sites.iter().try_for_each(Leaf::zero_grad)?)
    }

    /// Keeps gradients in `dtype` from now on, whatever the parameter's dtype is.
    ///
    /// # Errors
    /// If it is no dtype of floats, or the owner keeps the gradients ([`Parameter::set_owner`]).
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

fn check_shape(name: &str, values: &Tensor, wanted: &[usize]) -> Result<()> {
    if values.shape() != wanted {
        return Err(Error::invalid(
            name,
            format!("got values of shape {:?}, wanted {wanted:?}", values.shape()),
        ));
    }
    Ok(())
}

impl std::fmt::Debug for Parameter {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Parameter({} {:?} {})", self.name(), self.tensor().shape(), self.dtype())
    }
}
