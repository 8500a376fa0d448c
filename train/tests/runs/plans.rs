//! Runs that follow a plan: stages of unlike sizes with unlike numbers of replicas, against one rank.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};

use phalanx_nn::models::{GptConfig, LlamaConfig, ModelConfig, RecomputeMode};
use phalanx_nn::{Group, LinearConfig, Optimizer, Parameter, Schedule, SequentialConfig, Sgd, Tanh};
use phalanx_parallel::hybrid::{Layout, decoder};
use phalanx_parallel::planning::{StagePlan, StageReplicas, decoder_layers};
use phalanx_tensor::DType;
use phalanx_train::data::{TokenWindows, Tokens};
use phalanx_train::{AnyRule, Asynchronous, Config, Result, Settings, Trainer, plan_decoder};

use super::{Told, config, data, loss};

pub const CONTEXT: usize = 8;

fn plan(of: &[(usize, usize)]) -> StagePlan {
    let mut end = 0;
    let stage = |&(layers, replicas): &(usize, usize)| {
        end += layers;
        StageReplicas { layers: end - layers..end, replicas }
    };
    StagePlan::new(of.iter().map(stage).collect()).unwrap()
}

/// A layout of a plan, of which each stage's layers and replicas are given.
pub fn planned(of: &[(usize, usize)], micro_batches: usize) -> Layout {
    let plan = plan(of);
    Layout { pp: plan.ranks(), plan: Some(plan), micro_batches, ..Layout::default() }
}

pub type MakeOptimizers = fn(Vec<Parameter>, f64) -> Result<Vec<Optimizer<AnyRule>>>;

/// The bits of the losses, and the values of the whole model.
pub type Outcome = (Vec<u64>, BTreeMap<String, Vec<u8>>);

fn train(config: Config, model: &ModelConfig) -> Result<Outcome> {
    train_by(config, model, phalanx_train::adamw)
}

pub fn train_by(config: Config, model: &ModelConfig, optimizers: MakeOptimizers) -> Result<Outcome> {
    let tokens: Vec<u32> = (0..400).map(|i: u32| (i * i + i / 7) % 31).collect();
    let windows = || TokenWindows::new(tokens.clone().with_end_of_text(0), CONTEXT, 5);
    let told = Told::default();
    let values = Arc::new(Mutex::new(BTreeMap::new()));
    let (end, how) = (values.clone(), config.clone());
    Trainer::new(config)
        .samples(windows()?, CONTEXT)
        .optimizers(optimizers)
        .callback(told.clone())
        .at_end(move |run| {
            let state = run.full_state_dict()?;
            if run.mesh_rank().is_first() {
                let bytes = state.into_iter().map(|(name, values)| (name, values.to_bytes().unwrap()));
                *end.lock().unwrap() = bytes.collect();
            }
            Ok(())
        })
        .run_parts(|rank| Ok(decoder(model, &how.layout, &rank.groups, &rank.scope(&how), None)?))?;
    let values = values.lock().unwrap().clone();
    Ok((told.losses(), values))
}

pub fn short(layout: Layout) -> Config {
    Config { steps: 5, batch: 12, validate_every: 0, clip: Some(0.5), ..config(layout, 0) }
}

fn gpt() -> ModelConfig {
    ModelConfig::Gpt(GptConfig::new(31, CONTEXT, 3, 2, 16).with_dropout(0.1))
}

/// A layout of one rank with these micro-batches.
fn alone(micro_batches: usize) -> Layout {
    Layout { micro_batches, ..Layout::default() }
}

#[test]
fn a_language_model_under_a_plan_has_the_bits_of_one_rank() {
    // With a tied table and dropout, and without either.
    for model in [gpt(), ModelConfig::Llama(LlamaConfig::new(31, CONTEXT, 3, 2, 16))] {
        let wanted = train(short(alone(6)), &model).unwrap();
        assert!(wanted.0.len() == 5 && !wanted.1.is_empty());
        for of in [
            &[(1, 2), (1, 1), (3, 3)][..],
            &[(1, 1), (3, 2), (1, 1)],
            &[(2, 2), (2, 1), (1, 1)],
            &[(4, 3), (1, 1)],
            &[(2, 2), (3, 1)],
            &[(1, 1), (4, 1)],
            &[(5, 2)],
        ] {
            assert!(train(short(planned(of, 6)), &model).unwrap() == wanted, "{of:?}");
        }
    }
}

#[test]
fn a_plan_goes_with_bf16_recomputation_and_split_layers() {
    let of = [(1, 2), (3, 1), (1, 1)];
    let check = |more: &dyn Fn(Layout) -> Config| {
        let wanted = train(more(alone(4)), &gpt()).unwrap();
        let planned = more(planned(&of, 4));
        assert!(train(planned.clone(), &gpt()).unwrap() == wanted, "{planned:?}");
    };
    let bf16 = |layout| Config { dtype: DType::BF16, ..short(layout) };
    check(&bf16);
    for recompute in [RecomputeMode::Always, RecomputeMode::ExceptLast, RecomputeMode::Attention] {
        check(&|layout| short(Layout { recompute, ..layout }));
    }
    for (sequence_parallel, scatters) in [(false, false), (true, false), (false, true)] {
        check(&|layout| {
            // One rank sends nothing.
            let scatter_gather = scatters && layout.pp > 1;
            short(Layout { tp: 2, sequence_parallel, scatter_gather, ..layout })
        });
    }
}

#[test]
fn a_plan_of_one_replica_a_stage_goes_with_data_parallelism_and_zero() {
    let chains = Config { chains: 2, ..short(alone(3)) };
    let wanted = train(chains, &gpt()).unwrap();
    for zero in 0..=3 {
        let layout = Layout { dp: 2, ..planned(&[(1, 1), (3, 1), (1, 1)], 3) };
        assert!(train(Config { zero, ..short(layout) }, &gpt()).unwrap() == wanted, "zero {zero}");
    }
}

#[test]
fn layers_in_a_row_under_a_plan_have_the_bits_of_one_rank() {
    let layers = || {
        let linear = |from, to| LinearConfig::new(from, to);
        let flat = SequentialConfig::new().with(phalanx_nn::Flatten::default());
        flat.with(linear(64, 8)).with(Tanh).with(linear(8, 8)).with(Tanh).with(linear(8, 2))
    };
    let run_on = |layout: Layout, rows: usize| {
        let told = Told::default();
        let [train, validation] = data();
        let config = Config { validation_rows: Some(rows), ..config(layout, 0) };
        let trainer = Trainer::new(config).data(train).validation(validation);
        trainer.callback(told.clone()).run_layers(layers, loss)?;
        Ok::<_, phalanx_train::Error>((told.losses(), told.validations()))
    };
    let run = |layout: Layout| run_on(layout, 40);
    let wanted = run(alone(4)).unwrap();
    for of in [&[(2, 2), (4, 1)][..], &[(1, 1), (1, 3), (4, 2)]] {
        assert!(run(planned(of, 4)).unwrap() == wanted, "{of:?}");
        // Fewer rows than a stage has replicas.
        assert!(run_on(planned(of, 4), 1).unwrap() == run_on(alone(4), 1).unwrap(), "{of:?}");
    }
    let error = run(planned(&[(2, 2), (3, 1)], 4)).unwrap_err().to_string();
    assert!(error.contains("plan: got stages of 5 layers in all, wanted 6: the layers in a row"), "{error}");
}

#[test]
fn replicas_of_one_stage_without_flushes_are_plain_descent() {
    use Asynchronous::{VerticalSync, WeightStashing};
    for (scheme, replicas) in [(WeightStashing, 2), (VerticalSync, 3)] {
        let layout = planned(&[(5, replicas)], replicas);
        let got = train(Config { asynchronous: Some(scheme), ..short(layout) }, &gpt()).unwrap();
        assert!(got == train(short(alone(replicas)), &gpt()).unwrap(), "{scheme:?}");
    }
}

#[test]
fn double_buffers_do_not_depend_on_the_plan() {
    let run = |layout: Layout, asynchronous: Option<Asynchronous>| {
        train(Config { asynchronous, clip: None, ..short(layout) }, &gpt()).unwrap()
    };
    let doubled = Some(Asynchronous::DoubleBuffered);
    let wanted = run(Layout { pp: 3, ..alone(6) }, doubled);
    for of in [&[(2, 2), (3, 1)][..], &[(1, 1), (3, 1), (1, 2)]] {
        assert!(run(planned(of, 6), doubled) == wanted, "{of:?}");
    }
    assert!(run(alone(6), None) != wanted, "weights are not an update old");
}

/// A small step from the same weights, without flushes and with.
#[test]
fn each_update_of_a_stage_is_by_a_mean() {
    let model = ModelConfig::Llama(LlamaConfig::new(31, CONTEXT, 3, 2, 16));
    let after = |layout: Layout, asynchronous: Option<Asynchronous>, lr: f64| {
        let lr = Schedule::Constant { lr, warmup: 0 };
        let config = Config { steps: 1, lr, asynchronous, clip: None, dtype: DType::F64, ..short(layout) };
        let values = train_by(config, &model, sgd).unwrap().1;
        let floats =
            |bytes: &Vec<u8>| bytes.chunks(8).map(|b| f64::from_le_bytes(b.try_into().unwrap())).collect();
        values
            .iter()
            .map(|(name, bytes)| (name.clone(), floats(bytes)))
            .collect::<BTreeMap<String, Vec<f64>>>()
    };
    let (before, wanted) = (after(alone(2), None, 0.0), after(alone(2), None, 1e-6));
    // The second stage updates twice, each time by the mean over one of the two micro-batches.
    let got = after(planned(&[(2, 2), (3, 1)], 2), Some(Asynchronous::WeightStashing), 1e-6);
    for (name, before) in before {
        let times = if name.contains("embed") || name.contains("layers.0") { 1.0 } else { 2.0 };
        for ((before, wanted), got) in before.iter().zip(&wanted[&name]).zip(&got[&name]) {
            let (wanted, got) = (times * (wanted - before), got - before);
            assert!((wanted - got).abs() < 1e-10, "{name}: moved {got}, wanted {wanted}");
        }
    }
}

/// Plain descent.
fn sgd(parameters: Vec<Parameter>, lr: f64) -> Result<Vec<Optimizer<AnyRule>>> {
    let rule: AnyRule = Box::<Sgd>::default();
    Ok(vec![Optimizer::new(rule, vec![Group::new(parameters, lr)])?])
}

#[test]
fn a_run_under_a_plan_goes_on_under_another_and_on_one_rank() {
    let wanted = train(short(alone(6)), &gpt()).unwrap();
    let out = std::env::temp_dir().join(format!("phalanx-replanned-{}", std::process::id()));
    let layouts = [planned(&[(1, 2), (4, 1)], 6), planned(&[(2, 1), (2, 3), (1, 1)], 6), alone(6)];
    for (i, layout) in layouts.into_iter().enumerate() {
        let folder = Config { save_every: 2, ..short(layout) };
        let config = match i {
            0 => Config { steps: 2, out: Some(out.clone()), ..folder },
            _ => Config { steps: 2 * i as u64 + 1 + u64::from(i == 1), resume: Some(out.clone()), ..folder },
        };
        let (first, end) = (2 * i, config.steps as usize);
        let (losses, values) = train(config, &gpt()).unwrap();
        assert_eq!(losses, wanted.0[first..end]);
        assert!(end < 5 || values == wanted.1);
    }
    std::fs::remove_dir_all(out).unwrap();
}

fn file(name: &str, text: &str) -> PathBuf {
    let path = std::env::temp_dir().join(format!("phalanx-{name}-{}.toml", std::process::id()));
    std::fs::write(&path, text).unwrap();
    path
}

fn resolve(words: &[&str]) -> Result<Config> {
    let mut settings = Settings::new(Config::default());
    settings.words(words.iter().map(|word| word.to_string()))?;
    let config = settings.resolve()?;
    config.check()?;
    Ok(config)
}

#[test]
fn the_plan_that_is_made_of_a_model_is_the_plan_that_a_run_follows() {
    let model = ModelConfig::Gpt(GptConfig::new(31, CONTEXT, 2, 2, 16));
    let ranks =
        Config { layout: Layout { dp: 3, micro_batches: 3, ..Layout::default() }, ..Config::default() };
    let text =
        plan_decoder(&ranks, CONTEXT, |scope, tokens| Ok(decoder_layers(&model, scope, tokens)?)).unwrap();
    let path = file("made", &text);
    let read = resolve(&["--plan", path.to_str().unwrap(), "--micro-batches", "3"]).unwrap();
    let stages = read.layout.plan.as_ref().unwrap();
    assert!(stages.ranks() <= 3 && stages.layers() == 4, "{text}");
    assert_eq!(read.layout.pp, stages.ranks());
    let wanted = train(short(alone(3)), &model).unwrap();
    assert!(train(short(read.layout.clone()), &model).unwrap() == wanted, "{text}");
    std::fs::remove_file(path).unwrap();
    let refused = |config: &Config| {
        plan_decoder(config, CONTEXT, |s, x| Ok(decoder_layers(&model, s, x)?)).unwrap_err().to_string()
    };
    let split = Config { layout: Layout { tp: 2, ..ranks.layout.clone() }, ..ranks.clone() };
    assert!(refused(&split).contains("`tp` is 2, and a plan is of layers that are not split"));
    let error = refused(&Config { links: Some("2x1e9,2x1e8".into()), ..ranks.clone() });
    let huge = refused(&Config { links: Some("18446744073709551615x1,2x1".into()), ..ranks.clone() });
    assert!(huge.contains("ranks, and there are 3"), "{huge}");
    let unread = Config { plan: Some("a.toml".into()), ..Config::default() }.check().unwrap_err();
    assert!(unread.to_string().contains("`plan` a.toml was not read"), "{unread}");
    assert!(error.contains("`links` 2x1e9,2x1e8 are of 4 ranks, and there are 3"), "{error}");
}

#[test]
fn what_does_not_go_with_a_plan_is_refused() {
    let path = file("two-one", "[[stage]]\nlayers = 2\nreplicas = 2\n[[stage]]\nlayers = 1\nreplicas = 1\n");
    let plan = path.to_str().unwrap();
    let error = |more: &[&str]| {
        resolve(&[&["--plan", plan, "--micro-batches", "4"], more].concat()).unwrap_err().to_string()
    };
    for (more, wanted) in [
        (&["--pp", "2"][..], ".toml: replicas [2, 1] are 3 ranks, and `pp` is 2"),
        (&["--dp", "2"], ".toml: got dp 2 around stages with replicas [2, 1], wanted 1"),
        (&["--zero", "1"], "`zero` 1 goes with a `plan` of one replica a stage"),
        (&["--offload", "optimizer"], "`offload` goes with a `plan` of one replica a stage"),
        (&["--schedule", "zb-h1"], "got schedule zb-h1, wanted 1f1b"),
        (&["--schedule", "pipedream"], "micro-batch of every replica: got `micro-batches` 4, wanted 2"),
    ] {
        let got = error(more);
        assert!(got.contains(wanted), "{more:?}: {got}");
    }
    let few = resolve(&["--plan", plan]).unwrap_err().to_string();
    assert!(few.contains("got 1 micro-batches, wanted one for each of 2 replicas"), "{few}");
    std::fs::remove_file(&path).unwrap();
    assert!(resolve(&["--plan", plan]).unwrap_err().to_string().contains("phalanx-two-one"));
}
