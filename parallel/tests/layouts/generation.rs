//! Ranks that have parts of a model continue prompts as one device does, and fail together.

use std::cell::Cell;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use phalanx_nn::models::{
    Family, Generated, Generation, GenerationEnd, GptConfig, LoraConfig, ModelConfig, TransformerConfig,
    adapters, generate_rows,
};
use phalanx_nn::{Parameters, SampleOptions, Scope, pack_weights};
use phalanx_parallel::hybrid::{self, Layout, StagedModel};
use phalanx_parallel::launch::{self, Rank, Threads};
use phalanx_parallel::mesh::Groups;
use phalanx_parallel::planning::{StagePlan, StageReplicas};
use phalanx_parallel::{Error, Result};
use phalanx_tensor::{DType, Device};

use crate::case::{LENGTH, WIDTH, gpt, llama};

/// Prompts of 1 to 15 tokens, for a context of 12.
fn prompts() -> Vec<Vec<u32>> {
    let prompt = |(row, n): (u32, u32)| (0..n).map(|i| (i * 37 + row * 11) % 256).collect();
    (0..).zip([3, 1, 15, 7, 12]).map(prompt).collect()
}

/// Each token is two letters, so that stop strings begin inside tokens.
fn letters(tokens: &[u32]) -> String {
    tokens.iter().flat_map(|token| [token % 7, token / 7 % 7]).map(|n| char::from(b'a' + n as u8)).collect()
}

/// Every option at once. Rows end at end tokens, at stop strings and by their number of tokens.
fn generation<'a>(count: usize) -> Generation<'a> {
    let sampling = SampleOptions {
        temperature: 1.2,
        top_k: Some(200),
        top_p: 0.98,
        min_p: 0.001,
        repetition_penalty: 1.1,
        seed: 5,
    };
    let mut generation = Generation::new(count)
        .with_sampling(sampling)
        .with_end_tokens(&(0..8).map(|i| i * 31).collect::<Vec<_>>())
        .with_text(letters, &["ag", "ccb"])
        .with_processor(|row, _, scores: &mut [f64]| scores[row] = f64::NEG_INFINITY);
    (generation.piece, generation.page) = (4, 2);
    generation
}

/// What the callback gets: row, token, text and end.
type Steps = Vec<(usize, Option<u32>, String, Option<GenerationEnd>)>;

/// Rows of one device or of one rank, what its callback was given, and the scores that were drawn from.
struct Written {
    rows: Vec<Generated>,
    steps: Steps,
    scores: Vec<Vec<f64>>,
}

fn written(
    generation: Generation<'_>,
    run: impl FnOnce(
        Generation<'_>,
        &mut dyn FnMut(phalanx_nn::models::GenerationStep<'_>) -> bool,
    ) -> Result<Vec<Generated>>,
) -> Result<Written> {
    let (mut steps, scores) = (Steps::new(), Mutex::new(vec![Vec::new(); prompts().len()]));
    let traced =
        generation.with_processor(|row, _, of_row: &mut [f64]| scores.lock().unwrap()[row].extend(&*of_row));
    // The callback wants no more of row 3 after two tokens.
    let rows = run(traced, &mut |step| {
        steps.push((step.row, step.token, step.text.into(), step.end));
        step.row != 3 || steps.iter().filter(|(row, ..)| *row == 3).count() < 2
    })?;
    Ok(Written { rows, steps, scores: scores.into_inner().unwrap() })
}

const SEED: u64 = 11;

fn alone(config: &ModelConfig, dtype: DType) -> Written {
    let model = config.init(&Scope::new(SEED, dtype, Device::CPU)).unwrap();
    written(generation(9), |generation, sink| Ok(generate_rows(&model, &prompts(), generation, sink)?))
        .unwrap()
}

fn part(
    config: &ModelConfig,
    layout: &Layout,
    rank: &Rank,
    dtype: DType,
) -> Result<(Box<dyn StagedModel>, Groups)> {
    let groups = Groups::new(layout.mesh()?, rank.comm())?;
    let scope = Scope::new(SEED, dtype, rank.device());
    let model = hybrid::decoder(config, layout, &groups, &scope, None)?;
    // One device's weights lie as usual.
    pack_weights(&model.parameters())?;
    Ok((model, groups))
}

fn by_ranks(config: &ModelConfig, layout: &Layout, dtype: DType) -> Vec<Written> {
    launch::threads(layout.tp * layout.pp, |rank| -> Result<Written> {
        let (model, groups) = part(config, layout, &rank, dtype)?;
        written(generation(9), |generation, sink| {
            hybrid::generate_rows(&model, layout, &groups, &prompts(), generation, sink)
        })
    })
    .unwrap()
}

/// The steps of each row. Rows of unlike groups come in another order where prompts have pieces.
fn of_rows(steps: &Steps) -> Vec<Steps> {
    (0..prompts().len()).map(|row| steps.iter().filter(|step| step.0 == row).cloned().collect()).collect()
}

/// All ranks return one device's rows, the first one calls back as one device does, and one rank draws, from one device's scores.
fn assert_as_alone(config: &ModelConfig, layout: &Layout, dtype: DType) {
    let (wanted, ranks) = (alone(config, dtype), by_ranks(config, layout, dtype));
    let what = format!("{config:?} {dtype} {layout:?}");
    for (rank, got) in ranks.iter().enumerate() {
        assert_eq!(got.rows, wanted.rows, "rank {rank} of {what}");
        assert_eq!(got.steps.is_empty(), rank != 0, "{what}");
    }
    assert_eq!(of_rows(&ranks[0].steps), of_rows(&wanted.steps), "{what}");
    let drawing: Vec<&Written> = ranks.iter().filter(|rank| !rank.scores.concat().is_empty()).collect();
    assert_eq!(drawing.len(), 1, "{what}");
    let scores = drawing[0].scores.iter().zip(&wanted.scores);
    for (row, (got, wanted)) in scores.enumerate() {
        assert_eq!(got.len(), wanted.len(), "row {row} of {what}");
        let bound = if layout.tp == 1 { 0.0 } else { 1e-10 };
        let far = |(a, b): (&f64, &f64)| a != b && (a - b).abs() > bound;
        assert!(!got.iter().zip(wanted).any(far), "row {row} of {what}");
    }
}

fn layout(tp: usize, pp: usize) -> Layout {
    Layout { tp, pp, ..Layout::default() }
}

#[test]
fn the_rows_of_one_device_end_in_every_way() {
    let rows: Vec<Generated> =
        [gpt(3, 6), llama(3, 6, 2)].iter().flat_map(|model| alone(model, DType::F64).rows).collect();
    let some = |is: fn(&GenerationEnd) -> bool| rows.iter().any(|row| is(&row.end));
    assert!(some(|end| matches!(end, GenerationEnd::Token(_))), "{rows:?}");
    assert!(some(|end| matches!(end, GenerationEnd::Stop(_))), "{rows:?}");
    assert!(some(|end| *end == GenerationEnd::Callback), "{rows:?}");
    assert!(some(|end| *end == GenerationEnd::Count), "{rows:?}");
}

#[test]
fn stages_have_the_bits_of_one_device() {
    for dtype in [DType::F32, DType::BF16] {
        for model in [gpt(3, 6), llama(3, 6, 2)] {
            for pp in [2, 3, 5] {
                assert_as_alone(&model, &layout(1, pp), dtype);
            }
        }
    }
    let untied = ModelConfig::Gpt(GptConfig { tied: false, ..GptConfig::new(256, LENGTH, 2, 6, WIDTH) });
    assert_as_alone(&untied, &layout(1, 2), DType::F32);
}

#[test]
fn ranks_with_several_stages_have_the_bits_of_one_device() {
    for (schedule, chunks) in [("interleaved", 2), ("interleaved", 3), ("zb-v", 2)] {
        let layout = Layout { schedule: schedule.into(), chunks, micro_batches: 2, ..layout(1, 2) };
        assert_as_alone(&gpt(4, 6), &layout, DType::F32);
    }
}

/// Of a stage's replicas the first computes, and all have the rows.
#[test]
fn replicas_of_stages_write_with_their_first() {
    let stage = |layers, replicas| StageReplicas { layers, replicas };
    for stages in [vec![stage(0..3, 2), stage(3..5, 1)], vec![stage(0..2, 1), stage(2..5, 2)]] {
        let plan = StagePlan::new(stages).unwrap();
        let layout = Layout { plan: Some(plan), micro_batches: 2, ..layout(1, 3) };
        assert_as_alone(&gpt(3, 6), &layout, DType::F32);
    }
}

/// No rank ever has as much as half of the weights: neither the weights of others, nor their keys and values.
#[test]
fn a_rank_holds_its_part_only() {
    let config = ModelConfig::Gpt(GptConfig::new(256, LENGTH, 4, 6, 120));
    let layout = layout(2, 2);
    let whole = config.init(&Scope::new(SEED, DType::F32, Device::Meta(77))).unwrap();
    let weights: usize = whole.parameters().iter().map(|p| p.tensor().numel() * DType::F32.size()).sum();
    let held = launch::threads(4, |rank| -> Result<[usize; 2]> {
        let ledger = rank.device().ledger()?;
        let before = ledger.total().now;
        let (model, groups) = part(&config, &layout, &rank, DType::F32)?;
        ledger.reset_peak();
        let own = ledger.total().now - before;
        hybrid::generate_rows(&model, &layout, &groups, &prompts(), generation(9), |_| true)?;
        Ok([own, ledger.total().peak - before])
    });
    for [own, peak] in held.unwrap() {
        assert!(own < weights * 2 / 5 && peak < weights / 2, "{own} of {weights} bytes, at most {peak}");
    }
}

/// Key heads that divide by the ranks, and others: of 2 key heads each of 3 ranks has both.
#[test]
fn tensor_parallel_ranks_write_what_one_device_writes() {
    let untied = ModelConfig::Gpt(GptConfig { tied: false, ..GptConfig::new(259, LENGTH, 2, 6, WIDTH) });
    for model in [gpt(2, 6), llama(2, 6, 2), untied] {
        for tp in [2, 3] {
            for sequence_parallel in [false, true] {
                assert_as_alone(&model, &Layout { sequence_parallel, ..layout(tp, 1) }, DType::F64);
            }
        }
    }
}

#[test]
fn every_family_that_trains_in_parts_is_continued_in_parts() {
    let size =
        TransformerConfig { key_heads: 2, ..TransformerConfig::new(Family::Llama, 256, LENGTH, 3, 6, WIDTH) };
    for config in Family::samples(&size) {
        let model = ModelConfig::Transformer(config);
        assert_as_alone(&model, &layout(1, 2), DType::F64);
        assert_as_alone(&model, &layout(2, 2), DType::F64);
    }
}

#[test]
fn adapters_that_ranks_have_in_parts_take_part() {
    let (config, layout) = (llama(2, 6, 2), layout(2, 2));
    let lora = LoraConfig::new(3, &["q_proj", "v_proj", "down_proj", "lm_head"]);
    // Adapters begin with outputs of 0.
    fn set(parameters: &impl Parameters) -> Result<()> {
        for adapter in adapters(parameters).iter().filter(|p| p.name().contains("lora_B")) {
            phalanx_kernels::fill_(&mut adapter.tensor(), 0.3)?;
        }
        Ok(())
    }
    let scope = Scope::new(SEED, DType::F64, Device::CPU);
    let stage = phalanx_nn::models::DecoderStage::whole(config.layers());
    let whole = config.init_stage(&lora.layers().unwrap(), &scope, stage).unwrap();
    let write = || {
        written(generation(6), |generation, sink| Ok(generate_rows(&whole, &prompts(), generation, sink)?))
    };
    let before = write().unwrap().rows;
    set(&whole).unwrap();
    let wanted = write().unwrap().rows;
    assert_ne!(before, wanted);
    let ranks = launch::threads(4, |rank| -> Result<Vec<Generated>> {
        let groups = Groups::new(layout.mesh()?, rank.comm())?;
        let scope = Scope::new(SEED, DType::F64, rank.device());
        let model = hybrid::adapted_decoder(&config, &lora, &layout, &groups, &scope, None)?;
        set(&model)?;
        let written = written(generation(6), |generation, sink| {
            hybrid::generate_rows(&model, &layout, &groups, &prompts(), generation, sink)
        });
        Ok(written?.rows)
    });
    assert!(ranks.unwrap().into_iter().all(|rows| rows == wanted));
}

/// What each rank of two stages of two ranks hears, and whether they can go on together.
fn heard(run: impl Fn(&Rank, &dyn StagedModel, &Layout, &Groups) -> Result<()> + Sync) -> Vec<String> {
    let layout = layout(2, 2);
    launch::threads(4, |rank| -> Result<String> {
        let (model, groups) = part(&llama(2, 6, 2), &layout, &rank, DType::F32)?;
        let said = run(&rank, &model, &layout, &groups).err().map_or("ok".into(), |error| error.to_string());
        rank.comm().barrier()?;
        Ok(said)
    })
    .unwrap()
}

#[test]
fn ranks_with_unlike_prompts_or_settings_write_nothing() {
    /// What a rank is given: the odd one, or the others.
    type Given = fn(bool) -> (Vec<u32>, Generation<'static>);
    let cases: [(&str, Given); 6] = [
        ("the prompts is 1 of 2 tokens", |odd| (vec![1, 2 + u32::from(odd)], Generation::new(3))),
        ("`count` is 3", |odd| (vec![1], Generation::new(3 + usize::from(odd)))),
        ("`sampling` is", |odd| {
            let sampling = SampleOptions { seed: u64::from(odd), ..SampleOptions::default() };
            (vec![1], Generation::new(3).with_sampling(sampling))
        }),
        ("`end_tokens` is [9]", |odd| (vec![1], Generation::new(3).with_end_tokens(&[9 + u32::from(odd)]))),
        ("`stop` is", |odd| {
            (vec![1], Generation::new(3).with_text(letters, &[["a", "b"][usize::from(odd)]]))
        }),
        ("the number of `processors` is 0", |odd| match odd {
            false => (vec![1], Generation::new(3)),
            true => (vec![1], Generation::new(3).with_processor(|_, _, _| ())),
        }),
    ];
    for (wanted, given) in cases {
        let said = heard(|rank, model, layout, groups| {
            let (prompt, generation) = given(rank.rank() == 3);
            hybrid::generate_rows(model, layout, groups, &[prompt], generation, |_| panic!("a token"))
                .map(drop)
        });
        for said in said {
            assert!(said.contains(wanted) && said.contains("on rank 3"), "{said} lacks {wanted}");
        }
    }
}

#[test]
fn what_cannot_be_continued_is_refused_on_all_ranks_which_go_on() {
    let say = |prompt: &[u32], hides: bool| {
        heard(|_, model, layout, groups| {
            let hide = move |_: usize, _: &[u32], scores: &mut [f64]| {
                if hides {
                    scores.fill(f64::NEG_INFINITY);
                }
            };
            let generation = Generation::new(3).with_processor(hide);
            hybrid::generate_rows(model, layout, groups, &[prompt], generation, |_| true).map(drop)
        })
    };
    for (said, wanted) in [
        (say(&[], false), "row 0: the prompt is empty"),
        (say(&[1, 256], false), "token 256 of the prompt is not below the vocabulary 256"),
        (say(&[1], true), "none of the 256 scores is above -inf"),
    ] {
        assert!(said.iter().all(|said| said.contains(wanted)), "{said:?} lacks {wanted}");
    }
    assert_eq!(say(&[1, 2], false), ["ok"; 4]);
}

/// A rank panics after some tokens, returns an error, or never takes part.
#[test]
fn a_rank_that_is_lost_ends_all() {
    let layout = layout(2, 2);
    for (lost, how) in (0..4).flat_map(|rank| ["panic", "callback", "absent"].map(|how| (rank, how))) {
        // The callback is the first rank's.
        if how == "callback" && lost != 0 {
            continue;
        }
        let (begin, said) = (Instant::now(), Mutex::new(vec![String::new(); 4]));
        let outcome = Threads::new(4).timeout(Duration::from_secs(60)).run(|rank| -> Result<()> {
            let (model, groups) = part(&gpt(2, 6), &layout, &rank, DType::F32)?;
            if how == "absent" && rank.rank() == lost {
                return Ok(());
            }
            let is_lost = rank.rank() == lost;
            let calls = Cell::new(0);
            let text = |tokens: &[u32]| {
                calls.set(calls.get() + 1);
                assert!(!(is_lost && how == "panic" && calls.get() > 3), "lost");
                letters(tokens)
            };
            let sink = |_: phalanx_nn::models::GenerationStep<'_>| {
                assert!(how != "callback", "lost");
                true
            };
            let generation = Generation::new(8).with_text(text, &[]);
            let rows =
                hybrid::generate_rows(&model, &layout, &groups, &[vec![1u32, 2], vec![3]], generation, sink);
            said.lock().unwrap()[rank.rank()] =
                rows.as_ref().err().map_or("ok".into(), |error: &Error| error.to_string());
            rows.map(drop)
        });
        let outcome = outcome.err().map(|error| error.to_string()).unwrap_or_default();
        assert!(begin.elapsed() < Duration::from_secs(30), "{how} of {lost} took {:?}", begin.elapsed());
        assert!(outcome.contains(&format!("rank {lost}")), "{how} of {lost}: {outcome}");
        for (rank, said) in said.into_inner().unwrap().iter().enumerate().filter(|(rank, _)| *rank != lost) {
            assert!(said.contains(&format!("rank {lost}")), "{how} of {lost} on {rank}: {said}");
        }
    }
}
