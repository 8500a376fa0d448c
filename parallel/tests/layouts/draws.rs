//! Cases at random, the same in every run.

/// Numbers that look random, by a seed.
pub struct Draws(pub u64);

impl Draws {
    /// One below `n`. Source: Steele et al.: Fast splittable pseudorandom number generators (2014).
    pub fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) % n as u64) as usize
    }
}
