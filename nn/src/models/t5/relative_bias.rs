//! [`RelativeBias`]: a number for each head and bucket of distances, which is added to attention's scores.

use phalanx_autograd::Var;
use phalanx_tensor::{Dims, Window};

use super::T5Config;
use crate::{Init, LayerFactory, Parameter, Result, Scope, Shard, parameters};

/// A table `[buckets, this rank's heads]`.
pub(super) struct RelativeBias {
    weight: Parameter,
    buckets: usize,
    max_distance: usize,
    /// Whether keys before the query and after it have buckets of their own. Otherwise those after it have the bucket 0.
    is_bidirectional: bool,
}

parameters!(RelativeBias { weight });

impl RelativeBias {
    pub(super) fn new(
        config: &T5Config,
        layers: &impl LayerFactory,
        scope: &Scope,
        is_bidirectional: bool,
    ) -> Result<RelativeBias> {
        let T5Config { buckets, max_distance, heads, width, .. } = *config;
        let here = layers.heads(heads)?;
        let window = Window {
            global: Dims::from_slice(&[buckets, heads]),
            offset: Dims::from_slice(&[0, here.start]),
        };
        let shape = [buckets, here.len()];
        let part = Shard { window, extent: Dims::from_slice(&shape) };
        let init = Init::Normal { mean: 0.0, std: (width as f64).powf(-0.5) };
        let weight = scope.shard("weight", &shape, part, init)?;
        Ok(RelativeBias { weight, buckets, max_distance, is_bidirectional })
    }

    /// `[heads, queries, keys]`
    pub(super) fn run(&self, queries: usize, keys: usize) -> Result<Var> {
        let distances = (0..queries as i64).flat_map(|q| (0..keys as i64).map(move |k| k - q));
        let rows: Vec<i64> = distances.map(|distance| self.bucket(distance)).collect();
        let rows = Var::from_slice(&rows, &[rows.len()], self.weight.device())?;
        let bias = self.weight.var().index_select(0, &rows)?;
        let heads = bias.shape()[1];
        Ok(bias.reshape_to(&[queries, keys, heads])?.permute(&[2, 0, 1])?)
    }

    /// The bucket of a key that lies `distance` positions after the query. Half of the buckets are for one distance each, the others grow
    /// with the logarithm, up to `max_distance`. Computed in f32, as the models were trained.
    /// Source: Raffel et al.: Exploring the limits of transfer learning (2020), section 2.1; its code.
    fn bucket(&self, distance: i64) -> i64 {
        let (count, first, far) = match self.is_bidirectional {
            true => {
                let half = self.buckets as i64 / 2;
                (half, if distance > 0 { half } else { 0 }, distance.abs())
            }
            false => (self.buckets as i64, 0, (-distance).max(0)),
        };
        let exact = count / 2;
        if far < exact {
            return first + far;
        }
        let range = (self.max_distance as f64 / exact as f64).ln() as f32;
        let grown = (far as f32 / exact as f32).ln() / range * (count - exact) as f32;
        first + (exact + grown as i64).min(count - 1)
    }
}

#[cfg(test)]
mod tests {
    use phalanx_tensor::{DType, Device};

    use super::*;
    use crate::OneDevice;

    #[test]
    fn distances_have_the_buckets_of_t5() {
        let config = T5Config::new(10, 4, 1, 2, 8);
        let bucket = |is_bidirectional: bool, distance: i64| {
            let scope = Scope::new(1, DType::F32, Device::CPU);
            RelativeBias::new(&config, &OneDevice, &scope, is_bidirectional).unwrap().bucket(distance)
        };
        // Both directions: 16 buckets each, of which 8 are exact; then up to 128 in steps of 16^(1/8).
        for (distance, wanted) in [
            (0, 0),
            (-1, 1),
            (-7, 7),
            (-8, 8),
            (-11, 8),
            (-12, 9),
            (-127, 15),
            (-5000, 15),
            (1, 17),
            (9, 24),
            (200, 31),
        ] {
            assert_eq!(bucket(true, distance), wanted, "{distance}");
        }
        // One direction: 32 buckets, of which 16 are exact; later keys are hidden.
        for (distance, wanted) in [(5, 0), (0, 0), (-15, 15), (-16, 16), (-19, 17), (-127, 31), (-128, 31)] {
            assert_eq!(bucket(false, distance), wanted, "{distance}");
        }
    }
}
