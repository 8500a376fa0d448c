//! [`EngineConfig`]: which lanes a threaded engine has, and how many threads each.

use phalanx_tensor::Device;

use super::op::Lane;

/// Lanes and their threads.
///
/// ```
/// # use phalanx_parallel::engine::{Engine, EngineConfig, Lane};
/// # use phalanx_tensor::Device;
/// let config = EngineConfig::new().lane(Device::Cpu(0), 2).lane(Device::Cpu(1), 2).lane(Lane::Priority, 1);
/// let engine = Engine::threaded(&config)?;
/// # Ok::<(), phalanx_parallel::engine::Error>(())
/// ```
#[derive(Clone, Debug, Default)]
pub struct EngineConfig {
    lanes: Vec<(Lane, usize)>,
}

impl EngineConfig {
    /// No lanes yet; an engine without any gets a thread for [`Device::CPU`].
    pub fn new() -> EngineConfig {
        EngineConfig::default()
    }

    /// Gives `lane` this many threads, at least one.
    pub fn lane(mut self, lane: impl Into<Lane>, threads: usize) -> EngineConfig {
        let (lane, threads) = (lane.into(), threads.max(1));
        match self.lanes.iter_mut().find(|(l, _)| *l == lane) {
            Some(known) => known.1 = threads,
            None => self.lanes.push((lane, threads)),
        }
        self
    }

    /// The lanes, at least one.
    pub(crate) fn lanes(&self) -> Vec<(Lane, usize)> {
        if self.lanes.is_empty() { vec![(Device::CPU.into(), 1)] } else { self.lanes.clone() }
    }
}
