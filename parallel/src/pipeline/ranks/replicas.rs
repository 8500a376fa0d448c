//! [`Replicas`]: data parallelism of a rank's stages.

use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::Result;
use crate::data_parallel::{DataParallel, NoSync};

/// The data parallelism of a rank's stages, each over the ranks that have the same stage in other pipelines.
///
/// ```text
/// each step:  replicas.begin()                      from now on gradients only accumulate
///             pipeline.train(..)                    Stages::last_backward calls replicas.last_backward(stage)
///             tied.exchange()                       where there is a tied table
///             replicas.finish()                     gradients are those of all ranks
/// ```
pub struct Replicas {
    stages: Vec<(usize, Box<dyn DataParallel>)>,
    /// While gradients of a stage only accumulate.
    waiting: Mutex<Vec<(usize, NoSync)>>,
}

impl Replicas {
    /// Of these stages.
    pub fn new(stages: Vec<(usize, Box<dyn DataParallel>)>) -> Replicas {
        Replicas { stages, waiting: Mutex::default() }
    }

    /// The stages' data parallelism.
    pub fn stages(&self) -> impl Iterator<Item = (usize, &dyn DataParallel)> {
        self.stages.iter().map(|(stage, share)| (*stage, &**share))
    }

    /// A step begins.
    ///
    /// # Errors
    /// As [`DataParallel::begin`].
    pub fn begin(&self) -> Result<()> {
        *self.waiting() = self.stages().map(|(stage, share)| (stage, share.no_sync())).collect();
        self.stages().try_for_each(|(_, share)| share.begin())
    }

    /// What follows completes a stage's gradients: they may be sent as they come.
    ///
    /// # Errors
    /// As [`DataParallel::begin`].
    pub fn last_backward(&self, stage: usize) -> Result<()> {
        self.waiting().retain(|(other, _)| *other != stage);
        self.stages().filter(|(other, _)| *other == stage).try_for_each(|(_, share)| share.begin())
    }

    /// The step's passes are over.
    ///
    /// # Errors
    /// As [`DataParallel::finish`].
    pub fn finish(&self) -> Result<()> {
        self.waiting().clear();
        self.stages().try_for_each(|(_, share)| share.finish())
    }

    fn waiting(&self) -> MutexGuard<'_, Vec<(usize, NoSync)>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
