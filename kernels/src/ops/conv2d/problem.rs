//! What is to be computed: a convolution ([`Correlation`]) or the gradient of a weight ([`WeightGrad`]), and the parts
//! of them that threads take. The ways to compute them (panels in `unit.rs`, images in `images.rs`, few channels in
//! `thin.rs` and `channels.rs`) read these; `cpu.rs` and `weight.rs` choose among the ways.

use std::ops::Range;

use phalanx_tensor::{Element, Tensor};

use super::window::Axis;
use crate::gemm::GemmElem;
use crate::scratch::Scratch;
use crate::simd::Float;

/// Points that fill panels well.
pub(super) const POINTS_MIN: usize = 512;
/// Elements of a window at most, unless a channel has more: it stays in the second-level cache, beside a band's gradients.
pub(super) const WEIGHT_WINDOW_MAX: usize = 1 << 16;

/// The type of a product's sums.
pub(crate) trait Summed: Float + Element + Scratch + GemmElem<Acc = Self> {}

impl Summed for f32 {}
impl Summed for f64 {}

/// A convolution, plain or transposed. The source is contiguous, `[images, groups * channels_in, h, w]`.
pub(super) struct Correlation<'a> {
    pub(super) op: &'static str,
    pub(super) source: &'a Tensor,
    pub(super) weight: &'a Tensor,
    /// The weight's strides by group, output channel, input channel, row and column.
    pub(super) weight_strides: [usize; 5],
    pub(super) bias: Option<&'a Tensor>,
    /// Rows and columns of each part of the output.
    pub(super) passes: Vec<[Axis; 2]>,
    pub(super) groups: usize,
    /// Channels of one group.
    pub(super) channels_in: usize,
    pub(super) channels_out: usize,
}

/// A task's part of the output.
pub(super) struct OutputPart {
    pub(super) images: Range<usize>,
    pub(super) channels: Range<usize>,
}

/// Contiguous `image` `[n, groups * channels_in, h, w]` and `grid` `[n, groups * channels_out, ..]`.
pub(super) struct WeightGrad<'a> {
    pub(super) op: &'static str,
    pub(super) image: &'a Tensor,
    pub(super) grid: &'a Tensor,
    pub(super) axes: [Axis; 2],
    pub(super) groups: usize,
    pub(super) channels_in: usize,
    pub(super) channels_out: usize,
}

/// Points summed in one chain: these rows of these images. Fixed by the shapes alone.
pub(super) struct Band {
    pub(super) images: Range<usize>,
    pub(super) rows: Range<usize>,
}
