//! What flags may be set to by name.

use clap::ValueEnum;
use phalanx::DType;
use phalanx::nn::models::RecomputeMode;
use phalanx::train::{self, Asynchronous};

macro_rules! choices {
    ($($(#[$doc:meta])* $name:ident { $($value:ident = $text:literal),* $(,)? })*) => {$(
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
        pub enum $name {
            $(#[value(name = $text)] $value,)*
        }
    )*};
}

choices! {
    LrSchedule { Constant = "constant", Cosine = "cosine", Linear = "linear", InverseSqrt = "inverse-sqrt", WarmupStableDecay = "warmup-stable-decay" }
    Rule { Adamw = "adamw", Muon = "muon" }
    Architecture { Gpt = "gpt", Llama = "llama" }
    OnDivergence { Stop = "stop", Skip = "skip", Rollback = "rollback" }
    Precision { F32 = "f32", Bf16 = "bf16", F64 = "f64" }
    GradPrecision { F32 = "f32", Bf16 = "bf16" }
    Schedule { Gpipe = "gpipe", OneFOneB = "1f1b", Interleaved = "interleaved", ZbH1 = "zb-h1", ZbV = "zb-v", Pipedream = "pipedream", Pipedream2bw = "pipedream-2bw" }
    Recompute { Never = "never", ExceptLast = "except-last", Always = "always" }
    Backend { Threads = "threads", Mpi = "mpi", Nccl = "nccl" }
}

impl Precision {
    pub fn dtype(self) -> DType {
        match self {
            Precision::F32 => DType::F32,
            Precision::Bf16 => DType::BF16,
            Precision::F64 => DType::F64,
        }
    }
}

impl GradPrecision {
    pub fn dtype(self) -> DType {
        match self {
            GradPrecision::F32 => DType::F32,
            GradPrecision::Bf16 => DType::BF16,
        }
    }
}

impl Backend {
    pub fn backend(self) -> train::Backend {
        match self {
            Backend::Threads => train::Backend::Threads,
            Backend::Mpi => train::Backend::Mpi,
            Backend::Nccl => train::Backend::Nccl,
        }
    }
}

impl OnDivergence {
    pub fn policy(self) -> train::OnDivergence {
        match self {
            OnDivergence::Stop => train::OnDivergence::Stop,
            OnDivergence::Skip => train::OnDivergence::Skip { most: 10 },
            OnDivergence::Rollback => train::OnDivergence::Rollback { most: 10 },
        }
    }
}

impl Schedule {
    /// Whether it has no flushes.
    pub fn scheme(self) -> Option<Asynchronous> {
        match self {
            Schedule::Pipedream => Some(Asynchronous::WeightStashing),
            Schedule::Pipedream2bw => Some(Asynchronous::DoubleBuffered),
            _ => None,
        }
    }

    /// As the library calls it; of one without flushes, the paper.
    pub fn name(self) -> &'static str {
        match self {
            Schedule::Gpipe => "gpipe",
            Schedule::OneFOneB => "1f1b",
            Schedule::Interleaved => "interleaved",
            Schedule::ZbH1 => "zb-h1",
            Schedule::ZbV => "zb-v",
            Schedule::Pipedream => "pipedream",
            Schedule::Pipedream2bw => "pipedream-2bw",
        }
    }
}

impl Recompute {
    pub fn mode(self) -> RecomputeMode {
        match self {
            Recompute::Never => RecomputeMode::Never,
            Recompute::ExceptLast => RecomputeMode::ExceptLast,
            Recompute::Always => RecomputeMode::Always,
        }
    }
}
