//! Counter-based random numbers: Philox4x32-10.
//!
//! A draw depends on the run's seed, the step, the site that draws and the element's position in the *global*
//! tensor, and on nothing else: every device, thread count, sharding and repetition draws the same numbers.
//! Source: Salmon, Moraes, Dror, Shaw: Parallel random numbers: as easy as 1, 2, 3 (SC 2011).

/// The key that all draws of a step share: the run's seed and the step's number.
///
/// # How a random draw is made
///
/// A layer's draw (a dropout mask) is a pure function of five numbers. No generator is advanced, so any thread, device or
/// rank can make any draw by itself, again, and in any order.
///
/// | number | where it comes from |
/// |---|---|
/// | seed | [`Context::rng`](crate::Context::rng): 0, unless [`Context::manual_seed`](crate::Context::manual_seed) or a guard sets it |
/// | step | [`Context::rng`](crate::Context::rng): by itself the number of backward passes that this thread has ended, or what a guard sets |
/// | site | the layer: its path in the model and its scope's seed; while steps are counted, also how often it drew in this step |
/// | row | [`Context::batch_offset`](crate::Context::batch_offset), so that a micro-batch draws its rows of the whole batch's mask |
/// | element | the place in the whole tensor, however it is cut over ranks |
///
/// - **In a plain loop** (forward, backward, step) there is nothing to set. Each backward pass ends a step, so the next forward
///   pass draws anew. A layer that is called twice before that draws anew each time.
/// - **Micro-batches are one pass.** A pipeline counts one step for all of its backward passes, and so does whatever runs while
///   [`Context::one_pass`](crate::Context::one_pass)'s guard lives. Set [`Context::batch_offset`](crate::Context::batch_offset) for each micro-batch, and they draw what the
///   whole batch would.
/// - **A trainer that can be resumed sets the step:** `Context::with(|c| c.rng = RngKey { seed, step })`. Nothing is counted then, so
///   the same step draws the same numbers in every run, also after a resume. A layer that is called twice in such a step
///   draws the same mask twice; make it two layers.
/// - **Recomputation** runs in the context of the first run, and counts its draws from the same number on.
/// - **A captured step** on a GPU reads the step's number from the device's memory, so each launch draws anew.
/// - **Evaluation draws nothing** (the mode of the crate autograd).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RngKey {
    /// The run's seed.
    pub seed: u64,
    /// The training step. Its highest bit is set in steps that are counted ([`RngKey::is_counted`]).
    pub step: u64,
}

impl RngKey {
    /// The key that a thread begins with: seed 0, and steps that count themselves.
    pub const COUNTED: RngKey = RngKey { seed: 0, step: 1 << 63 };

    /// Whether the step is the number of backward passes so far, rather than one that was set.
    pub fn is_counted(self) -> bool {
        self.step & RngKey::COUNTED.step != 0
    }

    /// The step number after the next backward pass, where steps count themselves.
    pub(crate) fn next_step(self) -> u64 {
        self.step.wrapping_add(1) | RngKey::COUNTED.step
    }

    /// The stream of draws of one site (a layer's dropout, a parameter's initial values).
    pub fn site(self, site: u64) -> PhiloxStream {
        let counter = [lo(self.step), hi(self.step), lo(site), hi(site)];
        let [k0, k1, ..] = philox(counter, [lo(self.seed), hi(self.seed)]);
        PhiloxStream { key: [k0, k1], of: self, site }
    }
}

/// The draws of one site: blocks of four 32-bit words, by number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PhiloxStream {
    key: [u32; 2],
    of: RngKey,
    site: u64,
}

impl PhiloxStream {
    /// Words `4 * block .. 4 * block + 4` of lane `lane`. Draws that need more than one word an element take the
    /// further ones from further lanes.
    pub fn block(&self, block: u64, lane: u64) -> [u32; 4] {
        philox([lo(block), hi(block), lo(lane), hi(lane)], self.key)
    }

    /// The key after the site was mixed in, for kernels that run the generator themselves.
    pub fn key(&self) -> [u32; 2] {
        self.key
    }

    /// The key that the step's draws share.
    pub fn of(&self) -> RngKey {
        self.of
    }

    /// The site.
    pub fn site(&self) -> u64 {
        self.site
    }
}

/// A shard's place in the whole tensor: the draws are those of the whole.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Window {
    /// The whole tensor's shape.
    pub global: crate::Dims,
    /// Where the shard begins in it.
    pub offset: crate::Dims,
}

impl Window {
    /// The window that is the whole.
    pub fn whole(shape: &[usize]) -> Window {
        Window { global: crate::Dims::from_slice(shape), offset: crate::Dims::from_elem(0, shape.len()) }
    }
}

fn lo(x: u64) -> u32 {
    x as u32
}

fn hi(x: u64) -> u32 {
    (x >> 32) as u32
}

/// Philox4x32 with ten rounds: four words from a 128-bit counter and a 64-bit key.
pub(crate) fn philox(mut counter: [u32; 4], mut key: [u32; 2]) -> [u32; 4] {
    for _ in 0..10 {
        let a = u64::from(counter[0]) * 0xD251_1F53;
        let b = u64::from(counter[2]) * 0xCD9E_8D57;
        counter = [hi(b) ^ counter[1] ^ key[0], lo(b), hi(a) ^ counter[3] ^ key[1], lo(a)];
        key = [key[0].wrapping_add(0x9E37_79B9), key[1].wrapping_add(0xBB67_AE85)];
    }
    counter
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The Random123 library's known-answer tests for philox4x32-10.
    #[test]
    fn known_answers() {
        assert_eq!(philox([0; 4], [0; 2]), [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]);
        assert_eq!(philox([!0; 4], [!0; 2]), [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]);
        assert_eq!(
            philox([0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344], [0xa409_3822, 0x299f_31d0]),
            [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1]
        );
    }
}
