//! [`simulate`]: when everything would be done, given how long it takes.

mod costs;
mod svg;
mod text;
mod timeline;

use std::collections::HashMap;

use super::{Action, Kind, Result, Schedule, Transfer, verify};

pub use costs::Costs;
pub use timeline::{Span, Timeline};

/// The times at which ranks that keep to a schedule would do everything.
///
/// A rank does one computation after the other, each as soon as the one before has ended and what it needs is there. A transfer
/// starts when there is something to send, takes the time of its boundary, holds up neither rank and no other
/// transfer; so it does not matter whether the schedule has [transfers](super::with_transfers). Updates take no time.
///
/// # Errors
/// If the schedule is wrong, or the costs do not fit it.
pub fn simulate(schedule: &Schedule, costs: &Costs) -> Result<Timeline> {
    verify(schedule, usize::MAX)?;
    costs.check(schedule)?;
    let ranks = schedule.ranks.len();
    let computations = |actions: &Vec<Action>| actions.iter().copied().filter(|a| computes(a.kind)).collect();
    let lists: Vec<Vec<Action>> = schedule.ranks.iter().map(computations).collect();
    let mut spans: Vec<Vec<Span>> = vec![Vec::new(); ranks];
    let mut arrivals: HashMap<Transfer, f64> = HashMap::new();
    // It ends with every list done, since the schedule has no deadlock.
    let mut moved = true;
    while moved {
        moved = false;
        for rank in 0..ranks {
            while let Some(&action) = lists[rank].get(spans[rank].len()) {
                let input = schedule.input(action).map(|input| arrivals.get(&input).copied());
                let Some(ready) = input.unwrap_or(Some(0.0)) else { break };
                let begin = spans[rank].last().map_or(0.0, |span| span.end).max(ready);
                let end = begin + costs.of(action);
                if let Some(output) = schedule.output(action) {
                    let time = if schedule.travels(output) { costs.between(output) } else { 0.0 };
                    arrivals.insert(output, end + time);
                }
                spans[rank].push(Span { action, begin, end });
                moved = true;
            }
        }
    }
    let peaks = lists.iter().map(|actions| peak(actions, costs)).collect();
    Ok(Timeline { ranks: spans, peak_activations: peaks })
}

fn computes(kind: Kind) -> bool {
    !kind.is_transfer() && kind != Kind::Update
}

/// The most that a rank holds at once: from the beginning of an `F` to the end of its `B` or `W`.
fn peak(actions: &[Action], costs: &Costs) -> f64 {
    let (mut now, mut most) = (0.0_f64, 0.0_f64);
    for action in actions {
        match action.kind {
            Kind::Forward => now += costs.activation[action.stage],
            Kind::Backward | Kind::Weight => now -= costs.activation[action.stage],
            _ => {}
        }
        most = most.max(now);
    }
    most
}
