//! [`route`]: the steps of one rank for a call, which a `CallStream` carries out on the GPU. A pure function: no communication.
//!
//! It follows the same plan as the wires ([`plan`]): ranks send their parts of a chunk to its owner, which adds them in order
//! of the ranks and sends the sum to the destinations. Parts are added in rounds, so the owner needs a buffer of bounded size.
//! Where nothing is added and every rank gets the same, NCCL's own broadcast or all-gather does the last step, since NCCL
//! knows how the GPUs are connected.

use std::ops::Range;

use super::Sums;
use crate::comm::plan::{Segment, Side, Transfer, plan};
use crate::comm::{CollectiveKind, Reduction, Signature};

/// Bytes of the buffer for parts that an owner receives.
const BUFFER_BYTES: usize = 64 << 20;
/// Elements of a round are a multiple of this, so that rounds begin where packets do.
const ROUND: usize = 64;

/// One thing after the other.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// Messages that go at the same time.
    Exchange(Vec<Message>),
    /// This rank's elements of `own` and those in the buffer become `out`.
    Combine { own: (Side, Range<usize>), out: Range<usize>, by: Reduction },
    /// NCCL's own collective.
    Native(Native),
}

/// Elements to or from a rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Message {
    Send {
        from: Side,
        range: Range<usize>,
        to: usize,
    },
    /// Into the output.
    Receive {
        range: Range<usize>,
        from: usize,
    },
    /// A part that this rank adds, into the buffer for parts.
    ReceivePart {
        range: Range<usize>,
        from: usize,
    },
}

/// A collective of NCCL's own. All but the all-gather work in place, in the output.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Native {
    Broadcast { root: usize, count: usize },
    AllGather { own: (Side, usize), count: usize },
    AllReduce { by: Reduction, count: usize },
    ReduceScatter { by: Reduction, count: usize },
    Reduce { by: Reduction, root: usize, count: usize },
}

/// The steps of rank `me` of `size`. `in_place`: its input is in the output already.
pub(super) fn route(
    signature: &Signature,
    (me, size): (usize, usize),
    in_place: bool,
    sums: Sums,
) -> Vec<Step> {
    let Signature { kind, counts, by, .. } = signature;
    let (first, total) = (counts.first().copied().unwrap_or(0), counts.iter().sum::<usize>());
    let even = counts.iter().all(|&count| count == first);
    let root = signature.root.unwrap_or(0);
    // NCCL has no bitwise reductions.
    let by = by.filter(|by| !by.is_bitwise());
    let native = sums == Sums::Library;
    let whole = match (kind, by) {
        _ if total == 0 => None,
        (CollectiveKind::Broadcast, _) => Some(Native::Broadcast { root, count: total }),
        (CollectiveKind::AllGather, _) if even => Some(gather(in_place, me, first)),
        (CollectiveKind::AllReduce, Some(by)) if native => Some(Native::AllReduce { by, count: total }),
        (CollectiveKind::ReduceScatter, Some(by)) if native && even => {
            Some(Native::ReduceScatter { by, count: first })
        }
        (CollectiveKind::Reduce, Some(by)) if native => Some(Native::Reduce { by, root, count: total }),
        _ => None,
    };
    if let Some(whole) = whole {
        return vec![Step::Native(whole)];
    }
    let transfers = transfers(signature, me, size, in_place);
    let mut steps = rounds(&transfers, signature, (me, size));
    match (kind, total % size) {
        (CollectiveKind::AllReduce, 0) if total > 0 => {
            let count = total / size;
            steps.push(Step::Native(Native::AllGather { own: (Side::Output, me * count), count }));
        }
        _ => steps.extend(results(&transfers, me)),
    }
    steps
}

fn gather(in_place: bool, me: usize, count: usize) -> Native {
    let own = if in_place { (Side::Output, me * count) } else { (Side::Input, 0) };
    Native::AllGather { own, count }
}

/// The call's transfers; of those that are not this rank's, an all-to-all has none.
fn transfers(signature: &Signature, me: usize, size: usize, in_place: bool) -> Vec<Transfer> {
    let Signature { kind: CollectiveKind::AllToAll, counts, wanted, .. } = signature else {
        let here = Signature { on_gpus: false, ..signature.clone() };
        return plan(&vec![&here; size], &vec![in_place; size]);
    };
    let place = |rank, side, range: Range<usize>| vec![Segment { rank, side, range }];
    let (sent, wanted) = (crate::comm::plan::ranges(counts), crate::comm::plan::ranges(wanted));
    let to = |q: usize| {
        let dest = if q == me { wanted[me].clone() } else { 0..sent[q].len() };
        let sources = place(me, Side::Input, sent[q].clone());
        Transfer { owner: me, sources, dests: place(q, Side::Output, dest) }
    };
    let from = |q: usize| {
        let sources = place(q, Side::Input, 0..wanted[q].len());
        Transfer { owner: q, sources, dests: place(me, Side::Output, wanted[q].clone()) }
    };
    (0..size).map(to).chain((0..size).filter(|&q| q != me).map(from)).collect()
}

/// The reductions, until each owner has its sum in its output.
fn rounds(transfers: &[Transfer], signature: &Signature, (me, size): (usize, usize)) -> Vec<Step> {
    let Some(by) = signature.by.filter(|_| size > 1) else { return vec![] };
    let bytes = signature.dtype.map_or(1, |dtype| dtype.size());
    let step = (BUFFER_BYTES / bytes / (size - 1) / ROUND).max(1) * ROUND;
    let longest = transfers.iter().map(|t| t.dests[0].range.len()).max().unwrap_or(0);
    let mut steps = vec![];
    for start in (0..longest).step_by(step) {
        let part = |range: &Range<usize>| {
            let end = range.len().min(start + step);
            range.start + start.min(end)..range.start + end
        };
        let (mut messages, mut combine) = (vec![], None);
        for Transfer { owner, sources, dests } in transfers {
            let Some(own) = sources.iter().find(|source| source.rank == me) else { continue };
            let range = part(&own.range);
            // A single rank's elements are not combined: the owner sends them with the results.
            if range.is_empty() || sources.len() == 1 {
                continue;
            }
            if *owner != me {
                messages.push(Message::Send { from: own.side, range, to: *owner });
                continue;
            }
            let others = sources.iter().filter(|source| source.rank != me).enumerate();
            messages.extend(others.map(|(i, source)| Message::ReceivePart {
                range: i * range.len()..(i + 1) * range.len(),
                from: source.rank,
            }));
            let out = dests.iter().find(|dest| dest.rank == me).map(|dest| part(&dest.range));
            combine = out.map(|out| Step::Combine { own: (own.side, range), out, by });
        }
        if !messages.is_empty() {
            steps.push(Step::Exchange(messages));
        }
        steps.extend(combine);
    }
    steps
}

/// The messages from the owners to the destinations.
fn results(transfers: &[Transfer], me: usize) -> Option<Step> {
    let mut messages = vec![];
    for Transfer { owner, sources, dests } in transfers {
        for dest in dests.iter().filter(|dest| !dest.range.is_empty()) {
            if *owner == me {
                // The combined elements lie in the owner's own output.
                let combined = dests.iter().find(|dest| dest.rank == me).filter(|_| sources.len() > 1);
                let from = combined.or(sources.first());
                let Some(Segment { side, range, .. }) = from.filter(|from| *from != dest) else { continue };
                messages.push(Message::Send { from: *side, range: range.clone(), to: dest.rank });
            }
            if dest.rank == me && !(*owner == me && (sources.len() > 1 || sources.first() == Some(dest))) {
                messages.push(Message::Receive { range: dest.range.clone(), from: *owner });
            }
        }
    }
    (!messages.is_empty()).then_some(Step::Exchange(messages))
}

#[cfg(test)]
mod tests {
    use std::collections::{HashMap, VecDeque};

    use phalanx_tensor::DType;

    use super::*;

    fn signature(kind: CollectiveKind, counts: &[usize], wanted: &[usize], root: Option<usize>) -> Signature {
        let reduces = matches!(
            kind,
            CollectiveKind::AllReduce | CollectiveKind::ReduceScatter | CollectiveKind::Reduce
        );
        let (by, dtype) = (reduces.then_some(Reduction::Sum), Some(DType::F64));
        Signature { kind, by, dtype, root, counts: counts.to_vec(), wanted: wanted.to_vec(), on_gpus: true }
    }

    #[test]
    fn an_uneven_all_reduce_of_two() {
        let all_reduce = signature(CollectiveKind::AllReduce, &[3], &[], None);
        let give = Message::Send { from: Side::Output, range: 2..3, to: 1 };
        let part = Message::ReceivePart { range: 0..2, from: 1 };
        let combine = Step::Combine { own: (Side::Output, 0..2), out: 0..2, by: Reduction::Sum };
        let mine = Message::Send { from: Side::Output, range: 0..2, to: 1 };
        let theirs = Message::Receive { range: 2..3, from: 1 };
        let wanted = [Step::Exchange(vec![part, give]), combine, Step::Exchange(vec![mine, theirs])];
        assert_eq!(route(&all_reduce, (0, 2), true, Sums::InOrder), wanted);
    }

    #[test]
    fn nccl_does_what_adds_nothing_and_all_of_it_if_asked() {
        let even = signature(CollectiveKind::AllReduce, &[8], &[], None);
        let gathered = Step::Native(Native::AllGather { own: (Side::Output, 4), count: 4 });
        assert_eq!(route(&even, (1, 2), true, Sums::InOrder).last(), Some(&gathered));
        let whole = Step::Native(Native::AllReduce { by: Reduction::Sum, count: 8 });
        assert_eq!(route(&even, (1, 2), true, Sums::Library), [whole]);
        let bits = Signature { by: Some(Reduction::BitOr), dtype: Some(DType::I64), ..even.clone() };
        assert_eq!(route(&bits, (1, 2), true, Sums::Library), route(&bits, (1, 2), true, Sums::InOrder));
        let broadcast = Step::Native(Native::Broadcast { root: 1, count: 5 });
        assert_eq!(
            route(&signature(CollectiveKind::Broadcast, &[5], &[], Some(1)), (0, 2), true, Sums::InOrder),
            [broadcast]
        );
    }

    #[test]
    fn calls_of_nothing_have_no_steps() {
        for kind in CollectiveKind::ALL {
            let counts = if kind == CollectiveKind::Barrier { vec![] } else { vec![0; 3] };
            let steps = route(&signature(kind, &counts, &[0; 3], Some(0)), (1, 3), false, Sums::InOrder);
            assert_eq!(steps, [], "{kind:?}");
        }
    }

    #[test]
    fn rounds_need_a_bounded_buffer() {
        let count = 3 * BUFFER_BYTES / 8 + 1;
        let steps =
            route(&signature(CollectiveKind::Reduce, &[count], &[], Some(2)), (2, 3), true, Sums::InOrder);
        let (mut rounds, mut buffer) = (0, 0);
        for step in &steps {
            let Step::Exchange(messages) = step else { continue };
            rounds += 1;
            for message in messages {
                let Message::ReceivePart { range, .. } = message else { panic!("{message:?}") };
                buffer = buffer.max(range.end * 8);
            }
        }
        assert_eq!(rounds, 7);
        assert!(buffer <= BUFFER_BYTES && buffer > BUFFER_BYTES / 2, "{buffer}");
    }

    /// One rank's tensors.
    #[derive(Clone, Debug)]
    struct Memory {
        input: Vec<f64>,
        output: Vec<f64>,
        buffer: Vec<f64>,
    }

    /// Carries out the steps of all ranks as GPUs do: a step waits for its messages, NCCL's all-gather for all ranks.
    fn run(signature: &[Signature], memory: &mut [Memory], in_place: bool) {
        let size = memory.len();
        let mut steps: Vec<VecDeque<Step>> =
            (0..size).map(|me| route(&signature[me], (me, size), in_place, Sums::InOrder).into()).collect();
        let mut mail = Mail::new();
        let mut sent = vec![false; size];
        while steps.iter().any(|steps| !steps.is_empty()) {
            let gathering = |steps: &VecDeque<Step>| matches!(steps.front(), Some(Step::Native(_)));
            if steps.iter().all(gathering) {
                let parts = steps.iter_mut().zip(&*memory).map(|(steps, m)| m.part(steps.pop_front()));
                let all: Vec<f64> = parts.collect::<Vec<_>>().concat();
                memory.iter_mut().for_each(|m| m.output[..all.len()].copy_from_slice(&all));
                continue;
            }
            let mut moved = false;
            for me in 0..size {
                let done = match steps[me].front() {
                    Some(Step::Exchange(messages)) => {
                        if !std::mem::replace(&mut sent[me], true) {
                            memory[me].send(messages, me, &mut mail);
                        }
                        let came = memory[me].receive(messages, me, &mut mail);
                        sent[me] = !came;
                        came
                    }
                    Some(Step::Combine { own, out, .. }) => {
                        memory[me].combine(own, out.clone(), me);
                        true
                    }
                    _ => false,
                };
                if done {
                    steps[me].pop_front();
                    moved = true;
                }
            }
            assert!(moved, "every rank waits: {steps:?}");
        }
        assert!(mail.values().all(VecDeque::is_empty), "messages that no rank took");
    }

    type Mail = HashMap<(usize, usize), VecDeque<Vec<f64>>>;

    impl Memory {
        fn side(&self, side: Side) -> &[f64] {
            if side == Side::Input { &self.input } else { &self.output }
        }

        fn part(&self, step: Option<Step>) -> Vec<f64> {
            let Some(Step::Native(Native::AllGather { own: (side, at), count })) = step else {
                panic!("{step:?}")
            };
            self.side(side)[at..at + count].to_vec()
        }

        fn send(&self, messages: &[Message], me: usize, mail: &mut Mail) {
            for message in messages {
                if let Message::Send { from, range, to } = message {
                    mail.entry((me, *to)).or_default().push_back(self.side(*from)[range.clone()].to_vec());
                }
            }
        }

        /// Whether all messages had come.
        fn receive(&mut self, messages: &[Message], me: usize, mail: &mut Mail) -> bool {
            let from = |message: &Message| match message {
                Message::Send { .. } => None,
                Message::Receive { from, .. } | Message::ReceivePart { from, .. } => Some(*from),
            };
            if !messages.iter().filter_map(from).all(|q| mail.get(&(q, me)).is_some_and(|m| !m.is_empty())) {
                return false;
            }
            for message in messages {
                let (to, range, from) = match message {
                    Message::Send { .. } => continue,
                    Message::Receive { range, from } => (&mut self.output, range, from),
                    Message::ReceivePart { range, from } => (&mut self.buffer, range, from),
                };
                let came = mail.get_mut(&(*from, me)).unwrap().pop_front().unwrap();
                to.resize(to.len().max(range.end), f64::NAN);
                to[range.clone()].copy_from_slice(&came);
            }
            true
        }

        fn combine(&mut self, (side, own): &(Side, Range<usize>), out: Range<usize>, me: usize) {
            let (count, own) = (own.len(), self.side(*side)[own.clone()].to_vec());
            let came = std::mem::take(&mut self.buffer);
            let mut parts: Vec<&[f64]> = came.chunks(count).collect();
            parts.insert(me, &own);
            let sum = |i: usize| parts[1..].iter().fold(parts[0][i], |sum, part| sum + part[i]);
            let sums: Vec<f64> = (0..count).map(sum).collect();
            self.output[out].copy_from_slice(&sums);
        }
    }

    /// Values whose sums show their order.
    fn draw(rank: usize, i: usize) -> f64 {
        let x = (rank * 1000 + i + 1) as f64 * 0.618_033_988_749_894_9;
        x.fract() * 10f64.powi((i + 5 * rank) as i32 % 17)
    }

    fn memory(sizes: impl Fn(usize) -> (usize, usize), size: usize) -> Vec<Memory> {
        let one = |rank| {
            let (input, output) = sizes(rank);
            let output = (0..output).map(|i| draw(rank, i)).collect();
            Memory { input: (0..input).map(|i| draw(rank, i)).collect(), output, buffer: vec![] }
        };
        (0..size).map(one).collect()
    }

    #[test]
    fn all_ranks_routes_together_do_what_each_collective_says() {
        for size in 1..5 {
            let sum = |i: usize| (1..size).fold(draw(0, i), |sum, rank| sum + draw(rank, i));
            for count in [1, 3, 8, 65] {
                let mut m = memory(|_| (0, count), size);
                run(&vec![signature(CollectiveKind::AllReduce, &[count], &[], None); size], &mut m, true);
                let wanted: Vec<f64> = (0..count).map(sum).collect();
                assert!(m.iter().all(|m| m.output == wanted), "all_reduce of {count} on {size}");

                let root = size - 1;
                let mut m = memory(|_| (0, count), size);
                run(&vec![signature(CollectiveKind::Reduce, &[count], &[], Some(root)); size], &mut m, true);
                assert_eq!(m[root].output, wanted, "reduce on {size}");

                // Uneven, with nothing for one rank.
                let counts: Vec<usize> = (0..size).map(|r| if r == 1 { 0 } else { count + r }).collect();
                let (total, begins) = (counts.iter().sum::<usize>(), crate::comm::plan::ranges(&counts));
                let mut m = memory(|r| (total, counts[r]), size);
                run(&vec![signature(CollectiveKind::ReduceScatter, &counts, &[], None); size], &mut m, false);
                for (r, m) in m.iter().enumerate() {
                    let wanted: Vec<f64> = begins[r].clone().map(sum).collect();
                    assert_eq!(m.output, wanted, "reduce_scatter on {size}");
                }
                let joined: Vec<f64> =
                    (0..size).flat_map(|r| (0..counts[r]).map(move |i| draw(r, i))).collect();
                let mut m = memory(|r| (counts[r], total), size);
                run(&vec![signature(CollectiveKind::AllGather, &counts, &[], None); size], &mut m, false);
                assert!(m.iter().all(|m| m.output == joined), "all_gather on {size}");
                let mut m = memory(|r| (counts[r], if r == root { total } else { 0 }), size);
                run(&vec![signature(CollectiveKind::Gather, &counts, &[], Some(root)); size], &mut m, false);
                assert_eq!(m[root].output, joined, "gather on {size}");
                let mut m = memory(|r| (if r == root { total } else { 0 }, counts[r]), size);
                run(&vec![signature(CollectiveKind::Scatter, &counts, &[], Some(root)); size], &mut m, false);
                for (r, m) in m.iter().enumerate() {
                    let wanted: Vec<f64> = begins[r].clone().map(|i| draw(root, i)).collect();
                    assert_eq!(m.output, wanted, "scatter on {size}");
                }
            }
        }
    }

    #[test]
    fn an_uneven_all_to_all_gives_each_pair_its_chunk() {
        let size = 3;
        let count = |q: usize, r: usize| (2 * q + r) % 4;
        let sent: Vec<Vec<usize>> = (0..size).map(|q| (0..size).map(|r| count(q, r)).collect()).collect();
        let wanted: Vec<Vec<usize>> = (0..size).map(|r| (0..size).map(|q| count(q, r)).collect()).collect();
        let all: Vec<Signature> =
            (0..size).map(|r| signature(CollectiveKind::AllToAll, &sent[r], &wanted[r], None)).collect();
        let mut m = memory(|r| (sent[r].iter().sum(), wanted[r].iter().sum()), size);
        run(&all, &mut m, false);
        for (r, m) in m.iter().enumerate() {
            let from = |q: usize| {
                let begin: usize = sent[q][..r].iter().sum();
                (begin..begin + count(q, r)).map(move |i| draw(q, i))
            };
            let wanted: Vec<f64> = (0..size).flat_map(from).collect();
            assert_eq!(m.output, wanted);
        }
    }
}
