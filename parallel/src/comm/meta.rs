//! [`meta`]: a rank without peers. It counts the bytes that it would send, and moves nothing.

use std::sync::Arc;

use super::communicator::{Meter, members};
use super::{Call, Comm, Communicator, Error, Pending, Result, Traffic};

/// Rank `rank` of `size`, whose peers do not exist: for tensors on a `meta` device, which have no elements to exchange.
/// Checks every call as the other backends do, and counts its bytes.
///
/// # Errors
/// If there is no such rank.
pub fn meta(rank: usize, size: usize) -> Result<Comm> {
    if rank >= size {
        return Err(Error::invalid("meta", format!("got rank {rank} of {size}")));
    }
    Ok(Arc::new(Meta { rank, ranks: (0..size).collect(), meter: Meter::default() }))
}

/// The rank.
#[derive(Debug)]
struct Meta {
    rank: usize,
    ranks: Vec<usize>,
    meter: Meter,
}

impl Meta {
    fn pretend(&self, call: Call) -> Result<()> {
        let Call { signature, input, output, observations, .. } = call.checked(self.rank, self.size())?;
        if let Some(tensor) = input.iter().chain(&output).find(|t| !t.device().is_meta()) {
            let why = format!("got a tensor on {}, wanted one on meta: there are no peers", tensor.device());
            return Err(Error::invalid(signature.kind.name(), why));
        }
        if let Some(mut output) = output {
            output.bump_version();
        }
        self.meter.count(&signature, self.rank, self.size());
        observations.iter().for_each(|observation| observation.report(signature.kind));
        Ok(())
    }
}

impl Communicator for Meta {
    fn rank(&self) -> usize {
        self.rank
    }

    fn ranks(&self) -> &[usize] {
        &self.ranks
    }

    fn start(&self, call: Call) -> Pending {
        let outcome = self.pretend(call);
        Pending::done(Call::barrier(), outcome)
    }

    fn group(&self, ranks: &[usize]) -> Result<Comm> {
        let (rank, ranks) = members(&self.ranks, self.rank, ranks)?;
        Ok(Arc::new(Meta { rank, ranks, meter: Meter::default() }))
    }

    fn traffic(&self) -> Traffic {
        self.meter.read()
    }

    fn fail(&self, _cause: &str) {}

    fn failure(&self) -> Option<Error> {
        None
    }

    fn has_peers(&self) -> bool {
        false
    }

    fn split(&self, _color: Option<u32>, _key: i64) -> Result<Option<Comm>> {
        Err(Error::invalid("split", "there are no peers to ask for their colors; use `group`"))
    }
}

#[cfg(test)]
mod tests {
    use phalanx_tensor::{DType, Device, Tensor};

    use super::*;
    use crate::comm::Reduction;

    #[test]
    fn counts_what_a_ring_would_send() {
        let tensor = |n: usize, device| Tensor::empty(&[n], DType::BF16, device).unwrap();
        let comm = meta(3, 64).unwrap();
        let (mut whole, mut chunk) = (tensor(6400, Device::Meta(0)), tensor(100, Device::Meta(0)));
        comm.all_reduce(&mut whole, Reduction::Sum).unwrap();
        assert_eq!(comm.traffic(), Traffic { calls: 1, bytes: 2 * 2 * 6300 });
        comm.reduce_scatter(&mut chunk, &whole, Reduction::Sum).unwrap();
        comm.all_gather(&mut whole, &chunk).unwrap();
        assert_eq!(comm.traffic(), Traffic { calls: 3, bytes: 4 * 2 * 6300 });
        let refused = comm.all_gather(&mut chunk, &whole).err().unwrap().to_string();
        assert!(refused.contains("got 6400 elements to give and 100 to get"), "{refused}");
        let refused = comm.all_reduce(&mut tensor(4, Device::CPU), Reduction::Sum).err().unwrap().to_string();
        assert!(refused.contains("got a tensor on cpu:0"), "{refused}");
        let pair = comm.group(&[9, 3]).unwrap();
        assert_eq!((pair.rank(), pair.size(), pair.ranks()), (1, 2, &[9, 3][..]));
        let refused = comm.group(&[1, 2]).err().unwrap().to_string();
        assert!(refused.contains("got ranks [1, 2] on rank 3 of 64"), "{refused}");
    }
}
