//! What may be chosen without a change of bits, and what changes them to a known degree.

use phalanx_parallel::data_parallel::Average;
use phalanx_parallel::launch;
use phalanx_parallel::sharded::{Ownership, Reshard, Stage, ZeroConfig};
use phalanx_tensor::{DType, Device};

use crate::gpt::alone;
use crate::{STAGES, config, same, together};

#[test]
fn choices_change_no_bit() {
    let wanted = alone(DType::F32, 3, 2, 3);
    for stage in STAGES {
        for (ownership, reshard, prefetch, offload) in [
            (Ownership::Whole, Reshard::ExceptLast, true, None),
            (Ownership::Even, Reshard::Always, false, None),
            (Ownership::Even, Reshard::Never, true, None),
            (Ownership::Whole, Reshard::Always, true, Some(Device::Cpu(9))),
        ] {
            let config = ZeroConfig { ownership, reshard, prefetch, offload, ..config(stage) };
            same(&together(DType::F32, 3, 2, 3, &config), &wanted, &format!("{config:?}"));
        }
    }
}

#[test]
fn f32_shares_of_a_bf16_model_are_its_master_weights() {
    let wanted = alone(DType::BF16, 3, 1, 3);
    for stage in STAGES {
        let config = ZeroConfig { shard_dtype: Some(DType::F32), ..config(stage) };
        let got = together(DType::BF16, 3, 1, 3, &config);
        assert_eq!(got.0, wanted.0, "{stage:?}");
        assert!(got.2 == wanted.2, "{stage:?}: optimizer state differs");
        let shares: Vec<_> =
            got.1.into_iter().map(|(name, values)| (format!("{name}.master"), values)).collect();
        let masters = wanted.2.iter().filter(|(name, _)| name.ends_with(".master"));
        assert!(masters.clone().count() == shares.len() && masters.clone().all(|m| shares.contains(m)));
    }
}

#[test]
fn groups_that_share_a_copy_come_near_and_agree() {
    let wanted = alone(DType::F64, 4, 1, 3);
    for stage in STAGES {
        let config = ZeroConfig { shard_ranks: Some(2), grad_dtype: None, ..config(stage) };
        let got = together(DType::F64, 4, 1, 3, &config);
        for (got, wanted) in got.0.iter().zip(&wanted.0) {
            assert!((got / wanted - 1.0).abs() < 1e-6, "{stage:?}: {got} {wanted}");
        }
        // Ranks alone in their group have all: additions over groups, in order of the ranks.
        let config = ZeroConfig { shard_ranks: Some(1), ..config };
        same(&together(DType::F64, 4, 1, 3, &config), &alone_in(DType::F64), &format!("{stage:?}"));
    }
}

fn alone_in(dtype: DType) -> crate::gpt::Trained {
    together(dtype, 4, 1, 3, &ZeroConfig { grad_dtype: None, ..config(Stage::Optimizer) })
}

#[test]
fn a_mean_is_the_sum_over_the_ranks() {
    let config = ZeroConfig { average: Average::Mean, ..config(Stage::Gradients) };
    let (mean, sum) = (together(DType::F32, 4, 1, 1, &config), alone(DType::F32, 4, 1, 1));
    assert_eq!(mean.0[0] * 4.0, sum.0[0]);
}

#[test]
fn settings_that_do_not_fit_are_refused() {
    let try_it = |config: ZeroConfig| {
        let run = |rank: launch::Rank| {
            let model = crate::gpt::model(DType::F32, rank.device());
            phalanx_parallel::sharded::Zero::new(&model, rank.comm().clone(), config.clone()).map(drop)
        };
        launch::threads(3, run).unwrap_err().to_string()
    };
    let shards = try_it(ZeroConfig { shard_ranks: Some(2), ..config(Stage::Parameters) });
    assert!(shards.contains("shard_ranks 2") && shards.contains("3 ranks"), "{shards}");
    let dtype = try_it(ZeroConfig { shard_dtype: Some(DType::I64), ..config(Stage::Parameters) });
    assert!(dtype.contains("shard_dtype i64"), "{dtype}");
    let narrow = try_it(ZeroConfig { shard_dtype: Some(DType::BF16), ..config(Stage::Parameters) });
    assert!(narrow.contains("wte.weight") && narrow.contains("shard_dtype bf16"), "{narrow}");
    let grads = try_it(ZeroConfig { grad_dtype: Some(DType::Bool), ..config(Stage::Parameters) });
    assert!(grads.contains("grad_dtype bool"), "{grads}");
}
