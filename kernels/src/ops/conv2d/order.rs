//! How the steps of a convolution's sums follow each other. Kernel elements ascend channel by channel; those of bf16 in
//! pairs of channels, for a dot product takes two at once: the first of a pair, then the second, at each kernel element.
//! Where the CPU has no such product the order is the same. In the gradient of the weight it is pairs of images that
//! alternate, at each point.

use crate::gemm::{GemmElem, Place, steps_in_place};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Order {
    /// Channels that alternate. A last one that lacks a partner has zeros for it.
    pub(super) together: usize,
    /// Of how many channels a lane holds an element.
    pub(super) in_lane: usize,
}

impl Order {
    /// Channel by channel.
    pub(super) const PLAIN: Order = Order { together: 1, in_lane: 1 };

    /// That of products of `T`.
    pub(super) fn of<T: GemmElem>(channels: usize) -> Order {
        let together = if T::Place::IN_PANELS { channels.clamp(1, 2) } else { 1 };
        Order { together, in_lane: steps_in_place::<T>().min(together) }
    }

    /// Lanes of a kernel element, one after the other.
    pub(super) fn places(self) -> usize {
        self.together / self.in_lane
    }

    /// Groups of channels that alternate.
    pub(super) fn groups(self, channels: usize) -> usize {
        channels.div_ceil(self.together)
    }

    /// Planes of lanes that so many channels fill.
    pub(super) fn planes(self, channels: usize) -> usize {
        self.groups(channels) * self.places()
    }
}
