//! Regressions, each with the story of its bug.

use std::sync::Arc;

use phalanx_nn::autograd::Var;
use phalanx_nn::{
    BatchNormConfig, Entry, Linear, LinearConfig, Module, Parameters, Scope, Sequential, WrappedUnit,
    parameters,
};
use phalanx_parallel::sharded::{Zero, ZeroConfig, ZeroStage};
use phalanx_parallel::{Result, launch};
use phalanx_tensor::{DType, Device};

use crate::gpt::{self, bytes};
use crate::{STAGES, config};

/// Two maps in a unit, of which one may be left out.
struct Pair {
    a: Linear,
    b: Linear,
}
parameters!(Pair { a, b });

struct Pairs {
    zeroth: WrappedUnit<Pair>,
    first: WrappedUnit<Pair>,
    second: WrappedUnit<Pair>,
}
parameters!(Pairs { zeroth, first, second });

impl Pairs {
    fn new(device: Device) -> Pairs {
        let scope = Scope::new(2, DType::F32, device);
        let linear = |name: &str| LinearConfig::new(9, 9).init(&scope.child(name)).unwrap();
        let pair = |name: &str| {
            WrappedUnit::new(Arc::new(Pair {
                a: linear(&format!("{name}.a")),
                b: linear(&format!("{name}.b")),
            }))
        };
        Pairs { zeroth: pair("zeroth"), first: pair("first"), second: pair("second") }
    }

    /// With or without the second maps of each.
    fn forward(&self, with: [bool; 2]) -> Result<Var> {
        let mut x =
            Var::new(phalanx_kernels::full(&[1, 9], 0.5, DType::F32, self.first.module().a.weight.device())?);
        for (unit, with) in
            [&self.zeroth, &self.first, &self.second].into_iter().zip([true, with[0], with[1]])
        {
            x = unit.call(&x, false, move |pair, x| {
                let x = pair.a.forward(x)?;
                if with { pair.b.forward(&x) } else { Ok(x) }
            })?;
        }
        Ok(x.sum_all()?)
    }
}

fn grads(zero: &Zero) -> Vec<(String, Option<Vec<f32>>)> {
    let grad = |p: &phalanx_nn::Parameter| p.grad().unwrap().map(|g| g.to_vec().unwrap());
    zero.parameters().iter().map(|p| (p.name().to_string(), grad(p))).collect()
}

#[test]
fn ranks_may_leave_out_different_parameters() {
    for stage in STAGES {
        let run = |rank: launch::Rank| -> Result<()> {
            let model = Pairs::new(rank.device());
            let zero = Zero::new(
                &model,
                rank.comm().clone(),
                ZeroConfig { find_unused: true, ..ZeroConfig::new(stage) },
            )?;
            for step in 0..3 {
                let with = [rank.rank() == step, rank.rank() != step];
                zero.backward(&model.forward(with)?)?;
            }
            Ok(())
        };
        launch::threads(2, run).unwrap_or_else(|e| panic!("{stage:?}: {e}"));
    }
}

#[test]
fn what_an_earlier_pass_has_left_is_kept_where_a_later_one_brings_nothing() {
    for stage in STAGES {
        let run = |rank: launch::Rank| -> Result<()> {
            let model = Pairs::new(rank.device());
            let zero = Zero::new(
                &model,
                rank.comm().clone(),
                ZeroConfig { find_unused: true, ..ZeroConfig::new(stage) },
            )?;
            zero.backward(&model.forward([true, true])?)?;
            let of_b = |all: Vec<(String, Option<Vec<f32>>)>| -> Vec<_> {
                all.into_iter().filter(|(name, _)| name.starts_with("second.b")).collect()
            };
            let before = of_b(grads(&zero));
            assert!(before.iter().all(|(_, grad)| grad.is_some()));
            zero.backward(&model.forward([true, false])?)?;
            assert_eq!(of_b(grads(&zero)), before, "{stage:?}");
            Ok(())
        };
        launch::threads(2, run).unwrap();
    }
}

#[test]
fn gathered_values_stay_whatever_runs() {
    for stage in STAGES {
        let run = |rank: launch::Rank| -> Result<()> {
            let model = gpt::model(DType::F32, rank.device());
            let zero = Zero::new(&model, rank.comm().clone(), config(stage))?;
            let whole = || model.parameters().iter().all(|p| p.tensor().why_withheld().is_none());
            let held = zero.gathered()?;
            drop(zero.gathered()?);
            assert!(whole(), "{stage:?}: after a second");
            zero.backward(&gpt::loss(&model, 0, 0..2)?)?;
            assert!(whole(), "{stage:?}: after a pass");
            let mut optimizer = gpt::optimizer(zero.parameters());
            gpt::update(&mut optimizer, zero.grad_norm()?)?;
            zero.updated()?;
            let now = bytes(&phalanx_nn::state_dict(&model));
            drop(held);
            assert!(stage < ZeroStage::Parameters || !whole());
            let state = bytes(&zero.full_state_dict()?);
            assert!(rank.rank() > 0 || state == now, "{stage:?}: after an update");
            Ok(())
        };
        launch::threads(2, run).unwrap();
    }
}

#[test]
fn a_full_state_dict_is_a_copy() {
    for stage in STAGES {
        let run = |rank: launch::Rank| -> Result<()> {
            let norm = BatchNormConfig::new(3).init_1d(&Scope::new(2, DType::F32, rank.device()))?;
            norm.bias.as_ref().unwrap().freeze();
            let model = Sequential::new().with(WrappedUnit::new(Arc::new(norm)));
            let mut other = Vec::new();
            model.visit("", &mut |path, entry| {
                let (shape, dtype) = (entry.tensor().shape().to_vec(), entry.tensor().dtype());
                let kind = matches!(entry, Entry::Buffer(_));
                let values = phalanx_kernels::full(&shape, if kind { 3.0 } else { 5.0 }, dtype, Device::CPU);
                other.push((path.to_string(), values.unwrap()));
            });
            let zero = Zero::new(&model, rank.comm().clone(), ZeroConfig::new(stage))?;
            let state = zero.full_state_dict()?;
            assert!(state.iter().all(|(_, tensor)| tensor.device() == Device::CPU));
            let before = bytes(&state);
            zero.load_full_state_dict(other.clone())?;
            assert!(bytes(&state) == before, "{stage:?}");
            let now = bytes(&zero.full_state_dict()?);
            assert!(rank.rank() > 0 || now == bytes(&other), "{stage:?}");
            Ok(())
        };
        launch::threads(2, run).unwrap();
    }
}

#[test]
fn nothing_is_left_when_it_is_dropped() {
    for stage in STAGES {
        let run = |rank: launch::Rank| -> Result<()> {
            let model = gpt::model(DType::F32, rank.device());
            let zero = Zero::new(&model, rank.comm().clone(), config(stage))?;
            let all = zero.gathered()?;
            let before = bytes(&phalanx_nn::state_dict(&model));
            drop(all);
            let accumulate = zero.no_sync();
            zero.backward(&gpt::loss(&model, 0, 0..2)?)?;
            // The last unit's values stay for a backward pass that never comes.
            drop(gpt::loss(&model, 0, 0..2)?);
            drop((zero, accumulate));
            if stage == ZeroStage::Parameters {
                assert!(model.parameters().iter().all(|p| p.tensor().why_withheld().is_some()));
                let again = Zero::new(&model, rank.comm().clone(), config(stage)).map(drop);
                let error = again.unwrap_err().to_string();
                assert!(error.contains("wte") && error.contains("another `Zero`"), "{error}");
            } else {
                assert!(bytes(&phalanx_nn::state_dict(&model)) == before);
                Zero::new(&model, rank.comm().clone(), config(stage))?;
            }
            assert!(model.parameters().iter().all(|p| p.grad().unwrap().is_none()), "{stage:?}");
            Ok(())
        };
        launch::threads(2, run).unwrap();
    }
}

#[test]
fn unused_parameters_on_meta_devices() {
    for stage in STAGES {
        let model = Pairs::new(Device::Meta(3));
        let zero = Zero::new(
            &model,
            phalanx_parallel::comm::meta(0, 4).unwrap(),
            ZeroConfig { find_unused: true, ..ZeroConfig::new(stage) },
        )
        .unwrap();
        zero.backward(&model.forward([true, false]).unwrap()).unwrap();
        zero.grad_norm().unwrap();
        zero.full_state_dict().unwrap();
    }
}

#[test]
fn after_an_error_every_call_names_it() {
    for stage in STAGES {
        let run = |rank: launch::Rank| -> Result<()> {
            let model = Pairs::new(rank.device());
            let zero = Zero::new(&model, rank.comm().clone(), ZeroConfig::new(stage))?;
            let error = zero.backward(&model.forward([true, false])?).unwrap_err().to_string();
            assert!(error.contains("second.b.weight"), "{error}");
            for _ in 0..2 {
                let again = model.forward([true, true]).and_then(|loss| zero.backward(&loss)).unwrap_err();
                assert!(again.to_string().contains("second.b.weight"), "{stage:?}: {again}");
            }
            Ok(())
        };
        // The error is the run's, whatever the ranks make of it.
        let error = launch::threads(2, run).unwrap_err().to_string();
        assert!(error.contains("second.b.weight") && !error.contains("panicked"), "{error}");
    }
}

#[test]
fn what_is_trained_only_later_is_refused() {
    for stage in STAGES {
        let run = |rank: launch::Rank| -> Result<()> {
            let model = Pairs::new(rank.device());
            model.first.module().a.weight.freeze();
            let zero = Zero::new(&model, rank.comm().clone(), ZeroConfig::new(stage))?;
            zero.backward(&model.forward([true; 2])?)?;
            model.first.module().a.weight.unfreeze();
            zero.backward(&model.forward([true; 2])?)
        };
        let error = launch::threads(2, run).unwrap_err().to_string();
        assert!(error.contains("first.a.weight") && error.contains("frozen"), "{error}");
    }
}

/// The check was in `begin` alone. A pass that reached nothing but the unfrozen parameter, or one that had begun before, added a
/// gradient of this rank alone.
#[test]
fn what_is_trained_only_after_the_pass_has_begun_or_without_zero_is_refused() {
    for (stage, begins) in STAGES.into_iter().flat_map(|stage| [(stage, false), (stage, true)]) {
        let run = |rank: launch::Rank| -> Result<()> {
            let model = Pairs::new(rank.device());
            let later = &model.first.module().a.weight;
            later.freeze();
            let zero = Zero::new(&model, rank.comm().clone(), ZeroConfig::new(stage))?;
            if begins {
                zero.begin()?;
            }
            later.unfreeze();
            let loss = match begins {
                true => model.forward([true; 2])?,
                false => {
                    let x = Var::from_slice(&[2f32], &[], rank.device())?;
                    let product = |pair: &Pair, x: &Var| Ok(x.mul(&pair.a.weight.var())?);
                    model.first.call(&x, false, product)?.sum_all()?
                }
            };
            let error = loss.backward().unwrap_err().to_string();
            assert!(error.contains("first.a.weight") && error.contains("trained now"), "{stage:?}: {error}");
            Ok(())
        };
        launch::threads(2, run).unwrap();
    }
}

#[test]
fn what_passes_without_synchronisation_have_left_can_be_forgotten() {
    for stage in STAGES {
        let run = |rank: launch::Rank| -> Result<()> {
            let model = Pairs::new(rank.device());
            let zero = Zero::new(&model, rank.comm().clone(), ZeroConfig::new(stage))?;
            zero.backward(&model.forward([true; 2])?)?;
            let wanted = grads(&zero);
            let accumulate = zero.no_sync();
            zero.backward(&model.forward([true; 2])?)?;
            drop(accumulate);
            zero.zero_grad()?;
            assert!(grads(&zero).iter().all(|(_, grad)| grad.is_none()));
            zero.backward(&model.forward([true; 2])?)?;
            assert_eq!(grads(&zero), wanted, "{stage:?}");
            Ok(())
        };
        launch::threads(2, run).unwrap();
    }
}

#[test]
fn values_written_while_all_are_gathered_are_kept_and_the_rest_stays_as_precise_as_the_shards() {
    let wide = |stage| ZeroConfig { shard_dtype: Some(DType::F32), ..config(stage) };
    let offload = |stage| ZeroConfig { offload: Some(Device::Cpu(700)), ..wide(stage) };
    let plain = STAGES.map(config);
    for config in plain.into_iter().chain(STAGES.map(wide)).chain(STAGES.map(offload)) {
        let run = |rank: launch::Rank| -> Result<()> {
            let model = gpt::model(DType::BF16, rank.device());
            let zero = Zero::new(&model, rank.comm().clone(), config.clone())?;
            let mut optimizer = gpt::optimizer(zero.parameters());
            let mut step = |number| -> Result<()> {
                zero.backward(&gpt::loss(&model, number, 0..2)?)?;
                gpt::update(&mut optimizer, zero.grad_norm()?)?;
                zero.updated()
            };
            step(0)?;
            let write = |place: usize, value: f64| {
                phalanx_kernels::fill_(&mut model.parameters()[place].tensor(), value)
            };
            for (early, new) in [(true, [3.0, -2.0]), (false, [-5.0, 6.0])] {
                let mut wanted = bytes(&zero.full_state_dict()?);
                let all = zero.gathered()?;
                write(1, new[0])?;
                write(4, new[1])?;
                let mut all = Some(all).filter(|_| early);
                if config.stage < ZeroStage::Parameters {
                    let error = zero.begin().unwrap_err().to_string();
                    assert!(error.contains("`updated` was not called"), "{error}");
                }
                zero.updated()?;
                all.take();
                let got = bytes(&zero.full_state_dict()?);
                let value = |value: f64| (value as f32).to_le_bytes();
                let value = |number: f64| match config.shard_dtype {
                    Some(_) => value(number).to_vec(),
                    None => value(number)[2..].to_vec(),
                };
                for (place, number) in [(1, new[0]), (4, new[1])].into_iter().filter(|_| rank.rank() == 0) {
                    let bytes = &mut wanted[place].1;
                    *bytes = value(number).repeat(bytes.len() / value(number).len());
                }
                assert!(got == wanted, "{config:?}, updated before the end: {early}");
                step(1)?;
            }
            Ok(())
        };
        launch::threads(3, run).unwrap();
    }
    // Of values and shards that were both changed neither is forgotten in silence.
    let run = |rank: launch::Rank| -> Result<()> {
        let model = gpt::model(DType::F32, rank.device());
        let zero = Zero::new(&model, rank.comm().clone(), config(ZeroStage::Parameters))?;
        let all = zero.gathered()?;
        zero.backward(&gpt::loss(&model, 0, 0..2)?)?;
        phalanx_kernels::fill_(&mut model.parameters()[0].tensor(), 1.0)?;
        gpt::update(&mut gpt::optimizer(zero.parameters()), zero.grad_norm()?)?;
        drop(all);
        let error = zero.begin().unwrap_err().to_string();
        assert!(error.contains("written under `gathered` were not kept"), "{error}");
        let state = phalanx_nn::state_dict(&gpt::model(DType::F32, rank.device()));
        zero.load_full_state_dict(state)?;
        zero.begin()
    };
    launch::threads(2, run).unwrap();
}

#[test]
fn values_written_to_the_model_alone_are_not_lost_in_silence() {
    for stage in [ZeroStage::Optimizer, ZeroStage::Gradients] {
        let run = |rank: launch::Rank| -> Result<()> {
            let model = gpt::model(DType::BF16, rank.device());
            let config = ZeroConfig { shard_dtype: Some(DType::F32), ..config(stage) };
            let zero = Zero::new(&model, rank.comm().clone(), config)?;
            for step in 0..2 {
                zero.backward(&gpt::loss(&model, step, 0..2)?)?;
                gpt::update(&mut gpt::optimizer(zero.parameters()), zero.grad_norm()?)?;
                zero.updated()?;
            }
            let other = gpt::model(DType::BF16, rank.device());
            phalanx_nn::load_state_dict(&model, phalanx_nn::state_dict(&other))?;
            zero.backward(&gpt::loss(&model, 0, 0..2)?)
        };
        let error = launch::threads(2, run).unwrap_err().to_string();
        assert!(error.contains("load_full_state_dict"), "{error}");
    }
}
