//! Digests of a step, by which runs are compared bit for bit: [`StepDigests`], the comparison of replicas, and [`Run::replay`].

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::{Path, PathBuf};

use phalanx_nn::Parameters;
use phalanx_parallel::digest::{UnlikeCopies, whole_digests};
use phalanx_parallel::sharded_tensor::ShardedTensor;
use serde::{Deserialize, Serialize};

use super::step::in_step;
use super::training_loop::TrainingLoop;
use crate::config::run_folder;
use crate::run::Run;
use crate::{Config, Error, Result};

/// The digests of a step, as hexadecimal numbers. They do not depend on the layout: the same bits under another layout have the same
/// digests.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct StepDigests {
    /// The bits of the loss.
    pub loss: String,
    /// Of each parameter's gradient before clipping, added over all ranks.
    pub gradients: BTreeMap<String, String>,
    /// Of each parameter after the update.
    pub parameters: BTreeMap<String, String>,
}

/// Digests by name.
type ByName = BTreeMap<String, String>;

impl StepDigests {
    pub(crate) fn new(
        loss: f64,
        gradients: Option<ByName>,
        parameters: Option<ByName>,
    ) -> Option<StepDigests> {
        let loss = format!("{:016x}", loss.to_bits());
        Some(StepDigests { loss, gradients: gradients?, parameters: parameters? })
    }

    /// What differs from another run's digests of this step, the first thing by name; names are searched in this order.
    fn difference(&self, recorded: &StepDigests, order: &[String]) -> Option<String> {
        let unlike = |now: &ByName, before: &ByName| {
            let all = order.iter().chain(now.keys()).chain(before.keys());
            let mut names: Vec<String> = Vec::new();
            for name in all.filter(|name| now.get(*name) != before.get(*name)) {
                if !names.contains(name) {
                    names.push(name.clone());
                }
            }
            names
        };
        let gradients = unlike(&self.gradients, &recorded.gradients);
        let parameters = unlike(&self.parameters, &recorded.parameters);
        let first = match (gradients.first(), parameters.first()) {
            (Some(name), _) => format!("the gradient of {name}"),
            (None, Some(name)) => format!("the updated parameter {name}"),
            (None, None) if self.loss != recorded.loss => "the loss, but no gradient".to_string(),
            (None, None) => return None,
        };
        let loss = if self.loss == recorded.loss { "is the same" } else { "differs" };
        Some(format!(
            "the first difference is in {first}; {} gradients and {} parameters differ, and the loss {loss}",
            gradients.len(),
            parameters.len()
        ))
    }
}

impl Run {
    /// The digests of the gradients, before the update of a step for which digests are due.
    pub(crate) fn gradient_digests(&self, step: u64) -> Result<Option<ByName>> {
        self.digests_of(step, "gradient", || {
            let mut parts = Vec::new();
            for parameter in self.setup.data_parallel.parameters() {
                if let Some(grad) = parameter.finish_grad()? {
                    let values = grad.contiguous()?;
                    parts.push(ShardedTensor { values, ..ShardedTensor::of_parameter(&parameter) });
                }
            }
            Ok(parts)
        })
    }

    /// The digests of the parameters, after the update of a step for which digests are due.
    pub(crate) fn parameter_digests(&self, step: u64) -> Result<Option<ByName>> {
        self.digests_of(step, "parameter", || {
            let parameters = self.model.parameters();
            // A rank under ZeRO-3 keeps its shards only; under ZeRO-1 and 2 it keeps copies, which are compared.
            if parameters.iter().all(|p| p.tensor().why_withheld().is_none()) {
                return Ok(parameters.iter().map(ShardedTensor::of_parameter).collect());
            }
            let parts = self.setup.data_parallel.parts(&*self.model)?;
            Ok(parts.into_iter().filter(|part| !part.buffer).collect())
        })
    }

    fn digests_of(
        &self,
        step: u64,
        what: &str,
        parts: impl FnOnce() -> Result<Vec<ShardedTensor>>,
    ) -> Result<Option<ByName>> {
        let Config { digests, check_replicas, .. } = self.setup.config;
        let due = |every: u64| every > 0 && (step + 1).is_multiple_of(every);
        if !due(digests) && !due(check_replicas) {
            return Ok(None);
        }
        let found = whole_digests(self.mesh_rank.all_ranks(), &parts()?)?;
        if let Some(first) = found.unlike.first().filter(|_| due(check_replicas)) {
            return Err(Error::Config(unlike(what, first, found.unlike.len())));
        }
        let hex = |(name, digest)| (name, format!("{digest:016x}"));
        Ok(due(digests).then(|| found.of.into_iter().map(hex).collect()))
    }
}

/// The message about copies that must be alike.
fn unlike(what: &str, UnlikeCopies { name, odd, alike }: &UnlikeCopies, count: usize) -> String {
    let listed = |ranks: &[usize]| ranks.iter().map(usize::to_string).collect::<Vec<_>>().join(", ");
    let (which, verb) = if odd.len() == 1 { ("rank", "has") } else { ("ranks", "have") };
    let others = match &alike[..] {
        [] => "copies that differ, of which none has a majority".to_string(),
        alike => format!("a copy unlike that of ranks {}", listed(alike)),
    };
    let odd = listed(odd);
    format!(
        "silent data corruption: of {what} {name}, {which} {odd} {verb} {others}; copies of {count} {what}s differ"
    )
}

/// Steps to be repeated.
#[derive(Clone, Debug, PartialEq)]
pub struct Replay {
    /// A run's folder or one of its checkpoints, from which the steps are repeated.
    pub from: PathBuf,
    /// The steps whose digests are compared, counted from 0 as in `metrics.jsonl`.
    pub steps: Range<u64>,
}

impl Replay {
    /// From the words of a command line; the steps are `a..b`.
    ///
    /// # Errors
    /// If one is missing, or the steps are no such range.
    pub fn parse(from: Option<String>, steps: Option<String>) -> Result<Replay> {
        let from = from.ok_or_else(|| Error::Config("replay: got no `from`, wanted a checkpoint".into()))?;
        let text = steps.unwrap_or_default();
        let range = text.split_once("..").and_then(|(a, b)| Some(a.parse().ok()?..b.parse().ok()?));
        match range.filter(|steps: &Range<u64>| !steps.is_empty()) {
            Some(steps) => Ok(Replay { from: from.into(), steps }),
            None => Err(Error::Config(format!("replay: got `steps` {text:?}, wanted a..b with a below b"))),
        }
    }

    /// A file in the folder of the run.
    pub fn file(&self, name: &str) -> PathBuf {
        run_folder(Path::new(&self.from)).join(name)
    }
}

/// The result of [`Run::replay`].
#[derive(Clone, Debug, PartialEq)]
pub struct Replayed {
    /// The steps whose digests were compared.
    pub compared: u64,
    /// The first step that differs, and what differs.
    pub difference: Option<(u64, String)>,
}

impl Replayed {
    /// The result as a sentence.
    ///
    /// # Errors
    /// [`Error::Differs`] if a step differs.
    pub fn check(&self) -> Result<String> {
        let compared = self.compared;
        match &self.difference {
            None => Ok(format!("{compared} steps have the digests that were recorded")),
            Some((step, what)) => Err(Error::Differs(format!("step {step}: {what}"))),
        }
    }
}

impl Run {
    /// Repeats steps from a checkpoint of a run and compares their digests with `recorded` ones, up to the first difference. No file is
    /// written. A learning rate that a plateau lowers behind the checkpoint is not repeated. All ranks call it.
    ///
    /// # Errors
    /// Of a step; if the checkpoint lies behind the first step; or if none of the steps has recorded digests.
    pub fn replay(&mut self, replay: &Replay, recorded: &BTreeMap<u64, StepDigests>) -> Result<Replayed> {
        let Replay { from, steps } = replay;
        if !recorded.keys().any(|step| steps.contains(step)) {
            let why = format!("of the steps {steps:?} none has digests, wanted a run with `digests`");
            return Err(Error::file(&replay.file("metrics.jsonl"), why));
        }
        self.resume(from)?;
        if self.done > steps.start {
            let why = format!("it has done {} steps, wanted at most {}", self.done, steps.start);
            return Err(Error::file(from, why));
        }
        let config = &mut self.setup.config;
        (config.out, config.resume, config.rescue, config.trace) = (None, None, None, None);
        (config.digests, config.check_replicas) = (1, 0);
        self.metrics.clear();
        let order: Vec<String> = self.model.parameters().iter().map(|p| p.name().to_string()).collect();
        let mut repeated = TrainingLoop::new(self, &mut [])?;
        let mut result = Replayed { compared: 0, difference: None };
        while repeated.run.done < steps.end && result.difference.is_none() {
            let step = repeated.run.done;
            in_step(step, repeated.checked_step(step))?;
            repeated.run.done = step + 1;
            let digests = repeated.digests.take();
            if let Some(recorded) = recorded.get(&step).filter(|_| steps.contains(&step)) {
                result.compared += 1;
                let left_out = || Some("it had an update, and is left out now".to_string());
                let difference = digests.map_or_else(left_out, |now| now.difference(recorded, &order));
                result.difference = difference.map(|what| (step, what));
            }
        }
        Ok(result)
    }
}
