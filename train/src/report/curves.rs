//! Curves over the steps of a run, and events at single steps.

use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// The curves of a run, which share their axis of steps.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Curves {
    /// The loss's unit, such as `nats a token`.
    pub loss_unit: String,
    /// The throughput's unit, such as `tokens/s`.
    pub throughput_unit: String,
    /// The mean loss of each step's batch.
    pub loss: Series,
    /// The validation loss, at the steps where it was measured.
    pub validation: Series,
    /// The learning rate.
    pub lr: Series,
    /// The gradients' global norm, before clipping.
    pub grad_norm: Series,
    /// Tokens or samples a second.
    pub throughput: Series,
    /// The share of the measured peak FLOP/s that the model's arithmetic used, from 0 to 1.
    pub mfu: Series,
    /// Floating-point operations a second, recomputed ones included, by Megatron-LM's formula.
    pub flops: Series,
    /// The share of the measured peak FLOP/s that the model's arithmetic used, by Megatron-LM's formula.
    pub megatron_mfu: Series,
    /// Further charts, such as accuracy.
    pub more: Vec<Chart>,
}

/// A chart beyond those that every run has.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Chart {
    /// Its heading.
    pub title: String,
    /// The unit of its values; may be empty.
    pub unit: String,
    /// Its curves and their names.
    pub series: Vec<(String, Series)>,
}

/// Values at steps. Of a step that ran again after a rollback, the last value counts.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Series {
    /// The steps, from 1, in the order in which they ran.
    #[serde(serialize_with = "runs", deserialize_with = "steps")]
    pub steps: Vec<u64>,
    /// A value for each step. NaN and infinities are drawn as gaps.
    #[serde(serialize_with = "rounded", deserialize_with = "values")]
    pub values: Vec<f64>,
}

/// An event at a step, drawn as a thin line through all curves.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Mark {
    /// The number of steps done before it.
    pub step: u64,
    /// Its kind.
    pub kind: MarkKind,
    /// A few words about it; may be empty.
    pub text: String,
}

/// The kinds of events.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MarkKind {
    /// A checkpoint was written.
    Checkpoint,
    /// The run was resumed from a checkpoint.
    Resumed,
    /// The step's update was skipped, because its gradients were not finite.
    Skipped,
    /// The run ended with an error.
    Failed,
    /// Training went back to an earlier state.
    RolledBack,
    /// Training ended before its last step.
    EarlyStop,
    /// Another event, described by its text.
    #[default]
    Other,
}

impl Series {
    /// Adds a step.
    pub fn push(&mut self, step: u64, value: f64) {
        self.steps.push(step);
        self.values.push(value);
    }

    /// Removes the steps from this one on.
    pub fn truncate(&mut self, from: u64) {
        *self = self.points().filter(|(step, _)| *step < from).collect();
    }

    /// Whether there are no values.
    pub fn is_empty(&self) -> bool {
        self.steps.is_empty() || self.values.is_empty()
    }

    /// Steps and their values.
    pub fn points(&self) -> impl DoubleEndedIterator<Item = (u64, f64)> + Clone + '_ {
        let count = self.steps.len().min(self.values.len());
        self.steps[..count].iter().copied().zip(self.values[..count].iter().copied())
    }

    /// The median of the finite values.
    pub fn median(&self) -> Option<f64> {
        let mut finite: Vec<f64> = self.values.iter().copied().filter(|v| v.is_finite()).collect();
        finite.sort_by(f64::total_cmp);
        finite.get(finite.len() / 2).copied()
    }
}

impl FromIterator<(u64, f64)> for Series {
    fn from_iter<I: IntoIterator<Item = (u64, f64)>>(points: I) -> Series {
        let (steps, values) = points.into_iter().unzip();
        Series { steps, values }
    }
}

/// Steps as `[first, distance, count]`, since most runs have steps 0, 1, 2 and so on.
fn runs<S: Serializer>(steps: &[u64], to: S) -> Result<S::Ok, S::Error> {
    let mut runs: Vec<(u64, u64, u64)> = Vec::new();
    for &step in steps {
        match runs.last_mut() {
            Some((first, by, count)) if *count == 1 && step > *first => {
                (*by, *count) = (step - *first, 2);
            }
            Some((first, by, count)) if *count > 1 && step == *first + *by * *count => *count += 1,
            _ => runs.push((step, 1, 1)),
        }
    }
    runs.serialize(to)
}

/// Reads what [`runs`] wrote.
fn steps<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<u64>, D::Error> {
    let runs = Vec::<(u64, u64, u64)>::deserialize(from)?;
    let steps = |(first, by, count): (u64, u64, u64)| {
        (0..count).map(move |i| first.saturating_add(by.saturating_mul(i)))
    };
    match runs.iter().map(|run| run.2).fold(0, u64::saturating_add) {
        0..STEPS_MAX => Ok(runs.into_iter().flat_map(steps).collect()),
        many => Err(serde::de::Error::custom(format!("got {many} steps, wanted fewer than {STEPS_MAX}"))),
    }
}

/// The most steps that are read; more are an error.
const STEPS_MAX: u64 = 1 << 28;

/// Reads what [`rounded`] wrote.
fn values<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<f64>, D::Error> {
    let values = Vec::<Option<f64>>::deserialize(from)?;
    Ok(values.into_iter().map(|value| value.unwrap_or(f64::NAN)).collect())
}

/// Writes values with six digits: a curve shows fewer, and a page of 200,000 steps stays small. A value that is not finite becomes `null`.
fn rounded<S: Serializer>(values: &[f64], to: S) -> Result<S::Ok, S::Error> {
    to.collect_seq(values.iter().map(|&value| significant(value, 6)))
}

/// The value rounded to `digits` significant digits.
pub(super) fn significant(value: f64, digits: usize) -> f64 {
    format!("{value:.*e}", digits - 1).parse().unwrap_or(value)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_distances_are_one_run() {
        let series: Series = (0..200_000).map(|s| (s, 0.0)).collect();
        let json = serde_json::to_value(series).unwrap();
        assert_eq!(json["steps"], serde_json::json!([[0, 1, 200_000]]));
    }

    #[test]
    fn a_rollback_begins_another_run() {
        let series: Series = [0, 1, 2, 3, 2, 3, 4, 10].map(|s| (s, 0.0)).into_iter().collect();
        let json = serde_json::to_value(series).unwrap();
        assert_eq!(json["steps"], serde_json::json!([[0, 1, 4], [2, 1, 3], [10, 1, 1]]));
    }

    #[test]
    fn nan_is_a_gap() {
        let series: Series = [(0, 1.0), (1, f64::NAN), (2, f64::INFINITY), (3, 2.0)].into_iter().collect();
        let json = serde_json::to_string(&series).unwrap();
        assert_eq!(json, r#"{"steps":[[0,1,4]],"values":[1.0,null,null,2.0]}"#);
        assert_eq!(series.median(), Some(2.0));
    }

    #[test]
    fn what_is_written_is_read_again() {
        let series: Series = [(0, 1.5), (1, 2.5), (2, f64::NAN), (1, 4.0), (9, 5.0)].into_iter().collect();
        let again: Series = serde_json::from_str(&serde_json::to_string(&series).unwrap()).unwrap();
        assert_eq!(again.steps, series.steps);
        assert!(again.values[2].is_nan() && again.values[3..] == [4.0, 5.0]);
        let endless = serde_json::from_str::<Series>(r#"{"steps":[[0,1,9999999999999]],"values":[]}"#);
        assert!(endless.is_err());
    }

    #[test]
    fn values_have_six_digits() {
        assert_eq!(significant(2.345_678_91, 6), 2.34568);
        assert_eq!(significant(-1.234_567_8e-9, 6), -1.23457e-9);
        assert_eq!(significant(123_456_789.0, 6), 123_457_000.0);
        assert_eq!(significant(0.0, 6), 0.0);
    }

    #[test]
    fn points_end_where_steps_or_values_do() {
        let series = Series { steps: vec![0, 1, 2], values: vec![5.0] };
        assert_eq!(series.points().collect::<Vec<_>>(), [(0, 5.0)]);
    }
}
