//! [`CollectiveKind`]: which collective. [`Signature`]: the description of a call without its tensors. Ranks compare signatures before
//! they exchange elements, and so find that they call different things.

use std::fmt;

use phalanx_tensor::DType;

use super::{Error, Reduction};

/// The collectives, and the messages between two ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum CollectiveKind {
    /// Wait for all.
    Barrier,
    /// Every rank gets the reduction of all ranks' tensors.
    AllReduce,
    /// Every rank gets its chunk of the reduction.
    ReduceScatter,
    /// Every rank gets all ranks' tensors, one after another.
    AllGather,
    /// Every rank gets the root's tensor.
    Broadcast,
    /// The root gets the reduction.
    Reduce,
    /// The root gets all ranks' tensors.
    Gather,
    /// Every rank gets its chunk of the root's tensor.
    Scatter,
    /// Every rank gets from each other the chunk meant for it.
    AllToAll,
    /// To one other rank.
    Send,
    /// From one other rank.
    Receive,
}

impl CollectiveKind {
    pub(crate) const ALL: [CollectiveKind; 11] = [
        CollectiveKind::Barrier,
        CollectiveKind::AllReduce,
        CollectiveKind::ReduceScatter,
        CollectiveKind::AllGather,
        CollectiveKind::Broadcast,
        CollectiveKind::Reduce,
        CollectiveKind::Gather,
        CollectiveKind::Scatter,
        CollectiveKind::AllToAll,
        CollectiveKind::Send,
        CollectiveKind::Receive,
    ];

    /// The name of the method that calls it.
    pub const fn name(self) -> &'static str {
        match self {
            CollectiveKind::Barrier => "barrier",
            CollectiveKind::AllReduce => "all_reduce",
            CollectiveKind::ReduceScatter => "reduce_scatter",
            CollectiveKind::AllGather => "all_gather",
            CollectiveKind::Broadcast => "broadcast",
            CollectiveKind::Reduce => "reduce",
            CollectiveKind::Gather => "gather",
            CollectiveKind::Scatter => "scatter",
            CollectiveKind::AllToAll => "all_to_all",
            CollectiveKind::Send => "send",
            CollectiveKind::Receive => "recv",
        }
    }
}

/// A call's kind, dtype, root and counts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Signature {
    pub(crate) kind: CollectiveKind,
    /// Of reducing calls.
    pub(crate) by: Option<Reduction>,
    /// Of all but barriers.
    pub(crate) dtype: Option<DType>,
    /// The root; of sends and receives the peer.
    pub(crate) root: Option<usize>,
    /// Elements of each rank's chunk, or one number where there are no chunks. Of an all-to-all what this rank
    /// sends to each.
    pub(crate) counts: Vec<usize>,
    /// Of an all-to-all what this rank gets from each.
    pub(crate) wanted: Vec<usize>,
    /// Whether NCCL moves the elements, and this is only compared between ranks.
    pub(crate) on_gpus: bool,
}

impl Signature {
    /// Whether rank `a`, which calls this, and rank `b`, which calls `other`, mean the same.
    fn agrees(&self, a: usize, other: &Signature, b: usize) -> bool {
        match (self.kind, other.kind) {
            (CollectiveKind::AllToAll, CollectiveKind::AllToAll) => {
                let fits =
                    |from: &Signature, r: usize, to: &Signature, s: usize| from.counts[s] == to.wanted[r];
                (self.dtype, self.on_gpus) == (other.dtype, other.on_gpus)
                    && fits(self, a, other, b)
                    && fits(other, b, self, a)
            }
            _ => self == other,
        }
    }

    /// The first two ranks of a group that call different things at the place numbered `sequence`.
    pub(crate) fn mismatch(all: &[&Signature], ranks: &[usize], sequence: u64) -> Option<Error> {
        let pairs = |a: usize| (a + 1..all.len()).map(move |b| (a, b));
        // Equality is transitive; only the counts of an all-to-all have to be compared between all pairs.
        let firsts = if all.first()?.kind == CollectiveKind::AllToAll { all.len() } else { 1 };
        let (a, b) = (0..firsts).flat_map(pairs).find(|&(a, b)| !all[a].agrees(a, all[b], b))?;
        let call = |rank: usize| format!("{} (call {sequence} of group {ranks:?})", all[rank]);
        Some(Error::Mismatch { left: ranks[a], left_call: call(a), right: ranks[b], right_call: call(b) })
    }

    /// Whether a send and the receive it meets differ in dtype or count.
    pub(crate) fn undeliverable(send: &Self, recv: &Self, ranks: [usize; 2], sequence: u64) -> Option<Error> {
        let form = |call: &Signature| (call.dtype, call.counts.clone(), call.on_gpus);
        let same = form(send) == form(recv);
        let call = |call: &Signature| {
            format!("{call} (message {sequence} from rank {} to rank {})", ranks[0], ranks[1])
        };
        let (left, right) = (ranks[0], ranks[1]);
        (!same).then(|| Error::Mismatch { left, left_call: call(send), right, right_call: call(recv) })
    }

    /// Bytes of all elements that it names: no rank sends another more of them.
    pub(crate) fn bytes(&self) -> usize {
        let elements = self.counts.iter().chain(&self.wanted).fold(0usize, |sum, n| sum.saturating_add(*n));
        elements.saturating_mul(self.dtype.map_or(0, DType::size))
    }

    /// As bytes, for the wire.
    pub(crate) fn encode(&self) -> Vec<u8> {
        let at = |place: Option<usize>| place.map_or(0, |i| i as u64 + 1);
        let kind = CollectiveKind::ALL.iter().position(|k| *k == self.kind);
        let by = self.by.and_then(|by| Reduction::ALL.iter().position(|r| *r == by));
        let dtype = self.dtype.and_then(|dtype| DType::ALL.iter().position(|d| *d == dtype));
        let head =
            [at(kind), at(by), at(dtype), at(self.root), self.on_gpus.into(), self.counts.len() as u64];
        let counts = self.counts.iter().chain(&self.wanted).map(|&n| n as u64);
        head.into_iter().chain(counts).flat_map(u64::to_le_bytes).collect()
    }

    /// From bytes; none if they are no signature.
    pub(crate) fn decode(bytes: &[u8]) -> Option<Signature> {
        let words: Vec<usize> =
            bytes.as_chunks::<8>().0.iter().map(|word| u64::from_le_bytes(*word) as usize).collect();
        let (&[kind, by, dtype, root, on_gpus, counts], rest) = words.split_first_chunk::<6>()?;
        Some(Signature {
            kind: *CollectiveKind::ALL.get(kind.checked_sub(1)?)?,
            by: by.checked_sub(1).and_then(|i| Reduction::ALL.get(i).copied()),
            dtype: dtype.checked_sub(1).and_then(|i| DType::ALL.get(i).copied()),
            root: root.checked_sub(1),
            counts: rest.get(..counts)?.to_vec(),
            wanted: rest.get(counts..)?.to_vec(),
            on_gpus: on_gpus == 1,
        })
    }
}

impl fmt::Display for Signature {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.kind.name())?;
        if let Some(by) = self.by {
            write!(f, "({by})")?;
        }
        if let Some(dtype) = self.dtype {
            let equal = self.counts.iter().all(|n| *n == self.counts[0]);
            match (equal, self.counts.len()) {
                (true, 0 | 1) => write!(f, " of {} {dtype}", self.counts.first().unwrap_or(&0))?,
                (true, n) => write!(f, " of {n} x {} {dtype}", self.counts[0])?,
                _ => write!(f, " of {:?} {dtype}", self.counts)?,
            }
        }
        match (self.kind, self.root) {
            (_, None) => {}
            (CollectiveKind::Send, Some(peer)) => write!(f, " to {peer}")?,
            (CollectiveKind::Receive | CollectiveKind::Broadcast | CollectiveKind::Scatter, Some(root)) => {
                write!(f, " from {root}")?
            }
            (_, Some(root)) => write!(f, " to {root}")?,
        }
        if self.on_gpus { f.write_str(" on GPUs") } else { Ok(()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sum(count: usize) -> Signature {
        let (by, dtype) = (Some(Reduction::Sum), Some(DType::F32));
        Signature {
            kind: CollectiveKind::AllReduce,
            by,
            dtype,
            root: None,
            counts: vec![count],
            wanted: vec![],
            on_gpus: false,
        }
    }

    fn all_to_all(counts: [usize; 2], wanted: [usize; 2]) -> Signature {
        let (counts, wanted) = (counts.to_vec(), wanted.to_vec());
        Signature {
            kind: CollectiveKind::AllToAll,
            by: None,
            dtype: Some(DType::I64),
            root: None,
            counts,
            wanted,
            on_gpus: false,
        }
    }

    #[test]
    fn both_sides_of_a_mismatch_are_named() {
        let error = Signature::mismatch(&[&sum(3), &sum(3), &sum(4)], &[4, 6, 9], 7).unwrap().to_string();
        let wanted =
            "rank 4 all_reduce(sum) of 3 f32 (call 7 of group [4, 6, 9]), rank 9 all_reduce(sum) of 4 f32";
        assert!(error.contains(wanted), "{error}");
        assert!(Signature::mismatch(&[&sum(3), &sum(3)], &[0, 1], 0).is_none());
    }

    #[test]
    fn counts_of_an_all_to_all_are_compared_pair_by_pair() {
        let fits = [all_to_all([1, 2], [1, 5]), all_to_all([5, 0], [2, 0])];
        assert!(Signature::mismatch(&[&fits[0], &fits[1]], &[0, 1], 0).is_none());
        let differs = [all_to_all([1, 2], [1, 5]), all_to_all([4, 0], [2, 0])];
        assert!(Signature::mismatch(&[&differs[0], &differs[1]], &[0, 1], 0).is_some());
    }

    #[test]
    fn signatures_survive_the_wire() {
        for signature in [sum(3), all_to_all([1, 2], [3, 4])] {
            assert_eq!(Signature::decode(&signature.encode()), Some(signature));
        }
        assert_eq!(Signature::decode(&[1, 2, 3]), None);
    }
}
