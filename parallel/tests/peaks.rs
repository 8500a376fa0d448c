//! The most memory that a rank holds inside a training step, counted on a device without elements: of published models on devices of 32
//! GB, and of small ones, which a CPU rank among others confirms to the byte. Alone in this file, whose ledgers no other test may touch.

use std::sync::{Arc, Mutex};

use phalanx_nn::autograd::{ContextMode, Var};
use phalanx_nn::models::{GptConfig, LlamaConfig, ModelConfig, RecomputeMode};
use phalanx_nn::{AdamW, Batch, Clip, Group, Parameters, Rule, Scope};
use phalanx_parallel::comm::{self, Comm};
use phalanx_parallel::data_parallel::{DataParallel, Ddp, DdpConfig};
use phalanx_parallel::hybrid::{Layout, MeshParallel, StagedModel, Step, decoder};
use phalanx_parallel::mesh::{Axis, Groups};
use phalanx_parallel::pipeline::ranks::Pipeline;
use phalanx_parallel::sharded::{Zero, ZeroConfig, ZeroStage};
use phalanx_parallel::{Result, launch};
use phalanx_tensor::{Category, Context, DType, Device, Ledger, RngKey, Tensor};

/// The ledgers are the process's.
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

/// A run in bf16 with ZeRO-3 over the data-parallel ranks: every rank trains on a sequence at a time of `positions` positions.
struct Program {
    config: ModelConfig,
    positions: usize,
    layout: Layout,
}

/// Peak bytes of each category, in the order of [`Category::ALL`], and of all together.
type Peaks = [usize; 6];

/// What a rank held.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Books {
    /// While the model and the optimizer were made.
    built: Peaks,
    /// In each step: forward, backward, the norm, and the update.
    steps: Vec<Peaks>,
    /// Of the parameters of its part of the model, and of those that it owns.
    elements: [usize; 2],
}

fn peaks(ledger: &Ledger) -> Peaks {
    let [a, b, c, d, e] = Category::ALL.map(|category| ledger.category(category).peak);
    [a, b, c, d, e, ledger.total().peak]
}

impl Program {
    fn ranks(&self) -> usize {
        self.layout.mesh().unwrap().ranks()
    }

    /// Three steps of a rank. On a device without elements what it sends to another stage may count until the receiver has to take it
    /// (`late`).
    fn run(&self, comm: &Comm, device: Device, late: bool) -> Result<Books> {
        let (layout, ledger) = (&self.layout, device.ledger()?);
        ledger.reset_peak();
        let (groups, schedule) = (Groups::new(layout.mesh()?, comm)?, layout.schedule()?);
        let scope = Scope::new(1, DType::BF16, device).deferred();
        let model = decoder(&self.config, layout, &groups, &scope, None)?;
        let replicas = groups.along(Axis::Dp).clone();
        let zero = Zero::new(&model, replicas, ZeroConfig::new(ZeroStage::Parameters))?;
        let held = model.parameters().iter().map(|p| p.tensor().numel()).sum();
        let elements = [held, zero.shard_sizes()[groups.at().dp]];
        let replicas = MeshParallel::new(&model, Box::new(zero), groups.clone(), &schedule)?;
        let (model, replicas): (Arc<dyn StagedModel>, Arc<dyn DataParallel>) =
            (Arc::new(model), Arc::new(replicas));
        let mut pipeline = Pipeline::new(&schedule, groups.along(Axis::Pp).clone(), device)?;
        if schedule.stages() > 1 {
            pipeline = pipeline.recompute(layout.recompute);
        }
        if late {
            pipeline = pipeline.with_slow_receivers()?;
        }
        let parameters = Group::decay_matrices(replicas.parameters(), 1e-3, 0.1);
        let mut optimizer = AdamW::default().init(parameters)?;
        let (built, mut steps) = (peaks(ledger), Vec::new());
        for step in 0..3 {
            ledger.reset_peak();
            let _context = Context::with(|c| {
                c.set_train(true);
                c.rng = RngKey { seed: 5, step };
            });
            replicas.zero_grad()?;
            let first_row = groups.at().dp * layout.micro_batches;
            let batch = |micro_batch| self.batch(first_row + micro_batch, device);
            let micro_batches = (0..layout.micro_batches).map(batch).collect::<Result<_>>()?;
            let work = Step { model: model.clone(), replicas: replicas.clone(), micro_batches, scale: 1.0 };
            replicas.begin()?;
            let losses = pipeline.train(&Arc::new(work))?;
            replicas.finish()?;
            drop(losses);
            let norm = replicas.grad_squares()?.norm()?;
            optimizer.step_by(&Clip::factor(&norm, 1.0)?)?;
            replicas.updated()?;
            steps.push(peaks(ledger));
        }
        Ok(Books { built, steps, elements })
    }

    /// A row of tokens and its targets.
    fn batch(&self, first_row: usize, device: Device) -> Result<Batch> {
        let tokens = || Tensor::zeros(&[1, self.positions], DType::I64, device);
        Ok(Batch { tensors: vec![tokens()?, tokens()?], first_row })
    }

    /// The books of a rank without peers.
    fn on_meta(&self, rank: usize, late: bool) -> Books {
        self.run(&comm::meta(rank, self.ranks()).unwrap(), Device::Meta(800), late).unwrap()
    }
}

/// Recomputation, a part of the logits at a time, and with tensor parallelism the activations cut by positions.
fn lean(tp: usize, dp: usize, pp: usize, logits_max: usize) -> Layout {
    let (recompute, logits_max) = (RecomputeMode::Always, Some(logits_max));
    Layout { tp, dp, pp, recompute, logits_max, sequence_parallel: tp > 1, ..Layout::default() }
}

/// A model that was published, with 16 bytes of state for each parameter, and the ranks that train it, each with 32 GB.
struct Published {
    name: &'static str,
    config: GptConfig,
    layout: Layout,
}

fn published() -> [Published; 3] {
    // The blocks that make 10^12 parameters are those of `zero_memory.rs`; the others are GPT-3's (2020, table 2.1).
    let trillion = GptConfig::new(46_900, 1024, 127, 128, 25_600);
    let gpt3 = |layers, heads, width| GptConfig::new(50_257, 2048, layers, heads, width);
    let published = |name, config, layout| Published { name, config, layout };
    [
        published("1T", trillion, lean(8, 128, 1, 1 << 24)),
        published("175B", gpt3(96, 96, 12_288), lean(8, 16, 1, 1 << 24)),
        published("13B", gpt3(40, 40, 5120), lean(1, 8, 1, 1 << 24)),
    ]
}

/// The peak comes late in backward, when block 1 computes its gradients: block 0 is gathered already, the gradients of block 2 are on
/// their way to their owners, and those of all later blocks have arrived. In elements, `own` are this rank's shards, `block` a block,
/// `table` the token table, which is the head's too, and `unit` what is gathered with it (positions and the last norm); all are this
/// rank's part under tensor parallelism. Then the bytes are
///
/// ```text
/// parameters       2 (own + 2 block + unit)
/// gradients        2 (own - shards of blocks 0 and 1 and of the unit + 2 block + table)
/// optimizer state  12 own
/// activations      s h (38 / t + 4 (1 - 1 / t))     of s positions of width h: a block's own, and the stream of all positions, gathered
/// ```
/// The gradients alone have their peak later: when block 0's are sent, or when those of the unit are.
struct Formula {
    categories: [usize; 4],
    gradients_alone: usize,
}

fn formula(published: &Published, own: usize) -> Formula {
    let GptConfig { vocabulary, context, layers, width: h, .. } = published.config;
    let t = published.layout.tp;
    let block = (12 * h * h + 7 * h) / t + 6 * h;
    let table = vocabulary * h / t;
    let unit = table + context * h + 2 * h;
    let shards = |elements: usize| own * elements / (layers * block + unit);
    let block_0_sent = own - shards(unit) + 2 * block + table;
    let unit_sent = own + shards(unit) + block + unit + table;
    Formula {
        categories: [
            2 * (own + 2 * block + unit),
            2 * (own - shards(2 * block + unit) + 2 * block + table),
            12 * own,
            context * h * (38 + 4 * (t - 1)) / t,
        ],
        gradients_alone: 2 * block_0_sent.max(unit_sent),
    }
}

/// Sources: Rajbhandari et al., "ZeRO" (2020), table 1; Zhao et al., "PyTorch FSDP" (2023), section 5.4.
#[test]
fn a_trillion_parameters_on_1024_ranks_and_smaller_models_on_fewer_fit_in_32_gb_in_every_moment_of_a_step() {
    let _alone = ONE_AT_A_TIME.lock().unwrap();
    for (published, [parameters, ranks]) in
        published().iter().zip([[1e12, 1024.0], [175e9, 128.0], [12.9e9, 8.0]])
    {
        let Published { name, config, layout } = published;
        let program = Program {
            config: ModelConfig::Gpt(config.clone()),
            positions: config.context,
            layout: layout.clone(),
        };
        assert_eq!(program.ranks() as f64, ranks);
        for rank in [0, program.ranks() / 2 - 1, program.ranks() - 1] {
            let Books { built, steps, elements: [held, own] } = program.on_meta(rank, false);
            assert!((held as f64 * layout.tp as f64 / parameters - 1.0).abs() < 5e-3, "{name}: {held}");
            assert_eq!(steps[0], steps[1], "{name}, rank {rank}: the first step");
            assert_eq!(steps[2], steps[1], "{name}, rank {rank}");
            let Formula { categories, gradients_alone } = formula(published, own);
            let [values, gradients, state, _, _, total] = steps[2];
            let near = |got: usize, wanted: usize, part: f64| (got as f64 / wanted as f64 - 1.0).abs() < part;
            assert!(near(values, categories[0], 1e-5), "{name}, rank {rank}: {values}, {categories:?}");
            assert!(
                near(gradients, gradients_alone, 5e-3),
                "{name}, rank {rank}: {gradients}, {gradients_alone}"
            );
            assert_eq!(state, categories[2], "{name}, rank {rank}");
            // Values are drawn and cut unit by unit, so what is made last, the optimizer's state, makes the peak.
            assert_eq!(built[5], 14 * own, "{name}, rank {rank}: while it was made");
            let sum: usize = categories.iter().sum();
            assert!(near(total, sum, 2e-3), "{name}, rank {rank}: {total}, {sum}: {categories:?}");
            assert!(total < 32_000_000_000, "{name}, rank {rank}: {total}");
        }
    }
}

#[test]
fn a_rank_without_peers_on_meta_has_the_peaks_of_one_among_all() {
    let _alone = ONE_AT_A_TIME.lock().unwrap();
    let gpt = ModelConfig::Gpt(GptConfig::new(201, 16, 3, 4, 32).with_dropout(0.1));
    let llama = ModelConfig::Llama(LlamaConfig::new(201, 16, 3, 4, 32));
    for (config, layout) in [
        (&gpt, lean(2, 2, 1, 500)),
        (&llama, lean(2, 2, 1, 500)),
        (&gpt, lean(1, 8, 1, 500)),
        (&gpt, Layout { sequence_parallel: false, logits_max: None, ..lean(2, 2, 1, 0) }),
        (&gpt, lean(1, 1, 2, 500)),
        (&llama, Layout { micro_batches: 3, ..lean(2, 2, 2, 500) }),
    ] {
        let program = Program { config: config.clone(), positions: 16, layout };
        let run = |rank: launch::Rank| program.run(rank.comm(), rank.device(), false);
        for (rank, got) in launch::threads(program.ranks(), run).unwrap().into_iter().enumerate() {
            let [early, late] = [false, true].map(|late| program.on_meta(rank, late));
            let told = format!("rank {rank} of {:?}, {config:?}", program.layout);
            // The last stage's gradients wait for the first stage for a time that depends on the machine.
            let waits = program.layout.micro_batches > 1 && rank >= program.ranks() / 2;
            assert_eq!(early == late, !waits, "{told}");
            let numbers = |books: &Books| [&[books.built][..], &books.steps].concat().concat();
            let between = numbers(&early).into_iter().zip(numbers(&late)).map(|(early, late)| early..=late);
            let is_between = numbers(&got).iter().zip(between).all(|(got, range)| range.contains(got));
            assert!(is_between && got.elements == early.elements, "{told}: {got:?}, {early:?}, {late:?}");
        }
    }
}

/// After its first pass `Ddp` puts the gradients into buckets in their order of arrival. A bucket has up to `BYTES` and the gradient that
/// fills it.
#[test]
fn the_first_step_of_ddp_holds_two_buckets_more_than_later_ones_at_the_most() {
    let _alone = ONE_AT_A_TIME.lock().unwrap();
    const BYTES: usize = 1 << 18;
    let device = Device::Meta(800);
    let model = GptConfig::new(256, 64, 12, 4, 128).init(&Scope::new(1, DType::F32, device)).unwrap();
    let largest = model.parameters().iter().map(|p| 4 * p.tensor().numel()).max().unwrap();
    let config = DdpConfig { first_bucket_bytes: BYTES, bucket_bytes: BYTES, ..DdpConfig::default() };
    let ddp = Ddp::new(&model, comm::meta(0, 4).unwrap(), config).unwrap();
    let gradients = || device.ledger().unwrap().category(Category::Gradients);
    let before = (gradients().now, ddp.buckets());
    let step = || {
        device.ledger().unwrap().reset_peak();
        let tokens = Var::new(Tensor::zeros(&[1, 64], DType::I64, device).unwrap());
        ddp.backward(&model.loss(&model.forward(&tokens).unwrap(), &tokens, 1.0).unwrap()).unwrap();
        gradients().peak
    };
    let [first, second] = [step(), step()];
    assert_ne!(ddp.buckets(), before.1, "the order has changed");
    assert!(before.0 > 30 * BYTES && gradients().now == before.0);
    assert!(first <= before.0 + 2 * (BYTES + largest), "{first} in the first step, {} before", before.0);
    assert!(second <= before.0 + largest, "{second} in the second step, {} before", before.0);
}
