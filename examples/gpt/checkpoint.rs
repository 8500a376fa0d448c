//! The training checkpoint: parameters, optimizer state and where the run is, in one file that is replaced as a whole.
//!
//! A run killed at any moment finds the last complete checkpoint. Its content carries a checksum, so a file that was
//! cut or edited is refused instead of continued from.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use phalanx::nn::models::Decoder;
use phalanx::nn::{Scope, load_state_dict};
use phalanx::tensor::io::{SafeTensors, save_safetensors};
use phalanx::{DType, Device, Tensor};

use crate::train::Run;

/// The file's name in a run's folder.
pub const FILE: &str = "checkpoint.safetensors";
const FORMAT: &str = "phalanx-gpt-1";

/// The state of a run between two steps.
pub struct Checkpoint {
    /// Steps done.
    pub step: u64,
    /// What must agree for a run to be continued: see [`Checkpoint::load`].
    pub run: BTreeMap<String, String>,
    /// Parameters and optimizer state, by name.
    pub tensors: Vec<(String, Tensor)>,
}

impl Checkpoint {
    /// Writes the checkpoint into a run's folder, atomically.
    pub fn save(&self, folder: &Path) -> Result<(), String> {
        let mut metadata = self.run.clone();
        metadata.insert("format".into(), FORMAT.into());
        metadata.insert("step".into(), self.step.to_string());
        let checksum = checksum(&metadata, &self.tensors)?;
        metadata.insert("checksum".into(), checksum);
        let tensors = self.tensors.iter().map(|(name, tensor)| (name.as_str(), tensor));
        save_safetensors(folder.join(FILE), tensors, &metadata).map_err(|e| e.to_string())
    }

    /// Reads the checkpoint of a run's folder.
    pub fn load(folder: &Path) -> Result<Checkpoint, String> {
        let path = folder.join(FILE);
        let wrong = |why: &str| format!("{}: {why}", path.display());
        let file = SafeTensors::open(&path).map_err(|e| e.to_string())?;
        let mut run = file.metadata().clone();
        let stored = run.remove("checksum");
        if run.get("format").is_none_or(|f| f != FORMAT) {
            return Err(wrong("this is no training checkpoint of this program"));
        }
        let tensor =
            |name: &str| Ok((name.to_string(), file.tensor(name, Device::CPU).map_err(|e| e.to_string())?));
        let tensors: Vec<(String, Tensor)> = file.names().map(tensor).collect::<Result<_, String>>()?;
        if stored.as_deref() != Some(&checksum(&run, &tensors)?) {
            return Err(wrong("the checksum does not fit the content; the file was damaged or edited"));
        }
        let step =
            run.remove("step").and_then(|s| s.parse().ok()).ok_or_else(|| wrong("the step is missing"))?;
        run.remove("format");
        Ok(Checkpoint { step, run, tensors })
    }

    /// What a run's checkpoint says of the run, its tensors unread and unchecked.
    pub fn describe(folder: &Path) -> Result<BTreeMap<String, String>, String> {
        let file = SafeTensors::open(folder.join(FILE)).map_err(|e| e.to_string())?;
        Ok(file.metadata().clone())
    }

    /// Refuses to continue a run with other settings than it began with.
    pub fn check_run(&self, folder: &Path, run: &BTreeMap<String, String>) -> Result<(), String> {
        let differing = run.iter().find(|(key, value)| self.run.get(*key) != Some(value));
        match differing {
            None => Ok(()),
            Some((key, value)) => {
                let path: PathBuf = folder.join(FILE);
                let before = self.run.get(key).map_or("(unknown)", String::as_str);
                Err(format!(
                    "{}: the run began with {key} {before}, and cannot go on with {value}",
                    path.display()
                ))
            }
        }
    }
}

/// FNV-1a with 64-bit words (Fowler, Noll, Vo), over everything in the order of names.
fn checksum(metadata: &BTreeMap<String, String>, tensors: &[(String, Tensor)]) -> Result<String, String> {
    let mut hash = 0xcbf2_9ce4_8422_2325_u64;
    let mut add = |bytes: &[u8]| {
        for chunk in bytes.chunks(8) {
            let mut word = [0; 8];
            word[..chunk.len()].copy_from_slice(chunk);
            hash = (hash ^ u64::from_le_bytes(word)).wrapping_mul(0x0000_0100_0000_01b3).rotate_left(23);
        }
        hash ^= bytes.len() as u64;
    };
    for (key, value) in metadata {
        add(key.as_bytes());
        add(value.as_bytes());
    }
    let mut sorted: Vec<_> = tensors.iter().collect();
    sorted.sort_by_key(|(name, _)| name);
    for (name, tensor) in sorted {
        add(name.as_bytes());
        add(format!("{:?} {}", tensor.shape(), tensor.dtype()).as_bytes());
        add(&tensor.to_bytes().map_err(|e| e.to_string())?);
    }
    Ok(format!("{hash:016x}"))
}

/// Puts the run where its checkpoint left it; the steps done.
pub fn resume(folder: &Path, run: &mut Run, settings: &BTreeMap<String, String>) -> Result<u64, String> {
    let saved = Checkpoint::load(folder)?;
    saved.check_run(folder, settings)?;
    let file = folder.join(FILE);
    let named = |e: &dyn std::fmt::Display| format!("{}: {e}", file.display());
    let (model, optimizer): (Vec<_>, Vec<_>) =
        saved.tensors.into_iter().partition(|(name, _)| name.starts_with("model."));
    let strip = |prefix: &'static str| move |(name, t): (String, _)| (name[prefix.len()..].to_string(), t);
    let (model, optimizer) = (
        model.into_iter().map(strip("model.")).collect(),
        optimizer.into_iter().map(strip("optimizer.")).collect(),
    );
    run.share.load_full_state_dict(&*run.model, model).map_err(|e| named(&e))?;
    let optimizer = run.share.part_of_optimizer_state(optimizer).map_err(|e| named(&e))?;
    run.optimizer.load_state_dict(optimizer).map_err(|e| named(&e))?;
    Ok(saved.step)
}

/// Writes a checkpoint of the whole run, on the first rank.
pub fn save(run: &Run, folder: &Path, step: u64, settings: &BTreeMap<String, String>) -> Result<(), String> {
    let named = |prefix: &'static str| move |(name, t)| (format!("{prefix}{name}"), t);
    let whole = || {
        let own = run.optimizer.state_dict()?;
        let optimizer = run.share.full_optimizer_state(own, &run.optimizer.kinds())?;
        Ok::<_, phalanx::parallel::Error>((run.share.full_state_dict(&*run.model)?, optimizer))
    };
    let (model, optimizer) = whole().map_err(|e| e.to_string())?;
    if !run.place.is_first() {
        return Ok(());
    }
    let mut tensors: Vec<_> = model.into_iter().map(named("model.")).collect();
    tensors.extend(optimizer.into_iter().map(named("optimizer.")));
    Checkpoint { step, run: settings.clone(), tensors }.save(folder)
}

/// The whole model, on the first rank. All ranks call it.
pub fn whole(run: &Run) -> Result<Option<Decoder>, String> {
    let entries = run.share.full_state_dict(&*run.model).map_err(|e| e.to_string())?;
    if !run.place.is_first() {
        return Ok(None);
    }
    let dtype = entries.first().map_or(DType::F32, |(_, tensor)| tensor.dtype());
    let model = run.config.init(&Scope::new(0, dtype, run.place.device)).map_err(|e| e.to_string())?;
    load_state_dict(&model, entries).map_err(|e| e.to_string())?;
    Ok(Some(model))
}
