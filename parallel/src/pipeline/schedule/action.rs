//! [`Schedule`]: for each rank a list of [`Action`]s.

/// What is done with a micro-batch at a stage.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Kind {
    /// `F`: the forward pass.
    Forward,
    /// `B`: the whole backward pass, of inputs and weights.
    Backward,
    /// `I`: the backward pass of the inputs only.
    Input,
    /// `W`: the backward pass of the weights, some time after [`Kind::Input`].
    Weight,
    /// `U`: the update of the stage's weights by the gradients so far, the last being this micro-batch's. Only in schedules
    /// without flushes ([`Asynchronous`](super::Asynchronous)); elsewhere the optimizer's step follows the whole schedule.
    Update,
    /// `SEND_F`: sends the stage's output to the next stage's rank.
    SendForward,
    /// `RECV_F`: receives the stage's input from the stage before.
    RecvForward,
    /// `SEND_B`: sends the gradient of the stage's input to the stage before.
    SendBackward,
    /// `RECV_B`: receives the gradient of the stage's output from the next stage.
    RecvBackward,
}

impl Kind {
    /// Every kind.
    pub const ALL: [Kind; 9] = [
        Kind::Forward,
        Kind::Backward,
        Kind::Input,
        Kind::Weight,
        Kind::Update,
        Kind::SendForward,
        Kind::RecvForward,
        Kind::SendBackward,
        Kind::RecvBackward,
    ];

    /// Whether it moves data between ranks.
    pub fn is_transfer(self) -> bool {
        use Kind::{RecvBackward, RecvForward, SendBackward, SendForward};
        matches!(self, SendForward | RecvForward | SendBackward | RecvBackward)
    }
}

/// One thing that a rank does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Action {
    /// The stage, counted over the whole model: 0 has the first layers. A rank may have several.
    pub stage: usize,
    /// What is done.
    pub kind: Kind,
    /// The micro-batch, from 0.
    pub micro_batch: usize,
}

impl Action {
    /// `kind` of `micro_batch` at `stage`.
    pub fn new(stage: usize, kind: Kind, micro_batch: usize) -> Action {
        Action { stage, kind, micro_batch }
    }

    /// The same micro-batch at the same stage, but another kind.
    pub fn with(self, kind: Kind) -> Action {
        Action { kind, ..self }
    }
}

/// Who computes what, in which order.
///
/// Sends are started and not waited for; a receive is waited for before what needs it. A stage adds its weights' gradients
/// in the order of its `B`s and `W`s, which is ascending, so sums do not depend on the schedule.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Schedule {
    /// The rank of each stage.
    pub placement: Vec<usize>,
    /// Micro-batches of a step.
    pub micro_batches: usize,
    /// The actions of each rank, in order.
    pub ranks: Vec<Vec<Action>>,
}

impl Schedule {
    /// The number of stages.
    pub fn stages(&self) -> usize {
        self.placement.len()
    }

    /// The stages of a rank, ascending.
    pub fn stages_of(&self, rank: usize) -> impl Iterator<Item = usize> + '_ {
        self.placement.iter().enumerate().filter(move |&(_, &r)| r == rank).map(|(stage, _)| stage)
    }

    /// What a computation needs from the stage beside it, and what a receive brings: the output of the stage before for
    /// [`Kind::Forward`], the gradient of the next for [`Kind::Backward`] and [`Kind::Input`]. Nothing at the ends.
    pub fn input(&self, action: Action) -> Option<Transfer> {
        let from = match action.kind {
            Kind::Forward | Kind::RecvForward => action.stage.checked_sub(1)?,
            Kind::Backward | Kind::Input | Kind::RecvBackward => action.stage + 1,
            _ => return None,
        };
        let transfer = Transfer { from, to: action.stage, micro_batch: action.micro_batch };
        (from < self.stages()).then_some(transfer)
    }

    /// What a computation gives to the stage beside it, and what a send takes there. Nothing at the ends.
    pub fn output(&self, action: Action) -> Option<Transfer> {
        let to = match action.kind {
            Kind::Forward | Kind::SendForward => action.stage + 1,
            Kind::Backward | Kind::Input | Kind::SendBackward => action.stage.checked_sub(1)?,
            _ => return None,
        };
        let transfer = Transfer { from: action.stage, to, micro_batch: action.micro_batch };
        (to < self.stages()).then_some(transfer)
    }

    /// What a send or a receive moves. Nothing of a computation, or towards a stage that there is not.
    pub fn transfer(&self, action: Action) -> Option<Transfer> {
        match action.kind {
            Kind::SendForward | Kind::SendBackward => self.output(action),
            Kind::RecvForward | Kind::RecvBackward => self.input(action),
            _ => None,
        }
    }

    /// Whether weights are updated while it runs: see [`Asynchronous`](super::Asynchronous).
    pub fn has_updates(&self) -> bool {
        self.ranks.iter().flatten().any(|action| action.kind == Kind::Update)
    }

    /// Whether there is any send or receive: see [`with_transfers`](super::with_transfers).
    pub fn has_transfers(&self) -> bool {
        self.ranks.iter().flatten().any(|action| action.kind.is_transfer())
    }

    /// Whether a transfer is between two ranks. If not, there is nothing to send.
    pub fn travels(&self, transfer: Transfer) -> bool {
        self.placement.get(transfer.from) != self.placement.get(transfer.to)
    }
}

/// What goes from a stage to the one beside it: an output to the next, or a gradient to the one before.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Transfer {
    /// The stage that has it.
    pub from: usize,
    /// The stage that needs it.
    pub to: usize,
    /// The micro-batch.
    pub micro_batch: usize,
}

impl Transfer {
    /// The action of the sender.
    pub fn send(self) -> Action {
        let kind = if self.from < self.to { Kind::SendForward } else { Kind::SendBackward };
        Action::new(self.from, kind, self.micro_batch)
    }

    /// The action of the receiver.
    pub fn receive(self) -> Action {
        let kind = if self.from < self.to { Kind::RecvForward } else { Kind::RecvBackward };
        Action::new(self.to, kind, self.micro_batch)
    }
}
