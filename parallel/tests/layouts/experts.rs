//! Experts that ranks divide train as one device's do, bit for bit, under every axis beside them; whatever the routing; and their runs move.

use phalanx_nn::models::{Family, GptConfig, LoraConfig, ModelConfig, RecomputeMode};
use phalanx_nn::{Parameters, Scope};
use phalanx_parallel::Result;
use phalanx_parallel::hybrid::{self, Layout};
use phalanx_parallel::launch::Rank;
use phalanx_parallel::mesh::Groups;
use phalanx_parallel::sharded::Ownership;
use phalanx_tensor::DType;

use crate::case::{Case, ELSEWHERE, LENGTH, balanced, mixture, sample};
use crate::every::over_tcp;
use crate::moves::moves;
use crate::outcome::{STEPS, assert_near, assert_same, of_whole_layers, on_ranks, together, twin};

/// `dp, tp, pp` and `ep`, with two micro-batches.
fn case(model: ModelConfig, mesh: [usize; 4]) -> Case {
    let [dp, tp, pp, ep] = mesh;
    Case::new(model, Layout { dp, tp, pp, ep, micro_batches: 2, ..Layout::default() })
}

/// Holds the ranks to the twin, which has all experts; and the twin, if its layers are cut, to one device.
fn check(case: &Case) {
    let wanted = twin(case, None, 0..STEPS);
    assert_same(case, &together(case, 0..STEPS), &wanted);
    if case.layout.tp > 1 {
        assert_near(case, &wanted, &twin(&of_whole_layers(case), None, 0..STEPS));
    }
}

/// With the residual stream whole, and cut where ranks have parts of layers.
fn check_streams(case: Case) {
    check(&case);
    if case.layout.tp > 1 {
        let layout = Layout { sequence_parallel: true, ..case.layout.clone() };
        check(&Case { layout, ..case });
    }
}

fn families() -> [ModelConfig; 2] {
    [Family::Mixtral, Family::Qwen3Moe].map(|family| mixture(family, 2))
}

#[test]
fn divided_experts_have_the_bits_of_whole_ones() {
    for model in families() {
        for mesh in [[2, 1, 1, 2], [4, 1, 1, 2], [4, 1, 1, 4]] {
            check(&case(model.clone(), mesh));
        }
    }
}

#[test]
fn divided_experts_have_the_bits_of_whole_ones_beside_split_layers() {
    families().into_iter().for_each(|model| check(&case(model, [2, 2, 1, 2])));
}

#[test]
fn divided_experts_have_the_bits_of_whole_ones_in_pipelines() {
    for (model, schedule) in families().into_iter().zip(["1f1b", "zb-h1"]) {
        let case = case(model, [2, 1, 2, 2]);
        let recompute = if schedule == "1f1b" { RecomputeMode::Always } else { RecomputeMode::Never };
        check(&Case { layout: Layout { schedule: schedule.into(), recompute, ..case.layout }, ..case });
    }
}

#[test]
fn divided_experts_have_the_bits_of_whole_ones_under_zero() {
    for (model, zero) in families().into_iter().zip([1, 2]).chain(families().map(|model| (model, 3))) {
        check(&Case { zero, ..case(model.clone(), [4, 1, 1, 2]) });
        check(&Case { zero, ..case(model, [2, 1, 1, 2]) });
    }
}

/// The experts of a block are one unit over the ranks that have the same ones, and the rest of it another over all replicas; with small units, so
/// is each map of an expert.
#[test]
fn divided_experts_whose_values_are_sharded_have_the_bits_of_whole_ones_beside_all_axes() {
    let [mixtral, qwen] = families();
    let olmoe = mixture(Family::OlmoE, 2);
    let zero3 = |model: &ModelConfig, mesh| Case { zero: 3, ..case(model.clone(), mesh) };
    let with = |case: Case, recompute, schedule: &str| Case {
        layout: Layout { recompute, schedule: schedule.into(), ..case.layout },
        ..case
    };
    let recompute = RecomputeMode::Always;
    check(&with(zero3(&olmoe, [4, 1, 1, 2]), recompute, "1f1b"));
    check(&Case { unit_elements: Some(100), ..zero3(&mixtral, [4, 1, 1, 2]) });
    check(&Case {
        unit_elements: Some(1000),
        ..with(zero3(&qwen, [4, 1, 1, 2]), RecomputeMode::ExceptLast, "1f1b")
    });
    check(&Case { ownership: Ownership::Whole, dtype: DType::BF16, ..zero3(&olmoe, [4, 1, 1, 2]) });
    check(&with(zero3(&mixtral, [2, 2, 2, 2]), RecomputeMode::Never, "1f1b"));
    check(&with(zero3(&olmoe, [4, 1, 2, 2]), recompute, "1f1b"));
    check(&with(zero3(&qwen, [4, 1, 2, 2]), RecomputeMode::Never, "zb-v"));
}

#[test]
fn divided_experts_with_offloaded_shards_have_the_bits_of_whole_ones() {
    for (model, zero) in families().into_iter().zip([1, 3]) {
        let elsewhere = |mesh| Case { zero, offload: Some(ELSEWHERE), ..case(model.clone(), mesh) };
        check(&elsewhere([4, 1, 1, 2]));
        check(&elsewhere([2, 1, 1, 2]));
    }
}

/// Losses of routers are means over the blocks of all stages, of which the last of a Qwen3-MoE has no router.
#[test]
fn losses_of_routers_have_the_bits_of_one_device_in_pipelines() {
    let case = |family, mesh, schedule: &str, recompute| {
        let case = case(balanced(mixture(family, 2)), mesh);
        Case { layout: Layout { schedule: schedule.into(), recompute, ..case.layout }, ..case }
    };
    let (never, always) = (RecomputeMode::Never, RecomputeMode::Always);
    check(&case(Family::Mixtral, [1, 1, 2, 1], "1f1b", never));
    check(&case(Family::Qwen3Moe, [1, 1, 2, 1], "gpipe", always));
    check(&case(Family::OlmoE, [1, 1, 2, 1], "zb-h1", never));
    check(&case(Family::OlmoE, [1, 1, 2, 1], "interleaved", RecomputeMode::ExceptLast));
    check(&Case { ignored: 3, packed: true, ..case(Family::Mixtral, [2, 1, 2, 2], "zb-v", never) });
    check(&Case { zero: 3, dtype: DType::BF16, ..case(Family::OlmoE, [4, 1, 2, 2], "1f1b", always) });
    let split = case(Family::Qwen3Moe, [2, 2, 2, 2], "1f1b", RecomputeMode::ExceptLast);
    let scattered = Layout { scatter_gather: true, ..split.layout.clone() };
    check(&Case { layout: scattered, ..split.clone() });
    let sequence = Layout { sequence_parallel: true, ..split.layout.clone() };
    check(&Case { layout: sequence, ..split });
}

#[test]
fn divided_experts_have_the_bits_of_whole_ones_with_sequence_parallelism() {
    for (model, zero) in families().into_iter().zip([0, 3]) {
        let case = Case { zero, ..case(model, [2, 2, 1, 2]) };
        check(&Case { layout: Layout { sequence_parallel: true, ..case.layout }, ..case });
    }
}

/// Adapters beside attention are every replica's; those beside experts are divided as the experts are. With adapters beside attention alone
/// no rank trains an expert. The head's is on the last stage.
#[test]
fn adapters_beside_divided_experts_have_the_bits_of_those_beside_whole_ones() {
    let everywhere = LoraConfig::new(2, &["q_proj", "v_proj", "gate_proj", "down_proj", "lm_head"]);
    let attention = LoraConfig::new(2, &["q_proj", "o_proj"]);
    let [mixtral, qwen] = families();
    let case = |model: &ModelConfig, lora: &LoraConfig, zero, mesh| Case {
        lora: Some(lora.clone()),
        zero,
        ..case(model.clone(), mesh)
    };
    check(&case(&mixtral, &everywhere, 0, [2, 1, 1, 2]));
    check(&case(&qwen, &everywhere, 1, [4, 1, 2, 2]));
    check(&case(&mixtral, &everywhere, 3, [4, 1, 1, 2]));
    check(&case(&mixtral, &attention, 0, [2, 1, 1, 2]));
    check(&case(&qwen, &attention, 3, [4, 1, 1, 2]));
    // Those of weights that transformers joins: an expert's gate and up map have one A, and the router has one, too.
    let weights = ["gate_up_proj", "down_proj", "gate.weight"].map(String::from).to_vec();
    let joined = LoraConfig { weights, ..LoraConfig::new(2, &["q_proj"]) };
    check(&case(&mixtral, &joined, 3, [4, 1, 1, 2]));
    check(&case(&qwen, &joined, 0, [2, 1, 2, 2]));
    for split in [case(&qwen, &everywhere, 2, [4, 2, 1, 2]), case(&qwen, &joined, 1, [2, 2, 1, 2])] {
        let sequence = Layout { sequence_parallel: true, ..split.layout.clone() };
        check(&split);
        check(&Case { layout: sequence, ..split });
    }
}

/// Routers, norms and tables that are trained as they are beside adapters.
#[test]
fn modules_trained_beside_adapters_have_the_bits_of_one_device() {
    let [mixtral, qwen] = families();
    let modules = ["embed_tokens", "lm_head", "mlp.gate", "norm"].map(String::from).to_vec();
    let lora = LoraConfig { trained: modules, ..LoraConfig::new(2, &["q_proj", "down_proj"]) };
    let case = |model: &ModelConfig, zero, mesh| Case {
        lora: Some(lora.clone()),
        zero,
        ..case(model.clone(), mesh)
    };
    check(&case(&mixtral, 0, [2, 1, 1, 2]));
    check(&case(&qwen, 1, [4, 1, 2, 2]));
    let split = case(&qwen, 3, [2, 2, 1, 2]);
    let sequence = Layout { sequence_parallel: true, ..split.layout.clone() };
    check(&Case { layout: sequence, ..split });
}

/// A table that is trained beside adapters on the first and on the last rank of a pipeline.
#[test]
fn tied_tables_trained_beside_adapters_have_the_bits_of_one_device() {
    let model = ModelConfig::Gpt(GptConfig::new(256, LENGTH, 4, 2, 16));
    let lora = LoraConfig { trained: vec!["wte".into()], ..LoraConfig::new(2, &["c_attn"]) };
    for (zero, mesh) in [(0, [1, 1, 2, 1]), (3, [2, 1, 2, 1]), (1, [2, 2, 2, 1])] {
        check(&Case { lora: Some(lora.clone()), zero, ..case(model.clone(), mesh) });
    }
}

/// A tied model's head that has a table of its own, because the two are trained apart, or for its adapter.
#[test]
fn heads_that_adapters_untie_have_the_bits_of_one_device() {
    let model = ModelConfig::Gpt(GptConfig::new(256, LENGTH, 4, 2, 16));
    let tables = ["wte", "lm_head"].map(String::from).to_vec();
    let apart = LoraConfig { trained: tables, keeps_tie: false, ..LoraConfig::new(2, &["c_attn"]) };
    for lora in [apart, LoraConfig::new(2, &["c_attn", "lm_head"])] {
        for (zero, mesh) in [(0, [1, 1, 2, 1]), (3, [2, 1, 2, 1]), (1, [2, 2, 2, 1])] {
            check(&Case { lora: Some(lora.clone()), zero, ..case(model.clone(), mesh) });
        }
    }
}

/// Of an embedding's adapter ranks have rows of A as they have rows of the table; the head is tied to the table alone.
#[test]
fn adapters_of_embeddings_have_the_bits_of_one_device() {
    let [_, qwen] = families();
    let gpt = ModelConfig::Gpt(GptConfig::new(256, LENGTH, 4, 2, 16));
    for (model, targets) in [(qwen, &["embed_tokens", "q_proj"]), (gpt, &["wte", "c_attn"])] {
        let lora = LoraConfig::new(2, targets);
        for (zero, mesh) in [(3, [2, 1, 2, 1]), (1, [2, 2, 1, 1]), (0, [1, 2, 2, 1])] {
            check_streams(Case { lora: Some(lora.clone()), zero, ..case(model.clone(), mesh) });
        }
    }
}

/// A bias of B is cut as B is: by rows beside a column layer, not at all beside a row layer.
#[test]
fn biases_of_adapters_have_the_bits_of_one_device() {
    let model = ModelConfig::Gpt(GptConfig::new(256, LENGTH, 4, 2, 16));
    let lora = LoraConfig { biased: true, ..LoraConfig::new(2, &["c_attn", "c_proj", "c_fc"]) };
    for (zero, mesh) in [(3, [2, 1, 2, 1]), (1, [2, 2, 1, 1])] {
        check_streams(Case { lora: Some(lora.clone()), zero, ..case(model.clone(), mesh) });
    }
}

/// Layers that a family's files join have one A, which is whole on every rank of a tensor-parallel group.
#[test]
fn joined_layers_with_one_a_have_the_bits_of_one_device() {
    for (family, targets) in [
        (Family::Phi3, &["qkv_proj", "gate_up_proj"][..]),
        (Family::GptNeoX, &["query_key_value", "dense", "lm_head"][..]),
    ] {
        let (model, lora) = (ModelConfig::Transformer(sample(family)), LoraConfig::new(2, targets));
        for (zero, mesh) in [(0, [2, 1, 1, 1]), (3, [2, 2, 1, 1]), (1, [2, 2, 2, 1])] {
            check_streams(Case { lora: Some(lora.clone()), zero, ..case(model.clone(), mesh) });
        }
    }
}

#[test]
fn divided_experts_over_tcp_have_the_bits_of_whole_ones() {
    let [model, _] = families();
    over_tcp(&Case { zero: 1, ..case(model, [4, 1, 1, 2]) });
}

#[test]
fn recomputed_blocks_send_their_tokens_again() {
    for model in families() {
        let case = case(model, [2, 1, 1, 2]);
        check(&Case { layout: Layout { recompute: RecomputeMode::Always, ..case.layout }, ..case });
    }
}

#[test]
fn models_in_bf16_have_the_bits_of_whole_experts() {
    let [model, _] = families();
    check(&Case { dtype: DType::BF16, ..case(model, [4, 1, 1, 2]) });
}

/// With level gates the first experts take all tokens, so the second rank gets none in the first step.
#[test]
fn experts_and_ranks_without_tokens_have_the_bits_of_whole_ones() {
    for chosen in [1, 2] {
        let model = mixture(Family::Mixtral, chosen);
        check(&Case { level_gates: true, ..case(model.clone(), [2, 1, 1, 2]) });
        check(&Case { level_gates: true, ..case(model, [4, 1, 1, 4]) });
    }
}

#[test]
fn a_run_moves_to_other_divisions_of_the_experts_and_back() {
    for (i, model) in families().into_iter().enumerate() {
        let case = |mesh, zero| Case { zero, rows: 12, ..case(model.clone(), mesh) };
        let cases = [
            case([2, 1, 1, 2], 0),
            case([1, 1, 1, 1], 0),
            case([4, 1, 1, 2], 1),
            case([2, 2, 1, 2], 0),
            case([2, 1, 2, 1], 3),
            case([2, 1, 2, 2], 2),
            case([4, 1, 1, 2], 3),
        ];
        moves(&format!("experts-{i}"), &cases);
    }
}

#[test]
fn adapters_move_to_other_divisions_of_the_experts_and_back() {
    let [model, _] = families();
    let lora = Some(LoraConfig::new(2, &["v_proj", "up_proj"]));
    let case = |mesh, zero| Case { zero, rows: 12, lora: lora.clone(), ..case(model.clone(), mesh) };
    moves("adapters", &[case([2, 1, 1, 2], 0), case([1, 1, 1, 1], 0), case([4, 1, 1, 2], 3)]);
}

#[test]
fn a_rank_has_and_loads_its_experts_alone() {
    let [config, _] = families();
    let folder = std::env::temp_dir().join(format!("phalanx-experts-{}", std::process::id()));
    let alone = config.init_stage(
        &std::sync::Arc::new(phalanx_nn::OneDevice),
        &Scope::new(7, DType::F32, phalanx_tensor::Device::CPU),
        phalanx_nn::models::DecoderStage::whole(config.layers()),
    );
    let alone = alone.unwrap();
    phalanx_nn::models::save_model(&alone, &config, &folder).unwrap();
    let whole: Vec<_> = alone.parameters().iter().map(|p| (p.name().to_string(), p.tensor())).collect();
    let case = case(config.clone(), [2, 1, 1, 2]);
    let names = on_ranks(&case, |rank: Rank| -> Result<Vec<String>> {
        let groups = Groups::new(case.layout.mesh()?, rank.comm())?;
        // Another seed, so that what is not loaded shows.
        let scope = Scope::new(99, DType::F32, rank.device());
        let model = hybrid::decoder(&config, &case.layout, &groups, &scope, Some(&folder))?;
        for p in model.parameters() {
            let wanted = &whole.iter().find(|(name, _)| name == p.name()).unwrap().1;
            assert_eq!(p.tensor().to_bytes()?, wanted.to_bytes()?, "{}", p.name());
        }
        let experts = model.parameters().into_iter().filter(|p| p.has_replica_sites());
        Ok(experts.map(|p| p.name().to_string()).collect())
    });
    for (rank, names) in names.unwrap().into_iter().enumerate() {
        let own = |name: &String| (2 * rank..2 * rank + 2).any(|e| name.contains(&format!(".experts.{e}.")));
        assert!(names.len() == 2 * 2 * 3 && names.iter().all(own), "rank {rank}: {names:?}");
    }
    std::fs::remove_dir_all(&folder).unwrap();
}
