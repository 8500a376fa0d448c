//! [`Holder`]: what a wrapper has to say about the parameters that it has taken in hand.

use crate::Parameter;

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
