//! The checkpoints of a [`TrainingLoop`]: in memory ([`TrainingLoop::hold`]), on disk ([`TrainingLoop::save`]), that of the lowest
//! validation loss ([`TrainingLoop::save_best`]), and that of an interrupted run without a folder ([`TrainingLoop::rescue`]).

use super::training_loop::TrainingLoop;
use crate::Result;
use crate::callback::Event;
use crate::checkpoints::Checkpoints;
use crate::folder_lock::FolderLock;

impl TrainingLoop<'_> {
    /// Begins to copy the run's state in memory.
    pub(super) fn hold(&mut self) -> Result<()> {
        self.run.loss_watch = self.loss_watch.state();
        self.run.hold()
    }

    /// Begins to save a checkpoint.
    pub(super) fn save(&mut self) -> Result<()> {
        let Some(checkpoints) = &mut self.checkpoints else { return Ok(()) };
        let step = self.run.done;
        let trace = self.run.trace.clone();
        self.run.loss_watch = self.loss_watch.state();
        let (run, logs) = (&*self.run, self.metrics.to_sync()?);
        let path = trace.span("checkpoint", step.saturating_sub(1), || checkpoints.save(run, logs))?;
        self.event(&Event::Saving { step, path: &path })
    }

    /// Saves the best checkpoint, if the validation of this step has a lower loss than the one on disk.
    pub(super) fn save_best(&mut self, loss: f64) -> Result<()> {
        if self.run.setup.config.keep_best
            && !loss.is_nan()
            && self.best_on_disk.is_none_or(|best| loss < best)
            && let Some(checkpoints) = &self.checkpoints
        {
            self.run.loss_watch = self.loss_watch.state();
            checkpoints.save_best(self.run, loss, self.metrics.to_sync()?)?;
            self.best_on_disk = Some(loss);
        }
        Ok(())
    }

    /// Gives an interrupted run without a folder the folder `rescue` for its checkpoint.
    pub(super) fn rescue(&mut self) -> Result<()> {
        let config = &self.run.setup.config;
        let Some(folder) = config.rescue.clone().filter(|_| self.checkpoints.is_none()) else {
            return Ok(());
        };
        if self.run.mesh_rank.is_first() {
            self.rescue_lock = Some(FolderLock::take(&folder)?);
            self.run.extra_files.iter().try_for_each(|write| write(&folder))?;
        }
        self.checkpoints = Some(Checkpoints::new(&folder, config));
        Ok(self.run.mesh_rank.all_ranks().barrier()?)
    }
}
