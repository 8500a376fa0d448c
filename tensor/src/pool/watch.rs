//! [`watch`]: waiting without sleeping, for as long as nobody else wants the processor.

use std::sync::LazyLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// How long a thread watches for a change, keeping its processor, before it sleeps or lets others run.
pub(super) const WATCH: Duration = Duration::from_micros(200);
/// A thread that asks for nothing longer than this was not running: others want the processors.
const GONE: Duration = Duration::from_micros(400);
/// How long nobody watches after that.
const CROWDED: Duration = Duration::from_millis(50);

/// Asks again and again for a while; once, in a crowd.
#[cfg(not(feature = "loom"))]
pub(super) fn watch<T>(ask: impl Fn() -> Option<T>) -> Option<T> {
    let start = now();
    let (end, mut last) = (start + CROWD.patience(start), start);
    loop {
        for _ in 0..32 {
            if let Some(answer) = ask() {
                return Some(answer);
            }
            std::hint::spin_loop();
        }
        let now = now();
        CROWD.note(last, now);
        if now > end {
            return None;
        }
        last = now;
    }
}

/// A model asks once: watching changes when things happen, not what.
#[cfg(feature = "loom")]
pub(super) fn watch<T>(ask: impl Fn() -> Option<T>) -> Option<T> {
    ask()
}

/// Lets others run.
pub(super) fn give_way() {
    let from = now();
    crate::sync::yield_now();
    CROWD.note(from, now());
}

/// Since the first call.
fn now() -> Duration {
    static START: LazyLock<Instant> = LazyLock::new(Instant::now);
    START.elapsed()
}

/// Whether others want the processors.
static CROWD: Crowd = Crowd { until: AtomicU64::new(0) };

struct Crowd {
    /// In nanoseconds of [`now`].
    until: AtomicU64,
}

impl Crowd {
    /// Takes note of the times before and after something short.
    fn note(&self, before: Duration, after: Duration) {
        if after.saturating_sub(before) > GONE {
            self.until.store((after + CROWDED).as_nanos() as u64, Ordering::Relaxed);
        }
    }

    /// How long to watch.
    fn patience(&self, now: Duration) -> Duration {
        if now.as_nanos() < u128::from(self.until.load(Ordering::Relaxed)) { Duration::ZERO } else { WATCH }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nobody_watches_for_a_while_after_a_thread_was_gone() {
        let (crowd, at) = (Crowd { until: AtomicU64::new(0) }, Duration::from_micros);
        crowd.note(at(0), at(399));
        assert_eq!(crowd.patience(at(399)), WATCH);
        crowd.note(at(1000), at(1500));
        assert_eq!(
            [1500, 51_499, 51_500].map(|t| crowd.patience(at(t))),
            [Duration::ZERO, Duration::ZERO, WATCH]
        );
    }
}
