//! A run that moves: it goes on from its checkpoint under another layout, as its twin does that goes on from the same
//! checkpoint with the new layout's additions.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use phalanx_nn::models::{ModelConfig, RecomputeMode};
use phalanx_parallel::Result;
use phalanx_parallel::checkpoint::{Checkpoint, Saver, Settings};
use phalanx_parallel::data_parallel::Entries;
use phalanx_parallel::hybrid::Layout;
use phalanx_parallel::launch::Rank;
use phalanx_tensor::DType;

use crate::case::{Case, gpt, llama};
use crate::outcome::{Own, STEPS, assert_same, on_ranks, twin};
use crate::run::{Run, Update};

/// Steps before the save.
const BEFORE: u64 = if cfg!(debug_assertions) { 2 } else { 6 };

/// A folder of a test's own, removed when it ends.
struct Place(PathBuf);

impl Drop for Place {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// `dp, tp, pp`, a schedule, ZeRO's stage and micro-batches of 12 sequences.
fn case(model: &ModelConfig, mesh: [usize; 3], schedule: &str, zero: u8, micro_batches: usize) -> Case {
    let [dp, tp, pp] = mesh;
    let layout = Layout {
        dp,
        tp,
        pp,
        schedule: schedule.into(),
        micro_batches,
        recompute: if zero == 1 { RecomputeMode::Always } else { RecomputeMode::Never },
        sequence_parallel: tp > 1 && zero > 1,
        ..Layout::default()
    };
    Case { zero, rows: 12, ..Case::new(model.clone(), layout) }
}

/// Saves while the pass of the next step runs.
fn save(case: &Case, folder: &Path) {
    let rank = |rank: Rank| -> Result<()> {
        let mut run = Run::new(case, rank.comm(), rank.device(), Update::AdamW)?;
        Own::train(&mut run, 0..BEFORE)?;
        let mut saver = Saver::new(rank.comm())?.with_block(1 << 12)?;
        saver.save(folder, run.parts()?, &Settings::from([("step".into(), BEFORE.to_string())]))?;
        run.pass(BEFORE)?;
        saver.wait()
    };
    on_ranks(case, rank).unwrap_or_else(|e| panic!("{case}: {e}"));
}

/// The whole state dict that a run gives after it has taken one.
fn whole(case: &Case, given: Option<&Entries>) -> Entries {
    let rank = |rank: Rank| -> Result<Entries> {
        let run = Run::new(case, rank.comm(), rank.device(), Update::Sgd)?;
        if let Some(given) = given {
            run.forget()?;
            run.share.load_full_state_dict(&*run.model, given.clone())?;
        }
        run.share.full_state_dict(&*run.model)
    };
    on_ranks(case, rank).unwrap_or_else(|e| panic!("{case}: {e}")).swap_remove(0)
}

#[test]
fn a_whole_state_dict_is_given_and_taken_by_any_mesh() {
    let bytes = |entries: &Entries| -> BTreeMap<String, Vec<u8>> {
        entries.iter().map(|(name, t)| (name.clone(), t.to_bytes().unwrap())).collect()
    };
    for model in [gpt(4, 6), llama(4, 6, 2)] {
        let first = whole(&case(&model, [1, 1, 1], "1f1b", 0, 2), None);
        for (mesh, schedule, zero) in
            [([2, 2, 2], "1f1b", 3), ([1, 3, 2], "zb-v", 0), ([2, 1, 3], "interleaved", 2)]
        {
            let case = case(&model, mesh, schedule, zero, 2);
            let again = whole(&case, Some(&first));
            assert_eq!(bytes(&again), bytes(&first), "{case}");
        }
        let lacking = |rank: Rank| -> Result<String> {
            let case = case(&model, [1, 2, 1], "1f1b", 0, 2);
            let run = Run::new(&case, rank.comm(), rank.device(), Update::Sgd)?;
            let before = run.parts()?.iter().map(|p| p.values.to_bytes()).collect::<Result<Vec<_>, _>>()?;
            let error = run.share.load_full_state_dict(&*run.model, first[1..].to_vec()).unwrap_err();
            let after = run.parts()?.iter().map(|p| p.values.to_bytes()).collect::<Result<Vec<_>, _>>()?;
            assert_eq!(before, after, "nothing is changed");
            Ok(error.to_string())
        };
        for said in phalanx_parallel::launch::threads(2, lacking).unwrap() {
            assert!(said.contains("state dict: missing") && said.contains(&first[0].0), "{said}");
        }
    }
}

fn goes_on(case: &Case, folder: &Path) {
    let steps = BEFORE..BEFORE + STEPS.min(8);
    let rank = |rank: Rank| -> Result<Own> {
        let mut run = Run::new(case, rank.comm(), rank.device(), Update::AdamW)?;
        run.restore(&Checkpoint::open(folder)?, rank.comm())?;
        Own::train(&mut run, steps.clone())
    };
    let ranks = on_ranks(case, rank).unwrap_or_else(|e| panic!("to {case}: {e}"));
    assert_same(case, &ranks, &twin(case, Some(folder), steps));
}

/// Saves under the first case and goes on under each of the others, and under the first again.
pub fn moves(test: &str, cases: &[Case]) {
    let place = Place(std::env::temp_dir().join(format!("phalanx-moves-{}-{test}", std::process::id())));
    std::fs::create_dir_all(&place.0).unwrap();
    let folder = place.0.join("checkpoint");
    save(&cases[0], &folder);
    cases[1..].iter().chain(&cases[..1]).for_each(|case| goes_on(case, &folder));
}

#[test]
fn from_all_axes_to_tensor_parallelism_with_zero_and_others() {
    let model = gpt(4, 4);
    let to = [
        case(&model, [1, 4, 1], "1f1b", 3, 1),
        case(&model, [1, 1, 1], "1f1b", 0, 3),
        case(&model, [3, 1, 2], "zb-v", 3, 3),
        case(&model, [4, 1, 2], "gpipe", 2, 2),
        case(&model, [1, 2, 4], "zb-h1", 1, 5),
        case(&model, [2, 1, 3], "interleaved", 0, 3),
    ];
    moves("all-axes", &[&[case(&model, [2, 2, 2], "1f1b", 0, 2)], &to[..]].concat());
}

#[test]
fn from_a_pipeline_with_zero_to_all_axes() {
    let model = llama(4, 6, 2);
    let to = [
        case(&model, [2, 2, 2], "zb-h1", 2, 2),
        case(&model, [1, 3, 2], "1f1b", 0, 5),
        case(&model, [1, 1, 8], "interleaved", 0, 3),
        case(&model, [2, 3, 1], "1f1b", 3, 1),
        case(&model, [6, 1, 1], "1f1b", 1, 2),
    ];
    moves("pipeline", &[&[case(&model, [2, 1, 3], "zb-v", 3, 4)], &to[..]].concat());
}

#[test]
fn from_three_cut_ranks_to_two_and_none() {
    let model = gpt(4, 6);
    let to = [
        case(&model, [2, 2, 1], "1f1b", 3, 2),
        case(&model, [1, 6, 1], "1f1b", 0, 1),
        case(&model, [2, 1, 2], "1f1b", 3, 3),
    ];
    moves("cut", &[&[case(&model, [1, 3, 2], "zb-v", 2, 4)], &to[..]].concat());
}

#[test]
fn bf16_with_its_master_copies_moves_too() {
    let model = llama(4, 6, 3);
    let cases = [
        ([2, 1, 2], "1f1b", 1),
        ([1, 1, 4], "zb-v", 3),
        ([3, 1, 1], "1f1b", 0),
        ([4, 1, 2], "interleaved", 2),
    ];
    let cases = cases
        .map(|(mesh, schedule, zero)| Case { dtype: DType::BF16, ..case(&model, mesh, schedule, zero, 2) });
    moves("bf16", &cases);
}
