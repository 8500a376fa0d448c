//! ZeRO: the bits of one device, the memory and the traffic of the formulas.

mod bits;
mod bugs;
mod choices;
mod convolutions;
#[path = "../gpt/mod.rs"]
mod gpt;
mod kit;
mod odd;
mod root;
mod state;
mod traps;

use gpt::{Trained, bytes, loss, model, optimizer, rows, update};
use phalanx_parallel::sharded::{Stage, Zero, ZeroConfig};
use phalanx_parallel::{Result, launch};
use phalanx_tensor::DType;

const STAGES: [Stage; 3] = [Stage::Optimizer, Stage::Gradients, Stage::Parameters];

fn config(stage: Stage) -> ZeroConfig {
    ZeroConfig { grad_dtype: Some(DType::F32), ..ZeroConfig::new(stage) }
}

fn together(dtype: DType, ranks: usize, micros: usize, steps: u64, config: &ZeroConfig) -> Trained {
    let run = |rank: launch::Rank| -> Result<Trained> {
        let model = model(dtype, rank.device());
        let zero = Zero::new(&model, rank.comm().clone(), config.clone())?;
        let mut optimizer = optimizer(zero.parameters());
        let mut norms = Vec::new();
        for step in 0..steps {
            for (number, rows) in rows(ranks, rank.rank(), micros).into_iter().enumerate() {
                let loss = loss(&model, step, rows)?;
                let _accumulate = (number + 1 < micros).then(|| zero.no_sync());
                zero.backward(&loss)?;
            }
            norms.push(update(&mut optimizer, zero.grad_norm()?)?);
            zero.updated()?;
        }
        let mut state = bytes(&zero.full_optimizer_state(optimizer.state_dict()?, &optimizer.kinds())?);
        state.sort();
        Ok((norms, bytes(&zero.full_state_dict()?), state))
    };
    let mut all = launch::threads(ranks, run).unwrap();
    let first = all.swap_remove(0);
    assert!(all.iter().all(|other| other.0 == first.0), "norms differ");
    first
}

fn same(got: &Trained, wanted: &Trained, what: &str) {
    assert_eq!(got.0, wanted.0, "{what}");
    assert!(got.1 == wanted.1, "{what}: values differ");
    assert!(got.2 == wanted.2, "{what}: optimizer state differs");
}

#[test]
fn every_stage_has_the_bits_of_one_device() {
    for (dtype, micros) in [(DType::F32, 1), (DType::F32, 2), (DType::BF16, 1)] {
        for ranks in [1, 2, 3, 4, 8] {
            let wanted = gpt::alone(dtype, ranks, micros, 3);
            assert!(wanted.0.iter().all(|&norm| norm > gpt::CLIP), "clipping has to act");
            if micros == 1 {
                same(&gpt::alone(dtype, 1, ranks, 3), &wanted, "ranks are what micro-batches are");
            }
            for stage in STAGES {
                let got = together(dtype, ranks, micros, 3, &config(stage));
                same(&got, &wanted, &format!("{stage:?}, {dtype}, {ranks} ranks, {micros} micro-batches"));
            }
        }
    }
}
