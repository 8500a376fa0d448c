//! Parameters with a site for each replica: those of an expert that takes tokens of several replicas of the batch. Each replica's tokens give
//! gradients of their own, which are added to each other as data parallelism adds replicas: after the micro-batches, the first replica first.

use std::cell::Cell;
use std::sync::atomic::Ordering;

use super::{Parameter, REPLICA_SITES};
use crate::Result;

thread_local! {
    /// The replica whose rows this thread computes.
    static REPLICA: Cell<usize> = const { Cell::new(0) };
}

impl Parameter {
    /// The same parameter with a site for each of `replicas` replicas of the batch. To be called before it is used.
    ///
    /// # Errors
    /// If `replicas` is 0.
    pub fn with_replica_sites(self, replicas: usize) -> Result<Parameter> {
        let parameter = self.with_sites(replicas)?;
        parameter.0.flags.fetch_or(REPLICA_SITES, Ordering::Relaxed);
        Ok(parameter)
    }

    /// Whether each of its sites is for the rows of one replica of the batch, so that their gradients are added as those of replicas are.
    pub fn has_replica_sites(&self) -> bool {
        self.flags() & REPLICA_SITES != 0
    }

    pub(super) fn current_site(&self) -> usize {
        if self.has_replica_sites() { REPLICA.get() } else { 0 }
    }
}

/// Runs `work` with the sites of one replica: [`Parameter::var`] of a parameter with a site for each replica is its site.
pub(crate) fn in_replica<T>(replica: usize, work: impl FnOnce() -> T) -> T {
    let _back = Back(REPLICA.replace(replica));
    work()
}

/// Returns to the replica before when it is dropped, after a panic too.
struct Back(usize);

impl Drop for Back {
    fn drop(&mut self) {
        REPLICA.set(self.0);
    }
}
