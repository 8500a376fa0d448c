//! ZeRO: the bytes of the formulas, from the ledger. SingleDevice in this file, whose ledgers no other test may touch.

mod gpt;

use phalanx_nn::autograd::ContextMode;
use std::sync::{Arc, Mutex};

use phalanx_nn::autograd::{Var, checkpoint};
use phalanx_nn::models::{GptConfig, LlamaConfig, ModelConfig, RecomputeMode};
use phalanx_nn::{AdamW, Group, LinearConfig, Module, Parameters, Rule, Scope, Sequential, WrappedUnit};
use phalanx_parallel::comm::{self, Comm};
use phalanx_parallel::sharded::{Reshard, Zero, ZeroConfig, ZeroStage};
use phalanx_parallel::{Result, launch};
use phalanx_tensor::{Category, Context, DType, Device, Tensor};

const STAGES: [ZeroStage; 3] = [ZeroStage::Optimizer, ZeroStage::Gradients, ZeroStage::Parameters];
/// The ledgers are the process's.
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

/// Maps without bias, each a unit.
fn maps(count: usize, width: usize, dtype: DType, device: Device) -> Sequential {
    (0..count).fold(Sequential::new(), |model, i| {
        let scope = Scope::new(1, dtype, device).child(i.to_string());
        let linear = LinearConfig::new(width, width).with_bias(false).init(&scope).unwrap();
        model.with(WrappedUnit::new(Arc::new(linear)))
    })
}

/// Bytes of parameters, gradients and optimizer state.
fn state_of(device: Device) -> Result<[usize; 3]> {
    let ledger = device.ledger()?;
    let of = |category| ledger.category(category).now;
    Ok([Category::Parameters, Category::Gradients, Category::OptimizerState].map(of))
}

/// The state of a step after its backward pass, on the model's device and where it is offloaded to; the bytes that are sent in a step.
fn books(
    comm: &Comm,
    device: Device,
    dtypes: [DType; 2],
    config: &ZeroConfig,
) -> Result<([[usize; 3]; 2], u64, Vec<usize>)> {
    let model = maps(4, 128, dtypes[0], device);
    let zero = Zero::new(&model, comm.clone(), ZeroConfig { grad_dtype: Some(dtypes[1]), ..config.clone() })?;
    let mut optimizer = AdamW::default().init(vec![Group::new(zero.parameters(), 1e-3)])?;
    let x = Var::new(Tensor::zeros(&[2, 128], dtypes[0], device)?);
    let mut sent = 0;
    for last in [false, true] {
        let before = zero.traffic();
        zero.backward(&model.forward(&x)?.sum_all()?)?;
        if last {
            break;
        }
        optimizer.step()?;
        optimizer.zero_grad()?;
        zero.updated()?;
        sent = zero.traffic().bytes - before.bytes;
    }
    let host = config.offload.map_or(Ok([0; 3]), state_of)?;
    Ok(([state_of(device)?, host], sent, zero.shard_sizes()))
}

#[test]
fn memory_and_traffic_are_those_of_the_formulas() {
    let _alone = ONE_AT_A_TIME.lock().unwrap();
    const PARAMETERS: usize = 4 * 128 * 128;
    for grads in [DType::BF16, DType::F32] {
        for (ranks, stage) in [1, 2, 3, 4, 8].into_iter().flat_map(|ranks| STAGES.map(|stage| (ranks, stage)))
        {
            let config = ZeroConfig { reshard: Reshard::Always, ..ZeroConfig::new(stage) };
            let (g, dtypes) = (grads.size(), [DType::BF16, grads]);
            let all =
                launch::threads(ranks, |rank| books(rank.comm(), rank.device(), dtypes, &config)).unwrap();
            for (rank, (bytes, sent, shares)) in all.into_iter().enumerate() {
                let own = shares[rank];
                assert!((own * ranks).abs_diff(PARAMETERS) <= 4 * 64 * ranks, "{shares:?}");
                assert!(!ranks.is_power_of_two() || own * ranks == PARAMETERS, "{shares:?}");
                let wanted = match stage {
                    ZeroStage::Optimizer => [2 * PARAMETERS, g * PARAMETERS, 12 * own],
                    ZeroStage::Gradients => [2 * PARAMETERS, g * own, 12 * own],
                    ZeroStage::Parameters => [2 * own, g * own, 12 * own],
                };
                assert_eq!(bytes[0], wanted, "{stage:?}, rank {rank} of {ranks}");
                // A gradient is sent but for the own share, and values are sent to all others.
                let passes = if stage == ZeroStage::Parameters { 2 } else { 1 };
                let wanted = g * (PARAMETERS - own) + passes * 2 * own * (ranks - 1);
                assert_eq!(sent, wanted as u64, "{stage:?}, rank {rank} of {ranks}");
                let meta = comm::meta(rank, ranks).unwrap();
                let alone = books(&meta, Device::Meta(rank as u16), dtypes, &config).unwrap();
                assert_eq!(alone, (bytes, sent, shares), "without peers");
            }
        }
    }
}

#[test]
fn offloaded_state_is_the_hosts_and_on_meta_devices_too() {
    let _alone = ONE_AT_A_TIME.lock().unwrap();
    const PARAMETERS: usize = 4 * 128 * 128;
    let dtypes = [DType::BF16, DType::F32];
    for (stage, offload_parameters) in
        STAGES.into_iter().flat_map(|stage| [false, true].map(|parameters| (stage, parameters)))
    {
        let config = |host| ZeroConfig {
            reshard: Reshard::Always,
            offload: Some(host),
            offload_parameters,
            ..ZeroConfig::new(stage)
        };
        let rank = |rank: launch::Rank| {
            books(rank.comm(), rank.device(), dtypes, &config(Device::Cpu(600 + rank.rank() as u16)))
        };
        for (rank, (bytes, sent, shares)) in launch::threads(2, rank).unwrap().into_iter().enumerate() {
            let own = shares[rank];
            let on_device = match (stage, offload_parameters) {
                (ZeroStage::Parameters, true) => 0,
                (ZeroStage::Parameters, false) => 2 * own,
                _ => 2 * PARAMETERS,
            };
            let case = format!("{stage:?}, parameters {offload_parameters}, rank {rank}");
            assert_eq!(bytes, [[on_device, 0, 0], [2 * own, 4 * own, 12 * own]], "{case}");
            let meta = comm::meta(rank, 2).unwrap();
            let alone =
                books(&meta, Device::Meta(rank as u16), dtypes, &config(Device::Meta(600 + rank as u16)));
            assert_eq!(alone.unwrap(), (bytes, sent, shares), "{case}, on meta devices");
        }
    }
}

/// Bytes of parameters: at first, after a forward pass, after its backward pass, after the step, at the peak of all of it.
fn root_books(comm: &Comm, device: Device, units: usize) -> Result<([usize; 5], usize)> {
    let mut model = Sequential::new();
    for i in 0..4 {
        let scope = Scope::new(1, DType::BF16, device).child(i.to_string());
        let linear = LinearConfig::new(128, 128).with_bias(false).init(&scope)?;
        model = if i < units { model.with(WrappedUnit::new(Arc::new(linear))) } else { model.with(linear) };
    }
    let ledger = device.ledger()?;
    let config = ZeroConfig { reshard: Reshard::Always, ..ZeroConfig::new(ZeroStage::Parameters) };
    let zero = Zero::new(&model, comm.clone(), config)?;
    ledger.reset_peak();
    let now = || ledger.category(Category::Parameters).now;
    let mut optimizer = AdamW::default().init(vec![Group::new(zero.parameters(), 1e-3)])?;
    let x = Var::new(Tensor::zeros(&[2, 128], DType::BF16, device)?);
    let first = now();
    let loss = model.forward(&x)?.sum_all()?;
    let forward = now();
    zero.backward(&loss)?;
    let backward = now();
    optimizer.step()?;
    zero.updated()?;
    let peak = ledger.category(Category::Parameters).peak;
    Ok(([first, forward, backward, now(), peak], zero.shard_sizes()[comm.rank()]))
}

#[test]
fn what_is_no_unit_is_spread_too_and_whole_only_from_forward_to_the_end_of_backward() {
    let _alone = ONE_AT_A_TIME.lock().unwrap();
    const MAP: usize = 2 * 128 * 128;
    for (ranks, units) in [1, 2, 4, 8].into_iter().flat_map(|ranks| [0, 2, 4].map(|units| (ranks, units))) {
        let all = launch::threads(ranks, |rank| root_books(rank.comm(), rank.device(), units)).unwrap();
        for (rank, (bytes, own)) in all.into_iter().enumerate() {
            assert_eq!(own * ranks, 4 * 128 * 128);
            let (rest, root) = (2 * own, (4 - units) * MAP);
            // Of the units, two are gathered at a time.
            let wanted = [rest, rest + root, rest, rest, rest + root + units.min(2) * MAP];
            assert_eq!(bytes, wanted, "{units} units, rank {rank} of {ranks}");
            let alone = root_books(&comm::meta(rank, ranks).unwrap(), Device::Meta(rank as u16), units);
            assert_eq!(alone.unwrap(), (bytes, own), "without peers");
        }
    }
}

/// Bytes of every category now and at peak, after two steps of a GPT and a third's backward.
fn gpt_books(comm: &Comm, device: Device, stage: ZeroStage, recompute: bool) -> Result<Vec<[usize; 2]>> {
    let mut model = gpt::model(DType::BF16, device);
    if recompute {
        model.set_recompute(phalanx_nn::models::RecomputeMode::Always);
    }
    let config = ZeroConfig { grad_dtype: Some(DType::F32), ..ZeroConfig::new(stage) };
    let zero = Zero::new(&model, comm.clone(), config)?;
    let mut optimizer = gpt::optimizer(zero.parameters());
    for step in 0..3 {
        for (number, rows) in gpt::rows(comm.size(), comm.rank(), 2).into_iter().enumerate() {
            let loss = gpt::loss(&model, step, rows)?;
            let _accumulate = (number == 0).then(|| zero.no_sync());
            zero.backward(&loss)?;
        }
        if step < 2 {
            gpt::update(&mut optimizer, zero.grad_norm()?)?;
            zero.updated()?;
        }
    }
    let ledger = device.ledger()?;
    let usage = Category::ALL.map(|category| ledger.category(category));
    let books = usage.iter().chain([&ledger.total()]).map(|usage| [usage.now, usage.peak]).collect();
    Ok(books)
}

#[test]
fn a_rank_without_peers_on_meta_has_the_books_of_one_among_all() {
    let _alone = ONE_AT_A_TIME.lock().unwrap();
    for (ranks, stage, recompute) in [1, 2, 3, 4, 8]
        .into_iter()
        .flat_map(|ranks| STAGES.map(|stage| (ranks, stage)))
        .flat_map(|(ranks, stage)| [false, true].map(|recompute| (ranks, stage, recompute)))
    {
        let fresh = |device: Device| device.ledger().unwrap().reset_peak();
        (0..ranks).for_each(|rank| fresh(Device::Cpu(rank as u16)));
        let all =
            launch::threads(ranks, |rank| gpt_books(rank.comm(), rank.device(), stage, recompute)).unwrap();
        for (rank, wanted) in all.into_iter().enumerate() {
            let device = Device::Meta(rank as u16);
            fresh(device);
            let got = gpt_books(&comm::meta(rank, ranks).unwrap(), device, stage, recompute).unwrap();
            assert_eq!(got, wanted, "{stage:?}, rank {rank} of {ranks}, recompute {recompute}");
        }
    }
}

/// The state of one of `ranks` ranks between the backward pass and the step, of a GPT trained in bf16.
fn state_bytes(config: &GptConfig, ranks: usize, stage: ZeroStage) -> (usize, usize) {
    let device = Device::Meta(40);
    let model = config.init(&Scope::new(1, DType::BF16, device)).unwrap();
    let parameters = model.parameters().iter().map(|p| p.tensor().numel()).sum();
    let zero = Zero::new(&model, comm::meta(0, ranks).unwrap(), ZeroConfig::new(stage)).unwrap();
    let mut optimizer = gpt::optimizer(zero.parameters());
    let tokens = Var::new(Tensor::empty(&[1, config.context], DType::I64, device).unwrap());
    let mut state = 0;
    for _ in 0..2 {
        optimizer.zero_grad().unwrap();
        let loss = model.loss(&model.forward(&tokens).unwrap(), &tokens, 1.0).unwrap();
        zero.backward(&loss).unwrap();
        drop(loss);
        let ledger = device.ledger().unwrap();
        let of = [Category::Parameters, Category::Gradients, Category::OptimizerState];
        state = of.map(|category| ledger.category(category).now).iter().sum();
        optimizer.step().unwrap();
        zero.updated().unwrap();
    }
    (parameters, state)
}

/// Source: Rajbhandari et al. (2020), table 1.
#[test]
fn models_of_billions_and_a_trillion_have_the_published_bytes() {
    let _alone = ONE_AT_A_TIME.lock().unwrap();
    let billions = GptConfig::new(60_088, 1024, 36, 32, 4096);
    let trillion = GptConfig::new(46_900, 1024, 127, 128, 25_600);
    for (config, ranks, wanted, gigabytes) in
        [(billions, 64, 7.5e9, [31.4, 16.6, 1.88]), (trillion, 1024, 1e12, [4011.0, 2013.0, 15.6])]
    {
        for ((stage, gigabytes), units) in STAGES.into_iter().zip(gigabytes).zip([[4, 12], [2, 14], [0, 16]])
        {
            let (parameters, state) = state_bytes(&config, ranks, stage);
            assert!((parameters as f64 / wanted - 1.0).abs() < 1e-4, "{parameters}");
            let formula = units[0] as f64 * parameters as f64 + (units[1] * parameters) as f64 / ranks as f64;
            // Where a buffer is cut, a share is up to 32 elements longer or shorter at each end.
            let rounding = (64 * units[1] * (config.layers + 3)) as f64;
            assert!((state as f64 - formula).abs() <= rounding, "{stage:?} over {ranks}: {state}, {formula}");
            let got = state as f64 / 1e9;
            assert!((got / gigabytes - 1.0).abs() < 4e-3, "{stage:?} over {ranks}: {got} GB, {gigabytes}");
        }
    }
}

/// The peaks of parameters and gradients in the second of two steps, in bytes, over what is there between steps.
fn peaks(model: &dyn Parameters, loss: &dyn Fn() -> Var, config: &ZeroConfig) -> [usize; 2] {
    let device = model.parameters()[0].device();
    let ledger = device.ledger().unwrap();
    let zero = Zero::new(model, comm::meta(0, 64).unwrap(), config.clone()).unwrap();
    let mut optimizer = AdamW::default().init(vec![Group::new(zero.parameters(), 1e-3)]).unwrap();
    let mut peaks = [0; 2];
    for _ in 0..2 {
        ledger.reset_peak();
        let categories = [Category::Parameters, Category::Gradients].map(|c| ledger.category(c));
        let rest = categories.map(|usage| usage.now);
        zero.backward(&loss()).unwrap();
        let categories = [Category::Parameters, Category::Gradients].map(|c| ledger.category(c));
        peaks = [0, 1].map(|i| categories[i].peak - rest[i]);
        optimizer.step().unwrap();
        optimizer.zero_grad().unwrap();
        zero.updated().unwrap();
    }
    peaks
}

#[test]
fn two_units_are_gathered_at_a_time_and_the_gradients_of_two_are_here() {
    let _alone = ONE_AT_A_TIME.lock().unwrap();
    const UNIT: usize = 512 * 512 * 2;
    for (prefetch, reshard, shard_dtype, units) in [
        (true, Reshard::Always, None, 2),
        (true, Reshard::ExceptLast, Some(DType::F32), 2),
        (false, Reshard::Always, Some(DType::F32), 1),
        (false, Reshard::ExceptLast, None, 1),
        (true, Reshard::Never, None, 8),
    ] {
        for stage in [ZeroStage::Gradients, ZeroStage::Parameters] {
            let model = maps(8, 512, DType::BF16, Device::Meta(41));
            let x = || Var::new(Tensor::zeros(&[1, 512], DType::BF16, Device::Meta(41)).unwrap());
            let loss = || model.forward(&x()).unwrap().sum_all().unwrap();
            let prefetch = prefetch.into();
            let config = ZeroConfig { prefetch, reshard, shard_dtype, ..ZeroConfig::new(stage) };
            let [values, gradients] = peaks(&model, &loss, &config);
            assert_eq!(values, if stage == ZeroStage::Parameters { units * UNIT } else { 0 }, "{config:?}");
            // One that is computed, one under way, and the shares.
            assert!((2 * UNIT..2 * UNIT + UNIT / 4).contains(&gradients), "{config:?}: {gradients}");
        }
    }
}

#[test]
fn no_view_keeps_the_values_of_a_decoder_that_were_given_up() {
    let _alone = ONE_AT_A_TIME.lock().unwrap();
    let gpt =
        ModelConfig::Gpt(GptConfig { tied: false, ..GptConfig::new(100, 16, 6, 2, 64).with_dropout(0.1) });
    let llama = ModelConfig::Llama(LlamaConfig { tied: false, ..LlamaConfig::new(100, 16, 6, 2, 64) });
    for config in [gpt, llama] {
        for recompute in [RecomputeMode::Never, RecomputeMode::Always] {
            let mut model = config.init(&Scope::new(1, DType::BF16, Device::Meta(42))).unwrap();
            model.set_recompute(recompute);
            let mut units = Vec::new();
            model.visit_units(&mut |unit| {
                units.push(unit.parameters().iter().map(|p| 2 * p.tensor().numel()).sum::<usize>());
            });
            let wanted = units.windows(2).map(|pair| pair[0] + pair[1]).max().unwrap();
            let loss = || {
                let _train = Context::with(|c| c.set_train(true));
                let tokens = Var::new(Tensor::empty(&[2, 16], DType::I64, Device::Meta(42)).unwrap());
                model.loss(&model.forward(&tokens).unwrap(), &tokens, 1.0).unwrap()
            };
            let [values, _] = peaks(&model, &loss, &ZeroConfig::new(ZeroStage::Parameters));
            assert_eq!(values, wanted, "{recompute:?}, {config:?}");
        }
    }
}

#[test]
fn frozen_values_are_given_up_between_the_passes_too() {
    let _alone = ONE_AT_A_TIME.lock().unwrap();
    const UNIT: usize = 512 * 512 * 2;
    let model = maps(8, 512, DType::BF16, Device::Meta(43));
    // The first one alone is trained, so that a gradient passes through all others.
    model.parameters()[1..].iter().for_each(phalanx_nn::Parameter::freeze);
    let x = || Var::new(Tensor::zeros(&[1, 512], DType::BF16, Device::Meta(43)).unwrap());
    let loss = || model.forward(&x()).unwrap().sum_all().unwrap();
    let [values, _] = peaks(&model, &loss, &ZeroConfig::new(ZeroStage::Parameters));
    assert_eq!(values, 2 * UNIT);
}

#[test]
fn a_wrong_guess_of_what_comes_next_is_given_up() {
    let _alone = ONE_AT_A_TIME.lock().unwrap();
    const UNIT: usize = 512 * 512 * 2;
    let x = || Var::new(Tensor::zeros(&[1, 512], DType::BF16, Device::Meta(44)).unwrap());
    let units = |device| -> Vec<Arc<Sequential>> {
        let unit = |i: usize| {
            let scope = Scope::new(1, DType::BF16, device).child(i.to_string());
            WrappedUnit::new(Arc::new(LinearConfig::new(512, 512).with_bias(false).init(&scope).unwrap()))
        };
        (0..8).map(|i| Arc::new(Sequential::new().with(unit(i)))).collect()
    };
    let config = ZeroConfig { reshard: Reshard::Always, ..ZeroConfig::new(ZeroStage::Parameters) };
    // From the last to the first.
    let model = units(Device::Meta(44));
    let backwards = || {
        let y = model.iter().rev().try_fold(x(), |x, unit| unit.forward(&x));
        y.unwrap().sum_all().unwrap()
    };
    assert_eq!(peaks(&model, &backwards, &config)[0], 2 * UNIT);
    // Two at a time under a checkpoint.
    let model = units(Device::Meta(44));
    let pairs = || {
        let y = model.chunks(2).try_fold(x(), |x, pair| {
            let pair = pair.to_vec();
            checkpoint(move |x| Ok(pair.iter().try_fold(x[0].clone(), |x, unit| unit.forward(&x))?), &[&x])
        });
        y.unwrap().sum_all().unwrap()
    };
    assert_eq!(peaks(&model, &pairs, &config)[0], 2 * UNIT);
}
