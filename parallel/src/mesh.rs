//! The mesh: ranks laid out along the axes of pipeline, data and tensor parallelism ([`Mesh`]), and one rank's communicators
//! along them ([`Groups`]).
//!
//! ```text
//! rank = tp + TP * (dp + DP * pp)          TP = 2, DP = 2, PP = 2:
//!
//!              tp 0  tp 1                             tp 0  tp 1
//! pp 0:  dp 0    0     1              pp 1:  dp 0       4     5
//!        dp 1    2     3                     dp 1       6     7
//! ```
//!
//! The ranks of a tensor-parallel group, which communicate most, are neighbours, as in Megatron-LM.
//!
//! Expert parallelism divides the data-parallel axis: `ep` replicas in a row are an expert group, whose ranks divide the experts. The ranks
//! at one place of all expert groups have the same experts.

use crate::comm::{Comm, Error, Result};

/// An axis of the mesh.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Axis {
    /// Tensor parallelism, along which neighbouring ranks lie.
    Tp,
    /// Data parallelism.
    Dp,
    /// Pipeline stages.
    Pp,
}

/// A rank's coordinate along every axis.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Coordinates {
    /// Along [`Axis::Tp`].
    pub tp: usize,
    /// Along [`Axis::Dp`].
    pub dp: usize,
    /// Along [`Axis::Pp`].
    pub pp: usize,
}

/// Ranks laid out along three axes.
///
/// ```
/// use phalanx_parallel::mesh::{Axis, Mesh};
///
/// let mesh = Mesh::new(2, 2, 4)?;
/// assert_eq!(mesh.group(&[Axis::Tp], 6), [6, 7]);
/// assert_eq!(mesh.group(&[Axis::Dp], 6), [4, 6]);
/// assert_eq!(mesh.group(&[Axis::Pp], 6), [2, 6, 10, 14]);
/// # Ok::<(), phalanx_parallel::comm::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mesh {
    tp: usize,
    dp: usize,
    pp: usize,
    ep: usize,
}

impl Mesh {
    /// A mesh of `tp * dp * pp` ranks.
    ///
    /// # Errors
    /// If an axis has no ranks, or the number of ranks overflows.
    pub fn new(tp: usize, dp: usize, pp: usize) -> Result<Mesh> {
        let fits = tp.checked_mul(dp).and_then(|n| n.checked_mul(pp)).is_some_and(|n| n > 0);
        let mesh = Mesh { tp, dp, pp, ep: 1 };
        let wrong =
            || Error::invalid("mesh", format!("got tp {tp}, dp {dp}, pp {pp}, wanted at least 1 each"));
        if fits { Ok(mesh) } else { Err(wrong()) }
    }

    /// The mesh of `ranks` ranks with `tp` and `pp` along their axes, and as many replicas as that leaves.
    ///
    /// # Errors
    /// If `tp * pp` does not divide the ranks.
    pub fn of_ranks(ranks: usize, tp: usize, pp: usize) -> Result<Mesh> {
        let model = tp.checked_mul(pp).filter(|&n| n > 0 && ranks > 0 && ranks.is_multiple_of(n));
        let why =
            || Error::invalid("mesh", format!("got {ranks} ranks, wanted a multiple of tp {tp} x pp {pp}"));
        Mesh::new(tp, ranks / model.ok_or_else(why)?, pp)
    }

    /// The same mesh, with each `ep` replicas in a row as an expert group.
    ///
    /// ```
    /// use phalanx_parallel::mesh::Mesh;
    ///
    /// let mesh = Mesh::new(2, 4, 1)?.with_expert_groups(2)?;
    /// assert_eq!(mesh.expert_group(6), [4, 6]);
    /// assert_eq!(mesh.expert_replicas(6), [2, 6]);
    /// # Ok::<(), phalanx_parallel::comm::Error>(())
    /// ```
    ///
    /// # Errors
    /// If they do not divide the replicas.
    pub fn with_expert_groups(self, ep: usize) -> Result<Mesh> {
        if ep == 0 || !self.dp.is_multiple_of(ep) {
            let why = format!("got ep {ep} of dp {}, wanted a divisor of the replicas", self.dp);
            return Err(Error::invalid("mesh", why));
        }
        Ok(Mesh { ep, ..self })
    }

    /// The number of replicas in an expert group; 1 without expert parallelism.
    pub fn expert_ranks(&self) -> usize {
        self.ep
    }

    /// The ranks that divide the experts of `rank`'s layers, ascending: those at its place of the other axes, in its expert group.
    pub fn expert_group(&self, rank: usize) -> Vec<usize> {
        let at = self.coordinates(rank);
        let first = at.dp - at.dp % self.ep;
        (first..first + self.ep).map(|dp| self.rank(Coordinates { dp, ..at })).collect()
    }

    /// The ranks that have the same experts as `rank`, one of each expert group, ascending.
    pub fn expert_replicas(&self, rank: usize) -> Vec<usize> {
        let at = self.coordinates(rank);
        (at.dp % self.ep..self.dp).step_by(self.ep).map(|dp| self.rank(Coordinates { dp, ..at })).collect()
    }

    /// The ranks that differ from `rank` at most along `axes` and by their place in the expert group, ascending.
    fn with_expert_group(&self, axes: &[Axis], rank: usize) -> Vec<usize> {
        let mut all: Vec<usize> =
            self.expert_group(rank).into_iter().flat_map(|rank| self.group(axes, rank)).collect();
        all.sort_unstable();
        all
    }

    /// The number of ranks.
    pub fn ranks(&self) -> usize {
        self.tp * self.dp * self.pp
    }

    /// The number of ranks along an axis.
    pub fn size(&self, axis: Axis) -> usize {
        match axis {
            Axis::Tp => self.tp,
            Axis::Dp => self.dp,
            Axis::Pp => self.pp,
        }
    }

    /// The coordinates of a rank.
    pub fn coordinates(&self, rank: usize) -> Coordinates {
        let (tp, rest) = (rank % self.tp, rank / self.tp);
        Coordinates { tp, dp: rest % self.dp, pp: rest / self.dp }
    }

    /// The rank at these coordinates.
    pub fn rank(&self, at: Coordinates) -> usize {
        at.tp + self.tp * (at.dp + self.dp * at.pp)
    }

    /// The ranks that differ from `rank` at most along `axes`, ascending.
    pub fn group(&self, axes: &[Axis], rank: usize) -> Vec<usize> {
        let here = self.coordinates(rank);
        let along = |axis, here| if axes.contains(&axis) { 0..self.size(axis) } else { here..here + 1 };
        let mut group = Vec::new();
        for pp in along(Axis::Pp, here.pp) {
            for dp in along(Axis::Dp, here.dp) {
                group.extend(along(Axis::Tp, here.tp).map(|tp| self.rank(Coordinates { tp, dp, pp })));
            }
        }
        group
    }

    /// All groups along `axes`, in order of their first ranks.
    pub fn groups(&self, axes: &[Axis]) -> Vec<Vec<usize>> {
        let groups = (0..self.ranks()).map(|rank| (rank, self.group(axes, rank)));
        groups.filter(|(rank, group)| group[0] == *rank).map(|(_, group)| group).collect()
    }

    /// The ranks that hold a copy of the tied embedding of `rank`'s pipeline: the first stage's and the last's.
    pub fn embedding_group(&self, rank: usize) -> Vec<usize> {
        let at = self.coordinates(rank);
        let mut group = vec![self.rank(Coordinates { pp: 0, ..at })];
        if self.pp > 1 {
            group.push(self.rank(Coordinates { pp: self.pp - 1, ..at }));
        }
        group
    }

    /// The ranks that hold the position embedding of `rank`'s pipeline: the first stage's.
    pub fn position_embedding_group(&self, rank: usize) -> Vec<usize> {
        vec![self.rank(Coordinates { pp: 0, ..self.coordinates(rank) })]
    }
}

/// One rank's communicators along the mesh's axes. Making them does not communicate.
#[derive(Clone, Debug)]
pub struct Groups {
    mesh: Mesh,
    at: Coordinates,
    tp: Comm,
    dp: Comm,
    pp: Comm,
    model: Comm,
    stage: Comm,
    embedding: Option<Comm>,
    position_embedding: Option<Comm>,
    experts: Option<ExpertGroups>,
}

/// The groups of expert parallelism.
#[derive(Clone, Debug)]
struct ExpertGroups {
    /// The ranks that divide the experts.
    group: Comm,
    /// The ranks that have the same experts.
    replicas: Comm,
    /// See [`Groups::line`].
    line: Comm,
}

impl Groups {
    /// The groups of this rank of `world`, which has as many ranks as the mesh.
    ///
    /// # Errors
    /// If the numbers of ranks differ.
    pub fn new(mesh: Mesh, world: &Comm) -> Result<Groups> {
        if world.size() != mesh.ranks() {
            let why = format!("got {} ranks for a mesh of {}", world.size(), mesh.ranks());
            return Err(Error::invalid("mesh", why));
        }
        let rank = world.rank();
        let along = |axes: &[Axis]| world.group(&mesh.group(axes, rank));
        let [tp, dp] = [along(&[Axis::Tp])?, along(&[Axis::Dp])?];
        let stage = match (tp.size(), dp.size()) {
            (1, _) => dp.clone(),
            (_, 1) => tp.clone(),
            _ => along(&[Axis::Tp, Axis::Dp])?,
        };
        let experts = match mesh.ep {
            1 => None,
            _ => Some(ExpertGroups {
                group: world.group(&mesh.expert_group(rank))?,
                replicas: world.group(&mesh.expert_replicas(rank))?,
                line: world.group(&mesh.with_expert_group(&[Axis::Pp], rank))?,
            }),
        };
        let member = |group: Vec<usize>| group.contains(&rank).then(|| world.group(&group)).transpose();
        Ok(Groups {
            mesh,
            at: mesh.coordinates(rank),
            tp,
            dp,
            stage,
            pp: along(&[Axis::Pp])?,
            model: world.group(&mesh.with_expert_group(&[Axis::Tp, Axis::Pp], rank))?,
            embedding: member(mesh.embedding_group(rank))?,
            position_embedding: member(mesh.position_embedding_group(rank))?,
            experts,
        })
    }

    /// The groups, each wrapped by `wrap`, which gets the group's name: `tp`, `dp`, `pp`, `model`, `stage`,
    /// `embedding` or `position embedding`, and with expert parallelism `ep`, `expert replicas` or `line`. [`observed`](crate::comm::observed) makes such a wrapper.
    #[must_use]
    pub fn wrapped(self, wrap: impl Fn(&'static str, Comm) -> Comm) -> Groups {
        let Groups { mesh, at, tp, dp, pp, model, stage, embedding, position_embedding, experts } = self;
        Groups {
            mesh,
            at,
            tp: wrap("tp", tp),
            dp: wrap("dp", dp),
            pp: wrap("pp", pp),
            model: wrap("model", model),
            stage: wrap("stage", stage),
            embedding: embedding.map(|comm| wrap("embedding", comm)),
            position_embedding: position_embedding.map(|comm| wrap("position embedding", comm)),
            experts: experts.map(|ExpertGroups { group, replicas, line }| ExpertGroups {
                group: wrap("ep", group),
                replicas: wrap("expert replicas", replicas),
                line: wrap("line", line),
            }),
        }
    }

    /// The mesh.
    pub fn mesh(&self) -> &Mesh {
        &self.mesh
    }

    /// This rank's coordinates.
    pub fn at(&self) -> Coordinates {
        self.at
    }

    /// The group along an axis.
    pub fn along(&self, axis: Axis) -> &Comm {
        match axis {
            Axis::Tp => &self.tp,
            Axis::Dp => &self.dp,
            Axis::Pp => &self.pp,
        }
    }

    /// The ranks that hold one replica of the model together. With expert parallelism that is an expert group's, which hold several copies of
    /// all but the experts.
    pub fn model(&self) -> &Comm {
        &self.model
    }

    /// The ranks that divide the experts of this rank's layers, if any do.
    pub fn experts(&self) -> Option<&Comm> {
        self.experts.as_ref().map(|groups| &groups.group)
    }

    /// The ranks that have the same experts, which are divided.
    pub fn expert_replicas(&self) -> Option<&Comm> {
        self.experts.as_ref().map(|groups| &groups.replicas)
    }

    /// The ranks at this one's place of tensor parallelism that hold a replica's parameters together: the stages', and of each stage those
    /// that divide the experts.
    pub fn line(&self) -> &Comm {
        self.experts.as_ref().map_or(&self.pp, |groups| &groups.line)
    }

    /// The ranks that hold the parameters of one stage, in parts and in copies.
    pub fn stage(&self) -> &Comm {
        &self.stage
    }

    /// The ranks of the first and the last stage, which hold the tied embedding; `None` on other ranks.
    pub fn embedding(&self) -> Option<&Comm> {
        self.embedding.as_ref()
    }

    /// The rank of the first stage, which holds the position embedding; `None` on other ranks.
    pub fn position_embedding(&self) -> Option<&Comm> {
        self.position_embedding.as_ref()
    }
}

#[cfg(test)]
mod tests {
    use phalanx_tensor::{Device, Tensor};

    use crate::comm::Reduction;
    use crate::launch;

    use super::*;

    /// The layout that Megatron's documentation gives for 16 ranks.
    #[test]
    fn sixteen_ranks_lie_as_megatron_lays_them_out() {
        let mesh = Mesh::of_ranks(16, 2, 4).unwrap();
        let tp: Vec<_> = (0..8).map(|i| vec![2 * i, 2 * i + 1]).collect();
        assert_eq!(mesh.groups(&[Axis::Tp]), tp);
        let dp = [[0, 2], [1, 3], [4, 6], [5, 7], [8, 10], [9, 11], [12, 14], [13, 15]];
        assert_eq!(mesh.groups(&[Axis::Dp]), dp);
        let pp = [[0, 4, 8, 12], [1, 5, 9, 13], [2, 6, 10, 14], [3, 7, 11, 15]];
        assert_eq!(mesh.groups(&[Axis::Pp]), pp);
        let model = [[0, 1, 4, 5, 8, 9, 12, 13], [2, 3, 6, 7, 10, 11, 14, 15]];
        assert_eq!(mesh.groups(&[Axis::Tp, Axis::Pp]), model);
        assert_eq!(mesh.embedding_group(7), [3, 15]);
        assert_eq!(mesh.position_embedding_group(7), [3]);
    }

    #[test]
    fn coordinates_and_ranks_are_inverse_and_groups_cover_all_once() {
        for (tp, dp, pp) in [(1, 1, 1), (2, 3, 4), (3, 1, 2), (1, 5, 1)] {
            let mesh = Mesh::new(tp, dp, pp).unwrap();
            assert!((0..mesh.ranks()).all(|rank| mesh.rank(mesh.coordinates(rank)) == rank));
            for axes in [&[Axis::Tp][..], &[Axis::Dp], &[Axis::Pp], &[Axis::Tp, Axis::Dp], &[]] {
                let mut all = mesh.groups(axes).concat();
                all.sort_unstable();
                assert_eq!(all, (0..mesh.ranks()).collect::<Vec<_>>());
            }
        }
        assert_eq!(Mesh::new(1, 4, 1).unwrap().embedding_group(2), [2]);
    }

    #[test]
    fn expert_groups_are_replicas_in_a_row() {
        let mesh = Mesh::new(2, 4, 2).unwrap().with_expert_groups(2).unwrap();
        let groups: Vec<Vec<usize>> = [0, 3, 5, 14].iter().map(|&rank| mesh.expert_group(rank)).collect();
        assert_eq!(groups, [[0, 2], [1, 3], [5, 7], [12, 14]]);
        assert_eq!([mesh.expert_replicas(0), mesh.expert_replicas(11)], [[0, 4], [11, 15]]);
        assert_eq!(mesh.with_expert_group(&[Axis::Pp], 6), [4, 6, 12, 14]);
        let error = mesh.with_expert_groups(3).unwrap_err().to_string();
        assert!(error.contains("got ep 3 of dp 4, wanted a divisor"), "{error}");
        assert_eq!(Mesh::new(2, 4, 2).unwrap().expert_group(6), [6]);
    }

    #[test]
    fn what_does_not_divide_is_refused() {
        let error = Mesh::of_ranks(6, 4, 1).unwrap_err().to_string();
        assert!(error.contains("got 6 ranks, wanted a multiple of tp 4 x pp 1"), "{error}");
        for none in [Mesh::new(0, 1, 1), Mesh::new(1, 0, 1), Mesh::new(1, 1, 0), Mesh::of_ranks(0, 1, 1)] {
            let error = none.unwrap_err().to_string();
            assert!(error.contains("got") && error.contains("wanted"), "{error}");
        }
    }

    #[test]
    fn every_group_sums_over_its_own_ranks() {
        let mesh = Mesh::new(2, 2, 2).unwrap();
        let sums = launch::threads(8, |rank| {
            let groups = Groups::new(mesh, rank.comm())?;
            let sum = |comm: &Comm| {
                let mut x = Tensor::scalar(rank.rank() as i64, Device::CPU)?;
                comm.all_reduce(&mut x, Reduction::Sum)?;
                Ok::<i64, Error>(x.item()?)
            };
            let along = [Axis::Tp, Axis::Dp, Axis::Pp].map(|axis| sum(groups.along(axis)));
            Ok::<_, Error>((
                along.into_iter().collect::<Result<Vec<_>>>()?,
                groups.embedding().map(sum).transpose()?,
            ))
        });
        let sums = sums.unwrap();
        assert_eq!(sums[3], (vec![2 + 3, 1 + 3, 3 + 7], Some(3 + 7)));
        assert_eq!(sums[4], (vec![4 + 5, 4 + 6, 4], Some(4)));
    }
}
