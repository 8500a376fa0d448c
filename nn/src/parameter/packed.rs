//! Frozen weights that lie in panels, as the products of a CPU read them.

use std::sync::atomic::Ordering;

use phalanx_autograd::Var;
use phalanx_kernels::WeightPanels;
use phalanx_tensor::{Category, Tensor, unpoisoned};

use super::{MULTIPLIES, PACKED, Parameter, TRAINED};
use crate::Result;

/// Why such a parameter's tensor has no elements.
const HELD: &str = "the values of this parameter lie in panels: `Parameter::values` makes them";

/// Lays the weights of linear maps in panels and freezes them, for a model that is only used from now on, as in generation: [`Parameter::pack`] of each.
/// No result changes by a bit, and there is no second copy.
///
/// # Errors
/// If memory is short.
pub fn pack_weights(parameters: &[Parameter]) -> Result<()> {
    parameters.iter().try_for_each(|parameter| parameter.pack().map(drop))?;
    // Where the weights lay before would wait for tensors of that size.
    Ok(parameters.first().map_or(Ok(()), |parameter| parameter.device().trim())?)
}

impl Parameter {
    /// Says that it is the weight of a linear map, used through [`Parameter::var`] by [`Var::linear`] and [`Var::embedding`] alone, so that it may
    /// be [packed](Parameter::pack).
    #[must_use]
    pub fn as_weight(self) -> Parameter {
        self.0.flags.fetch_or(MULTIPLIES, Ordering::Relaxed);
        self
    }

    /// Lays its values in panels from now on ([`WeightPanels`]) and freezes it, if it is [the weight of a linear map](Parameter::as_weight) whose
    /// products are faster so; otherwise, and if it has an owner ([`Parameter::set_owner`]), nothing is changed. Returns whether it lies in panels.
    /// Its [tensor](Parameter::tensor) keeps shape, dtype and device, and has no elements. [`Parameter::load`] makes new panels,
    /// [`Parameter::set_tensor`] ends it.
    ///
    /// # Errors
    /// If memory is short. Then nothing is changed.
    pub fn pack(&self) -> Result<bool> {
        if self.is_packed() {
            return Ok(true);
        }
        let held = self.tensor();
        let is_here =
            held.why_withheld().is_none() && self.range().len() == held.numel() && self.owner().is_none();
        if self.flags() & MULTIPLIES == 0 || held.rank() != 2 || !is_here || !self.set_packed(&held)? {
            return Ok(false);
        }
        let empty = Tensor::withheld(held.shape(), held.dtype(), held.device(), HELD)?;
        // In this order, as another thread may use it meanwhile.
        self.0.flags.fetch_or(PACKED, Ordering::Relaxed);
        self.0.flags.fetch_and(!TRAINED, Ordering::Relaxed);
        self.0.sites.iter().try_for_each(|leaf| leaf.set_tensor(empty.clone()))?;
        Ok(true)
    }

    /// Whether its values lie in panels.
    pub fn is_packed(&self) -> bool {
        self.flags() & PACKED != 0
    }

    /// Forgets the panels, if there are any.
    pub(super) fn unpack(&self) {
        self.0.flags.fetch_and(!PACKED, Ordering::Relaxed);
        *unpoisoned(self.0.packed.lock()) = None;
    }

    /// Makes panels of these values; returns whether products are faster so.
    pub(super) fn set_packed(&self, values: &Tensor) -> Result<bool> {
        let Some(panels) = WeightPanels::new(values)? else { return Ok(false) };
        panels.tensor().storage().set_category(Category::Parameters);
        *unpoisoned(self.0.packed.lock()) = Some(Var::packed(panels)?);
        Ok(true)
    }

    /// The packed constant.
    pub(super) fn packed_var(&self) -> Option<Var> {
        unpoisoned(self.0.packed.lock()).clone()
    }
}
