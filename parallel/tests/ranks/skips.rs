//! Skips between layers of any stages, and values that pass them, against the plain sequence on one device.

use std::collections::BTreeMap;
use std::sync::Arc;

use phalanx_nn::autograd::Var;
use phalanx_nn::models::RecomputeMode;
use phalanx_nn::{Linear, LinearConfig, Module, Parameters, Scope};
use phalanx_parallel::launch::Rank;
use phalanx_parallel::pipeline::gpipe::{Batch, Layer, Sequence, Skip, Skippable, Skips};
use phalanx_parallel::pipeline::ranks::{Pipeline, StageArgs, StageFn, StagedSequence};
use phalanx_parallel::pipeline::schedule::{Schedule, by_name, one_f_one_b};
use phalanx_parallel::{Result, launch};
use phalanx_tensor::{DType, Device};

const WIDTH: usize = 4;

/// A linear map that adds what it pops, and stashes its output under some names and `None` under others.
struct Crossing {
    linear: Linear,
    pops: Vec<&'static str>,
    stashes: Vec<&'static str>,
    nothing: Vec<&'static str>,
}

phalanx_nn::parameters!(Crossing { linear = "" });

impl Layer for Crossing {
    fn run(&self, input: Batch, skips: &mut Skips) -> Result<Batch> {
        let mut x = input.one()?;
        for name in &self.pops {
            if let Some(skip) = skips.pop(&Skip::new(*name))? {
                x = (&x + &skip.sin()?)?;
            }
        }
        let y = self.linear.forward(&x)?.tanh()?;
        for name in &self.stashes {
            skips.stash(&Skip::new(*name), y.clone())?;
        }
        for name in &self.nothing {
            skips.stash(&Skip::new(*name), None)?;
        }
        Ok(y.into())
    }

    fn skippable(&self) -> Skippable {
        skippable(&self.pops, &self.stashes, &self.nothing)
    }
}

fn skippable(pops: &[&str], stashes: &[&str], nothing: &[&str]) -> Skippable {
    let all = stashes.iter().chain(nothing);
    let stashing = all.fold(Skippable::new(), |skippable, name| skippable.stash(Skip::new(*name)));
    pops.iter().fold(stashing, |skippable, name| skippable.pop(Skip::new(*name)))
}

type Names = [&'static [&'static str]; 3];

/// Of each layer what it pops, what it stashes, and what it stashes as `None`.
const LAYERS: [Names; 7] = [
    [&[], &["far", "near"], &[]],
    [&[], &["middle"], &["nothing"]],
    [&["near"], &[], &[]],
    [&[], &["late"], &[]],
    [&["middle"], &[], &[]],
    [&["late", "nothing"], &[], &[]],
    [&["far"], &[], &[]],
];

fn layer(i: usize, device: Device) -> Box<dyn Layer> {
    let linear = LinearConfig::new(WIDTH, WIDTH);
    let linear = linear.init(&Scope::new(5, DType::F32, device).child(i)).unwrap();
    let [pops, stashes, nothing] = LAYERS[i].map(<[_]>::to_vec);
    Box::new(Crossing { linear, pops, stashes, nothing })
}

fn sample(i: usize, device: Device) -> Var {
    let rows = 1 + i % 2;
    let values: Vec<f32> = (0..rows * WIDTH).map(|j| ((i * 11 + j * 7) % 13) as f32 / 6.0 - 1.0).collect();
    Var::from_slice(&values, &[rows, WIDTH], device).unwrap()
}

type Bytes = Vec<u8>;

/// Losses, and gradients by name.
fn alone(micro_batches: usize) -> (Vec<Bytes>, BTreeMap<String, Bytes>) {
    let model = Sequence::from((0..7).map(|i| layer(i, Device::CPU)).collect::<Vec<_>>());
    let losses = (0..micro_batches).map(|i| {
        let loss =
            model.run(sample(i, Device::CPU)).unwrap().one().unwrap().square().unwrap().sum_all().unwrap();
        loss.backward().unwrap();
        loss.tensor().to_bytes().unwrap()
    });
    (losses.collect(), grads(&model))
}

fn grads(model: &impl Parameters) -> BTreeMap<String, Bytes> {
    let mut grads = BTreeMap::new();
    model.visit("", &mut |path, entry| {
        if let phalanx_nn::Entry::Parameter(parameter) = entry {
            grads.insert(path.to_string(), parameter.grad().unwrap().unwrap().to_bytes().unwrap());
        }
    });
    grads
}

fn staged(balance: &[usize], stages: Vec<usize>, device: Device) -> Result<StagedSequence> {
    let skippables: Vec<Skippable> = LAYERS.map(|[a, b, c]| skippable(a, b, c)).to_vec();
    let own = |stage: usize| {
        let first: usize = balance[..stage].iter().sum();
        let layers: Vec<_> = (first..first + balance[stage]).map(|i| layer(i, device)).collect();
        (stage, Sequence::from(layers))
    };
    StagedSequence::new(balance, &skippables, stages.into_iter().map(own).collect())
}

fn train(
    rank: &Rank,
    balance: &[usize],
    schedule: &Schedule,
    mode: RecomputeMode,
) -> Result<(Vec<Bytes>, BTreeMap<String, Bytes>)> {
    let pipeline = Pipeline::new(schedule, rank.comm().clone(), rank.device())?.recompute(mode);
    let model = Arc::new(staged(balance, pipeline.stages(), rank.device())?);
    let (own, device, last) = (model.clone(), rank.device(), balance.len() - 1);
    let work = StageFn::of_values(move |args: StageArgs<'_, ()>, inputs: &[Var]| {
        let given = if args.stage == 0 { vec![sample(args.micro_batch, device)] } else { inputs.to_vec() };
        let outputs = own.run(args.stage, &given)?;
        Ok(if args.stage == last { vec![outputs[0].square()?.sum_all()?] } else { outputs })
    })
    .with_skips(model.skips().to_vec());
    let losses = pipeline.train(&work.on((), 0))?;
    Ok((losses.iter().map(|loss| loss.to_bytes().unwrap()).collect(), grads(&*model)))
}

#[test]
fn skips_between_ranks_have_the_bits_of_the_plain_sequence() {
    let cases: [(&str, &[usize], usize, usize); 6] = [
        ("1f1b", &[2, 1, 4], 3, 1),
        ("1f1b", &[1, 1, 1, 1, 1, 2], 6, 1),
        ("gpipe", &[1, 5, 1], 3, 1),
        ("zb-h1", &[3, 1, 2, 1], 4, 1),
        ("interleaved", &[2, 1, 2, 2], 2, 2),
        ("zb-v", &[1, 3, 1, 2], 2, 2),
    ];
    for (name, balance, ranks, chunks) in cases {
        for mode in [RecomputeMode::Never, RecomputeMode::Always] {
            let schedule = by_name(name, ranks, chunks, 4).unwrap();
            let got = launch::threads(ranks, |rank| train(&rank, balance, &schedule, mode)).unwrap();
            let (losses, wanted) = alone(4);
            let what = format!("{name} {balance:?} {mode:?}");
            assert_eq!(got.iter().flat_map(|(l, _)| l.clone()).collect::<Vec<_>>(), losses, "{what}");
            let grads: BTreeMap<_, _> = got.into_iter().flat_map(|(_, grads)| grads).collect();
            assert_eq!(grads, wanted, "{what}");
        }
    }
}

#[test]
fn a_skip_has_a_route_if_it_leaves_its_stage() {
    let routes = |balance: &[usize]| {
        let skips = staged(balance, vec![], Device::CPU).unwrap().skips().to_vec();
        skips.iter().map(|skip| (skip.from, skip.to)).collect::<Vec<_>>()
    };
    assert!(routes(&[7]).is_empty());
    // `far`, `middle` and `nothing`.
    assert_eq!(routes(&[3, 4]), [(0, 1), (0, 1), (0, 1)]);
    assert_eq!(routes(&[2, 2, 3]), [(0, 1), (0, 2), (0, 2), (0, 2), (1, 2)]);
}

#[test]
fn layers_that_are_not_those_of_the_stage_are_refused() {
    let skippables: Vec<Skippable> = LAYERS.map(|[a, b, c]| skippable(a, b, c)).to_vec();
    let own =
        |from: usize| Sequence::from((from..from + 2).map(|i| layer(i, Device::CPU)).collect::<Vec<_>>());
    let error = |balance: &[usize], own| {
        StagedSequence::new(balance, &skippables, vec![own]).err().unwrap().to_string()
    };
    let other = error(&[2, 5], (0, own(1)));
    assert!(other.contains("stage 0 of 2 layers with skips [stashes `middle`"), "{other}");
    assert!(error(&[2, 4], (0, own(0))).contains("got the skips of 7 layers, wanted those of 6"));
    assert!(error(&[2, 5], (2, own(0))).contains("stage 2"));
    let run = |rank: Rank| -> Result<()> {
        let model = staged(&[3, 4], vec![rank.rank()], rank.device())?;
        let work = StageFn::of_values(move |args: StageArgs<'_, ()>, inputs: &[Var]| {
            let given = if args.stage == 0 { vec![sample(0, Device::CPU)] } else { inputs.to_vec() };
            model.run(args.stage, &given)
        });
        // The skips are not announced, so the list is taken for values.
        Pipeline::new(&one_f_one_b(2, 1)?, rank.comm().clone(), rank.device())?
            .train(&work.on((), 0))
            .map(drop)
    };
    assert!(launch::threads(2, run).is_err());
}
