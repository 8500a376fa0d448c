//! [`Callback`]: a run calls its methods on the first rank, as it goes.

use std::path::Path;

use crate::record::{Record, Summary};
use crate::report::{Collective, Holds, Memory, Timeline};
use crate::{Config, Error, Result};

/// A run calls these methods on its first rank, as it goes. Each of them does nothing unless it is written.
pub trait Callback: Send {
    /// Training begins, after `done` steps; the whole model has so many parameters.
    ///
    /// # Errors
    /// Whatever goes wrong; it ends the run.
    fn started(&mut self, _config: &Config, _done: u64, _parameters: usize) -> Result<()> {
        Ok(())
    }

    /// A step is done, and the validation behind it if there was one.
    ///
    /// # Errors
    /// Whatever goes wrong; it ends the run.
    fn step(&mut self, _record: &Record) -> Result<()> {
        Ok(())
    }

    /// Something worth a line: a checkpoint begun, an update left out, a return to a checkpoint, an early end.
    ///
    /// # Errors
    /// Whatever goes wrong; it ends the run.
    fn event(&mut self, _event: &Event<'_>) -> Result<()> {
        Ok(())
    }

    /// The run fails with this error after so many steps of which at least one was told; [`Callback::ended`] is not called.
    ///
    /// # Errors
    /// Whatever goes wrong; it is not told, since the run's error is.
    fn failed(&mut self, _step: u64, _error: &Error) -> Result<()> {
        Ok(())
    }

    /// Training is over.
    ///
    /// # Errors
    /// Whatever goes wrong; it fails the run.
    fn ended(&mut self, _summary: &Summary) -> Result<()> {
        Ok(())
    }
}

/// What has happened in a run besides its steps.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub enum Event<'a> {
    /// A checkpoint of the run after so many steps is being written.
    Saving {
        /// Steps done.
        step: u64,
        /// Where.
        path: &'a Path,
    },
    /// A step's update was left out.
    Skipped {
        /// The step.
        step: u64,
        /// Why.
        why: &'a str,
    },
    /// The run has gone back.
    RolledBack {
        /// The step that went wrong.
        step: u64,
        /// The steps done now.
        to: u64,
        /// What was wrong.
        why: &'a str,
    },
    /// What was made by [`Run::every`](crate::Run::every): a text that the model wrote.
    Sample {
        /// Steps done.
        step: u64,
        /// The text.
        text: &'a str,
    },
    /// What all ranks together can compute at most was measured, in floating-point operations a second.
    Peak(f64),
    /// A step was inspected.
    Inspected {
        /// The memory of each rank.
        memory: &'a [Memory],
        /// What ran when.
        timeline: &'a Timeline,
        /// What each rank keeps.
        holds: &'a [Holds],
    },
    /// What each rank has told the others so far: at each pause of the run, and at its end.
    Collectives(&'a [Collective]),
    /// Something about how the run trains that is other than was asked for.
    Notice {
        /// Steps done.
        step: u64,
        /// What.
        text: &'a str,
    },
    /// The run ends before its last step.
    Stopping {
        /// Steps done.
        step: u64,
        /// Why.
        why: &'a str,
    },
}
