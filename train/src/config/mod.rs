//! [`Config`]: how a run trains, independently of the model and the data.

mod check;
mod keys;
mod rates;

use std::path::{Path, PathBuf};

use phalanx_nn::Schedule;
use phalanx_parallel::hybrid::Layout;
use phalanx_parallel::launch::{JOIN_TIMEOUT, TIMEOUT};
use phalanx_tensor::{DType, Device};

/// The value of `resume` that stands for the run's folder, and of `dp` for as many replicas as there are ranks for.
const AUTO: &str = "auto";

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
    /// The bound of the global gradient norm; `None` for no clipping.
    pub clip: Option<f64>,
    /// Type of weights and activations. Floating-point numbers of batches are converted to it.
    pub dtype: DType,
    /// Type of accumulated gradients; f32 if absent (f64 in an f64 run).
    pub grad_dtype: Option<DType>,
    /// The device of a rank. Each of several ranks in this process takes a device of that kind.
    pub device: Device,
    /// Threads of a rank; cores / ranks if absent.
    pub threads: Option<usize>,
    /// Ranks along each axis, the pipeline's schedule, micro-batches.
    pub layout: Layout,
    /// Whether the number of data-parallel ranks follows the number of ranks that the launcher has started, in each epoch of the run
    /// ([`Config::for_process`]). The layout's number is that of ranks that are threads.
    pub dp_auto: bool,
    /// The ZeRO stage: data-parallel ranks shard nothing (0), optimizer state (1), gradients too (2), parameters too (3).
    pub zero: u8,
    /// What a rank keeps in the host's memory instead of its device's.
    pub offload: Offload,
    /// Folder for a file of each rank that has the optimizer's state, in place of the host's memory. The file is removed at the end.
    pub offload_dir: Option<PathBuf>,
    /// Whether the host's memory keeps the activations that a forward pass saves until their backward pass.
    pub offload_activations: bool,
    /// Whether some parameters may get no gradient in a step. Replicas then agree on which.
    pub find_unused: bool,
    /// Adds gradients in the order in which this many data-parallel ranks would.
    pub chains: usize,
    /// A pipeline without flushes between steps. An update is made after the layout's number of micro-batches.
    pub asynchronous: Option<Asynchronous>,
    /// How ranks communicate. If absent, they are threads of this process, or use TCP if a launcher has set `RANK` and `WORLD_SIZE`.
    pub backend: Option<Backend>,
    /// Seconds that a rank waits for others in a collective or a transfer before the run ends with an error.
    pub timeout_s: f64,
    /// Seconds that a process waits for the others at the start.
    pub join_timeout_s: f64,
    /// Whether ranks over TCP encrypt what they send. They do too if `PHALANX_TLS` is 1. Ranks need a secret for it.
    pub tls: bool,
    /// Whether a step of one GPU is captured as a CUDA graph.
    pub capture: bool,
    /// Threads of a rank that read data; with 0 the rank's own thread reads it.
    pub workers: usize,
    /// Steps that these threads prefetch.
    pub prefetch: usize,
    /// Steps between checkpoints; 0 for one at the end only. Checkpoints need [`Config::out`].
    pub save_every: u64,
    /// MiB of each rank's tensors that may be copied for a save when an update is about to write them and the disk has not taken them. With 0
    /// the update waits for the disk.
    pub save_memory_mib: usize,
    /// Checkpoints that are kept, the newest included.
    pub keep_last: usize,
    /// Whether the checkpoint with the lowest validation loss is kept too, as `best`.
    pub keep_best: bool,
    /// Whether the run ends with the weights of that checkpoint.
    pub restore_best: bool,
    /// Steps between checkpoints in the memory of the ranks' hosts, from which the run goes on after a process has died and was replaced; 0 for
    /// none. By default 1 if the launcher replaces processes (it sets `PHALANX_STORE`), else 0. A pipeline without flushes has one at each
    /// of its pauses.
    pub memory_checkpoint_every: Option<u64>,
    /// Whether a part that no other process has alike, such as a shard of ZeRO, is copied to another process, too.
    pub redundant_shards: bool,
    /// Whether checkpoints with parameters or optimizer state that are not finite are saved and resumed.
    pub allow_not_finite: bool,
    /// Steps between validations; 0 for one at the end only, if there is validation data.
    pub validate_every: u64,
    /// Rows of validation data that are used, drawn by the seed; all if absent.
    pub validation_rows: Option<usize>,
    /// Lowers the learning rate when validations bring no lower loss.
    pub plateau: Option<Plateau>,
    /// The decay of an exponential moving average of the weights. If there is one, validations use the average.
    pub ema: Option<f64>,
    /// Whether losses are scaled before their backward pass, so that gradients in f16 do not underflow. By default if the model is f16.
    pub loss_scaling: Option<bool>,
    /// Validations in a row without a lower loss after which the run stops; none to go on.
    pub patience: Option<usize>,
    /// What happens if the loss or a gradient is not finite, or the loss explodes.
    pub on_divergence: OnDivergence,
    /// A loss counts as exploding if it is more than this many times the mean of the last losses, and above the mean of the run's first
    /// losses.
    pub explodes_at: f64,
    /// The file of a pipeline's plan. [`Settings`](crate::Settings) read it into [`Layout::plan`].
    pub plan: Option<PathBuf>,
    /// The levels of the network for which [`plan_layers`](crate::plan_layers) plans: `WIDTHxBYTES_A_SECOND`, the lowest first.
    pub links: Option<String>,
    /// A gradient norm counts as exploding if it is more than this many times the mean of the last norms, and above the mean of the run's
    /// first norms.
    pub norm_explodes_at: f64,
    /// Steps between digests of loss, gradients and parameters in the metrics; 0 for none. A GPU's numbers are waited for in each step.
    pub digests: u64,
    /// Steps between comparisons of what ranks must have alike: copies of gradients and parameters; 0 for none. A GPU's numbers are waited
    /// for in each step.
    pub check_replicas: u64,
    /// Folder for checkpoints and metrics.
    pub out: Option<PathBuf>,
    /// Folder for the checkpoint of a run that is interrupted and has no other folder.
    pub rescue: Option<PathBuf>,
    /// The folder of a run to resume, or one of its checkpoints.
    pub resume: Option<PathBuf>,
    /// File for a trace of the steps' timeline, as JSON.
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

/// A pipeline without flushes between updates.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Asynchronous {
    /// PipeDream: weights are kept until their backward pass. Source: Narayanan and others (2019).
    WeightStashing,
    /// PipeDream with vertical sync: a micro-batch uses one version of the weights at all stages. Source: as PipeDream.
    VerticalSync,
    /// PipeDream-2BW: two versions of the weights. Source: Narayanan and others (2021).
    DoubleBuffered,
}

/// What a rank keeps in the host's memory instead of its device's: on a CPU device of its own ([`MeshRank::offload_device`](crate::MeshRank::offload_device)).
/// The host updates the parameters.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Offload {
    /// Nothing.
    #[default]
    None,
    /// Optimizer state, and the gradients that the optimizer reads.
    Optimizer,
    /// These and the rank's shard of the parameters, which is uploaded when a unit is gathered (ZeRO-3).
    Parameters,
}

/// How ranks communicate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Backend {
    /// They are threads of this process.
    Threads,
    /// They are processes that `mpirun` has started; needs the feature `mpi`.
    Mpi,
    /// Over NCCL, each with a GPU, as threads or as processes; needs the feature `nccl`.
    Nccl,
}

/// The policy for a loss or a gradient that is not finite, or a loss that explodes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OnDivergence {
    /// End the run with an error that names the step and the parameter.
    #[default]
    Stop,
    /// Skip the update and go on, up to `most` steps in a row.
    Skip {
        /// Steps in a row.
        most: u32,
    },
    /// Go back to the last checkpoint and go on with other data, up to `most` times.
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
            dp_auto: false,
            zero: 0,
            offload: Offload::None,
            offload_dir: None,
            offload_activations: false,
            find_unused: false,
            chains: 1,
            asynchronous: None,
            backend: None,
            timeout_s: TIMEOUT.as_secs_f64(),
            join_timeout_s: JOIN_TIMEOUT.as_secs_f64(),
            tls: false,
            capture: true,
            workers: 1,
            prefetch: 2,
            save_every: 0,
            save_memory_mib: 1024,
            keep_last: 1,
            keep_best: false,
            restore_best: false,
            memory_checkpoint_every: None,
            redundant_shards: true,
            allow_not_finite: false,
            validate_every: 0,
            validation_rows: None,
            plateau: None,
            ema: None,
            loss_scaling: None,
            patience: None,
            on_divergence: OnDivergence::Stop,
            explodes_at: 10.0,
            plan: None,
            links: None,
            norm_explodes_at: 1000.0,
            digests: 0,
            check_replicas: 0,
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

    /// Steps between checkpoints in memory; 0 for none.
    pub(crate) fn memory_every(&self) -> u64 {
        let is_over_tcp = !matches!(self.backend, Some(Backend::Threads | Backend::Mpi));
        let is_one_of_many = is_over_tcp && (self.ranks() > 1 || self.dp_auto);
        let is_elastic = || is_one_of_many && std::env::var_os("PHALANX_STORE").is_some();
        self.memory_checkpoint_every.unwrap_or_else(|| u64::from(is_elastic()))
    }

    /// The folder of the run's files: [`Config::out`], or the folder of the resumed run.
    pub fn folder(&self) -> Option<&Path> {
        self.out.as_deref().or_else(|| self.resume.as_deref().map(run_folder))
    }

    /// The settings that must be equal on all ranks, as text. Paths, threads, devices and timeouts may differ, and where
    /// TLS was asked for.
    pub fn in_common(&self) -> String {
        let plan = self.layout.plan.clone().map(|plan| plan.named("plan"));
        let Config { timeout_s, join_timeout_s, .. } = Config::default();
        let common = Config {
            layout: Layout { plan, ..self.layout.clone() },
            timeout_s,
            join_timeout_s,
            tls: false,
            out: None,
            plan: None,
            rescue: None,
            offload_dir: None,
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

/// The run's folder of a path that is one, or a checkpoint in one. A checkpoint with a step in its name may be gone: the run that goes on from
/// it renames it, or replaces it later.
pub fn run_folder(path: &Path) -> &Path {
    let step = |name: &str| {
        let step = name.strip_prefix("checkpoint-").or(name.strip_prefix("abandoned-"));
        step.is_some_and(|step| step.starts_with(|c: char| c.is_ascii_digit()))
    };
    let has_step = || path.file_name().and_then(|name| name.to_str()).is_some_and(step);
    let is_gone = || has_step() && !path.join("metrics.jsonl").exists();
    match path.parent().filter(|_| is_checkpoint(path) || is_gone()) {
        Some(parent) if parent.as_os_str().is_empty() => Path::new("."),
        Some(parent) => parent,
        None => path,
    }
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use phalanx_parallel::hybrid::Layout;
    use phalanx_tensor::Device;

    use phalanx_nn::models::RecomputeMode;
    use phalanx_nn::{OneCycle, Schedule};
    use phalanx_tensor::DType;

    use super::*;
    use crate::{Keyed, Settings, ValueSource};

    /// A configuration in which every setting that has a key is other than the default.
    fn unlike() -> Config {
        let layout = Layout {
            dp: 2,
            tp: 3,
            pp: 4,
            ep: 2,
            schedule: "interleaved".into(),
            chunks: 5,
            micro_batches: 6,
            recompute: RecomputeMode::ExceptLast,
            sequence_parallel: true,
            scatter_gather: true,
            logits_max: Some(4096),
            plan: None,
        };
        Config {
            steps: 9,
            batch: 24,
            seed: u64::MAX,
            lr: Schedule::WarmupStableDecay { lr: 0.01, warmup: 1, decay: 3, total: 9, min: 1e-9 },
            clip: None,
            dtype: DType::F16,
            grad_dtype: Some(DType::BF16),
            device: Device::Meta(0),
            threads: Some(3),
            layout,
            dp_auto: false,
            zero: 2,
            offload: Offload::Optimizer,
            offload_dir: Some("disk".into()),
            offload_activations: true,
            find_unused: true,
            chains: 1,
            asynchronous: None,
            backend: Some(Backend::Threads),
            timeout_s: 2.5,
            join_timeout_s: 7.0,
            tls: true,
            capture: false,
            workers: 0,
            prefetch: 7,
            save_every: 5,
            save_memory_mib: 9,
            keep_last: 3,
            keep_best: true,
            restore_best: true,
            memory_checkpoint_every: Some(3),
            redundant_shards: false,
            allow_not_finite: true,
            validate_every: 2,
            validation_rows: Some(8),
            plateau: Some(Plateau { factor: 0.25, patience: 2 }),
            ema: Some(0.75),
            loss_scaling: Some(false),
            patience: Some(4),
            on_divergence: OnDivergence::Rollback { most: 3 },
            explodes_at: 2.5,
            plan: None,
            links: Some("4x1e9".into()),
            norm_explodes_at: 99.5,
            digests: 6,
            check_replicas: 7,
            out: Some("a \"b\"\n".into()),
            rescue: None,
            resume: Some("true".into()),
            trace: Some(PathBuf::from("1.5")),
        }
    }

    #[test]
    fn a_file_of_all_keys_gives_every_setting_back() {
        let schedules = [
            unlike().lr,
            Schedule::Constant { lr: 2.0, warmup: 3 },
            Schedule::Cosine { lr: 0.1, warmup: 3, total: 9, cycles: 0.5, min: 0.01 },
            Schedule::Linear { lr: 0.1, warmup: 3, total: 9, min: 0.02 },
            Schedule::InverseSqrt { lr: 0.1, warmup: 3 },
            Schedule::Step { lr: 0.1, step_size: 4, gamma: 0.5 },
        ];
        for lr in schedules {
            let wanted = Config { lr, ..unlike() };
            let mut read = Settings::new(Config::default());
            read.read_text(&Settings::new(wanted.clone()).to_toml(&[]), "run.toml").unwrap();
            assert_eq!(read.resolve().unwrap(), wanted);
        }
    }

    #[test]
    fn a_key_of_a_later_source_wins_over_one_that_it_rules_out() {
        let resolve = |file: &str, words: &[&str]| {
            let mut settings = Settings::new(Config::default());
            settings.read_text(file, "run.toml").unwrap();
            settings.words(words.iter().map(|word| word.to_string())).unwrap();
            settings.resolve().map(|config| config.layout.dp)
        };
        assert_eq!(resolve("dp = 1", &["--ranks", "4"]).unwrap(), 4);
        assert_eq!(resolve("ranks = 4", &["--dp", "2"]).unwrap(), 2);
        assert_eq!(resolve("ranks = 4\ntp = 2", &[]).unwrap(), 2);
        assert!(
            resolve("ranks = 4\ndp = 2", &[]).unwrap_err().to_string().contains("`ranks` 4 is not `dp` 2")
        );
        assert_eq!(
            resolve("schedule = \"interleaved\"\npp = 2\nvirtual-stages = 3", &["--schedule", "1f1b"])
                .unwrap(),
            1
        );
        assert!(resolve("virtual-stages = 3", &[]).is_err());
        let mut both = Settings::new(Config::default());
        both.set("steps", "5", ValueSource::Words).unwrap();
        both.read_text("steps = 6", "run.toml").unwrap();
        assert_eq!(both.resolve().unwrap().steps, 5);
    }

    #[test]
    fn replicas_are_a_number_or_as_many_as_ranks_make() {
        let read = |file: &str, words: &[&str]| {
            let mut settings = Settings::new(Config::default());
            settings.read_text(file, "run.toml").unwrap();
            settings.words(words.iter().map(|word| word.to_string())).unwrap();
            let config = settings.resolve().unwrap();
            // Its file says the same.
            let mut again = Settings::new(Config::default());
            again.read_text(&settings.to_toml(&[]), "again.toml").unwrap();
            assert_eq!(again.resolve().unwrap().dp_auto, config.dp_auto);
            (config.dp_auto, config.layout.dp)
        };
        assert_eq!(read("dp = 4", &["--dp", "auto"]), (true, 1));
        assert_eq!(read("dp = \"auto\"", &["--dp", "4"]), (false, 4));
        // `ranks` says how many threads there are.
        assert_eq!(read("dp = \"auto\"\ntp = 2", &["--ranks", "4"]), (true, 2));
        let mut settings = Settings::new(Config::default());
        let error =
            settings.set("dp", "many", ValueSource::Words).and_then(|()| settings.resolve().map(drop));
        assert_eq!(
            error.unwrap_err().to_string(),
            "`dp` is \"many\", wanted a whole number from 0 up, or auto"
        );
    }

    #[test]
    fn steps_are_those_of_the_schedule_too() {
        let mut settings = Settings::new(Config::default());
        settings.words(["--lr-schedule", "one-cycle", "--steps", "50"].map(String::from)).unwrap();
        let config = settings.resolve().unwrap();
        config.check().unwrap();
        assert!(matches!(config.lr, Schedule::OneCycle(OneCycle { total: 50, .. })));
        let error = Config { steps: 51, ..config }.check().unwrap_err().to_string();
        assert!(error.contains("`steps` is 51") && error.contains("ends after 50"), "{error}");
    }

    #[test]
    fn keys_have_names_of_their_own() {
        let mut names: Vec<&str> = Config::keys().iter().map(|key| key.name).collect();
        names.sort_unstable();
        let all = names.len();
        names.dedup();
        assert_eq!(names.len(), all);
    }
}
