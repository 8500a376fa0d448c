//! [`Config`]: how a run trains, whatever it trains.

mod check;
mod keys;
#[cfg(test)]
mod tests;

use std::path::{Path, PathBuf};

use phalanx_nn::Schedule;
use phalanx_parallel::hybrid::Layout;
use phalanx_tensor::{DType, Device};

/// How a run trains. The defaults are one rank on the CPU, without validation and without files. Every setting has a key, by which
/// [`Settings`](crate::Settings) reads it from files and words.
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
    /// Threads of a rank that read data; with 0 it is read on the rank's own.
    pub workers: usize,
    /// Steps that they read ahead.
    pub prefetch: usize,
    /// Steps between checkpoints; 0 for one at the end only. Checkpoints need [`Config::out`].
    pub save_every: u64,
    /// Checkpoints that are kept, the newest included.
    pub keep_last: usize,
    /// Whether the checkpoint with the lowest validation loss is kept too, as `best`.
    pub keep_best: bool,
    /// Whether the run ends with the weights of that checkpoint.
    pub restore_best: bool,
    /// Steps between validations; 0 for one at the end only, where there is validation data.
    pub validate_every: u64,
    /// Rows of validation data that are used, drawn by the seed; all if absent.
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
    /// How many times the mean of the last losses a loss is that counts as exploding, if it is above the mean of the run's first losses, too.
    pub explodes_at: f64,
    /// Folder for checkpoints and metrics.
    pub out: Option<PathBuf>,
    /// Folder for the checkpoint of a run that is told to stop and has no other folder.
    pub rescue: Option<PathBuf>,
    /// The folder of a run that is gone on with, or one of its checkpoints.
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
            workers: 1,
            prefetch: 2,
            save_every: 0,
            keep_last: 1,
            keep_best: false,
            restore_best: false,
            validate_every: 0,
            validation_rows: None,
            plateau: None,
            ema: None,
            loss_scaling: None,
            patience: None,
            on_divergence: OnDivergence::Stop,
            explodes_at: 10.0,
            out: None,
            rescue: None,
            resume: None,
            trace: None,
        }
    }
}

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
    pub fn folder(&self) -> Option<&Path> {
        self.out.as_deref().or_else(|| self.resume.as_deref().map(run_folder))
    }

    /// All that ranks must have in common, as text: paths, threads and devices are each rank's own.
    pub fn in_common(&self) -> String {
        let common = Config {
            out: None,
            rescue: None,
            workers: 0,
            resume: self.resume.as_ref().map(|_| PathBuf::new()),
            trace: None,
            threads: None,
            device: Device::CPU,
            ..self.clone()
        };
        format!("{common:?}")
    }
}

/// Whether a folder is a checkpoint itself.
pub(crate) fn is_checkpoint(folder: &Path) -> bool {
    folder.join("checkpoint.json").exists()
}

/// The run's folder of a path that is one, or a checkpoint in one.
pub(crate) fn run_folder(path: &Path) -> &Path {
    match path.parent().filter(|_| is_checkpoint(path)) {
        Some(parent) if parent.as_os_str().is_empty() => Path::new("."),
        Some(parent) => parent,
        None => path,
    }
}
