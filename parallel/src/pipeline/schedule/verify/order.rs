//! Whether each rank has what it needs when it comes to an action.

use std::collections::{HashMap, HashSet};

use super::super::{Action, Error, Kind, Result, Schedule, Transfer};

pub(super) fn check(schedule: &Schedule) -> Result<()> {
    let transfers = schedule.has_transfers();
    for (rank, actions) in schedule.ranks.iter().enumerate() {
        let mut list = List { schedule, transfers, done: HashSet::new(), added: HashMap::new() };
        for (position, &action) in actions.iter().enumerate() {
            list.visit(action).map_err(|why| Error::Action { rank, position, action, why })?;
        }
    }
    Ok(())
}

/// A rank's list up to an action.
struct List<'a> {
    schedule: &'a Schedule,
    /// Whether what goes between ranks has to be received.
    transfers: bool,
    done: HashSet<Action>,
    /// For each stage the last micro-batch whose weights' gradients have been added.
    added: HashMap<usize, usize>,
}

impl List<'_> {
    fn visit(&mut self, action: Action) -> Result<(), String> {
        let own = match action.kind {
            Kind::Backward | Kind::Input => Some(Kind::Forward),
            Kind::Weight => Some(Kind::Input),
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
        if matches!(action.kind, Kind::Backward | Kind::Weight) {
            let last = self.added.insert(action.stage, action.micro_batch);
            if let Some(last) = last.filter(|&last| last > action.micro_batch) {
                return Err(format!("adds gradients after those of micro-batch {last}, wanted ascending"));
            }
        }
        if action.kind == Kind::Update {
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

    /// An update wants its micro-batch's gradients, and no later ones.
    fn has_just_added(&self, Action { stage, micro_batch, .. }: Action) -> Result<(), String> {
        match self.added.get(&stage) {
            Some(last) if *last == micro_batch => Ok(()),
            Some(last) => Err(format!("the last gradients are those of micro-batch {last}")),
            None => Err("there are no gradients yet".into()),
        }
    }

    /// What is sent or used here must have been computed here.
    fn has_computed(&self, transfer: Transfer) -> Result<(), String> {
        let action = |kind| Action::new(transfer.from, kind, transfer.micro_batch);
        if transfer.from < transfer.to {
            return self.wants(action(Kind::Forward));
        }
        self.wants(action(Kind::Input)).or_else(|_| self.wants(action(Kind::Backward)))
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
