//! Tensor parallelism beside data parallelism, ZeRO and recomputation.

use phalanx_nn::autograd::backward_inputs;
use phalanx_nn::models::RecomputeMode;
use phalanx_nn::{AdamW, Clip, Group, OneDevice, Parameters, Rule, cut, norm_of};
use phalanx_parallel::data_parallel::{Alone, DataParallel, Ddp, DdpConfig};
use phalanx_parallel::mesh::{Axis, Groups, Mesh};
use phalanx_parallel::sharded::{Stage, Zero, ZeroConfig};
use phalanx_parallel::tensor_parallel::sum_squares;
use phalanx_parallel::{Result, launch};
use phalanx_tensor::{DType, Device};

use crate::kit::{Cut, ROWS, assert_close, backward, build, gpt, llama, loss, train, train_alone, train_cut};

/// Losses and norms of two steps of two micro-batches on a mesh of two replicas of two ranks.
fn on_mesh(config: &phalanx_nn::models::ModelConfig, sequence: bool, zero: Option<Stage>) -> Vec<Vec<f64>> {
    let mesh = Mesh::new(2, 2, 1).unwrap();
    let run = |rank: launch::Rank| -> Result<Vec<f64>> {
        let groups = Groups::new(mesh, rank.comm())?;
        let (tp, dp) = (groups.along(Axis::Tp), groups.along(Axis::Dp));
        let model = build(config, Cut { ranks: 2, sequence }.layers(tp), DType::F64, rank.device())?;
        let replicas: Box<dyn DataParallel> = match zero {
            None => Box::new(Ddp::new(&model, dp.clone(), DdpConfig::default())?),
            Some(stage) => Box::new(Zero::new(&model, dp.clone(), ZeroConfig::new(stage))?),
        };
        let mut optimizer = AdamW::default().init(Group::decay_matrices(replicas.parameters(), 3e-3, 0.1))?;
        let mut found = Vec::new();
        for step in 0..2 {
            let rows = cut(ROWS, 2).swap_remove(dp.rank());
            let (first, second) = (loss(&model, step, rows.start..rows.start + 1)?, rows.start + 1..rows.end);
            {
                let _accumulate = replicas.no_sync();
                replicas.backward(&first)?;
            }
            let second = loss(&model, step, second)?;
            replicas.backward(&second)?;
            let norm = norm_of(&sum_squares(replicas.grad_squares()?, tp)?)?;
            optimizer.step_scaled(Clip::new(norm, 1.0).scale)?;
            replicas.updated()?;
            replicas.zero_grad()?;
            found.extend([first.item::<f64>()? + second.item::<f64>()?, norm]);
        }
        Ok(found)
    };
    launch::threads(4, run).unwrap()
}

#[test]
fn replicas_of_cut_models_have_one_devices_losses_and_norms_under_ddp_and_zero() {
    for config in [gpt(4, 0.2), llama(4, 1, 0.1)] {
        let model = build(&config, OneDevice, DType::F64, Device::CPU).unwrap();
        let alone = Alone::new(&model);
        let mut optimizer =
            AdamW::default().init(Group::decay_matrices(alone.parameters(), 3e-3, 0.1)).unwrap();
        let mut wanted = Vec::new();
        for step in 0..2 {
            let losses: f64 = (0..ROWS).map(|row| backward(&model, step, row..row + 1).unwrap()).sum();
            let norm = alone.grad_norm().unwrap();
            optimizer.step_scaled(Clip::new(norm, 1.0).scale).unwrap();
            optimizer.zero_grad().unwrap();
            wanted.push((losses, norm));
        }
        for (sequence, zero) in
            [(false, None), (true, None), (true, Some(Stage::Gradients)), (true, Some(Stage::Parameters))]
        {
            let ranks = on_mesh(&config, sequence, zero);
            for (step, (loss, norm)) in wanted.iter().enumerate() {
                let found = |rank: usize, which: usize| ranks[rank][2 * step + which];
                let what = format!("step {step}, {sequence}, {zero:?}");
                assert_close(&what, &[found(0, 0) + found(2, 0)], &[*loss], 1e-12);
                assert!((0..4).all(|rank| found(rank, 1) == found(0, 1)), "{what}: one norm");
                assert_close(&what, &[found(0, 1)], &[*norm], 1e-11);
            }
        }
    }
}

#[test]
fn micro_batches_and_recomputation_change_nothing_but_the_order_of_additions() {
    for cut in Cut::both(2) {
        let run = |micros: usize, mode: RecomputeMode| {
            let rank = |rank: launch::Rank| -> Result<Vec<f64>> {
                let mut model = build(&gpt(4, 0.2), cut.layers(rank.comm()), DType::F64, rank.device())?;
                model.set_recompute(mode);
                train(&model, Some(rank.comm()), 2, micros)
            };
            launch::threads(2, rank).unwrap().swap_remove(0)
        };
        let plain = run(2, RecomputeMode::Never);
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
