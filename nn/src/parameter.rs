//! [`Parameter`]: a trained tensor.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

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

struct State {
    name: String,
    part: Shard,
    range: Range<usize>,
    rank: usize,
    trained: AtomicBool,
    sites: Vec<Leaf>,
}

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
        let trained = AtomicBool::new(true);
        Ok(Parameter(Arc::new(State { name, part, range, rank, trained, sites })))
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
        let leaf = &self.0.sites[site];
        if self.is_trained() { leaf.var() } else { leaf.constant() }
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
        self.0.trained.load(Ordering::Relaxed)
    }

    /// Records no gradients for it from now on.
    pub fn freeze(&self) {
        self.0.trained.store(false, Ordering::Relaxed);
    }

    /// Undoes [`Parameter::freeze`].
    pub fn unfreeze(&self) {
        self.0.trained.store(true, Ordering::Relaxed);
    }
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
        let grad = self.finish_grad()?;
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
    /// If a gradient buffer cannot be written.
    pub fn zero_grad(&self) -> Result<()> {
        Ok(self.0.sites.iter().try_for_each(Leaf::zero_grad)?)
    }

    /// Keeps gradients in `dtype` from now on, whatever the parameter's.
    ///
    /// # Errors
    /// Never for a dtype of floats; kept for slots that check more.
    pub fn set_grad_dtype(&self, dtype: DType) -> Result<()> {
        if !dtype.is_float() {
            return Err(Error::invalid(self.name(), format!("gradients of dtype {dtype}")));
        }
        Ok(self.0.sites.iter().try_for_each(|leaf| leaf.set_slot(Slot::Owned(Some(dtype))))?)
    }
}

impl std::fmt::Debug for Parameter {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Parameter({} {:?} {})", self.name(), self.tensor().shape(), self.dtype())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn values(t: &Tensor) -> Vec<f32> {
        t.to_vec().unwrap()
    }

    #[test]
    fn site_chains_are_added_in_the_order_of_the_sites() {
        let w = Tensor::from_slice(&[1f32, 2.0], &[2], Device::CPU).unwrap();
        let w = Parameter::new("w", w).unwrap().with_sites(2).unwrap();
        // Used at the second site first.
        let y = w.site(1).mul_scalar(3.0).unwrap().add(&w.site(0).mul_scalar(10.0).unwrap()).unwrap();
        y.sum_all().unwrap().backward().unwrap();
        assert_eq!(values(w.leaves()[0].grad().unwrap().tensor()), [10.0; 2]);
        assert_eq!(values(w.leaves()[1].grad().unwrap().tensor()), [3.0; 2]);
        assert_eq!(values(&w.grad().unwrap().unwrap()), [13.0; 2]);
        assert_eq!(values(w.leaves()[0].grad().unwrap().tensor()), [10.0; 2], "grad() changes nothing");
        assert_eq!(values(&w.finish_grad().unwrap().unwrap()), [13.0; 2]);
        assert!(w.leaves()[1].grad().is_none());
        assert_eq!(values(&w.take_grad().unwrap().unwrap()), [13.0; 2]);
        assert!(w.grad().unwrap().is_none());
    }

    #[test]
    fn all_sites_hold_the_tensor_that_is_set_and_a_frozen_one_records_nothing() {
        let w = Tensor::from_slice(&[1f32, 2.0], &[2], Device::CPU).unwrap();
        let w = Parameter::new("w", w).unwrap().with_sites(2).unwrap();
        w.set_tensor(Tensor::from_slice(&[5f32, 6.0], &[2], Device::CPU).unwrap()).unwrap();
        assert_eq!(values(w.site(1).tensor()), [5.0, 6.0]);
        w.load(&Tensor::from_slice(&[7f64, 8.0], &[2], Device::CPU).unwrap()).unwrap();
        assert_eq!(values(w.site(1).tensor()), [7.0, 8.0]);
        w.freeze();
        assert!(!w.site(0).requires_grad() && !w.is_trained());
        w.unfreeze();
        assert!(w.site(0).requires_grad());
    }

    #[test]
    fn a_piece_knows_its_part_of_the_whole_and_its_range_there() {
        let window = Window { global: Dims::from_slice(&[4, 3]), offset: Dims::from_slice(&[2, 0]) };
        let part = Shard { window, extent: Dims::from_slice(&[2, 3]) };
        let rows = Tensor::from_slice(&[0f32; 6], &[2, 3], Device::CPU).unwrap();
        let w = Parameter::shard("w", rows.clone(), part.clone()).unwrap();
        assert_eq!((w.part(), w.range()), (&part, 0..6));
        let piece = w.piece(rows.with_shape(&[6]).unwrap().narrow(0, 2, 3).unwrap(), 2..5).unwrap();
        assert_eq!((piece.part(), piece.range(), piece.is_matrix()), (&part, 2..5, true));
        assert!(w.piece(rows.with_shape(&[6]).unwrap(), 1..7).is_err());
    }

    #[test]
    fn backward_reads_what_a_frozen_parameter_holds_then() {
        let make = |x: f32| Tensor::from_slice(&[x], &[1], Device::CPU).unwrap();
        let w = Parameter::new("w", make(2.0)).unwrap();
        w.freeze();
        let x = Var::leaf(make(3.0)).unwrap();
        let y = x.mul(&w.var()).unwrap();
        w.set_tensor(make(5.0)).unwrap();
        y.backward().unwrap();
        assert_eq!(values(x.grad().unwrap().tensor()), [5.0]);
        assert!(w.grad().unwrap().is_none());
        let y = x.mul(&w.var()).unwrap();
        w.load(&make(7.0)).unwrap();
        assert!(y.backward().unwrap_err().to_string().contains("mul"), "modified");
    }

    #[test]
    fn gradients_of_a_half_precision_parameter_can_be_kept_in_f32() {
        let w = kernels::full(&[2], 1.0, DType::BF16, Device::CPU).unwrap();
        let w = Parameter::new("w", w).unwrap();
        w.set_grad_dtype(DType::F32).unwrap();
        w.var().sum_all().unwrap().backward().unwrap();
        assert_eq!(values(&w.grad().unwrap().unwrap()), [1.0; 2]);
    }
}
