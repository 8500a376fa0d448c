//! [`Watchdog`]: the calls of this rank that are queued or running on the GPU.
//!
//! A thread polls the GPU's events and NCCL while calls are under way. An error ends the run of all ranks. When the run has
//! failed, on whichever rank, the thread aborts all calls under way, so that no stream and no waiting thread waits for a rank
//! that is gone.

use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use phalanx_tensor::cuda::{Gpu, GpuEvent};
use phalanx_tensor::{Result as TensorResult, Tensor, adopt, unpoisoned};

use super::library::Link;
use crate::comm::{Comm, Error, Result};

/// How long the thread sleeps between two polls.
const LOOK: Duration = Duration::from_millis(2);
/// How long aborted work may take to leave the GPU, and communicators to end.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(5);

/// The tensors of a call, kept while the GPU uses them.
#[derive(Debug, Default)]
pub(super) struct KeptTensors(Mutex<Vec<Tensor>>);

impl KeptTensors {
    pub(super) fn new(tensors: impl Iterator<Item = Tensor>) -> Arc<KeptTensors> {
        Arc::new(KeptTensors(Mutex::new(tensors.collect())))
    }

    /// Gives their memory to this thread's current stream, which comes after the call, and drops them.
    pub(super) fn adopt(&self) {
        unpoisoned(self.0.lock()).iter().for_each(adopt);
        self.release();
    }

    /// Drops the tensors: the GPU has done with them, or all later users of their memory are ordered after the call.
    pub(super) fn release(&self) {
        let tensors = std::mem::take(&mut *unpoisoned(self.0.lock()));
        drop(tensors);
    }
}

/// A call under way.
#[derive(Debug)]
pub(super) struct RunningCall {
    /// Which.
    pub(super) call: String,
    /// When its turn on the GPU came, and when it was done there.
    pub(super) begun: GpuEvent,
    pub(super) ended: Arc<GpuEvent>,
    pub(super) kept: Arc<KeptTensors>,
}

/// A rank's calls under way, and NCCL's communicators.
#[derive(Debug)]
pub(super) struct Watchdog {
    pub(super) gpu: &'static Gpu,
    pub(super) control: Comm,
    timeout: Duration,
    state: Mutex<WatchdogState>,
    wake: Condvar,
}

/// What the watchdog's thread looks at.
#[derive(Debug, Default)]
struct WatchdogState {
    links: Vec<Arc<Link>>,
    under_way: Vec<(RunningCall, Option<Instant>)>,
    /// Calls that a call stream has not yet given to the GPU.
    queued: usize,
    /// No further call will come.
    ended: bool,
}

impl Watchdog {
    /// With the thread that watches.
    pub(super) fn start(
        gpu: &'static Gpu,
        control: Comm,
        timeout: Duration,
    ) -> Result<(Arc<Watchdog>, JoinHandle<()>)> {
        let (state, wake) = Default::default();
        let watchdog = Arc::new(Watchdog { gpu, control, timeout, state, wake });
        let ours = Arc::clone(&watchdog);
        let thread = std::thread::Builder::new().name("phalanx nccl".into()).spawn(move || ours.run());
        thread
            .map(|thread| (watchdog, thread))
            .map_err(|e| Error::Launch(format!("no thread for communication: {e}")))
    }

    fn lock(&self) -> MutexGuard<'_, WatchdogState> {
        unpoisoned(self.state.lock())
    }

    /// How long NCCL may take for anything.
    pub(super) fn timeout(&self) -> Duration {
        self.timeout
    }

    /// A call stream has taken one more call.
    pub(super) fn queued(&self) {
        self.lock().queued += 1;
    }

    /// A call stream has queued the call on the GPU, from where on the call is watched; or it has failed to (`None`).
    pub(super) fn given(&self, work: Option<RunningCall>) {
        let mut state = self.lock();
        state.queued -= 1;
        state.under_way.extend(work.map(|work| (work, None)));
        self.wake.notify_all();
    }

    /// One more communicator.
    pub(super) fn linked(&self, link: Arc<Link>) {
        self.lock().links.push(link);
    }

    /// No further call will come.
    pub(super) fn end(&self) {
        self.lock().ended = true;
        self.wake.notify_all();
    }

    /// Ends the run of all ranks with an error of this rank.
    pub(super) fn fail(&self, call: &str, why: &str) -> Error {
        self.control.fail(&format!("{call}: {why}"));
        let rank = self.control.ranks()[self.control.rank()];
        Error::Failed { rank, cause: why.into() }
    }

    fn run(&self) {
        // An error shows in the first call.
        let _ = self.gpu.make_current();
        let mut state = self.lock();
        loop {
            if state.under_way.is_empty() {
                if state.ended && state.queued == 0 {
                    break;
                }
                state = unpoisoned(self.wake.wait(state));
                continue;
            }
            let wrong = look(&mut state, self.timeout);
            let failed = wrong.is_some() || self.control.failure().is_some();
            drop(state);
            if let Some((call, why)) = wrong {
                self.fail(&call, &why);
            }
            if failed {
                self.abort();
            }
            state = self.lock();
            state = unpoisoned(self.wake.wait_timeout(state, LOOK)).0;
        }
        let links = std::mem::take(&mut state.links);
        drop(state);
        self.close(&links);
    }

    /// Aborts the calls under way on the GPU, which would never end by themselves.
    fn abort(&self) {
        let links = self.lock().links.clone();
        links.iter().for_each(|link| link.abort());
        let begin = Instant::now();
        let is_over = |(work, _): &(RunningCall, _)| work.ended.is_done().unwrap_or(true);
        while begin.elapsed() < SHUTDOWN_TIMEOUT && !self.lock().under_way.iter().all(is_over) {
            std::thread::sleep(LOOK);
        }
        let works = std::mem::take(&mut self.lock().under_way);
        works.iter().for_each(|(work, _)| work.kept.release());
    }

    /// Ends the communicators; all ranks are at their end.
    fn close(&self, links: &[Arc<Link>]) {
        if self.control.failure().is_some() {
            return links.iter().for_each(|link| link.abort());
        }
        let begin = Instant::now();
        let finalized: Vec<bool> = links.iter().map(|link| link.finalize().is_ok()).collect();
        for (link, finalized) in links.iter().zip(finalized) {
            let mut settled = false;
            while finalized
                && !settled
                && begin.elapsed() < SHUTDOWN_TIMEOUT
                && self.control.failure().is_none()
            {
                // An error ends the waiting.
                settled = link.is_settled().unwrap_or(true);
                if !settled {
                    std::thread::sleep(LOOK);
                }
            }
            if settled { link.destroy() } else { link.abort() }
        }
    }
}

/// Drops calls that have ended. Returns the first error of the others, with its call.
fn look(state: &mut WatchdogState, timeout: Duration) -> Option<(String, String)> {
    let mut wrong = None;
    state.under_way.retain_mut(|(work, since)| match progress(work, since, timeout) {
        Ok(ended) => {
            if ended {
                work.kept.release();
            }
            !ended
        }
        Err(why) => {
            wrong.get_or_insert((work.call.clone(), why));
            true
        }
    });
    let broken = state.links.iter().find_map(|link| link.fault());
    let call = || state.under_way.first().map_or("nccl".into(), |(work, _)| work.call.clone());
    wrong.or_else(|| broken.map(|why| (call(), why)))
}

/// Whether a call has ended; the time counts from its turn on the GPU.
fn progress(
    work: &RunningCall,
    since: &mut Option<Instant>,
    timeout: Duration,
) -> std::result::Result<bool, String> {
    let text = |outcome: TensorResult<bool>| outcome.map_err(|e| e.to_string());
    if text(work.ended.is_done())? {
        return Ok(true);
    }
    if since.is_none() && text(work.begun.is_done())? {
        *since = Some(Instant::now());
    }
    match since {
        Some(since) if since.elapsed() > timeout => Err(format!(
            "every rank has called it, but it did not end on the GPU within {} ms; another rank's GPU has not come so far",
            timeout.as_millis()
        )),
        _ => Ok(false),
    }
}
