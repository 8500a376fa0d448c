//! [`Schedule`]: for each rank a list of [`Action`]s.
//!
//! As text a schedule has a line for each rank, with its actions in order; `2F3` is the forward pass of micro-batch 3 at stage 2.
//!
//! ```text
//! 0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1
//! 1RECV_F0 1F0 1B0 1RECV_F1 1SEND_B0 1F1 1B1 1SEND_B1
//! ```

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::ops::Range;
use std::str::FromStr;

use super::{Error, Result};

/// The kind of an action: a pass, an update or a transfer of a micro-batch at a stage.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ActionKind {
    /// `F`: the forward pass.
    Forward,
    /// `B`: the whole backward pass, of inputs and weights.
    Backward,
    /// `I`: the backward pass of the inputs only.
    Input,
    /// `W`: the backward pass of the weights, some time after [`ActionKind::Input`].
    Weight,
    /// `U`: the update of the stage's weights by the gradients up to this micro-batch's, on every replica of the stage. Only in schedules without flushes
    /// ([`Asynchronous`](super::Asynchronous)); in all others the optimizer's step follows the whole schedule.
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

impl ActionKind {
    /// Every kind.
    pub const ALL: [ActionKind; 9] = [
        ActionKind::Forward,
        ActionKind::Backward,
        ActionKind::Input,
        ActionKind::Weight,
        ActionKind::Update,
        ActionKind::SendForward,
        ActionKind::RecvForward,
        ActionKind::SendBackward,
        ActionKind::RecvBackward,
    ];

    /// Its name in timelines.
    pub const fn name(self) -> &'static str {
        match self {
            ActionKind::Forward => "forward",
            ActionKind::Backward => "backward",
            ActionKind::Input => "backward of inputs",
            ActionKind::Weight => "backward of weights",
            ActionKind::Update => "update",
            ActionKind::SendForward => "send output",
            ActionKind::RecvForward => "receive input",
            ActionKind::SendBackward => "send gradient",
            ActionKind::RecvBackward => "receive gradient",
        }
    }

    /// Whether it adds gradients of weights.
    pub(crate) fn adds(self) -> bool {
        matches!(self, ActionKind::Backward | ActionKind::Weight)
    }

    /// Whether it moves data between ranks.
    pub fn is_transfer(self) -> bool {
        use ActionKind::{RecvBackward, RecvForward, SendBackward, SendForward};
        matches!(self, SendForward | RecvForward | SendBackward | RecvBackward)
    }
}

/// One entry of a rank's list.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Action {
    /// The stage, numbered over the whole model: stage 0 has the first layers. A rank may have several stages.
    pub stage: usize,
    /// The kind of action.
    pub kind: ActionKind,
    /// The micro-batch, from 0.
    pub micro_batch: usize,
}

impl Action {
    /// `kind` of `micro_batch` at `stage`.
    pub fn new(stage: usize, kind: ActionKind, micro_batch: usize) -> Action {
        Action { stage, kind, micro_batch }
    }

    /// The action of another kind for the same micro-batch at the same stage.
    pub fn with(self, kind: ActionKind) -> Action {
        Action { kind, ..self }
    }
}

/// Which rank computes what, in which order.
///
/// Sends are asynchronous; a receive blocks. A stage adds its weights' gradients in the order of its `B`s and `W`s, which is
/// ascending, so sums do not depend on the schedule.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Schedule {
    /// The rank of each stage; of a stage with replicas, the rank of the first.
    pub placement: Vec<usize>,
    /// The number of replicas of each stage, on as many ranks in a row. They take micro-batches in turn: micro-batch `m` is
    /// computed by replica `m % replicas`. A stage beyond the end of this list has one.
    pub replicas: Vec<usize>,
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
        (0..self.stages()).filter(move |&stage| self.ranks_of(stage).contains(&rank))
    }

    /// The ranks of a stage's replicas. Empty if there is no such stage.
    pub fn ranks_of(&self, stage: usize) -> Range<usize> {
        let replicas = self.replicas.get(stage).copied().unwrap_or(1);
        self.placement.get(stage).map_or(0..0, |&first| first..first + replicas)
    }

    /// The rank that computes a micro-batch at a stage. `None` if there is no such stage.
    pub fn rank_of(&self, stage: usize, micro_batch: usize) -> Option<usize> {
        let ranks = self.ranks_of(stage);
        (!ranks.is_empty()).then(|| ranks.start + micro_batch % ranks.len())
    }

    /// Whether a rank has the action: the rank of its micro-batch, or, of an update, every rank of the stage.
    pub(crate) fn has(&self, rank: usize, action: Action) -> bool {
        match action.kind {
            ActionKind::Update => self.ranks_of(action.stage).contains(&rank),
            _ => self.rank_of(action.stage, action.micro_batch) == Some(rank),
        }
    }

    /// The micro-batch whose gradients must have been added before an action at a stage with replicas: of an action that adds
    /// gradients, the micro-batch before; of an update, its own.
    pub(crate) fn sum_before(&self, Action { stage, micro_batch, kind }: Action) -> Option<usize> {
        let before = match kind {
            ActionKind::Update => Some(micro_batch),
            kind if kind.adds() => micro_batch.checked_sub(1),
            _ => None,
        };
        before.filter(|_| self.ranks_of(stage).len() > 1)
    }

    /// The transfer that a computation needs, or that a receive receives: the output of the stage before for
    /// [`ActionKind::Forward`], the gradient of the next stage for [`ActionKind::Backward`] and [`ActionKind::Input`]. `None` if there is no such
    /// stage.
    pub fn input(&self, action: Action) -> Option<Transfer> {
        let from = match action.kind {
            ActionKind::Forward | ActionKind::RecvForward => action.stage.checked_sub(1)?,
            ActionKind::Backward | ActionKind::Input | ActionKind::RecvBackward => action.stage + 1,
            _ => return None,
        };
        let transfer = Transfer { from, to: action.stage, micro_batch: action.micro_batch };
        (from < self.stages()).then_some(transfer)
    }

    /// The transfer that a computation makes possible, or that a send sends. `None` if there is no stage to receive it.
    pub fn output(&self, action: Action) -> Option<Transfer> {
        let to = match action.kind {
            ActionKind::Forward | ActionKind::SendForward => action.stage + 1,
            ActionKind::Backward | ActionKind::Input | ActionKind::SendBackward => {
                action.stage.checked_sub(1)?
            }
            _ => return None,
        };
        let transfer = Transfer { from: action.stage, to, micro_batch: action.micro_batch };
        (to < self.stages()).then_some(transfer)
    }

    /// The transfer of a send or a receive. `None` for computations, and if there is no such stage.
    pub fn transfer(&self, action: Action) -> Option<Transfer> {
        match action.kind {
            ActionKind::SendForward | ActionKind::SendBackward => self.output(action),
            ActionKind::RecvForward | ActionKind::RecvBackward => self.input(action),
            _ => None,
        }
    }

    /// Whether it has updates, which change the weights while it runs: see [`Asynchronous`](super::Asynchronous).
    pub fn has_updates(&self) -> bool {
        self.ranks.iter().flatten().any(|action| action.kind == ActionKind::Update)
    }

    /// Whether it has sends and receives: see [`with_transfers`](super::with_transfers).
    pub fn has_transfers(&self) -> bool {
        self.ranks.iter().flatten().any(|action| action.kind.is_transfer())
    }

    /// Whether a transfer is between two ranks. Otherwise the rank keeps the tensor.
    pub fn travels(&self, transfer: Transfer) -> bool {
        let rank = |stage| self.rank_of(stage, transfer.micro_batch);
        rank(transfer.from) != rank(transfer.to)
    }
}

/// A tensor that goes from a stage to a neighbour: an output to the next stage, or a gradient to the stage before.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Transfer {
    /// The stage that computes it.
    pub from: usize,
    /// The stage that needs it.
    pub to: usize,
    /// The micro-batch.
    pub micro_batch: usize,
}

impl Transfer {
    /// The action of the sender.
    pub fn send(self) -> Action {
        let kind = if self.from < self.to { ActionKind::SendForward } else { ActionKind::SendBackward };
        Action::new(self.from, kind, self.micro_batch)
    }

    /// The action of the receiver.
    pub fn receive(self) -> Action {
        let kind = if self.from < self.to { ActionKind::RecvForward } else { ActionKind::RecvBackward };
        Action::new(self.to, kind, self.micro_batch)
    }
}

impl fmt::Display for ActionKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            ActionKind::Forward => "F",
            ActionKind::Backward => "B",
            ActionKind::Input => "I",
            ActionKind::Weight => "W",
            ActionKind::Update => "U",
            ActionKind::SendForward => "SEND_F",
            ActionKind::RecvForward => "RECV_F",
            ActionKind::SendBackward => "SEND_B",
            ActionKind::RecvBackward => "RECV_B",
        })
    }
}

impl fmt::Display for Action {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{}{}", self.stage, self.kind, self.micro_batch)
    }
}

impl fmt::Display for Schedule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for actions in &self.ranks {
            let tokens: Vec<String> = actions.iter().map(Action::to_string).collect();
            writeln!(f, "{}", tokens.join(" "))?;
        }
        Ok(())
    }
}

impl FromStr for Schedule {
    type Err = Error;

    /// Reads the text that `to_string` writes. Actions are separated by blanks or commas. A stage belongs to the rank of the line
    /// that has its actions, or has a replica on each line that has some.
    fn from_str(text: &str) -> Result<Schedule> {
        let wrong = |rank, token: &str, wanted| Error::Parse { line: rank + 1, token: token.into(), wanted };
        let mut ranks = Vec::new();
        let mut lines: BTreeMap<usize, BTreeSet<usize>> = BTreeMap::new();
        for (rank, line) in text.lines().enumerate() {
            let tokens = line.split([' ', '\t', ',']).filter(|token| !token.is_empty());
            let parsed = tokens.map(|token| parse_action(token).map_err(|wanted| wrong(rank, token, wanted)));
            let actions: Vec<Action> = parsed.collect::<Result<_>>()?;
            for action in &actions {
                lines.entry(action.stage).or_default().insert(rank);
            }
            ranks.push(actions);
        }
        let first = |lines: &BTreeSet<usize>| lines.first().copied().unwrap_or_default();
        let placement: Vec<usize> = lines.values().map(first).collect();
        let mut replicas: Vec<usize> = lines.values().map(BTreeSet::len).collect();
        trim(&mut replicas);
        let micro_batches = ranks.iter().flatten().map(|action| action.micro_batch + 1).max().unwrap_or(0);
        let schedule = Schedule { placement, replicas, micro_batches, ranks };
        if let Some((gap, _)) = lines.keys().enumerate().find(|&(i, &stage)| i != stage) {
            let got = format!("no action of stage {gap}");
            return Err(Error::Invalid { op: "schedule", got, wanted: "every stage up to the last" });
        }
        let listed =
            schedule.ranks.iter().enumerate().flat_map(|(rank, list)| list.iter().map(move |a| (rank, a)));
        let is_elsewhere = |(rank, action): &(usize, &Action)| !schedule.has(*rank, **action);
        match listed.into_iter().find(is_elsewhere) {
            Some((rank, action)) => Err(wrong(rank, &action.to_string(), "a stage that no line before has")),
            None => Ok(schedule),
        }
    }
}

/// Leaves out stages of one replica at the end, so that equal schedules have equal lists.
pub(super) fn trim(replicas: &mut Vec<usize>) {
    while replicas.last() == Some(&1) {
        replicas.pop();
    }
}

/// Parses one token. The error says what was wanted.
fn parse_action(token: &str) -> Result<Action, &'static str> {
    const KINDS: &str = "F, B, I, W, U, SEND_F, RECV_F, SEND_B or RECV_B after the stage";
    let (stage, rest) =
        leading_number(token).ok_or("an action such as 2F3, beginning with a stage's number")?;
    let symbol = rest.trim_end_matches(|c: char| c.is_ascii_digit());
    let kind = ActionKind::ALL.into_iter().find(|kind| kind.to_string() == symbol).ok_or(KINDS)?;
    match leading_number(&rest[symbol.len()..]) {
        Some((micro_batch, "")) => Ok(Action::new(stage, kind, micro_batch)),
        _ => Err("a micro-batch's number at the end"),
    }
}

/// The number at the beginning of a text, and the rest of the text.
fn leading_number(text: &str) -> Option<(usize, &str)> {
    let end = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    Some((usize::from(text[..end].parse::<u16>().ok()?), &text[end..]))
}
