//! Which modules of a model are [units](WrappedUnit): [`WrapPolicy`] wraps the layers of a [`Sequential`]; [`wrap_by`] and
//! [`wrap_by_size`] switch the units that any model has on and off, and [`Wrapping`] those of a decoder.

use std::any::Any;
use std::sync::Arc;

use crate::{AnyUnit, Module, Parameters, Sequential, WrappedUnit};

/// Decides whether a layer becomes a unit.
type Predicate = Box<dyn Fn(&dyn Module) -> bool + Send + Sync>;

/// Which layers [`Sequential::into_units`] wraps as [units](WrappedUnit), as FSDP's `auto_wrap_policy` does. Layers without parameters are never
/// wrapped. A layer that is a unit already, or contains one, is not wrapped again. Other layers belong to no unit.
#[non_exhaustive]
pub enum WrapPolicy {
    /// Every layer. Of a nested `Sequential`, each of its layers.
    EachLayer,
    /// Every layer with at least this many elements. The layers of a nested `Sequential` are wrapped one by one; if those that are too
    /// small have enough elements together, it becomes a unit around the others (torch: `size_based_auto_wrap_policy`). The outermost
    /// `Sequential` is never wrapped; its small layers are gathered with what is in no unit.
    BySize(usize),
    /// Every layer for which this returns true. If it returns false for a nested `Sequential`, it is asked about its layers.
    By(Predicate),
}

impl WrapPolicy {
    /// Every layer for which `choose` returns true; see [`WrapPolicy::By`].
    pub fn by(choose: impl Fn(&dyn Module) -> bool + Send + Sync + 'static) -> WrapPolicy {
        WrapPolicy::By(Box::new(choose))
    }

    /// Every layer of this type, such as a transformer's block.
    pub fn of_type<M: Module>() -> WrapPolicy {
        WrapPolicy::by(|module| (module as &dyn Any).is::<M>())
    }

    /// The layer, or the layers in it, as units.
    pub(crate) fn wrap(&self, module: Box<dyn Module>) -> Box<dyn Module> {
        let module = unboxed(module);
        if module.parameters().is_empty() || has_units(&*module) {
            return module;
        }
        let nested = (&*module as &dyn Any).is::<Sequential>();
        match self {
            WrapPolicy::By(choose) if choose(&*module) => unit(module),
            WrapPolicy::EachLayer if !nested => unit(module),
            WrapPolicy::BySize(least) => if_large(self.inside(module), *least),
            WrapPolicy::EachLayer | WrapPolicy::By(_) => self.inside(module),
        }
    }

    /// Wraps the layers of a `Sequential`; returns another module unchanged.
    fn inside(&self, module: Box<dyn Module>) -> Box<dyn Module> {
        match downcast::<Sequential>(module) {
            Ok(layers) => Box::new(layers.into_units(self)),
            Err(other) => other,
        }
    }
}

fn unit(module: Box<dyn Module>) -> Box<dyn Module> {
    Box::new(WrappedUnit::<dyn Module>::new(Arc::from(module)))
}

fn if_large(module: Box<dyn Module>, least: usize) -> Box<dyn Module> {
    let elements = outside_units(&*module, &mut |_, _| {});
    if elements > 0 && elements >= least { unit(module) } else { module }
}

fn has_units(module: &dyn Module) -> bool {
    let mut any = false;
    each_unit(module, &mut |unit, _| any |= unit.is_wrapped());
    any
}

/// The module without the boxes around it, so that its type can be compared.
fn unboxed(module: Box<dyn Module>) -> Box<dyn Module> {
    match downcast::<Box<dyn Module>>(module) {
        Ok(inner) => unboxed(*inner),
        Err(plain) => plain,
    }
}

/// The module as one of this type, or as it was.
fn downcast<M: Module>(module: Box<dyn Module>) -> Result<Box<M>, Box<dyn Module>> {
    if !(&*module as &dyn Any).is::<M>() {
        return Err(module);
    }
    Ok((module as Box<dyn Any>).downcast::<M>().unwrap_or_else(|_| unreachable!("its type was looked at")))
}

/// Makes those [`WrappedUnit`]s of a model units for which `choose` returns true, and plain modules of the others. Each is asked about
/// before those inside it.
///
/// ```
/// use std::any::TypeId;
/// use phalanx_nn::models::{Block, GptConfig};
/// use phalanx_nn::tensor::{DType, Device};
/// use phalanx_nn::{Linear, Scope, wrap_by};
/// let model = GptConfig::new(50, 8, 2, 2, 16).init(&Scope::new(1, DType::F32, Device::CPU))?;
/// let mut units = 0;
/// wrap_by(&model, |unit| {
///     let chosen = [TypeId::of::<dyn Block>(), TypeId::of::<Linear>()].contains(&unit.module_type());
///     units += usize::from(chosen);
///     chosen
/// });
/// assert_eq!(units, 2 + 2 * 4); // the blocks, and four maps of each
/// # Ok::<(), phalanx_nn::Error>(())
/// ```
pub fn wrap_by(model: &(impl Parameters + ?Sized), mut choose: impl FnMut(&dyn AnyUnit) -> bool) {
    each_unit(model, &mut |unit, _| unit.set_wrapped(choose(unit)));
}

/// Makes those [`WrappedUnit`]s of a model units that have at least this many elements beside the units inside them, and plain modules
/// of the others (torch: `size_based_auto_wrap_policy`). What is in no unit is gathered as one, the root.
pub fn wrap_by_size(model: &(impl Parameters + ?Sized), least: usize) {
    outside_units(model, &mut |unit, elements| unit.set_wrapped(elements > 0 && elements >= least));
}

/// Visits all units of a model, switched on or off, each before those inside it, with the number of those around it.
fn each_unit(model: &(impl Parameters + ?Sized), visitor: &mut dyn FnMut(&dyn AnyUnit, usize)) {
    model.visit_units(&mut |unit| each_inside(unit, 0, visitor));
}

fn each_inside(unit: &dyn AnyUnit, around: usize, visitor: &mut dyn FnMut(&dyn AnyUnit, usize)) {
    visitor(unit, around);
    unit.visit_inner_units(&mut |inner| each_inside(inner, around + 1, visitor));
}

/// The elements of a model that are in no unit. Calls `decide` with every unit, after those inside it, and its elements that are in none
/// of these.
fn outside_units(model: &(impl Parameters + ?Sized), decide: &mut dyn FnMut(&dyn AnyUnit, usize)) -> usize {
    let mut in_units = 0;
    model.visit_units(&mut |unit| in_units += elements(unit) - outside_unit(unit, decide));
    elements(model).saturating_sub(in_units)
}

/// The elements of a unit that are in no unit, which are none once it is one.
fn outside_unit(unit: &dyn AnyUnit, decide: &mut dyn FnMut(&dyn AnyUnit, usize)) -> usize {
    let mut in_units = 0;
    unit.visit_inner_units(&mut |inner| in_units += elements(inner) - outside_unit(inner, decide));
    let own = elements(unit).saturating_sub(in_units);
    decide(unit, own);
    if unit.is_wrapped() { 0 } else { own }
}

fn elements(model: &(impl Parameters + ?Sized)) -> usize {
    model.parameters().iter().map(|p| p.tensor().numel()).sum()
}

/// How finely the blocks of a [`Decoder`](crate::models::Decoder) are wrapped. The norms of a block stay in the block's own unit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Wrapping {
    /// Each block is a unit.
    #[default]
    Blocks,
    /// Each block's attention and MLP are units inside it.
    Halves,
    /// The linear maps are units inside it: those of queries, keys and values together, and the two of a gated MLP.
    Maps,
}

impl Wrapping {
    /// Switches the units inside a block on and off: those of one depth are on.
    pub(crate) fn apply(self, block: &dyn AnyUnit) {
        let depth = match self {
            Wrapping::Blocks => 0,
            Wrapping::Halves => 1,
            Wrapping::Maps => 2,
        };
        each_inside(block, 0, &mut |unit, around| unit.set_wrapped(around == 0 || around == depth));
    }
}

#[cfg(test)]
mod tests {
    use phalanx_tensor::{DType, Device};

    use super::*;
    use crate::models::{GptConfig, LlamaConfig, ModelConfig};
    use crate::{LinearConfig, Scope, SequentialConfig};

    /// The name of each unit's first parameter, how many units are around it, and its elements that are in no unit inside it.
    fn units(model: &dyn Parameters) -> Vec<(String, usize, usize)> {
        let mut found = Vec::new();
        each_unit(model, &mut |unit, around| {
            let mut inside = 0;
            unit.visit_inner_units(&mut |inner| inside += elements(inner));
            found.push((unit.parameters()[0].name().to_string(), around, elements(unit) - inside));
        });
        found
    }

    fn scope() -> Scope {
        Scope::new(1, DType::F32, Device::CPU)
    }

    #[test]
    fn small_layers_that_are_large_together_are_a_unit_around_the_large_ones() {
        let map = |outputs| LinearConfig::new(1, outputs);
        let inner = || SequentialConfig::new().with(map(20)).with(map(7)).with(map(8));
        let units_of = |least| {
            let model = SequentialConfig::new().with(map(5)).with(inner()).init(&scope()).unwrap();
            units(&model.into_units(&WrapPolicy::BySize(least)))
        };
        let large = ("1.0.weight".to_string(), 1, 40);
        assert_eq!(units_of(30), [("1.0.weight".into(), 0, 30), large]);
        assert_eq!(units_of(31), [("1.0.weight".into(), 0, 40)]);
        assert_eq!(units_of(41), [("1.0.weight".into(), 0, 70)]);
        assert_eq!(units_of(71), []);
    }

    #[test]
    fn blocks_are_wrapped_whole_in_halves_or_in_maps() {
        let gpt = ModelConfig::Gpt(GptConfig::new(9, 4, 1, 2, 8));
        let llama = ModelConfig::Llama(LlamaConfig::new(9, 4, 1, 2, 8));
        let inside = |config: &ModelConfig, wrapping| {
            let mut model = config.init(&scope()).unwrap();
            model.set_wrapping(wrapping);
            let mut found = Vec::new();
            each_unit(&model, &mut |unit, around| {
                if unit.is_wrapped() && around > 0 {
                    let name = unit.parameters()[0].name().to_string();
                    found.push(name.rsplit('.').nth(1).unwrap().to_string());
                }
            });
            found
        };
        assert!(inside(&gpt, Wrapping::Blocks).is_empty() && inside(&llama, Wrapping::Blocks).is_empty());
        assert_eq!(inside(&gpt, Wrapping::Halves), ["c_attn", "c_fc"]);
        assert_eq!(inside(&gpt, Wrapping::Maps), ["c_attn", "c_proj", "c_fc", "c_proj"]);
        assert_eq!(inside(&llama, Wrapping::Halves), ["q_proj", "gate_proj"]);
        assert_eq!(inside(&llama, Wrapping::Maps), ["q_proj", "o_proj", "gate_proj", "down_proj"]);
    }
}
