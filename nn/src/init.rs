//! Initial values, drawn by place in the whole tensor.

use phalanx_kernels::{self as kernels, random};
use phalanx_tensor::{DType, Device, Stream4, Tensor, Window};

use crate::Result;

/// How a parameter's first values are drawn. Fans are those of the whole tensor: of a weight `[out, in, ..kernel]`,
/// fan in is `in` and fan out `out`, each times the kernel's elements.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Init {
    /// The same value everywhere.
    Constant(f64),
    /// Uniform between two bounds.
    Uniform {
        /// The lower bound.
        low: f64,
        /// The upper bound.
        high: f64,
    },
    /// Normal.
    Normal {
        /// The mean.
        mean: f64,
        /// The standard deviation.
        std: f64,
    },
    /// Normal, cut off at two standard deviations.
    TruncatedNormal {
        /// The mean.
        mean: f64,
        /// The standard deviation before the cut.
        std: f64,
    },
    /// Uniform with variance `gain² / fan_in`. Source: He et al.: Delving deep into rectifiers (2015).
    KaimingUniform {
        /// The gain of the nonlinearity: sqrt 2 for relu.
        gain: f64,
    },
    /// Normal with variance `gain² / fan_in`.
    KaimingNormal {
        /// The gain of the nonlinearity: sqrt 2 for relu.
        gain: f64,
    },
    /// Uniform with variance `2 gain² / (fan_in + fan_out)`. Source: Glorot and Bengio (2010).
    XavierUniform {
        /// The gain of the nonlinearity.
        gain: f64,
    },
    /// Normal with variance `2 gain² / (fan_in + fan_out)`.
    XavierNormal {
        /// The gain of the nonlinearity.
        gain: f64,
    },
}

impl Init {
    /// Zeros.
    pub const ZEROS: Init = Init::Constant(0.0);
    /// Ones.
    pub const ONES: Init = Init::Constant(1.0);

    /// Uniform between `-bound` and `bound`.
    pub fn within(bound: f64) -> Init {
        Init::Uniform { low: -bound, high: bound }
    }

    /// What PyTorch gives layers with weights `[out, in, ..]` and their biases: uniform within `1 / sqrt(fan_in)`.
    pub fn layer(fan_in: usize) -> Init {
        Init::within((fan_in.max(1) as f64).sqrt().recip())
    }

    /// The draws of the part of shape `shape` that lies at `window` in the whole.
    ///
    /// # Errors
    /// If it cannot be allocated.
    pub fn sample(
        self,
        stream: Stream4,
        shape: &[usize],
        window: &Window,
        dtype: DType,
        device: Device,
    ) -> Result<Tensor> {
        match self {
            Init::Constant(value) => Ok(kernels::full(shape, value, dtype, device)?),
            Init::Uniform { low, high } => {
                Ok(random::uniform(shape, window, stream, [low, high], dtype, device)?)
            }
            Init::Normal { mean, std } => {
                Ok(random::normal(shape, window, stream, [mean, std], dtype, device)?)
            }
            Init::TruncatedNormal { mean, std } => {
                Ok(random::truncated_normal(shape, window, stream, [mean, std], dtype, device)?)
            }
            fanned => fanned.for_shape(&window.global).sample(stream, shape, window, dtype, device),
        }
    }

    /// The same draws for a weight of this shape, without asking for its fans: for a whole that its cut sees in another
    /// shape.
    #[must_use]
    pub fn for_shape(self, shape: &[usize]) -> Init {
        let (fan_in, fan_out) = fans(shape);
        let uniform = |variance: f64| Init::within((3.0 * variance).sqrt());
        let normal = |variance: f64| Init::Normal { mean: 0.0, std: variance.sqrt() };
        let both = 2.0 / (fan_in + fan_out);
        match self {
            Init::KaimingUniform { gain } => uniform(gain * gain / fan_in),
            Init::KaimingNormal { gain } => normal(gain * gain / fan_in),
            Init::XavierUniform { gain } => uniform(gain * gain * both),
            Init::XavierNormal { gain } => normal(gain * gain * both),
            plain => plain,
        }
    }
}

/// Fan in and fan out of a weight `[out, in, ..kernel]`.
fn fans(shape: &[usize]) -> (f64, f64) {
    let kernel: usize = shape.iter().skip(2).product();
    let size = |d: usize| (shape.get(d).copied().unwrap_or(1) * kernel).max(1) as f64;
    (size(1), size(0))
}
