//! [`Trainer`]: a training run as one value, made of a configuration, data and a model.
//!
//! [`Trainer::run`] and [`Trainer::run_layers`] make a [staged model](crate::staged_models) and call [`Trainer::run_parts`]. That starts the
//! ranks ([`launch`](crate::launch)), builds a [`Run`] on each, resumes it, and calls [`Run::train`], the loop over steps.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex};

use phalanx_nn::autograd::Var;
use phalanx_nn::models::FlopsPerToken;
use phalanx_nn::{Batch, Optimizer, Parameter, Parameters, Scope, SequentialConfig};
use phalanx_parallel::checkpoint::MemoryStore;
use phalanx_parallel::hybrid::StagedModel;
use phalanx_parallel::launch::Rank;
use phalanx_parallel::mesh::Axis;
use phalanx_parallel::{agree, same_contents};

use phalanx_tensor::unpoisoned;

use crate::callback::Callback;
use crate::data::{Data, Dataset, Samples, Shuffled};
use crate::folder_lock::FolderLock;
use crate::identity::{facts, fingerprint, fingerprint_of_rows};
use crate::launch::{ranks, start};
use crate::memory_checkpoints::{MemoryCheckpoints, trainer_number};
use crate::mesh_rank::MeshRank;
use crate::record::{Summary, digests_in};
use crate::report::{Profile, Setting};
use crate::reporter::Reporter;
use crate::run::optimizers::{AnyRule, adamw};
use crate::run::replay::{Replay, Replayed};
use crate::run::{Hook, Run, WriteFiles};
use crate::settings::{Keyed, Settings};
use crate::staged_models::{Plain, StagedLayers, check_module};
use crate::trace::Trace;
use crate::{Config, Error, Result, checkpoints};

type MakeOptimizers = dyn Fn(Vec<Parameter>, f64) -> Result<Vec<Optimizer<AnyRule>>> + Send + Sync;
type AtEnd = dyn Fn(&mut Run) -> Result<()> + Send + Sync;

/// A training run: a configuration, data, and at the end a model.
///
/// ```
/// use phalanx_nn::{LinearConfig, Loss, Module, MseLoss, Schedule, tensor::{Device, Tensor}};
/// use phalanx_train::{Config, Trainer, data::TensorDataset};
///
/// let x: Vec<f32> = (0..64).map(|i| i as f32 / 64.0).collect();
/// let y: Vec<f32> = x.iter().map(|x| 3.0 * x - 1.0).collect();
/// let rows = |v: &[f32]| Tensor::from_slice(v, &[64, 1], Device::CPU);
/// let data = TensorDataset::new(vec![rows(&x)?, rows(&y)?])?;
/// let config = Config { steps: 300, batch: 16, lr: Schedule::Constant { lr: 0.05, warmup: 0 }, ..Config::default() };
/// let summary = Trainer::new(config).data(data).run(
///     |scope| Ok(LinearConfig::new(1, 1).init(scope)?),
///     |model, batch| {
///         let [x, y] = batch.vars()?;
///         Ok(MseLoss::default().forward(&model.forward(&x)?, &y)?)
///     },
/// )?;
/// assert!(summary.last_loss < 1e-3, "{}", summary.last_loss);
/// # Ok::<(), phalanx_train::Error>(())
/// ```
#[must_use = "it trains nothing before `run`"]
pub struct Trainer {
    config: Config,
    samples: Option<Arc<dyn Samples>>,
    dataset: Option<Arc<dyn Dataset>>,
    validation: Option<Arc<dyn Dataset>>,
    counted: usize,
    flops: Option<FlopsPerToken>,
    bytes_per_token: Option<f64>,
    optimizers: Arc<MakeOptimizers>,
    callbacks: Vec<Box<dyn Callback>>,
    metrics: Vec<PathBuf>,
    stop: Arc<AtomicBool>,
    hooks: Vec<(u64, Arc<Hook>)>,
    at_end: Vec<Box<AtEnd>>,
    identity: BTreeMap<String, String>,
    /// The report's title.
    name: String,
    /// The settings that the report lists.
    settings: Vec<Setting>,
    extra_files: Vec<Arc<WriteFiles>>,
    frozen_from: Option<PathBuf>,
    /// This process's rank of a process group that the program has joined (`Some(None)` if there is no group); with `None` the trainer joins it.
    process: Option<Option<Rank>>,
    /// Whether the run writes into its folder, which is locked then.
    writes: bool,
    /// The checkpoints that the ranks of this process hold in memory; by default those of the process, if it is a rank.
    held: Option<MemoryCheckpoints>,
}

/// How a rank begins.
struct Start {
    /// Its checkpoints in memory.
    store: MemoryStore,
    /// Whether the ranks meet again after one has died.
    again: bool,
}

/// The name of the file in a run's folder that repeats the run.
const CONFIG: &str = "config.toml";

impl Trainer {
    /// A run with this configuration, which is checked when the run begins.
    pub fn new(config: Config) -> Trainer {
        let settings = Settings::new(config.clone());
        let trainer = Trainer {
            config,
            samples: None,
            dataset: None,
            validation: None,
            counted: 1,
            flops: None,
            bytes_per_token: None,
            optimizers: Arc::new(adamw),
            callbacks: Vec::new(),
            metrics: Vec::new(),
            stop: Arc::default(),
            hooks: Vec::new(),
            at_end: Vec::new(),
            identity: BTreeMap::new(),
            name: "training run".into(),
            settings: Vec::new(),
            extra_files: Vec::new(),
            frozen_from: None,
            process: None,
            writes: true,
            held: None,
        };
        trainer.settings("training run", &settings)
    }

    /// Describes the run by the settings of a program that has more keys than the configuration. The report lists them, and `config.toml`
    /// in the run's folder, by which the run can be repeated, has them. Ranks that are processes refuse to begin if theirs differ.
    pub fn settings<C: Keyed + Default>(self, name: &str, settings: &Settings<C>) -> Trainer {
        let text = settings.to_toml(&["resume"]);
        let write = move |folder: &Path| {
            let write = |file: &mut dyn std::io::Write| file.write_all(text.as_bytes());
            Ok(phalanx_tensor::io::atomic::write(folder.join(CONFIG), write)?)
        };
        Trainer { name: name.into(), settings: settings.listed(), extra_files: vec![Arc::new(write)], ..self }
    }

    /// Writes files into the run's folder before the first step, on the first rank, such as a tokenizer.
    pub fn extra_files(mut self, write: impl Fn(&Path) -> Result<()> + Send + Sync + 'static) -> Trainer {
        self.extra_files.push(Arc::new(write));
        self
    }

    /// Leaves frozen parameters out of checkpoints: they are those of this folder, and the function that makes a rank's part gives them their
    /// values in every start. A checkpoint has the folder and their digest ([`checkpoints::FROZEN`]), and a run with others refuses it.
    pub fn frozen_from(self, folder: impl Into<PathBuf>) -> Trainer {
        Trainer { frozen_from: Some(folder.into()), ..self }
    }

    /// A setting that must be equal when the run is resumed, besides the data and the configuration's batch, seed and dtypes. The sizes
    /// of a model are such.
    pub fn identity(mut self, key: impl Into<String>, value: impl ToString) -> Trainer {
        self.identity.insert(key.into(), value.to_string());
        self
    }

    /// Sets the floating-point operations of a row (or token), forward and backward, so that records have the share of the machine's peak
    /// that is used (MFU), and with Megatron-LM's formula the rate of FLOP/s.
    pub fn flops(self, flops: impl Into<FlopsPerToken>) -> Trainer {
        Trainer { flops: Some(flops.into()), ..self }
    }

    /// Sets the average bytes of text in a language model's token. The report then shows losses in nats a byte.
    pub fn bytes_per_token(self, bytes: impl Into<Option<f64>>) -> Trainer {
        Trainer { bytes_per_token: bytes.into(), ..self }
    }

    /// Runs as a rank of the process group that [`start`] has joined. Without it the trainer joins the group itself.
    pub fn in_process_group(self, process: Option<&Rank>) -> Trainer {
        Trainer { process: Some(process.cloned()), ..self }
    }

    /// Holds the checkpoints in memory ([`Config::memory_checkpoint_every`]) here, and goes on from them if they are of this run. Without it
    /// only processes that a launcher has started anew go on from memory. A program that runs ranks as threads, and runs them again when one has
    /// failed, keeps this.
    pub fn memory_checkpoints(self, held: &MemoryCheckpoints) -> Trainer {
        Trainer { held: Some(held.clone()), ..self }
    }

    /// Trains and validates on this data.
    pub fn sources(self, data: Data) -> Trainer {
        let Data { samples, counted, validation } = data;
        Trainer { samples: Some(samples), dataset: None, counted, validation, ..self }
    }

    /// Trains on these items, in an order that is drawn for each epoch by the configuration's seed.
    pub fn data(self, dataset: impl Dataset + 'static) -> Trainer {
        Trainer { dataset: Some(Arc::new(dataset)), samples: None, ..self }
    }

    /// Trains on an endless sequence, each of whose samples counts `counted` times in the mean loss: once, or as many tokens as it has.
    pub fn samples(self, samples: impl Samples + 'static, counted: usize) -> Trainer {
        Trainer { samples: Some(Arc::new(samples)), dataset: None, counted, ..self }
    }

    /// Measures the loss over these items, which are not trained on, every [`Config::validate_every`] steps and at the end.
    pub fn validation(self, dataset: impl Dataset + 'static) -> Trainer {
        Trainer { validation: Some(Arc::new(dataset)), ..self }
    }

    /// Reads items on this many threads of each rank; with 0 on the rank's own thread.
    pub fn workers(mut self, workers: usize) -> Trainer {
        self.config.workers = workers;
        self
    }

    /// Updates parameters by the optimizers that `make` builds from a rank's parameters and the schedule's highest rate. The default is
    /// [`adamw`]. A group's rate follows the schedule, and is the group's own rate at the schedule's peak.
    pub fn optimizers(
        self,
        make: impl Fn(Vec<Parameter>, f64) -> Result<Vec<Optimizer<AnyRule>>> + Send + Sync + 'static,
    ) -> Trainer {
        Trainer { optimizers: Arc::new(make), ..self }
    }

    /// Adds a callback, which is called on the first rank.
    pub fn callback(mut self, callback: impl Callback + 'static) -> Trainer {
        self.callbacks.push(Box::new(callback));
        self
    }

    /// A file that gets a line for each step of this process. Unlike it, `metrics.jsonl` in the run's folder is continued after a resume.
    pub fn metrics(mut self, path: impl Into<PathBuf>) -> Trainer {
        self.metrics.push(path.into());
        self
    }

    /// Ends the run after its current step, with a checkpoint, when this is set. A pipeline without flushes goes on to its next checkpoint
    /// or validation.
    pub fn stop_when(self, stop: Arc<AtomicBool>) -> Trainer {
        Trainer { stop, ..self }
    }

    /// Resumes the run in the configuration's folder if it has a checkpoint, and begins a new run if not.
    pub fn resume_if_there(mut self) -> Trainer {
        if self.config.resume.is_none() && self.config.out.as_deref().is_some_and(checkpoints::is_there) {
            self.config.resume = self.config.out.clone();
        }
        self
    }

    /// Calls `work` on every rank every `steps` steps and after the last, to measure an accuracy or to let a model write. Callbacks get the
    /// text that the first rank returns ([`Event::Sample`](crate::Event::Sample)).
    pub fn every(
        mut self,
        steps: u64,
        work: impl Fn(&Run) -> Result<Option<String>> + Send + Sync + 'static,
    ) -> Trainer {
        self.hooks.push((steps, Arc::new(work)));
        self
    }

    /// Calls `work` on every rank after training. There [`Run::full_state_dict`] has the model's values.
    pub fn at_end(mut self, work: impl Fn(&mut Run) -> Result<()> + Send + Sync + 'static) -> Trainer {
        self.at_end.push(Box::new(work));
        self
    }

    /// Trains a module that is whole on every rank (ZeRO may shard it), by the mean loss of a batch's rows.
    ///
    /// # Errors
    /// If settings or the data do not fit, or an error of a rank.
    pub fn run<M: Parameters + Send + Sync + 'static>(
        self,
        model: impl Fn(&Scope) -> Result<M> + Sync,
        loss: impl Fn(&M, &Batch) -> Result<Var> + Clone + Send + Sync + 'static,
    ) -> Result<Summary> {
        let (tp, pp) = (self.config.layout.tp, self.config.layout.pp);
        if tp * pp > 1 {
            let why = "a plain module is whole on every rank; `run_layers` cuts a `Sequential` over pp, `run_parts` anything";
            return Err(Error::Config(format!("train: got tp {tp} x pp {pp}, wanted 1 x 1: {why}")));
        }
        check_module(&self.config, &self.run_data()?)?;
        let (config, counted) = (self.config.clone(), self.counted);
        self.run_parts(|mesh_rank| {
            Ok(Plain { model: model(&mesh_rank.scope(&config))?, loss: loss.clone(), counted })
        })
    }

    /// Trains a sequence of layers, cut into the pipeline's stages, by the mean loss of a batch's rows, which `loss` computes from the last
    /// layer's output. Each layer is a unit for ZeRO.
    ///
    /// # Errors
    /// If settings do not fit, or an error of a rank.
    pub fn run_layers(
        self,
        layers: impl Fn() -> SequentialConfig + Sync,
        loss: impl Fn(&Var, &Batch) -> Result<Var> + Clone + Send + Sync + 'static,
    ) -> Result<Summary> {
        let tp = self.config.layout.tp;
        if tp > 1 {
            let why = "layers are not cut by themselves; `run_parts` takes a model whose layers are";
            return Err(Error::Config(format!("train: got tp {tp}, wanted 1: {why}")));
        }
        check_module(&self.config, &self.run_data()?)?;
        let (config, counted) = (self.config.clone(), self.counted);
        self.run_parts(|mesh_rank| {
            let (layout, rank) = (&config.layout, mesh_rank.groups.along(Axis::Pp).rank());
            StagedLayers::build(&layers, &mesh_rank.scope(&config), layout, rank, loss.clone(), counted)
        })
    }

    /// Trains a model of which each rank builds its part.
    ///
    /// # Errors
    /// If settings do not fit, or an error of a rank.
    pub fn run_parts<P: StagedModel>(
        mut self,
        part: impl Fn(&MeshRank) -> Result<P> + Sync,
    ) -> Result<Summary> {
        if self.config.folder().is_some() {
            let reporter = self.reporter();
            self.callbacks.push(Box::new(reporter));
        }
        let callbacks = Mutex::new(std::mem::take(&mut self.callbacks));
        let at_end = std::mem::take(&mut self.at_end);
        let summaries = self.on_ranks(part, |mut run, start| {
            run.begin_or_go_on(&start.store, start.again)?;
            run.hold_in(start.store)?;
            // If the ranks meet again after one has died, the callbacks are started again.
            let summary = match run.mesh_rank().is_first() {
                true => run.train(&mut unpoisoned(callbacks.lock())),
                false => run.train(&mut []),
            }?;
            if !run.meets_again {
                at_end.iter().try_for_each(|work| work(&mut run))?;
            }
            Ok(summary)
        })?;
        summaries.into_iter().next().ok_or_else(|| Error::Config("train: there is no rank".into()))
    }

    /// The memory reports of a step on a meta device ([`Run::memory_report`]): of one rank, or of one rank of each pipeline stage.
    ///
    /// # Errors
    /// As [`Trainer::run_parts`].
    pub fn memory<P: StagedModel>(
        mut self,
        part: impl Fn(&MeshRank) -> Result<P> + Sync,
    ) -> Result<Vec<String>> {
        // A device without elements validates nothing.
        self.validation = None;
        self.on_ranks(part, |mut run, _| run.memory_report())
    }

    /// Trains `steps` steps, at most as many as the configuration has, and returns the time of each operation on every rank. The process
    /// of the first rank gets the profile, others get `None`. The report in the run's folder has the table too. See [`Run::profile`].
    ///
    /// # Errors
    /// As [`Trainer::run_parts`] and [`Run::profile`].
    pub fn profile<P: StagedModel>(
        mut self,
        steps: u64,
        part: impl Fn(&MeshRank) -> Result<P> + Sync,
    ) -> Result<Option<Profile>> {
        let reporter = Mutex::new(Some(self.reporter()));
        let (resume, steps) = (self.config.resume.clone(), steps.min(self.config.steps));
        let profiles = self.on_ranks(part, |mut run, _| {
            if let Some(folder) = &resume {
                run.resume(folder)?;
            }
            let profile = run.profile(steps)?;
            if !run.mesh_rank().is_first() {
                return Ok(None);
            }
            let reporter = unpoisoned(reporter.lock()).take();
            reporter.map_or(Ok(()), |reporter| reporter.profiled(&run, &profile))?;
            Ok(Some(profile))
        })?;
        Ok(profiles.into_iter().flatten().next())
    }

    /// Repeats steps of an earlier run from one of its checkpoints, under any layout that adds in the same order, and compares them with the
    /// digests in its `metrics.jsonl` ([`Run::replay`]). Ranks need a disk in common.
    ///
    /// # Errors
    /// As [`Trainer::run_parts`] and [`Run::replay`].
    pub fn replay<P: StagedModel>(
        mut self,
        replay: &Replay,
        part: impl Fn(&MeshRank) -> Result<P> + Sync,
    ) -> Result<Replayed> {
        let recorded = digests_in(&replay.file("metrics.jsonl"));
        (self.config.trace, self.writes) = (None, false);
        self.config.steps = self.config.steps.max(replay.steps.end);
        let all = self.on_ranks(part, |mut run, _| run.replay(replay, &recorded))?;
        all.into_iter().next().ok_or_else(|| Error::Config("train: there is no rank".into()))
    }

    /// The callback that writes the report.
    fn reporter(&self) -> Reporter {
        let reporter = Reporter::new(&self.name, &self.config, self.settings.clone());
        match self.bytes_per_token {
            Some(bytes) => reporter.of_bytes(bytes),
            None if self.counted > 1 => reporter.of_tokens(),
            None => reporter,
        }
    }

    /// Starts the ranks, builds a run on every rank of this process, and calls `work` with it.
    fn on_ranks<P: StagedModel, T: Send>(
        &mut self,
        part: impl Fn(&MeshRank) -> Result<P> + Sync,
        work: impl Fn(Run, Start) -> Result<T> + Sync,
    ) -> Result<Vec<T>> {
        self.config.check()?;
        let data = self.run_data()?;
        let mut identity = std::mem::take(&mut self.identity);
        identity.entry("data".into()).or_insert_with(|| fingerprint(&data, self.dataset.as_deref()));
        let Trainer { config, settings, optimizers, metrics, stop, hooks, extra_files, .. } = self;
        let (flops, process, writes, frozen) = (self.flops, &self.process, self.writes, &self.frozen_from);
        let (config, settings, optimizers) = (&*config, &**settings, &**optimizers);
        let (metrics, stop, hooks, extra_files) = (&*metrics, &*stop, &*hooks, &*extra_files);
        let periods: Vec<u64> = hooks.iter().map(|(steps, _)| *steps).collect();
        let given = self.held.clone();
        let run = |process: Option<&Rank>| {
            let config = &config.for_process(process)?;
            config.check()?;
            let again = process.is_some_and(|rank| rank.epoch() > 0);
            let trainer = process.map(|rank| trainer_number(rank.epoch()));
            let held = given.clone().unwrap_or_else(|| match process {
                Some(_) => MemoryCheckpoints::of_process(),
                None => MemoryCheckpoints::default(),
            });
            if given.is_none() && !again {
                // Those of an earlier run.
                held.clear();
            }
            let processes = process.map(Rank::comm);
            let is_first = processes.is_none_or(|comm| comm.rank() == 0);
            let written = config.folder().filter(|_| is_first && writes && !config.device.is_meta());
            // Until the run has ended.
            let _lock = written.map(FolderLock::take).transpose()?;
            if let Some(comm) = processes {
                // A process that has been started again may find a checkpoint to resume where the others found none.
                let out = config.folder().map(Path::to_path_buf);
                let fresh = Config { resume: None, out, ..config.clone() };
                let config = if again { &fresh } else { config };
                agree(comm, &facts(config, settings, &identity))?;
                // The configuration has settings without a key too, and the trainer has more than the configuration.
                let validated = data.validation.as_deref().map(fingerprint_of_rows);
                let more = format!("{periods:?}, {validated:?}, {}", config.trace.is_some());
                let more = ("calls, validation rows and trace".to_string(), more);
                agree(comm, &vec![("the configuration".into(), config.in_common()), more])?;
                let validation = data.validation.as_ref().map(Dataset::contents);
                let contents = [data.samples.contents(), validation.unwrap_or_default()].concat();
                same_contents(comm, "the digest of the data", &contents)?;
            }
            let trace = Trace::new(config, processes)?;
            let done = ranks(config, process, |mesh_rank| {
                let rank_trace = trace.rank(mesh_rank.rank());
                let mesh_rank = mesh_rank.observed(rank_trace.observer())?;
                let model = part(&mesh_rank)?;
                let mut run = Run::new(config, mesh_rank, rank_trace, model, data.clone(), optimizers)?
                    .with_metrics(metrics.to_vec())
                    .with_stop(stop.clone());
                run.flops = flops;
                run.identity.extend(identity.clone());
                run.hooks.extend(hooks.iter().cloned());
                run.extra_files.extend(extra_files.iter().cloned());
                run.leave_out_frozen(frozen.as_deref())?;
                run.admit_others(process);
                let number = trainer.unwrap_or(run.mesh_rank.rank());
                work(run, Start { store: held.of(number), again })
            })?;
            trace.finish(processes)?;
            if process.is_none() {
                // A process keeps them until it ends, since another rank may still die.
                held.clear();
            }
            Ok(done)
        };
        match process {
            Some(process) => run(process.as_ref()),
            None => start(config, |_| {}, run),
        }
    }

    /// The training samples and the validation data.
    fn run_data(&self) -> Result<Data> {
        let samples: Arc<dyn Samples> = match (&self.samples, &self.dataset) {
            (Some(samples), _) => samples.clone(),
            (None, Some(dataset)) => Arc::new(Shuffled::new(dataset.clone(), self.config.seed)?),
            (None, None) => {
                return Err(Error::Config(
                    "train: there is nothing to train on; wanted `data` or `samples`".into(),
                ));
            }
        };
        Ok(Data { samples, counted: self.counted, validation: self.validation.clone() })
    }
}
