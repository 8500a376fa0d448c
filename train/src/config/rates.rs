//! The learning-rate schedule as the keys of a [`Config`](super::Config) see it: by its name and its numbers.

use phalanx_nn::{OneCycle, Schedule};

/// A schedule's name.
pub(super) fn name(schedule: &Schedule) -> &'static str {
    match schedule {
        Schedule::Constant { .. } => "constant",
        Schedule::Cosine { .. } => "cosine",
        Schedule::Linear { .. } => "linear",
        Schedule::InverseSqrt { .. } => "inverse-sqrt",
        Schedule::WarmupStableDecay { .. } => "warmup-stable-decay",
        Schedule::OneCycle(_) => "one-cycle",
        Schedule::Step { .. } => "step",
    }
}

/// The schedule of that name, with the rate and the warm-up of another.
pub(super) fn named(wanted: &str, other: &Schedule, total: u64) -> Option<Schedule> {
    let mut other = *other;
    if name(&other) == wanted {
        return Some(other);
    }
    let (lr, warmup) = (*peak(&mut other), warmup(&mut other).map_or(0, |warmup| *warmup));
    let min = lowest(&mut other).map_or(0.0, |min| *min);
    Some(match wanted {
        "constant" => Schedule::Constant { lr, warmup },
        "cosine" => Schedule::Cosine { lr, warmup, total, cycles: 0.5, min },
        "linear" => Schedule::Linear { lr, warmup, total, min },
        "inverse-sqrt" => Schedule::InverseSqrt { lr, warmup: warmup.max(1) },
        "warmup-stable-decay" => Schedule::WarmupStableDecay { lr, warmup, decay: total / 2, total, min },
        "one-cycle" => Schedule::OneCycle(OneCycle {
            max_lr: lr,
            total,
            pct_start: 0.3,
            linear: false,
            div_factor: 25.0,
            final_div_factor: 1e4,
            three_phase: false,
        }),
        "step" => Schedule::Step { lr, step_size: (total / 3).max(1), gamma: 0.1 },
        _ => return None,
    })
}

/// The highest rate of a schedule.
pub(super) fn peak(schedule: &mut Schedule) -> &mut f64 {
    match schedule {
        Schedule::Constant { lr, .. }
        | Schedule::Cosine { lr, .. }
        | Schedule::Linear { lr, .. }
        | Schedule::InverseSqrt { lr, .. }
        | Schedule::WarmupStableDecay { lr, .. }
        | Schedule::Step { lr, .. } => lr,
        Schedule::OneCycle(cycle) => &mut cycle.max_lr,
    }
}

/// The warm-up steps of a schedule, if it has a warm-up.
pub(super) fn warmup(schedule: &mut Schedule) -> Option<&mut u64> {
    match schedule {
        Schedule::Constant { warmup, .. }
        | Schedule::Cosine { warmup, .. }
        | Schedule::Linear { warmup, .. }
        | Schedule::InverseSqrt { warmup, .. }
        | Schedule::WarmupStableDecay { warmup, .. } => Some(warmup),
        Schedule::Step { .. } | Schedule::OneCycle(_) => None,
    }
}

/// The lowest rate of a schedule, if it has one.
pub(super) fn lowest(schedule: &mut Schedule) -> Option<&mut f64> {
    match schedule {
        Schedule::Cosine { min, .. }
        | Schedule::Linear { min, .. }
        | Schedule::WarmupStableDecay { min, .. } => Some(min),
        _ => None,
    }
}

/// The steps that a schedule is made for.
pub(super) fn total(schedule: &mut Schedule) -> Option<&mut u64> {
    match schedule {
        Schedule::Cosine { total, .. }
        | Schedule::Linear { total, .. }
        | Schedule::WarmupStableDecay { total, .. } => Some(total),
        Schedule::OneCycle(cycle) => Some(&mut cycle.total),
        _ => None,
    }
}
