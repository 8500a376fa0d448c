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
    /// `SEND_F`: sends the stage's output to the next stage's rank.
    SendForward,
    /// `RECV_F`: receives the stage's input from the stage before.
    RecvForward,
    /// `SEND_B`: sends the gradient of the stage's input to the stage before.
    SendBackward,
    /// `RECV_B`: receives the gradient of the stage's output from the next stage.
    RecvBackward,
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

/// Who computes what, in which order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Schedule {
    /// The rank of each stage.
    pub placement: Vec<usize>,
    /// Micro-batches of a step.
    pub micro_batches: usize,
    /// The actions of each rank, in order.
    pub ranks: Vec<Vec<Action>>,
}
