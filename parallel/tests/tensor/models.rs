//! GPT and Llama over ranks have one device's losses, gradients and parameters, beside data parallelism, ZeRO and
//! recomputation too; Hugging Face folders of models that are split, by layers and by stages.

use std::sync::Arc;

use phalanx_nn::autograd::backward_inputs;
use phalanx_nn::models::{
    BaseWeights, Decoder, DecoderStage, Family, GptConfig, LlamaConfig, Lora, LoraConfig, ModelConfig,
    RecomputeMode, RouterLosses, TransformerConfig, load_stage, read_config,
};
use phalanx_nn::{AdamW, Clip, Group, LayerFactory, OneDevice, Parameters, Rule, Scope, Sgd, cut, norm_of};
use phalanx_parallel::comm::Comm;
use phalanx_parallel::data_parallel::{DataParallel, Ddp, DdpConfig, Entries, SingleDevice};
use phalanx_parallel::mesh::{Axis, Groups, Mesh};
use phalanx_parallel::sharded::{Zero, ZeroConfig, ZeroStage};
use phalanx_parallel::tensor_parallel::{TensorParallel, save_model, sum_squares};
use phalanx_parallel::{Error, Result, launch};
use phalanx_tensor::{DType, Device};

use crate::kit::{
    Cut, ROWS, STEPS, assert_close, backward, build, gpt, llama, loss, part_of, train, train_alone, train_cut,
};

/// Every kind of cut: heads that divide by all ranks tried, key heads that do, and key heads that do not.
fn cases() -> Vec<(ModelConfig, Cut)> {
    let untied = ModelConfig::Gpt(GptConfig { tied: false, ..GptConfig::new(259, 12, 4, 6, 48) });
    let biased = LlamaConfig {
        attention_bias: true,
        mlp_bias: true,
        tied: true,
        key_heads: 2,
        ..LlamaConfig::new(256, 12, 4, 6, 48)
    };
    let models = [
        (gpt(6, 0.2), &[2, 3][..]),
        (gpt(4, 0.2), &[4]),
        (untied, &[3]),
        (llama(6, 6, 0.1), &[2, 3]),
        (llama(6, 2, 0.1), &[2, 3]), // over 3 ranks, two key heads for three query heads each: the second rank uses both
        (llama(6, 3, 0.1), &[2]), // the first rank uses two of three key heads, one of them for two query heads
        (llama(4, 2, 0.1), &[4]),
        (ModelConfig::Llama(biased), &[3]),
    ];
    let cuts = |(config, ranks): (ModelConfig, &'static [usize])| {
        ranks.iter().flat_map(|&ranks| Cut::both(ranks)).map(move |cut| (config.clone(), cut))
    };
    models.into_iter().flat_map(cuts).collect()
}

/// OLMo 2 and OLMoE normalise over the features of all heads, of which a rank has some, or all key heads if there is one. Routers have losses.
#[test]
fn families_give_one_devices_gradients_and_losses() {
    let size = TransformerConfig {
        key_heads: 2,
        dropout: 0.1,
        ..TransformerConfig::new(Family::Llama, 256, 12, 4, 6, 48)
    };
    for mut config in Family::samples(&size) {
        config.experts.iter_mut().for_each(|experts| experts.losses = RouterLosses { balance: 0.3, z: 0.1 });
        if config.family == Family::Olmo2 {
            config.key_heads = 1;
        }
        let model = ModelConfig::Transformer(config);
        Cut::both(2).into_iter().for_each(|cut| matches_one_device(&model, cut));
    }
}

/// Two blocks of a mixture of experts, which 2 and 3 ranks can cut.
fn mixture(family: Family) -> ModelConfig {
    let size = TransformerConfig {
        key_heads: 2,
        inner: 36,
        dropout: 0.1,
        ..TransformerConfig::new(Family::Llama, 256, 12, 2, 6, 24)
    };
    let found = Family::samples(&size).into_iter().find(|config| config.family == family);
    ModelConfig::Transformer(found.unwrap())
}

/// A bias that every rank has would be added by each of them before their partial sums are.
#[test]
fn biases_of_experts_are_refused_where_positions_are_cut() {
    let mut config = mixture(Family::Mixtral);
    if let ModelConfig::Transformer(config) = &mut config {
        config.mlp_bias = true;
    }
    for cut in Cut::both(2) {
        let ranks = launch::threads(2, |rank| -> Result<()> {
            step(&build(&config, cut.layers(rank.comm()), DType::F64, rank.device())?).map(drop)
        });
        let refused = ranks.err().map(|error| error.to_string()).unwrap_or_default();
        let wanted = "got a bias of every rank in a region with sequence parallelism, wanted none";
        assert_eq!(refused.contains(wanted), cut.sequence, "{refused}");
    }
}

/// Adapters alone change, beside layers that are cut, whole or joint.
#[test]
fn adapters_train_as_on_one_device() {
    let targets = |names: &[&str]| LoraConfig::new(3, names);
    let dora = |names: &[&str]| LoraConfig { dora: true, ..targets(names) };
    let beside = |lora: LoraConfig, modules: &[&str]| LoraConfig {
        trained: modules.iter().map(ToString::to_string).collect(),
        ..lora
    };
    let experts = mixture(Family::OlmoE);
    for (config, lora) in [
        (experts, targets(&["q_proj", "up_proj", "down_proj"])),
        (llama(6, 2, 0.1), targets(&["q_proj", "v_proj", "down_proj", "lm_head"])),
        (gpt(6, 0.2), targets(&["c_attn", "mlp.c_proj"])),
        (llama(6, 2, 0.1), dora(&["q_proj", "v_proj", "down_proj", "lm_head"])),
        (gpt(6, 0.2), dora(&["c_attn", "mlp.c_proj"])),
        (
            llama(6, 2, 0.1),
            beside(dora(&["q_proj"]), &["embed_tokens", "lm_head", "norm", "0.mlp.down_proj"]),
        ),
        (gpt(6, 0.2), beside(targets(&["c_attn"]), &["wte", "wpe", "c_fc"])),
    ] {
        let alone =
            build(&config, Lora::new(OneDevice, lora.clone()).unwrap(), DType::F64, Device::CPU).unwrap();
        let before: Vec<_> = alone.parameters().iter().map(|p| p.tensor().copy().unwrap()).collect();
        let wanted = train(&alone, None, 3, 1).unwrap();
        for (parameter, before) in alone.parameters().iter().zip(before) {
            let same = parameter.tensor().to_bytes().unwrap() == before.to_bytes().unwrap();
            assert_eq!(same, !parameter.is_trained(), "{}", parameter.name());
        }
        for cut in [2, 3].into_iter().flat_map(Cut::both) {
            let ranks = launch::threads(cut.ranks, |rank| -> Result<Vec<f64>> {
                let layers = Lora::new(cut.layers(rank.comm()), lora.clone())?;
                let model = build(&config, layers, DType::F64, rank.device())?;
                train(&model, Some(rank.comm()), 3, 1)
            });
            for losses in ranks.unwrap() {
                assert_close(&format!("losses over {cut:?}"), &losses, &wanted, 1e-11);
            }
        }
    }
}

/// The loss, and gradients and values by name after one step of SGD.
fn step<L: LayerFactory>(model: &Decoder<L>) -> Result<(f64, [Entries; 2])> {
    let parameters = model.parameters();
    let mut optimizer = Sgd::default().init(vec![Group::new(parameters.clone(), 0.1)])?;
    let loss = backward(model, 0, 0..ROWS)?;
    let grads = parameters.iter().map(|p| Ok((p.name().to_string(), p.grad()?.unwrap().copy()?)));
    let grads = grads.collect::<Result<_>>()?;
    optimizer.step()?;
    Ok((loss, [grads, parameters.iter().map(|p| (p.name().to_string(), p.tensor())).collect()]))
}

#[test]
fn one_step_of_sgd_gives_one_devices_gradients_and_parameters() {
    cases().into_iter().for_each(|(config, cut)| matches_one_device(&config, cut));
}

fn matches_one_device(config: &ModelConfig, cut: Cut) {
    let alone = build(config, OneDevice, DType::F64, Device::CPU).unwrap();
    let (loss, whole) = step(&alone).unwrap();
    launch::threads(cut.ranks, |rank| -> Result<()> {
        let model = build(config, cut.layers(rank.comm()), DType::F64, rank.device())?;
        let (own_loss, own) = step(&model)?;
        assert_close("loss", &[own_loss], &[loss], 1e-13);
        for (what, own, whole) in [("gradient", &own[0], &whole[0]), ("value", &own[1], &whole[1])] {
            for (parameter, (_, values)) in model.parameters().iter().zip(own) {
                let what = format!("{what} of {} over {cut:?}", parameter.name());
                assert_close(&what, &values.to_vec::<f64>()?, &part_of(parameter, whole), 1e-12);
            }
        }
        Ok(())
    })
    .unwrap();
}

#[test]
fn losses_of_all_steps_are_one_devices_and_the_same_on_every_rank() {
    for (config, cut) in cases() {
        for (dtype, tolerance) in [(DType::F64, 1e-11), (DType::F32, 1e-5)] {
            let alone = train_alone(&config, dtype, STEPS, 1);
            let ranks = train_cut(&config, dtype, cut, STEPS, 1);
            assert!(ranks.iter().all(|losses| *losses == ranks[0]), "{cut:?}");
            for (step, (a, b)) in alone.iter().zip(&ranks[0]).enumerate() {
                assert!((a - b).abs() <= tolerance * a.abs(), "step {step}: {a} {b} {dtype} {cut:?}");
            }
        }
    }
}

/// Losses and norms of two steps of two micro-batches on a mesh of two replicas of two ranks.
fn on_mesh(
    config: &ModelConfig,
    sequence: bool,
    zero: Option<ZeroStage>,
    lora: Option<&LoraConfig>,
) -> Vec<Vec<f64>> {
    let mesh = Mesh::new(2, 2, 1).unwrap();
    let run = |rank: launch::Rank| -> Result<Vec<f64>> {
        let groups = Groups::new(mesh, rank.comm())?;
        let (tp, dp) = (groups.along(Axis::Tp), groups.along(Axis::Dp));
        let layers = Cut { ranks: 2, sequence }.layers(tp);
        match lora {
            None => two_steps(&build(config, layers, DType::F64, rank.device())?, tp, dp, zero),
            Some(lora) => {
                let layers = Lora::new(layers, lora.clone())?;
                two_steps(&build(config, layers, DType::F64, rank.device())?, tp, dp, zero)
            }
        }
    };
    launch::threads(4, run).unwrap()
}

fn two_steps<L: LayerFactory>(
    model: &Decoder<L>,
    tp: &Comm,
    dp: &Comm,
    zero: Option<ZeroStage>,
) -> Result<Vec<f64>> {
    let replicas: Box<dyn DataParallel> = match zero {
        None => Box::new(Ddp::new(model, dp.clone(), DdpConfig::default())?),
        Some(stage) => Box::new(Zero::new(model, dp.clone(), ZeroConfig::new(stage))?),
    };
    let mut optimizer = AdamW::default().init(Group::decay_matrices(replicas.parameters(), 3e-3, 0.1))?;
    let mut found = Vec::new();
    for step in 0..2 {
        let rows = cut(ROWS, 2).swap_remove(dp.rank());
        let (first, second) = (loss(model, step, rows.start..rows.start + 1)?, rows.start + 1..rows.end);
        {
            let _accumulate = replicas.no_sync();
            replicas.backward(&first)?;
        }
        let second = loss(model, step, second)?;
        replicas.backward(&second)?;
        let norm = norm_of(&sum_squares(replicas.grad_squares()?, tp)?)?;
        optimizer.step_scaled(Clip::new(norm, 1.0).scale)?;
        replicas.updated()?;
        replicas.zero_grad()?;
        found.extend([first.item::<f64>()? + second.item::<f64>()?, norm]);
    }
    Ok(found)
}

#[test]
fn replicas_of_cut_models_have_one_devices_losses_and_norms_under_ddp_and_zero() {
    for config in [gpt(4, 0.2), llama(4, 1, 0.1)] {
        let wanted = steps_alone(&build(&config, OneDevice, DType::F64, Device::CPU).unwrap());
        for (sequence, zero) in [
            (false, None),
            (true, None),
            (true, Some(ZeroStage::Gradients)),
            (true, Some(ZeroStage::Parameters)),
        ] {
            same_steps(&wanted, &on_mesh(&config, sequence, zero, None), &format!("{sequence}, {zero:?}"));
        }
    }
}

#[test]
fn replicas_with_adapters_have_one_devices_losses_and_norms_under_ddp_and_zero() {
    let (config, plain) =
        (llama(4, 1, 0.1), LoraConfig::new(3, &["q_proj", "up_proj", "down_proj", "lm_head"]));
    for lora in [LoraConfig { dora: true, ..plain.clone() }, plain] {
        let layers = Lora::new(OneDevice, lora.clone()).unwrap();
        let wanted = steps_alone(&build(&config, layers, DType::F64, Device::CPU).unwrap());
        for zero in
            [None, Some(ZeroStage::Optimizer), Some(ZeroStage::Gradients), Some(ZeroStage::Parameters)]
        {
            same_steps(&wanted, &on_mesh(&config, false, zero, Some(&lora)), &format!("{lora}, {zero:?}"));
        }
    }
}

/// Blocks of weights are the same wherever rows are cut, and where columns are cut at multiples of 64.
#[test]
fn adapters_beside_weights_in_int8_have_one_devices_losses_and_norms() {
    let llama = LlamaConfig { key_heads: 1, inner: 256, ..LlamaConfig::new(256, 12, 1, 4, 128) };
    let (config, base) = (ModelConfig::Llama(llama), BaseWeights::Int8);
    let lora =
        LoraConfig { dora: true, base, ..LoraConfig::new(3, &["q_proj", "v_proj", "down_proj", "lm_head"]) };
    let layers = Lora::new(OneDevice, lora.clone()).unwrap();
    let wanted = steps_alone(&build(&config, layers, DType::F64, Device::CPU).unwrap());
    for (sequence, zero) in [
        (false, None),
        (true, None),
        (false, Some(ZeroStage::Optimizer)),
        (true, Some(ZeroStage::Gradients)),
        (false, Some(ZeroStage::Parameters)),
        (true, Some(ZeroStage::Parameters)),
    ] {
        let what = format!("{sequence}, {zero:?}");
        same_steps(&wanted, &on_mesh(&config, sequence, zero, Some(&lora)), &what);
    }
    let cut = |rank: launch::Rank| -> Result<()> {
        let layers = Cut { ranks: 2, sequence: false }.layers(rank.comm());
        let model = crate::kit::llama(4, 1, 0.0);
        build(&model, Lora::new(layers, lora.clone())?, DType::F32, rank.device()).map(drop)
    };
    let said = launch::threads(2, cut).unwrap_err().to_string();
    // Of either rank, whichever was first.
    let columns = ["0..24", "24..48"].map(|part| format!("o_proj.weight: got columns {part} of 48"));
    assert!(columns.iter().any(|columns| said.contains(columns)), "{said}");
}

/// One device's losses and norms of two steps.
fn steps_alone<L: LayerFactory>(model: &Decoder<L>) -> Vec<(f64, f64)> {
    let alone = SingleDevice::new(model);
    let mut optimizer = AdamW::default().init(Group::decay_matrices(alone.parameters(), 3e-3, 0.1)).unwrap();
    let mut step = |step: u64| {
        let losses: f64 = (0..ROWS).map(|row| backward(model, step, row..row + 1).unwrap()).sum();
        let norm = alone.grad_norm().unwrap();
        optimizer.step_scaled(Clip::new(norm, 1.0).scale).unwrap();
        optimizer.zero_grad().unwrap();
        (losses, norm)
    };
    vec![step(0), step(1)]
}

fn same_steps(wanted: &[(f64, f64)], ranks: &[Vec<f64>], what: &str) {
    for (step, (loss, norm)) in wanted.iter().enumerate() {
        let found = |rank: usize, which: usize| ranks[rank][2 * step + which];
        let what = format!("step {step}, {what}");
        assert_close(&what, &[found(0, 0) + found(2, 0)], &[*loss], 1e-12);
        assert!((0..4).all(|rank| found(rank, 1) == found(0, 1)), "{what}: one norm");
        assert_close(&what, &[found(0, 1)], &[*norm], 1e-11);
    }
}

#[test]
fn micro_batches_and_recomputation_change_nothing_but_the_order_of_additions() {
    for (cut, config) in
        Cut::both(2).into_iter().flat_map(|cut| [(cut, gpt(4, 0.2)), (cut, mixture(Family::OlmoE))])
    {
        let run_with = |micros: usize, mode: RecomputeMode, logits_max: usize| {
            let rank = |rank: launch::Rank| -> Result<Vec<f64>> {
                let mut model = build(&config, cut.layers(rank.comm()), DType::F64, rank.device())?;
                model.set_recompute(mode);
                model.set_logits_max(logits_max);
                train(&model, Some(rank.comm()), 2, micros)
            };
            launch::threads(2, rank).unwrap().swap_remove(0)
        };
        let run = |micros: usize, mode: RecomputeMode| run_with(micros, mode, usize::MAX);
        let plain = run(2, RecomputeMode::Never);
        for logits_max in [0, 100] {
            assert_eq!(run_with(2, RecomputeMode::Never, logits_max), plain, "{logits_max} logits at a time");
        }
        assert_eq!(run(2, RecomputeMode::Always), plain, "recomputation repeats every bit");
        assert_eq!(run(2, RecomputeMode::ExceptLast), plain);
        assert_close("micro-batches", &run(3, RecomputeMode::Never), &plain, 1e-12);
    }
}

#[test]
fn what_all_ranks_hold_stays_the_same_bits_on_all() {
    for cut in Cut::both(3) {
        let rank = |rank: launch::Rank| -> Result<Vec<(String, Vec<u8>)>> {
            let model = build(&llama(6, 2, 0.1), cut.layers(rank.comm()), DType::F32, rank.device())?;
            train(&model, Some(rank.comm()), 2, 1)?;
            let whole = model.parameters().into_iter().filter(|p| p.part().is_whole());
            whole.map(|p| Ok((p.name().to_string(), p.tensor().to_bytes()?))).collect()
        };
        let ranks = launch::threads(3, rank).unwrap();
        assert!(ranks[0].len() == 4 * 4 + 1, "norms, keys and values");
        assert!(ranks.iter().all(|own| *own == ranks[0]));
    }
}

#[test]
fn a_split_backward_pass_has_the_bits_of_the_joint_one() {
    for cut in Cut::both(2) {
        let run = |split: bool| {
            let rank = |rank: launch::Rank| -> Result<Vec<Vec<u8>>> {
                let model = build(&llama(4, 1, 0.1), cut.layers(rank.comm()), DType::F64, rank.device())?;
                let loss = loss(&model, 0, 0..ROWS)?;
                match split {
                    true => backward_inputs(&[(loss, None)])?.run()?,
                    false => loss.backward()?,
                }
                model.parameters().iter().map(|p| Ok(p.grad()?.unwrap().to_bytes()?)).collect()
            };
            launch::threads(2, rank).unwrap()
        };
        assert!(run(true) == run(false), "{cut:?}");
    }
}

#[test]
fn models_in_bf16_lose_no_more_than_one_device_does() {
    for config in [gpt(6, 0.1), llama(6, 2, 0.1)] {
        let exact = train_alone(&config, DType::F64, 1, 1)[0];
        for cut in Cut::both(3) {
            let found = train_cut(&config, DType::BF16, cut, 1, 1)[0][0];
            assert!((found - exact).abs() < 1e-2 * exact, "{found}, wanted {exact}, {cut:?}");
        }
    }
}

/// A rank's part of a model on a mesh of stages.
fn stage(groups: &Groups, layers: usize) -> DecoderStage {
    let (stages, at) = (groups.mesh().size(Axis::Pp), groups.at().pp);
    let layers = layers * at / stages..layers * (at + 1) / stages;
    DecoderStage { layers, first: at == 0, last: at + 1 == stages }
}

#[test]
fn any_layout_writes_the_bytes_of_one_device_and_reads_its_part_of_them() {
    let gpt = GptConfig::new(29, 8, 3, 6, 12);
    let llama = LlamaConfig { key_heads: 2, inner: 20, ..LlamaConfig::new(29, 8, 3, 6, 12) };
    let configs = [
        ModelConfig::Gpt(gpt.clone()),
        ModelConfig::Gpt(GptConfig { tied: false, ..gpt }),
        ModelConfig::Llama(llama.clone()),
        ModelConfig::Llama(LlamaConfig { tied: true, attention_bias: true, ..llama }),
        mixture(Family::OlmoE),
    ];
    let root = std::env::temp_dir().join(format!("phalanx-tensor-files-{}", std::process::id()));
    for (i, config) in configs.into_iter().enumerate() {
        let (alone, dtype) = (root.join(format!("{i}-alone")), [DType::F32, DType::BF16][i % 2]);
        let model = build(&config, OneDevice, dtype, Device::CPU).unwrap();
        phalanx_nn::models::save_model(&model, &config, &alone).unwrap();
        let whole: Vec<_> = model
            .parameters()
            .iter()
            .map(|p| (p.name().to_string(), phalanx_kernels::cast(&p.tensor(), DType::F64).unwrap()))
            .collect();
        for (tp, pp) in [(1, 1), (3, 1), (2, 2), (3, 2), (1, 3)] {
            let folder = root.join(format!("{i}-{tp}-{pp}"));
            let mesh = Mesh::new(tp, 1, pp).unwrap();
            launch::threads(tp * pp, |rank| -> Result<()> {
                let groups = Groups::new(mesh, rank.comm())?;
                let layers = Arc::new(TensorParallel::new(groups.along(Axis::Tp)));
                let config = read_config(&alone)?;
                // Another seed, so that what is not loaded shows.
                let scope = Scope::new(99, dtype, rank.device());
                let model = load_stage(&config, &alone, &layers, &scope, stage(&groups, config.layers()))?;
                for p in model.parameters() {
                    let values = phalanx_kernels::cast(&p.tensor(), DType::F64)?.to_vec::<f64>()?;
                    assert_eq!(values, part_of(&p, &whole), "{} over tp {tp}, pp {pp}", p.name());
                }
                if tp * pp > 1 {
                    let refused = phalanx_nn::models::save_model(&model, &config, &folder);
                    assert!(refused.unwrap_err().to_string().contains("part of a model"));
                }
                save_model(&model, &config, groups.model(), &folder)
            })
            .unwrap();
            for file in ["model.safetensors", "config.json"] {
                let read = |folder: &std::path::Path| std::fs::read(folder.join(file)).unwrap();
                assert!(read(&folder) == read(&alone), "{file} of {config:?} over tp {tp}, pp {pp}");
            }
        }
    }
    std::fs::remove_dir_all(&root).unwrap();
}

#[test]
fn ranks_that_hold_no_whole_model_are_told_what_is_missing() {
    let config = ModelConfig::Gpt(GptConfig::new(29, 8, 3, 6, 12));
    let folder = std::env::temp_dir().join(format!("phalanx-tensor-missing-{}", std::process::id()));
    let error = launch::threads(2, |rank| -> Result<()> {
        let pair = TensorParallel::new(rank.comm());
        let model = build(&config, pair, DType::F32, rank.device())?;
        // Each rank alone, where the two hold the model together.
        let own = rank.comm().group(&[rank.rank()])?;
        save_model(&model, &config, &own, folder.join(rank.rank().to_string())).map_err(|e| match e {
            Error::Config(why) if why.contains("the ranks hold") => Error::Config(why),
            other => Error::Config(format!("another error: {other}")),
        })
    });
    let message = error.unwrap_err().to_string();
    assert!(message.contains("the ranks hold") && message.contains("elements"), "{message}");
}
