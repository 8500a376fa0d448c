//! [`Runner`]: who runs the operations that tracking says may run.

use std::sync::Arc;

use super::core::Core;
use super::node::Node;
use super::op::Lane;

/// The part of an engine that has threads, or none.
pub(crate) trait Runner: Send + Sync {
    /// What it tells about what it ran.
    fn core(&self) -> &Core;
    /// The number of a lane, which is 0 for the first, or a list of those there are.
    fn lane(&self, lane: Lane) -> Result<u32, String>;
    /// Runs an operation that holds all it uses, now or later.
    fn start(&self, node: Arc<Node>);
}
