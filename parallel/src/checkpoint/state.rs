//! A model and its optimizer as parts, and the way back.
//!
//! Parameters and buffers are called `model.NAME`, an optimizer's tensors `optimizer.NAME.KIND`.

use std::collections::HashMap;

use phalanx_nn::{Optimizer, Parameter, Parameters, Rule};
use phalanx_tensor::{DType, Tensor};

use super::Checkpoint;
use super::open::Wanted;
use crate::Result;
use crate::comm::Comm;
use crate::data_parallel::{DataParallel, Entries};
use crate::part::Part;

/// A model, or a stage of one, and how it is trained.
#[derive(Clone, Copy)]
pub struct Trained<'a> {
    /// The model.
    pub model: &'a dyn Parameters,
    /// What of it this rank keeps.
    pub share: &'a dyn DataParallel,
}

/// What this rank has of models and of the optimizer of all of them, to be saved or read. The tensors are their own.
///
/// # Errors
/// If a step's number cannot be allocated.
pub fn parts<R: Rule>(trained: &[Trained<'_>], optimizer: &Optimizer<R>) -> Result<Vec<Part>> {
    let own = optimizer.state_dict()?;
    Ok([model_parts(trained)?, optimizer_parts(&optimizer.parameters(), &own)].concat())
}

fn model_parts(trained: &[Trained<'_>]) -> Result<Vec<Part>> {
    let mut parts = Vec::new();
    for Trained { model, share } in trained {
        let named = |part: Part| Part { name: format!("model.{}", part.name), ..part };
        parts.extend(share.parts(*model)?.into_iter().map(named));
    }
    Ok(parts)
}

/// `entries`: what [`Optimizer::state_dict`] gives.
fn optimizer_parts(parameters: &[Parameter], entries: &Entries) -> Vec<Part> {
    let by_name: HashMap<&str, &Parameter> = parameters.iter().map(|p| (p.name(), p)).collect();
    let part = |(entry, values): &(String, Tensor)| {
        let name = format!("optimizer.{entry}");
        let parameter = entry.rsplit_once('.').and_then(|(name, _)| by_name.get(name));
        match parameter.filter(|p| p.range().len() == values.numel() && values.rank() > 0) {
            Some(p) => Part { name, values: values.clone(), ..Part::of_parameter(p) },
            None => Part::whole(name, values.clone()),
        }
    };
    entries.iter().map(part).collect()
}

impl Checkpoint {
    /// Puts models and the optimizer of all of them where they were when they were saved, under any layout: bit for bit.
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
        optimizer: &mut Optimizer<R>,
    ) -> Result<()> {
        let entries = optimizer.state_dict()?;
        let parts = [model_parts(trained)?, optimizer_parts(&optimizer.parameters(), &entries)].concat();
        let masters: Vec<String> = parts.iter().filter_map(|part| master_of(&part.name)).collect();
        let names: Vec<&str> =
            parts.iter().map(|part| &part.name).chain(&masters).map(String::as_str).collect();
        let wanted: Vec<Wanted> = parts.iter().map(|part| self.source_of(part, &parts)).collect();
        self.load_wanted(comm, &wanted, &names)?;
        trained.iter().try_for_each(|trained| trained.share.reloaded())?;
        Ok(optimizer.load_state_dict(entries)?)
    }

    /// Where a part's values are to be read, with all their bits.
    fn source_of(&self, part: &Part, parts: &[Part]) -> Wanted {
        let dtype = part.values.dtype();
        let saved_as = |name: &str| self.index.tensors.get(name).map(|stored| stored.dtype);
        let from = |name: String| Wanted { part: Part { name, ..part.clone() }, convert: false };
        let is = |name: &str, dtype: DType| saved_as(name) == Some(dtype);
        if is(&part.name, dtype) {
            return from(part.name.clone());
        }
        if let Some(master) = master_of(&part.name) {
            if is(&master, dtype) {
                return from(master);
            }
            // Rounded to what is computed with, where the master has all bits.
            let kept = parts.iter().any(|p| p.name == master && is(&part.name, p.values.dtype()));
            return Wanted { convert: kept, ..from(part.name.clone()) };
        }
        match model_of(&part.name).filter(|model| saved_as(&part.name).is_none() && is(model, dtype)) {
            Some(model) => from(model),
            None => from(part.name.clone()),
        }
    }
}

/// What the master copy of a parameter is called.
fn master_of(name: &str) -> Option<String> {
    Some(format!("optimizer.{}.master", name.strip_prefix("model.")?))
}

/// What the parameter of a master copy is called.
fn model_of(name: &str) -> Option<String> {
    Some(format!("model.{}", name.strip_prefix("optimizer.")?.strip_suffix(".master")?))
}
