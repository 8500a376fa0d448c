//! [`Background`]: a thread for one job at a time, which all ranks run together while they train on.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::thread::JoinHandle;

use crate::comm::Comm;
use crate::{Error, Result};

/// The job that is under way, if one is.
#[derive(Debug, Default)]
pub(super) struct Background(Option<JoinHandle<Result<()>>>);

impl Background {
    /// Begins a job; the one before has been waited for. `what` says in errors what the job does. A panic ends all ranks.
    ///
    /// # Errors
    /// If there is no thread.
    pub(super) fn start(
        &mut self,
        comm: &Comm,
        what: &'static str,
        job: impl FnOnce() -> Result<()> + Send + 'static,
    ) -> Result<()> {
        let comm = comm.clone();
        let work = move || {
            catch_unwind(AssertUnwindSafe(job)).unwrap_or_else(|_| {
                let why = format!("the thread that {what} panicked");
                comm.fail(&why);
                Err(Error::Config(why))
            })
        };
        let spawned = std::thread::Builder::new().name("checkpoint".into()).spawn(work);
        self.0 = Some(spawned.map_err(|e| Error::Config(format!("save: no thread: {e}")))?);
        Ok(())
    }

    /// Whether no job is under way.
    pub(super) fn is_idle(&self) -> bool {
        self.0.as_ref().is_none_or(JoinHandle::is_finished)
    }

    /// Waits for the job, if there is one.
    ///
    /// # Errors
    /// The job's.
    pub(super) fn wait(&mut self) -> Result<()> {
        let Some(running) = self.0.take() else { return Ok(()) };
        running.join().unwrap_or_else(|_| Err(Error::Config("save: its thread panicked".into())))
    }
}

impl Drop for Background {
    /// Waits, so that no thread is left behind. Only [`Background::wait`] returns an error.
    fn drop(&mut self) {
        let _ = self.wait();
    }
}
