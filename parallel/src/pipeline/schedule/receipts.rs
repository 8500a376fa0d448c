//! [`receipts`]: when a rank can be sure that what it has sent has been received.

use std::collections::HashMap;

use super::{Action, Error, Result, Schedule, Transfer, verify};

/// For each rank, for each of its sends, the receive of its own after which the sent tensor has certainly been received, however
/// slow the others are: what came with it was sent after that. None if only the end of the step says so.
///
/// ```
/// use phalanx_parallel::pipeline::schedule::{one_f_one_b, receipts, with_transfers};
///
/// let schedule = with_transfers(&one_f_one_b(2, 2)?)?;
/// let [first, _] = &receipts(&schedule)?[..] else { unreachable!() };
/// let told = |send: &str| first.iter().find(|(action, _)| action.to_string() == send).map(|(_, by)| by.unwrap().to_string());
/// // Rank 1 sends its first gradient after it has received both outputs.
/// assert_eq!(told("0SEND_F1").as_deref(), Some("0RECV_B0"));
/// # Ok::<(), phalanx_parallel::pipeline::schedule::Error>(())
/// ```
///
/// # Errors
/// If the schedule has no transfers, or as [`verify`].
pub fn receipts(schedule: &Schedule) -> Result<Vec<HashMap<Action, Option<Action>>>> {
    verify(schedule, usize::MAX)?;
    if !schedule.has_transfers() && schedule.ranks.len() > 1 {
        let got = "a schedule without transfers".into();
        return Err(Error::Invalid { op: "receipts", got, wanted: "one with transfers" });
    }
    let mut run = Run::new(schedule);
    while (0..schedule.ranks.len()).any(|rank| run.advance(rank)) {}
    Ok(run.known)
}

/// What ranks know of each other: of every rank the actions that are certainly over, the first so many of its list.
struct Run<'a> {
    schedule: &'a Schedule,
    next: Vec<usize>,
    clocks: Vec<Vec<usize>>,
    /// What the sender knew.
    sent: HashMap<Transfer, Vec<usize>>,
    /// The place of each receive in its rank's list.
    places: HashMap<Transfer, usize>,
    known: Vec<HashMap<Action, Option<Action>>>,
}

impl<'a> Run<'a> {
    fn new(schedule: &'a Schedule) -> Run<'a> {
        let ranks = schedule.ranks.len();
        let receives = schedule.ranks.iter().flat_map(|list| list.iter().enumerate());
        let place = |(place, &action): (usize, &Action)| {
            let transfer = schedule.transfer(action).filter(|t| t.receive() == action)?;
            Some((transfer, place))
        };
        Run {
            schedule,
            next: vec![0; ranks],
            clocks: vec![vec![0; ranks]; ranks],
            sent: HashMap::new(),
            places: receives.filter_map(place).collect(),
            known: vec![HashMap::new(); ranks],
        }
    }

    /// Carries out a rank's next action if what it receives has been sent.
    fn advance(&mut self, rank: usize) -> bool {
        let Some(&action) = self.schedule.ranks[rank].get(self.next[rank]) else { return false };
        match self.schedule.transfer(action) {
            Some(transfer) if transfer.send() == action => {
                self.sent.insert(transfer, self.clocks[rank].clone());
                self.known[rank].insert(action, None);
            }
            Some(transfer) => {
                let Some(told) = self.sent.get(&transfer) else { return false };
                let clock = &mut self.clocks[rank];
                clock.iter_mut().zip(told).for_each(|(known, told)| *known = (*known).max(*told));
                self.note(rank, action);
            }
            None => {}
        }
        self.next[rank] += 1;
        self.clocks[rank][rank] = self.next[rank];
        true
    }

    /// After a receive: which sends are now known to have come.
    fn note(&mut self, rank: usize, by: Action) {
        let (schedule, places, clock) = (self.schedule, &self.places, &self.clocks[rank]);
        for (&send, known) in self.known[rank].iter_mut().filter(|(_, known)| known.is_none()) {
            let Some(transfer) = schedule.transfer(send) else { continue };
            let place = places.get(&transfer);
            if place.is_some_and(|&place| clock[schedule.placement[transfer.to]] > place) {
                *known = Some(by);
            }
        }
    }
}
