//! After which steps a run has a pause, a checkpoint or a validation.

use super::training_loop::TrainingLoop;
use crate::Config;

impl TrainingLoop<'_> {
    /// The next number of steps after which a checkpoint, a validation or a hook is due.
    pub(super) fn next_pause(&self) -> u64 {
        let Config { steps, save_every, validate_every, .. } = self.run.setup.config;
        let done = self.run.done;
        let due = |every: u64| done.checked_div(every).map_or(steps, |times| (times + 1) * every);
        let validations = if self.run.validation.is_some() { due(validate_every) } else { steps };
        let hooks = self.run.hooks.iter().map(|(every, _)| due(*every)).min().unwrap_or(steps);
        due(save_every).min(validations).min(hooks).min(steps)
    }

    /// The next number of steps after which there is a checkpoint in memory. A pipeline without flushes has them at its pauses.
    pub(super) fn next_hold(&self) -> u64 {
        let every = self.run.setup.config.memory_every();
        self.run.done.checked_div(every).map_or(u64::MAX, |times| (times + 1) * every)
    }

    pub(super) fn is_held(&self) -> bool {
        let config = &self.run.setup.config;
        config.memory_every() > 0 && (config.asynchronous.is_some() || self.is_due(config.memory_every()))
    }

    pub(super) fn is_due(&self, every: u64) -> bool {
        let done = self.run.done;
        done == self.run.setup.config.steps || every > 0 && done.is_multiple_of(every)
    }

    pub(super) fn is_saved(&self) -> bool {
        self.is_due(self.run.setup.config.save_every)
    }

    pub(super) fn is_validated(&self) -> bool {
        self.run.validation.is_some() && self.is_due(self.run.setup.config.validate_every)
    }

    /// Why the run ends early, if too many validations in a row brought no lower loss.
    pub(super) fn out_of_patience(&self) -> Option<String> {
        let since = self.run.best.since;
        let most = self.run.setup.config.patience?;
        (since >= most).then(|| format!("{since} validations without a lower loss"))
    }
}
