//! Several values between stages of different ranks, of several dtypes, against one device.

use std::sync::Arc;

use phalanx_nn::autograd::Var;
use phalanx_nn::models::RecomputeMode;
use phalanx_nn::{Embedding, EmbeddingConfig, Linear, LinearConfig, Module, Parameters, Scope};
use phalanx_parallel::launch::Rank;
use phalanx_parallel::mesh::{Axis, Groups, Mesh};
use phalanx_parallel::pipeline::ranks::{Pipeline, Spec, StageArgs, StageFn};
use phalanx_parallel::pipeline::schedule::{Schedule, by_name, one_f_one_b};
use phalanx_parallel::{Result, launch};
use phalanx_tensor::{DType, Device, Tensor};

const WIDTH: usize = 5;

/// A model of four stages: an encoder's output and tokens travel on beside a decoder's stream.
struct Layers {
    table: Embedding,
    linear: Vec<Linear>,
}

impl Layers {
    fn new(device: Device) -> Layers {
        let scope = Scope::new(7, DType::F32, device);
        let linear = |i: usize| LinearConfig::new(WIDTH, WIDTH).init(&scope.child(i)).unwrap();
        let table = EmbeddingConfig::new(11, WIDTH).init(&scope.child("table")).unwrap();
        Layers { table, linear: (0..4).map(linear).collect() }
    }

    /// The values between stages: two from the first (floats and tokens), three from the second, two from the third.
    fn stage(&self, stage: usize, inputs: &[Var], tokens: &Var) -> Result<Vec<Var>> {
        let linear = |x: &Var| Ok::<Var, phalanx_parallel::Error>(self.linear[stage].forward(x)?.tanh()?);
        Ok(match (stage, inputs) {
            (0, []) => vec![linear(&self.table.forward(tokens)?)?, tokens.clone()],
            (1, [x, tokens]) => vec![linear(x)?, tokens.clone(), x.clone()],
            (2, [x, tokens, encoded]) => {
                vec![linear(&x.add(&self.table.forward(tokens)?)?)?, encoded.mul(x)?]
            }
            (3, [x, encoded]) => vec![linear(x)?.mul(encoded)?.square()?.sum_all()?],
            _ => panic!("stage {stage} got {} inputs", inputs.len()),
        })
    }

    /// The bytes of the gradients, by name, of those that there are.
    fn grads(&self) -> Vec<(String, Vec<u8>)> {
        let all = self.table.parameters().into_iter().chain(self.linear.iter().flat_map(|l| l.parameters()));
        let grad =
            |p: phalanx_nn::Parameter| Some((p.name().to_string(), p.grad().unwrap()?.to_bytes().unwrap()));
        all.filter_map(grad).collect()
    }
}

/// The tokens of micro-batch `i`, whose number of rows is its own.
fn tokens(i: usize, device: Device) -> Result<Var> {
    let rows = 1 + i % 3;
    let numbers: Vec<i64> = (0..rows).map(|row| ((row * 7 + i * 5) % 11) as i64).collect();
    Ok(Var::from_slice(&numbers, &[rows], device)?)
}

fn specs(stage: usize, micro_batch: usize) -> Vec<Spec> {
    let rows = 1 + micro_batch % 3;
    let floats = Spec { shape: [rows, WIDTH].into_iter().collect(), dtype: DType::F32 };
    let tokens = Spec { shape: [rows].into_iter().collect(), dtype: DType::I64 };
    match stage {
        1 => vec![floats, tokens],
        2 => vec![floats.clone(), tokens, floats],
        _ => vec![floats.clone(), floats],
    }
}

/// `alike` ranks have each stage and send parts of its values.
fn train(
    rank: &Rank,
    alike: usize,
    schedule: &Schedule,
    mode: RecomputeMode,
    says_specs: bool,
) -> Result<Outcome> {
    let groups = Groups::new(Mesh::new(alike, 1, schedule.ranks.len())?, rank.comm())?;
    let layers = Arc::new(Layers::new(rank.device()));
    let (own, device) = (layers.clone(), rank.device());
    let mut work = StageFn::of_values(move |args: StageArgs<'_, ()>, inputs: &[Var]| {
        own.stage(args.stage, inputs, &tokens(args.micro_batch, device)?)
    });
    if says_specs {
        work = work.with_input_specs(|args| Some(specs(args.stage, args.micro_batch)));
    }
    let pipeline = Pipeline::new(schedule, groups.along(Axis::Pp).clone(), rank.device())?;
    let pipeline = pipeline.recompute(mode).scatter_gather(groups.along(Axis::Tp));
    let losses = pipeline.train(&work.on((), 0))?;
    Ok((losses.iter().map(|loss| loss.to_bytes().unwrap()).collect(), layers.grads()))
}

/// Losses, and gradients by name.
type Outcome = (Vec<Vec<u8>>, Vec<(String, Vec<u8>)>);

/// One device. The table is used at two stages, so ranks have two sums of its gradients; here it has one for each stage.
fn alone(micro_batches: usize) -> (Outcome, Vec<Vec<u8>>) {
    let layers = Layers::new(Device::CPU);
    let mut losses = Vec::new();
    // A second table gets the gradients of the third stage.
    let other = Layers::new(Device::CPU);
    for i in 0..micro_batches {
        let tokens = tokens(i, Device::CPU).unwrap();
        let mut values: Vec<Var> = Vec::new();
        for stage in 0..4 {
            values = match stage {
                2 => {
                    let sum = values[0].add(&other.table.forward(&tokens).unwrap()).unwrap();
                    let x = layers.linear[2].forward(&sum).unwrap().tanh().unwrap();
                    vec![x, values[2].mul(&values[0]).unwrap()]
                }
                _ => layers.stage(stage, &values, &tokens).unwrap(),
            };
        }
        values[0].backward().unwrap();
        losses.push(values[0].tensor().to_bytes().unwrap());
    }
    let grad = |layers: &Layers| layers.grads()[0].1.clone();
    let tables = vec![grad(&layers), grad(&other)];
    ((losses, layers.grads()), tables)
}

#[test]
fn lists_of_values_cross_ranks_with_the_bits_of_one_device() {
    for (name, ranks, chunks) in [("1f1b", 4, 1), ("gpipe", 4, 1), ("zb-h1", 4, 1), ("interleaved", 2, 2)] {
        let micro_batches = 6;
        let schedule = by_name(name, ranks, chunks, micro_batches).unwrap();
        let ((losses, mut wanted), tables) = alone(micro_batches);
        wanted.retain(|(name, _)| !name.starts_with("table"));
        for mode in [RecomputeMode::Never, RecomputeMode::ExceptLast, RecomputeMode::Always] {
            for says_specs in [false, true] {
                let what = format!("{name}, {mode:?}, specs {says_specs}");
                let got =
                    launch::threads(ranks, |rank| train(&rank, 1, &schedule, mode, says_specs)).unwrap();
                assert_eq!(got.iter().flat_map(|(l, _)| l.clone()).collect::<Vec<_>>(), losses, "{what}");
                let grads: Vec<_> = got.into_iter().flat_map(|(_, grads)| grads).collect();
                let (of_table, mut others): (Vec<_>, Vec<_>) =
                    grads.into_iter().partition(|(name, _)| name.starts_with("table"));
                others.sort();
                wanted.sort();
                assert_eq!(others, wanted, "{what}");
                if name != "interleaved" {
                    let of_table: Vec<_> = of_table.into_iter().map(|(_, grad)| grad).collect();
                    assert_eq!(of_table, tables, "{what}");
                }
            }
        }
    }
}

#[test]
fn ranks_that_are_alike_send_parts_of_every_value() {
    let schedule = one_f_one_b(4, 3).unwrap();
    let mode = RecomputeMode::ExceptLast;
    let whole = launch::threads(4, |rank| train(&rank, 1, &schedule, mode, false)).unwrap();
    // 5 to 15 floats and 1 to 3 tokens, of which some ranks send none.
    for alike in [2, 4] {
        for says_specs in [false, true] {
            let run = |rank: Rank| train(&rank, alike, &schedule, mode, says_specs);
            let got = launch::threads(4 * alike, run).unwrap();
            for (stage, ranks) in got.chunks(alike).enumerate() {
                assert!(ranks.iter().all(|rank| *rank == whole[stage]), "{alike}, stage {stage}");
            }
        }
    }
}

#[test]
fn wrong_lists_of_values_are_refused() {
    type Stage = fn(usize, &Var) -> Vec<Var>;
    let error = |stage: Stage, specs: bool| {
        let run = |rank: Rank| -> Result<()> {
            let device = rank.device();
            let mut work = StageFn::of_values(move |args: StageArgs<'_, ()>, _: &[Var]| {
                let x = Var::leaf(Tensor::zeros(&[1], DType::F32, device)?)?;
                Ok(stage(args.stage, &x))
            });
            if specs {
                work = work.with_input_specs(|_| {
                    Some(vec![Spec { shape: [1].into_iter().collect(), dtype: DType::F32 }])
                });
            }
            let pipeline = Pipeline::new(&one_f_one_b(2, 1)?, rank.comm().clone(), rank.device())?;
            pipeline.train(&work.on((), 0)).map(drop)
        };
        launch::threads(2, run).unwrap_err().to_string()
    };
    let none = error(|_, _| Vec::new(), false);
    assert!(
        none.contains("0F0") && none.contains("outputs of dtypes [], wanted a floating-point one"),
        "{none}"
    );
    let integers = error(|_, x| vec![x.detach().to(DType::I64).unwrap()], false);
    assert!(integers.contains("outputs of dtypes [I64], wanted a floating-point one"), "{integers}");
    let losses =
        error(|stage, x| if stage == 0 { vec![x.clone()] } else { vec![x.clone(), x.clone()] }, false);
    assert!(losses.contains("1F0") && losses.contains("wanted the loss alone"), "{losses}");
    let more = error(|_, x| vec![x.clone(), x.clone()], true);
    assert!(more.contains("the next stage's input is to be"), "{more}");
}

#[test]
fn a_function_of_one_value_refuses_two() {
    let run = |rank: Rank| -> Result<()> {
        let one = rank.rank() == 1;
        let device = rank.device();
        let work = if one {
            StageFn::new(|_: StageArgs<'_, ()>, input: Option<&Var>| Ok(input.unwrap().sum_all()?))
        } else {
            StageFn::of_values(move |_: StageArgs<'_, ()>, _: &[Var]| {
                let x = Var::leaf(Tensor::zeros(&[1], DType::F32, device)?)?;
                Ok(vec![x.clone(), x])
            })
        };
        let pipeline = Pipeline::new(&one_f_one_b(2, 1)?, rank.comm().clone(), rank.device())?;
        pipeline.train(&work.on((), 0)).map(drop)
    };
    let error = launch::threads(2, run).unwrap_err().to_string();
    assert!(
        error.contains("stage 1: got 2 inputs for a function of one, wanted `StageFn::of_values`"),
        "{error}"
    );
}
