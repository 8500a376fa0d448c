//! [`Costs`]: how long everything takes.

use super::super::{Action, Error, Kind, Result, Schedule, Transfer};

/// How long each stage's computations take and how much they hold, in any units. Every list has an entry for each stage,
/// `transfer` for each boundary between stages.
#[derive(Clone, Debug, PartialEq)]
pub struct Costs {
    /// Of `F`.
    pub forward: Vec<f64>,
    /// Of `B`.
    pub backward: Vec<f64>,
    /// Of `I`.
    pub input: Vec<f64>,
    /// Of `W`.
    pub weight: Vec<f64>,
    /// From stage `s` to the next and back, at `s`, if they are on different ranks.
    pub transfer: Vec<f64>,
    /// What an `F` leaves behind until its `B` or `W` has ended.
    pub activation: Vec<f64>,
}

impl Costs {
    /// Every rank has an equal part of the model, and its stages equal parts of that. `forward`, `input` and `weight` are a rank's
    /// times for a micro-batch, `B` takes as long as `I` and `W` together, and a rank's part holds an activation of 1.
    pub fn even(schedule: &Schedule, forward: f64, input: f64, weight: f64, transfer: f64) -> Costs {
        let of_rank = |rank| schedule.stages_of(rank).count() as f64;
        let part: Vec<f64> = schedule.placement.iter().map(|&rank| 1.0 / of_rank(rank)).collect();
        let each = |time: f64| part.iter().map(|part| time * part).collect();
        Costs {
            forward: each(forward),
            backward: each(input + weight),
            input: each(input),
            weight: each(weight),
            transfer: vec![transfer; part.len().saturating_sub(1)],
            activation: part,
        }
    }

    /// Refuses lists of the wrong length, and what is no time.
    pub(super) fn check(&self, schedule: &Schedule) -> Result<()> {
        let stages = schedule.stages();
        let lists = [
            ("forward", &self.forward, stages),
            ("backward", &self.backward, stages),
            ("input", &self.input, stages),
            ("weight", &self.weight, stages),
            ("transfer", &self.transfer, stages.saturating_sub(1)),
            ("activation", &self.activation, stages),
        ];
        let invalid = |got, wanted| Err(Error::Invalid { op: "simulate", got, wanted });
        for (name, list, count) in lists {
            if list.len() != count {
                let got = format!("{} {name} costs for {stages} stages", list.len());
                return invalid(got, "one for each stage, of transfers for each boundary");
            }
            if let Some(cost) = list.iter().find(|cost| !(cost.is_finite() && **cost >= 0.0)) {
                return invalid(format!("{name} cost {cost}"), "a finite number from 0 up");
            }
        }
        Ok(())
    }

    /// How long a computation takes; no time for sends and receives.
    pub(super) fn of(&self, action: Action) -> f64 {
        match action.kind {
            Kind::Forward => self.forward[action.stage],
            Kind::Backward => self.backward[action.stage],
            Kind::Input => self.input[action.stage],
            Kind::Weight => self.weight[action.stage],
            _ => 0.0,
        }
    }

    /// How long a transfer takes.
    pub(super) fn between(&self, transfer: Transfer) -> f64 {
        self.transfer[transfer.from.min(transfer.to)]
    }
}
