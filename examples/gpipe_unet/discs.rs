//! Something to learn: noisy images with a disc each, and where it is.

use phalanx::{Device, Var};

use crate::Result;
use crate::unet::{INPUTS, OUTPUTS};

const SIDE: usize = 32;

/// Images `[count, 3, 32, 32]`, and 1 for each pixel of a disc `[count, 1, 32, 32]`; a function of the step.
pub fn batch(step: u64, count: usize, device: Device) -> Result<(Var, Var)> {
    let mut noise = Noise(step.wrapping_mul(0x9e37_79b9_7f4a_7c15).wrapping_add(1));
    let (mut images, mut discs) = (Vec::new(), Vec::new());
    for _ in 0..count {
        let [x, y, radius] = [11.0, 11.0, 4.0].map(|span: f32| span * (1.0 + noise.next()));
        let inside = |pixel: usize| {
            let (dx, dy) = ((pixel % SIDE) as f32 - x, (pixel / SIDE) as f32 - y);
            f32::from(u8::from(dx * dx + dy * dy < radius * radius))
        };
        let disc: Vec<f32> = (0..SIDE * SIDE).map(inside).collect();
        (0..INPUTS).for_each(|_| images.extend(disc.iter().map(|d| 0.5 * d + noise.next())));
        discs.extend(disc);
    }
    let shape = |channels| [count, channels, SIDE, SIDE];
    let images = Var::from_slice(&images, &shape(INPUTS), device)?;
    Ok((images, Var::from_slice(&discs, &shape(OUTPUTS), device)?))
}

/// Uniform numbers in [0, 1): a linear congruence.
struct Noise(u64);

impl Noise {
    fn next(&mut self) -> f32 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (self.0 >> 40) as f32 / (1u64 << 24) as f32
    }
}
