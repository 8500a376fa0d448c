//! What is run dry: training steps of GPT-2 124M on one GPU and as replicas on eight, and of Llama-3-8B on eight.

use std::error::Error;
use std::sync::Arc;

use phalanx::autograd::ContextMode;
use phalanx::nn::models::{GptConfig, LlamaConfig, ModelConfig, RecomputeMode};
use phalanx::nn::{AdamW, Batch, CapturedStep, Group, Parameters, Rule, Scope};
use phalanx::parallel::comm::NcclConfig;
use phalanx::parallel::data_parallel::{DataParallel, Ddp, DdpConfig};
use phalanx::parallel::hybrid::{Layout, MeshParallel, StagedModel, Step, decoder};
use phalanx::parallel::launch::{Rank, Threads};
use phalanx::parallel::mesh::{Axis, Groups};
use phalanx::parallel::pipeline::ranks::Pipeline;
use phalanx::parallel::sharded::{Zero, ZeroConfig, ZeroStage};
use phalanx::tensor::RngKey;
use phalanx::tensor::cuda::{DryLog, take_dry_log};
use phalanx::{Context, DType, Device, Tensor, Var};

/// A workload and its table's file.
pub struct Workload {
    pub file: &'static str,
    pub title: &'static str,
    /// Tokens of a step that the first GPU trains on.
    pub tokens: u64,
    /// FLOPs of the first GPU's matrix products a step, by the formula: two for each token and weight, forward, and twice that backward.
    pub product_flops: u64,
    pub run: fn() -> Result<Recorded, Box<dyn Error>>,
}

/// What was logged.
pub struct Recorded {
    pub gpus: usize,
    /// While the model and its optimizer are made, in the first step, and in a step like all that follow.
    pub logs: [DryLog; 3],
}

const GPT2_TOKENS: u64 = 64 * 1024;
const GPT2_BLOCK: u64 = 12 * 768 * 768;
const LLAMA3_TOKENS: u64 = 8192;
/// Query and output, key and value, the MLP.
const LLAMA3_BLOCK: u64 = 4096 * (2 * 4096 + 2 * 1024 + 3 * 14_336);

pub const WORKLOADS: [Workload; 3] = [
    Workload {
        file: "gpt2-124m.txt",
        title: "GPT-2 124M (vocabulary 50304), bf16 with an f32 stream, 64 x 1024 tokens, AdamW, one GPU, a captured step",
        tokens: GPT2_TOKENS,
        product_flops: 2 * GPT2_TOKENS * 3 * (12 * GPT2_BLOCK + 50304 * 768),
        run: gpt2,
    },
    Workload {
        file: "llama3-8b.txt",
        title: "Llama-3-8B, bf16 with f32 gradients and masters, 1 x 8192 tokens a GPU, every block recomputed, AdamW, \
                8 GPUs, ZeRO-3 over NCCL, not captured",
        tokens: LLAMA3_TOKENS,
        // Blocks are computed once more.
        product_flops: 2 * LLAMA3_TOKENS * (4 * 32 * LLAMA3_BLOCK + 3 * 128_256 * 4096),
        run: llama3,
    },
    Workload {
        file: "gpt2-124m-ddp.txt",
        title: "GPT-2 124M (vocabulary 50304), bf16 with an f32 stream and f32 gradients, 16 x 1024 tokens a GPU, AdamW, \
                8 GPUs, DDP over NCCL, not captured",
        tokens: GPT2_TOKENS / 4,
        product_flops: 2 * GPT2_TOKENS / 4 * 3 * (12 * GPT2_BLOCK + 50304 * 768),
        run: gpt2_replicas,
    },
];

fn ids(rows: usize, length: usize) -> phalanx::tensor::Result<Tensor> {
    Tensor::from_slice(&vec![0i64; rows * length], &[rows, length], Device::CPU)
}

fn context(step: u64) -> impl Drop {
    Context::with(|c| {
        c.set_train(true);
        c.rng = RngKey { seed: 0, step };
    })
}

fn gpt2() -> Result<Recorded, Box<dyn Error>> {
    let (rows, length, device) = (64, 1024, Device::Cuda(0));
    take_dry_log()?;
    let mut config = GptConfig::new(50304, length, 12, 12, 768);
    config.stream = Some(DType::F32);
    let model = config.init(&Scope::new(0, DType::BF16, device))?;
    let group = Group::new(model.parameters(), 3e-4).with_weight_decay(0.1);
    let mut optimizer = AdamW::default().with_betas(0.9, 0.95).init(vec![group])?;
    let batch = [ids(rows, length)?, ids(rows, length)?];
    let mut captured = CapturedStep::new(device, &batch, Some(1.0))?;
    let mut logs = vec![take_dry_log()?];
    // The first one compiles, the second one captures, the third one is as all that follow.
    for number in 0..3 {
        let _context = context(number);
        captured.run(&mut optimizer, &batch, |batch: &[Var]| {
            model.loss(&model.forward(&batch[0])?, &batch[1], 1.0 / (rows * length) as f64)
        })?;
        logs.push(take_dry_log()?);
    }
    if !captured.is_captured() {
        return Err("the step was not captured".into());
    }
    let [made, first, _, step] = <[DryLog; 4]>::try_from(logs).map_err(|_| "there are four logs")?;
    Ok(Recorded { gpus: 1, logs: [made, first, step] })
}

const RANKS: usize = 8;

fn llama3() -> Result<Recorded, Box<dyn Error>> {
    let mut config = LlamaConfig::new(128_256, 8192, 32, 32, 4096);
    (config.key_heads, config.inner, config.rope_base) = (8, 14_336, 500_000.0);
    let zero = ZeroConfig { grad_dtype: Some(DType::F32), ..ZeroConfig::new(ZeroStage::Parameters) };
    on_ranks(&Replicas {
        model: ModelConfig::Llama(config),
        rows: 1,
        length: 8192,
        recompute: RecomputeMode::Always,
        zero: Some(zero),
    })
}

fn gpt2_replicas() -> Result<Recorded, Box<dyn Error>> {
    let mut config = GptConfig::new(50304, 1024, 12, 12, 768);
    config.stream = Some(DType::F32);
    let model = ModelConfig::Gpt(config);
    on_ranks(&Replicas { model, rows: 16, length: 1024, recompute: RecomputeMode::Never, zero: None })
}

/// A model that all ranks have, or under ZeRO share.
struct Replicas {
    model: ModelConfig,
    /// Sequences of a GPU, and their length.
    rows: usize,
    length: usize,
    recompute: RecomputeMode,
    zero: Option<ZeroConfig>,
}

fn on_ranks(replicas: &Replicas) -> Result<Recorded, Box<dyn Error>> {
    take_dry_log()?;
    let logs = Threads::new(RANKS)
        .nccl(NcclConfig::default())
        .run(|rank| of_rank(replicas, &rank).map_err(|error| error.to_string()))?;
    let logs: Vec<DryLog> = logs.into_iter().flatten().collect();
    Ok(Recorded { gpus: RANKS, logs: logs.try_into().map_err(|_| "the first rank has three logs")? })
}

/// The logs of all ranks' work, on the first rank: of the model's making, of the first step and of the second.
fn of_rank(of: &Replicas, rank: &Rank) -> Result<Vec<DryLog>, Box<dyn Error>> {
    let (comm, device, length) = (rank.comm(), rank.device(), of.length);
    let mut logs = Vec::new();
    let mut log = || -> Result<(), Box<dyn Error>> {
        comm.barrier()?;
        if rank.rank() == 0 {
            logs.push(take_dry_log()?);
        }
        Ok(comm.barrier()?)
    };
    let layout = Layout { dp: RANKS, recompute: of.recompute, ..Layout::default() };
    layout.check(&of.model, RANKS * of.rows, length)?;
    let (groups, schedule) = (Groups::new(layout.mesh()?, comm)?, layout.schedule()?);
    let model = decoder(&of.model, &layout, &groups, &Scope::new(0, DType::BF16, device), None)?;
    let replicas = groups.along(Axis::Dp).clone();
    let summed: Box<dyn DataParallel> = match &of.zero {
        Some(zero) => Box::new(Zero::new(&model, replicas.clone(), zero.clone())?),
        None => {
            let config = DdpConfig { grad_dtype: Some(DType::F32), ..DdpConfig::default() };
            Box::new(Ddp::new(&model, replicas.clone(), config)?)
        }
    };
    let share: Arc<dyn DataParallel> =
        Arc::new(MeshParallel::new(&model, summed, groups.clone(), &schedule)?);
    let pipeline = Pipeline::new(&schedule, groups.along(Axis::Pp).clone(), device)?;
    let model: Arc<dyn StagedModel> = Arc::new(model);
    let group = Group::new(share.parameters(), 3e-4).with_weight_decay(0.1);
    let mut optimizer = AdamW::default().with_betas(0.9, 0.95).init(vec![group])?;
    log()?;
    for number in 0..2 {
        let _context = context(number);
        let part = || ids(of.rows, length)?.to_device(device, false);
        let batch = Batch { tensors: vec![part()?, part()?], first_row: replicas.rank() * of.rows };
        let work = Step {
            model: model.clone(),
            replicas: share.clone(),
            micro_batches: vec![batch],
            scale: 1.0 / (RANKS * of.rows * length) as f64,
        };
        share.zero_grad()?;
        share.begin()?;
        pipeline.train(&Arc::new(work))?;
        share.finish()?;
        share.grad_squares()?.norm()?;
        optimizer.step()?;
        share.updated()?;
        log()?;
    }
    Ok(logs)
}
