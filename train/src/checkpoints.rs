//! A run's checkpoints in its folder. All ranks write them while they train on, and any number of ranks reads them.
//!
//! ```text
//! checkpoint                the newest
//! checkpoint-00000400, ..   earlier ones, as many as the configuration keeps
//! best                      the one with the lowest validation loss
//! abandoned-00000600, ..    those of later steps than an earlier checkpoint from which the run went on
//! ```
//! A run killed at any moment finds the last complete checkpoint, and a power failure leaves the last one that was reported.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::path::{Path, PathBuf};

use phalanx_parallel::agree;
use phalanx_parallel::checkpoint::{Checkpoint, Trained, parts};
use phalanx_tensor::io::atomic::sync_folder;

use crate::config::is_checkpoint;
use crate::run::Run;
use crate::run::divergence::LossWatchState;
use crate::run::validation::{BestLoss, PlateauState};
use crate::{Config, Error, Result};

/// The newest checkpoint's name in a run's folder.
pub const NAME: &str = "checkpoint";
const BEST: &str = "best";
/// The setting of the best checkpoint that has its validation loss. The lowest loss of the run may be one whose checkpoint is gone.
const OWN_LOSS: &str = "validation_loss";
const ABANDONED: &str = "abandoned-";
const FORMAT: &str = "phalanx-train-1";
/// The settings of a checkpoint without frozen parameters: the folder from which they are, and their digest.
pub const FROZEN: &str = "frozen";
pub(crate) const FROZEN_DIGEST: &str = "frozen_digest";

/// A run's checkpoints.
pub(crate) struct Checkpoints {
    folder: PathBuf,
    keep_last: usize,
    /// Whether this run has begun to save one of its own.
    has_saved: bool,
}

/// The position of a run in its checkpoint.
pub(crate) struct Position {
    pub step: u64,
    pub data_ahead: u64,
    pub best: BestLoss,
}

/// The newest complete checkpoint in a run's folder, or the checkpoint that the folder is itself. Only its index is read.
///
/// # Errors
/// If there is none, or another program wrote it.
pub fn latest(folder: &Path) -> Result<Checkpoint> {
    if is_checkpoint(folder) {
        return of_a_run(Checkpoint::open(folder)?);
    }
    let kept = || newest_kept(folder).filter(|_| !folder.join(NAME).exists());
    let opened = Checkpoint::open(folder.join(NAME)).or_else(|error| match kept() {
        Some(path) => Checkpoint::open(path),
        None => Err(error),
    });
    of_a_run(opened?)
}

/// The newest of the earlier checkpoints and the best one. A run has no other if it was killed before its first save, or in a save after
/// the newest one had been renamed by its step.
fn newest_kept(folder: &Path) -> Option<PathBuf> {
    let (earlier, best) = (earlier(folder).pop(), Checkpoint::open(folder.join(BEST)).ok());
    let is_later = |best: &Checkpoint| earlier.as_deref().and_then(step_in_name) < step_of(best);
    best.filter(is_later).map(|best| best.path().into()).or(earlier)
}

/// Steps that a run had done when it saved a checkpoint.
pub(crate) fn step_of(saved: &Checkpoint) -> Option<u64> {
    saved.settings().get("step")?.parse().ok()
}

fn of_a_run(saved: Checkpoint) -> Result<Checkpoint> {
    match saved.settings().get("format") {
        Some(format) if format == FORMAT => Ok(saved),
        _ => Err(Error::file(saved.path(), "this is no checkpoint of a training run")),
    }
}

/// Whether a run's folder has a checkpoint, complete or damaged.
pub fn is_there(folder: &Path) -> bool {
    let names = [NAME, ".checkpoint.old", BEST, ".best.old"];
    names.iter().any(|name| folder.join(name).exists()) || !earlier(folder).is_empty()
}

/// The checkpoint with the lowest validation loss in a run's folder.
///
/// # Errors
/// If there is none.
pub fn best(folder: &Path) -> Result<Checkpoint> {
    Ok(Checkpoint::open(folder.join(BEST))?)
}

/// A checkpoint of a run's folder.
#[derive(Clone, Debug, PartialEq)]
pub struct Listed {
    /// Its folder.
    pub path: PathBuf,
    /// Steps done.
    pub step: u64,
    /// The validation loss of the best checkpoint; of others, the lowest before them.
    pub best_loss: Option<f64>,
}

/// The complete checkpoints in a run's folder: the earlier ones, the newest, and the best one last. Only their indices are read.
pub fn list(folder: &Path) -> Vec<Listed> {
    let newest = [NAME, BEST].map(|name| folder.join(name));
    let listed = |path: PathBuf| {
        let saved = of_a_run(Checkpoint::open(path).ok()?).ok()?;
        Some(Listed { path: saved.path().into(), step: step_of(&saved)?, best_loss: best_loss(&saved) })
    };
    earlier(folder).into_iter().chain(newest).filter_map(listed).collect()
}

/// The validation loss of the best checkpoint; of others, the lowest before them.
fn best_loss(saved: &Checkpoint) -> Option<f64> {
    let settings = saved.settings();
    settings.get(OWN_LOSS).or_else(|| settings.get("best_loss"))?.parse().ok()
}

/// The step in the name of a checkpoint before the newest one.
fn step_in_name(path: &Path) -> Option<u64> {
    path.file_name()?.to_str()?.strip_prefix("checkpoint-")?.parse().ok()
}

/// The checkpoints before the newest one, in order.
fn earlier(folder: &Path) -> Vec<PathBuf> {
    let mut found: Vec<PathBuf> = entries(folder).filter(|path| step_in_name(path).is_some()).collect();
    found.sort_by_key(|path| step_in_name(path));
    found
}

fn entries(folder: &Path) -> impl Iterator<Item = PathBuf> {
    fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path())
}

/// Whether a path has the name of a checkpoint from which the run does not go on.
fn is_abandoned(path: &Path) -> bool {
    path.file_name().is_some_and(|name| name.to_string_lossy().starts_with(ABANDONED))
}

/// Makes `resumed`, the folder or a checkpoint in it, what the run in the folder goes on from, also if it is killed before it saves or rolls
/// back: checkpoints of later steps are renamed. They are removed when the run has saved one of its own. After `Ok` this is on disk.
pub(crate) fn abandon_later(folder: &Path, resumed: &Path) -> Result<()> {
    if is_checkpoint(resumed) {
        let from = Checkpoint::open(resumed)?;
        let (step, newest) = (step_of(&from), folder.join(NAME));
        // A save that was killed may have left two of the name; one that cannot be read is in the way of an earlier one.
        loop {
            let (path, of) = match Checkpoint::open(&newest) {
                Ok(saved) if same_folder(saved.path(), resumed) => break,
                Ok(saved) if step_of(&saved) == step && !is_abandoned(resumed) => break,
                Ok(saved) => (saved.path().to_path_buf(), step_of(&saved)),
                Err(_) if newest.exists() => (newest.clone(), None),
                Err(_) => break,
            };
            abandon(folder, &path, of, resumed)?;
        }
        let best = Checkpoint::open(folder.join(BEST)).ok().map(|best| (best.path().into(), step_of(&best)));
        let earlier = earlier(folder).into_iter().map(|path| (path.clone(), step_in_name(&path)));
        for (path, of) in earlier.chain(best).filter(|(_, of)| *of > step) {
            abandon(folder, &path, of, resumed)?;
        }
        if is_abandoned(resumed) {
            fs::rename(resumed, &newest).map_err(|e| Error::file(resumed, e))?;
        }
    }
    // A killed run may have renamed the checkpoint that this one goes on from, not yet on disk.
    sync_folder(folder).map_err(|e| Error::file(folder, e))
}

/// The checkpoint of a run's folder that has been resumed, which [`abandon_later`] may have renamed.
pub(crate) fn resumed_in(folder: &Path, resumed: &Path) -> PathBuf {
    if is_abandoned(resumed) { folder.join(NAME) } else { resumed.into() }
}

/// Renames a checkpoint by its step; one that cannot be read has none. It takes the place of another of that name, but not of `resumed`.
fn abandon(folder: &Path, path: &Path, step: Option<u64>, resumed: &Path) -> Result<()> {
    let step = step.map_or("damaged".to_string(), |step| format!("{step:08}"));
    let mut aside = folder.join(format!("{ABANDONED}{step}"));
    if same_folder(&aside, resumed) {
        aside = folder.join(format!("{ABANDONED}{step}-other"));
    }
    let _ = fs::remove_dir_all(&aside);
    fs::rename(path, &aside).map_err(|e| Error::file(path, e))
}

/// What a rank has found where a checkpoint was wanted, for a comparison with other ranks.
pub(crate) fn described(found: &Result<Checkpoint>) -> String {
    match found {
        Ok(saved) => {
            let step = saved.settings().get("step").map_or("unknown", String::as_str);
            format!("step {step} with the index {:016x}", saved.checksum())
        }
        Err(error) => format!("none ({error})"),
    }
}

/// A checkpoint that a rank has found and is about to read, if all ranks have found the same. All ranks call it.
pub(crate) fn agreed(found: Result<Checkpoint>, run: &Run) -> Result<Checkpoint> {
    agree(run.mesh_rank().all_ranks(), &vec![("the checkpoint to read".into(), described(&found))])?;
    found
}

/// Loads a checkpoint's values into the model and its optimizers.
pub(crate) fn load(saved: &Checkpoint, run: &mut Run) -> Result<()> {
    let ranks = run.mesh_rank().all_ranks().clone();
    // One of a run that did not take them from elsewhere has them.
    let frozen = !saved.settings().contains_key(FROZEN_DIGEST);
    let trained = [Trained { frozen, ..Trained::new(&*run.model, &*run.setup.data_parallel) }];
    let mut optimizers: Vec<_> = run.optimizers.iter_mut().collect();
    Ok(saved.restore(&ranks, &trained, &mut optimizers)?)
}

/// Restores a run's state from a checkpoint.
pub(crate) fn restore(
    saved: &Checkpoint,
    run: &mut Run,
    identity: &BTreeMap<String, String>,
) -> Result<Position> {
    let position = position(saved.settings(), saved.path(), run, identity)?;
    load(saved, run)?;
    Ok(position)
}

/// Refuses a checkpoint of a run with other settings.
pub(crate) fn check_identity(
    settings: &BTreeMap<String, String>,
    file: &Path,
    identity: &BTreeMap<String, String>,
) -> Result<()> {
    // A run that began before there was a setting had its default.
    let before = |key: &String| settings.get(key).map_or("default", String::as_str);
    if let Some((key, value)) = identity.iter().find(|(key, value)| before(key) != value.as_str()) {
        let before = before(key);
        let why = format!("the run began with `{key}` {before}, and cannot go on with {value}");
        return Err(Error::file(file, why));
    }
    Ok(())
}

/// The parameters that a run does not train, if they are in no checkpoint of it.
pub(crate) struct FrozenParameters {
    /// The folder from which they are.
    pub folder: PathBuf,
    pub digest: String,
}

/// The digest of frozen parameters, from those of each.
pub(crate) fn frozen_digest(of_each: &BTreeMap<String, u64>) -> String {
    let text: String = of_each.iter().map(|(name, digest)| format!("{name} {digest:016x}\n")).collect();
    format!("{:016x}", crate::digest(text.as_bytes()))
}

/// Refuses a checkpoint without frozen parameters, unless this run has the same ones from elsewhere.
fn check_frozen(
    settings: &BTreeMap<String, String>,
    file: &Path,
    own: Option<&FrozenParameters>,
) -> Result<()> {
    let Some(digest) = settings.get(FROZEN_DIGEST) else { return Ok(()) };
    let folder = settings.get(FROZEN).map_or("", String::as_str);
    let Some(own) = own else {
        return Err(Error::file(
            file,
            format!("it lacks the parameters that are not trained, which are {folder}'s"),
        ));
    };
    if own.digest != *digest {
        let own = own.folder.display();
        let why = format!(
            "the run began with the parameters of {folder} that are not trained, and those of {own} are others"
        );
        return Err(Error::file(file, why));
    }
    Ok(())
}

/// Restores a run's state besides tensors from the settings of a checkpoint, which is at `file`.
pub(crate) fn position(
    settings: &BTreeMap<String, String>,
    file: &Path,
    run: &mut Run,
    identity: &BTreeMap<String, String>,
) -> Result<Position> {
    check_identity(settings, file, identity)?;
    check_frozen(settings, file, run.frozen.as_ref())?;
    let number = |key: &str| settings.get(key).and_then(|number| number.parse().ok());
    let step = number("step").ok_or_else(|| Error::file(file, "the step is missing"))?;
    let best = BestLoss {
        loss: settings.get("best_loss").and_then(|loss| loss.parse().ok()),
        step: number("best_step").unwrap_or(0),
        since: number("best_since").unwrap_or(0) as usize,
    };
    let watched: LossWatchState =
        settings.get("watch").and_then(|watch| serde_json::from_str(watch).ok()).unwrap_or_default();
    run.loss_watch = watched;
    run.dp_before = number("dp").map(|dp| dp as usize);
    let float = |key: &str| settings.get(key).and_then(|number| number.parse::<f64>().ok());
    run.plateau = PlateauState {
        lr_factor: float("rate").unwrap_or(1.0),
        stale: number("rate_stale").unwrap_or(0) as usize,
    };
    if let (Some(scaler), Some(scale)) = (run.scaler, float("loss_scale")) {
        run.scaler = Some(scaler.restored(scale, number("loss_scale_since").unwrap_or(0))?);
    }
    Ok(Position { step, data_ahead: number("data_ahead").unwrap_or(0), best })
}

impl Checkpoints {
    /// Those of a run.
    pub fn new(folder: &Path, config: &Config) -> Checkpoints {
        Checkpoints { folder: folder.into(), keep_last: config.keep_last, has_saved: false }
    }

    /// Begins to write a checkpoint of the run. It is complete once the saver has been waited for. The checkpoint before is kept under the
    /// number of its step, or replaced. `logs` are on disk before it is complete.
    pub fn save(&mut self, run: &Run, logs: Vec<(PathBuf, File)>) -> Result<PathBuf> {
        let path = self.folder.join(NAME);
        run.setup.saver.wait()?;
        if run.mesh_rank().is_first() && std::mem::replace(&mut self.has_saved, true) {
            let remove = |path: PathBuf| fs::remove_dir_all(&path).map_err(|e| Error::file(&path, e));
            entries(&self.folder).filter(|path| is_abandoned(path)).try_for_each(remove)?;
        }
        if self.keep_last > 1 {
            if run.mesh_rank().is_first() {
                self.set_aside(&path)?;
            }
            run.mesh_rank().all_ranks().barrier()?;
        }
        begin(run, &path, logs, None)?;
        Ok(path)
    }

    /// Writes the checkpoint of the lowest validation loss, after a save that is in progress. `logs` are on disk before it is complete.
    pub fn save_best(&self, run: &Run, loss: f64, logs: Vec<(PathBuf, File)>) -> Result<()> {
        begin(run, &self.folder.join(BEST), logs, Some((OWN_LOSS.into(), loss.to_string())))
    }

    /// The validation loss of the best checkpoint in the folder, as the first rank finds it. All ranks call it.
    pub fn best_loss(&self, run: &Run) -> Result<Option<f64>> {
        let own = match run.mesh_rank().is_first() {
            true => best(&self.folder).ok().and_then(|best| best_loss(&best)),
            false => None,
        };
        let first = run.mesh_rank().all_gather(own.unwrap_or(f64::NAN))?.into_iter().next();
        Ok(first.filter(|loss| !loss.is_nan()))
    }

    /// Renames the newest checkpoint by its step, and removes the oldest of those that led to it.
    fn set_aside(&self, path: &Path) -> Result<()> {
        let remove = |path: &Path| fs::remove_dir_all(path).map_err(|e| Error::file(path, e));
        if let Ok(saved) = Checkpoint::open(path) {
            let aside = self.folder.join(format!("checkpoint-{:08}", step_of(&saved).unwrap_or(0)));
            let _ = fs::remove_dir_all(&aside);
            // A run that was killed may have left it under another name, by which it was found.
            fs::rename(saved.path(), &aside).map_err(|e| Error::file(saved.path(), e))?;
        }
        let mut kept = earlier(&self.folder);
        while kept.len() >= self.keep_last {
            remove(&kept.remove(0))?;
        }
        Ok(())
    }
}

fn begin(
    run: &Run,
    path: &Path,
    logs: Vec<(PathBuf, File)>,
    own_loss: Option<(String, String)>,
) -> Result<()> {
    run.setup.saver.sync_first(logs);
    let trained = [run.trained()];
    let optimizers: Vec<_> = run.optimizers.iter().collect();
    let mut settings = run.settings()?;
    settings.extend(own_loss);
    run.setup.saver.save(path, parts(&trained, &optimizers)?, &settings)
}

impl Run {
    /// Restores the run from the newest checkpoint in a folder, which may have been saved under another layout. All ranks call it.
    ///
    /// # Errors
    /// If there is none, it is of another run, or damaged.
    pub fn resume(&mut self, folder: &Path) -> Result<()> {
        let saved = agreed(latest(folder), self)?.require_finite(!self.setup.config.allow_not_finite);
        let position = restore(&saved, self, &self.identity.clone())?;
        self.go_on_at(position)
    }

    /// Sets the run to a position whose state has been restored.
    pub(crate) fn go_on_at(&mut self, position: Position) -> Result<()> {
        (self.done, self.data_ahead, self.best) = (position.step, position.data_ahead, position.best);
        if self.done > self.setup.config.steps {
            let (steps, done) = (self.setup.config.steps, self.done);
            return Err(Error::Config(format!("`steps` {steps} is the total, and the run has done {done}")));
        }
        Ok(())
    }

    /// Loads the checkpoint with the lowest validation loss ([`Config::keep_best`]): weights, averages and moments. All ranks call it.
    ///
    /// # Errors
    /// If there is none, or it is damaged.
    pub fn load_best(&mut self) -> Result<()> {
        self.setup.saver.wait()?;
        let folder = self.setup.config.folder();
        let folder = folder
            .ok_or_else(|| Error::Config("train: a run without a folder keeps no best checkpoint".into()))?;
        let saved = agreed(best(folder), self)?;
        load(&saved, self)
    }

    /// What of the model is in checkpoints.
    pub(crate) fn trained(&self) -> Trained<'_> {
        let trained = Trained::new(&*self.model, &*self.setup.data_parallel);
        if self.frozen.is_some() { trained.without_frozen() } else { trained }
    }

    /// The run's state besides tensors, as a checkpoint stores it.
    pub(crate) fn settings(&self) -> Result<BTreeMap<String, String>> {
        let mut settings = self.identity.clone();
        let watch =
            serde_json::to_string(&self.loss_watch).map_err(|e| Error::data("checkpoint", e.to_string()))?;
        let best = &self.best;
        if let Some(loss) = best.loss {
            settings.insert("best_loss".into(), loss.to_string());
        }
        if let Some(scaler) = self.scaler {
            settings.insert("loss_scale".into(), scaler.scale().to_string());
            settings.insert("loss_scale_since".into(), scaler.steps_since_change().to_string());
        }
        let own = [
            ("format", FORMAT.to_string()),
            ("dp", self.config().layout.dp.to_string()),
            ("step", self.done().to_string()),
            ("data_ahead", self.data_ahead.to_string()),
            ("best_step", best.step.to_string()),
            ("best_since", best.since.to_string()),
            ("watch", watch),
            ("rate", self.plateau.lr_factor.to_string()),
            ("rate_stale", self.plateau.stale.to_string()),
        ];
        settings.extend(own.into_iter().map(|(key, value)| (key.to_string(), value)));
        if let Some(FrozenParameters { folder, digest }) = &self.frozen {
            settings.insert(FROZEN.into(), folder.display().to_string());
            settings.insert(FROZEN_DIGEST.into(), digest.clone());
        }
        Ok(settings)
    }
}

/// Whether two paths are one folder.
pub(crate) fn same_folder(a: &Path, b: &Path) -> bool {
    a == b || a.canonicalize().ok().zip(b.canonicalize().ok()).is_some_and(|(a, b)| a == b)
}
