//! Random programs of collectives, which every rank derives from the same seed.

use phalanx_parallel::comm::{Call, Comm, Kind, Pending, Reduction};
use phalanx_tensor::{DType, Device, Tensor};

use crate::twin::{Value, bits, collective, draw, tensor, values};

/// The kinds that all ranks of a group call.
pub const COLLECTIVES: [Kind; 9] = [
    Kind::Barrier,
    Kind::AllReduce,
    Kind::ReduceScatter,
    Kind::AllGather,
    Kind::Broadcast,
    Kind::Reduce,
    Kind::Gather,
    Kind::Scatter,
    Kind::AllToAll,
];

const REDUCTIONS: [Reduction; 4] = [Reduction::Sum, Reduction::Prod, Reduction::Max, Reduction::Min];

/// One step of a program.
#[derive(Clone, Copy, Debug)]
pub struct Step {
    pub kind: Kind,
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
        let by = REDUCTIONS[if dtype == DType::Bool { 2 + pick(2, 2) } else { pick(2, 4) }];
        // Mostly small; sometimes nothing, sometimes more than one piece.
        let count = [0, 1 + pick(3, 7), 1 + pick(3, 300), 1 + pick(3, 300), 100_000][pick(4, 20).min(4)];
        let count = if pick(4, 20) < 4 || pick(5, 10) == 0 { count } else { 1 + pick(3, 100) };
        Step { kind: COLLECTIVES[pick(6, 9)], by, dtype, count, root: pick(7, size), seed: draw(seed, 8) }
    }

    /// Elements that each rank gives and gets; those that it does not bring are 0.
    fn sizes(&self, rank: usize, size: usize) -> (usize, usize) {
        let (one, all) = (self.count, self.count * size);
        match self.kind {
            Kind::AllReduce | Kind::Broadcast | Kind::Reduce => (one, one),
            Kind::ReduceScatter => (all, one),
            Kind::AllGather => (one, all),
            Kind::Gather => (one, if rank == self.root { all } else { 0 }),
            Kind::Scatter => (if rank == self.root { all } else { 0 }, one),
            Kind::AllToAll => (all, all),
            _ => (0, 0),
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
        let in_place = matches!(self.kind, Kind::AllReduce | Kind::Broadcast | Kind::Reduce);
        let before = if in_place { inputs.clone() } else { before };
        let make = |values: &[Value]| tensor(self.dtype, values, device);
        let (input, output) = (make(&inputs[rank]), make(&before[rank]));
        let at_root = |t: &Tensor| (rank == self.root).then(|| t.clone());
        let call = match self.kind {
            Kind::AllReduce => Call::all_reduce(output.clone(), self.by),
            Kind::ReduceScatter => Call::reduce_scatter(output.clone(), input, self.by),
            Kind::AllGather => Call::all_gather(output.clone(), input),
            Kind::Broadcast => Call::broadcast(output.clone(), self.root),
            Kind::Reduce => Call::reduce(output.clone(), self.root, self.by),
            Kind::Gather => Call::gather(at_root(&output), input, self.root),
            Kind::Scatter => Call::scatter(output.clone(), at_root(&input), self.root),
            Kind::AllToAll => Call::all_to_all(output.clone(), input),
            _ => Call::barrier(),
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
        if self.step.kind != Kind::Barrier && got != wanted {
            let at = got.iter().zip(&wanted).position(|(a, b)| a != b);
            return Err(format!("WRONG {:?}: first at {at:?} of {}", self.step, wanted.len()));
        }
        Ok(())
    }
}
