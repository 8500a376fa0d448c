//! [`TiedTable`]: one table at two stages, the embedding's on the first and the head's on the last.

use phalanx_nn::autograd::Var;
use phalanx_nn::{Parameter, Parameters};
use phalanx_tensor::Tensor;

use crate::comm::{Call, Comm};
use crate::{Error, Result};

/// The head's, 0, and the embedding's, 1.
const SITES: usize = 2;

/// The table that embeds and the one that scores, where a model ties them and they are at different stages.
///
/// ```text
/// first stage     site 0 (head)  <-------  site 0     last stage
///                 site 1 (embedding) --->  site 1
/// ```
/// Each stage has a copy, with the same initial values, and of each copy both sites. Backward gives each copy the gradients of
/// its own site; [`TiedTable::exchange`] adds the other site's, as a backward pass would. From there on both are what the one
/// table of one device is: data parallelism adds the ranks, site by site, then the head's chain and the embedding's are
/// added, and both copies take the same step.
pub struct TiedTable {
    /// This rank's copies: the head's, the embedding's.
    copies: [Option<Parameter>; 2],
    /// The group of the ranks of the last stage and the first, and the other's number in it; none if both are here.
    other: Option<(Comm, usize)>,
}

impl TiedTable {
    /// What this rank has of a tied table: its first stage's and its last stage's, if it has them, the parameter of two sites.
    /// `group` is that of both stages' ranks ([`Groups::embedding`](crate::mesh::Groups::embedding)). `None` where there is
    /// nothing to exchange: without such stages or tables, or where both stages are one.
    ///
    /// # Errors
    /// If this rank needs the other's and the group is not of two.
    pub fn new(
        first: Option<&dyn Parameters>,
        last: Option<&dyn Parameters>,
        group: Option<&Comm>,
    ) -> Result<Option<TiedTable>> {
        let table = |stage: &dyn Parameters| {
            stage.parameters().into_iter().find(|parameter| parameter.leaves().len() == SITES)
        };
        let copies = [last.and_then(table), first.and_then(table)];
        let other = match (&copies, group) {
            ([None, None], _) => return Ok(None),
            ([Some(head), Some(embedding)], _) if head.is(embedding) => return Ok(None),
            ([Some(_), Some(_)], _) => None,
            (_, Some(group)) if group.size() == 2 => Some((group.clone(), 1 - group.rank())),
            (_, group) => {
                let size = group.map_or(0, |group| group.size());
                return Err(Error::Config(format!("tied table: got a group of {size} ranks, wanted 2")));
            }
        };
        Ok(Some(TiedTable { copies, other }))
    }

    /// The copy that another stage has too and that is not to be counted in what is summed over all parameters, such as a norm: the
    /// head's.
    pub fn duplicate(&self) -> Option<&Parameter> {
        self.copies[0].as_ref()
    }

    /// Gives each copy the other's chain of gradients. To be called by the ranks of both stages after their last backward
    /// passes, before data parallelism finishes.
    ///
    /// # Errors
    /// As [`Pending::wait`](crate::comm::Pending::wait); if a copy has no gradient, or its hooks fail.
    pub fn exchange(&self) -> Result<()> {
        let chain = |site: usize| -> Result<Option<Tensor>> {
            let Some(copy) = self.copies[site].as_ref().filter(|copy| copy.is_trained()) else {
                return Ok(None);
            };
            let chain = copy.leaves()[site].grad().map(Var::into_tensor);
            let missing =
                || phalanx_nn::Error::invalid(copy.name(), "backward gave a tied table no gradient");
            Ok(Some(chain.ok_or_else(missing)?))
        };
        let [mut head, mut embedding] = [chain(0)?, chain(1)?];
        if let Some((group, other)) = &self.other
            && let Some(own) = head.as_ref().or(embedding.as_ref())
        {
            let theirs = Tensor::empty(own.shape(), own.dtype(), own.device())?;
            let send = group.start(Call::send(own.clone(), *other));
            group.run(Call::recv(theirs.clone(), *other))?;
            send.wait()?;
            if head.is_none() { head = Some(theirs) } else { embedding = Some(theirs) }
        }
        for (copy, (site, chain)) in self.copies.iter().zip([(1, embedding), (0, head)]) {
            if let (Some(copy), Some(chain)) = (copy.as_ref().filter(|copy| copy.is_trained()), chain) {
                copy.leaves()[site].accumulate(chain)?;
            }
        }
        Ok(())
    }
}
