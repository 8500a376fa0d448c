//! Every layout trains as one device does: a sample of them, and all. Gradients and parameters after one step of SGD, and
//! what is at the edge: stages without blocks, few or empty micro-batches, tables tied or not, frozen parameters, bf16.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::io::Write;
use std::time::{Duration, Instant};

use phalanx_nn::OneDevice;
use phalanx_nn::models::{GptConfig, LlamaConfig, ModelConfig, RecomputeMode};
use phalanx_parallel::Result;
use phalanx_parallel::comm;
use phalanx_parallel::hybrid::Layout;
use phalanx_parallel::launch::{Environment, Rank};
use phalanx_parallel::pipeline::schedule::NAMES;
use phalanx_parallel::sharded_tensor::ShardedTensor;
use phalanx_tensor::DType;

use crate::case::{Case, Draws, LENGTH, WIDTH, all, gpt, llama};
use crate::outcome::{
    Alike, Own, STEPS, Twin, assert_near, assert_parts, assert_same, named, of_whole_layers, on_ranks,
    together, twin,
};
use crate::port::free_port;
use crate::run::{CLIP, Run, Update, context, gradients};

/// Twins' runs, which many layouts share.
#[derive(Default)]
struct Wanted(HashMap<String, Alike>);

impl Wanted {
    /// The twin's run; that of a cut model is near one device's. In bf16 that is held by a test of its own.
    fn of(&mut self, case: &Case) -> &Alike {
        let Layout { dp, tp, sequence_parallel, micro_batches, .. } = case.layout;
        let Case { model, dtype, shard_ranks, .. } = case;
        let key = format!("{model:?} {dtype} {dp} {tp} {sequence_parallel} {micro_batches} {shard_ranks:?}");
        if !self.0.contains_key(&key) {
            let alike = twin(case, None, 0..STEPS);
            let clipped = alike.norms.iter().filter(|&&norm| norm > CLIP).count();
            // What is frozen has no part in the norm, which may be small then.
            let acts = clipped * 2 > alike.norms.len() || !case.frozen.is_empty();
            assert!(acts, "{case}: clipping has to act: {:?}", alike.norms);
            if tp > 1 && *dtype != DType::BF16 {
                assert_near(case, &alike, self.of(&of_whole_layers(case)));
            }
            self.0.insert(key.clone(), alike);
        }
        &self.0[&key]
    }

    fn check(&mut self, case: &Case) {
        assert_same(case, &together(case, 0..STEPS), self.of(case));
    }
}

/// Few cases in which every two values of two axes meet that meet in any: of some drawn ones the one that has the most new
/// pairs for its cost, and so on.
fn sample(all: &[Case]) -> Vec<&Case> {
    let mut words: BTreeMap<String, usize> = BTreeMap::new();
    let mut number = |word: &str| {
        let next = words.len();
        *words.entry(word.into()).or_insert(next)
    };
    let named: Vec<Vec<usize>> =
        all.iter().map(|case| case.to_string().split(' ').map(&mut number).collect()).collect();
    let pairs = |words: &[usize]| -> Vec<(usize, usize)> {
        words.iter().enumerate().flat_map(|(i, &b)| words[..i].iter().map(move |&a| (a, b))).collect()
    };
    let mut open: BTreeSet<(usize, usize)> = named.iter().flat_map(|words| pairs(words)).collect();
    let (mut draws, mut chosen) = (Draws(1), Vec::new());
    while let Some((a, b)) = open.first() {
        let has = |i: &usize| named[*i].contains(a) && named[*i].contains(b);
        let candidates: Vec<usize> = (0..all.len()).filter(has).collect();
        let new = |i: &usize| pairs(&named[*i]).iter().filter(|pair| open.contains(pair)).count();
        let worth = |i: &usize| 1000 * new(i) / cost(&all[*i]);
        let drawn = (0..100).map(|_| candidates[draws.below(candidates.len())]);
        let best = drawn.max_by_key(worth).unwrap();
        pairs(&named[best]).iter().for_each(|pair| _ = open.remove(pair));
        chosen.push(&all[best]);
    }
    chosen
}

/// How long a case takes, roughly: ranks that cut layers wait for each other most.
fn cost(case: &Case) -> usize {
    let Layout { dp, tp, micro_batches, .. } = case.layout;
    20 + dp * tp * tp * micro_batches
}

#[test]
fn a_sample_in_which_all_pairs_of_settings_meet_trains_as_one_device_does() {
    // Of the whole list there are pairs enough in every thirteenth case; 13 divides the length of no axis.
    let all: Vec<Case> = all().into_iter().step_by(13).collect();
    // Without optimisation there is no time for all of them.
    let every = if cfg!(debug_assertions) { 8 } else { 1 };
    let mut wanted = Wanted::default();
    sample(&all).into_iter().step_by(every).for_each(|case| wanted.check(case));
}

/// `PHALANX_LAYOUTS`: how many (all), `PHALANX_LAYOUTS_SEED`: which (0), `PHALANX_LAYOUTS_ONLY`: words that their names have.
#[test]
#[ignore = "takes days"]
fn every_layout() {
    let variable = |name: &str| std::env::var(format!("PHALANX_LAYOUTS{name}")).ok();
    let number = |name: &str| variable(name).map(|text| text.parse::<usize>().expect("a number"));
    let only = variable("_ONLY").unwrap_or_default();
    let mut cases = all();
    cases.retain(|case| only.split_whitespace().all(|word| case.to_string().split(' ').any(|w| w == word)));
    let (count, total) = (number("").unwrap_or(usize::MAX).min(cases.len()), cases.len());
    if count < total {
        let mut draws = Draws(number("_SEED").unwrap_or(0) as u64);
        (0..count).for_each(|i| cases.swap(i, i + draws.below(total - i)));
        cases.truncate(count);
    }
    let (mut wanted, begin) = (Wanted::default(), Instant::now());
    for (number, case) in cases.iter().enumerate() {
        // Written directly: the test harness shows nothing that a test prints and passes.
        let at = format!("{:4.0} s  {}/{count}", begin.elapsed().as_secs_f64(), number + 1);
        let _ = writeln!(std::io::stderr(), "{at}  {case}");
        wanted.check(case);
    }
}

fn layout(dp: usize, tp: usize, pp: usize, schedule: &str, micro_batches: usize) -> Layout {
    Layout { dp, tp, pp, schedule: schedule.into(), micro_batches, ..Layout::default() }
}

fn untied_gpt(layers: usize) -> ModelConfig {
    ModelConfig::Gpt(GptConfig {
        tied: false,
        ..GptConfig::new(256, LENGTH, layers, 6, WIDTH).with_dropout(0.1)
    })
}

fn tied_llama(layers: usize) -> ModelConfig {
    let config = LlamaConfig::new(256, LENGTH, layers, 6, WIDTH);
    let biases = LlamaConfig { attention_bias: true, mlp_bias: true, tied: true, ..config };
    ModelConfig::Llama(LlamaConfig { key_heads: 3, dropout: 0.1, ..biases })
}

fn check(case: &Case) {
    Wanted::default().check(case);
}

/// Gradients and parameters of cut models differ by this part of the tensor's largest element.
const TOLERANCE: f64 = 1e-12;

fn check_sgd(case: &Case) {
    let case = &Case { dtype: DType::F64, ..case.clone() };
    let _context = context(0);
    let alone = comm::threads::world(1, Duration::ZERO).swap_remove(0);
    let mut twin = Twin::new(case, OneDevice, &alone, Update::Sgd).unwrap();
    twin.pass(0).unwrap();
    let whole = gradients(&twin.share).unwrap();
    twin.update().unwrap();
    let values = named(twin.parts().unwrap());
    let rank = |rank: Rank| -> Result<[Vec<ShardedTensor>; 2]> {
        let _context = context(0);
        let mut run = Run::new(case, rank.comm(), rank.device(), Update::Sgd)?;
        run.pass(0)?;
        let gradients = gradients(&*run.share)?;
        run.update()?;
        Ok([gradients, run.parts()?])
    };
    let ranks = on_ranks(case, rank).unwrap_or_else(|e| panic!("{case}: {e}"));
    let tolerance = if case.layout.tp == 1 { 0.0 } else { TOLERANCE };
    assert_parts(
        case,
        &ranks.iter().flat_map(|[gradients, _]| gradients).collect::<Vec<_>>(),
        &named(whole),
        tolerance,
    );
    assert_parts(case, &ranks.iter().flat_map(|[_, values]| values).collect::<Vec<_>>(), &values, tolerance);
}

#[test]
fn one_step_of_sgd_gives_one_devices_gradients_and_parameters() {
    let models = [gpt(4, 6), llama(4, 6, 2), untied_gpt(4), tied_llama(6)];
    let meshes = [
        (1, 2, 1),
        (1, 3, 1),
        (2, 2, 1),
        (1, 2, 2),
        (2, 2, 2),
        (1, 3, 2),
        (2, 1, 2),
        (1, 2, 3),
        (1, 6, 1),
        (2, 3, 1),
    ];
    for (number, (dp, tp, pp)) in meshes.into_iter().enumerate() {
        let schedules = ["1f1b", "zb-v", "gpipe", "zb-h1", "interleaved"];
        for (i, model) in models.iter().enumerate() {
            let (name, zero) = (schedules[(number + i) % 5], ((number + 3 * i) % 4) as u8);
            let layout = Layout {
                sequence_parallel: tp > 1 && (number + i) % 2 == 0,
                recompute: [RecomputeMode::Never, RecomputeMode::Always, RecomputeMode::ExceptLast]
                    [(number + i) % 3],
                ..layout(dp, tp, pp, name, 1 + (number + i) % 3)
            };
            check_sgd(&Case { zero, ..Case::new(model.clone(), layout) });
        }
    }
}

#[test]
fn stages_may_have_no_blocks_and_micro_batches_may_be_fewer() {
    for (pp, tp, micro_batches) in [(4, 2, 1), (5, 1, 2), (3, 2, 1), (8, 1, 3)] {
        for schedule in ["interleaved", "zb-v"] {
            let layout =
                Layout { chunks: 3, sequence_parallel: tp > 1, ..layout(1, tp, pp, schedule, micro_batches) };
            check(&Case::new(gpt(4, 6), layout));
        }
    }
    check(&Case { zero: 3, ..Case::new(untied_gpt(1), layout(2, 1, 4, "1f1b", 3)) });
}

#[test]
fn tables_may_be_tied_or_not_in_both_models() {
    for (i, schedule) in NAMES.into_iter().enumerate() {
        for model in [untied_gpt(4), tied_llama(4)] {
            let tp = 1 + i % 3;
            let layout =
                Layout { sequence_parallel: i == 5, ..layout(8 / (tp * 2).max(3), tp, 2, schedule, 3) };
            check(&Case { zero: (i % 4) as u8, ..Case::new(model, layout) });
        }
    }
}

#[test]
fn a_micro_batch_may_have_no_target_that_counts() {
    for (dp, tp, pp, schedule) in
        [(2, 1, 2, "1f1b"), (1, 3, 2, "zb-v"), (2, 2, 1, "1f1b"), (3, 1, 1, "gpipe")]
    {
        check(&Case { ignored: 30, zero: dp as u8, ..Case::new(gpt(4, 6), layout(dp, tp, pp, schedule, 5)) });
    }
}

/// Attention that stays inside documents, fused and, with dropout, of other operations.
#[test]
fn rows_of_several_documents_train_as_on_one_device() {
    let without = GptConfig::new(256, LENGTH, 4, 6, WIDTH).with_dropout(0.0);
    let ModelConfig::Llama(shared) = llama(4, 6, 2) else { unreachable!() };
    let models =
        [ModelConfig::Gpt(without), ModelConfig::Llama(LlamaConfig { dropout: 0.0, ..shared }), gpt(4, 6)];
    let meshes = [
        (3, 1, 1, "1f1b"),
        (2, 1, 2, "zb-v"),
        (1, 1, 4, "interleaved"),
        (4, 1, 2, "gpipe"),
        (1, 3, 1, "1f1b"),
        (2, 2, 2, "1f1b"),
    ];
    let modes = [RecomputeMode::Never, RecomputeMode::Always, RecomputeMode::ExceptLast];
    for (i, (dp, tp, pp, schedule)) in meshes.into_iter().enumerate() {
        for (j, model) in models.iter().enumerate() {
            let recompute = modes[(i + j) % 3];
            let layout =
                Layout { recompute, sequence_parallel: tp > 1 && j < 2, ..layout(dp, tp, pp, schedule, 3) };
            let zero = if dp > 1 { ((i + j) % 4) as u8 } else { 0 };
            check(&Case { packed: true, zero, ..Case::new(model.clone(), layout) });
        }
    }
}

/// The first stage, some stages, or everything but the ends has nothing to train.
#[test]
fn parameters_may_be_frozen() {
    let first: &[&str] = &["wte", "wpe", "h.0.", "h.1.", "h.2."];
    let middle: &[&str] = &["h.1.", "h.2."];
    let tied: &[&str] = &["wte"];
    let but_norms: &[&str] = &["attn", "mlp", "wte", "wpe", "lm_head"];
    let models = [(first, untied_gpt(4)), (middle, gpt(4, 6)), (tied, gpt(4, 6)), (but_norms, untied_gpt(4))];
    let meshes = [(2, 1, 3, "1f1b"), (1, 2, 2, "zb-h1"), (2, 2, 1, "1f1b"), (1, 1, 2, "zb-v")];
    for (i, (frozen, model)) in models.into_iter().enumerate() {
        for (j, (dp, tp, pp, schedule)) in meshes.into_iter().enumerate() {
            let zero = ((i + j) % 4) as u8;
            check(&Case { frozen, zero, ..Case::new(model.clone(), layout(dp, tp, pp, schedule, 3)) });
        }
    }
}

/// Ranks of all axes that exchange everything over TCP.
#[test]
fn ranks_over_tcp_have_the_bits_of_the_twin() {
    let layout = Layout { scatter_gather: true, ..layout(2, 2, 2, "zb-v", 2) };
    over_tcp(&Case { zero: 2, ..Case::new(llama(4, 6, 2), layout) });
}

/// Holds ranks that exchange everything over TCP to the twin.
pub fn over_tcp(case: &Case) {
    let port = free_port();
    let process = |rank| {
        let place = Environment::new().local(rank, case.ranks(), port).timeout(Duration::from_secs(120));
        place.run(|rank| {
            let mut run = Run::new(case, rank.comm(), rank.device(), Update::AdamW)?;
            Own::train(&mut run, 0..STEPS)
        })
    };
    let ranks: Vec<Own> = std::thread::scope(|scope| {
        let process = &process;
        let threads: Vec<_> = (0..case.ranks()).map(|rank| scope.spawn(move || process(rank))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap().unwrap()).collect()
    });
    assert_same(case, &ranks, &twin(case, None, 0..STEPS));
}

/// ZB-H2 has twice the warm-up of the others, so that its weights' gradients come late.
#[test]
fn zb_h2_trains_as_one_device_does_on_two_three_and_four_ranks() {
    for (pp, micro_batches, zero) in [(2, 5, 0), (3, 2, 0), (4, 7, 3)] {
        for model in [gpt(4, 6), untied_gpt(4)] {
            let layout = layout(8 / pp / 2, 1, pp, "zb-h2", micro_batches);
            check(&Case { zero, ..Case::new(model, layout) });
        }
    }
}

/// The weights' gradients of a loss whose logits are computed in chunks need the weights, which ZeRO-3 has given up when a schedule comes to
/// `W`.
#[test]
fn a_split_backward_pass_of_a_loss_in_chunks_uses_no_weights_that_were_given_up() {
    for (tp, schedule) in [(1, "zb-h1"), (1, "zb-h2"), (2, "zb-v")] {
        for model in [gpt(4, 6), untied_gpt(4)] {
            let layout = Layout { logits_max: Some(1000), ..layout(2, tp, 2, schedule, 3) };
            check(&Case { zero: 3, ..Case::new(model, layout) });
        }
    }
}

/// Tensors that are sent in parts, and attention that is recomputed alone, change no bit of a layout.
#[test]
fn sent_parts_and_recomputed_attention_have_the_bits_of_the_layout() {
    let bits = |model: &ModelConfig, layout: Layout| -> Vec<_> {
        let of = |own: Own| {
            let parts = own.parts.iter().map(|part| part.values.to_bytes().unwrap()).collect::<Vec<_>>();
            (own.losses, own.norms, parts)
        };
        together(&Case::new(model.clone(), layout), 0..2).into_iter().map(of).collect()
    };
    for (tp, pp, schedule) in [(2, 2, "1f1b"), (3, 2, "zb-v"), (1, 1, "1f1b")] {
        for model in [gpt(4, 6), llama(4, 6, 3)] {
            let plain = layout(1, tp, pp, schedule, 3);
            let wanted = bits(&model, plain.clone());
            let scatter_gather = true;
            for recompute in [RecomputeMode::Attention, RecomputeMode::Always] {
                let other = Layout { scatter_gather, recompute, ..plain.clone() };
                assert!(bits(&model, other) == wanted, "tp {tp} pp {pp} {schedule} {recompute}");
            }
        }
    }
}

#[test]
fn bf16_has_the_bits_of_one_device_and_comes_near_where_layers_are_cut() {
    for (dp, pp, schedule, zero) in
        [(2, 2, "1f1b", 0), (2, 3, "zb-v", 3), (1, 4, "interleaved", 1), (4, 2, "zb-h1", 2)]
    {
        let layout = Layout { recompute: RecomputeMode::ExceptLast, ..layout(dp, 1, pp, schedule, 3) };
        for model in [gpt(4, 6), llama(4, 6, 2)] {
            check(&Case { dtype: DType::BF16, zero, ..Case::new(model, layout.clone()) });
        }
    }
    let cut = Layout { sequence_parallel: true, ..layout(2, 2, 2, "1f1b", 2) };
    let case = Case { dtype: DType::BF16, zero: 2, ..Case::new(gpt(4, 6), cut) };
    let (ranks, alone) = (together(&case, 0..STEPS), twin(&of_whole_layers(&case), None, 0..STEPS));
    let losses = |own: &Vec<Vec<f64>>| own.iter().map(|step| step.iter().sum()).collect::<Vec<f64>>();
    // The last stage's ranks, of which two hold each replica together.
    let replicas = [4, 6].map(|rank: usize| losses(&ranks[rank].losses));
    for (step, wanted) in losses(&alone.losses).into_iter().enumerate() {
        let got = replicas[0][step] + replicas[1][step];
        assert!((got / wanted - 1.0).abs() < 5e-3, "step {step}: {got}, wanted {wanted}");
    }
    assert!(alone.norms.iter().all(|norm| *norm > CLIP));
}
