//! Rules of whole parameters beside AdamW: the bits of one device under every stage and ownership, also where a run stops under one
//! layout and goes on under another.

use phalanx_nn::{
    Adafactor, AdamW, Clip, Ema, Group, Lamb, Muon, Optimizer, Parameter, Parameters, Rule, grad_norm,
};
use phalanx_parallel::sharded::{Ownership, Zero, ZeroConfig};
use phalanx_parallel::{Result, checkpoint, launch};
use phalanx_tensor::{DType, Device};

use crate::gpt::{CLIP, add_chains, bytes, loss, model, rows};
use crate::{STAGES, config};

/// The norms of the steps and the values at the end.
type Trained = (Vec<f64>, Vec<(String, Vec<u8>)>);

type Optimizers = Vec<Optimizer<Box<dyn Rule>>>;

/// Matrices by a rule of whole parameters, the rest by AdamW.
fn optimizers(rule: fn() -> Box<dyn Rule>, parameters: Vec<Parameter>) -> Result<Optimizers> {
    let (matrices, rest): (Vec<_>, Vec<_>) = parameters.into_iter().partition(Parameter::is_matrix);
    let adamw: Box<dyn Rule> = Box::new(AdamW::default());
    Ok(vec![
        adamw.init(vec![Group::new(rest, 1e-2)])?,
        rule().init(vec![Group::new(matrices, 1e-2).with_weight_decay(0.1)])?,
    ])
}

type MakeRule = fn() -> Box<dyn Rule>;

const RULES: [(&str, MakeRule); 4] = [
    ("muon", || Box::new(Muon::default())),
    ("lamb", || Box::new(Lamb::default())),
    ("adafactor", || Box::new(Adafactor::default())),
    ("averaged adafactor", || Box::new(Ema::new(Adafactor::default(), 0.75))),
];

fn alone(rule: fn() -> Box<dyn Rule>, dtype: DType, ranks: usize, steps: u64) -> Trained {
    let model = model(dtype, Device::CPU);
    let parameters = model.parameters();
    let mut all = optimizers(rule, parameters.clone()).unwrap();
    let mut norms = Vec::new();
    for step in 0..steps {
        add_chains(&parameters, ranks, |rank| {
            loss(&model, step, rows(ranks, rank, 1).remove(0)).unwrap().backward().unwrap();
        });
        norms.push(grad_norm(&parameters).unwrap());
        let scale = Clip::new(norms[norms.len() - 1], CLIP).scale;
        for optimizer in &mut all {
            optimizer.step_scaled(scale).unwrap();
            optimizer.zero_grad().unwrap();
        }
    }
    (norms, bytes(&phalanx_nn::state_dict(&model)))
}

/// Steps of ranks under ZeRO, from a checkpoint if the steps do not begin at 0; a checkpoint is saved at the end.
fn together(
    rule: fn() -> Box<dyn Rule>,
    dtype: DType,
    ranks: usize,
    steps: std::ops::Range<u64>,
    config: &ZeroConfig,
    folder: Option<&std::path::Path>,
) -> Trained {
    let run = |rank: launch::Rank| -> Result<Trained> {
        let model = model(dtype, rank.device());
        let zero = Zero::new(&model, rank.comm().clone(), config.clone())?;
        let mut all = optimizers(rule, zero.parameters())?;
        all = all.into_iter().map(|o| o.with_peers(Some(zero.peers()))).collect::<phalanx_nn::Result<_>>()?;
        let trained = [checkpoint::Trained::new(&model, &zero)];
        if let Some(folder) = folder.filter(|_| steps.start > 0) {
            let saved = checkpoint::Checkpoint::open(folder)?;
            saved.restore(rank.comm(), &trained, &mut all.iter_mut().collect::<Vec<_>>())?;
        }
        let mut norms = Vec::new();
        for step in steps.clone() {
            zero.backward(&loss(&model, step, rows(ranks, rank.rank(), 1).remove(0))?)?;
            norms.push(zero.grad_norm()?);
            let scale = Clip::new(norms[norms.len() - 1], CLIP).scale;
            all.iter_mut().try_for_each(|optimizer| optimizer.step_scaled(scale))?;
            zero.zero_grad()?;
            zero.updated()?;
        }
        if let Some(folder) = folder.filter(|_| steps.start == 0) {
            let mut saver = checkpoint::Saver::new(rank.comm())?;
            let parts = checkpoint::parts(&trained, &all.iter().collect::<Vec<_>>())?;
            saver.save(folder, parts, &Default::default())?;
            saver.wait()?;
        }
        Ok((norms, bytes(&zero.full_state_dict()?)))
    };
    launch::threads(ranks, run).unwrap().swap_remove(0)
}

fn configs() -> Vec<ZeroConfig> {
    let of =
        |stage| [Ownership::Even, Ownership::Whole].map(|o| ZeroConfig { ownership: o, ..config(stage) });
    STAGES.into_iter().flat_map(of).collect()
}

fn same(got: &Trained, wanted: &Trained, what: &str) {
    assert_eq!(got.0, wanted.0, "{what}");
    assert!(got.1 == wanted.1, "{what}: values differ");
}

#[test]
fn whole_rules_beside_adamw_have_the_bits_of_one_device_under_every_stage_and_ownership() {
    for (name, rule) in RULES {
        for (dtype, ranks) in [(DType::F32, 3), (DType::BF16, 2), (DType::F32, 8)] {
            let wanted = alone(rule, dtype, ranks, 3);
            for config in configs() {
                let got = together(rule, dtype, ranks, 0..3, &config, None);
                same(&got, &wanted, &format!("{name}, {dtype}, {ranks} ranks, {config:?}"));
            }
        }
    }
}

#[test]
fn a_run_that_stops_goes_on_under_another_layout_with_the_same_bits() {
    for (number, (name, rule)) in RULES.into_iter().enumerate() {
        let folder = std::env::temp_dir().join(format!("phalanx-whole-{}-{number}", std::process::id()));
        // Of as many ranks, since the order of additions is that of the ranks.
        let (dtype, ranks) = ([DType::F32, DType::BF16][number % 2], 3);
        let wanted = alone(rule, dtype, ranks, 4);
        let all = configs();
        together(rule, dtype, ranks, 0..2, &all[number], Some(&folder));
        for config in &all {
            let mut got = together(rule, dtype, ranks, 2..4, config, Some(&folder));
            got.0 = [&wanted.0[..2], &got.0].concat();
            same(&got, &wanted, &format!("{name}, {dtype}, {config:?}"));
        }
        std::fs::remove_dir_all(&folder).unwrap();
    }
}

#[test]
fn a_cut_parameter_without_peers_is_refused_with_the_remedy() {
    let run = |rank: launch::Rank| {
        let model = model(DType::F32, rank.device());
        let zero = Zero::new(&model, rank.comm().clone(), config(STAGES[1]))?;
        let mut all = optimizers(RULES[1].1, zero.parameters())?;
        zero.backward(&loss(&model, 0, rows(3, rank.rank(), 1).remove(0))?)?;
        Ok::<_, phalanx_parallel::Error>(all[1].step()?)
    };
    let error = launch::threads(3, run).unwrap_err().to_string();
    assert!(error.contains("optimizer.step") && error.contains("with_peers(wrapper.peers())"), "{error}");
}
