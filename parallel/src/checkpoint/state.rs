//! A model and its optimizers as the parts of a checkpoint ([`parts`], which [`Saver::save`](super::Saver::save) takes), and the way
//! back ([`Checkpoint::restore`]).
//!
//! Parameters and buffers are called `model.NAME`, optimizers' tensors `optimizer.NAME.KIND`.

use std::collections::HashSet;

use phalanx_nn::{Optimizer, Parameter, Parameters, Rule};
use phalanx_tensor::DType;

use super::Checkpoint;
use super::load::ReadItem;
use crate::comm::Comm;
use crate::data_parallel::{DataParallel, Entries};
use crate::sharded_tensor::ShardedTensor;
use crate::{Error, Result};

/// A model, or a stage of one, and how it is trained.
#[derive(Clone, Copy)]
pub struct Trained<'a> {
    /// The model.
    pub model: &'a dyn Parameters,
    /// Its data-parallel wrapper, which gives the parts that this rank keeps.
    pub wrapper: &'a dyn DataParallel,
    /// Whether frozen parameters are saved and read. Those that are not must have their values by other means.
    pub frozen: bool,
}

impl<'a> Trained<'a> {
    /// All of a model.
    pub fn new(model: &'a dyn Parameters, wrapper: &'a dyn DataParallel) -> Trained<'a> {
        Trained { model, wrapper, frozen: true }
    }

    /// The model without its frozen parameters.
    #[must_use]
    pub fn without_frozen(self) -> Trained<'a> {
        Trained { frozen: false, ..self }
    }

    /// The parts of the model that this rank keeps and that are saved.
    fn parts(&self) -> Result<Vec<ShardedTensor>> {
        let (mut parts, parameters) = (self.wrapper.parts(self.model)?, self.model.parameters());
        if let Some(held) = parameters.iter().find(|p| self.frozen && p.is_in_int8()) {
            return Err(Error::Config(format!(
                "checkpoint: {} is held in 8-bit blocks, which checkpoints do not have; leave frozen parameters out                  (`Trained::without_frozen`, `Trainer::frozen_from`)",
                held.name()
            )));
        }
        if !self.frozen {
            let frozen: HashSet<String> =
                parameters.iter().filter(|p| !p.is_trained()).flat_map(names).collect();
            parts.retain(|part| part.buffer || !frozen.contains(&part.name));
        }
        Ok(parts)
    }
}

/// What parts of a parameter are called: by its name, or where its 8-bit blocks are spread by those of codes and scales.
fn names(parameter: &Parameter) -> Vec<String> {
    let name = parameter.name();
    let kinds = ShardedTensor::INT8_BLOCKS.into_iter().filter(|_| parameter.is_in_int8());
    kinds.map(|kind| format!("{name}.{kind}")).chain([name.to_string()]).collect()
}

/// The parts of models and of their optimizers that this rank has, to be saved or read. The tensors are those of the models
/// and optimizers, not copies.
///
/// # Errors
/// If a step's number cannot be allocated.
pub fn parts<R: Rule>(trained: &[Trained<'_>], optimizers: &[&Optimizer<R>]) -> Result<Vec<ShardedTensor>> {
    let mut parts = model_parts(trained)?;
    for optimizer in optimizers {
        parts.extend(optimizer_parts(&optimizer.parameters(), &optimizer.state_dict()?));
    }
    Ok(parts)
}

fn model_parts(trained: &[Trained<'_>]) -> Result<Vec<ShardedTensor>> {
    let mut parts = Vec::new();
    for trained in trained {
        let named = |part: ShardedTensor| ShardedTensor { name: format!("model.{}", part.name), ..part };
        parts.extend(trained.parts()?.into_iter().map(named));
    }
    Ok(parts)
}

/// `entries`: the optimizer's [`Optimizer::state_dict`].
fn optimizer_parts(parameters: &[Parameter], entries: &Entries) -> Vec<ShardedTensor> {
    let parts = ShardedTensor::of_optimizer_state(parameters, entries).into_iter();
    parts.map(|part| ShardedTensor { name: format!("optimizer.{}", part.name), ..part }).collect()
}

impl Checkpoint {
    /// Puts models and the optimizers that train them where they were when they were saved, under any layout: bit for bit.
    /// All ranks call it.
    ///
    /// Where values are computed with in bf16 and updated in f32, the f32 are the optimizer's master copies in some layouts, and
    /// the parameters' own in others ([`ZeroConfig::shard_dtype`](crate::sharded::ZeroConfig)); both are read from either.
    /// Nothing else is converted; to do that, see [`Checkpoint::read_converted`].
    ///
    /// # Errors
    /// As [`Checkpoint::load`].
    pub fn restore<R: Rule>(
        &self,
        comm: &Comm,
        trained: &[Trained<'_>],
        optimizers: &mut [&mut Optimizer<R>],
    ) -> Result<()> {
        let read = |parts: &[ShardedTensor]| {
            let masters: Vec<String> = parts.iter().filter_map(|part| master_of(&part.name)).collect();
            let names = parts.iter().map(|part| &part.name).chain(&masters).map(String::as_str).collect();
            let saved_as = |name: &str| self.index.tensors.get(name).map(|stored| stored.dtype);
            self.load_wanted(comm, &sources_of(parts, &saved_as), &names).map(Some)
        };
        restore_by(trained, optimizers, read).map(drop)
    }
}

/// Restores models and their optimizers by a function that reads values into their parts; unless it returns `None`.
///
/// # Errors
/// The function's.
pub(super) fn restore_by<R: Rule, T>(
    trained: &[Trained<'_>],
    optimizers: &mut [&mut Optimizer<R>],
    read: impl FnOnce(&[ShardedTensor]) -> Result<Option<T>>,
) -> Result<Option<T>> {
    let (mut parts, mut states) = (model_parts(trained)?, Vec::new());
    for optimizer in optimizers.iter() {
        let entries = optimizer.state_dict()?;
        parts.extend(optimizer_parts(&optimizer.parameters(), &entries));
        states.push(entries);
    }
    let Some(read) = read(&parts)? else { return Ok(None) };
    trained.iter().try_for_each(|trained| trained.wrapper.reloaded())?;
    for (optimizer, entries) in optimizers.iter_mut().zip(states) {
        optimizer.load_state_dict(entries)?;
    }
    Ok(Some(read))
}

/// For each part the saved tensor that has its values with all their bits. `saved_as` gives the dtype of a saved tensor.
pub(super) fn sources_of(parts: &[ShardedTensor], saved_as: &dyn Fn(&str) -> Option<DType>) -> Vec<ReadItem> {
    parts.iter().map(|part| source_of(part, parts, saved_as)).collect()
}

fn source_of(
    part: &ShardedTensor,
    parts: &[ShardedTensor],
    saved_as: &dyn Fn(&str) -> Option<DType>,
) -> ReadItem {
    let dtype = part.values.dtype();
    let from = |name: String| ReadItem::exactly(&ShardedTensor { name, ..part.clone() });
    let is = |name: &str, dtype: DType| saved_as(name) == Some(dtype);
    if is(&part.name, dtype) {
        return ReadItem::exactly(part);
    }
    if let Some(master) = master_of(&part.name) {
        if is(&master, dtype) {
            return from(master);
        }
        // The saved values are rounded to the dtype of the computation; the master copy has all bits.
        let kept = parts.iter().any(|p| p.name == master && is(&part.name, p.values.dtype()));
        return if kept { ReadItem::converted(part) } else { ReadItem::exactly(part) };
    }
    match model_of(&part.name).filter(|model| saved_as(&part.name).is_none() && is(model, dtype)) {
        Some(model) => from(model),
        None => ReadItem::exactly(part),
    }
}

/// The name of a parameter's master copy.
fn master_of(name: &str) -> Option<String> {
    Some(format!("optimizer.{}.master", name.strip_prefix("model.")?))
}

/// The name of a master copy's parameter.
fn model_of(name: &str) -> Option<String> {
    Some(format!("model.{}", name.strip_prefix("optimizer.")?.strip_suffix(".master")?))
}
