//! Where a run is: its checkpoint in the run's folder, written by all ranks while they go on, and read by any others.
//!
//! A run killed at any moment finds the last complete checkpoint.

use std::collections::BTreeMap;
use std::path::Path;

use phalanx::DType;
use phalanx::nn::models::Decoder;
use phalanx::nn::{Parameter, Parameters, Scope, load_state_dict};
use phalanx::parallel::checkpoint::{Checkpoint, Trained, parts};
use phalanx::parallel::tensor_parallel::gather_parameters;

use crate::build::Run;

/// The checkpoint's name in a run's folder.
pub const NAME: &str = "checkpoint";
const FORMAT: &str = "phalanx-gpt-2";

/// What a run says of itself.
pub type Settings = BTreeMap<String, String>;

/// A run's checkpoint, its index read and the rest not.
pub fn open(folder: &Path) -> Result<Checkpoint, String> {
    let saved = Checkpoint::open(folder.join(NAME)).map_err(|e| e.to_string())?;
    match saved.settings().get("format") {
        Some(format) if format == FORMAT => Ok(saved),
        _ => Err(format!("{}: this is no checkpoint of this program", saved.path().display())),
    }
}

/// Puts the run where its checkpoint left it, whatever the layout it was saved under; the steps done.
pub fn resume(folder: &Path, run: &mut Run, settings: &Settings) -> Result<u64, String> {
    let saved = open(folder)?;
    let file = saved.path().display().to_string();
    if let Some((key, value)) = settings.iter().find(|(key, value)| saved.settings().get(*key) != Some(value))
    {
        let before = saved.settings().get(key).map_or("(unknown)", String::as_str);
        return Err(format!("{file}: the run began with {key} {before}, and cannot go on with {value}"));
    }
    let step = saved.settings().get("step").and_then(|step| step.parse().ok());
    let step = step.ok_or_else(|| format!("{file}: the step is missing"))?;
    let trained = [Trained { model: &*run.model, share: &*run.share }];
    saved.restore(run.place.all_ranks(), &trained, &mut [&mut run.optimizer]).map_err(|e| e.to_string())?;
    Ok(step)
}

/// Begins to write a checkpoint of the whole run; it is complete when the saver has waited for it.
pub fn save(run: &Run, folder: &Path, step: u64, settings: &Settings) -> Result<(), String> {
    let mut settings = settings.clone();
    settings.insert("format".into(), FORMAT.into());
    settings.insert("step".into(), step.to_string());
    let trained = [Trained { model: &*run.model, share: &*run.share }];
    let begin = || run.saver.save(&folder.join(NAME), parts(&trained, &[&run.optimizer])?, &settings);
    begin().map_err(|e| e.to_string())
}

/// The whole model, on the first rank. All ranks call it.
pub fn whole(run: &Run) -> Result<Option<Decoder>, String> {
    let gather = || {
        let _values = run.share.gathered()?;
        let groups = &run.place.groups;
        // The other replicas have the same.
        if groups.at().dp > 0 {
            return Ok(None);
        }
        let parameters = run.model.parameters();
        let entries = gather_parameters(&parameters, groups.model())?;
        if !run.place.is_first() {
            return Ok(None);
        }
        let dtype = parameters.first().map_or(DType::F32, Parameter::dtype);
        let model = run.config.init(&Scope::new(0, dtype, run.place.device))?;
        load_state_dict(&model, entries)?;
        Ok::<_, phalanx::parallel::Error>(Some(model))
    };
    gather().map_err(|e| e.to_string())
}
