//! What flags may be set to by name.

use clap::ValueEnum;
use phalanx::DType;
use phalanx::nn::models::RecomputeMode;

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
    LrSchedule { Constant = "constant", Cosine = "cosine" }
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

/// A schedule without flushes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scheme {
    Pipedream,
    Pipedream2bw,
}

impl Schedule {
    /// Whether it has no flushes.
    pub fn scheme(self) -> Option<Scheme> {
        match self {
            Schedule::Pipedream => Some(Scheme::Pipedream),
            Schedule::Pipedream2bw => Some(Scheme::Pipedream2bw),
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
