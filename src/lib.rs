//! Tensors, autograd and training in Rust, on one device or over any mix of data, tensor and pipeline parallelism.
//!
//! A program begins with `use phalanx::prelude::*`. This one learns a sine:
//!
//! ```
//! use phalanx::prelude::*;
//!
//! fn main() -> Result<()> {
//!     let layers = SequentialConfig::new().with(LinearConfig::new(1, 64)).with(Tanh);
//!     let model = layers.with(LinearConfig::new(64, 1)).init(&Scope::new(1, DType::F32, Device::CPU))?;
//!     let mut optimizer = AdamW::default().init(vec![Group::new(model.parameters(), 1e-2)])?;
//!     let x = Var::linspace(-3.0, 3.0, 64, DType::F32, Device::CPU)?.reshape(&[64, 1])?;
//!     for _ in 0..200 {
//!         optimizer.zero_grad()?;
//!         MseLoss::default().forward(&model.forward(&x)?, &x.sin()?)?.backward()?;
//!         optimizer.step()?;
//!     }
//!     assert!(MseLoss::default().forward(&model.forward(&x)?, &x.sin()?)?.item::<f32>()? < 0.01);
//!     Ok(())
//! }
//! ```
//!
//! # Where to begin
//!
//! | you want to | read |
//! |---|---|
//! | see what a program imports | [`prelude`] |
//! | copy a program for a task, with PyTorch's lines beside it | [`guide`]: a [classifier](guide::classifier), a [text model](guide::recurrent), [a function of your own](guide::function), [two ranks](guide::two_ranks), [ZeRO-3](guide::zero), a [pipeline](guide::pipeline), [fine-tuning](guide::fine_tuning), [generation](guide::generation) |
//! | install it, debug it, save a model | [Getting started][started] |
//! | find the name of something that you know from PyTorch | [Coming from PyTorch][pytorch], [What differs][differs] |
//! | train with validation, checkpoints and a report | [`train::Trainer`], [Training runs][training] |
//! | use several ranks | [`parallel::launch`], [All axes at once][mesh] |
//!
//! # The crates
//!
//! Each is a module here. A crate uses those above it and none below.
//!
//! | module | has | begin with |
//! |---|---|---|
//! | [`tensor`] | storage, views, devices, the memory ledger, files; no arithmetic | [`Tensor`], [`Device`], [`tensor::Ledger`] |
//! | [`kernels`] | operations on tensors without a graph, for CPUs and CUDA | [`kernels::ops`], [`kernels::matmul`], [`kernels::isa`] |
//! | [`autograd`] | the graph of gradients: operations, hooks, recomputation | [`Var`], [`autograd::backward()`], [`autograd::Function`] |
//! | [`nn`] | layers, losses, optimizers, schedules, GPT-2 and Llama | [`nn::Module`], [`nn::Optimizer`], [`nn::models`] |
//! | [`parallel`] | ranks, collectives, wrappers, pipelines, sharded checkpoints | [`parallel::launch`], [`parallel::data_parallel::Ddp`], [`parallel::sharded::Zero`] |
//! | [`train`] | the training loop, data sets, policies, reports | [`train::Trainer`], [`train::Config`], [`train::data::DataLoader`] |
//!
//! # Features
//!
//! | feature | default | adds |
//! |---|---|---|
//! | `parallel` | yes | the module [`parallel`] |
//! | `train` | yes | the module [`train`] |
//! | `cuda` | yes | NVIDIA GPUs, whose libraries are found at run time |
//! | `nccl` | yes | collectives between GPUs over NCCL, found at run time too |
//! | `mpi` | no | ranks as processes over MPI; a build needs its headers and libclang |
//! | `images`, `csv`, `json` | no | [`train::data`]: `ImageFolder`, `Csv`, `JsonLines` and `JsonTexts` |
//! | `tokenizers` | no | Hugging Face's `tokenizer.json` in [`train::text`] |
//! | `chat` | no | Hugging Face's chat templates, and conversations as data, in [`train::text`] |
//!
//! # The book
//!
//! - Use: [getting started][started], [training runs][training], [coming from PyTorch][pytorch], [what differs][differs].
//! - Several ranks: [data parallelism][dp], [ZeRO and FSDP][zero], [tensor and sequence parallelism][tp], [expert
//!   parallelism][ep], [pipeline schedules][pp], [pipelines without flushes][asynchronous], [a pipeline in one process][gpipe],
//!   [all axes at once][mesh], [the dependency engine][engine].
//! - Properties: [memory][memory], [reproducibility][bits], [CUDA][cuda], [the emulator][emulator], [performance][speed],
//!   [checkpoints and faults][checkpoints].
//!
//! [started]: https://github.com/phalanx-ml/phalanx/blob/main/docs/getting_started.md
//! [training]: https://github.com/phalanx-ml/phalanx/blob/main/docs/training.md
//! [pytorch]: https://github.com/phalanx-ml/phalanx/blob/main/docs/from_pytorch.md
//! [differs]: https://github.com/phalanx-ml/phalanx/blob/main/docs/differences.md
//! [dp]: https://github.com/phalanx-ml/phalanx/blob/main/docs/parallel/data_parallelism.md
//! [zero]: https://github.com/phalanx-ml/phalanx/blob/main/docs/parallel/zero.md
//! [tp]: https://github.com/phalanx-ml/phalanx/blob/main/docs/parallel/tensor_parallelism.md
//! [ep]: https://github.com/phalanx-ml/phalanx/blob/main/docs/parallel/expert_parallelism.md
//! [pp]: https://github.com/phalanx-ml/phalanx/blob/main/docs/parallel/pipeline_schedules.md
//! [asynchronous]: https://github.com/phalanx-ml/phalanx/blob/main/docs/parallel/without_flushes.md
//! [gpipe]: https://github.com/phalanx-ml/phalanx/blob/main/docs/parallel/gpipe.md
//! [mesh]: https://github.com/phalanx-ml/phalanx/blob/main/docs/parallel/mesh.md
//! [engine]: https://github.com/phalanx-ml/phalanx/blob/main/docs/parallel/engine.md
//! [memory]: https://github.com/phalanx-ml/phalanx/blob/main/docs/memory.md
//! [bits]: https://github.com/phalanx-ml/phalanx/blob/main/docs/reproducibility.md
//! [cuda]: https://github.com/phalanx-ml/phalanx/blob/main/docs/cuda.md
//! [emulator]: https://github.com/phalanx-ml/phalanx/blob/main/docs/emulator.md
//! [speed]: https://github.com/phalanx-ml/phalanx/blob/main/docs/performance.md
//! [checkpoints]: https://github.com/phalanx-ml/phalanx/blob/main/docs/checkpoints.md
#![forbid(unsafe_code)]

pub mod guide;
pub mod prelude;

#[doc(inline)]
pub use phalanx_autograd as autograd;
#[doc(inline)]
pub use phalanx_kernels as kernels;
#[doc(inline)]
pub use phalanx_nn as nn;
#[cfg(feature = "parallel")]
#[doc(inline)]
pub use phalanx_parallel as parallel;
#[doc(inline)]
pub use phalanx_tensor as tensor;
#[cfg(feature = "train")]
#[doc(inline)]
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
