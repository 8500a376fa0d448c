//! A T5 over pipeline stages, of which the first are the encoder's, tensor-parallel ranks and replicas trains as one device does.

use std::collections::BTreeSet;
use std::sync::Arc;

use phalanx_nn::models::{RecomputeMode, T5Config};
use phalanx_nn::{Batch, Clip, Parameters, Scope, cut};
use phalanx_parallel::Result;
use phalanx_parallel::data_parallel::{DataParallel, Ddp, DdpConfig, SingleDevice};
use phalanx_parallel::hybrid::{Layout, MeshParallel, StagedModel, Step, encoder_decoder};
use phalanx_parallel::launch::{self, Rank};
use phalanx_parallel::mesh::{Axis, Groups};
use phalanx_parallel::pipeline::ranks::Pipeline;
use phalanx_parallel::planning::{StagePlan, StageReplicas};
use phalanx_parallel::sharded::{Zero, ZeroConfig, ZeroStage};
use phalanx_tensor::{DType, Device, Tensor};

use crate::run::{CLIP, SEED, Update, context, number};

const ROWS: usize = 8;
const STEPS: u64 = 2;

fn config(shared_bias: bool) -> T5Config {
    let config = T5Config { decoder_layers: 4, inner: 21, ..T5Config::new(67, 3, 6, 4, 24) };
    T5Config { shared_bias, dropout: 0.1, buckets: 8, max_distance: 12, ..config }
}

/// How a T5 is laid out.
#[derive(Clone, Debug)]
struct Case {
    config: T5Config,
    layout: Layout,
    encoder_stages: usize,
    zero: u8,
    dtype: DType,
}

impl Case {
    /// With micro-batches of unlike sizes: 8 rows in 3.
    fn new(shared_bias: bool, [dp, tp, pp]: [usize; 3], encoder_stages: usize, schedule: &str) -> Case {
        let layout = Layout { dp, tp, pp, schedule: schedule.into(), micro_batches: 3, ..Layout::default() };
        Case { config: config(shared_bias), layout, encoder_stages, zero: 0, dtype: DType::F32 }
    }

    fn ranks(&self) -> usize {
        self.layout.dp * self.layout.tp * self.layout.pp
    }

    /// The micro-batches of a step's replica: pairs of 9 and 7 tokens, whose labels are the target's next tokens.
    fn batches(&self, step: u64, replica: usize, device: Device) -> Vec<Batch> {
        let tokens = |rows: std::ops::Range<usize>, length: usize, by: usize| {
            let at = |row: usize, i: usize| ((row * 13 + i * by + i / 3 + 7 * step as usize) % 67) as i64;
            let numbers: Vec<i64> =
                rows.clone().flat_map(|row| (0..length).map(move |i| at(row, i))).collect();
            Tensor::from_slice(&numbers, &[rows.len(), length], device).unwrap()
        };
        let own = cut(ROWS, self.layout.dp)[replica].clone();
        let pieces = cut(own.len(), self.layout.micro_batches).into_iter();
        let pieces = pieces.map(|piece| own.start + piece.start..own.start + piece.end);
        pieces
            .map(|rows| Batch {
                first_row: rows.start,
                tensors: vec![tokens(rows.clone(), 9, 5), tokens(rows.clone(), 7, 3), tokens(rows, 7, 11)],
            })
            .collect()
    }

    fn train(&self, rank: &Rank) -> Result<Outcome> {
        let Case { config, layout, encoder_stages, zero, dtype } = self;
        let groups = Groups::new(layout.mesh()?, rank.comm())?;
        let scope = Scope::new(SEED, *dtype, rank.device());
        let model = encoder_decoder(config, *encoder_stages, layout, &groups, &scope)?;
        let batches = |step, replica| self.batches(step, replica, rank.device());
        train(model, layout, *zero, &groups, batches, 1.0 / (ROWS * 7) as f64)
    }

    /// What all ranks came to.
    fn run(&self) -> Outcome {
        let outcomes = launch::threads(self.ranks(), |rank| self.train(&rank));
        Outcome::of_all(outcomes.unwrap_or_else(|e| panic!("{self:?}: {e}")))
    }
}

/// Trains a rank's stages for some steps. `batches` are the micro-batches of a step's replica, whose losses are multiplied by `scale`.
pub fn train(
    model: Box<dyn StagedModel>,
    layout: &Layout,
    zero: u8,
    groups: &Groups,
    batches: impl Fn(u64, usize) -> Vec<Batch>,
    scale: f64,
) -> Result<Outcome> {
    let schedule = layout.schedule()?;
    let device = model.parameters()[0].device();
    let mut pipeline = Pipeline::new(&schedule, groups.along(Axis::Pp).clone(), device)?;
    if schedule.stages() > 1 {
        pipeline = pipeline.recompute(layout.recompute);
    }
    if layout.scatter_gather {
        pipeline = pipeline.scatter_gather(groups.along(Axis::Tp));
    }
    let comm = groups.along(Axis::Dp).clone();
    let replicas: Box<dyn DataParallel> = match (zero, comm.size()) {
        (0, 1) => Box::new(SingleDevice::new(&model)),
        (0, _) => Box::new(Ddp::new(&model, comm, DdpConfig::default())?),
        (stage, _) => Box::new(Zero::new(&model, comm, ZeroConfig::new(ZeroStage::try_from(stage)?))?),
    };
    let share: Arc<dyn DataParallel> =
        Arc::new(MeshParallel::new(&model, replicas, groups.clone(), &schedule)?);
    let mut optimizer = Update::AdamW.optimizer(share.parameters())?;
    let (model, mut outcome) = (Arc::new(model), Outcome::default());
    for step in 0..STEPS {
        let _context = context(step);
        let micro_batches = batches(step, groups.at().dp);
        let (model, replicas) = (model.clone(), share.clone());
        let work = Arc::new(Step { model, replicas, micro_batches, scale });
        share.zero_grad()?;
        share.begin()?;
        for (i, loss) in pipeline.train(&work)?.iter().enumerate() {
            outcome.losses.insert((step, groups.at().dp, i, number(loss)?.to_bits()));
        }
        share.finish()?;
        let norm = share.grad_norm()?;
        outcome.norms.insert(norm.to_bits());
        optimizer.step_scaled(Clip::new(norm, CLIP).scale)?;
        share.updated()?;
    }
    for (name, tensor) in share.full_state_dict(&model)? {
        outcome.weights.insert((name, tensor.to_bytes()?));
    }
    Ok(outcome)
}

/// Losses by step, replica and micro-batch; norms; whole weights by name. Numbers are bits.
#[derive(Debug, Default, PartialEq)]
pub struct Outcome {
    pub losses: BTreeSet<(u64, usize, usize, u64)>,
    pub norms: BTreeSet<u64>,
    pub weights: BTreeSet<(String, Vec<u8>)>,
}

impl Outcome {
    /// What all ranks came to.
    pub fn of_all(ranks: Vec<Outcome>) -> Outcome {
        ranks.into_iter().fold(Outcome::default(), |mut all, own| {
            all.losses.extend(own.losses);
            all.norms.extend(own.norms);
            all.weights.extend(own.weights);
            all
        })
    }

    /// Panics if losses are not near those of one device, in f64: sums over ranks are rounded otherwise.
    pub fn assert_near(&self, wanted: &Outcome) {
        assert_eq!(self.losses.len(), wanted.losses.len());
        for (got, wanted) in self.losses.iter().zip(&wanted.losses) {
            assert_eq!((got.0, got.1, got.2), (wanted.0, wanted.1, wanted.2));
            let [a, b] = [got.3, wanted.3].map(f64::from_bits);
            assert!((a / b - 1.0).abs() < 1e-11, "{a} {b}");
        }
    }
}

fn assert_same(case: &Case, wanted: &Outcome) {
    let got = case.run();
    assert_eq!(got.losses, wanted.losses, "{case:?}");
    assert_eq!(got.norms, wanted.norms, "{case:?}");
    let differing: Vec<&String> = got.weights.symmetric_difference(&wanted.weights).map(|(n, _)| n).collect();
    assert!(differing.is_empty(), "{case:?}: {differing:?}");
}

#[test]
fn a_t5_on_two_and_four_ranks_has_the_bits_of_one_device() {
    for shared_bias in [true, false] {
        let wanted = Case::new(shared_bias, [1, 1, 1], 1, "1f1b").run();
        assert_eq!(wanted.losses.len(), 6);
        assert_same(&Case::new(shared_bias, [1, 1, 2], 1, "1f1b"), &wanted);
        if shared_bias {
            continue;
        }
        for (pp, encoder_stages, schedule) in
            [(4, 2, "1f1b"), (4, 1, "gpipe"), (3, 2, "zb-h1"), (2, 2, "interleaved"), (2, 1, "zb-v")]
        {
            let case = Case::new(shared_bias, [1, 1, pp], encoder_stages, schedule);
            assert_same(&case, &wanted);
            let layout = Layout { recompute: RecomputeMode::ExceptLast, ..case.layout.clone() };
            assert_same(&Case { layout, ..case }, &wanted);
        }
    }
}

#[test]
fn replicas_of_a_t5_have_the_bits_of_replicas_without_stages() {
    for shared_bias in [true, false] {
        let wanted = Case::new(shared_bias, [2, 1, 1], 1, "1f1b").run();
        for zero in 0..4 {
            let case = Case { zero, ..Case::new(shared_bias, [2, 1, 2], 1, "1f1b") };
            assert_same(&case, &wanted);
        }
    }
}

#[test]
fn a_plan_of_layers_in_a_row_is_refused() {
    let stage = |layers| StageReplicas { layers, replicas: 1 };
    let mut case = Case::new(true, [1, 1, 2], 1, "1f1b");
    case.layout.plan = Some(StagePlan::new(vec![stage(0..4), stage(4..6)]).unwrap().named("a.toml"));
    let error = launch::threads(2, |rank| case.train(&rank)).unwrap_err().to_string();
    assert!(error.contains("encoder-decoder: got the plan a.toml of a model of layers in a row"), "{error}");
}

/// Stages, and parts that are sent, change no bit of a T5 that is split over ranks, which is as near to one device as sums of other parts.
#[test]
fn a_t5_split_over_ranks_has_the_same_bits_under_any_stages() {
    let of =
        |mesh, encoder_stages| Case { dtype: DType::F64, ..Case::new(false, mesh, encoder_stages, "1f1b") };
    let (alone, split) = (of([1, 1, 1], 1).run(), of([1, 2, 1], 1).run());
    assert_eq!(alone.losses.len(), 6);
    split.assert_near(&alone);
    for scatter_gather in [false, true] {
        let case = of([1, 2, 2], 1);
        let layout = Layout { scatter_gather, ..case.layout.clone() };
        assert_same(&Case { layout, ..case }, &split);
    }
}
