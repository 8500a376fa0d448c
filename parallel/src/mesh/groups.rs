//! [`Groups`]: one rank's communicators on a mesh.

use super::{Axis, Coordinates, Mesh};
use crate::comm::{Comm, Error, Result};

/// One rank's communicators along the mesh's axes. Making them takes no communication.
#[derive(Clone, Debug)]
pub struct Groups {
    mesh: Mesh,
    at: Coordinates,
    tp: Comm,
    dp: Comm,
    pp: Comm,
    model: Comm,
    embedding: Option<Comm>,
    position_embedding: Option<Comm>,
}

impl Groups {
    /// Those of this rank of `world`, which has as many ranks as the mesh.
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
        let member = |group: Vec<usize>| group.contains(&rank).then(|| world.group(&group)).transpose();
        Ok(Groups {
            mesh,
            at: mesh.coordinates(rank),
            tp: along(&[Axis::Tp])?,
            dp: along(&[Axis::Dp])?,
            pp: along(&[Axis::Pp])?,
            model: along(&[Axis::Tp, Axis::Pp])?,
            embedding: member(mesh.embedding_group(rank))?,
            position_embedding: member(mesh.position_embedding_group(rank))?,
        })
    }

    /// The same groups, each in a wrapper of its own: [`observed`](crate::comm::observed), say, by an observer that knows the group by its
    /// name, `tp`, `dp`, `pp`, `model`, `embedding` or `position embedding`.
    #[must_use]
    pub fn wrapped(self, wrap: impl Fn(&'static str, Comm) -> Comm) -> Groups {
        let Groups { mesh, at, tp, dp, pp, model, embedding, position_embedding } = self;
        Groups {
            mesh,
            at,
            tp: wrap("tp", tp),
            dp: wrap("dp", dp),
            pp: wrap("pp", pp),
            model: wrap("model", model),
            embedding: embedding.map(|comm| wrap("embedding", comm)),
            position_embedding: position_embedding.map(|comm| wrap("position embedding", comm)),
        }
    }

    /// The mesh.
    pub fn mesh(&self) -> &Mesh {
        &self.mesh
    }

    /// This rank's place.
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

    /// The ranks that hold one replica of the model together.
    pub fn model(&self) -> &Comm {
        &self.model
    }

    /// Those that hold the tied embedding, on its first and last stage.
    pub fn embedding(&self) -> Option<&Comm> {
        self.embedding.as_ref()
    }

    /// Those that hold the position embedding, on the first stage.
    pub fn position_embedding(&self) -> Option<&Comm> {
        self.position_embedding.as_ref()
    }
}

#[cfg(test)]
mod tests {
    use phalanx_tensor::{Device, Tensor};

    use super::*;
    use crate::comm::Reduction;
    use crate::launch;

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
