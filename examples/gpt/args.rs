//! The command line, which is a contract.

use std::path::PathBuf;

use clap::{ArgAction, Args, Parser, Subcommand};
use phalanx::Device;
use phalanx::nn;
use phalanx::parallel::hybrid::Layout;
use phalanx::train::Config;

pub use crate::choices::{
    Architecture, Backend, GradPrecision, LrSchedule, OnDivergence, Precision, Recompute, Rule, Schedule,
};

/// Trains a GPT on text, or continues a text with a trained one.
#[derive(Parser)]
#[command(name = "gpt", version)]
pub struct Cli {
    #[command(subcommand)]
    pub command: Command,
}

#[derive(Subcommand)]
pub enum Command {
    /// Train, then print a sample. Without a subcommand, flags change the run of `examples/gpt/first_run.toml`.
    Train(Box<TrainArgs>),
    /// Train a few steps and print which operations take their time, on each rank. The flags are those of `train`.
    Profile(Box<TrainArgs>),
    /// Make token files of large texts, for `train --data DIR`.
    Prepare(PrepareArgs),
    /// Continue a prompt.
    Generate(GenerateArgs),
}

/// `train`.
#[derive(Args, Clone, Debug)]
#[command(allow_negative_numbers = true, args_override_self = true)] // refused by their own flags
pub struct TrainArgs {
    /// A file of flags (`width = 192`), before those of the command line, which win.
    #[arg(long, value_name = "FILE.toml")]
    pub config: Option<PathBuf>,
    /// Print the run's flags as such a file, and end.
    #[arg(long)]
    pub print_config: bool,
    /// That file.
    #[arg(skip)]
    pub written: String,
    /// Whether operations are timed instead.
    #[arg(skip)]
    pub profile: bool,
    /// Text to learn, or a folder that `prepare` has made; without it, the sources and pages of this workspace.
    #[arg(long, value_name = "FILE")]
    pub data: Option<PathBuf>,
    /// Text that is not trained on, over which the loss is measured; without --data, some files of the workspace.
    #[arg(long, value_name = "FILE")]
    pub validation: Option<PathBuf>,
    /// Steps between validations; 0 for one at the end only.
    #[arg(long, default_value_t = 0)]
    pub validate_every: u64,
    /// Validations in a row without a lower loss after which the run stops.
    #[arg(long, value_name = "N")]
    pub patience: Option<usize>,
    /// Learn that many byte pairs from the text as tokens, bytes included; without it bytes are the tokens.
    #[arg(long, value_name = "N", conflicts_with = "init")]
    pub vocabulary: Option<usize>,
    /// Optimizer steps in all, those before a resume included.
    #[arg(long, default_value_t = 300)]
    pub steps: u64,
    /// Sequences in the global batch of one step.
    #[arg(long, default_value_t = 8)]
    pub batch: usize,
    /// Tokens in a sequence.
    #[arg(long, default_value_t = 256)]
    pub context: usize,
    /// What the model is built like [default: gpt, or as the model that is continued].
    #[arg(long, value_enum)]
    pub architecture: Option<Architecture>,
    /// Transformer blocks [default: 4, or those of the model that is continued].
    #[arg(long)]
    pub layers: Option<usize>,
    /// Attention heads of a block [default: 4, or as above].
    #[arg(long)]
    pub heads: Option<usize>,
    /// Width of the residual stream [default: 192, or as above].
    #[arg(long)]
    pub width: Option<usize>,
    /// Seed of initial weights, dropout and the order of the data.
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// Peak learning rate.
    #[arg(long, default_value_t = 1e-3)]
    pub lr: f64,
    /// How the learning rate goes on after the warm-up.
    #[arg(long, value_enum, default_value_t = LrSchedule::Cosine)]
    pub lr_schedule: LrSchedule,
    /// The rate at the end of a cosine, a line or a decay.
    #[arg(long, default_value_t = 0.0)]
    pub lr_min: f64,
    /// Steps at the end in which warmup-stable-decay goes down [default: half of all].
    #[arg(long, value_name = "N")]
    pub lr_decay: Option<u64>,
    /// What updates the matrices inside the model; the rest is always AdamW's.
    #[arg(long, value_enum, default_value_t = Rule::Adamw)]
    pub optimizer: Rule,
    /// Steps of linear warm-up.
    #[arg(long, default_value_t = 20)]
    pub warmup: u64,
    /// Weight decay of the matrices.
    #[arg(long, default_value_t = 0.1)]
    pub weight_decay: f64,
    /// Probability with which dropout zeroes an element.
    #[arg(long, default_value_t = 0.0)]
    pub dropout: f64,
    /// Largest global gradient norm; 0 for no clipping.
    #[arg(long, default_value_t = 1.0)]
    pub clip: f64,
    /// Type of weights and activations; bf16 keeps f32 master weights.
    #[arg(long, value_enum, default_value_t = Precision::F32)]
    pub dtype: Precision,
    /// Type of accumulated gradients; by default f32 (f64 in an f64 run).
    #[arg(long, value_enum)]
    pub grad_dtype: Option<GradPrecision>,
    /// `cpu`, `cuda[:i]` or `meta`, which measures the memory of a step without computing it. Several ranks take a GPU of
    /// their machine each.
    #[arg(long, default_value = "cpu")]
    pub device: Device,
    /// Threads of a rank [default: cores / ranks].
    #[arg(long)]
    pub threads: Option<usize>,
    /// The same bits in every run (always so on a CPU).
    #[arg(long, num_args = 0..=1, require_equals = true, default_value_t, default_missing_value = "true", action = ArgAction::Set)]
    pub deterministic: bool,
    /// Give a GPU the kernels of a step one by one. By default a step of one GPU is captured once, as a CUDA graph, and launched
    /// whole; the numbers are the same. A run of several ranks, or with --trace, is never captured.
    #[arg(long, num_args = 0..=1, require_equals = true, default_value_t, default_missing_value = "true", action = ArgAction::Set)]
    pub no_capture: bool,
    /// Ranks in all [default: dp x tp x pp].
    #[arg(long)]
    pub ranks: Option<usize>,
    /// Data-parallel ranks.
    #[arg(long)]
    pub dp: Option<usize>,
    /// Tensor-parallel ranks.
    #[arg(long, default_value_t = 1)]
    pub tp: usize,
    /// Pipeline ranks [default: 1].
    #[arg(long)]
    pub pp: Option<usize>,
    /// Stages of a pipeline rank in interleaved schedules [default: 2] (zb-v always has 2).
    #[arg(long)]
    pub virtual_stages: Option<usize>,
    /// Pieces into which a rank cuts its share of the batch.
    #[arg(long, default_value_t = 1)]
    pub micro_batches: usize,
    /// Add gradients in the order in which that many data-parallel ranks would.
    #[arg(long, default_value_t = 1)]
    pub emulate_dp: usize,
    /// What data-parallel ranks share out: 1 optimizer state, 2 gradients too, 3 parameters too.
    #[arg(long, default_value_t = 0)]
    pub zero: u8,
    /// Split norms and dropout along the sequence between tensor-parallel ranks.
    #[arg(long, num_args = 0..=1, require_equals = true, default_value_t, default_missing_value = "true", action = ArgAction::Set)]
    pub sequence_parallel: bool,
    /// Pipeline schedule [default: 1f1b]. pipedream and pipedream-2bw do not flush between steps: gradients are of weights some steps
    /// old, and not those of one device; --clip is for each stage's norm, and there are flushes where checkpoints are saved.
    #[arg(long, value_enum)]
    pub schedule: Option<Schedule>,
    /// What repeats its forward pass in backward instead of keeping activations: blocks, or with --pp the stages of
    /// micro-batches.
    #[arg(long, value_enum, default_value_t = Recompute::Never)]
    pub recompute: Recompute,
    /// How ranks talk: as threads of this process, as processes that `mpirun` has started, or over NCCL, each with a GPU,
    /// as threads or as processes of any launcher; under mpirun they find each other by MPI, if built with it [default:
    /// threads; TCP between processes where RANK and WORLD_SIZE are set]. Where it is not NCCL, what is on GPUs goes by way of
    /// the host.
    #[arg(long, value_enum)]
    pub backend: Option<Backend>,
    /// Folder for metrics.jsonl, loss.svg, the model and a training checkpoint.
    #[arg(long, value_name = "DIR")]
    pub out: Option<PathBuf>,
    /// Steps between checkpoints; 0 for one at the end only.
    #[arg(long, default_value_t = 100)]
    pub save_every: u64,
    /// Checkpoints that are kept.
    #[arg(long, default_value_t = 1, value_name = "N")]
    pub keep_last: usize,
    /// Keep the checkpoint with the lowest validation loss, too.
    #[arg(long, num_args = 0..=1, require_equals = true, default_value_t, default_missing_value = "true", action = ArgAction::Set)]
    pub keep_best: bool,
    /// What happens when the loss or a gradient is no number: an error that names the parameter, a step without an update, or a return
    /// to the last checkpoint.
    #[arg(long, value_enum, default_value_t = OnDivergence::Stop)]
    pub on_divergence: OnDivergence,
    /// Continue the run whose --out was DIR.
    #[arg(long, value_name = "DIR")]
    pub resume: Option<PathBuf>,
    /// Start from the weights (and tokenizer) of a Hugging Face GPT-2 or Llama folder.
    #[arg(long, value_name = "DIR", conflicts_with = "resume")]
    pub init: Option<PathBuf>,
    /// File for a JSON object a step.
    #[arg(long, value_name = "FILE")]
    pub metrics: Option<PathBuf>,
    /// File for a trace of what ran when: two lanes a rank, one for its communication. It is the first rank's file;
    /// those of other processes send theirs at the end.
    #[arg(long, value_name = "FILE")]
    pub trace: Option<PathBuf>,
    /// Steps between samples of what the model writes; 0 for one at the end only.
    #[arg(long, default_value_t = 0)]
    pub sample_every: u64,
    /// What samples go on from.
    #[arg(long, value_name = "TEXT", default_value = "\n")]
    pub prompt: String,
    /// No progress bar, no sample.
    #[arg(long, num_args = 0..=1, require_equals = true, default_value_t, default_missing_value = "true", action = ArgAction::Set)]
    pub quiet: bool,
}

/// `prepare`.
#[derive(Args, Clone, Debug)]
pub struct PrepareArgs {
    /// Texts in UTF-8.
    #[arg(long, value_name = "FILE", num_args = 1.., required = true)]
    pub data: Vec<PathBuf>,
    /// Folder for the token files and the tokenizer.
    #[arg(long, value_name = "DIR")]
    pub out: PathBuf,
    /// Byte pairs to learn from the beginning of the texts as tokens, bytes included.
    #[arg(long, value_name = "N", default_value_t = 16384, conflicts_with = "tokenizer")]
    pub vocabulary: usize,
    /// Folder whose `tokenizer.json` cuts the text.
    #[arg(long, value_name = "DIR")]
    pub tokenizer: Option<PathBuf>,
    /// Text that stands between documents; without it each file is one.
    #[arg(long, value_name = "TEXT")]
    pub separator: Option<String>,
    /// Share of the documents that is held out.
    #[arg(long, default_value_t = 0.0, value_name = "X")]
    pub validation_share: f64,
}

/// `generate`.
#[derive(Args, Clone, Debug)]
#[command(allow_negative_numbers = true)]
pub struct GenerateArgs {
    /// Hugging Face folder of the model; the `model` folder of a training run, or the run's folder itself.
    #[arg(long, value_name = "DIR")]
    pub model: PathBuf,
    /// Text to continue.
    #[arg(long)]
    pub prompt: String,
    /// Tokens to make.
    #[arg(long, default_value_t = 300)]
    pub tokens: usize,
    /// Divides the logits; 0 takes the likeliest token always.
    #[arg(long, default_value_t = 0.8)]
    pub temperature: f64,
    /// Draw among that many likeliest tokens; 0 for all.
    #[arg(long, default_value_t = 40)]
    pub top_k: usize,
    /// Seed of the draws.
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
}

impl TrainArgs {
    /// Layers, heads and width of a new model.
    pub fn sizes(&self) -> [usize; 3] {
        [self.layers.unwrap_or(4), self.heads.unwrap_or(4), self.width.unwrap_or(192)]
    }

    /// Ranks in all.
    pub fn all_ranks(&self) -> usize {
        self.dp.or(self.replicas()).unwrap_or(1).saturating_mul(self.model_ranks())
    }

    /// Ranks of a pipeline.
    pub fn pipeline_ranks(&self) -> usize {
        self.pp.unwrap_or(1)
    }

    /// Ranks that hold one replica of the model together.
    pub fn model_ranks(&self) -> usize {
        self.tp.saturating_mul(self.pipeline_ranks())
    }

    /// How many replicas `--ranks` makes.
    fn replicas(&self) -> Option<usize> {
        self.ranks.map(|ranks| (ranks / self.model_ranks()).max(1))
    }

    /// How the run lies on its ranks.
    pub fn layout(&self) -> Layout {
        Layout {
            dp: self.dp.or(self.replicas()).unwrap_or(1),
            tp: self.tp,
            pp: self.pipeline_ranks(),
            schedule: self.flushed().name().into(),
            chunks: self.virtual_stages.unwrap_or(2),
            // Each of the chains has its pass of the pipeline.
            micro_batches: self.micro_batches / self.emulate_dp.max(1),
            recompute: self.recompute.mode(),
            sequence_parallel: self.sequence_parallel,
        }
    }

    /// How the run trains.
    pub fn config(&self) -> Config {
        Config {
            steps: self.steps,
            batch: self.batch,
            seed: self.seed,
            lr: self.rates(),
            clip: (self.clip > 0.0).then_some(self.clip),
            dtype: self.dtype.dtype(),
            grad_dtype: self.grad_dtype.map(GradPrecision::dtype),
            device: self.device,
            threads: self.threads,
            layout: self.layout(),
            zero: self.zero,
            find_unused: false,
            chains: self.emulate_dp,
            asynchronous: self.scheme(),
            backend: self.backend.map(Backend::backend),
            capture: !self.no_capture,
            save_every: self.save_every,
            keep_last: self.keep_last,
            keep_best: self.keep_best,
            validate_every: self.validate_every,
            validation_rows: None,
            plateau: None,
            ema: None,
            loss_scaling: None,
            patience: self.patience,
            on_divergence: self.on_divergence.policy(),
            explodes_at: f64::INFINITY,
            out: self.out.clone(),
            resume: self.resume.clone(),
            trace: self.trace.clone(),
        }
    }

    /// The learning rate of each step.
    fn rates(&self) -> nn::Schedule {
        let (lr, warmup, total, min) = (self.lr, self.warmup, self.steps, self.lr_min);
        match self.lr_schedule {
            LrSchedule::Constant => nn::Schedule::Constant { lr, warmup },
            LrSchedule::Cosine => nn::Schedule::Cosine { lr, warmup, total, cycles: 0.5, min },
            LrSchedule::Linear => nn::Schedule::Linear { lr, warmup, total, min },
            LrSchedule::InverseSqrt => nn::Schedule::InverseSqrt { lr, warmup },
            LrSchedule::WarmupStableDecay => {
                let decay = self.lr_decay.unwrap_or(total / 2);
                nn::Schedule::WarmupStableDecay { lr, warmup, decay, total, min }
            }
        }
    }
}
