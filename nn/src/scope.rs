//! [`Scope`]: the path at which a module is made, with the run's seed, dtype and device; and [`Init`]: initial values, drawn by their
//! position in the whole tensor.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use phalanx_kernels::{self as kernels, random};
use phalanx_tensor::{Category, Context, DType, Device, PhiloxStream, RngKey, Tensor, Window};

use crate::{Parameter, Result, Shard};

/// Why a deferred parameter has no values.
pub(crate) const DEFERRED: &str = "the values of this parameter are deferred: give the model to `Zero` or `Ddp`, or call \
    `materialize` of the parameter before its values are read or written";

/// The context in which a layer is built. Its path gives each parameter its global name and each random draw its site. So initial
/// values and dropout masks depend neither on the other layers nor on the order of construction nor on the device.
///
/// ```
/// use phalanx_nn::{Scope, tensor::{DType, Device}};
/// let scope = Scope::new(1, DType::F32, Device::CPU);
/// assert_eq!(scope.child("h").child(0).name("weight"), "h.0.weight");
/// ```
#[derive(Clone, Debug)]
pub struct Scope {
    path: String,
    seed: u64,
    dtype: DType,
    device: Device,
    /// Whether parameters are made without values.
    deferred: bool,
    /// How many replicas' rows parameters compute with, each at a site of its own; `None` for one site.
    replicas: Option<usize>,
    /// Whether names follow the path without a dot.
    glued: bool,
    /// The number of sites given out in this scope.
    sites: Arc<AtomicU64>,
}

impl Scope {
    /// The root, with an empty path.
    pub fn new(seed: u64, dtype: DType, device: Device) -> Scope {
        let path = String::new();
        Scope {
            path,
            seed,
            dtype,
            device,
            deferred: false,
            replicas: None,
            glued: false,
            sites: Arc::default(),
        }
    }

    /// The scope of a part of this module.
    pub fn child(&self, name: impl std::fmt::Display) -> Scope {
        Scope { path: self.name(name), glued: false, sites: Arc::default(), ..self.clone() }
    }

    /// The scope of a layer whose parameters' names have this one in front of them, without a dot: `in_proj_` makes `in_proj_weight`.
    pub(crate) fn prefix(&self, name: &str) -> Scope {
        Scope { glued: true, ..self.child(name) }
    }

    /// The same scope with another dtype.
    pub fn with_dtype(&self, dtype: DType) -> Scope {
        Scope { dtype, ..self.clone() }
    }

    /// The same scope, whose parameters are made without values (torch: a module on the `meta` device and `param_init_fn`). `Zero` draws
    /// the values of one unit after the other and keeps its shards, so that no rank ever holds a model that is larger than its memory;
    /// elsewhere [`Parameter::materialize`] draws them. They are the values that the parameters would have been made with. A module that
    /// writes values of its own into a parameter calls `materialize` first; `Zero` then takes rank 0's values.
    ///
    /// ```
    /// use phalanx_nn::{LinearConfig, Scope, tensor::{DType, Device}};
    /// let scope = Scope::new(1, DType::F32, Device::CPU);
    /// let weight = LinearConfig::new(8, 4).init(&scope.deferred())?.weight;
    /// assert!(weight.tensor().to_vec::<f32>().is_err());
    /// weight.materialize()?;
    /// assert_eq!(weight.tensor().to_vec::<f32>()?, LinearConfig::new(8, 4).init(&scope)?.weight.tensor().to_vec::<f32>()?);
    /// # Ok::<(), phalanx_nn::Error>(())
    /// ```
    #[must_use]
    pub fn deferred(&self) -> Scope {
        Scope { deferred: true, ..self.clone() }
    }

    /// The same scope, whose parameters have a site for each of so many replicas ([`Parameter::with_replica_sites`]).
    #[must_use]
    pub fn with_replica_sites(&self, replicas: usize) -> Scope {
        Scope { replicas: Some(replicas), ..self.clone() }
    }

    /// The path of the part `name`.
    pub fn name(&self, name: impl std::fmt::Display) -> String {
        if self.glued { format!("{}{name}", self.path) } else { join(&self.path, name) }
    }

    /// The path of this scope.
    pub fn path(&self) -> &str {
        &self.path
    }

    /// The run's seed.
    pub fn seed(&self) -> u64 {
        self.seed
    }

    /// The parameters' dtype.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// The parameters' device.
    pub fn device(&self) -> Device {
        self.device
    }

    /// The number that keeps a layer's random draws apart from all others, their site (not a parameter's): a hash
    /// of the path and the seed, so it is the same in every run. Each call returns another one, so two layers of
    /// one scope draw different numbers.
    pub fn site(&self) -> u64 {
        let before = self.sites.fetch_add(1, Ordering::Relaxed);
        fnv1a(self.path.bytes().chain(self.seed.to_le_bytes()).chain(before.to_le_bytes()))
    }

    /// A parameter with initial values.
    ///
    /// # Errors
    /// If it cannot be allocated.
    pub fn parameter(&self, name: &str, shape: &[usize], init: Init) -> Result<Parameter> {
        self.shard(name, shape, Shard::whole(shape), init)
    }

    /// A part of a parameter, with that part of the initial values, stored in `shape`.
    ///
    /// # Errors
    /// If it cannot be allocated, or `shape` has another number of elements than the part.
    pub fn shard(&self, name: &str, shape: &[usize], part: Shard, init: Init) -> Result<Parameter> {
        let name = self.name(name);
        let initial = Initial { init, draws: self.draws(&name), zero_row: None };
        let parameter = if self.deferred {
            let values = Tensor::withheld(shape, self.dtype, self.device, DEFERRED)?;
            Parameter::shard(name, values, part)?.with_initial(initial)?
        } else {
            let values = initial.values(&part, self.dtype, self.device)?;
            Parameter::shard(name, values.with_shape(shape)?, part)?
        };
        match self.replicas {
            Some(replicas) => parameter.with_replica_sites(replicas),
            None => Ok(parameter),
        }
    }

    /// The random numbers of the initial values of the parameter with that global name.
    fn draws(&self, name: &str) -> PhiloxStream {
        RngKey { seed: self.seed, step: 0 }.site(fnv1a(name.bytes()))
    }
}

/// How the values of a parameter are drawn.
#[derive(Clone, Copy)]
pub(crate) struct Initial {
    init: Init,
    draws: PhiloxStream,
    /// A row of the part that is 0 in place of what is drawn.
    pub(crate) zero_row: Option<usize>,
}

impl Initial {
    /// The values of a part, in the part's shape.
    pub(crate) fn values(self, part: &Shard, dtype: DType, device: Device) -> Result<Tensor> {
        let _category = Context::with(|c| c.category = Category::Parameters);
        let values = self.init.sample(self.draws, &part.extent, &part.window, dtype, device)?;
        self.zero_row.map_or(Ok(()), |row| kernels::fill_(&mut values.narrow(0, row, 1)?, 0.0))?;
        Ok(values)
    }
}

/// `path.name`
pub(crate) fn join(path: &str, name: impl std::fmt::Display) -> String {
    if path.is_empty() { name.to_string() } else { format!("{path}.{name}") }
}

/// The 64-bit hash FNV-1a (Fowler, Noll, Vo).
pub fn fnv1a(bytes: impl IntoIterator<Item = u8>) -> u64 {
    let step = |hash: u64, byte| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3);
    bytes.into_iter().fold(0xcbf2_9ce4_8422_2325, step)
}

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

    /// PyTorch's default for layers with weights `[out, in, ..]` and their biases: uniform within `1 / sqrt(fan_in)`.
    pub fn layer(fan_in: usize) -> Init {
        Init::within((fan_in.max(1) as f64).sqrt().recip())
    }

    /// The values of the part of shape `shape` at `window` in the whole.
    ///
    /// # Errors
    /// If it cannot be allocated.
    pub fn sample(
        self,
        stream: PhiloxStream,
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

    /// The same distribution with the fans of this shape filled in. It is for parameters whose cut is given in another shape than the
    /// tensor's.
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
