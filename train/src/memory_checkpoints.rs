//! Checkpoints in the ranks' memory, which outlive the [`Run`] that made them: after a process has died and was replaced, the run goes on
//! from there.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Arc, Mutex, OnceLock};

use phalanx_parallel::all_gather_object;
use phalanx_parallel::checkpoint::{Host, MemorySaver, MemoryStore, Recovery, Trained, parts};
use phalanx_tensor::unpoisoned;

use crate::config::run_folder;
use crate::machine::host;
use crate::mesh_rank::process;
use crate::{Result, Run, checkpoints};

/// The copies that the ranks of this process hold in its memory. Clones are handles on the same copies.
#[derive(Clone, Debug, Default)]
pub struct MemoryCheckpoints(Arc<Mutex<BTreeMap<usize, MemoryStore>>>);

impl MemoryCheckpoints {
    /// Those of a process that is a rank. They live as long as the process.
    pub(crate) fn of_process() -> MemoryCheckpoints {
        static PROCESS: OnceLock<MemoryCheckpoints> = OnceLock::new();
        PROCESS.get_or_init(MemoryCheckpoints::default).clone()
    }

    /// Those of one rank of this process; of a process that is a rank, those of one of its trainers.
    pub fn of(&self, rank: usize) -> MemoryStore {
        unpoisoned(self.0.lock()).entry(rank).or_default().clone()
    }

    /// Drops the copies of all ranks.
    pub fn clear(&self) {
        unpoisoned(self.0.lock()).values().for_each(MemoryStore::clear);
    }
}

/// The epoch in which this process last began to train, and how many trainers have begun in it.
static BEGUN: Mutex<(u64, usize)> = Mutex::new((0, 0));

/// Counts the trainers of this process anew: each epoch of the run calls the program's function from its beginning.
pub(crate) fn count_trainers() {
    unpoisoned(BEGUN.lock()).1 = 0;
}

/// The number of a trainer that begins now, in its epoch. The same trainer has it in every epoch, so that it finds its own copies and not
/// those of another.
pub(crate) fn trainer_number(epoch: u64) -> usize {
    let mut begun = unpoisoned(BEGUN.lock());
    if begun.0 != epoch {
        *begun = (epoch, 0);
    }
    begun.1 += 1;
    begun.1 - 1
}

impl Run {
    /// Makes checkpoints in memory from now on, if the configuration asks for them. All ranks call it.
    pub(crate) fn hold_in(&mut self, store: MemoryStore) -> Result<()> {
        if self.setup.config.memory_every() == 0 {
            return Ok(());
        }
        let redundant = self.setup.config.redundant_shards;
        let place = Host { machine: host(), process: format!("{:?}", process().1) };
        let saver = MemorySaver::new(self.mesh_rank.all_ranks(), store, &place, redundant)?;
        self.setup.saver.hold_by(saver);
        Ok(())
    }

    /// Begins to copy the run's state, if it makes checkpoints in memory.
    pub(crate) fn hold(&self) -> Result<()> {
        if self.setup.config.memory_every() == 0 {
            return Ok(());
        }
        let trained = [self.trained()];
        let optimizers: Vec<_> = self.optimizers.iter().collect();
        self.setup.saver.hold(parts(&trained, &optimizers)?, self.settings()?)
    }

    /// Puts the run where it begins. If `again`, or if any rank holds copies, it has begun before: it goes on from the newest step that the
    /// ranks hold together, or from the newest checkpoint in its folder if that is of a later step. Otherwise it goes on from the checkpoint
    /// that is to be resumed, or begins. All ranks call it.
    pub(crate) fn begin_or_go_on(&mut self, store: &MemoryStore, again: bool) -> Result<()> {
        let ranks = self.mesh_rank.all_ranks().clone();
        let found = if self.setup.config.memory_every() > 0 {
            let frozen = self.frozen.is_none();
            let trained = [Trained { frozen, ..Trained::new(&*self.model, &*self.setup.data_parallel) }];
            let mut optimizers: Vec<_> = self.optimizers.iter_mut().collect();
            store.restore(&ranks, &trained, &mut optimizers)?
        } else {
            Recovery { lost: (0..ranks.size()).collect(), ..Recovery::default() }
        };
        let resume = self.setup.config.resume.clone();
        if !again && found.lost.len() == ranks.size() {
            return resume.map_or(Ok(()), |folder| self.resume_alone(&folder));
        }
        let folder = self.setup.config.folder().map(Path::to_path_buf);
        // All ranks choose alike, also where only some see the folder.
        let own = folder.as_deref().filter(|folder| checkpoints::is_there(folder));
        let own = own.map(|folder| checkpoints::latest(folder).ok().as_ref().and_then(checkpoints::step_of));
        let on_disk = all_gather_object(&ranks, &own)?;
        let is_there = on_disk.iter().any(Option::is_some);
        let on_disk = on_disk.into_iter().map(Option::flatten).min().flatten();
        let in_memory = found.settings.as_ref().filter(|settings| {
            let step = settings.get("step").and_then(|step| step.parse::<u64>().ok());
            on_disk <= step
        });
        let from = match (in_memory, folder.filter(|_| is_there).or(resume)) {
            (Some(settings), _) => {
                let identity = self.identity.clone();
                let position = checkpoints::position(settings, Path::new("memory"), self, &identity)?;
                self.go_on_at(position)?;
                let by = listed(&found.holders).unwrap_or_else(|| "each rank for itself".into());
                format!("{}, held by {by}", self.goes_on())
            }
            (None, Some(folder)) => {
                self.resume(&folder)?;
                let no = match (found.settings.is_some(), self.setup.config.memory_every() > 0) {
                    (true, _) => "no later step is held whole in memory; ",
                    (false, true) => "no step is held whole in memory; ",
                    (false, false) => "",
                };
                format!("{no}{} in {}", self.goes_on(), folder.display())
            }
            (None, None) => {
                "no step is held whole in memory, and there is no checkpoint; the run begins anew".into()
            }
        };
        let are_others = self.dp_before.is_some_and(|before| before != self.setup.config.layout.dp);
        let lost = Some(&found.lost).filter(|lost| lost.len() < ranks.size() && !are_others);
        let lost = lost.and_then(|lost| listed(lost));
        let was = if found.lost.len() == 1 { "was" } else { "were" };
        let met = lost.map_or_else(|| "the ranks met again".into(), |lost| format!("{lost} {was} replaced"));
        self.recovered = Some(format!("{met}; {from}"));
        Ok(())
    }

    /// Says from which step the run goes on, and with how many ranks if they are others than before.
    fn goes_on(&self) -> String {
        let (dp, ranks) = (self.setup.config.layout.dp, self.mesh_rank.size());
        let noun = if ranks == 1 { "rank" } else { "ranks" };
        let with = self.dp_before.filter(|before| *before != dp);
        let with = with.map(|before| format!(" with {ranks} {noun} (dp {before} -> {dp})"));
        format!("the run goes on{} from step {}", with.unwrap_or_default(), self.done)
    }

    /// Goes on from a checkpoint. If it is one of the run's own folder, those of later steps are out of the way before any rank reads it: after
    /// a rank has died, the run would take the newest. All ranks call it.
    fn resume_alone(&mut self, resumed: &Path) -> Result<()> {
        let Some(folder) = self.setup.config.folder().map(Path::to_path_buf) else {
            return self.resume(resumed);
        };
        let saved = checkpoints::agreed(checkpoints::latest(resumed), self)?;
        checkpoints::check_identity(saved.settings(), saved.path(), &self.identity)?;
        // Ranks may see the folder by other paths, so all of them wait for the first.
        let run = run_folder(resumed);
        if self.mesh_rank.is_first() && checkpoints::same_folder(run, &folder) {
            checkpoints::abandon_later(&folder, resumed)?;
        }
        self.mesh_rank.all_ranks().barrier()?;
        match resumed.exists() {
            true => self.resume(resumed),
            false => self.resume(&checkpoints::resumed_in(run, resumed)),
        }
    }
}

/// Ranks as text, such as `ranks 1, 3`; `None` if there are none.
fn listed(ranks: &[usize]) -> Option<String> {
    let noun = if ranks.len() == 1 { "rank" } else { "ranks" };
    let numbers: Vec<String> = ranks.iter().map(usize::to_string).collect();
    (!ranks.is_empty()).then(|| format!("{noun} {}", numbers.join(", ")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_trainer_has_its_number_in_every_epoch() {
        let numbers = |epoch: u64| [0; 2].map(|_| trainer_number(epoch));
        for epoch in [7, 8] {
            assert_eq!(numbers(epoch), [0, 1]);
        }
        count_trainers();
        assert_eq!(numbers(8), [0, 1]);
    }
}
