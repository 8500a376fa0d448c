//! What cannot be cut is refused with the reason, and an error on one rank ends all.

use phalanx_nn::autograd::Var;
use phalanx_nn::models::{GptConfig, LlamaConfig, ModelConfig};
use phalanx_nn::{Init, Map, Module, Scope};
use phalanx_parallel::tensor_parallel::{ColumnParallelLinear, TensorParallel};
use phalanx_parallel::{Result, launch};
use phalanx_tensor::{DType, Tensor};

use crate::kit::{LENGTH, build, gpt, llama, loss};

#[test]
fn layouts_are_checked_before_anything_is_made() {
    let check = |config: ModelConfig, ranks, positions| {
        TensorParallel::check(&config, ranks, positions).map_err(|e| e.to_string())
    };
    assert_eq!(check(gpt(6, 0.0), 3, Some(LENGTH)), Ok(()));
    assert_eq!(
        check(llama(6, 2, 0.0), 3, Some(LENGTH)),
        Ok(()),
        "key heads that cannot be cut are everywhere"
    );
    let cases = [
        (gpt(6, 0.0), 4, None, "attention heads: got 6 to cut over 4 ranks, wanted a multiple of 4"),
        (gpt(6, 0.0), 3, Some(10), "positions: got 10 to cut over 3 ranks, wanted a multiple of 3"),
        (gpt(6, 0.0), 0, None, "got no ranks"),
        (ModelConfig::Gpt(GptConfig::new(2, 4, 1, 3, 6)), 3, None, "vocabulary: got 2 to cut over 3 ranks"),
        (
            ModelConfig::Llama(LlamaConfig { inner: 2, ..LlamaConfig::new(9, 4, 1, 3, 6) }),
            3,
            None,
            "inner features: got 2 to cut over 3 ranks",
        ),
    ];
    for (config, ranks, positions, wanted) in cases {
        let message = check(config, ranks, positions).unwrap_err();
        assert!(message.contains(wanted), "{message}");
    }
}

/// The error of a run of two ranks.
fn error(f: impl Fn(launch::Rank) -> Result<()> + Sync) -> String {
    launch::threads(2, f).unwrap_err().to_string()
}

#[test]
fn models_and_inputs_that_cannot_be_cut_are_refused() {
    let odd = error(|rank| {
        build(&gpt(3, 0.0), TensorParallel::new(rank.comm()), DType::F32, rank.device()).map(drop)
    });
    assert!(odd.contains("attention heads: got 3 to cut over 2 ranks"), "{odd}");
    let sequence = error(|rank| {
        let layers = TensorParallel::new(rank.comm()).with_sequence_parallel(true);
        let model = build(&gpt(4, 0.0), layers, DType::F32, rank.device())?;
        let tokens = Var::new(Tensor::zeros(&[1, 5], DType::I64, rank.device())?);
        Ok(model.forward(&tokens).map(drop)?)
    });
    assert!(sequence.contains("positions: got 5 to cut over 2 ranks"), "{sequence}");
    let generation = error(|rank| {
        let layers = TensorParallel::new(rank.comm()).with_sequence_parallel(true);
        let model = build(&gpt(4, 0.0), layers, DType::F32, rank.device())?;
        let tokens = Var::new(Tensor::zeros(&[1, 4], DType::I64, rank.device())?);
        let mut caches = model.caches(1, 8)?;
        Ok(model.extend(&tokens, &mut caches).map(drop)?)
    });
    assert!(generation.contains("the stream is cut by positions"), "{generation}");
    let sections = error(|rank| {
        let init = Init::ZEROS;
        let map = Map { inputs: 4, outputs: &[4, 2], bias: false, init, whole: false };
        let at = Scope::new(1, DType::F32, rank.device()).child("odd");
        Ok(ColumnParallelLinear::new(&TensorParallel::new(rank.comm()), &at, map).map(drop)?)
    });
    assert!(sections.contains("odd: got sections of [4, 2] outputs"), "{sections}");
    let flat = error(|rank| {
        let layers = TensorParallel::new(rank.comm()).with_sequence_parallel(true);
        let map = Map { inputs: 4, outputs: &[4], bias: false, init: Init::ZEROS, whole: false };
        let layer = ColumnParallelLinear::new(&layers, &Scope::new(1, DType::F32, rank.device()), map)?;
        Ok(layer.forward(&Var::new(Tensor::zeros(&[3, 4], DType::F32, rank.device())?)).map(drop)?)
    });
    assert!(flat.contains("got [3, 4] between layers, wanted [B, T, ..]"), "{flat}");
}

#[test]
fn an_error_in_one_ranks_backward_pass_ends_all_with_its_cause() {
    let message = error(|rank| {
        let model = build(&gpt(4, 0.0), TensorParallel::new(rank.comm()), DType::F32, rank.device())?;
        let loss = loss(&model, 0, 0..2)?;
        let first = &phalanx_nn::Parameters::parameters(&model)[4];
        let (name, broken) = (first.name().to_string(), rank.rank() == 1);
        let _hook = first.var().on_grad(move |_| match broken {
            true => Err(phalanx_nn::autograd::Error::Custom(format!("{name} is broken"))),
            false => Ok(None),
        });
        Ok(loss.backward()?)
    });
    assert!(message.contains("rank 1 failed") && message.contains("is broken"), "{message}");
}
