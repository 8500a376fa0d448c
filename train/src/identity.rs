//! The identity of a run: settings and a fingerprint of the data, by which a checkpoint of another run is refused.

use std::collections::BTreeMap;

use phalanx_tensor::Tensor;

use crate::Config;
use crate::data::{Data, Dataset};

/// The settings that change a run's numbers by more than the order of additions, which depends on the layout.
pub(crate) fn identity(config: &Config) -> BTreeMap<String, String> {
    let pairs = [
        ("batch", config.batch.to_string()),
        ("seed", config.seed.to_string()),
        ("dtype", config.dtype.to_string()),
        ("grad-dtype", config.grad_dtype().to_string()),
    ];
    pairs.into_iter().map(|(name, value)| (name.to_string(), value)).collect()
}

/// A fingerprint of the data: the number of a data set's items, and a hash of the first samples.
pub(crate) fn fingerprint(data: &Data, items: Option<&dyn Dataset>) -> String {
    let bytes = |tensor: &Tensor| format!("{} {:?} {:?}", tensor.dtype(), tensor.shape(), tensor.to_bytes());
    // A sample that cannot be read is an error of its step, not of the fingerprint.
    let first = (0..2).filter_map(|number| data.samples.sample(number).ok()).flatten();
    let samples: String = first.map(|tensor| bytes(&tensor)).collect();
    let hash = format!("{:016x}", digest(samples.as_bytes()));
    items.map_or_else(|| hash.clone(), |items| format!("{} items, {hash}", items.len()))
}

/// A 64-bit fingerprint of some bytes: their hash FNV-1a.
pub fn digest(bytes: &[u8]) -> u64 {
    phalanx_nn::fnv1a(bytes.iter().copied())
}
