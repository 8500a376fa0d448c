//! What some families have beside others trains under every axis: norms over the features of all heads, and mixtures of experts under sequence
//! parallelism.

use phalanx_nn::models::{Family, ModelConfig, RecomputeMode};
use phalanx_parallel::hybrid::Layout;

use crate::case::{Case, mixture, sample};
use crate::moves::moves;
use crate::outcome::{STEPS, assert_near, assert_same, of_whole_layers, together, twin};

/// `dp, tp, pp` and ZeRO's stage, with two micro-batches.
fn case(model: &ModelConfig, mesh: [usize; 3], zero: u8, sequence_parallel: bool) -> Case {
    let [dp, tp, pp] = mesh;
    let layout = Layout { dp, tp, pp, sequence_parallel, micro_batches: 2, ..Layout::default() };
    Case { zero, ..Case::new(model.clone(), layout) }
}

/// Holds the ranks to the twin with the same split, and that to one device.
fn check(case: &Case) {
    let wanted = twin(case, None, 0..STEPS);
    assert_same(case, &together(case, 0..STEPS), &wanted);
    assert_near(case, &wanted, &twin(&of_whole_layers(case), None, 0..STEPS));
}

/// An OLMo 2 whose key head all ranks have, and an OLMoE.
fn normed() -> [ModelConfig; 2] {
    let mut olmo = sample(Family::Olmo2);
    olmo.key_heads = 1;
    [ModelConfig::Transformer(olmo), mixture(Family::OlmoE, 2)]
}

#[test]
fn norms_over_all_heads_have_the_bits_of_the_same_split() {
    let [olmo, experts] = normed();
    for (model, mesh, zero, sequence) in
        [(&olmo, [1, 2, 2], 0, false), (&olmo, [2, 2, 1], 3, true), (&experts, [2, 2, 1], 2, true)]
    {
        check(&case(model, mesh, zero, sequence));
    }
}

#[test]
fn mixtures_under_sequence_parallelism_have_the_bits_of_the_same_split() {
    for (family, mesh, zero, ep) in [
        (Family::Mixtral, [2, 2, 1], 3, 1),
        (Family::Qwen3Moe, [1, 2, 2], 0, 1),
        (Family::Mixtral, [2, 2, 1], 0, 2),
    ] {
        let case = case(&mixture(family, 2), mesh, zero, true);
        let recompute = if mesh[2] > 1 { RecomputeMode::Always } else { RecomputeMode::Never };
        check(&Case { layout: Layout { recompute, ep, ..case.layout }, ..case });
    }
}

#[test]
fn runs_of_both_move_to_other_layouts() {
    for (i, model) in normed().into_iter().enumerate() {
        let case = |mesh, zero, sequence| Case { rows: 12, ..case(&model, mesh, zero, sequence) };
        let cases = [case([1, 2, 2], 0, true), case([1, 1, 1], 0, false), case([2, 2, 1], 3, false)];
        moves(&format!("families-{i}"), &cases);
    }
}
