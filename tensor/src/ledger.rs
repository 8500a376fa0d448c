//! The memory ledger: what a device's memory is used for, in requested bytes, now and at peak.

use std::fmt;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::time::Instant;

use crate::sync::lock;

/// The use of a tensor's bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Category {
    /// Weights.
    Parameters,
    /// Gradients that optimizers read.
    Gradients,
    /// Moments, master weights.
    OptimizerState,
    /// Everything that a forward or backward pass makes.
    Activations,
    /// Persistent tensors that are no parameters: running statistics, data.
    Buffers,
}

impl Category {
    /// Every category.
    pub const ALL: [Category; 5] = [
        Category::Parameters,
        Category::Gradients,
        Category::OptimizerState,
        Category::Activations,
        Category::Buffers,
    ];

    /// The name in words: `parameters`, `optimizer state`, ...
    pub const fn name(self) -> &'static str {
        match self {
            Category::Parameters => "parameters",
            Category::Gradients => "gradients",
            Category::OptimizerState => "optimizer state",
            Category::Activations => "activations",
            Category::Buffers => "buffers",
        }
    }

    pub(crate) fn from_u8(tag: u8) -> Category {
        Category::ALL[tag as usize]
    }
}

/// Bytes now, and the most at one time.
#[derive(Debug, Default)]
struct Gauge {
    now: AtomicUsize,
    peak: AtomicUsize,
}

impl Gauge {
    fn add(&self, bytes: usize) {
        let now = self.now.fetch_add(bytes, Relaxed) + bytes;
        if now > self.peak.load(Relaxed) {
            self.peak.fetch_max(now, Relaxed);
        }
    }

    fn sub(&self, bytes: usize) {
        self.now.fetch_sub(bytes, Relaxed);
    }

    fn usage(&self) -> Usage {
        Usage { now: self.now(), peak: self.peak.load(Relaxed) }
    }

    fn now(&self) -> usize {
        self.now.load(Relaxed)
    }
}

/// Bytes now and at peak.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Bytes now.
    pub now: usize,
    /// The most bytes at one time since the last reset.
    pub peak: usize,
}

/// A device's memory in use. Tensors count with the bytes that were requested, so that a `meta` device agrees with a
/// real one to the byte. Scratch memory of kernels and memory that the allocator keeps are counted apart.
#[derive(Debug, Default)]
pub struct Ledger {
    categories: [Gauge; 5],
    /// The peak of the sum of the categories. The sum itself is computed when it is asked for.
    total_peak: AtomicUsize,
    scratch: Gauge,
    obtained: Gauge,
    on_disk: Gauge,
    /// Whether changes are recorded.
    is_watched: AtomicBool,
    changes: Mutex<Vec<Change>>,
}

/// A moment, and the bytes of each category from then on, in the order of [`Category::ALL`].
pub type Change = (Instant, [usize; 5]);

/// Changes that are recorded at most.
const CHANGES_MAX: usize = 1 << 20;

impl Ledger {
    /// Tensors of one category.
    pub fn category(&self, category: Category) -> Usage {
        self.categories[category as usize].usage()
    }

    /// All tensors.
    pub fn total(&self) -> Usage {
        Usage { now: self.total_now(), peak: self.total_peak.load(Relaxed) }
    }

    fn total_now(&self) -> usize {
        self.categories.iter().map(Gauge::now).sum()
    }

    /// Memory that kernels use for themselves while they run.
    pub fn scratch(&self) -> Usage {
        self.scratch.usage()
    }

    /// Memory obtained from the system for tensors, in use or in free lists.
    pub fn obtained(&self) -> Usage {
        self.obtained.usage()
    }

    /// Tensors in mapped files ([`HostMemory`](crate::HostMemory)), which no category counts.
    pub fn on_disk(&self) -> Usage {
        self.on_disk.usage()
    }

    pub(crate) fn on_disk_add(&self, bytes: usize) {
        self.on_disk.add(bytes);
    }

    pub(crate) fn on_disk_sub(&self, bytes: usize) {
        self.on_disk.sub(bytes);
    }

    /// Memory obtained from the system that no tensor uses: in free lists, or lost to rounding.
    pub fn pooled(&self) -> usize {
        self.obtained().now.saturating_sub(self.total().now)
    }

    /// The categories in use with their sizes, for messages.
    pub(crate) fn in_use(&self) -> String {
        let held = Category::ALL.into_iter().map(|c| (c.name(), self.category(c).now));
        let parts: Vec<String> =
            held.filter(|(_, now)| *now > 0).map(|(name, now)| format!("{name} {}", size(now))).collect();
        if parts.is_empty() { "nothing".into() } else { parts.join(", ") }
    }

    /// Sets every peak to the bytes in use now.
    pub fn reset_peak(&self) {
        for gauge in self.categories.iter().chain([&self.scratch, &self.obtained, &self.on_disk]) {
            gauge.peak.store(gauge.now(), Relaxed);
        }
        self.total_peak.store(self.total_now(), Relaxed);
    }

    /// Counts kernel scratch until the returned value is dropped.
    pub fn scratch_of(&self, bytes: usize) -> ScratchUse<'_> {
        self.scratch.add(bytes);
        ScratchUse { ledger: self, bytes }
    }

    /// Begins to record every change of a category's bytes, and the present state, until [`Ledger::watched`].
    pub fn watch(&self) {
        *self.changes() = vec![(Instant::now(), self.each())];
        self.is_watched.store(true, Relaxed);
    }

    /// The changes since [`Ledger::watch`] in their order, up to a million. The last entry is the present state.
    pub fn watched(&self) -> Vec<Change> {
        self.is_watched.store(false, Relaxed);
        let mut changes = std::mem::take(&mut *self.changes());
        changes.push((Instant::now(), self.each()));
        changes
    }

    fn changes(&self) -> std::sync::MutexGuard<'_, Vec<Change>> {
        lock(&self.changes)
    }

    fn each(&self) -> [usize; 5] {
        std::array::from_fn(|i| self.categories[i].now())
    }

    /// Notes a change for [`Ledger::watch`]. Costs one atomic load while the ledger is not watched.
    #[inline]
    fn changed(&self) {
        if self.is_watched.load(Relaxed) {
            self.record_change();
        }
    }

    #[cold]
    fn record_change(&self) {
        let mut changes = self.changes();
        if changes.len() < CHANGES_MAX {
            changes.push((Instant::now(), self.each()));
        }
    }

    pub(crate) fn allocated(&self, category: Category, bytes: usize) {
        self.categories[category as usize].add(bytes);
        let total = self.total_now();
        if total > self.total_peak.load(Relaxed) {
            self.total_peak.fetch_max(total, Relaxed);
        }
        self.changed();
    }

    pub(crate) fn freed(&self, category: Category, bytes: usize) {
        self.categories[category as usize].sub(bytes);
        self.changed();
    }

    pub(crate) fn moved(&self, from: Category, to: Category, bytes: usize) {
        self.categories[from as usize].sub(bytes);
        self.categories[to as usize].add(bytes);
        self.changed();
    }

    pub(crate) fn obtained_add(&self, bytes: usize) {
        self.obtained.add(bytes);
    }

    pub(crate) fn obtained_sub(&self, bytes: usize) {
        self.obtained.sub(bytes);
    }
}

/// A table of what is in use, now and at peak; categories never used are left out.
impl fmt::Display for Ledger {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:<16}{:>12}{:>12}", "memory", "now", "peak")?;
        let categories = Category::ALL.into_iter().map(|c| (c.name(), self.category(c)));
        let used = categories.filter(|(_, usage)| usage.peak > 0);
        let sums =
            [("all tensors", self.total()), ("scratch", self.scratch()), ("obtained", self.obtained())];
        for (name, usage) in used.chain(sums) {
            write!(f, "\n{name:<16}{:>12}{:>12}", size(usage.now), size(usage.peak))?;
        }
        Ok(())
    }
}

/// Bytes in the largest binary unit that leaves at least 1.
pub(crate) fn size(bytes: usize) -> String {
    let units = ["KiB", "MiB", "GiB", "TiB"];
    let unit = (bytes.max(1).ilog2() / 10).min(4) as usize;
    match unit {
        0 => format!("{bytes} B"),
        _ => format!("{:.2} {}", bytes as f64 / (1u64 << (10 * unit)) as f64, units[unit - 1]),
    }
}

/// Kernel scratch in use.
#[derive(Debug)]
pub struct ScratchUse<'a> {
    ledger: &'a Ledger,
    bytes: usize,
}

impl Drop for ScratchUse<'_> {
    fn drop(&mut self) {
        self.ledger.scratch.sub(self.bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_watched_ledger_has_each_change_and_another_none() {
        let ledger = Ledger::default();
        ledger.allocated(Category::Parameters, 8);
        ledger.watch();
        ledger.allocated(Category::Activations, 16);
        ledger.moved(Category::Activations, Category::Gradients, 16);
        ledger.freed(Category::Parameters, 8);
        let changes = ledger.watched();
        ledger.allocated(Category::Buffers, 4);
        let bytes: Vec<[usize; 5]> = changes.iter().map(|(_, bytes)| *bytes).collect();
        assert_eq!(
            bytes,
            [[8, 0, 0, 0, 0], [8, 0, 0, 16, 0], [8, 16, 0, 0, 0], [0, 16, 0, 0, 0], [0, 16, 0, 0, 0]]
        );
        assert!(changes.is_sorted_by_key(|(at, _)| *at));
        assert!(ledger.changes().is_empty());
    }
}
