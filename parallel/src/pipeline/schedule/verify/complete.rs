//! Whether everything is done once, where it should be.

use std::collections::HashSet;

use super::super::{Action, Error, Kind, Result, Schedule};

pub(super) fn check(schedule: &Schedule) -> Result<()> {
    sizes(schedule)?;
    let mut done = HashSet::new();
    for (rank, actions) in schedule.ranks.iter().enumerate() {
        for (position, &action) in actions.iter().enumerate() {
            let wrong = |why| Err(Error::Action { rank, position, action, why });
            match schedule.placement.get(action.stage) {
                None => return wrong(format!("there are {} stages", schedule.stages())),
                Some(&place) if place != rank => return wrong(format!("the stage is on rank {place}")),
                Some(_) if action.micro_batch >= schedule.micro_batches => {
                    return wrong(format!("there are {} micro-batches", schedule.micro_batches));
                }
                Some(_) => {}
            }
            if let Some(before) = repeats(action).find(|before| done.contains(before)) {
                return wrong(format!("{before} has been done"));
            }
            done.insert(action);
        }
    }
    for (stage, &rank) in schedule.placement.iter().enumerate() {
        for micro_batch in 0..schedule.micro_batches {
            let has = |kind| done.contains(&Action::new(stage, kind, micro_batch));
            let backward = if has(Kind::Input) { Kind::Weight } else { Kind::Backward };
            if let Some(kind) = [Kind::Forward, backward].into_iter().find(|&kind| !has(kind)) {
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
    match schedule.placement.iter().position(|&rank| rank >= schedule.ranks.len()) {
        Some(stage) => wrong(
            format!("stage {stage} on rank {} of {}", schedule.placement[stage], schedule.ranks.len()),
            "stages on ranks that there are",
        ),
        None => Ok(()),
    }
}

/// The actions that do what this one does.
fn repeats(action: Action) -> impl Iterator<Item = Action> {
    let others: &[Kind] = match action.kind {
        Kind::Backward => &[Kind::Input, Kind::Weight],
        Kind::Input | Kind::Weight => &[Kind::Backward],
        _ => &[],
    };
    std::iter::once(action).chain(others.iter().map(move |&kind| action.with(kind)))
}
