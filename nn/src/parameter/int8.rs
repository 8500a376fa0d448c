//! Frozen parameters whose values are held in 8-bit blocks.

use std::sync::atomic::Ordering;

use phalanx_autograd::{Int8Blocks, Var};
use phalanx_tensor::{Category, Tensor, unpoisoned};

use super::{INT8, OBSERVED, Parameter, TRAINED};
use crate::{Error, Result};

/// Why such a parameter's tensor has no elements.
const HELD: &str = "the values of this parameter are held in 8-bit blocks: `Parameter::values` makes them; a layer that says so was short \
    of memory for them, or Zero has spread them";

impl Parameter {
    /// Holds its values in 8-bit blocks from now on ([`Int8Blocks`]), which takes about a quarter of f32's memory, and freezes it. A layer
    /// that uses it gets the floats of the blocks, which are made for the use and again in backward; no graph keeps them. Its
    /// [tensor](Parameter::tensor) keeps shape, dtype and device, and has no elements. [`Parameter::load`] makes new blocks. It cannot be
    /// trained again.
    ///
    /// # Errors
    /// If it is no matrix, a rank has some columns that do not begin and end at multiples of 64, it has several sites or an owner
    /// ([`Parameter::set_owner`]), a value is not finite, or memory is short. Then nothing is changed.
    pub fn hold_in_int8(&self) -> Result<()> {
        if self.is_in_int8() {
            return Ok(());
        }
        let wrong = |why: String| Err(Error::invalid("hold_in_int8", format!("{}: {why}", self.name())));
        let (held, part) = (self.tensor(), self.part());
        if held.rank() != 2 || self.range().len() != held.numel() {
            return wrong(format!("got a tensor of shape {:?}, wanted a matrix", held.shape()));
        }
        if self.leaves().len() > 1 || self.owner().is_some() {
            return wrong("got a parameter with several sites or an owner, wanted neither".into());
        }
        if let (Some(&all), Some(&from), Some(&count)) =
            (part.window.global.last(), part.window.offset.last(), part.extent.last())
        {
            let is_cut = |at: usize| at != all && !at.is_multiple_of(Int8Blocks::BLOCK);
            if is_cut(from) || is_cut(from + count) {
                let (end, block) = (from + count, Int8Blocks::BLOCK);
                return wrong(format!(
                    "got columns {from}..{end} of {all}, wanted ranks to cut columns at multiples of {block}"
                ));
            }
        }
        self.set_int8(&self.drawn()?)?;
        let empty = Tensor::withheld(held.shape(), held.dtype(), held.device(), HELD)?;
        self.0.sites.iter().try_for_each(|leaf| leaf.set_tensor(empty.clone()))?;
        self.0.flags.fetch_or(INT8, Ordering::Relaxed);
        self.0.flags.fetch_and(!TRAINED, Ordering::Relaxed);
        Ok(())
    }

    /// Whether its values are held in 8-bit blocks.
    pub fn is_in_int8(&self) -> bool {
        self.flags() & INT8 != 0
    }

    /// The blocks that hold its values, if they are held so.
    pub fn int8_blocks(&self) -> Option<Int8Blocks> {
        unpoisoned(self.0.int8.lock()).clone()
    }

    /// Its values: its tensor, or a new one if they are held in 8-bit blocks or [in panels](Parameter::pack).
    ///
    /// # Errors
    /// If memory is short.
    pub fn values(&self) -> Result<Tensor> {
        match self.int8_blocks() {
            Some(blocks) => Ok(blocks.values()?),
            None => match self.packed_var().as_ref().and_then(Var::panels) {
                Some(panels) => Ok(panels.values()?),
                None => Ok(self.tensor()),
            },
        }
    }

    /// The tensors that hold its values: its own, its panels, or the codes and scales of blocks.
    pub fn held_in(&self) -> Vec<Tensor> {
        match self.int8_blocks() {
            Some(blocks) => blocks.tensors().map(Clone::clone).into(),
            None => match self.packed_var().as_ref().and_then(Var::panels) {
                Some(panels) => vec![panels.tensor().clone()],
                None => vec![self.tensor()],
            },
        }
    }

    /// Lets one of the [tensors that hold its values](Parameter::held_in) be another one with the same values, or a stand-in for them.
    ///
    /// # Errors
    /// If shape, dtype or device differ, there is no such tensor, or it is of panels.
    pub fn set_held(&self, number: usize, tensor: Tensor) -> Result<()> {
        let missing = |count: usize| {
            Error::invalid(self.name(), format!("got tensor {number} of {count} that hold it"))
        };
        let mut int8 = unpoisoned(self.0.int8.lock());
        let Some(blocks) = &mut *int8 else {
            drop(int8);
            return if number == 0 { self.set_tensor(tensor) } else { Err(missing(1)) };
        };
        tensor.storage().set_category(Category::Parameters);
        let mut held = blocks.tensors().map(Clone::clone);
        *held.get_mut(number).ok_or_else(|| missing(2))? = tensor;
        *blocks = blocks.with_tensors(held)?;
        Ok(())
    }

    pub(super) fn set_int8(&self, values: &Tensor) -> Result<()> {
        let blocks = Int8Blocks::new(values)?;
        blocks.tensors().iter().for_each(|held| held.storage().set_category(Category::Parameters));
        *unpoisoned(self.0.int8.lock()) = Some(blocks);
        Ok(())
    }

    /// The floats of the blocks, as a constant; `None` if there are none, or memory is short for them. Where an owner observes uses, the
    /// blocks may be freed until backward makes the floats again.
    pub(super) fn int8_var(&self) -> Option<Var> {
        let (blocks, parameter) = (self.int8_blocks()?, self.clone());
        let now = move || parameter.int8_blocks().map_or(Ok(parameter.tensor()), |blocks| blocks.values());
        if self.flags() & OBSERVED == 0 { blocks.var().ok() } else { blocks.var_by(now).ok() }
    }
}
