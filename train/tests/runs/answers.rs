//! Rows of which some tokens count, and in each row another number: the mean is that of the whole batch's tokens, whatever the ranks and the
//! micro-batches have of them.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use phalanx_nn::models::{GptConfig, LlamaConfig, ModelConfig};
use phalanx_nn::{Batch, Group, Optimizer, Parameter, Schedule, Sgd};
use phalanx_parallel::hybrid::{Layout, StagedModel, decoder};
use phalanx_parallel::planning::{StagePlan, StageReplicas};
use phalanx_tensor::{DType, Device, Tensor};
use phalanx_train::data::{Blend, Dataset, HOST, Ordered, Samples, Shuffled, Subset};
use phalanx_train::{AnyRule, Asynchronous, Callback, Config, Record, Result, Trainer};

use super::{Folder, Told, config};

const CONTEXT: usize = 12;
const SEED: u64 = 4;

/// Rows of one to eight tokens that count, behind one to four that do not; behind them there is padding.
struct Answers;

impl Dataset for Answers {
    fn len(&self) -> usize {
        60
    }

    fn item(&self, index: usize, _draw: u64) -> Result<Vec<Tensor>> {
        let (asked, length) = (1 + index % 4, self.counted(index).unwrap());
        let token = |at: usize| 1 + ((index * 5 + at * at) % 30) as i64;
        let mut inputs = vec![0i64; CONTEXT];
        let mut targets = vec![-100; CONTEXT];
        for at in 0..asked + length {
            inputs[at] = token(at);
            if at >= asked {
                targets[at] = token(at + 1);
            }
        }
        let tensor = |values: &[i64]| Tensor::from_slice(values, &[CONTEXT], HOST);
        Ok(vec![tensor(&inputs)?, tensor(&targets)?])
    }

    fn counted(&self, index: usize) -> Option<usize> {
        Some(if index.is_multiple_of(3) { 8 } else { 1 + index % 2 })
    }
}

fn models() -> [ModelConfig; 2] {
    let llama = LlamaConfig { key_heads: 1, ..LlamaConfig::new(31, CONTEXT, 2, 2, 16) };
    [ModelConfig::Gpt(GptConfig::new(31, CONTEXT, 2, 2, 16)), ModelConfig::Llama(llama)]
}

/// The losses and the norms of all steps.
#[derive(Clone, Default)]
struct Steps(Arc<Mutex<Vec<[f64; 2]>>>);

impl Callback for Steps {
    fn step(&mut self, record: &Record) -> Result<()> {
        self.0.lock().unwrap().push([record.loss, record.grad_norm]);
        Ok(())
    }
}

fn held_out() -> Subset<Answers> {
    Answers.subset((0..11).collect()).unwrap()
}

fn trainer(config: &Config, told: &Told, steps: &Steps) -> Trainer {
    let samples = Shuffled::new(Answers, SEED).unwrap();
    let trainer = Trainer::new(config.clone()).samples(samples, CONTEXT).validation(held_out());
    trainer.callback(told.clone()).callback(steps.clone())
}

fn train(config: Config, model: &ModelConfig) -> (Told, Vec<[f64; 2]>) {
    let (told, steps) = (Told::default(), Steps::default());
    let part = |rank: &phalanx_train::MeshRank| {
        Ok(decoder(model, &config.layout, &rank.groups, &rank.scope(&config), None)?)
    };
    trainer(&config, &told, &steps).run_parts(part).unwrap();
    let steps = steps.0.lock().unwrap().clone();
    (told, steps)
}

/// A row without its padding, as a batch.
fn alone(row: &[Tensor]) -> Batch {
    let targets = row[1].to_vec::<i64>().unwrap();
    let length = targets.iter().rposition(|&target| target >= 0).unwrap() + 1;
    let cut = |tensor: &Tensor| {
        Tensor::from_slice(&tensor.to_vec::<i64>().unwrap()[..length], &[1, length], Device::CPU).unwrap()
    };
    Batch { tensors: row.iter().map(cut).collect(), first_row: 0 }
}

/// The mean over the tokens that count in all of these rows, and the norm of its gradients, with each row computed alone and without padding.
fn by_hand(model: &dyn StagedModel, rows: &[Vec<Tensor>], counted: usize) -> [f64; 2] {
    let mut sum = 0.0;
    for row in rows {
        let loss = model.run(0, None, &alone(row), 1.0 / counted as f64).unwrap();
        loss.backward().unwrap();
        sum += f64::from(loss.item::<f32>().unwrap());
    }
    let squares = |p: &Parameter| {
        let grads = p
            .leaves()
            .iter()
            .filter_map(|leaf| leaf.grad())
            .map(|grad| grad.tensor().to_vec::<f32>().unwrap());
        let whole = grads.reduce(|a, b| a.iter().zip(&b).map(|(a, b)| a + b).collect()).unwrap();
        whole.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>()
    };
    let norm = model.parameters().iter().map(squares).sum::<f64>().sqrt();
    for parameter in model.parameters() {
        parameter.leaves().iter().for_each(|leaf| leaf.set_grad(None));
    }
    [sum, norm]
}

#[test]
fn the_mean_is_that_of_all_tokens_that_count_and_padding_changes_nothing() {
    for model in models() {
        let still = Config {
            steps: 4,
            validate_every: 4,
            clip: None,
            lr: Schedule::Constant { lr: 0.0, warmup: 0 },
            ..config(Layout::default(), 0)
        };
        let (told, steps, wanted) = (Told::default(), Steps::default(), Mutex::new(Vec::new()));
        let samples = Shuffled::new(Answers, SEED).unwrap();
        trainer(&still, &told, &steps)
            .run_parts(|rank| {
                let model = decoder(&model, &still.layout, &rank.groups, &rank.scope(&still), None)?;
                for step in 0..4 {
                    let numbers = || step * 16..step * 16 + 16;
                    let rows: Vec<_> = numbers().map(|number| samples.sample(number).unwrap()).collect();
                    let counted = numbers().map(|number| samples.counted(number).unwrap()).sum();
                    wanted.lock().unwrap().push(by_hand(&*model, &rows, counted));
                }
                let rows: Vec<_> = (0..11).map(|row| Answers.item(row, 0).unwrap()).collect();
                let counted = (0..11).filter_map(|row| Answers.counted(row)).sum();
                wanted.lock().unwrap().push(by_hand(&*model, &rows, counted));
                Ok(model)
            })
            .unwrap();
        let (wanted, got) = (wanted.into_inner().unwrap(), steps.0.lock().unwrap().clone());
        for (got, wanted) in got.iter().zip(&wanted) {
            let close = |(a, b): (&f64, &f64)| (a - b).abs() < 1e-5 * b;
            assert!(got.iter().zip(wanted).all(close), "{got:?}, wanted {wanted:?}");
        }
        let validated = f64::from_bits(told.validations()[0]);
        assert!(
            got.len() == 4 && (validated - wanted[4][0]).abs() < 1e-5 * validated,
            "{validated}, wanted {wanted:?}"
        );
    }
}

/// Whole conversations, several in a row, on one device and on two ranks.
#[cfg(feature = "chat")]
#[test]
fn packed_conversations_have_the_losses_that_they_have_alone() {
    use phalanx_train::text::{Answers, ChatTemplate, Codec, Conversations};

    let folder = Folder::new();
    std::fs::create_dir_all(folder.path()).unwrap();
    let line = |i: usize| {
        let [question, answer] = ["tell me ", "a long story "].map(|text| &text[..1 + i * i % text.len()]);
        format!("{{\"prompt\": \"{question}\", \"completion\": \"{answer}\"}}\n")
    };
    let data = folder.path().join("data.jsonl");
    std::fs::write(&data, (0..20).map(line).collect::<String>()).unwrap();
    let template = "{% for m in messages %}{{ m.role[:1] + m.content }}.{% endfor %}{% if add_generation_prompt %}a{% endif %}";
    std::fs::write(folder.path().join("chat_template.jinja"), template).unwrap();
    let (codec, template) = (Codec::of(folder.path()).unwrap(), ChatTemplate::of(folder.path()).unwrap());
    let open = || Conversations::open(&data, &codec, &template, 48, Answers::All).unwrap();
    let (alone, packed) = (open(), Arc::new(open().packed()));
    assert!(packed.len() > 4 && packed.len() < 12, "{}", packed.len());
    let rows: Vec<_> = (0..alone.len()).map(|row| alone.item(row, 0).unwrap()).collect();
    let counted = (0..alone.len()).filter_map(|row| alone.counted(row)).sum();
    for model in [
        ModelConfig::Gpt(GptConfig::new(256, 48, 2, 2, 16)),
        ModelConfig::Llama(LlamaConfig::new(256, 48, 2, 2, 16)),
    ] {
        for dp in [1, 2] {
            let batch = packed.len() / dp * dp;
            let still = Config {
                steps: 1,
                batch,
                validate_every: 1,
                clip: None,
                lr: Schedule::Constant { lr: 0.0, warmup: 0 },
                ..config(Layout { dp, ..Layout::default() }, 0)
            };
            let (told, steps, wanted) = (Told::default(), Steps::default(), Mutex::new([0.0; 2]));
            let trainer = Trainer::new(still.clone()).samples(Ordered::new(packed.clone()).unwrap(), 48);
            let part = |rank: &phalanx_train::MeshRank| {
                let model = decoder(&model, &still.layout, &rank.groups, &rank.scope(&still), None)?;
                if rank.is_first() {
                    *wanted.lock().unwrap() = by_hand(&*model, &rows, counted);
                }
                Ok(model)
            };
            trainer
                .validation(packed.clone())
                .callback(told.clone())
                .callback(steps.clone())
                .run_parts(part)
                .unwrap();
            let ([loss, norm], got) = (*wanted.lock().unwrap(), steps.0.lock().unwrap()[0]);
            let validated = f64::from_bits(told.validations()[0]);
            assert!((validated - loss).abs() < 1e-5 * loss, "{validated}, wanted {loss}");
            if batch == packed.len() {
                let close = (got[0] - loss).abs() < 1e-5 * loss && (got[1] - norm).abs() < 1e-4 * norm;
                assert!(close, "{got:?}, wanted {loss} {norm}");
            }
        }
    }
}

#[test]
fn every_layout_trains_on_them_as_one_device_does_on_the_whole_batch() {
    let config = |layout: Layout, zero: u8| Config { steps: 6, ..config(layout, zero) };
    for model in models() {
        let (_, whole) = train(config(Layout::default(), 0), &model);
        for (dp, pp, tp, micro_batches, schedule, zero) in [
            (1, 1, 1, 5, "1f1b", 0),
            (2, 1, 1, 1, "1f1b", 0),
            (2, 1, 1, 3, "1f1b", 2),
            (4, 1, 1, 2, "1f1b", 3),
            (2, 2, 1, 2, "1f1b", 1),
            (1, 2, 1, 2, "zb-v", 0),
            (1, 1, 2, 2, "1f1b", 0),
        ] {
            let one = Layout { micro_batches, ..Layout::default() };
            let layout =
                Layout { dp, pp, tp, schedule: schedule.into(), sequence_parallel: tp > 1, ..one.clone() };
            let case = format!(
                "dp {dp} x pp {pp} x tp {tp}, {micro_batches} micro-batches, {schedule}, ZeRO {zero}"
            );
            let (told, steps) = train(config(layout, zero), &model);
            if tp == 1 {
                let (chained, _) = train(Config { chains: dp, ..config(one, 0) }, &model);
                assert_eq!(told.losses(), chained.losses(), "{case}");
                assert_eq!(told.validations(), chained.validations(), "{case}");
            }
            assert_eq!([steps.len(), whole.len()], [6; 2]);
            for (got, wanted) in steps.iter().zip(&whole) {
                let close = |(a, b): (&f64, &f64)| (a - b).abs() < 1e-4 * b;
                assert!(got.iter().zip(wanted).all(close), "{case}: {got:?}, wanted {wanted:?}");
            }
        }
    }
}

#[test]
fn a_resumed_run_goes_on_with_the_same_rows_and_counts() {
    let [model, _] = models();
    let folder = Folder::new();
    let how = |dp: usize| Config { chains: 2 / dp, ..config(Layout { dp, ..Layout::default() }, 0) };
    let (whole, _) = train(how(1), &model);
    let out = Some(folder.path().to_path_buf());
    let (first, _) = train(Config { steps: 5, out: out.clone(), ..how(2) }, &model);
    let (rest, _) = train(Config { resume: out, ..how(1) }, &model);
    assert_eq!([first.losses(), rest.losses()].concat(), whole.losses());
}

/// The second of two stages, with one rank beside the first's two, updates after each micro-batch.
#[test]
fn an_update_of_a_stage_without_flushes_is_by_the_mean_of_its_own_tokens() {
    let model = ModelConfig::Llama(LlamaConfig::new(31, CONTEXT, 3, 2, 16));
    let after = |layout: Layout, batch: usize, steps: u64, lr: f64, asynchronous: Option<Asynchronous>| {
        let lr = Schedule::Constant { lr, warmup: 0 };
        let base = config(layout, 0);
        let config = Config {
            steps,
            batch,
            lr,
            asynchronous,
            clip: None,
            dtype: DType::F64,
            validate_every: 0,
            ..base
        };
        let values = Arc::new(Mutex::new(BTreeMap::new()));
        let kept = values.clone();
        let plain = |parameters: Vec<Parameter>, lr: f64| {
            let rule: AnyRule = Box::<Sgd>::default();
            Ok(vec![Optimizer::new(rule, vec![Group::new(parameters, lr)])?])
        };
        let trainer = Trainer::new(config.clone()).samples(Ordered::new(Answers).unwrap(), CONTEXT);
        let trainer = trainer.optimizers(plain).at_end(move |run| {
            for (name, value) in run.full_state_dict()?.into_iter().filter(|_| run.mesh_rank().is_first()) {
                kept.lock().unwrap().insert(name, value.to_vec::<f64>()?);
            }
            Ok(())
        });
        let part = |rank: &phalanx_train::MeshRank| {
            Ok(decoder(&model, &config.layout, &rank.groups, &rank.scope(&config), None)?)
        };
        trainer.run_parts(part).unwrap();
        Arc::into_inner(values).unwrap().into_inner().unwrap()
    };
    let one = Layout { micro_batches: 2, ..Layout::default() };
    let stages = [(0..2, 2), (2..5, 1)].map(|(layers, replicas)| StageReplicas { layers, replicas });
    let plan = StagePlan::new(stages.to_vec()).unwrap();
    let planned = Layout { pp: plan.ranks(), plan: Some(plan), ..one.clone() };
    let before = after(one.clone(), 16, 1, 0.0, None);
    let whole = after(one.clone(), 16, 1, 1e-6, None);
    // On one device the micro-batches are batches of their own.
    let halves = after(Layout { micro_batches: 1, ..one }, 8, 2, 1e-6, None);
    let got = after(planned, 16, 1, 1e-6, Some(Asynchronous::WeightStashing));
    for (name, before) in before {
        let wanted = if name.contains("embed") || name.contains("layers.0") { &whole } else { &halves };
        for ((before, wanted), got) in before.iter().zip(&wanted[&name]).zip(&got[&name]) {
            assert!(
                (wanted - got).abs() < 1e-10,
                "{name}: moved {}, wanted {}",
                got - before,
                wanted - before
            );
        }
    }
}

#[test]
fn a_loss_that_is_a_mean_over_rows_and_a_mixture_with_other_data_are_refused() {
    let trainer = Trainer::new(config(Layout::default(), 0)).data(Answers);
    let error = trainer.run_layers(super::layers, super::loss).unwrap_err().to_string();
    assert!(
        error.contains("got samples that count unlike often") && error.contains("`run_parts`"),
        "{error}"
    );
    let even = Shuffled::new(super::pictures(4, None), 0).unwrap();
    let sources: Vec<(Box<dyn Samples>, f64)> =
        vec![(Box::new(even), 1.0), (Box::new(Shuffled::new(Answers, 0).unwrap()), 1.0)];
    let error = Blend::new(sources, 0).err().unwrap().to_string();
    assert!(error.starts_with("Blend: got 1 of 2 sources whose samples count unlike often"), "{error}");
    let both = [1, 2].map(|seed| (Box::new(Shuffled::new(Answers, seed).unwrap()) as Box<dyn Samples>, 1.0));
    let blend = Blend::new(both.into(), 3).unwrap();
    let targets = |number: u64| blend.sample(number).unwrap()[1].to_vec::<i64>().unwrap();
    for number in 0..50 {
        assert_eq!(
            blend.counted(number),
            Some(targets(number).iter().filter(|&&target| target >= 0).count())
        );
    }
}
