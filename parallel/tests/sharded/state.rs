//! State dicts: whole ones are those of one device and load under any other layout.

use phalanx_kernels as kernels;
use phalanx_nn::autograd::Var;
use phalanx_nn::models::{Decoder, GptConfig};
use phalanx_nn::{
    AdamW, Embedding, EmbeddingBag, EmbeddingBagConfig, EmbeddingConfig, Group, Init, Optimizer, Parameter,
    Parameters, Rule, Scope, Sgd, parameters,
};
use phalanx_parallel::data_parallel::{DataParallel, Ddp, DdpConfig};
use phalanx_parallel::sharded::{FullStateDict, Ownership, Zero, ZeroConfig, ZeroStage};
use phalanx_parallel::{Result, launch, sharded_tensor::ShardedTensor};
use phalanx_tensor::{DType, Device, Tensor};

use crate::gpt::{self, bytes};
use crate::{STAGES, config};

type Entries = Vec<(String, Tensor)>;

/// Trains from a state, or from the beginning, for some steps; the state then.
fn train(
    ranks: usize,
    config: &ZeroConfig,
    from: Option<&(Entries, Entries)>,
    steps: std::ops::Range<u64>,
) -> (Entries, Entries) {
    let run = |rank: launch::Rank| -> Result<_> {
        let model = gpt::model(DType::BF16, rank.device());
        let zero = Zero::new(&model, rank.comm().clone(), config.clone())?;
        let mut optimizer = gpt::optimizer(zero.parameters());
        if let Some((values, state)) = from {
            zero.load_full_state_dict(values.clone())?;
            optimizer.load_state_dict(zero.part_of_optimizer_state(state.clone())?)?;
        }
        for step in steps.clone() {
            // All ranks bring the whole batch: the layouts' gradients differ, so their number is made up for.
            let loss = gpt::loss(&model, step, 0..gpt::ROWS)?.mul_scalar(1.0 / ranks as f64)?;
            zero.backward(&loss)?;
            gpt::update(&mut optimizer, zero.grad_norm()?)?;
            zero.updated()?;
        }
        let state = (
            zero.full_state_dict()?,
            zero.full_optimizer_state(optimizer.state_dict()?, &optimizer.kinds())?,
        );
        Ok(state)
    };
    let mut all = launch::threads(ranks, run).unwrap();
    assert!(all[1..].iter().all(|(values, state)| values.is_empty() && state.is_empty()));
    all.swap_remove(0)
}

fn sorted(entries: &Entries) -> Vec<(String, Vec<u8>)> {
    let mut bytes = bytes(entries);
    bytes.sort();
    bytes
}

#[test]
fn a_run_goes_on_under_every_other_layout() {
    // Numbers of ranks that are powers of two, by which gradients are divided without rounding.
    let whole = train(2, &config(ZeroStage::Optimizer), None, 0..4);
    let half = train(4, &config(ZeroStage::Parameters), None, 0..2);
    let names: Vec<&String> = half.0.iter().map(|(name, _)| name).collect();
    let model = gpt::model(DType::BF16, Device::CPU);
    assert_eq!(names, phalanx_nn::state_dict(&model).iter().map(|(name, _)| name).collect::<Vec<_>>());
    for stage in STAGES {
        for (ranks, ownership) in [(1, Ownership::Even), (2, Ownership::Whole), (8, Ownership::Even)] {
            let config = ZeroConfig { ownership, ..config(stage) };
            let end = train(ranks, &config, Some(&half), 2..4);
            assert!(sorted(&end.0) == sorted(&whole.0), "{stage:?} over {ranks}");
            assert!(sorted(&end.1) == sorted(&whole.1), "{stage:?} over {ranks}");
        }
    }
}

#[test]
fn a_run_goes_on_with_other_dtypes_of_shares_offload_and_groups() {
    let whole = train(2, &config(ZeroStage::Optimizer), None, 0..4);
    let [narrow, wide] = [None, Some(DType::F32)].map(|shard_dtype| {
        train(4, &ZeroConfig { shard_dtype, ..config(ZeroStage::Parameters) }, None, 0..2)
    });
    assert!(sorted(&narrow.1) == sorted(&wide.1));
    for stage in STAGES {
        for (half, shard_dtype, offload, shard_ranks) in [
            (&narrow, Some(DType::F32), None, None),
            (&wide, None, None, None),
            (&wide, Some(DType::F32), Some(Device::Cpu(9)), None),
            (&narrow, None, Some(Device::Cpu(9)), Some(2)),
            (&wide, Some(DType::F32), None, Some(1)),
        ] {
            let config = ZeroConfig { shard_dtype, offload, shard_ranks, ..config(stage) };
            // Sums of two equal numbers, twice, have the bits of sums of four.
            let end = train(4, &config, Some(half), 2..4);
            assert!(sorted(&end.1) == sorted(&whole.1), "{config:?}");
            let dtype = shard_dtype.unwrap_or(DType::BF16);
            assert!(end.0.iter().all(|(_, t)| t.dtype() == dtype && t.device() == Device::CPU));
            assert!(shard_dtype.is_some() || sorted(&end.0) == sorted(&whole.0), "{config:?}");
        }
    }
}

#[test]
fn what_does_not_fit_is_named_and_changes_nothing() {
    let run = |rank: launch::Rank| -> Result<Vec<String>> {
        let model = gpt::model(DType::F32, rank.device());
        let zero = Zero::new(&model, rank.comm().clone(), config(ZeroStage::Parameters))?;
        let before = bytes(&zero.full_state_dict()?);
        let mut values = phalanx_nn::state_dict(&gpt::model(DType::F32, rank.device()));
        let (name, tensor) = values.remove(0);
        values.push(("extra".into(), tensor.clone()));
        let missing = zero.load_full_state_dict(values).unwrap_err().to_string();
        assert!(missing.contains(&name) && missing.contains("extra"), "{missing}");
        assert!(bytes(&zero.full_state_dict()?) == before);
        let wrong = (format!("{name}.exp_avg"), tensor.narrow(0, 0, 1)?);
        let shape = zero.part_of_optimizer_state(vec![wrong]).map(drop);
        let foreign = Sgd::default().init(vec![Group::new(vec![], 1.0)])?;
        let other = zero.full_optimizer_state(foreign.state_dict()?, &[]).map(drop);
        Ok([shape, other].into_iter().filter_map(|r| r.err().map(|e| e.to_string())).collect())
    };
    for messages in launch::threads(2, run).unwrap() {
        assert!(messages.iter().any(|m| m.contains("exp_avg")), "{messages:?}");
    }
}

#[test]
fn parts_of_any_layout_are_loaded_by_any_other() {
    let save = |ranks: usize, config: ZeroConfig| {
        let run = |rank: launch::Rank| -> Result<_> {
            let model = gpt::model(DType::BF16, rank.device());
            let zero = Zero::new(&model, rank.comm().clone(), config.clone())?;
            let parts = zero.sharded_state_dict()?.into_iter();
            let copied = parts.map(|part| Ok(ShardedTensor { values: part.values.copy()?, ..part }));
            Ok((copied.collect::<Result<Vec<_>>>()?, zero.full_state_dict()?))
        };
        let (parts, whole): (Vec<_>, Vec<_>) = launch::threads(ranks, run).unwrap().into_iter().unzip();
        (parts.concat(), whole.into_iter().next().unwrap())
    };
    let load = |ranks: usize, config: &ZeroConfig, parts: &[ShardedTensor]| {
        let run = |rank: launch::Rank| -> Result<_> {
            let model = gpt::model(DType::BF16, rank.device());
            model.parameters().iter().try_for_each(|p| {
                Ok::<_, phalanx_parallel::Error>(phalanx_kernels::fill_(&mut p.tensor(), 0.5)?)
            })?;
            let zero = Zero::new(&model, rank.comm().clone(), config.clone())?;
            zero.load_sharded_state_dict(parts)?;
            zero.full_state_dict()
        };
        launch::threads(ranks, run).map(|mut all| all.swap_remove(0))
    };
    let (parts, whole) = save(3, config(ZeroStage::Parameters));
    for stage in STAGES {
        let config = ZeroConfig { ownership: Ownership::Whole, ..config(stage) };
        assert!(bytes(&load(4, &config, &parts).unwrap()) == bytes(&whole), "{stage:?}");
        let hybrid = ZeroConfig { shard_ranks: Some(2), ..config };
        assert!(bytes(&load(4, &hybrid, &parts).unwrap()) == bytes(&whole), "{stage:?}");
    }
    let mut short = parts;
    let lost = short.remove(2);
    assert!(!lost.range.is_empty());
    let error = load(2, &config(ZeroStage::Parameters), &short).unwrap_err().to_string();
    assert!(error.contains(&lost.name), "{error}");
}

/// What a rank has after some steps of a small GPT, in every form.
struct Forms {
    full: [Entries; 2],
    everywhere: [Entries; 2],
    sharded: [Vec<ShardedTensor>; 2],
    local: [Entries; 2],
}

fn copied(entries: Entries) -> Entries {
    entries.into_iter().map(|(name, t)| (name, t.copy().unwrap())).collect()
}

fn copied_parts(parts: Vec<ShardedTensor>) -> Vec<ShardedTensor> {
    let copied = |part: ShardedTensor| ShardedTensor { values: part.values.copy().unwrap(), ..part };
    parts.into_iter().map(copied).collect()
}

/// Loads a form, trains, and gives all forms.
fn go_on(
    ranks: usize,
    config: &ZeroConfig,
    load: impl Fn(usize, &Zero, &mut Optimizer<AdamW>) -> Result<()> + Sync,
    steps: std::ops::Range<u64>,
) -> Result<Vec<Forms>> {
    let run = |rank: launch::Rank| -> Result<Forms> {
        let model = gpt::model(DType::BF16, rank.device());
        let zero = Zero::new(&model, rank.comm().clone(), config.clone())?;
        let mut optimizer = gpt::optimizer(zero.parameters());
        load(rank.rank(), &zero, &mut optimizer)?;
        for step in steps.clone() {
            let loss = gpt::loss(&model, step, 0..gpt::ROWS)?.mul_scalar(1.0 / ranks as f64)?;
            zero.backward(&loss)?;
            gpt::update(&mut optimizer, zero.grad_norm()?)?;
            zero.updated()?;
        }
        let (own, kinds) = (optimizer.state_dict()?, optimizer.kinds());
        let everywhere = FullStateDict { rank0_only: false, offload_to_cpu: false };
        Ok(Forms {
            full: [zero.full_state_dict()?, zero.full_optimizer_state(own.clone(), &kinds)?],
            everywhere: [
                zero.full_state_dict_with(everywhere)?,
                zero.full_optimizer_state_with(own.clone(), &kinds, everywhere)?,
            ],
            sharded: [zero.sharded_state_dict()?, zero.sharded_optimizer_state(&own)].map(copied_parts),
            local: [zero.local_state_dict()?, zero.local_optimizer_state(own)?].map(copied),
        })
    };
    Ok(launch::threads(ranks, run)?)
}

fn fresh(_: usize, _: &Zero, _: &mut Optimizer<AdamW>) -> Result<()> {
    Ok(())
}

#[test]
fn a_run_goes_on_from_sharded_and_local_state_with_the_bits_of_the_whole_one() {
    for (stage, shard_dtype) in STAGES.into_iter().flat_map(|s| [(s, None), (s, Some(DType::F32))]) {
        let config = ZeroConfig { shard_dtype, ..config(stage) };
        let whole =
            go_on(4, &config, fresh, 0..4).unwrap().swap_remove(0).full.map(|entries| sorted(&entries));
        let half = go_on(4, &config, fresh, 0..2).unwrap();
        let parts =
            [0, 1].map(|kind| half.iter().flat_map(|of| of.sharded[kind].clone()).collect::<Vec<_>>());
        for ranks in [1, 2] {
            let load = |_: usize, zero: &Zero, optimizer: &mut Optimizer<AdamW>| {
                zero.load_sharded_state_dict(&parts[0])?;
                let state = zero.part_of_sharded_optimizer_state(optimizer.state_dict()?, &parts[1])?;
                Ok(optimizer.load_state_dict(state)?)
            };
            let end = go_on(ranks, &config, load, 2..4).unwrap().swap_remove(0).full;
            assert!(end.map(|entries| sorted(&entries)) == whole, "{config:?}, from parts over {ranks}");
        }
        let load = |rank: usize, zero: &Zero, optimizer: &mut Optimizer<AdamW>| {
            let [values, state] = half[rank].local.clone();
            zero.load_local_state_dict(values)?;
            Ok(optimizer.load_state_dict(zero.part_of_local_optimizer_state(state)?)?)
        };
        let end = go_on(4, &config, load, 2..4).unwrap();
        for forms in &end {
            // On every rank, not rank 0's alone.
            assert!(
                [0, 1].map(|kind| sorted(&forms.everywhere[kind])) == whole,
                "{config:?}, from local state"
            );
        }
        assert!(end[0].full.clone().map(|entries| sorted(&entries)) == whole);
        assert!(end[1..].iter().all(|forms| forms.full.iter().all(Vec::is_empty)));
    }
}

#[test]
fn local_state_of_another_rank_world_or_wrapping_is_refused_and_changes_nothing() {
    for stage in STAGES {
        let two = go_on(2, &config(stage), fresh, 0..1).unwrap();
        let refused = |ranks: usize, config: &ZeroConfig, from: usize, words: &[&str]| {
            let load = |_: usize, zero: &Zero, _: &mut Optimizer<AdamW>| {
                let before = bytes(&zero.full_state_dict()?);
                let [values, state] = two[from].local.clone();
                let messages = [
                    zero.load_local_state_dict(values).unwrap_err().to_string(),
                    zero.part_of_local_optimizer_state(state).map(drop).unwrap_err().to_string(),
                ];
                for message in messages {
                    assert!(words.iter().all(|word| message.contains(word)), "{message}");
                }
                assert!(bytes(&zero.full_state_dict()?) == before);
                Ok(())
            };
            go_on(ranks, config, load, 0..0).unwrap();
        };
        refused(1, &config(stage), 0, &["rank 0 of 2", "rank 0 of 1"]);
        refused(3, &config(stage), 1, &["rank 1 of 2", "of 3"]);
        let whole = ZeroConfig { ownership: Ownership::Whole, ..config(stage) };
        let load = |rank: usize, zero: &Zero, _: &mut Optimizer<AdamW>| {
            let error = zero.load_local_state_dict(two[rank].local[0].clone()).unwrap_err().to_string();
            assert!(error.contains("wrapped or cut in another way"), "{error}");
            let error = zero.load_local_state_dict(two[rank].full[0].clone()).unwrap_err().to_string();
            assert!(error.contains("wanted a local one"), "{error}");
            let mut strange = two[rank].sharded[1].clone();
            strange[0].name = "strange.exp_avg".into();
            let error = zero.part_of_sharded_optimizer_state(Vec::new(), &strange).map(drop).unwrap_err();
            assert!(error.to_string().contains("strange.exp_avg"), "{error}");
            Ok(())
        };
        go_on(2, &whole, load, 0..0).unwrap();
    }
}

/// A GPT with a parameter that is frozen and one that is loaded.
fn odd_gpt(scope: &Scope) -> Decoder {
    let model = GptConfig::new(37, 8, 2, 2, 16).init(scope).unwrap();
    let parameters = model.parameters();
    parameters[3].freeze();
    assert!(parameters[4].is_matrix());
    let zeros = Tensor::zeros(parameters[4].tensor().shape(), DType::F32, Device::CPU).unwrap();
    parameters[4].load(&zeros).unwrap();
    model
}

#[test]
fn deferred_values_are_those_that_rank_0_would_have_made() {
    let wanted = bytes(&phalanx_nn::state_dict(&odd_gpt(&Scope::new(1, DType::BF16, Device::CPU))));
    for stage in STAGES.map(Some).into_iter().chain([None]) {
        let run = |rank: launch::Rank| -> Result<Entries> {
            let scope = Scope::new(1 + rank.rank() as u64, DType::BF16, rank.device()).deferred();
            let (model, comm) = (odd_gpt(&scope), rank.comm().clone());
            let replicas: Box<dyn DataParallel> = match stage {
                Some(stage) => Box::new(Zero::new(&model, comm, ZeroConfig::new(stage))?),
                None => Box::new(Ddp::new(&model, comm, DdpConfig::default())?),
            };
            replicas.full_state_dict(&model)
        };
        let got = launch::threads(3, run).unwrap().swap_remove(0);
        assert!(bytes(&got) == wanted, "{stage:?}");
    }
}

/// Tables that write a row of their values, and a scale whose values a module writes by itself.
struct Written {
    table: Embedding,
    bag: EmbeddingBag,
    scale: Parameter,
}
parameters!(Written { table, bag, scale });

impl Written {
    fn new(scope: &Scope) -> Result<Written> {
        let table = EmbeddingConfig::new(5, 4).with_padding(-2).with_tied_head(true);
        let bag = EmbeddingBagConfig::new(6, 4).with_padding(1);
        let scale = scope.parameter("scale", &[3], Init::ONES)?;
        if scale.is_deferred() {
            let error = kernels::fill_(&mut scale.tensor(), 2.0).unwrap_err().to_string();
            assert!(error.contains("call `materialize` of the parameter before"), "{error}");
        }
        scale.materialize()?;
        kernels::fill_(&mut scale.tensor().narrow(0, 0, 1)?, scope.seed() as f64)?;
        Ok(Written { table: table.init(&scope.child("table"))?, bag: bag.init(&scope.child("bag"))?, scale })
    }
}

#[test]
fn values_that_modules_write_are_in_deferred_models_too() {
    let scope = |rank: usize| Scope::new(2 + rank as u64, DType::F32, Device::CPU);
    let wanted = bytes(&phalanx_nn::state_dict(&Written::new(&scope(0)).unwrap()));
    assert!(wanted[0].1[48..64].iter().all(|&byte| byte == 0));
    for stage in STAGES {
        let run = |rank: launch::Rank| -> Result<Entries> {
            let model = Written::new(&scope(rank.rank()).deferred())?;
            Zero::new(&model, rank.comm().clone(), ZeroConfig::new(stage))?.full_state_dict()
        };
        assert!(bytes(&launch::threads(2, run).unwrap()[0]) == wanted, "{stage:?}");
    }
}

#[test]
fn deferred_values_are_not_computed_with() {
    let model = |dtype| odd_gpt(&Scope::new(1, dtype, Device::CPU).deferred());
    let (plain, halves) = (model(DType::F32), model(DType::BF16).parameters());
    let deferred = plain.parameters().iter().filter(|p| p.is_deferred()).count();
    assert_eq!(deferred, plain.parameters().len() - 1, "one is loaded");
    let tokens = Var::from_slice(&[1i64, 2], &[1, 2], Device::CPU).unwrap();
    let forward = plain.forward(&tokens).err().map(|error| error.to_string());
    let masters = AdamW::default().init(vec![Group::new(halves, 1.0)]).err().map(|error| error.to_string());
    for error in [forward, masters] {
        assert!(error.as_ref().is_some_and(|error| error.contains("call `materialize`")), "{error:?}");
    }
    plain.parameters().iter().try_for_each(Parameter::materialize).unwrap();
    plain.forward(&tokens).unwrap();
}
