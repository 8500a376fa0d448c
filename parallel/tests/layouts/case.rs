//! A case: a model and a layout; all cases that there are, and cases at random, the same in every run.

use std::fmt;

use phalanx_nn::models::{
    Family, GptConfig, LlamaConfig, LoraConfig, ModelConfig, RecomputeMode, RouterLosses, TransformerConfig,
};
use phalanx_nn::{Batch, Parameter, Windows, cut};
use phalanx_parallel::hybrid::Layout;
use phalanx_parallel::sharded::Ownership;
use phalanx_tensor::{DType, Device, Tensor};

/// Positions of a sequence, which divide by 2, 3, 4 and 6.
pub const LENGTH: usize = 12;
/// Features of the stream.
pub const WIDTH: usize = 24;

/// A GPT over bytes, with dropout.
pub fn gpt(layers: usize, heads: usize) -> ModelConfig {
    ModelConfig::Gpt(GptConfig::new(256, LENGTH, layers, heads, WIDTH).with_dropout(0.1))
}

/// A Llama over bytes, with dropout and fewer key heads than query heads.
pub fn llama(layers: usize, heads: usize, key_heads: usize) -> ModelConfig {
    let config = LlamaConfig::new(256, LENGTH, layers, heads, WIDTH);
    ModelConfig::Llama(LlamaConfig { key_heads, inner: 40, dropout: 0.1, ..config })
}

/// Two blocks of a family over bytes, with dropout. Mixtures have 4 experts, of which the second block of a Qwen3-MoE has none.
pub fn sample(family: Family) -> TransformerConfig {
    let size = TransformerConfig {
        key_heads: 2,
        inner: 40,
        dropout: 0.1,
        ..TransformerConfig::new(Family::Llama, 256, LENGTH, 2, 4, WIDTH)
    };
    Family::samples(&size).into_iter().find(|config| config.family == family).unwrap()
}

/// A mixture of which each token takes `chosen` experts. The routers of a Mixtral have biases.
pub fn mixture(family: Family, chosen: usize) -> ModelConfig {
    let mut config = sample(family);
    let experts = config.experts.as_mut().unwrap();
    experts.chosen = chosen;
    experts.bias_step = if family == Family::Mixtral { 0.02 } else { 0.0 };
    ModelConfig::Transformer(config)
}

/// A mixture with losses of its routers.
pub fn balanced(model: ModelConfig) -> ModelConfig {
    let ModelConfig::Transformer(mut config) = model else { return model };
    config.experts.iter_mut().for_each(|experts| experts.losses = RouterLosses { balance: 0.5, z: 0.2 });
    ModelConfig::Transformer(config)
}

/// A model to train, and its layout over the ranks.
#[derive(Clone, Debug, PartialEq)]
pub struct Case {
    pub model: ModelConfig,
    pub dtype: DType,
    pub layout: Layout,
    /// ZeRO's stage; 0 for none.
    pub zero: u8,
    /// How ZeRO cuts parameters.
    pub ownership: Ownership,
    /// How many replicas share a copy under ZeRO; all if `None`.
    pub shard_ranks: Option<usize>,
    /// Where ZeRO's shards are, if not on the rank's device.
    pub offload: Option<Device>,
    /// The elements from which on a module is a unit of ZeRO's; blocks are units if `None`.
    pub unit_elements: Option<usize>,
    /// Adapters, which alone are trained.
    pub lora: Option<LoraConfig>,
    /// Sequences of a batch.
    pub rows: usize,
    /// What frozen parameters have in their names.
    pub frozen: &'static [&'static str],
    /// How many targets in a row do not count, of every 40; 0 for none.
    pub ignored: usize,
    /// Whether rows are of several documents, which do not see each other.
    pub packed: bool,
    /// Whether gates are 0 in the beginning, so that all tokens take the first experts.
    pub level_gates: bool,
}

/// Whether a document begins at a position of a row.
fn begins(row: usize, at: usize) -> bool {
    at == 0 || (row * LENGTH + at).is_multiple_of(5)
}

impl Case {
    /// With micro-batches of different sizes, unless there is one.
    pub fn new(model: ModelConfig, layout: Layout) -> Case {
        let rows = layout.dp * (layout.micro_batches.max(4) + 1);
        Case {
            model,
            dtype: DType::F32,
            layout,
            zero: 0,
            ownership: Ownership::Even,
            shard_ranks: None,
            offload: None,
            unit_elements: None,
            lora: None,
            rows,
            frozen: &[],
            ignored: 0,
            packed: false,
            level_gates: false,
        }
    }

    pub fn ranks(&self) -> usize {
        self.layout.dp * self.layout.tp * self.layout.pp
    }

    /// With shards that are cut, shared and placed in a way that is drawn.
    fn with_drawn_shards(self, draws: &mut Draws) -> Case {
        let dp = self.layout.dp;
        let shared: Vec<usize> = (1..dp).filter(|ranks| dp.is_multiple_of(*ranks)).collect();
        Case {
            ownership: [Ownership::Even, Ownership::Whole][draws.below(2)],
            shard_ranks: shared.get(draws.below(shared.len() + 1)).copied(),
            offload: [None, Some(ELSEWHERE)][draws.below(2)],
            ..self
        }
    }

    /// Whether values are drawn when ZeRO shards them, as `train` has it.
    pub fn defers_values(&self) -> bool {
        self.zero == 3 && self.layout.ep > 1 && !self.level_gates
    }

    /// Freezes the parameters that the case freezes, and makes gates level.
    pub fn prepare(&self, parameters: &[Parameter]) {
        let frozen = parameters.iter().filter(|p| self.frozen.iter().any(|part| p.name().contains(part)));
        frozen.for_each(Parameter::freeze);
        let gates = parameters.iter().filter(|p| self.level_gates && p.name().ends_with(".gate.weight"));
        gates.for_each(|p| phalanx_kernels::fill_(&mut p.tensor(), 0.0).unwrap());
    }

    /// A replica's micro-batches of a step over real text, which does not change, and the targets that count in the whole batch.
    pub fn batches(&self, step: u64, replica: usize, device: Device) -> (Vec<Batch>, usize) {
        let share = self.rows / self.layout.dp;
        let text: Vec<u32> =
            include_bytes!("../../../LICENSE-APACHE").iter().map(|&byte| byte.into()).collect();
        let windows = Windows::new(text.clone(), LENGTH, 11).unwrap();
        let window = |row: usize| {
            let start = windows.start(step * self.rows as u64 + row as u64);
            text[start..=start + LENGTH].iter().map(|&token| i64::from(token))
        };
        let target = |row: usize| {
            let counts = move |at: usize| {
                (row * LENGTH + at) % 40 >= self.ignored && !(self.packed && begins(row, at + 1))
            };
            window(row).skip(1).enumerate().map(move |(at, token)| if counts(at) { token } else { -100 })
        };
        let counted = (0..self.rows).flat_map(target).filter(|&token| token >= 0).count();
        let batch = |piece: std::ops::Range<usize>| {
            let rows = || (piece.start..piece.end).map(|row| row + replica * share);
            let tensor = |tokens: Vec<i64>| Tensor::from_vec(tokens, &[piece.len(), LENGTH], device).unwrap();
            let mut tensors = vec![
                tensor(rows().flat_map(|row| window(row).take(LENGTH)).collect()),
                tensor(rows().flat_map(target).collect()),
            ];
            if self.packed {
                let start = |row, at: usize| (0..=at).rev().find(|&at| begins(row, at)).unwrap_or(0) as i64;
                tensors
                    .push(tensor(rows().flat_map(|row| (0..LENGTH).map(move |at| start(row, at))).collect()));
            }
            Batch { tensors, first_row: replica * share + piece.start }
        };
        (cut(share, self.layout.micro_batches).into_iter().map(batch).collect(), counted)
    }
}

/// Words that a filter may name.
impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Layout { dp, tp, pp, schedule, recompute, micro_batches, .. } = &self.layout;
        let kind = match &self.model {
            ModelConfig::Gpt(_) => "gpt",
            ModelConfig::Llama(_) => "llama",
            ModelConfig::Transformer(config) => config.family.name(),
        };
        write!(f, "{kind}{} {} dp{dp} tp{tp} pp{pp} {schedule}", self.model.layers(), self.dtype)?;
        if schedule == "interleaved" {
            write!(f, "-{}", self.layout.chunks)?;
        }
        write!(f, " recompute-{recompute:?} zero{} micro{micro_batches}", self.zero)?;
        let word = |applies: bool, text: &'static str| applies.then_some(text);
        let words = [
            word(self.layout.ep == 2, "ep2"),
            word(self.layout.ep == 4, "ep4"),
            word(self.level_gates, "level-gates"),
            word(self.packed, "packed"),
            word(self.layout.sequence_parallel, "sequence-parallel"),
            word(self.layout.scatter_gather, "scatter-gather"),
            word(self.layout.logits_max.is_some(), "logits-max"),
            word(self.ownership == Ownership::Whole, "whole"),
            word(self.offload.is_some(), "offload"),
            word(self.unit_elements.is_some(), "small-units"),
            word(self.lora.is_some(), "lora"),
        ];
        words.iter().flatten().try_for_each(|word| write!(f, " {word}"))?;
        self.shard_ranks.map_or(Ok(()), |ranks| write!(f, " shard-ranks{ranks}"))
    }
}

/// Ranks that there are at most.
const RANKS: usize = 8;
/// Schedules, and the stages of a rank in those that may have any number.
const SCHEDULES: [(&str, usize); 8] = [
    ("gpipe", 1),
    ("1f1b", 1),
    ("interleaved", 2),
    ("interleaved", 3),
    ("interleaved", 4),
    ("zb-h1", 1),
    ("zb-h2", 1),
    ("zb-v", 1),
];
const MODES: [RecomputeMode; 4] =
    [RecomputeMode::Never, RecomputeMode::ExceptLast, RecomputeMode::Always, RecomputeMode::Attention];
/// The device of shards that are not on the ranks' devices.
pub const ELSEWHERE: Device = Device::Cpu(60);

/// Layouts of up to 8 ranks, of everything but the mesh: `(dp, tp, pp)`.
fn meshes() -> impl Iterator<Item = (usize, usize, usize)> {
    let all = (1..=RANKS)
        .flat_map(|dp| [1, 2, 3, 6].into_iter().flat_map(move |tp| (1..=RANKS).map(move |pp| (dp, tp, pp))));
    all.filter(|(dp, tp, pp)| dp * tp * pp <= RANKS)
}

/// All that is promised: both models of 4 and 6 layers and 6 heads, under every layout. What else may be chosen under
/// each is drawn.
pub fn all() -> Vec<Case> {
    let models = [gpt(4, 6), gpt(6, 6), llama(4, 6, 2), llama(6, 6, 2)];
    let (mut cases, mut draws) = (Vec::new(), Draws(7));
    for (dp, tp, pp) in meshes() {
        // Where there is one stage, these are the same.
        let schedules =
            SCHEDULES.iter().filter(|(name, _)| pp > 1 || !["gpipe", "zb-h1", "zb-h2"].contains(name));
        let dtypes =
            if tp == 1 { &[DType::F32, DType::BF16][..] } else { &[DType::F32, DType::F64, DType::BF16] };
        for (&(schedule, chunks), &dtype) in
            schedules.flat_map(|name| dtypes.iter().map(move |dtype| (name, dtype)))
        {
            for (recompute, zero) in MODES.into_iter().flat_map(|mode| (0..4).map(move |zero| (mode, zero))) {
                for (micro_batches, model) in
                    [1, 2, 3, 5].into_iter().flat_map(|m| models.iter().map(move |c| (m, c)))
                {
                    for sequence_parallel in [false, true].into_iter().take(tp.min(2)) {
                        let layout = Layout {
                            dp,
                            tp,
                            pp,
                            ep: 1,
                            schedule: schedule.into(),
                            chunks,
                            micro_batches,
                            recompute,
                            sequence_parallel,
                            scatter_gather: tp > 1 && pp > 1 && !sequence_parallel && draws.below(2) == 0,
                            logits_max: [None, Some(1000)][draws.below(2)],
                            plan: None,
                        };
                        let case = Case { dtype, zero, ..Case::new(model.clone(), layout) };
                        cases.push(if zero > 0 { case.with_drawn_shards(&mut draws) } else { case });
                    }
                }
            }
        }
    }
    cases
}

/// Numbers that look random, by a seed.
pub struct Draws(pub u64);

impl Draws {
    /// One below `n`. Source: Steele et al.: Fast splittable pseudorandom number generators (2014).
    pub fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) % n as u64) as usize
    }
}
