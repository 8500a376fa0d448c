//! Runs of which a rank dies: another takes its place, with nothing in memory, and the run goes on from the copies that the others hold.
//!
//! Ranks are threads. A rank dies when its communicator fails, at a random moment after a step that the seed chooses: in a pass, an update,
//! or while copies are made. Then its copies are dropped and the run begins again.

use std::time::Duration;

use phalanx_nn::models::{GptConfig, ModelConfig};
use phalanx_parallel::hybrid::decoder;
use phalanx_train::{Asynchronous, MemoryCheckpoints, MeshRank, Plateau};

use super::*;

const STEPS: u64 = 8;

fn gpt() -> ModelConfig {
    ModelConfig::Gpt(GptConfig::new(11, 4, 4, 2, 8))
}

fn config(dp: usize, tp: usize, pp: usize, zero: u8) -> Config {
    let layout = Layout { dp, tp, pp, ..Layout::default() };
    Config {
        batch: 8,
        steps: STEPS,
        validate_every: 4,
        memory_checkpoint_every: Some(1),
        ..super::config(layout, zero)
    }
}

/// The ranks that die after a step.
struct Death {
    step: u64,
    ranks: Vec<usize>,
    /// Microseconds after the step.
    after: u64,
}

/// Notices of runs.
#[derive(Clone, Default)]
struct Notices(Arc<Mutex<Vec<String>>>);

impl Callback for Notices {
    fn event(&mut self, event: &Event<'_>) -> Result<()> {
        if let Event::Notice { text, .. } = event {
            self.0.lock().unwrap().push(text.to_string());
        }
        Ok(())
    }
}

/// Trains until the end or until ranks die, which takes their copies along.
fn train(
    config: &Config,
    held: &MemoryCheckpoints,
    death: Option<&Death>,
    notices: &Notices,
) -> Result<Summary> {
    let tokens: Vec<i64> = (0..64 * 4).map(|i| (i * i + i / 3) % 11).collect();
    let rows = |by: i64| {
        let tokens: Vec<i64> = tokens.iter().map(|token| (token + by) % 11).collect();
        Tensor::from_slice(&tokens, &[64, 4], Device::CPU)
    };
    let data = |by: i64| TensorDataset::new(vec![rows(by)?, rows(by + 1)?]);
    let (at, first, after) = match death {
        Some(death) => (death.step, death.ranks[0], Duration::from_micros(death.after)),
        None => (u64::MAX, 0, Duration::ZERO),
    };
    let trainer = Trainer::new(config.clone()).data(data(0)?).validation(data(3)?).callback(notices.clone());
    let trainer = trainer.memory_checkpoints(held).every(1, move |run| {
        if run.done() == at && run.mesh_rank().rank() == first {
            let comm = run.mesh_rank().all_ranks().clone();
            std::thread::spawn(move || {
                std::thread::sleep(after);
                comm.fail("it dies on purpose");
            });
        }
        // No run ends before the rank has died, nor goes on if it dies at once.
        let comm = run.mesh_rank().all_ranks();
        let waits = run.done() == STEPS || run.done() == at && after.is_zero();
        while at < STEPS && waits && comm.failure().is_none() {
            std::thread::sleep(Duration::from_millis(1));
        }
        Ok(None)
    });
    let part =
        |rank: &MeshRank| Ok(decoder(&gpt(), &config.layout, &rank.groups, &rank.scope(config), None)?);
    let trained = trainer.run_parts(part);
    death.iter().flat_map(|death| &death.ranks).for_each(|rank| held.of(*rank).clear());
    trained
}

/// The losses and the losses of validations that a run's folder has.
fn losses(folder: &Folder) -> [Vec<(u64, u64)>; 2] {
    ["loss", "validation_loss"].map(|name| {
        let numbers = numbers_in(&folder.path().join("metrics.jsonl"), name);
        numbers.into_iter().map(|(step, loss)| (step, loss.to_bits())).collect()
    })
}

fn undisturbed(config: &Config) -> [Vec<(u64, u64)>; 2] {
    let folder = Folder::new();
    let config =
        Config { memory_checkpoint_every: Some(0), out: Some(folder.path().into()), ..config.clone() };
    train(&config, &MemoryCheckpoints::default(), None, &Notices::default()).unwrap();
    losses(&folder)
}

/// Trains, lets ranks die, and trains on under the configuration `then`; the notice. The losses are those of the undisturbed run.
fn recover(config: &Config, then: &Config, death: &Death, wanted: &[Vec<(u64, u64)>; 2]) -> String {
    let (folder, held, notices) = (Folder::new(), MemoryCheckpoints::default(), Notices::default());
    let case = format!("{:?}, ZeRO {}: {:?} at {}", config.layout, config.zero, death.ranks, death.step);
    let out = Some(folder.path().to_path_buf());
    let error = train(&Config { out: out.clone(), ..config.clone() }, &held, Some(death), &notices);
    assert!(error.unwrap_err().to_string().contains("it dies on purpose"), "{case}");
    train(&Config { out, ..then.clone() }, &held, None, &notices).unwrap();
    assert_eq!(&losses(&folder), wanted, "{case}");
    assert!(!folder.path().join(".lock").exists(), "{case}");
    let notices = notices.0.lock().unwrap();
    assert_eq!(notices.len(), 1, "{case}: {notices:?}");
    notices[0].clone()
}

/// The step in a notice.
fn step_in(notice: &str) -> u64 {
    let (_, rest) = notice.split_once(" from step ").unwrap_or_else(|| panic!("{notice}"));
    rest.split([',', ' ']).next().unwrap().parse().unwrap()
}

/// Lets the first rank die, and another that the seed chooses, at steps and moments that it chooses, too.
fn ranks_die(config: &Config, seed: u64) {
    let wanted = undisturbed(config);
    assert_eq!((wanted[0].len(), wanted[1].len()), (STEPS as usize, 2));
    let draws = RngKey { seed, step: 0 }.site(0).block(0, 0);
    let other = 1 + draws[2] as usize % (config.ranks() - 1);
    for (rank, draw) in [0, other].into_iter().zip(draws) {
        let (step, after) = (1 + u64::from(draw) % (STEPS - 1), u64::from(draw >> 16) % 4000);
        let death = Death { step, ranks: vec![rank], after };
        let notice = recover(config, config, &death, &wanted);
        assert!(
            notice.starts_with(&format!("rank {rank} was replaced; ")) && notice.contains("held by"),
            "{notice}"
        );
        let from = step_in(&notice);
        assert!((step - 1..=STEPS).contains(&from), "a step is lost: {notice}, {step}");
    }
}

#[test]
fn replicas_hold_what_a_rank_had() {
    ranks_die(&config(2, 1, 1, 0), 1);
}

#[test]
fn a_partner_holds_the_shards_of_a_rank() {
    for zero in 1..4 {
        ranks_die(&config(2, 1, 1, zero), 2 + u64::from(zero));
    }
}

#[test]
fn a_partner_holds_a_split_layer() {
    ranks_die(&config(1, 2, 1, 0), 6);
}

#[test]
fn a_partner_holds_a_stage() {
    ranks_die(&config(1, 1, 2, 0), 7);
    let config = config(1, 1, 2, 0);
    let layout = Layout { schedule: "zb-v".into(), micro_batches: 2, ..config.layout };
    ranks_die(&Config { layout, ..config }, 8);
}

#[test]
fn replicas_hold_a_stage() {
    ranks_die(&config(2, 1, 2, 0), 9);
}

#[test]
fn a_partner_holds_shards_of_split_layers() {
    ranks_die(&config(2, 2, 1, 3), 10);
}

#[test]
fn a_pipeline_without_flushes_goes_on_from_its_last_pause() {
    let asynchronous = Some(Asynchronous::WeightStashing);
    ranks_die(&Config { asynchronous, ..config(1, 1, 2, 0) }, 11);
}

/// The loss scale, averages of the weights, and rates and checkpoints that follow validations.
#[test]
fn what_a_run_remembers_is_held_too() {
    ranks_die(&Config { dtype: DType::F16, ..config(2, 1, 1, 1) }, 12);
    let plateau = Some(Plateau { factor: 0.5, patience: 1 });
    let others = Config { ema: Some(0.9), plateau, keep_best: true, validate_every: 1, ..config(2, 1, 1, 2) };
    let wanted = undisturbed(&others);
    for rank in 0..2 {
        let death = Death { step: 5 + rank as u64, ranks: vec![rank], after: 0 };
        recover(&others, &others, &death, &wanted);
    }
}

#[test]
fn ranks_of_different_groups_die_together() {
    let config = config(2, 1, 2, 0);
    let wanted = undisturbed(&config);
    let death = Death { step: 6, ranks: vec![0, 3], after: 500 };
    let notice = recover(&config, &config, &death, &wanted);
    assert!(notice.starts_with("ranks 0, 3 were replaced; the run goes on from step "), "{notice}");
    assert!(notice.contains("held by ranks 1, 2"), "{notice}");
}

#[test]
fn without_copies_the_run_goes_on_from_its_last_checkpoint_or_begins_anew() {
    // Both have the optimizer's state of one of them.
    let config = config(2, 1, 2, 1);
    let wanted = undisturbed(&config);
    let death = Death { step: 7, ranks: vec![0, 1, 2], after: 0 };
    let saved = Config { save_every: 3, keep_last: 2, ..config.clone() };
    let notice = recover(&saved, &saved, &death, &wanted);
    assert!(notice.starts_with("ranks 0, 1, 2 were replaced; no step is held whole in memory; "), "{notice}");
    assert!([3, 6, STEPS].contains(&step_in(&notice)), "{notice}");
    let notice = recover(&config, &config, &death, &wanted);
    assert!(notice.ends_with("and there is no checkpoint; the run begins anew"), "{notice}");
    let alone = Config { redundant_shards: false, ..self::config(1, 1, 2, 0) };
    let death = Death { step: 7, ranks: vec![1], after: 0 };
    assert!(recover(&alone, &alone, &death, &undisturbed(&alone)).ends_with("the run begins anew"));
}

/// The copies of two ranks of ZeRO-3 become four ranks' parts, and those of two stages the shards of ZeRO-3.
#[test]
fn another_number_of_ranks_goes_on_under_another_layout() {
    let (shards, both, stages) = (config(2, 1, 1, 3), config(2, 1, 2, 0), config(1, 1, 2, 0));
    let stages = Config { layout: Layout { micro_batches: 2, ..stages.layout }, ..stages };
    let wanted = undisturbed(&shards);
    for (rank, [from, to]) in [[&shards, &both], [&stages, &shards]].into_iter().enumerate() {
        let death = Death { step: 4, ranks: vec![rank], after: 500 };
        let notice = recover(from, to, &death, &wanted);
        assert!((3..=STEPS).contains(&step_in(&notice)), "{notice}");
    }
}

#[test]
fn a_later_checkpoint_on_disk_is_taken_before_an_earlier_one_in_memory() {
    let (folder, held, notices) = (Folder::new(), MemoryCheckpoints::default(), Notices::default());
    let config = Config { memory_checkpoint_every: Some(2), ..config(2, 1, 1, 0) };
    let death = Death { step: 3, ranks: vec![1], after: 0 };
    assert!(train(&config, &held, Some(&death), &notices).is_err());
    assert!(held.of(0).bytes() > 0);
    let config = Config { out: Some(folder.path().into()), ..config };
    let saved = Config { steps: 6, memory_checkpoint_every: Some(0), ..config.clone() };
    train(&saved, &MemoryCheckpoints::default(), None, &notices).unwrap();
    train(&config, &held, None, &notices).unwrap();
    let wanted =
        "rank 1 was replaced; no later step is held whole in memory; the run goes on from step 6 in ";
    assert!(notices.0.lock().unwrap()[0].starts_with(wanted), "{:?}", notices.0);
}
