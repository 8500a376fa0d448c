//! The suite that every backend passes: what one rank calls and checks. Its random programs of collectives are derived from a
//! seed, so every rank has the same.

use phalanx_parallel::comm::{Call, CollectiveKind, Comm, Pending, Reduction};
use phalanx_tensor::{DType, Device, Tensor};

use crate::twin::{Value, bits, collective, draw, tensor, values};

/// The kinds that all ranks of a group call.
pub const COLLECTIVES: &[CollectiveKind] = &[
    CollectiveKind::Barrier,
    CollectiveKind::AllReduce,
    CollectiveKind::ReduceScatter,
    CollectiveKind::AllGather,
    CollectiveKind::Broadcast,
    CollectiveKind::Reduce,
    CollectiveKind::Gather,
    CollectiveKind::Scatter,
    CollectiveKind::AllToAll,
];

/// The reductions that a dtype has.
fn reductions(dtype: DType) -> Vec<Reduction> {
    let (numbers, bits) =
        ([Reduction::Sum, Reduction::Prod], [Reduction::BitAnd, Reduction::BitOr, Reduction::BitXor]);
    let mut all = vec![Reduction::Max, Reduction::Min];
    if dtype != DType::Bool {
        all.extend(numbers);
    }
    match dtype.is_float() {
        true => all.push(Reduction::Avg),
        false => all.extend(bits),
    }
    all
}

/// One step of a program.
#[derive(Clone, Copy, Debug)]
pub struct Step {
    pub kind: CollectiveKind,
    pub by: Reduction,
    pub dtype: DType,
    pub count: usize,
    pub root: usize,
    pub seed: u64,
}

impl Step {
    /// A random step of a group of `size` ranks.
    pub fn random(seed: u64, size: usize) -> Step {
        let pick = |n: u64, of: usize| (draw(seed, n) % of as u64) as usize;
        let dtype = DType::ALL[pick(1, 8)];
        let reductions = reductions(dtype);
        let by = reductions[pick(2, reductions.len())];
        // Mostly small; sometimes nothing, sometimes more than one piece.
        let count = [0, 1 + pick(3, 7), 1 + pick(3, 300), 1 + pick(3, 300), 100_000][pick(4, 20).min(4)];
        let count = if pick(4, 20) < 4 || pick(5, 10) == 0 { count } else { 1 + pick(3, 100) };
        let kind = COLLECTIVES[pick(6, COLLECTIVES.len())];
        Step { kind, by, dtype, count, root: pick(7, size), seed: draw(seed, 8) }
    }

    /// Elements that each rank gives and gets; those that it does not bring are 0.
    fn sizes(&self, rank: usize, size: usize) -> (usize, usize) {
        let (one, all) = (self.count, self.count * size);
        match self.kind {
            CollectiveKind::AllReduce | CollectiveKind::Broadcast | CollectiveKind::Reduce => (one, one),
            CollectiveKind::ReduceScatter => (all, one),
            CollectiveKind::AllGather => (one, all),
            CollectiveKind::Gather => (one, if rank == self.root { all } else { 0 }),
            CollectiveKind::Scatter => (if rank == self.root { all } else { 0 }, one),
            CollectiveKind::AllToAll => (all, all),
            CollectiveKind::Barrier | CollectiveKind::Send | CollectiveKind::Receive => (0, 0),
        }
    }

    /// Starts it on one rank.
    pub fn start(&self, comm: &Comm, device: Device) -> Running {
        let (rank, size) = (comm.rank(), comm.size());
        let draws = |salt: u64, pick: fn((usize, usize)) -> usize| -> Vec<Vec<Value>> {
            let one = |r| values(self.dtype, draw(self.seed, salt + r as u64), pick(self.sizes(r, size)));
            (0..size).map(one).collect()
        };
        let (inputs, before) = (draws(0, |s| s.0), draws(1000, |s| s.1));
        let in_place = matches!(
            self.kind,
            CollectiveKind::AllReduce | CollectiveKind::Broadcast | CollectiveKind::Reduce
        );
        let before = if in_place { inputs.clone() } else { before };
        let make = |values: &[Value]| tensor(self.dtype, values, device);
        let (input, output) = (make(&inputs[rank]), make(&before[rank]));
        let at_root = |t: &Tensor| (rank == self.root).then(|| t.clone());
        let call = match self.kind {
            CollectiveKind::AllReduce => Call::all_reduce(output.clone(), self.by),
            CollectiveKind::ReduceScatter => Call::reduce_scatter(output.clone(), input, self.by),
            CollectiveKind::AllGather => Call::all_gather(output.clone(), input),
            CollectiveKind::Broadcast => Call::broadcast(output.clone(), self.root),
            CollectiveKind::Reduce => Call::reduce(output.clone(), self.root, self.by),
            CollectiveKind::Gather => Call::gather(at_root(&output), input, self.root),
            CollectiveKind::Scatter => Call::scatter(output.clone(), at_root(&input), self.root),
            CollectiveKind::AllToAll => Call::all_to_all(output.clone(), input),
            CollectiveKind::Barrier => Call::barrier(),
            CollectiveKind::Send | CollectiveKind::Receive => unreachable!("is no collective"),
        };
        let wanted = collective(self.kind, self.by, self.root, &inputs, &before).swap_remove(rank);
        Running { pending: comm.start(call), output, wanted, step: *self }
    }
}

/// A step that was started.
pub struct Running {
    pending: Pending,
    output: Tensor,
    wanted: Vec<Value>,
    step: Step,
}

impl Running {
    /// Waits for it and compares.
    pub fn finish(self) -> Result<(), String> {
        self.pending.wait().map_err(|e| e.to_string())?;
        let wanted: Vec<u64> = self.wanted.into_iter().map(Value::bits).collect();
        let got = bits(&self.output);
        if self.step.kind != CollectiveKind::Barrier && got != wanted {
            let at = got.iter().zip(&wanted).position(|(a, b)| a != b);
            return Err(format!("WRONG {:?}: first at {at:?} of {}", self.step, wanted.len()));
        }
        Ok(())
    }
}

/// Everything that needs no fault.
pub fn all(comm: &Comm, device: Device) -> Result<(), String> {
    every_collective_of_every_dtype(comm, device)?;
    undefined_reductions(comm, device);
    let text = |e: phalanx_parallel::comm::Error| e.to_string();
    uneven_shares(comm, device).map_err(text)?;
    in_place_and_strided(comm, device).map_err(text)?;
    messages(comm, device).map_err(text)?;
    groups(comm, device)?;
    many_at_once(comm, device)
}

type Result<T, E = phalanx_parallel::comm::Error> = std::result::Result<T, E>;

fn every_collective_of_every_dtype(comm: &Comm, device: Device) -> Result<(), String> {
    for &kind in COLLECTIVES {
        for dtype in DType::ALL {
            let reduces = matches!(
                kind,
                CollectiveKind::AllReduce | CollectiveKind::ReduceScatter | CollectiveKind::Reduce
            );
            // The others take no notice of it.
            let all = if reduces { reductions(dtype) } else { vec![Reduction::Max] };
            for by in all {
                for (count, root) in [(0, 0), (1, comm.size() - 1), (300, comm.size() / 2)] {
                    Step { kind, by, dtype, count, root, seed: count as u64 }.start(comm, device).finish()?;
                }
            }
        }
    }
    // More than one piece for each thread, and a last one that is shorter.
    let seed = 5;
    Step { kind: COLLECTIVES[1], by: Reduction::Sum, dtype: DType::F32, count: 200_001, root: 0, seed }
        .start(comm, device)
        .finish()
}

/// A reduction that a dtype has not is refused by its name, before any rank waits for another.
fn undefined_reductions(comm: &Comm, device: Device) {
    let all = [
        Reduction::Sum,
        Reduction::Prod,
        Reduction::Avg,
        Reduction::BitAnd,
        Reduction::BitOr,
        Reduction::BitXor,
    ];
    for dtype in DType::ALL {
        for by in all.into_iter().filter(|by| !reductions(dtype).contains(by)) {
            let mut x = Tensor::zeros(&[2], dtype, device).unwrap();
            let refused = comm.all_reduce(&mut x, by).unwrap_err().to_string();
            let elements = if dtype == DType::Bool { "bools".into() } else { dtype.to_string() };
            assert!(
                refused.contains(&format!("all_reduce: got the {by} of {elements}, wanted")),
                "{refused}"
            );
        }
    }
}

fn numbers(range: std::ops::Range<usize>, device: Device) -> Result<Tensor> {
    let values: Vec<f32> = range.map(|i| i as f32).collect();
    Ok(Tensor::from_slice(&values, &[values.len()], device)?)
}

/// Rank `r` has `r + 1` elements.
fn uneven_shares(comm: &Comm, device: Device) -> Result<()> {
    let (rank, size) = (comm.rank(), comm.size());
    let counts: Vec<usize> = (1..=size).collect();
    let (begin, total) = (rank * (rank + 1) / 2, size * (size + 1) / 2);
    let mine = numbers(begin..begin + rank + 1, device)?;
    let all = Tensor::zeros(&[total], DType::F32, device)?;
    comm.run(Call::all_gather_uneven(all.clone(), mine.clone(), &counts))?;
    assert_eq!(all.to_vec::<f32>()?, numbers(0..total, device)?.to_vec::<f32>()?);
    comm.run(Call::reduce_scatter_uneven(mine.clone(), all, &counts, Reduction::Sum))?;
    let wanted: Vec<f32> = (begin..begin + rank + 1).map(|i| (i * size) as f32).collect();
    assert_eq!(mine.to_vec::<f32>()?, wanted);
    // Rank q sends r elements of value q to rank r.
    let sent: Vec<usize> = (0..size).collect();
    let from = Tensor::from_slice(&vec![rank as f32; sent.iter().sum()], &[sent.iter().sum()], device)?;
    let to = Tensor::zeros(&[rank * size], DType::F32, device)?;
    comm.run(Call::all_to_all_uneven(to.clone(), &vec![rank; size], from, &sent))?;
    let wanted: Vec<f32> = (0..rank * size).map(|i| (i / rank.max(1)) as f32).collect();
    assert_eq!(to.to_vec::<f32>()?, wanted);
    Ok(())
}

fn in_place_and_strided(comm: &Comm, device: Device) -> Result<()> {
    let (rank, size) = (comm.rank(), comm.size());
    // This rank's part is in its place already.
    let mut all = Tensor::zeros(&[size, 3], DType::F32, device)?;
    let mine = all.narrow(0, rank, 1)?;
    let three = numbers(3 * rank..3 * rank + 3, device)?;
    let from = mine.with_shape(&[3])?;
    from.clone().copy_from(&three)?;
    comm.all_gather(&mut all, &from)?;
    assert_eq!(all.to_vec::<f32>()?, numbers(0..3 * size, device)?.to_vec::<f32>()?);
    // A share of the input itself as the output.
    let mut own = all.narrow(0, rank, 1)?;
    comm.reduce_scatter(&mut own, &all, Reduction::Max)?;
    assert_eq!(own.with_shape(&[3])?.to_vec::<f32>()?, three.to_vec::<f32>()?);
    // An input of any strides.
    let square = numbers(0..size * size, device)?.with_shape(&[size, size])?.transpose(0, 1)?;
    let mut column = Tensor::zeros(&[size], DType::F32, device)?;
    comm.scatter(&mut column, (rank == 0).then_some(&square), 0)?;
    let wanted: Vec<f32> = (0..size).map(|i| (i * size + rank) as f32).collect();
    assert_eq!(column.to_vec::<f32>()?, wanted);
    // Nothing but contiguous tensors is written.
    let mut strided = numbers(0..4, device)?.with_shape(&[2, 2])?.transpose(0, 1)?;
    let refused = comm.all_reduce(&mut strided, Reduction::Sum).unwrap_err().to_string();
    assert!(refused.contains("wanted a contiguous tensor"), "{refused}");
    Ok(())
}

/// Round the ring, several messages under way at once.
fn messages(comm: &Comm, device: Device) -> Result<()> {
    let (rank, size) = (comm.rank(), comm.size());
    let (next, last) = ((rank + 1) % size, (rank + size - 1) % size);
    let send =
        |i: usize| Ok(comm.start(Call::send(numbers(100 * rank + i..100 * rank + 2 * i, device)?, next)));
    let sends: Vec<_> = (0..4).map(send).collect::<Result<_>>()?;
    for i in 0..4 {
        let mut came = Tensor::zeros(&[i], DType::F32, device)?;
        comm.recv(&mut came, last)?;
        assert_eq!(
            came.to_vec::<f32>()?,
            numbers(100 * last + i..100 * last + 2 * i, device)?.to_vec::<f32>()?
        );
    }
    sends.into_iter().try_for_each(|send| send.wait())
}

fn groups(comm: &Comm, device: Device) -> Result<(), String> {
    let text = |e: phalanx_parallel::comm::Error| e.to_string();
    let (rank, size) = (comm.rank(), comm.size());
    // Backwards by parity; the last rank of three or more stays out.
    let color = (size < 3 || rank + 1 < size).then_some((rank % 2) as u32);
    if let Some(group) = comm.split(color, -(rank as i64)).map_err(text)? {
        assert_eq!(group.ranks()[group.rank()], comm.ranks()[rank]);
        assert!(group.ranks().is_sorted_by(|a, b| a > b), "{:?}", group.ranks());
        (0..20).try_for_each(|i| Step::random(i, group.size()).start(&group, device).finish())?;
    }
    // Two groups of the same ranks do not get in each other's way.
    let all: Vec<usize> = (0..size).rev().collect();
    let (a, b) = (comm.group(&all).map_err(text)?, comm.group(&all).map_err(text)?);
    let step = |i| Step::random(i, size);
    let (first, second) = match rank % 2 {
        0 => (step(1).start(&a, device), step(2).start(&b, device)),
        _ => {
            let second = step(2).start(&b, device);
            (step(1).start(&a, device), second)
        }
    };
    first.finish()?;
    second.finish()
}

fn many_at_once(comm: &Comm, device: Device) -> Result<(), String> {
    let started: Vec<_> = (100..150).map(|i| Step::random(i, comm.size()).start(comm, device)).collect();
    started.into_iter().try_for_each(|running| running.finish())
}
