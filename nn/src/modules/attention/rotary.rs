//! Rotary positions: a [`Rotary`] says how queries and keys are rotated, and how a model's context was extended.
//!
//! Sources: Su et al.: RoFormer (2021); Chen et al.: Extending context window by positional interpolation (2023) for `Linear`; Peng et
//! al.: YaRN (2023), which has `Dynamic` too; Meta: Llama 3.1 (2024) for `Llama3`.

use std::f64::consts::TAU;
use std::sync::Mutex;

use phalanx_autograd::{Rope, RopeFrequencies, Var};
use phalanx_tensor::{DType, Device, Tensor, unpoisoned};

use crate::Result;

/// Rotary positions of the heads of a layer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rotary {
    /// The base of the frequencies: pair i of `features` turns by `base^(-2i / features)` a position.
    pub base: f64,
    /// How many of a head's first features are rotated; all if absent.
    pub features: Option<usize>,
    /// How the frequencies are changed.
    pub scaling: RopeScaling,
}

/// How the frequencies of a model are changed for a longer context than it was first trained for. `context` is the former one, in
/// positions, and `factor` how many times longer the new one is.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum RopeScaling {
    /// They are not.
    None,
    /// All are divided by the factor.
    Linear {
        /// The longer context over the former one.
        factor: f64,
    },
    /// The base grows with the length of a sequence that is longer than the former context.
    Dynamic {
        /// The longer context over the former one.
        factor: f64,
        /// The former context.
        context: usize,
    },
    /// Low frequencies are divided by the factor, high ones are not, and between them it goes over smoothly.
    Llama3 {
        /// The longer context over the former one.
        factor: f64,
        /// Wavelengths above the context over this are long.
        low_frequency: f64,
        /// Wavelengths below the context over this are short.
        high_frequency: f64,
        /// The former context.
        context: usize,
    },
    /// The same with a linear ramp over the pairs, and the rotated features are multiplied by a factor.
    Yarn {
        /// The longer context over the former one.
        factor: f64,
        /// What rotated features are multiplied with; `0.1 ln(factor) + 1` if absent.
        attention_factor: Option<f64>,
        /// Pairs that turn more often over the former context keep their frequency.
        beta_fast: f64,
        /// Pairs that turn less often have theirs divided by the factor.
        beta_slow: f64,
        /// The former context.
        context: usize,
        /// Whether the ends of the ramp are whole numbers.
        truncate: bool,
    },
}

impl Rotary {
    /// All features, of frequencies that are not changed.
    pub fn new(base: f64) -> Rotary {
        Rotary { base, features: None, scaling: RopeScaling::None }
    }

    /// The frequencies of `features` rotated features in a sequence of `length` positions, and the factor.
    pub(crate) fn frequencies(&self, features: usize, length: usize) -> (Vec<f64>, f64) {
        let pairs = features / 2;
        let by = |base: f64| (0..pairs).map(move |i| base.powf(-(i as f64) / pairs as f64));
        let plain = by(self.base);
        match self.scaling {
            RopeScaling::None => (plain.collect(), 1.0),
            RopeScaling::Linear { factor } => (plain.map(|frequency| frequency / factor).collect(), 1.0),
            RopeScaling::Dynamic { factor, context } => {
                let (length, context, dim) = (length.max(context) as f64, context as f64, features as f64);
                let grown = (factor * length / context - (factor - 1.0)).powf(dim / (dim - 2.0));
                (by(self.base * grown).collect(), 1.0)
            }
            RopeScaling::Llama3 { factor, low_frequency, high_frequency, context } => {
                let scaled = |frequency: f64| {
                    let turns = context as f64 * frequency / TAU;
                    let share = ((turns - low_frequency) / (high_frequency - low_frequency)).clamp(0.0, 1.0);
                    (1.0 - share) * frequency / factor + share * frequency
                };
                (plain.map(scaled).collect(), 1.0)
            }
            RopeScaling::Yarn { factor, attention_factor, beta_fast, beta_slow, context, truncate } => {
                // The pair that turns so often over the former context.
                let pair = |turns: f64| {
                    features as f64 * (context as f64 / (turns * TAU)).ln() / (2.0 * self.base.ln())
                };
                let (mut low, mut high) = (pair(beta_fast), pair(beta_slow));
                if truncate {
                    (low, high) = (low.floor(), high.ceil());
                }
                let (low, high) = (low.max(0.0), high.min(features as f64 - 1.0));
                let width = if low == high { 1e-3 } else { high - low };
                let scaled = |(i, frequency): (usize, f64)| {
                    let slow = ((i as f64 - low) / width).clamp(0.0, 1.0);
                    slow * frequency / factor + (1.0 - slow) * frequency
                };
                let default = if factor <= 1.0 { 1.0 } else { 0.1 * factor.ln() + 1.0 };
                (plain.enumerate().map(scaled).collect(), attention_factor.unwrap_or(default))
            }
        }
    }
}

/// The rotation of one layer's heads.
pub(super) struct RotaryPositions {
    rotary: Rotary,
    /// Features of a head.
    dim: usize,
    /// The frequencies that were used last, and the length for which they are.
    kept: Mutex<Option<(usize, RopeFrequencies)>>,
}

impl RotaryPositions {
    pub(super) fn new(rotary: Rotary, dim: usize) -> RotaryPositions {
        RotaryPositions { rotary, dim, kept: Mutex::default() }
    }

    /// Heads `[B, heads, T, dim]`, rotated by the positions `ids`, or by those from `before` on.
    pub(super) fn rotate(&self, x: &Var, ids: Option<&Var>, before: usize) -> Result<Var> {
        let features = self.rotary.features.unwrap_or(self.dim);
        let config = Rope { base: self.rotary.base, offset: before as i64 };
        let part = if features < self.dim { x.narrow(3, 0, features)? } else { x.clone() };
        let rotated = match self.rotary.scaling {
            RopeScaling::None => part.rope(ids, &config)?,
            _ => {
                let by = self.frequencies(features, before + x.shape()[2], x.device())?;
                part.rope_by(ids, &config, &by)?
            }
        };
        if features == self.dim {
            return Ok(rotated);
        }
        Ok(Var::cat(&[&rotated, &x.narrow(3, features, self.dim - features)?], 3)?)
    }

    fn frequencies(&self, features: usize, length: usize, device: Device) -> Result<RopeFrequencies> {
        // Only dynamic ones depend on it.
        let length = match self.rotary.scaling {
            RopeScaling::Dynamic { context, .. } => length.max(context),
            _ => 0,
        };
        let mut kept = unpoisoned(self.kept.lock());
        if let Some((_, frequencies)) =
            kept.as_ref().filter(|(of, frequencies)| *of == length && frequencies.values.device() == device)
        {
            return Ok(frequencies.clone());
        }
        let (values, factor) = self.rotary.frequencies(features, length);
        let values = match device.is_meta() {
            true => Tensor::zeros(&[values.len()], DType::F64, device)?,
            false => Tensor::from_slice(&values, &[values.len()], device)?,
        };
        let frequencies = RopeFrequencies { values, factor };
        *kept = Some((length, frequencies.clone()));
        Ok(frequencies)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frequencies_go_from_whole_to_divided() {
        let of = |scaling| Rotary { scaling, ..Rotary::new(10000.0) }.frequencies(8, 64);
        let (plain, _) = of(RopeScaling::None);
        assert_eq!(
            of(RopeScaling::Linear { factor: 4.0 }).0,
            plain.iter().map(|f| f / 4.0).collect::<Vec<_>>()
        );
        let (scaled, _) =
            of(RopeScaling::Llama3 { factor: 8.0, low_frequency: 1.0, high_frequency: 4.0, context: 64 });
        assert_eq!([scaled[0], scaled[3]], [plain[0], plain[3] / 8.0]);
        // 64 / (2 pi 10) turns, between 1 and 4.
        let share = (64.0 * plain[1] / TAU - 1.0) / 3.0;
        assert!((scaled[1] - (share + (1.0 - share) / 8.0) * plain[1]).abs() < 1e-15);
        let (yarn, factor) = of(RopeScaling::Yarn {
            factor: 4.0,
            attention_factor: None,
            beta_fast: 32.0,
            beta_slow: 1.0,
            context: 64,
            truncate: true,
        });
        assert_eq!([yarn[0], yarn[3]], [plain[0], plain[3] / 4.0]);
        assert_eq!(factor, 0.1 * 4f64.ln() + 1.0);
        // Within the former context dynamic frequencies are the plain ones.
        let dynamic = |context| of(RopeScaling::Dynamic { factor: 2.0, context }).0;
        assert_eq!(dynamic(64), plain);
        assert!(dynamic(32)[3] < plain[3] && dynamic(32)[0] == 1.0);
    }
}
