//! [`Run::replay`]: repeats steps of a run and compares their digests with those in its metrics.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::{Path, PathBuf};

use phalanx_nn::Parameters;

use super::step::in_step;
use super::training_loop::TrainingLoop;
use crate::config::run_folder;
use crate::record::StepDigests;
use crate::run::Run;
use crate::{Error, Result};

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
        // Digests are of steps that are not captured.
        self.captured = None;
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
        if result.difference.is_some() {
            // The first rank that returns ends the run of all, which all know by then.
            let _ = repeated.run.mesh_rank.all_ranks().barrier();
        }
        Ok(result)
    }
}
