//! Phalanx: tensors, autograd and parallel training from scratch in Rust. Programs begin with `use phalanx::prelude::*`; see
//! [`prelude`], and the [`guide`] for one page a task.
#![forbid(unsafe_code)]

pub mod guide;
pub mod prelude;

pub use phalanx_autograd as autograd;
pub use phalanx_kernels as kernels;
pub use phalanx_nn as nn;
#[cfg(feature = "parallel")]
pub use phalanx_parallel as parallel;
pub use phalanx_tensor as tensor;
#[cfg(feature = "train")]
pub use phalanx_train as train;

pub use phalanx_autograd::{Leaf, Var};
pub use phalanx_tensor::{Context, DType, Device, Scalar, Tensor};

/// The README's example, compiled and run.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;

/// The book's programs, compiled and run; those of docs/guide are in [`guide`].
#[cfg(all(doctest, feature = "train"))]
mod book {
    macro_rules! pages {
        ($($name:ident = $page:literal)*) => {$(
            #[doc = include_str!(concat!("../docs/", $page, ".md"))]
            struct $name;
        )*};
    }
    pages! {
        GettingStarted = "getting_started" Training = "training" Differences = "differences" FromPytorch = "from_pytorch_lines"
        Memory = "memory" Reproducibility = "reproducibility" Checkpoints = "checkpoints"
        DataParallelism = "parallel/data_parallelism" Zero = "parallel/zero"
        TensorParallelism = "parallel/tensor_parallelism" Schedules = "parallel/pipeline_schedules"
        WithoutFlushes = "parallel/without_flushes" GPipe = "parallel/gpipe" Mesh = "parallel/mesh" Engine = "parallel/engine"
    }
}
