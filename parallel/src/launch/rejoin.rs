//! [`Rejoin`]: which failures a process answers by meeting the other ranks again. [`Rejoins`]: how often. [`Seat`]: a process that
//! does.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use phalanx_rendezvous::{Member, Met};
use phalanx_tensor::unpoisoned;

use crate::comm::Error;

/// A process that meets the others at a store, again and again.
#[derive(Clone, Debug)]
pub(super) struct Seat {
    member: Arc<Mutex<Member>>,
    /// How much later than this process another may notice a failure.
    apart: Duration,
    /// Whether the run has begun, so that ranks may come so much later.
    has_begun: Arc<AtomicBool>,
    /// Whether it is to meet them again although nothing has failed.
    again: Arc<AtomicBool>,
}

impl Seat {
    pub(super) fn new(member: Member, apart: Duration, has_begun: bool) -> Seat {
        let (member, has_begun) = (Arc::new(Mutex::new(member)), Arc::new(has_begun.into()));
        Seat { member, apart, has_begun, again: Arc::default() }
    }

    /// Meets the other ranks for the next epoch.
    pub(super) fn meet(&self, place: (usize, usize), timeout: Duration) -> phalanx_rendezvous::Result<Met> {
        // An epoch that has failed meanwhile is left in any case.
        self.again.store(false, Ordering::Relaxed);
        let apart = if self.has_begun.load(Ordering::Relaxed) { self.apart } else { Duration::ZERO };
        let met = unpoisoned(self.member.lock()).meet(place, timeout.saturating_add(apart))?;
        self.has_begun.store(true, Ordering::Relaxed);
        Ok(met)
    }

    pub(super) fn wants_to_change(&self) -> bool {
        unpoisoned(self.member.lock()).wants_to_change()
    }

    pub(super) fn meet_again(&self) {
        self.again.store(true, Ordering::Relaxed);
    }

    /// Whether [`Seat::meet_again`] was called in this epoch.
    pub(super) fn is_to_meet_again(&self) -> bool {
        self.again.load(Ordering::Relaxed)
    }

    /// The process has ended well. Waits until all have; returns whether they have.
    pub(super) fn end(&self, timeout: Duration) -> bool {
        unpoisoned(self.member.lock()).end(timeout.saturating_add(self.apart))
    }
}

/// The failures after which a process meets the others again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Rejoin {
    /// None: the process ends with the run's error.
    Never,
    /// The loss of another process only.
    AfterLoss,
    /// Every failure of another rank.
    AfterFailure,
}

impl Rejoin {
    /// Whether rank `me` meets the others again after this failure.
    pub(super) fn follows(self, failure: &Error, me: usize) -> bool {
        let of_another = match failure {
            Error::Failed { rank, .. } => *rank != me,
            Error::Lost { .. } | Error::Reported { .. } | Error::Late { .. } | Error::Deserted { .. } => true,
            Error::Interrupted { cause, .. } => return self.follows(cause, me),
            // The program does it again, or this process cannot go on.
            _ => false,
        };
        match self {
            Rejoin::Never => false,
            Rejoin::AfterLoss => of_another && failure.is_loss(),
            Rejoin::AfterFailure => of_another,
        }
    }
}

/// Counts what this process has answered. A lost process is one that its launcher starts again, and counts. A rank that is late is
/// started by no launcher, so that it is counted here.
#[derive(Debug)]
pub(super) struct Rejoins {
    /// How many failures without a loss are left.
    left: usize,
}

impl Rejoins {
    /// Where each of `size` ranks may be started again so many times.
    pub(super) fn new(size: usize, restarts: usize) -> Rejoins {
        Rejoins { left: size.saturating_mul(restarts.saturating_add(1)) }
    }

    /// What the next epoch's failures lead to.
    pub(super) fn next(&self) -> Rejoin {
        if self.left > 0 { Rejoin::AfterFailure } else { Rejoin::AfterLoss }
    }

    /// After an answer.
    pub(super) fn count(&mut self, failure: &Error) {
        if !failure.is_loss() {
            self.left = self.left.saturating_sub(1);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_meets_the_others_again_for_what_others_have_done() {
        let lost = Error::Lost { rank: 1, why: "gone".into() };
        let failed = |rank| Error::Failed { rank, cause: "x".into() };
        let inside = Error::Interrupted { call: "recv".into(), cause: Box::new(lost.clone()) };
        let told = Error::Reported { rank: 1, what: "rank 1 failed: x".into(), is_loss: false };
        for (failure, after_loss, after_failure) in [
            (lost, true, true),
            (inside, true, true),
            (told, false, true),
            (failed(1), false, true),
            (failed(0), false, false),
            (Error::Launch("x".into()), false, false),
        ] {
            let follows = |rejoin: Rejoin| rejoin.follows(&failure, 0);
            let followed = [Rejoin::Never, Rejoin::AfterLoss, Rejoin::AfterFailure].map(follows);
            assert_eq!(followed, [false, after_loss, after_failure], "{failure}");
        }
    }

    #[test]
    fn ranks_that_meet_again_allow_for_those_that_notice_a_failure_late() {
        for (has_begun, waits) in [(false, "within 0.2 s"), (true, "within 0.5 s")] {
            // Nothing listens there.
            let member = Member::new("127.0.0.1".into(), 1, Default::default());
            let seat = Seat::new(member, Duration::from_millis(300), has_begun);
            let why = seat.meet((0, 2), Duration::from_millis(200)).unwrap_err().to_string();
            assert!(why.contains(waits), "{why}");
        }
    }

    #[test]
    fn failures_without_a_loss_are_answered_a_bounded_number_of_times() {
        let mut rejoins = Rejoins::new(2, 0);
        rejoins.count(&Error::Lost { rank: 1, why: "gone".into() });
        for _ in 0..2 {
            assert_eq!(rejoins.next(), Rejoin::AfterFailure);
            rejoins.count(&Error::Deserted { rank: 1, call: "x".into() });
        }
        assert_eq!(rejoins.next(), Rejoin::AfterLoss);
    }
}
