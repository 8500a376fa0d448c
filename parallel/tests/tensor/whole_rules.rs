//! Rules of whole parameters where tensor parallelism splits layers: one step of the same gradients has the bits of one device.

use phalanx_kernels as kernels;
use phalanx_nn::models::ModelConfig;
use phalanx_nn::{Adafactor, Group, Lamb, Muon, OneDevice, Optimizer, Parameter, Parameters, Rule};
use phalanx_parallel::tensor_parallel::TensorParallel;
use phalanx_parallel::{Result, WholeParameters, launch};
use phalanx_tensor::{DType, Device, Tensor};

use crate::kit::{build, gpt, llama};

const STEPS: usize = 3;

type MakeRule = fn() -> Box<dyn Rule>;

const RULES: [(&str, MakeRule); 3] = [
    ("muon", || Box::new(Muon::default())),
    ("lamb", || Box::new(Lamb::default())),
    ("adafactor", || Box::new(Adafactor::default())),
];

fn optimizer(rule: fn() -> Box<dyn Rule>, parameters: Vec<Parameter>) -> Result<Optimizer<Box<dyn Rule>>> {
    Ok(rule().init(vec![Group::new(parameters, 0.02).with_weight_decay(0.1)])?)
}

/// The gradient of a whole parameter at a step.
fn whole_grad(name: &str, shape: &[usize], step: usize, dtype: DType) -> Tensor {
    let seed = name.bytes().fold(step, |seed, byte| seed * 31 % 9973 + usize::from(byte));
    let n: usize = shape.iter().product();
    let values: Vec<f64> =
        (0..n).map(|i| ((i * 7919 + seed * 104_729) % 1009) as f64 / 504.0 - 1.0).collect();
    kernels::cast(&Tensor::from_vec(values, shape, Device::CPU).unwrap(), dtype).unwrap()
}

/// The parameters that a rule takes.
fn of_rule(name: &str, mut parameters: Vec<Parameter>) -> Vec<Parameter> {
    parameters.retain(|p| name != "muon" || p.is_matrix());
    parameters
}

fn alone(
    config: &ModelConfig,
    name: &str,
    rule: fn() -> Box<dyn Rule>,
    dtype: DType,
) -> Vec<(String, Tensor)> {
    let parameters = of_rule(name, build(config, OneDevice, dtype, Device::CPU).unwrap().parameters());
    let mut optimizer = optimizer(rule, parameters.clone()).unwrap();
    for step in 0..STEPS {
        parameters
            .iter()
            .for_each(|p| p.set_grad(Some(whole_grad(p.name(), p.tensor().shape(), step, dtype))));
        optimizer.step().unwrap();
    }
    parameters.iter().map(|p| (p.name().to_string(), p.tensor())).collect()
}

/// Ranks of tensor parallelism, and of ZeRO, which cuts each part once more, at a place of its own.
fn holds(config: &ModelConfig, dtype: DType, (tp, zero): (usize, usize)) {
    for (name, rule) in RULES {
        let wanted = alone(config, name, rule, dtype);
        let run = |rank: launch::Rank| -> Result<()> {
            let (t, z) = (rank.rank() % tp, rank.rank() / tp);
            let neighbours: Vec<usize> = (z * tp..(z + 1) * tp).collect();
            let layers = TensorParallel::new(&rank.comm().group(&neighbours)?);
            let model = build(config, layers, dtype, rank.device())?;
            let mut pieces = Vec::new();
            for (number, p) in of_rule(name, model.parameters()).into_iter().enumerate() {
                let n = p.tensor().numel();
                // Cuts differ from rank to rank of tensor parallelism, and some parts are empty.
                let at = |z: usize| {
                    if z == zero { n } else { (n * z / zero + number * (t + 1) * usize::from(z > 0)).min(n) }
                };
                let range = at(z)..at(z + 1);
                if range.is_empty() {
                    continue;
                }
                let flat = p.tensor().with_shape(&[n])?;
                let piece = p.piece(flat.narrow(0, range.start, range.len())?.copy()?, range.clone())?;
                pieces.push((p, piece, range));
            }
            let peers = std::sync::Arc::new(WholeParameters::new(rank.comm().clone(), rank.device()));
            let given = pieces.iter().map(|(_, piece, _)| piece.clone()).collect();
            let mut optimizer = optimizer(rule, given)?.with_peers(Some(peers))?;
            let part = |p: &Parameter, whole: &Tensor, range: &std::ops::Range<usize>| -> Result<Tensor> {
                let part = p.part().of(whole)?.contiguous()?;
                Ok(part.with_shape(&[part.numel()])?.narrow(0, range.start, range.len())?)
            };
            for step in 0..STEPS {
                for (p, piece, range) in &pieces {
                    let whole = whole_grad(p.name(), &p.whole_shape(), step, dtype);
                    piece.set_grad(Some(part(p, &whole, range)?.to_device(rank.device(), false)?));
                }
                optimizer.step()?;
            }
            for (p, piece, range) in &pieces {
                let whole = &wanted.iter().find(|(name, _)| name == p.name()).unwrap().1;
                let what = format!("{name}, {dtype}, tp {tp}, zero {zero}: {}", p.name());
                assert!(piece.tensor().to_bytes()? == part(p, whole, range)?.to_bytes()?, "{what}");
            }
            Ok(())
        };
        launch::threads(tp * zero, run).unwrap();
    }
}

#[test]
fn tensor_parallel_steps_of_whole_rules_have_the_bits_of_one_device() {
    for tp in [2, 4] {
        holds(&gpt(4, 0.0), DType::F32, (tp, 1));
        holds(&llama(4, 2, 0.0), DType::BF16, (tp, 1));
    }
}

#[test]
fn cut_once_more_by_zero_they_have_them_too() {
    holds(&gpt(4, 0.0), DType::BF16, (2, 2));
    holds(&llama(4, 4, 0.0), DType::F64, (2, 3));
}
