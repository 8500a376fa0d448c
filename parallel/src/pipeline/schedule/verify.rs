//! [`verify`]: whether ranks can run a schedule, and whether it computes every gradient once and in order.

use std::collections::{BTreeMap, HashMap, HashSet};

use super::{Action, ActionKind, Error, Result, Schedule, Transfer, Wait};

/// Checks a schedule, with or without transfers, and counts the activations that each rank must hold.
///
/// - Every stage has every micro-batch's `F` once, and its `B`, or its `I` and `W`, once, on the stage's rank.
/// - The inputs of a computation are computed or received before it: `F` needs the output of the stage before, `B` and `I` need
///   their stage's `F` and the gradient of the next stage, `W` needs its `I`. A stage adds its weights' gradients (`B` or `W`)
///   in ascending order.
/// - If there are transfers, there is one for every tensor between ranks and none within a rank, and every rank receives the
///   tensors of another rank in the order in which they are sent.
/// - An update (`U`) comes right after the gradients of its micro-batch have been added, before any others. All replicas have it.
/// - Replicas of a stage add gradients in the order of the micro-batches of all of them, so one waits for another.
/// - There is no deadlock if up to `capacity` transfers between two ranks may be sent before they are received; with 0, a send
///   blocks until it is received. (Without transfers: if a computation waits for its inputs.)
///
/// Returns for each rank how many activations it holds at most: one more after an `F`, one less after a `B`, or after the `W`
/// that follows an `I`. The unit is the activation of one micro-batch at one stage.
///
/// # Errors
/// The first thing that is wrong, with rank, position and action.
pub fn verify(schedule: &Schedule, capacity: usize) -> Result<Vec<usize>> {
    check_complete(schedule)?;
    check_order(schedule)?;
    check_matched(schedule)?;
    check_deadlock(schedule, capacity)?;
    Ok(schedule.ranks.iter().map(|actions| live(actions.iter().map(|action| action.kind))).collect())
}

/// The most activations that are held at once.
fn live(kinds: impl Iterator<Item = ActionKind>) -> usize {
    let (mut now, mut most) = (0_usize, 0);
    for kind in kinds {
        match kind {
            ActionKind::Forward => now += 1,
            ActionKind::Backward | ActionKind::Weight => now = now.saturating_sub(1),
            _ => {}
        }
        most = most.max(now);
    }
    most
}

fn check_complete(schedule: &Schedule) -> Result<()> {
    sizes(schedule)?;
    let mut done = HashSet::new();
    for (rank, actions) in schedule.ranks.iter().enumerate() {
        for (position, &action) in actions.iter().enumerate() {
            let wrong = |why| Err(Error::Action { rank, position, action, why });
            match schedule.placement.get(action.stage) {
                None => return wrong(format!("there are {} stages", schedule.stages())),
                Some(_) if action.micro_batch >= schedule.micro_batches => {
                    return wrong(format!("there are {} micro-batches", schedule.micro_batches));
                }
                Some(_) => {}
            }
            if !schedule.has(rank, action) {
                let place = schedule.rank_of(action.stage, action.micro_batch).unwrap_or_default();
                return wrong(format!("the stage is on rank {place}"));
            }
            // Every replica of a stage has its updates.
            let on = if action.kind == ActionKind::Update { rank } else { 0 };
            if let Some(before) = repeats(action).find(|&before| done.contains(&(on, before))) {
                return wrong(format!("{before} has been done"));
            }
            done.insert((on, action));
        }
    }
    for stage in 0..schedule.stages() {
        for micro_batch in 0..schedule.micro_batches {
            let rank = schedule.rank_of(stage, micro_batch).unwrap_or_default();
            let has = |kind| done.contains(&(0, Action::new(stage, kind, micro_batch)));
            let backward = if has(ActionKind::Input) { ActionKind::Weight } else { ActionKind::Backward };
            if let Some(kind) = [ActionKind::Forward, backward].into_iter().find(|&kind| !has(kind)) {
                return Err(Error::Missing { rank, action: Action::new(stage, kind, micro_batch) });
            }
        }
    }
    Ok(())
}

fn sizes(schedule: &Schedule) -> Result<()> {
    let wrong = |got: String, wanted| Err(Error::Invalid { op: "verify", got, wanted });
    if schedule.placement.is_empty() || schedule.micro_batches == 0 {
        let got = format!("{} stages, {} micro-batches", schedule.stages(), schedule.micro_batches);
        return wrong(got, "at least 1 of each");
    }
    if schedule.replicas.contains(&0) {
        return wrong(format!("{:?} replicas", schedule.replicas), "at least 1 of each stage");
    }
    let shares = |stage: &usize| {
        let ranks = schedule.ranks_of(*stage);
        ranks.len() > 1 && ranks.into_iter().any(|rank| schedule.stages_of(rank).count() > 1)
    };
    if let Some(stage) = (0..schedule.stages()).find(shares) {
        return wrong(format!("another stage on a rank of stage {stage}"), "no other beside a replica");
    }
    let is_outside = |&stage: &usize| schedule.ranks_of(stage).end > schedule.ranks.len();
    match (0..schedule.stages()).find(is_outside) {
        Some(stage) => wrong(
            format!("stage {stage} on rank {} of {}", schedule.ranks_of(stage).end - 1, schedule.ranks.len()),
            "stages on ranks that there are",
        ),
        None => Ok(()),
    }
}

/// The actions that must not come before this one, since they compute the same.
fn repeats(action: Action) -> impl Iterator<Item = Action> {
    let others: &[ActionKind] = match action.kind {
        ActionKind::Backward => &[ActionKind::Input, ActionKind::Weight],
        ActionKind::Input | ActionKind::Weight => &[ActionKind::Backward],
        _ => &[],
    };
    std::iter::once(action).chain(others.iter().map(move |&kind| action.with(kind)))
}

fn check_order(schedule: &Schedule) -> Result<()> {
    let transfers = schedule.has_transfers();
    for (rank, actions) in schedule.ranks.iter().enumerate() {
        let mut list = ListCheck { schedule, transfers, done: HashSet::new(), added: HashMap::new() };
        for (position, &action) in actions.iter().enumerate() {
            list.visit(action).map_err(|why| Error::Action { rank, position, action, why })?;
        }
    }
    Ok(())
}

/// A rank's list up to an action: which actions it has done.
struct ListCheck<'a> {
    schedule: &'a Schedule,
    /// Whether the schedule has transfers, so that tensors of other ranks have to be received.
    transfers: bool,
    done: HashSet<Action>,
    /// For each stage the last micro-batch whose weights' gradients have been added.
    added: HashMap<usize, usize>,
}

impl ListCheck<'_> {
    fn visit(&mut self, action: Action) -> Result<(), String> {
        let own = match action.kind {
            ActionKind::Backward | ActionKind::Input => Some(ActionKind::Forward),
            ActionKind::Weight => Some(ActionKind::Input),
            _ => None,
        };
        if let Some(kind) = own {
            self.wants(action.with(kind))?;
        }
        if action.kind.is_transfer() {
            self.transfer(action)?;
        } else if let Some(input) = self.schedule.input(action) {
            if !self.schedule.travels(input) {
                self.has_computed(input)?;
            } else if self.transfers {
                self.wants(input.receive())?;
            }
        }
        if action.kind.adds() {
            let last = self.added.insert(action.stage, action.micro_batch);
            if let Some(last) = last.filter(|&last| last > action.micro_batch) {
                return Err(format!("adds gradients after those of micro-batch {last}, wanted ascending"));
            }
        }
        if action.kind == ActionKind::Update {
            self.has_just_added(action)?;
        }
        self.done.insert(action);
        Ok(())
    }

    fn wants(&self, action: Action) -> Result<(), String> {
        if self.done.contains(&action) {
            Ok(())
        } else {
            Err(format!("needs {action} before it on the rank"))
        }
    }

    /// An update has to follow the gradients of its micro-batch, or of the last one before that the replica has, before later ones are
    /// added.
    fn has_just_added(&self, Action { stage, micro_batch, .. }: Action) -> Result<(), String> {
        let replicas = self.schedule.ranks_of(stage).len();
        match self.added.get(&stage) {
            Some(last) if (*last..*last + replicas).contains(&micro_batch) => Ok(()),
            Some(last) => Err(format!("the last gradients are those of micro-batch {last}")),
            None => Err("there are no gradients yet".into()),
        }
    }

    /// A tensor that is sent or used on its own rank must have been computed before.
    fn has_computed(&self, transfer: Transfer) -> Result<(), String> {
        let action = |kind| Action::new(transfer.from, kind, transfer.micro_batch);
        if transfer.from < transfer.to {
            return self.wants(action(ActionKind::Forward));
        }
        self.wants(action(ActionKind::Input)).or_else(|_| self.wants(action(ActionKind::Backward)))
    }

    fn transfer(&self, action: Action) -> Result<(), String> {
        let transfer = self.schedule.transfer(action).ok_or("there is no stage on that side")?;
        let Transfer { from, to, .. } = transfer;
        if !self.schedule.travels(transfer) {
            return Err(format!("stages {from} and {to} are on one rank"));
        }
        if action == transfer.send() { self.has_computed(transfer) } else { Ok(()) }
    }
}

/// One end of a transfer: rank, position, action.
type End = (usize, usize, Action);

/// The sends of one rank to another, and the receives of the other, each in order.
#[derive(Default)]
struct Pair {
    sends: Vec<(Transfer, End)>,
    receives: Vec<(Transfer, End)>,
}

fn check_matched(schedule: &Schedule) -> Result<()> {
    let mut pairs: BTreeMap<(usize, usize), Pair> = BTreeMap::new();
    for (rank, actions) in schedule.ranks.iter().enumerate() {
        for (position, &action) in actions.iter().enumerate() {
            let Some(transfer) = schedule.transfer(action) else { continue };
            let place = |stage| schedule.rank_of(stage, action.micro_batch).unwrap_or_default();
            let pair = pairs.entry((place(transfer.from), place(transfer.to))).or_default();
            let list = if action == transfer.send() { &mut pair.sends } else { &mut pair.receives };
            list.push((transfer, (rank, position, action)));
        }
    }
    pairs.into_iter().try_for_each(|((from, to), pair)| in_order(from, to, &pair))
}

fn in_order(from: usize, to: usize, pair: &Pair) -> Result<()> {
    let wrong = |&(_, (rank, position, action)): &(Transfer, End), why| {
        Err(Error::Action { rank, position, action, why })
    };
    for (send, receive) in pair.sends.iter().zip(&pair.receives) {
        if send.0 != receive.0 {
            return wrong(receive, format!("rank {from} sends {} at this point", send.0.send()));
        }
    }
    let count = pair.sends.len().min(pair.receives.len());
    match (pair.sends.get(count), pair.receives.get(count)) {
        (Some(send), _) => wrong(send, format!("rank {to} does not receive it")),
        (_, Some(receive)) => wrong(receive, format!("rank {from} does not send it")),
        (None, None) => Ok(()),
    }
}

/// Runs the lists, every rank as far as it can. The lists are fixed, so if they come to the end in one order, they do in all.
fn check_deadlock(schedule: &Schedule, capacity: usize) -> Result<()> {
    let ranks = schedule.ranks.len();
    let mut run = DeadlockCheck {
        schedule,
        capacity,
        next: vec![0; ranks],
        sent: vec![false; ranks],
        in_flight: HashMap::new(),
        given: HashSet::new(),
        added: HashSet::new(),
        transfers: schedule.has_transfers(),
    };
    loop {
        let mut moved = false;
        for rank in 0..ranks {
            while run.step(rank) {
                moved = true;
            }
        }
        let waits: Vec<Wait> = (0..ranks).filter_map(|rank| run.wait(rank)).collect();
        if waits.is_empty() {
            return Ok(());
        }
        if !moved {
            return Err(Error::Deadlock { waits });
        }
    }
}

/// A run of the lists in which only the order of actions counts.
struct DeadlockCheck<'a> {
    schedule: &'a Schedule,
    capacity: usize,
    /// Each rank's next action.
    next: Vec<usize>,
    /// Whether the send at which a rank waits is in flight already.
    sent: Vec<bool>,
    /// How many transfers have been sent and not received, for each pair of ranks.
    in_flight: HashMap<(usize, usize), usize>,
    /// The outputs and gradients that stages have computed for each other.
    given: HashSet<Transfer>,
    /// The stages and micro-batches whose weights' gradients have been added.
    added: HashSet<(usize, usize)>,
    /// Whether transfers are actions.
    transfers: bool,
}

impl DeadlockCheck<'_> {
    fn action(&self, rank: usize) -> Option<Action> {
        self.schedule.ranks[rank].get(self.next[rank]).copied()
    }

    /// Carries out a rank's next action, if it can be done.
    ///
    /// A send into a full buffer is in flight as well, but its rank waits until there is room: with a capacity of 0, until the
    /// tensor has been received.
    fn step(&mut self, rank: usize) -> bool {
        let Some(action) = self.action(rank) else { return false };
        let pair = self.pair(action);
        let can = match action.kind {
            ActionKind::SendForward | ActionKind::SendBackward => {
                let flying = self.in_flight.entry(pair).or_default();
                *flying += usize::from(!self.sent[rank]);
                self.sent[rank] = *flying > self.capacity;
                !self.sent[rank]
            }
            ActionKind::RecvForward | ActionKind::RecvBackward => {
                let flying = self.in_flight.entry(pair).or_default();
                let has = *flying > 0;
                *flying -= usize::from(has);
                has
            }
            _ => {
                let input = self.schedule.input(action).filter(|_| !self.transfers);
                input.is_none_or(|input| self.given.contains(&input)) && self.awaited_sum(action).is_none()
            }
        };
        if can {
            self.next[rank] += 1;
            self.added.extend(action.kind.adds().then_some((action.stage, action.micro_batch)));
            self.given.extend(self.schedule.output(action));
        }
        can
    }

    /// The micro-batch for whose gradients an action waits, which another replica has yet to compute.
    fn awaited_sum(&self, action: Action) -> Option<usize> {
        self.schedule.sum_before(action).filter(|&before| !self.added.contains(&(action.stage, before)))
    }

    /// The ranks that send and receive the action's transfer, or compute and need its input.
    fn pair(&self, action: Action) -> (usize, usize) {
        let transfer = self.schedule.transfer(action).or_else(|| self.schedule.input(action));
        let place = |stage| self.schedule.rank_of(stage, action.micro_batch).unwrap_or_default();
        let own = place(action.stage);
        if let Some(before) = self.awaited_sum(action) {
            return (self.schedule.rank_of(action.stage, before).unwrap_or(own), own);
        }
        transfer.map_or((own, own), |transfer| (place(transfer.from), place(transfer.to)))
    }

    fn wait(&self, rank: usize) -> Option<Wait> {
        let action = self.action(rank)?;
        let (from, to) = self.pair(action);
        Some(Wait { rank, position: self.next[rank], action, peer: if from == rank { to } else { from } })
    }
}
