//! The inputs that every measured system gets: one counter-based generator, splitmix64 (Steele, Lea, Flood: Fast
//! splittable pseudorandom number generators, OOPSLA 2014), and windows of a text drawn with it.

use std::path::Path;

use phalanx::{Device, Tensor};

/// Output number `n` (from 0) of the stream that begins at `seed`.
pub fn hash64(seed: u64, n: u64) -> u64 {
    let mut z = seed.wrapping_add((n + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15));
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

/// Uniform in `[-bound, bound)`, 24 random bits each.
pub fn uniform(seed: u64, shape: &[usize], bound: f32) -> phalanx::tensor::Result<Tensor> {
    let unit = |n| (hash64(seed, n) >> 40) as f32 * 2f32.powi(-23) - 1.0;
    let values: Vec<f32> = (0..shape.iter().product::<usize>() as u64).map(|n| unit(n) * bound).collect();
    Tensor::from_slice(&values, shape, Device::CPU)
}

/// Uniform ids below `end`.
pub fn ids(seed: u64, len: usize, end: u64) -> phalanx::tensor::Result<Tensor> {
    let ids: Vec<i64> = (0..len as u64).map(|n| (hash64(seed, n) % end) as i64).collect();
    Tensor::from_slice(&ids, &[len], Device::CPU)
}

/// Random contiguous windows of a file's bytes, with the byte that follows as the target.
pub struct Windows {
    bytes: Vec<u8>,
    batch: usize,
    context: usize,
}

impl Windows {
    pub fn open(path: &Path, batch: usize, context: usize) -> Result<Windows, String> {
        let bytes = std::fs::read(path).map_err(|e| format!("{}: {e}", path.display()))?;
        if bytes.len() <= context {
            return Err(format!(
                "{}: {} bytes, wanted more than the context {context}",
                path.display(),
                bytes.len()
            ));
        }
        Ok(Windows { bytes, batch, context })
    }

    /// Inputs and targets of step `step`, each `[batch, context]`.
    pub fn batch(&self, step: usize) -> phalanx::tensor::Result<(Tensor, Tensor)> {
        let (mut x, mut y) = (Vec::new(), Vec::new());
        for row in 0..self.batch {
            let span = (self.bytes.len() - self.context) as u64;
            let at = (hash64(1337, (step * self.batch + row) as u64) % span) as usize;
            let window = &self.bytes[at..=at + self.context];
            x.extend(window[..self.context].iter().map(|&b| i64::from(b)));
            y.extend(window[1..].iter().map(|&b| i64::from(b)));
        }
        let tensor = |ids: &[i64]| Tensor::from_slice(ids, &[self.batch, self.context], Device::CPU);
        Ok((tensor(&x)?, tensor(&y)?))
    }
}
