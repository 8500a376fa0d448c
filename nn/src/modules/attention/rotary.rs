//! Rotary positions: a [`Rotary`] says how queries and keys are rotated, and how a model's context was extended.
//!
//! Sources: Su et al.: RoFormer (2021); Chen et al.: Extending context window by positional interpolation (2023) for `Linear`; Peng et
//! al.: YaRN (2023), which has `Dynamic` too; Meta: Llama 3.1 (2024) for `Llama3`; Ding et al.: LongRoPE (2024), section 3, and Abdin et
//! al.: Phi-3 (2024) for `LongRope`.

use std::f64::consts::TAU;
use std::sync::{Arc, Mutex};

use phalanx_autograd::{Rope, RopeFrequencies, Var};
use phalanx_tensor::{DType, Device, Tensor, unpoisoned};

use super::Documents;
use crate::{Error, Result};

/// Rotary positions of the heads of a layer.
#[derive(Clone, Debug, PartialEq)]
pub struct Rotary {
    /// The base of the frequencies: pair i of `features` turns by `base^(-2i / features)` a position.
    pub base: f64,
    /// How many of a head's first features are rotated; all if absent. Of an odd number one more is rotated, by frequencies of the odd one, as
    /// transformers does with a quarter of heads of 12.
    pub features: Option<usize>,
    /// How the frequencies are changed.
    pub scaling: RopeScaling,
}

/// How the frequencies of a model are changed for a longer context than it was first trained for. `context` is the former one, in
/// positions, and `factor` how many times longer the new one is.
#[derive(Clone, Debug, PartialEq)]
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
    /// Each pair's frequency is divided by a number of its own, another one in sequences that are longer than the former context, and the
    /// rotated features are multiplied by a factor. All positions of a sequence are rotated alike, so earlier keys of a sequence that grows
    /// beyond the former context are no longer right: generation computes them again, as transformers does.
    LongRope {
        /// What frequencies are divided by in sequences of at most the former context, a number for each pair of rotated features.
        short: Arc<[f64]>,
        /// What they are divided by in longer ones.
        long: Arc<[f64]>,
        /// What rotated features are multiplied with, in sequences of any length; see [`RopeScaling::long_rope_factor`].
        attention_factor: f64,
        /// The former context.
        context: usize,
    },
}

impl RopeScaling {
    /// What long rope multiplies rotated features with, unless a model says otherwise: `sqrt(1 + ln(longer / former) / ln(former))`, and 1
    /// if the longer context is not longer. Both are positions. Source: Ding et al.: LongRoPE (2024), section 3.
    pub fn long_rope_factor(longer: usize, former: usize) -> f64 {
        RopeScaling::long_rope_factor_of(longer as f64 / former as f64, former)
    }

    /// [`RopeScaling::long_rope_factor`] for a context so many times as long.
    pub(crate) fn long_rope_factor_of(times: f64, former: usize) -> f64 {
        if times <= 1.0 { 1.0 } else { (1.0 + times.ln() / (former as f64).ln()).sqrt() }
    }

    /// The length beyond which a sequence's earlier keys would have to be rotated anew.
    pub(crate) fn turning_point(&self) -> Option<usize> {
        match self {
            RopeScaling::LongRope { context, .. } => Some(*context),
            _ => None,
        }
    }

    /// The positions that a model has whose file says that it has so many: some files say how many it was first trained for.
    pub(crate) fn extended(&self, stated: usize) -> usize {
        let times = |factor: f64| (stated as f64 * factor) as usize;
        match self {
            RopeScaling::Linear { factor } | RopeScaling::Dynamic { factor, .. } => times(*factor),
            RopeScaling::Yarn { factor, context, .. } if *context == stated => times(*factor),
            _ => stated,
        }
    }

    /// The positions that a file says a model has, so that [`RopeScaling::extended`] gives these.
    pub(crate) fn stated(&self, extended: usize) -> usize {
        match self {
            // Less a little, so that rounding does not make it one more.
            RopeScaling::Linear { factor } => (extended as f64 / factor - 1e-9).ceil() as usize,
            RopeScaling::Dynamic { context, .. } => *context,
            _ => extended,
        }
    }

    /// Refuses numbers that do not fit so many rotated features.
    pub(crate) fn check(&self, features: usize) -> std::result::Result<(), String> {
        let RopeScaling::LongRope { short, long, attention_factor, context } = self else {
            return Ok(());
        };
        for (name, list) in [("short", short), ("long", long)] {
            if list.len() != features.div_ceil(2) {
                let (got, pairs) = (list.len(), features.div_ceil(2));
                return Err(format!(
                    "long rope has {got} {name} factors, wanted {pairs}, one for each pair of the {features} rotated features"
                ));
            }
            if let Some(number) = list.iter().find(|number| !(number.is_finite() && **number > 0.0)) {
                return Err(format!("long rope has the {name} factor {number}, wanted numbers above 0"));
            }
        }
        if !(attention_factor.is_finite() && *attention_factor > 0.0) {
            return Err(format!(
                "long rope has the attention factor {attention_factor}, wanted a number above 0"
            ));
        }
        match context {
            0 | 1 => Err(format!("long rope has a former context of {context}, wanted 2 positions or more")),
            _ => Ok(()),
        }
    }
}

impl Rotary {
    /// All features, of frequencies that are not changed.
    pub fn new(base: f64) -> Rotary {
        Rotary { base, features: None, scaling: RopeScaling::None }
    }

    /// The frequencies of `features` rotated features in a sequence of `length` positions, and the factor.
    pub(crate) fn frequencies(&self, features: usize, length: usize) -> (Vec<f64>, f64) {
        let by = |base: f64| (0..features).step_by(2).map(move |i| base.powf(-(i as f64) / features as f64));
        let plain = by(self.base);
        match self.scaling {
            RopeScaling::None => (plain.collect(), 1.0),
            RopeScaling::LongRope { ref short, ref long, attention_factor, context } => {
                let by = if length > context { long } else { short };
                (plain.zip(by.iter()).map(|(frequency, by)| frequency / by).collect(), attention_factor)
            }
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
    /// The frequencies that were used last, and the length for which they are. There are two where documents are of both lengths.
    kept: Mutex<Vec<(usize, RopeFrequencies)>>,
}

impl RotaryPositions {
    pub(super) fn new(rotary: Rotary, dim: usize) -> RotaryPositions {
        RotaryPositions { rotary, dim, kept: Mutex::default() }
    }

    /// As [`RopeScaling::turning_point`].
    pub(super) fn turning_point(&self) -> Option<usize> {
        self.rotary.scaling.turning_point()
    }

    /// Heads `[B, heads, T, dim]` of the positions from `before` on of sequences of `length` positions, or of documents, rotated.
    pub(super) fn rotate(
        &self,
        x: &Var,
        documents: Option<&Documents>,
        before: usize,
        length: usize,
    ) -> Result<Var> {
        let features = self.features().next_multiple_of(2);
        let part = if features < self.dim { x.narrow(3, 0, features)? } else { x.clone() };
        let rotated = match documents {
            Some(documents) => self.rotate_documents(&part, documents)?,
            None => self.rotate_rows(&part, None, before, length)?,
        };
        if features == self.dim {
            return Ok(rotated);
        }
        Ok(Var::cat(&[&rotated, &x.narrow(3, features, self.dim - features)?], 3)?)
    }

    /// The rotated features by the positions `ids`, or by those from `before` on.
    fn rotate_rows(&self, x: &Var, ids: Option<&Var>, before: usize, length: usize) -> Result<Var> {
        let config = Rope { base: self.rotary.base, offset: before as i64 };
        if self.rotary.scaling == RopeScaling::None && self.features().is_multiple_of(2) {
            return Ok(x.rope(ids, &config)?);
        }
        Ok(x.rope_by(ids, &config, &self.frequencies(length, x.device())?)?)
    }

    /// The rotated features of whole rows of several documents. Each has the frequencies that it has in a row of its own.
    fn rotate_documents(&self, x: &Var, documents: &Documents) -> Result<Var> {
        let (length, ids) = (x.shape()[2], Some(documents.positions()));
        match self.rotary.scaling {
            RopeScaling::LongRope { context, .. } if length > context => {
                let short = self.rotate_rows(x, ids, 0, context)?;
                let long = self.rotate_rows(x, ids, 0, length)?;
                Ok(long.where_(
                    &documents.longer_than(context)?.reshape_to(&[x.shape()[0], 1, length, 1])?,
                    &short,
                )?)
            }
            RopeScaling::Dynamic { context, .. } if length > context => {
                let got = format!("got rows of {length} positions that hold several documents");
                let why = format!("{got}, wanted at most the former context {context} of dynamic positions");
                Err(Error::invalid("attention", why))
            }
            _ => self.rotate_rows(x, ids, 0, length),
        }
    }

    /// The number that frequencies go by.
    fn features(&self) -> usize {
        self.rotary.features.unwrap_or(self.dim)
    }

    fn frequencies(&self, length: usize, device: Device) -> Result<RopeFrequencies> {
        // Of equal lengths here frequencies are equal.
        let length = match self.rotary.scaling {
            RopeScaling::Dynamic { context, .. } => length.max(context),
            RopeScaling::LongRope { context, .. } => length.clamp(context, context + 1),
            _ => 0,
        };
        let mut kept = unpoisoned(self.kept.lock());
        let is_of = |(of, by): &(usize, RopeFrequencies)| *of == length && by.values.device() == device;
        if let Some((_, frequencies)) = kept.iter().find(|kept| is_of(kept)) {
            return Ok(frequencies.clone());
        }
        let (values, factor) = self.rotary.frequencies(self.features(), length);
        let values = match device.is_meta() {
            true => Tensor::zeros(&[values.len()], DType::F64, device)?,
            false => Tensor::from_slice(&values, &[values.len()], device)?,
        };
        let frequencies = RopeFrequencies { values, factor };
        kept.truncate(1);
        kept.insert(0, (length, frequencies.clone()));
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

    /// Of three features, a quarter of 12, two pairs are rotated, by the powers 0 and 2 / 3.
    #[test]
    fn an_odd_number_of_features_has_a_pair_more() {
        let rotary = Rotary { features: Some(3), ..Rotary::new(1000.0) };
        let (frequencies, _) = rotary.frequencies(3, 8);
        assert!(frequencies.len() == 2 && frequencies[0] == 1.0 && (frequencies[1] - 0.01).abs() < 1e-15);
        let x = Var::from_slice(&[1.0, 2.0, 3.0, 4.0, 5.0], &[1, 1, 1, 5], Device::CPU).unwrap();
        let turned = RotaryPositions::new(rotary, 5).rotate(&x, None, 1, 2).unwrap().to_vec::<f64>().unwrap();
        let turn = |a: f64, b: f64, by: f64| [a * by.cos() - b * by.sin(), b * by.cos() + a * by.sin()];
        let ([a, c], [b, d]) = (turn(1.0, 3.0, 1.0), turn(2.0, 4.0, frequencies[1]));
        assert!(turned.iter().zip([a, b, c, d, 5.0]).all(|(got, wanted)| (got - wanted).abs() < 1e-14));
    }

    /// A Phi-3 of 8 rotated features with a former context of 64 and one of 128 now.
    fn long_rope() -> Rotary {
        let (short, long) = ([1.0, 1.25, 1.5, 2.0].into(), [1.0, 2.0, 4.0, 8.0].into());
        let attention_factor = RopeScaling::long_rope_factor(128, 64);
        let scaling = RopeScaling::LongRope { short, long, attention_factor, context: 64 };
        Rotary { scaling, ..Rotary::new(10000.0) }
    }

    #[test]
    fn long_rope_has_a_list_up_to_the_former_context_and_another_beyond() {
        let rotary = long_rope();
        let (short, factor) = rotary.frequencies(8, 64);
        // 10000^(-i / 4) is 1, 0.1, 0.01, 0.001, divided by 1, 1.25, 1.5, 2 and by 1, 2, 4, 8.
        let close = |got: &[f64], wanted: [f64; 4]| {
            assert_eq!(got.len(), 4);
            got.iter()
                .zip(wanted)
                .for_each(|(got, wanted)| assert!((got / wanted - 1.0).abs() < 1e-14, "{got} {wanted}"));
        };
        close(&short, [1.0, 0.08, 0.01 / 1.5, 0.0005]);
        close(&rotary.frequencies(8, 65).0, [1.0, 0.05, 0.0025, 0.000125]);
        // ln(128 / 64) / ln(64) is 1 / 6, whatever the length is.
        assert_eq!([factor, rotary.frequencies(8, 65).1], [(7f64 / 6.0).sqrt(); 2]);
        // Phi-3's: sqrt(1 + ln(131072 / 4096) / ln(4096)) = sqrt(1 + 5 / 12).
        assert!((RopeScaling::long_rope_factor(131_072, 4096) - (17f64 / 12.0).sqrt()).abs() < 1e-15);
        assert_eq!(RopeScaling::long_rope_factor(64, 64), 1.0);
    }

    #[test]
    fn long_rope_of_wrong_numbers_is_refused() {
        let refused = |short: [f64; 4], attention_factor: f64, context: usize, features: usize| {
            let (short, long) = (short.into(), [1.0; 4].into());
            RopeScaling::LongRope { short, long, attention_factor, context }.check(features).unwrap_err()
        };
        let wrong = refused([1.0; 4], 1.0, 64, 6);
        assert!(
            wrong.contains("4 short factors, wanted 3, one for each pair of the 6 rotated features"),
            "{wrong}"
        );
        assert!(refused([1.0, 0.0, 1.0, 1.0], 1.0, 64, 8).contains("short factor 0"));
        assert!(refused([1.0; 4], f64::NAN, 64, 8).contains("the attention factor NaN"));
        assert!(refused([1.0; 4], 1.0, 1, 8).contains("a former context of 1"));
    }

    #[test]
    fn documents_are_rotated_as_in_rows_of_their_own() {
        let rotary =
            |scaling| RotaryPositions::new(Rotary { scaling, features: Some(4), ..Rotary::new(100.0) }, 6);
        let (short, long) = ([1.0, 1.5].into(), [2.0, 4.0].into());
        let by = rotary(RopeScaling::LongRope { short, long, attention_factor: 1.25, context: 3 });
        // Documents of 3, 4 and 1 positions, and of 1 and 7.
        let lengths: [&[usize]; 2] = [&[3, 4, 1], &[1, 7]];
        let starts = lengths.map(|of_row| {
            let mut end = 0;
            let starts = of_row.iter().flat_map(|&n| {
                end += n;
                vec![(end - n) as i64; n]
            });
            starts.collect::<Vec<_>>()
        });
        let starts = Var::from_slice(&starts.concat(), &[2, 8], Device::CPU).unwrap();
        let documents = Documents::new(&starts).unwrap();
        let values: Vec<f64> = (0..2 * 2 * 8 * 6).map(|i| (f64::from(i) * 0.7).sin()).collect();
        let x = Var::from_slice(&values, &[2, 2, 8, 6], Device::CPU).unwrap();
        let packed = by.rotate(&x, Some(&documents), 0, 8).unwrap();
        for (row, of_row) in lengths.iter().enumerate() {
            let mut at = 0;
            for &count in *of_row {
                let of = |x: &Var| x.narrow(0, row, 1).unwrap().narrow(2, at, count).unwrap();
                let alone = by.rotate(&of(&x).contiguous().unwrap(), None, 0, count).unwrap();
                let bits = |x: &Var| x.contiguous().unwrap().tensor().to_vec::<f64>().unwrap();
                assert_eq!(bits(&alone), bits(&of(&packed)), "row {row}, {count} positions from {at} on");
                at += count;
            }
        }
        let dynamic = rotary(RopeScaling::Dynamic { factor: 2.0, context: 3 });
        let refused = dynamic.rotate(&x, Some(&documents), 0, 8).map(drop).unwrap_err().to_string();
        assert!(refused.contains("got rows of 8 positions that hold several documents"), "{refused}");
    }
}
