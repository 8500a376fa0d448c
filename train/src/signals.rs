//! [`stop_on_signals`]: SIGINT (Ctrl-C) and SIGTERM end a run after its step, with a checkpoint. [`dump_on_signal`]: SIGUSR1 writes the
//! flight recorder's dumps.

use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::sync::{Arc, Mutex};

use crate::{Error, Result};

/// Where the run of this process is, so that the message about a signal is true. In tests several runs may share it.
static PHASE: AtomicU8 = AtomicU8::new(Phase::Before as u8);

/// What a signal comes into.
#[derive(Clone, Copy)]
pub(crate) enum Phase {
    /// The first step has not begun.
    Before,
    /// The steps of a run that saves its checkpoint when it is interrupted.
    Steps,
    /// Those of a run that has no folder for one.
    StepsUnsaved,
    /// The last step is done, and its checkpoint is written or on its way.
    After,
}

impl Phase {
    /// Says that the run is here now.
    pub(crate) fn begin(self) {
        PHASE.store(self as u8, Ordering::Relaxed);
    }

    /// What follows a signal that comes now.
    #[cfg(unix)]
    fn told() -> &'static str {
        const TOLD: [(Phase, &str); 4] = [
            (Phase::Before, "ending after the first step"),
            (Phase::Steps, "saving after this step"),
            (Phase::StepsUnsaved, "ending after this step; the run has no folder for a checkpoint"),
            (Phase::After, "the last step is done; ending when all that follows it is done"),
        ];
        let now = PHASE.load(Ordering::Relaxed);
        TOLD.iter().find(|(phase, _)| *phase as u8 == now).map_or("ending", |(_, told)| told)
    }
}

/// A flag for [`Trainer::stop_when`](crate::Trainer::stop_when) that SIGINT and SIGTERM set. The run then finishes its step, saves a
/// checkpoint, and returns its summary. If the last step is done already, the run goes on to its end: samples and exported models are
/// written whole. A second signal ends the process at once. A terminal and a launcher may both send the first, so
/// the second counts from a second later on. To be called when the ranks have found each other: until then a signal ends the process. Called
/// again it returns the same flag, so that a signal counts for all runs of the process, also when the ranks meet again.
///
/// # Errors
/// If the system refuses.
pub fn stop_on_signals() -> Result<Arc<AtomicBool>> {
    static STOP: Mutex<Option<Arc<AtomicBool>>> = Mutex::new(None);
    let mut shared = phalanx_tensor::unpoisoned(STOP.lock());
    if let Some(stop) = &*shared {
        return Ok(stop.clone());
    }
    let stop = Arc::new(AtomicBool::new(false));
    set_on_signals(&stop).map_err(|e| Error::Config(format!("train: signals: {e}")))?;
    Ok(shared.insert(stop).clone())
}

#[cfg(unix)]
fn set_on_signals(stop: &Arc<AtomicBool>) -> std::io::Result<()> {
    use std::time::{Duration, Instant};

    use signal_hook::consts::{SIGINT, SIGTERM};

    let mut signals = signal_hook::iterator::Signals::new([SIGINT, SIGTERM])?;
    let stop = stop.clone();
    let mut first: Option<Instant> = None;
    let hear = move || {
        for signal in signals.forever() {
            match first {
                Some(first) if first.elapsed() > Duration::from_secs(1) => std::process::exit(128 + signal),
                Some(_) => {}
                None => {
                    first = Some(Instant::now());
                    stop.store(true, Ordering::Relaxed);
                    let again = if signal == SIGINT { "; press Ctrl-C again to quit at once" } else { "" };
                    eprintln!("\n{}{again}", Phase::told());
                }
            }
        }
    };
    std::thread::Builder::new().name("signals".into()).spawn(hear).map(drop)
}

#[cfg(not(unix))]
fn set_on_signals(stop: &Arc<AtomicBool>) -> std::io::Result<()> {
    for signal in [signal_hook::consts::SIGINT, signal_hook::consts::SIGTERM] {
        signal_hook::flag::register_conditional_shutdown(signal, 128 + signal, stop.clone())?;
        signal_hook::flag::register(signal, stop.clone())?;
    }
    Ok(())
}

/// From now on SIGUSR1 writes the dumps of the flight recorder of all ranks of this process, on a thread of its own, also while the ranks
/// wait for others. The run goes on. Calling it again changes nothing.
///
/// # Errors
/// If the system refuses.
pub(crate) fn dump_on_signal() -> Result<()> {
    #[cfg(unix)]
    {
        static SET: Mutex<bool> = Mutex::new(false);
        let mut set = phalanx_tensor::unpoisoned(SET.lock());
        if !*set {
            hear_dump_signal().map_err(|e| Error::Config(format!("train: signals: {e}")))?;
            *set = true;
        }
    }
    Ok(())
}

#[cfg(unix)]
fn hear_dump_signal() -> std::io::Result<()> {
    let mut signals = signal_hook::iterator::Signals::new([signal_hook::consts::SIGUSR1])?;
    let hear = move || {
        for _ in signals.forever() {
            match &phalanx_parallel::flight::dump_all("SIGUSR1")[..] {
                [] => eprintln!(
                    "SIGUSR1: no folder for the ranks' last operations; wanted `out` or PHALANX_FLIGHT_DIR"
                ),
                folders => folders.iter().for_each(|folder| {
                    eprintln!("SIGUSR1: the ranks' last operations are in {}", folder.display());
                }),
            }
        }
    };
    std::thread::Builder::new().name("flight signal".into()).spawn(hear).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_signal_counts_for_all_runs_of_the_process() {
        let [first, second] = [stop_on_signals().unwrap(), stop_on_signals().unwrap()];
        assert!(Arc::ptr_eq(&first, &second));
    }
}
