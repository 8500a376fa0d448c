//! [`Hands`]: what others may do with the parameters of a model that is wrapped; and whether the model is still what was wrapped.

use std::sync::Weak;

use phalanx_nn::autograd::Var;
use phalanx_nn::{Holder, Parameter, Parameters, Usage};

use super::reducer::Reducer;
use crate::{Error, Result};

/// What is said of gradients that only accumulated.
pub(crate) const LOCAL: &str = "has gradients of this rank alone, which are not added to the other ranks': run the last \
    backward pass of a step without `no_sync`, and call `finish` after a pass of your own";

/// [`Ddp`](super::Ddp)'s.
pub(super) struct Hands(pub(super) Weak<Reducer>);

impl Holder for Hands {
    fn refusal(&self, usage: Usage) -> Option<&'static str> {
        match usage {
            Usage::Update => self.0.upgrade().filter(|reducer| reducer.has_local()).map(|_| LOCAL),
            Usage::Gradients => Some("has its gradients in Ddp's buckets: choose `DdpConfig::grad_dtype`"),
            Usage::Norm | Usage::ZeroGrad => None,
        }
    }

    fn lost(&self) {
        self.0.upgrade().iter().for_each(|reducer| reducer.lose());
    }
}

/// Takes the wrapper's place at its parameters when the wrapper was dropped before its first pass, which is most often a mistake
/// (`let _ = Ddp::new(..)`).
pub(crate) struct Unused;

impl Holder for Unused {
    fn refusal(&self, usage: Usage) -> Option<&'static str> {
        (usage == Usage::Update).then_some(
            "is of a model whose `Ddp` or `Zero` was dropped before its first pass, so that ranks would train apart: bind it to a \
             name (`let _ = ..` drops it), or make it anew",
        )
    }
}

/// Refuses a parameter that is not trained or frozen as it was when `wrapper` was made.
pub(crate) fn check(wrapper: &str, parameter: &Parameter, trained: bool) -> Result<()> {
    let (now, then) = match (parameter.is_trained(), trained) {
        (true, false) => ("trained", "frozen"),
        (false, true) => ("frozen", "trained"),
        _ => return Ok(()),
    };
    let why = format!("is {now} now, and was {then} when `{wrapper}` was made; make it anew");
    Err(phalanx_nn::Error::invalid(parameter.name(), why).into())
}

/// Refuses to go on without the model.
pub(crate) fn check_lost(wrapper: &str, lost: bool) -> Result<()> {
    match lost {
        false => Ok(()),
        true => Err(Error::Config(format!(
            "{wrapper}: another wrapper, made later, has the model now; this one can only be dropped"
        ))),
    }
}

/// Refuses a model whose values are spread by another wrapper.
pub(crate) fn check_values(wrapper: &str, model: &(impl Parameters + ?Sized)) -> Result<()> {
    let parameters = model.parameters();
    let Some(gone) = parameters.iter().find(|p| p.tensor().why_withheld().is_some()) else { return Ok(()) };
    let name = gone.name();
    Err(Error::Config(format!(
        "{wrapper}: {name} has no values here: another `Zero` spreads them; load the model's state dict into a new model"
    )))
}

/// Refuses a model with parameters that a wrapper does not know.
pub(crate) fn check_model(
    wrapper: &str,
    model: &dyn Parameters,
    is_known: impl Fn(&Parameter) -> bool,
) -> Result<()> {
    match model.parameters().iter().find(|p| !is_known(p)) {
        None => Ok(()),
        Some(other) => Err(Error::Config(format!(
            "{wrapper}: {} is not among the parameters that it was made with; make it anew after parameters are added or \
             replaced",
            other.name()
        ))),
    }
}

/// Refuses a loss that depends on a trained parameter which the wrapper does not know: its gradient would not be added over the ranks.
pub(crate) fn check_reached(wrapper: &str, loss: &Var) -> Result<()> {
    match loss.parameter_leaves().iter().find(|leaf| !leaf.is_watched()) {
        None => Ok(()),
        Some(leaf) => Err(Error::Config(format!(
            "{wrapper}: the loss depends on a parameter of shape {:?} that is not among those that it was made with; make it \
             anew after parameters are added or replaced, and freeze what is not to be trained",
            leaf.tensor().shape()
        ))),
    }
}
