//! Special registers.

use super::Builder;
use crate::ParseError;
use crate::code::{Clock, NOWHERE, Op, Reg, Special};

/// The special register of a name, except for clocks.
pub(crate) fn special(name: &str) -> Option<Special> {
    let (stem, axis) = match name.split_once('.') {
        Some((stem, "x")) => (stem, 0),
        Some((stem, "y")) => (stem, 1),
        Some((stem, "z")) => (stem, 2),
        Some(_) => return None,
        None => (name, 0),
    };
    Some(match stem {
        "%tid" => Special::Thread(axis),
        "%ntid" => Special::Threads(axis),
        "%ctaid" => Special::Block(axis),
        "%nctaid" => Special::Blocks(axis),
        "%laneid" => Special::Lane,
        "%warpid" => Special::Warp,
        "%nwarpid" => Special::Warps,
        "%smid" => Special::Processor,
        "%nsmid" => Special::Processors,
        "%gridid" => Special::Grid,
        "%lanemask_eq" => Special::MaskEqual,
        "%lanemask_lt" => Special::MaskBelow,
        "%lanemask_le" => Special::MaskUpTo,
        "%lanemask_gt" => Special::MaskAbove,
        "%lanemask_ge" => Special::MaskFrom,
        "%dynamic_smem_size" => Special::DynamicShared,
        "%total_smem_size" => Special::TotalShared,
        "%cluster_ctaid" => Special::ClusterThreadBlock(axis),
        "%cluster_nctaid" => Special::ClusterBlocks(axis),
        "%clusterid" => Special::Cluster(axis),
        "%nclusterid" => Special::Clusters(axis),
        "%cluster_ctarank" => Special::ClusterRank,
        "%cluster_nctarank" => Special::ClusterSize,
        "%is_explicit_cluster" => Special::ExplicitCluster,
        "%envreg0" => Special::Environment(0),
        "%envreg1" => Special::Environment(1),
        "%envreg2" => Special::Environment(2),
        _ => return None,
    })
}

impl Builder<'_> {
    /// A clock is read where it stands: an instruction of its own.
    pub(super) fn clock(&mut self, name: &str) -> Result<Reg, ParseError> {
        let clock = match name {
            "%clock" | "%globaltimer_lo" => Clock::Low,
            "%clock_hi" | "%globaltimer_hi" => Clock::High,
            _ => Clock::Whole,
        };
        let d = self.fresh();
        let guard = std::mem::replace(&mut self.guard, (NOWHERE, true));
        self.push(Op::ReadClock(clock), d, &[]);
        self.guard = guard;
        Ok(d)
    }
}
