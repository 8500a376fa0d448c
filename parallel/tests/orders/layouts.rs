//! Training steps of models on eight GPUs, under layouts that use all kinds of parallelism at once.

use phalanx_nn::models::{Family, RecomputeMode};
use phalanx_parallel::hybrid::Layout;
use phalanx_parallel::launch::Rank;
use phalanx_tensor::DType;

use crate::case::{Case, balanced, gpt, llama, mixture};
use crate::run::{Run, Update};

/// A layout of a number.
pub fn case(number: u64) -> Case {
    let layout = |dp, tp, pp, schedule: &str, micro_batches| Layout {
        dp,
        tp,
        pp,
        schedule: schedule.into(),
        micro_batches,
        ..Layout::default()
    };
    let of = |layout, zero, dtype| Case { zero, dtype, rows: 4, ..Case::new(gpt(2, 2), layout) };
    match number % COUNT {
        0 => of(layout(2, 2, 2, "1f1b", 2), 0, DType::F32),
        1 => of(layout(2, 2, 2, "zb-h1", 2), 1, DType::BF16),
        2 => of(layout(2, 2, 2, "1f1b", 2), 2, DType::F32),
        3 => of(layout(2, 2, 2, "gpipe", 2), 3, DType::F32),
        4 => Case { rows: 8, ..of(layout(8, 1, 1, "1f1b", 1), 3, DType::BF16) },
        5 => {
            let layout = Layout { sequence_parallel: true, ..layout(4, 2, 1, "1f1b", 1) };
            Case { zero: 3, rows: 4, ..Case::new(llama(2, 2, 2), layout) }
        }
        6 => {
            let layout = Layout { recompute: RecomputeMode::Always, ..layout(1, 2, 4, "1f1b", 3) };
            Case { rows: 3, ..Case::new(gpt(4, 2), layout) }
        }
        _ => {
            let layout = Layout { ep: 2, ..layout(4, 1, 2, "1f1b", 2) };
            Case { zero: 3, rows: 8, ..Case::new(balanced(mixture(Family::OlmoE, 2)), layout) }
        }
    }
}

/// How many layouts there are.
pub const COUNT: u64 = 8;

/// Trains a step on a rank. The bits of losses, norm, and what the rank has of the model and the optimizer.
pub fn train(case: &Case, rank: &Rank) -> phalanx_parallel::Result<Vec<u64>> {
    let mut run = Run::new(case, rank.comm(), rank.device(), Update::AdamW)?;
    let (losses, norm) = run.step(0)?;
    let mut bits: Vec<u64> = losses.into_iter().chain([norm]).map(f64::to_bits).collect();
    for part in run.parts()? {
        let values = phalanx_kernels::cast(&part.values, DType::F64)?.to_vec::<f64>()?;
        bits.extend(values.into_iter().map(f64::to_bits));
    }
    Ok(bits)
}
