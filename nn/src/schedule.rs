//! Learning rates as pure functions of the step.

use std::f64::consts::PI;

use crate::Result;
use crate::error::{check_non_negative, check_probability, check_setting};

/// How the learning rate changes with the step; [`Schedule::lr`] gives the rate of step 0, 1, ..
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Schedule {
    /// The same rate, after a linear warm-up from 0.
    Constant {
        /// The rate.
        lr: f64,
        /// Steps of warm-up.
        warmup: u64,
    },
    /// Linear warm-up from 0, then down along a cosine.
    Cosine {
        /// The highest rate.
        lr: f64,
        /// Steps of warm-up.
        warmup: u64,
        /// All steps.
        total: u64,
        /// Cosine waves; 0.5 goes down to the lowest rate once.
        cycles: f64,
        /// The lowest rate.
        min: f64,
    },
    /// Linear warm-up from 0, then straight down.
    Linear {
        /// The highest rate.
        lr: f64,
        /// Steps of warm-up.
        warmup: u64,
        /// All steps.
        total: u64,
        /// The rate at the end.
        min: f64,
    },
    /// Linear warm-up from 0, then `lr sqrt(warmup / step)`.
    /// Source: Vaswani and others: Attention is all you need (2017), section 5.3.
    InverseSqrt {
        /// The highest rate.
        lr: f64,
        /// Steps of warm-up, at least 1.
        warmup: u64,
    },
    /// Linear warm-up from 0, then the same rate, and straight down at the end.
    /// Source: Hu and others: MiniCPM (2024), section 4.
    WarmupStableDecay {
        /// The rate between.
        lr: f64,
        /// Steps of warm-up.
        warmup: u64,
        /// Steps at the end in which the rate falls.
        decay: u64,
        /// All steps.
        total: u64,
        /// The rate at the end.
        min: f64,
    },
    /// Multiplied by `gamma` every `step_size` steps.
    Step {
        /// The first rate.
        lr: f64,
        /// Steps at one rate.
        step_size: u64,
        /// The factor.
        gamma: f64,
    },
    /// Up to the highest rate and down again.
    /// Source: Smith and Topin: Super-convergence (2018).
    OneCycle(OneCycle),
}

/// The one-cycle policy's numbers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct OneCycle {
    /// The highest rate.
    pub max_lr: f64,
    /// All steps.
    pub total: u64,
    /// The share of the steps in which the rate rises.
    pub pct_start: f64,
    /// Straight legs instead of half cosines.
    pub linear: bool,
    /// The highest rate over the first.
    pub div_factor: f64,
    /// The first rate over the last.
    pub final_div_factor: f64,
    /// Whether the rate returns to the first one as steeply as it rose, and then falls to the last.
    pub three_phase: bool,
}

impl Schedule {
    /// Refuses numbers that make no sense.
    ///
    /// # Errors
    /// If a rate is negative or no number, there are no steps, or a share is not between 0 and 1.
    pub fn check(&self) -> Result<()> {
        const WHAT: &str = "Schedule";
        let steps = |name, got: u64| check_setting(WHAT, name, got as f64, got > 0, "at least 1");
        match *self {
            Schedule::Constant { lr, .. } => check_non_negative(WHAT, "a rate of", lr),
            Schedule::Cosine { lr, total, cycles, min, .. } => {
                check_non_negative(WHAT, "a rate of", lr)?;
                steps("a total of steps of", total)?;
                check_non_negative(WHAT, "a number of waves of", cycles)?;
                check_non_negative(WHAT, "a lowest rate of", min)
            }
            Schedule::Linear { lr, total, min, .. } | Schedule::WarmupStableDecay { lr, total, min, .. } => {
                check_non_negative(WHAT, "a rate of", lr)?;
                steps("a total of steps of", total)?;
                check_non_negative(WHAT, "a rate at the end of", min)
            }
            Schedule::InverseSqrt { lr, warmup } => {
                check_non_negative(WHAT, "a rate of", lr)?;
                steps("a warm-up of steps of", warmup)
            }
            Schedule::Step { lr, step_size, gamma } => {
                check_non_negative(WHAT, "a rate of", lr)?;
                steps("a step size of", step_size)?;
                check_non_negative(WHAT, "a factor of", gamma)
            }
            Schedule::OneCycle(cycle) => {
                check_non_negative(WHAT, "a highest rate of", cycle.max_lr)?;
                steps("a total of steps of", cycle.total)?;
                check_probability(WHAT, "a share of steps that go up of", cycle.pct_start)?;
                for factor in [cycle.div_factor, cycle.final_div_factor] {
                    check_setting(WHAT, "a divisor of", factor, factor > 0.0, "more than 0")?;
                }
                Ok(())
            }
        }
    }

    /// The highest rate.
    pub fn peak(&self) -> f64 {
        match *self {
            Schedule::Constant { lr, .. }
            | Schedule::Cosine { lr, .. }
            | Schedule::Linear { lr, .. }
            | Schedule::InverseSqrt { lr, .. }
            | Schedule::WarmupStableDecay { lr, .. }
            | Schedule::Step { lr, .. } => lr,
            Schedule::OneCycle(cycle) => cycle.max_lr,
        }
    }

    /// The rate of a step, counted from 0. It is NaN if [`Schedule::check`] refuses the numbers, so that an optimizer refuses the step.
    /// After the end of one cycle it stays at the last rate.
    pub fn lr(&self, step: u64) -> f64 {
        if self.check().is_err() {
            return f64::NAN;
        }
        let warm = |lr: f64, warmup: u64| (step < warmup).then(|| lr * step as f64 / warmup.max(1) as f64);
        match *self {
            Schedule::Constant { lr, warmup } => warm(lr, warmup).unwrap_or(lr),
            Schedule::Cosine { lr, warmup, total, cycles, min } => warm(lr, warmup).unwrap_or_else(|| {
                let done = (step - warmup) as f64 / total.saturating_sub(warmup).max(1) as f64;
                min + (lr - min) * ((1.0 + (2.0 * PI * cycles * done).cos()) / 2.0).max(0.0)
            }),
            Schedule::Linear { lr, warmup, total, min } => {
                let all = total.saturating_sub(warmup);
                warm(lr, warmup).unwrap_or_else(|| min + (lr - min) * left(step, total, all))
            }
            Schedule::InverseSqrt { lr, warmup } => {
                warm(lr, warmup).unwrap_or_else(|| lr * (warmup as f64 / step.max(1) as f64).sqrt())
            }
            Schedule::WarmupStableDecay { lr, warmup, decay, total, min } => {
                warm(lr, warmup).unwrap_or_else(|| min + (lr - min) * left(step, total, decay))
            }
            Schedule::Step { lr, step_size, gamma } => lr * gamma.powf((step / step_size.max(1)) as f64),
            Schedule::OneCycle(cycle) => cycle.lr(step as f64),
        }
    }
}

/// The share of the last `leg` steps that is still to come, at most 1.
fn left(step: u64, total: u64, leg: u64) -> f64 {
    (total.saturating_sub(step) as f64 / leg.max(1) as f64).min(1.0)
}

impl OneCycle {
    /// The legs: where each ends, and the rate there.
    fn legs(&self) -> ([(f64, f64); 3], usize) {
        let n = self.total as f64;
        let first = self.max_lr / self.div_factor;
        let (top, last) = ((self.pct_start * n - 1.0, self.max_lr), (n - 1.0, first / self.final_div_factor));
        match self.three_phase {
            true => ([top, (2.0 * self.pct_start * n - 2.0, first), last], 3),
            false => ([top, last, last], 2),
        }
    }

    fn lr(&self, step: f64) -> f64 {
        let step = step.min(self.total as f64 - 1.0);
        let (legs, count) = self.legs();
        let mut from = (0.0, self.max_lr / self.div_factor);
        for &to in &legs[..count - 1] {
            if step <= to.0 {
                return self.between(from, to, step);
            }
            from = to;
        }
        self.between(from, legs[count - 1], step)
    }

    fn between(&self, from: (f64, f64), to: (f64, f64), step: f64) -> f64 {
        let done = (step - from.0) / (to.0 - from.0);
        match self.linear {
            true => from.1 + (to.1 - from.1) * done,
            false => to.1 + (from.1 - to.1) / 2.0 * (1.0 + (PI * done).cos()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_schedule_of_no_steps_says_so_and_has_no_rate() {
        let odd = [
            Schedule::Step { lr: 1.0, step_size: 0, gamma: 0.1 },
            Schedule::Cosine { lr: 1.0, warmup: 2, total: 0, cycles: 0.5, min: 0.0 },
            Schedule::Constant { lr: -1.0, warmup: 0 },
        ];
        for schedule in odd {
            let error = schedule.check().unwrap_err().to_string();
            assert!(error.starts_with("Schedule: got"), "{error}");
            assert!(schedule.lr(3).is_nan());
        }
    }

    #[test]
    fn schedules_pass_through_their_corners() {
        let close = |a: f64, b: f64| assert!((a - b).abs() < 1e-12, "{a} {b}");
        let check = |schedule: Schedule, at: &[(u64, f64)]| {
            at.iter().for_each(|&(step, lr)| close(schedule.lr(step), lr))
        };
        let cosine = Schedule::Cosine { lr: 1.0, warmup: 4, total: 14, cycles: 0.5, min: 0.0 };
        check(cosine, &[(0, 0.0), (2, 0.5), (4, 1.0), (9, 0.5), (14, 0.0)]);
        check(Schedule::Constant { lr: 2.0, warmup: 2 }, &[(0, 0.0), (1, 1.0), (2, 2.0), (99, 2.0)]);
        let steps = Schedule::Step { lr: 1.0, step_size: 3, gamma: 0.1 };
        check(steps, &[(0, 1.0), (2, 1.0), (3, 0.1), (8, 0.01)]);
        let floor = Schedule::Cosine { lr: 1.0, warmup: 4, total: 14, cycles: 0.5, min: 0.2 };
        check(floor, &[(0, 0.0), (4, 1.0), (9, 0.6), (14, 0.2)]);
        let linear = Schedule::Linear { lr: 1.0, warmup: 2, total: 12, min: 0.5 };
        check(linear, &[(0, 0.0), (2, 1.0), (7, 0.75), (12, 0.5), (20, 0.5)]);
        check(Schedule::InverseSqrt { lr: 1.0, warmup: 4 }, &[(0, 0.0), (2, 0.5), (4, 1.0), (16, 0.5)]);
        let stable = Schedule::WarmupStableDecay { lr: 1.0, warmup: 2, decay: 4, total: 12, min: 0.0 };
        check(stable, &[(1, 0.5), (2, 1.0), (8, 1.0), (10, 0.5), (12, 0.0)]);
        let cycle = OneCycle {
            max_lr: 1.0,
            total: 20,
            pct_start: 0.3,
            linear: true,
            div_factor: 25.0,
            final_div_factor: 1e4,
            three_phase: false,
        };
        let middle = 1.0 - 0.999996 / 2.0;
        check(Schedule::OneCycle(cycle), &[(0, 0.04), (5, 1.0), (12, middle), (19, 4e-6), (30, 4e-6)]);
        let three = OneCycle { three_phase: true, ..cycle };
        check(Schedule::OneCycle(three), &[(0, 0.04), (5, 1.0), (10, 0.04), (19, 4e-6)]);
    }
}
