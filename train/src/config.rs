//! [`Config`]: how a run trains, whatever it trains.

use std::path::PathBuf;

use phalanx_nn::Schedule;
use phalanx_parallel::hybrid::Layout;
use phalanx_tensor::{DType, Device};

use crate::{Error, Result};

/// How a run trains. The defaults are one rank on the CPU, without validation and without files.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    /// Optimizer steps in all, those before a resume included.
    pub steps: u64,
    /// Rows of the global batch of a step.
    pub batch: usize,
    /// Seed of initial weights, dropout and the order of the data.
    pub seed: u64,
    /// The learning rate of each step.
    pub lr: Schedule,
    /// Largest global gradient norm; none for no clipping.
    pub clip: Option<f64>,
    /// Type of weights and activations. Floating-point numbers of batches are converted to it.
    pub dtype: DType,
    /// Type of accumulated gradients; f32 if absent (f64 in an f64 run).
    pub grad_dtype: Option<DType>,
    /// What a rank computes on; several ranks of this process take a device of that kind each.
    pub device: Device,
    /// Threads of a rank; cores / ranks if absent.
    pub threads: Option<usize>,
    /// Ranks along each axis, the pipeline's schedule, micro-batches.
    pub layout: Layout,
    /// What data-parallel ranks share out: nothing (0), optimizer state (1), gradients too (2), parameters too (3).
    pub zero: u8,
    /// Whether some parameters may get no gradient in a step, which replicas then agree on.
    pub find_unused: bool,
    /// Add gradients in the order in which that many data-parallel ranks would.
    pub chains: usize,
    /// A pipeline without flushes between steps, with the layout's micro-batches an update.
    pub asynchronous: Option<Asynchronous>,
    /// How ranks talk; threads of this process if absent, or TCP where a launcher has set `RANK` and `WORLD_SIZE`.
    pub backend: Option<Backend>,
    /// Whether a step of one GPU is captured as a CUDA graph.
    pub capture: bool,
    /// Steps between checkpoints; 0 for one at the end only. Checkpoints need [`Config::out`].
    pub save_every: u64,
    /// Checkpoints that are kept, the newest included.
    pub keep_last: usize,
    /// Whether the checkpoint with the lowest validation loss is kept too, as `best`.
    pub keep_best: bool,
    /// Steps between validations; 0 for one at the end only, where there is validation data.
    pub validate_every: u64,
    /// Rows of validation data that are used; all if absent.
    pub validation_rows: Option<usize>,
    /// Lowers the learning rate where validations bring nothing.
    pub plateau: Option<Plateau>,
    /// How much of the average of the weights stays at each step; validations are of the average, if there is one.
    pub ema: Option<f64>,
    /// Whether losses are multiplied before their backward pass so that gradients in f16 do not vanish; by default where the model is f16.
    pub loss_scaling: Option<bool>,
    /// Validations in a row without a lower loss after which the run stops; none to go on.
    pub patience: Option<usize>,
    /// What happens when the loss or a gradient is no number, or the loss explodes.
    pub on_divergence: OnDivergence,
    /// How many times the mean of the last losses a loss may be before it counts as exploding.
    pub explodes_at: f64,
    /// Folder for checkpoints and metrics.
    pub out: Option<PathBuf>,
    /// The folder of a run that is gone on with.
    pub resume: Option<PathBuf>,
    /// A trace of what ran when, as JSON.
    pub trace: Option<PathBuf>,
}

/// Multiplies the learning rate by `factor` after `patience` validations in a row without a lower loss.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Plateau {
    /// Between 0 and 1.
    pub factor: f64,
    /// Validations, at least 1.
    pub patience: usize,
}

/// A pipeline whose updates do not wait for each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Asynchronous {
    /// PipeDream: weights are kept until their backward pass. Source: Narayanan and others (2019).
    WeightStashing,
    /// PipeDream-2BW: two versions of the weights. Source: Narayanan and others (2021).
    DoubleBuffered,
}

/// How ranks talk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Backend {
    /// They are threads of this process.
    Threads,
    /// They are processes that `mpirun` has started; needs the feature `mpi`.
    Mpi,
    /// Over NCCL, each with a GPU, as threads or as processes; needs the feature `nccl`.
    Nccl,
}

/// What to do about a loss or a gradient that is no number, or a loss that explodes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OnDivergence {
    /// End the run with an error that names the step and the parameter.
    #[default]
    Stop,
    /// Leave the update out and go on, up to so many steps in a row.
    Skip {
        /// Steps in a row.
        most: u32,
    },
    /// Go back to the last checkpoint and on with other data, up to so many times.
    Rollback {
        /// Times in a run.
        most: u32,
    },
}

impl Default for Config {
    fn default() -> Config {
        Config {
            steps: 1000,
            batch: 32,
            seed: 1,
            lr: Schedule::Constant { lr: 1e-3, warmup: 0 },
            clip: Some(1.0),
            dtype: DType::F32,
            grad_dtype: None,
            device: Device::CPU,
            threads: None,
            layout: Layout::default(),
            zero: 0,
            find_unused: false,
            chains: 1,
            asynchronous: None,
            backend: None,
            capture: true,
            save_every: 0,
            keep_last: 1,
            keep_best: false,
            validate_every: 0,
            validation_rows: None,
            plateau: None,
            ema: None,
            loss_scaling: None,
            patience: None,
            on_divergence: OnDivergence::Stop,
            explodes_at: f64::INFINITY,
            out: None,
            resume: None,
            trace: None,
        }
    }
}

/// Ranks in one process at most.
const RANKS_MAX: usize = 256;
/// Threads of a rank at most.
const THREADS_MAX: usize = 1024;

impl Config {
    /// Ranks in all.
    pub fn ranks(&self) -> usize {
        let Layout { dp, tp, pp, .. } = self.layout;
        dp.saturating_mul(tp).saturating_mul(pp)
    }

    /// Type of accumulated gradients.
    pub fn grad_dtype(&self) -> DType {
        let default = if self.dtype == DType::F64 { DType::F64 } else { DType::F32 };
        self.grad_dtype.unwrap_or(default)
    }

    /// Whether losses are scaled.
    pub(crate) fn scales_loss(&self) -> bool {
        self.loss_scaling.unwrap_or(self.dtype == DType::F16)
    }

    /// Where files go: [`Config::out`], or the folder of the run that is gone on with.
    pub fn folder(&self) -> Option<&std::path::Path> {
        self.out.as_deref().or(self.resume.as_deref())
    }

    /// Every setting and its value, as text.
    pub fn settings(&self) -> Vec<(String, String)> {
        let text = format!("{self:#?}");
        let inner = text.lines().filter(|line| line.starts_with("    ")).map(|line| line[4..].to_string());
        let mut settings: Vec<(String, String)> = Vec::new();
        for line in inner {
            match (line.split_once(": "), settings.last_mut()) {
                (Some((key, value)), _) if !line.starts_with([' ', '}', ')']) => {
                    settings.push((key.into(), value.trim_end_matches(',').into()));
                }
                (_, Some((_, value))) => *value = format!("{value} {}", line.trim().trim_end_matches(',')),
                _ => {}
            }
        }
        settings
    }

    /// Refuses what cannot be, whatever is trained.
    ///
    /// # Errors
    /// What does not fit, with what was wanted.
    pub fn check(&self) -> Result<()> {
        let refuse = |why: String| Err(Error::Config(why));
        let Layout { dp, tp, pp, micro_batches, .. } = self.layout;
        let counts = [
            ("steps", self.steps as usize),
            ("batch", self.batch),
            ("chains", self.chains),
            ("keep_last", self.keep_last),
            ("layout.dp", dp),
            ("layout.tp", tp),
            ("layout.pp", pp),
            ("layout.micro_batches", micro_batches),
            ("threads", self.threads.unwrap_or(1)),
        ];
        if let Some((name, _)) = counts.iter().find(|(_, n)| *n == 0) {
            return refuse(format!("train: got {name} 0, wanted at least 1"));
        }
        self.lr.check()?;
        if let Some(clip) = self.clip.filter(|clip| clip.is_nan() || *clip <= 0.0) {
            return refuse(format!("train: got clip {clip}, wanted more than 0, or none"));
        }
        if self.explodes_at.is_nan() || self.explodes_at <= 1.0 {
            return refuse(format!("train: got explodes_at {}, wanted more than 1", self.explodes_at));
        }
        if self.threads.is_some_and(|n| n > THREADS_MAX) {
            return refuse(format!("train: got more than {THREADS_MAX} threads a rank"));
        }
        if self.zero > 3 {
            return refuse(format!("train: got zero {}, wanted 0, 1, 2 or 3", self.zero));
        }
        let most = if self.device.is_meta() { usize::from(u16::MAX) } else { RANKS_MAX };
        if self.ranks() > most {
            return refuse(format!("train: got {} ranks, wanted 1 to {most}", self.ranks()));
        }
        if !self.batch.is_multiple_of(dp) {
            return refuse(format!("train: a batch of {} rows cannot be shared by dp {dp}", self.batch));
        }
        let share = self.batch / dp / self.chains;
        if share == 0 {
            return refuse(format!(
                "train: a batch of {} rows cannot be cut into {} chains",
                self.batch, self.chains
            ));
        }
        if micro_batches > share {
            return refuse(format!(
                "train: a share of {share} rows cannot be cut into {micro_batches} micro-batches"
            ));
        }
        if self.chains > 1 && (self.ranks() > 1 || self.zero > 0) {
            return refuse(format!("train: chains {} are for one rank without ZeRO", self.chains));
        }
        if let Some(Plateau { factor, patience }) = self.plateau
            && !(factor > 0.0 && factor < 1.0 && patience > 0)
        {
            let wanted = "wanted a factor between 0 and 1 and a patience of at least 1";
            return refuse(format!(
                "train: got a plateau of factor {factor} and patience {patience}, {wanted}"
            ));
        }
        if self.plateau.is_some() && self.validate_every == 0 {
            return refuse("train: a plateau needs validations on the way (`validate_every`)".into());
        }
        self.check_files()?;
        self.check_asynchronous()
    }

    /// Refuses policies that need files or validations where there are none.
    fn check_files(&self) -> Result<()> {
        let refuse = |why: &str| Err(Error::Config(format!("train: {why}")));
        let saves = self.folder().is_some();
        match self.on_divergence {
            OnDivergence::Rollback { .. } if !saves => {
                refuse("going back to a checkpoint needs a folder (`out`)")
            }
            OnDivergence::Rollback { .. } if self.save_every == 0 => {
                refuse("going back to a checkpoint needs checkpoints on the way (`save_every`)")
            }
            _ if self.keep_best && !saves => refuse("keeping the best checkpoint needs a folder (`out`)"),
            _ if self.patience == Some(0) => refuse("got patience 0, wanted at least 1"),
            _ if self.patience.is_some() && self.validate_every == 0 => {
                refuse("stopping early needs validations on the way (`validate_every`)")
            }
            _ => Ok(()),
        }
    }

    fn check_asynchronous(&self) -> Result<()> {
        if self.asynchronous.is_none() {
            return Ok(());
        }
        if self.scales_loss() {
            return Err(Error::Config("train: a pipeline without flushes does not scale losses".into()));
        }
        if self.layout.dp > 1 || self.zero > 0 || self.chains > 1 || self.device.is_meta() {
            let why = "train: a pipeline without flushes has one replica, no ZeRO, and is not measured on meta devices";
            return Err(Error::Config(why.into()));
        }
        if self.on_divergence != OnDivergence::Stop {
            return Err(Error::Config(
                "train: a pipeline without flushes can only stop when it diverges".into(),
            ));
        }
        Ok(())
    }

    /// All that ranks must have in common, as text: paths, threads and devices are each rank's own.
    pub fn in_common(&self) -> String {
        let common = Config {
            out: None,
            resume: self.resume.as_ref().map(|_| PathBuf::new()),
            trace: None,
            threads: None,
            device: Device::CPU,
            ..self.clone()
        };
        format!("{common:?}")
    }
}
