//! [`Serial`]: everything on the caller, one operation after another. For debugging, and to hold the threads against.

use std::sync::Arc;

use smallvec::smallvec;

use super::core::Core;
use super::levels::Levels;
use super::node::Node;
use super::op::Lane;
use super::runner::Runner;
use super::spare;
use super::sync::{Mutex, lock};
use super::track::Ready;

/// Runs an operation before `push` returns; one that an operation pushes runs after that operation.
pub(crate) struct Serial {
    core: Core,
    ready: Mutex<Levels<Arc<Node>>>,
    /// Held by the thread that runs operations.
    driver: Mutex<()>,
}

impl Serial {
    pub(crate) fn new(id: u64) -> Serial {
        Serial { core: Core::new(id, 1), ready: Mutex::new(Levels::new()), driver: Mutex::new(()) }
    }

    /// Adds what may run and takes the first of all.
    fn exchange(&self, ready: &mut Ready) -> Option<Arc<Node>> {
        let mut levels = lock(&self.ready);
        ready.drain(..).for_each(|node| levels.push(node.priority, node));
        levels.pop()
    }
}

impl Runner for Serial {
    fn core(&self) -> &Core {
        &self.core
    }

    fn lane(&self, _: Lane) -> Result<u32, String> {
        Ok(0)
    }

    fn start(&self, node: Arc<Node>) {
        if self.core.inside() {
            // Whoever runs the operation that pushed this comes to it.
            return lock(&self.ready).push(node.priority, node);
        }
        let _driver = lock(&self.driver);
        let mut ready: Ready = smallvec![node];
        while let Some(node) = self.exchange(&mut ready) {
            self.core.run(&node, 0, &mut ready);
            self.core.spare.keep(spare::empty(node));
        }
        self.core.progress.idle();
    }
}
