//! Names before 0.2.

#![allow(deprecated)]

use std::path::Path;
use std::sync::Arc;

use phalanx_parallel::data_parallel::DataParallel;
use phalanx_parallel::launch::Rank;

use crate::{
    GivenValues, MeshRank, RankTrace, Result, Run, StatusLine, Trace, Trainer, ValueKind, ValueSource,
};

/// The former name of [`SettingValue`](crate::SettingValue).
pub use crate::SettingValue as Value;

/// The former name of [`ValueKind`].
#[deprecated(since = "0.1.0", note = "renamed to `ValueKind`")]
pub type Kind = ValueKind;

/// The former name of [`ValueSource`].
#[deprecated(since = "0.1.0", note = "renamed to `ValueSource`")]
pub type Source = ValueSource;

/// The former name of [`GivenValues`].
#[deprecated(since = "0.1.0", note = "renamed to `GivenValues`")]
pub type Given<'a> = GivenValues<'a>;

/// The former name of [`StatusLine`].
#[deprecated(since = "0.1.0", note = "renamed to `StatusLine`")]
pub type Line = StatusLine;

/// The former name of [`MeshRank`].
#[deprecated(since = "0.1.0", note = "renamed to `MeshRank`")]
pub type Place = MeshRank;

/// The former name of [`RankTrace`].
#[deprecated(since = "0.1.0", note = "renamed to `RankTrace`")]
pub type Lane = RankTrace;

/// The former name of [`check_memory`](crate::check_memory).
///
/// # Errors
/// Those of [`check_memory`](crate::check_memory).
#[deprecated(since = "0.1.0", note = "renamed to `check_memory`")]
pub fn room(allocations: &[(&str, f64)]) -> Result<()> {
    crate::check_memory(allocations)
}

impl MeshRank {
    /// The former name of [`MeshRank::check_equal`].
    ///
    /// # Errors
    /// Those of [`MeshRank::check_equal`].
    #[deprecated(since = "0.1.0", note = "renamed to `check_equal`")]
    pub fn agree(&self, text: &str) -> Result<()> {
        self.check_equal(text)
    }

    /// The former name of [`MeshRank::all_gather`].
    ///
    /// # Errors
    /// Those of [`MeshRank::all_gather`].
    #[deprecated(since = "0.1.0", note = "renamed to `all_gather`")]
    pub fn all(&self, own: f64) -> Result<Vec<f64>> {
        self.all_gather(own)
    }

    /// The former name of [`MeshRank::all_gather_slice`].
    ///
    /// # Errors
    /// Those of [`MeshRank::all_gather_slice`].
    #[deprecated(since = "0.1.0", note = "renamed to `all_gather_slice`")]
    pub fn all_of(&self, own: &[f64]) -> Result<Vec<f64>> {
        self.all_gather_slice(own)
    }
}

impl Run {
    /// The former name of [`Run::mesh_rank`].
    #[deprecated(since = "0.1.0", note = "renamed to `mesh_rank`")]
    pub fn place(&self) -> &MeshRank {
        self.mesh_rank()
    }

    /// The former name of [`Run::data_parallel`].
    #[deprecated(since = "0.1.0", note = "renamed to `data_parallel`")]
    pub fn share(&self) -> &Arc<dyn DataParallel> {
        self.data_parallel()
    }
}

impl Trace {
    /// The former name of [`Trace::rank`].
    #[deprecated(since = "0.1.0", note = "renamed to `rank`")]
    pub fn lane(&self, rank: usize) -> RankTrace {
        self.rank(rank)
    }
}

impl Trainer {
    /// The former name of [`Trainer::extra_files`].
    #[deprecated(since = "0.1.0", note = "renamed to `extra_files`")]
    pub fn beside(self, write: impl Fn(&Path) -> Result<()> + Send + Sync + 'static) -> Trainer {
        self.extra_files(write)
    }

    /// The former name of [`Trainer::in_process_group`].
    #[deprecated(since = "0.1.0", note = "renamed to `in_process_group`")]
    pub fn within(self, process: Option<&Rank>) -> Trainer {
        self.in_process_group(process)
    }
}
