//! [`TiedTable`]: one table at two stages, the embedding's on the first and the head's on the last.

use phalanx_nn::autograd::Var;
use phalanx_nn::{Parameter, Parameters};
use phalanx_tensor::Tensor;

use crate::Result;
use crate::comm::{Call, Comm};
use crate::pipeline::schedule::Schedule;

/// This rank's copy of a table that embeds on the first stage and scores on the last, where these are on two ranks.
///
/// ```text
/// first stage     site 0 (head)  <-------  site 0     last stage
///                 site 1 (embedding) --->  site 1
/// ```
/// Each copy has both sites, and the same initial values. Backward gives it the gradients of its own site;
/// [`TiedTable::exchange`] adds the other's, as a backward pass would. From there on both copies are what the one table
/// of one device is: data parallelism adds the ranks, site by site, then the head's chain and the embedding's are added,
/// and both take the same step.
pub struct TiedTable {
    table: Parameter,
    /// The first stage's rank and the last's.
    pair: Comm,
}

impl TiedTable {
    /// The parameter of two sites of this rank's part of a model, which is a rank of `comm`, the group that runs the
    /// schedule. None on ranks without an end of the model, where both ends are on one rank, and without such a
    /// parameter.
    ///
    /// # Errors
    /// If the schedule is of other ranks.
    pub fn new(model: &impl Parameters, schedule: &Schedule, comm: &Comm) -> Result<Option<TiedTable>> {
        let (Some(&first), Some(&last)) = (schedule.placement.first(), schedule.placement.last()) else {
            return Ok(None);
        };
        if first == last || ![first, last].contains(&comm.rank()) {
            return Ok(None);
        }
        let pair = comm.group(&[first, last])?;
        let table = model.parameters().into_iter().find(|parameter| parameter.leaves().len() == 2);
        Ok(table.map(|table| TiedTable { table, pair }))
    }

    /// Whether this copy is to be left out of what is summed over all parameters of all stages, such as a norm: the last
    /// stage's is, the first stage's counts.
    pub fn is_duplicate(&self) -> bool {
        self.pair.rank() == 1
    }

    /// The table.
    pub fn table(&self) -> &Parameter {
        &self.table
    }

    /// Adds the other copy's gradients to its site. Both ranks call it after their last backward passes, and before data
    /// parallelism finishes.
    ///
    /// # Errors
    /// If backward gave the table no gradient; if a hook fails; or as [`Pending::wait`](crate::comm::Pending::wait).
    pub fn exchange(&self) -> Result<()> {
        if !self.table.is_trained() {
            return Ok(());
        }
        let (here, there) = (self.pair.rank(), 1 - self.pair.rank());
        let [own, other] = [there, here].map(|site| &self.table.leaves()[site]);
        let missing =
            || phalanx_nn::Error::invalid(self.table.name(), "backward gave a tied table no gradient");
        let sent = own.grad().map(Var::into_tensor).ok_or_else(missing)?;
        let received = Tensor::empty(sent.shape(), sent.dtype(), sent.device())?;
        let send = self.pair.start(Call::send(sent, there));
        self.pair.run(Call::recv(received.clone(), there))?;
        send.wait()?;
        Ok(other.accumulate(received)?)
    }
}
