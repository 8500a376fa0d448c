//! [`Trainer`]: a training run as one value, for whoever does not need its parts.

use std::path::PathBuf;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, PoisonError};

use phalanx_nn::autograd::Var;
use phalanx_nn::{Batch, Optimizer, Parameter, Parameters, Scope, SequentialConfig};
use phalanx_parallel::hybrid::Part;
use phalanx_parallel::mesh::Axis;

use crate::callback::Callback;
use crate::data::{Dataset, Samples, Shuffled};
use crate::means::Data;
use crate::model::{Layers, Plain};
use crate::optimizers::{AnyRule, adamw};
use crate::place::{Place, ranks, start};
use crate::record::Summary;
use crate::reporter::Reporter;
use crate::run::{Hook, Run};
use crate::trace::Trace;
use crate::{Config, Error, Result, checkpoints};

type MakeOptimizers = dyn Fn(Vec<Parameter>, f64) -> Result<Vec<Optimizer<AnyRule>>> + Send + Sync;
type Each = dyn Fn(&mut Run) -> Result<()> + Send + Sync;

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
    workers: usize,
    optimizers: Arc<MakeOptimizers>,
    callbacks: Vec<Box<dyn Callback>>,
    metrics: Vec<PathBuf>,
    stop: Arc<AtomicBool>,
    hooks: Vec<(u64, Arc<Hook>)>,
    each: Vec<Box<Each>>,
}

impl Trainer {
    /// Of that configuration, which is checked when the run begins.
    pub fn new(config: Config) -> Trainer {
        Trainer {
            config,
            samples: None,
            dataset: None,
            validation: None,
            counted: 1,
            workers: 1,
            optimizers: Arc::new(adamw),
            callbacks: Vec::new(),
            metrics: Vec::new(),
            stop: Arc::default(),
            hooks: Vec::new(),
            each: Vec::new(),
        }
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

    /// Reads items on so many threads a rank; with 0 on the rank's own.
    pub fn workers(self, workers: usize) -> Trainer {
        Trainer { workers, ..self }
    }

    /// Updates parameters by the optimizers that this makes of a rank's parameters and the schedule's highest rate; without it
    /// [`adamw`]. A group's rate follows the schedule: at its peak it is what the group was given.
    pub fn optimizers(
        self,
        make: impl Fn(Vec<Parameter>, f64) -> Result<Vec<Optimizer<AnyRule>>> + Send + Sync + 'static,
    ) -> Trainer {
        Trainer { optimizers: Arc::new(make), ..self }
    }

    /// Lets somebody hear of the run.
    pub fn callback(mut self, callback: impl Callback + 'static) -> Trainer {
        self.callbacks.push(Box::new(callback));
        self
    }

    /// A file that gets a line for each step of this process, unlike `metrics.jsonl` in the run's folder, which goes on after a resume.
    pub fn metrics(mut self, path: impl Into<PathBuf>) -> Trainer {
        self.metrics.push(path.into());
        self
    }

    /// Ends the run after the step under way, with a checkpoint, when this is set. A pipeline without flushes goes on to its next
    /// checkpoint or validation.
    pub fn stop_when(self, stop: Arc<AtomicBool>) -> Trainer {
        Trainer { stop, ..self }
    }

    /// Goes on with the run in the configuration's folder if it has a checkpoint, and begins one if not.
    pub fn resume_if_there(mut self) -> Trainer {
        if self.config.resume.is_none() && self.config.out.as_deref().is_some_and(checkpoints::is_there) {
            self.config.resume = self.config.out.clone();
        }
        self
    }

    /// Does something on every rank after every so many steps, and after the last: measures an accuracy, lets a model write. What the
    /// first rank returns is told to callbacks ([`Event::Sample`](crate::Event::Sample)).
    pub fn every(
        mut self,
        steps: u64,
        work: impl Fn(&Run) -> Result<Option<String>> + Send + Sync + 'static,
    ) -> Trainer {
        self.hooks.push((steps, Arc::new(work)));
        self
    }

    /// Does something on every rank when training is over: [`Run::full_state_dict`] has the model's values.
    pub fn at_end(mut self, work: impl Fn(&mut Run) -> Result<()> + Send + Sync + 'static) -> Trainer {
        self.each.push(Box::new(work));
        self
    }

    /// Trains a module, which is whole on every rank (ZeRO apart), by the mean loss of a batch's rows.
    ///
    /// # Errors
    /// If settings do not fit, or what goes wrong on a rank.
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
        let (config, counted) = (self.config.clone(), self.counted);
        self.run_parts(|place| {
            Ok(Plain { model: model(&place.scope(&config))?, loss: loss.clone(), counted })
        })
    }

    /// Trains layers that come one after the other, cut into the pipeline's stages, by the mean loss of a batch's rows, of which it is
    /// given the output. Each layer is a unit for ZeRO.
    ///
    /// # Errors
    /// If settings do not fit, or what goes wrong on a rank.
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
        let (config, counted) = (self.config.clone(), self.counted);
        self.run_parts(|place| {
            let (schedule, rank) = (config.layout.schedule()?, place.groups.along(Axis::Pp).rank());
            Layers::build(&layers, &place.scope(&config), &schedule, rank, loss.clone(), counted)
        })
    }

    /// Trains whatever each rank makes its part of.
    ///
    /// # Errors
    /// If settings do not fit, or what goes wrong on a rank.
    pub fn run_parts<P: Part>(self, part: impl Fn(&Place) -> Result<P> + Sync) -> Result<Summary> {
        self.config.check()?;
        let data = self.sources()?;
        let Trainer { config, optimizers, callbacks, metrics, stop, hooks, each, .. } = self;
        let callbacks = Mutex::new(callbacks);
        let summaries = start(
            &config,
            |_| {},
            |process| {
                let processes = process.map(phalanx_parallel::launch::Rank::comm);
                let trace = Trace::new(&config, processes)?;
                let summaries = ranks(&config, process, |place| {
                    if process.is_some() {
                        place.agree(&config.in_common())?;
                    }
                    let lane = trace.lane(place.rank());
                    let place = place.observed(lane.observer())?;
                    let model = part(&place)?;
                    let run = Run::new(&config, place, lane, model, data.clone(), &*optimizers)?;
                    let mut run = run.with_metrics(metrics.clone()).with_stop(stop.clone());
                    run.hooks.extend(hooks.iter().cloned());
                    if let Some(folder) = &config.resume {
                        run.resume(folder)?;
                    }
                    let mut own = match run.place().is_first() {
                        true => {
                            std::mem::take(&mut *callbacks.lock().unwrap_or_else(PoisonError::into_inner))
                        }
                        false => Vec::new(),
                    };
                    if config.folder().is_some() && run.place().is_first() {
                        own.push(Box::new(Reporter::new("training run", &config, config.settings())));
                    }
                    let summary = run.train(&mut own)?;
                    each.iter().try_for_each(|work| work(&mut run))?;
                    Ok(summary)
                })?;
                trace.finish(processes)?;
                Ok(summaries)
            },
        )?;
        summaries.into_iter().next().ok_or_else(|| Error::Config("train: there is no rank".into()))
    }

    fn sources(&self) -> Result<Data> {
        let samples: Arc<dyn Samples> = match (&self.samples, &self.dataset) {
            (Some(samples), _) => samples.clone(),
            (None, Some(dataset)) => Arc::new(Shuffled::new(dataset.clone(), self.config.seed)?),
            (None, None) => {
                return Err(Error::Config(
                    "train: there is nothing to train on; wanted `data` or `samples`".into(),
                ));
            }
        };
        let (counted, validation, workers) = (self.counted, self.validation.clone(), self.workers);
        Ok(Data { samples, counted, validation, workers })
    }
}
