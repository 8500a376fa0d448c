//! What others may do with the parameters of a model that is spread, and with this rank's shares of them.

use std::sync::{OnceLock, Weak};

use phalanx_nn::{Holder, Parameter, Usage};

use super::core::Core;
use crate::data_parallel::hands::LOCAL;

/// Those of a group's parameters.
pub(super) struct Hands {
    pub(super) core: OnceLock<Weak<Core>>,
    pub(super) group: usize,
}

impl Holder for Hands {
    fn refusal(&self, usage: Usage) -> Option<&'static str> {
        Some(match usage {
            Usage::Update => "is sharded by Zero: build the optimizer over `zero.parameters()`",
            Usage::Norm => "is sharded by Zero: ask for `zero.grad_norm()` or `zero.clip_grad_norm(..)`",
            Usage::ZeroGrad => "is sharded by Zero: call `zero.zero_grad()`, or the optimizer's",
            Usage::Gradients => "is sharded by Zero: choose `ZeroConfig::grad_dtype`",
        })
    }

    fn lost(&self) {
        self.core.get().and_then(Weak::upgrade).iter().for_each(|core| core.lose());
    }

    fn hears_of_uses(&self) -> bool {
        true
    }

    /// What goes wrong has ended the run of all ranks, and the next call says so; whatever computes with the parameter finds its
    /// values withheld.
    fn before_use(&self, _: &Parameter) {
        if let Some(core) = self.core.get().and_then(Weak::upgrade) {
            let _ = core.used(self.group);
        }
    }
}

/// Those of this rank's shares, which an optimizer updates.
pub(super) struct ShareHands(pub(super) Weak<Core>);

impl Holder for ShareHands {
    fn refusal(&self, usage: Usage) -> Option<&'static str> {
        let Some(core) = self.0.upgrade() else {
            let gone = "is a share of a model whose `Zero` was dropped: build the optimizer over what trains the model now";
            return (usage == Usage::Update).then_some(gone);
        };
        match usage {
            Usage::Update => core.has_local().then_some(LOCAL),
            Usage::Norm => (core.ranks.shard.size() > 1).then_some(
                "is this rank's share alone: ask for `zero.grad_norm()` or `zero.clip_grad_norm(..)`",
            ),
            Usage::Gradients => Some("is this rank's share: choose `ZeroConfig::grad_dtype`"),
            Usage::ZeroGrad => None,
        }
    }
}
