//! Turns a collective into a list of transfers: which elements of which ranks are combined, in what order, and where
//! they go. Pure functions: no communication. `threads::exchange`, `wire::task` and `nccl::route` carry the transfers out.
//!
//! Each transfer has an owner: over a wire, the sources send their part to the owner, which combines them in order
//! and sends the result to the destinations. So an all-reduce costs what a ring costs:
//!
//! ```text
//!            chunk 0           chunk 1                         chunk 0        chunk 1
//! rank 0  [ a0       ]      [ b0  ──┐   ]       rank 0  [ a0 + a1 ──┐ ] [ ◄──┐     ]
//! rank 1  [ a1 ─► to 0 ]    [ b1 ◄──┘   ]       rank 1  [ ◄─────────┘ ] [ b0 + b1 ─┘ ]
//! ```

use std::ops::Range;

use phalanx_tensor::even_piece;

use super::{CollectiveKind, Signature};

/// A rank's tensor in a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Side {
    Input,
    Output,
}

/// Elements of one rank's tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Segment {
    pub(crate) rank: usize,
    pub(crate) side: Side,
    pub(crate) range: Range<usize>,
}

/// The sources, combined in order, go to all destinations. All ranges have one length. If a transfer reads from a
/// rank's output tensor and that output is also written, the rank is one of the destinations.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Transfer {
    pub(crate) owner: usize,
    pub(crate) sources: Vec<Segment>,
    pub(crate) dests: Vec<Segment>,
}

/// Where the chunks of `counts` elements begin and end.
pub(crate) fn ranges(counts: &[usize]) -> Vec<Range<usize>> {
    let mut end = 0;
    let next = |&count: &usize| {
        let start = end;
        end += count;
        start..end
    };
    counts.iter().map(next).collect()
}

/// The lengths of `count` elements in `parts` pieces that differ by at most one, the longer first.
#[deprecated(since = "0.1.0", note = "use the lengths of `phalanx_nn::cut`")]
pub fn shares(count: usize, parts: usize) -> Vec<usize> {
    (0..parts).map(|i| even_piece(count, parts, i).len()).collect()
}

fn input(rank: usize, range: Range<usize>) -> Segment {
    Segment { rank, side: Side::Input, range }
}

fn output(rank: usize, range: Range<usize>) -> Segment {
    Segment { rank, side: Side::Output, range }
}

/// The transfers of a collective among the ranks whose signatures these are; `in_place[r]`: rank `r` has no input
/// because its part is in the output already. The destinations in each output ascend. There are none if the elements are
/// moved elsewhere.
pub(crate) fn plan(all: &[&Signature], in_place: &[bool]) -> Vec<Transfer> {
    let Some(first) = all.first().filter(|first| !first.on_gpus) else { return vec![] };
    let (size, root) = (all.len(), first.root.unwrap_or(0));
    let count = first.counts.first().copied().unwrap_or(0);
    let blocks = ranges(&first.counts);
    let every = |range: &Range<usize>| (0..size).map(|r| output(r, range.clone())).collect::<Vec<_>>();
    let given = |rank: usize, range: &Range<usize>| {
        if in_place[rank] { output(rank, range.clone()) } else { input(rank, 0..range.len()) }
    };
    let transfer = |owner, sources, dests| Transfer { owner, sources, dests };
    let mut transfers: Vec<Transfer> = match first.kind {
        CollectiveKind::Barrier | CollectiveKind::Send | CollectiveKind::Receive => vec![],
        CollectiveKind::AllReduce => {
            let piece = |q: usize| every(&even_piece(count, size, q));
            (0..size).map(|q| transfer(q, piece(q), piece(q))).collect()
        }
        CollectiveKind::Reduce => vec![transfer(root, every(&(0..count)), vec![output(root, 0..count)])],
        CollectiveKind::Broadcast => {
            let others = every(&(0..count)).into_iter().filter(|place| place.rank != root).collect();
            vec![transfer(root, vec![output(root, 0..count)], others)]
        }
        CollectiveKind::ReduceScatter => {
            let sources = |block: &Range<usize>| (0..size).map(|r| input(r, block.clone())).collect();
            let chunk = |(q, b): (usize, &Range<usize>)| transfer(q, sources(b), vec![output(q, 0..b.len())]);
            blocks.iter().enumerate().map(chunk).collect()
        }
        CollectiveKind::AllGather => {
            blocks.iter().enumerate().map(|(q, b)| transfer(q, vec![given(q, b)], every(b))).collect()
        }
        CollectiveKind::Gather => {
            let to_root = |(q, b)| transfer(q, vec![given(q, b)], vec![output(root, b.clone())]);
            blocks.iter().enumerate().map(to_root).collect()
        }
        CollectiveKind::Scatter => {
            let from_root = |(q, b): (usize, &Range<usize>)| {
                transfer(root, vec![input(root, b.clone())], vec![output(q, 0..b.len())])
            };
            blocks.iter().enumerate().map(from_root).collect()
        }
        CollectiveKind::AllToAll => {
            let sent: Vec<_> = all.iter().map(|s| ranges(&s.counts)).collect();
            let wanted: Vec<_> = all.iter().map(|s| ranges(&s.wanted)).collect();
            let pairs = (0..size).flat_map(|q| (0..size).map(move |r| (q, r)));
            let pair = |(q, r): (usize, usize)| {
                transfer(q, vec![input(q, sent[q][r].clone())], vec![output(r, wanted[r][q].clone())])
            };
            pairs.map(pair).collect()
        }
    };
    transfers.retain(|transfer| transfer.dests.iter().any(|place| !place.range.is_empty()));
    transfers
}

/// Elements that `rank` of `size` sends in the call, by the plan. Needs only its own signature.
pub(crate) fn sent(signature: &Signature, rank: usize, size: usize) -> usize {
    let Signature { kind, counts, root, .. } = signature;
    let (total, at_root) = (counts.iter().sum::<usize>(), *root == Some(rank));
    match kind {
        CollectiveKind::Barrier | CollectiveKind::Receive => 0,
        CollectiveKind::AllReduce => {
            let own = even_piece(total, size, rank).len();
            total - own + own * (size - 1)
        }
        CollectiveKind::ReduceScatter | CollectiveKind::AllToAll => total - counts[rank],
        CollectiveKind::AllGather => counts[rank] * (size - 1),
        CollectiveKind::Broadcast => {
            if at_root {
                total * (size - 1)
            } else {
                0
            }
        }
        CollectiveKind::Reduce => {
            if at_root {
                0
            } else {
                total
            }
        }
        CollectiveKind::Gather => {
            if at_root {
                0
            } else {
                counts[rank]
            }
        }
        CollectiveKind::Scatter => {
            if at_root {
                total - counts[rank]
            } else {
                0
            }
        }
        CollectiveKind::Send => {
            if at_root {
                0
            } else {
                total
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use phalanx_tensor::DType;

    use super::*;

    fn signature(kind: CollectiveKind, counts: &[usize], wanted: &[usize]) -> Signature {
        let (counts, wanted) = (counts.to_vec(), wanted.to_vec());
        Signature { kind, by: None, dtype: Some(DType::F32), root: Some(1), counts, wanted, on_gpus: false }
    }

    #[test]
    fn blocks_follow_each_other() {
        assert_eq!(ranges(&[3, 0, 2]), [0..3, 3..3, 3..5]);
    }

    #[test]
    fn an_all_reduce_of_three_over_two_ranks() {
        let all = vec![signature(CollectiveKind::AllReduce, &[3], &[]); 2];
        let both = |range: Range<usize>| vec![output(0, range.clone()), output(1, range)];
        let wanted = [
            Transfer { owner: 0, sources: both(0..2), dests: both(0..2) },
            Transfer { owner: 1, sources: both(2..3), dests: both(2..3) },
        ];
        assert_eq!(plan(&[&all[0], &all[1]], &[false; 2]), wanted);
    }

    #[test]
    fn an_all_gather_in_place_reads_where_it_writes() {
        let all = vec![signature(CollectiveKind::AllGather, &[2, 1], &[]); 2];
        let plan = plan(&[&all[0], &all[1]], &[true, false]);
        assert_eq!(plan[0].sources, [output(0, 0..2)]);
        assert_eq!(plan[1].sources, [input(1, 0..1)]);
        assert_eq!(plan[1].dests, [output(0, 2..3), output(1, 2..3)]);
    }

    #[test]
    fn the_elements_sent_are_those_of_the_plan() {
        let size = 3;
        for kind in CollectiveKind::ALL
            .into_iter()
            .filter(|k| !matches!(k, CollectiveKind::Send | CollectiveKind::Receive))
        {
            let all: Vec<_> = (0..size)
                .map(|r| match kind {
                    CollectiveKind::Barrier => signature(kind, &[], &[]),
                    CollectiveKind::AllReduce | CollectiveKind::Broadcast | CollectiveKind::Reduce => {
                        signature(kind, &[7], &[])
                    }
                    CollectiveKind::AllToAll => {
                        signature(kind, &[1 + r, 2 + r, 3 + r], &[1 + r, 2 + r, 3 + r])
                    }
                    _ => signature(kind, &[4, 0, 2], &[]),
                })
                .collect();
            let plan = plan(&all.iter().collect::<Vec<_>>(), &[false; 3]);
            for (rank, signature) in all.iter().enumerate() {
                let planned: usize = plan
                    .iter()
                    .map(|t| match t.owner == rank {
                        true => t.dests.iter().filter(|d| d.rank != rank).map(|d| d.range.len()).sum(),
                        false => {
                            t.sources.iter().filter(|s| s.rank == rank).map(|s| s.range.len()).sum::<usize>()
                        }
                    })
                    .sum();
                assert_eq!(sent(signature, rank, size), planned, "{kind:?} on rank {rank}");
            }
        }
    }
}
