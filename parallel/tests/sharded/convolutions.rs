//! Networks with running statistics, under every wrapper of data parallelism.

use std::sync::Arc;

use phalanx_nn::autograd::Var;
use phalanx_nn::{AdamW, BatchNormConfig, Clip, Conv2dConfig, Group, Module, Rule, Scope, Sequential, Unit};
use phalanx_parallel::data_parallel::{DataParallel, Ddp, DdpConfig};
use phalanx_parallel::sharded::{Zero, ZeroConfig};
use phalanx_parallel::{Result, launch};
use phalanx_tensor::{Context, DType};

use crate::STAGES;
use crate::gpt::{Trained, bytes};

/// A wrapper for a rank's model.
type Wrap<'a> = &'a (dyn Fn(&launch::Rank, &Sequential) -> Result<Box<dyn DataParallel>> + Sync);

/// Convolutions with running statistics, trained by ranks that share the batch, whatever they keep.
fn train(rank: &launch::Rank, wrap: Wrap<'_>) -> Result<Trained> {
    let scope = Scope::new(9, DType::F32, rank.device());
    let layer = |i: usize, inputs: usize| {
        let scope = scope.child(i);
        let conv = Conv2dConfig::new(inputs, 5, [3, 3]).init(&scope.child("conv")).unwrap();
        let norm = BatchNormConfig::new(5).init_2d(&scope.child("norm")).unwrap();
        Sequential::new().with(conv).with(norm)
    };
    let model =
        Sequential::new().with(Unit::new(Arc::new(layer(0, 2)))).with(Unit::new(Arc::new(layer(1, 5))));
    let share = wrap(rank, &model)?;
    let _train = Context::with(|c| c.train = true);
    let mut optimizer = AdamW::default().init(vec![Group::new(share.parameters(), 1e-2)])?;
    let mut norms = Vec::new();
    for step in 0..3 {
        for micro in 0..2 {
            let values: Vec<f32> = (0..2 * 2 * 7 * 7)
                .map(|i| ((i * 37 + rank.rank() * 11 + step * 5 + micro) % 19) as f32 / 9.0)
                .collect();
            let x = Var::from_slice(&values, &[2, 2, 7, 7], rank.device())?;
            let _accumulate = (micro == 0).then(|| share.no_sync());
            share.backward(&model.forward(&x)?.square()?.sum_all()?)?;
        }
        let norm = share.grad_norm()?;
        optimizer.step_scaled(Clip::new(norm, 1.0).scale)?;
        share.zero_grad()?;
        share.updated()?;
        norms.push(norm);
    }
    let mut state = bytes(&share.full_optimizer_state(optimizer.state_dict()?, &optimizer.kinds())?);
    state.sort();
    let values = bytes(&share.full_state_dict(&model)?);
    // An evaluation of everything, outside of the units.
    let all = share.gathered()?;
    let here = bytes(&phalanx_nn::state_dict(&model));
    assert!(rank.rank() > 0 || here == values);
    drop(all);
    Ok((norms, here, state))
}

#[test]
fn convolutions_with_running_statistics_under_every_wrapper() {
    let all = |wrap: Wrap<'_>| launch::threads(3, |rank| train(&rank, wrap)).unwrap();
    let ddp = all(&|rank, model| Ok(Box::new(Ddp::new(model, rank.comm().clone(), DdpConfig::default())?)));
    for stage in STAGES {
        let zero =
            all(&|rank, model| Ok(Box::new(Zero::new(model, rank.comm().clone(), ZeroConfig::new(stage))?)));
        for (got, wanted) in zero.iter().zip(&ddp) {
            assert!((&got.0, &got.1) == (&wanted.0, &wanted.1), "{stage:?}");
        }
        assert!(zero[0].2 == ddp[0].2, "{stage:?}");
    }
}
