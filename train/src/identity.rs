//! The identity of a run: settings and a fingerprint of the data, by which a checkpoint of another run is refused; and [`facts`], in
//! which all ranks of a run must agree.

use std::collections::BTreeMap;

use phalanx_parallel::{Facts, digest_of};
use phalanx_tensor::Tensor;

use crate::checkpoints::{described, latest};
use crate::data::{Data, Dataset};
use crate::report::Setting;
use crate::{Config, Keyed};

/// The settings that change a run's numbers by more than the order of additions, which depends on the layout.
pub(crate) fn identity(config: &Config) -> BTreeMap<String, String> {
    let pairs = [
        ("batch", config.batch.to_string()),
        ("seed", config.seed.to_string()),
        ("dtype", config.dtype.to_string()),
        ("grad-dtype", config.grad_dtype().to_string()),
    ];
    pairs.into_iter().map(|(name, value)| (name.to_string(), value)).collect()
}

/// The keys of settings that may differ between ranks, or that [`facts`] has in another form.
const OWN: [&str; 10] = [
    "resume",
    "out",
    "trace",
    "device",
    "threads",
    "workers",
    "timeout",
    "join-timeout",
    "offload-dir",
    "plan",
];
/// The same of programs' keys: where a rank finds its files, whose contents are compared, and what the first rank says.
const OWN_OF_PROGRAMS: [&str; 6] = ["data", "validation", "init", "metrics", "prompt", "quiet"];

/// What decides a run's bits, and the folder into which all ranks write: ranks compare it before the first step. `settings` are those of
/// the program, of which the configuration's are a part.
///
/// The bits of a sum depend on the instruction set. Ranks that differ in it would update their replicas differently.
pub(crate) fn facts(config: &Config, settings: &[Setting], identity: &BTreeMap<String, String>) -> Facts {
    let program = std::env::current_exe().and_then(|path| digest_of(&[path]));
    let program = program.map_or_else(|e| format!("unknown: {e}"), |(digest, _)| format!("{digest:016x}"));
    let isa = phalanx_kernels::checked_isa().map_or_else(|e| e.to_string(), |isa| isa.name().into());
    let device = config.device.to_string();
    let kind = device.split(':').next().unwrap_or_default();
    let mut facts = vec![
        ("the program".into(), format!("{} of {program}", env!("CARGO_PKG_VERSION"))),
        ("the instruction set".into(), isa),
        ("`device`".into(), kind.into()),
    ];
    let keys = Config::keys();
    let is_of_program = |name: &str| {
        !OWN_OF_PROGRAMS.contains(&name)
            && !identity.contains_key(name)
            && !keys.iter().any(|key| key.name == name)
    };
    let compared = keys.iter().filter(|key| !OWN.contains(&key.name));
    facts.extend(compared.filter_map(|key| Some((format!("`{}`", key.name), key.text(config)?))));
    let of_program = settings.iter().filter(|setting| is_of_program(&setting.key));
    facts.extend(of_program.map(|setting| (format!("`{}`", setting.key), setting.value.clone())));
    let none = || "none".to_string();
    facts.push(("`out`".into(), config.folder().map_or_else(none, |folder| folder.display().to_string())));
    let resumed = config.resume.as_deref().map(|folder| described(&latest(folder)));
    facts.push(("the checkpoint to `resume`".into(), resumed.unwrap_or_else(none)));
    facts.extend(identity.iter().map(|(name, value)| (format!("`{name}`"), value.clone())));
    facts
}

/// A fingerprint of the data: the number of a data set's items, and a hash of the first samples.
pub(crate) fn fingerprint(data: &Data, items: Option<&dyn Dataset>) -> String {
    // A sample that cannot be read is an error of its step, not of the fingerprint.
    let hash = hash_of((0..2).filter_map(|number| data.samples.sample(number).ok()));
    items.map_or_else(|| hash.clone(), |items| format!("{} items, {hash}", items.len()))
}

/// The number of validation rows, and a hash of the first and the last.
pub(crate) fn fingerprint_of_rows(rows: &dyn Dataset) -> String {
    let ends = [0, rows.len().saturating_sub(1)];
    format!("{} {}", rows.len(), hash_of(ends.iter().filter_map(|row| rows.item(*row, 0).ok())))
}

fn hash_of(samples: impl Iterator<Item = Vec<Tensor>>) -> String {
    let bytes = |tensor: &Tensor| format!("{} {:?} {:?}", tensor.dtype(), tensor.shape(), tensor.to_bytes());
    let text: String = samples.flatten().map(|tensor| bytes(&tensor)).collect();
    format!("{:016x}", digest(text.as_bytes()))
}

/// A 64-bit fingerprint of some bytes: their hash FNV-1a.
pub fn digest(bytes: &[u8]) -> u64 {
    phalanx_nn::fnv1a(bytes.iter().copied())
}
