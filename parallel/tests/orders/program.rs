//! The communication of a training step on eight ranks, drawn, with plain kernels in the place of a model: two replicas of a pipeline of two
//! stages whose layers are split in two.
//!
//! ```text
//! compute     x += w ── all-reduce of x over the split ── x ...            g += w ── all-reduce of g ── g ...
//! weights     all-gather over the replicas, some layers ahead              the same again
//! gradients                                                                bucket += g ── reduction over the replicas
//! stages      receive x ...                              send x            receive g ...             send g
//! ```
//!
//! Factors are powers of two, so CPUs and GPUs round alike and the host's backend has the same bits.

use std::collections::VecDeque;

use phalanx_kernels::{add_scaled_, fill_, scale_};
use phalanx_parallel::comm::{Call, Comm, Error, Pending, Reduction, Result};
use phalanx_parallel::launch::Rank;
use phalanx_tensor::{DType, Device, Stream, Tensor, record_use};

use crate::case::Draws;

/// How many ranks it has.
pub const RANKS: usize = 8;
/// The steps of a run: the second one uses the first one's buffers again.
const STEPS: usize = 2;

/// What a rank does wrong, to see that it is found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mistake {
    /// Nothing.
    None,
    /// A bucket's reduction does not wait for the stream that adds the gradients.
    NoWait,
    /// Memory of another stream's is dropped without a record of the work that still uses it.
    NoRecord,
    /// A buffer is written again while it is being sent.
    NoWaitBeforeReuse,
    /// Rank 0 waits for a sum over all ranks before it starts its last bucket's reduction; the others start that first.
    UnlikeOrder,
}

/// What is drawn.
#[derive(Clone, Debug)]
struct Plan {
    micro_batches: usize,
    /// Elements of activations.
    width: usize,
    /// Elements of half of each layer's weight, and whether its gradient's replicas get the whole sum or their half.
    layers: Vec<(usize, bool)>,
    /// How many layers ahead weights are gathered.
    ahead: usize,
    /// Whether what the other stage sends is received before this one begins.
    receives_early: bool,
}

impl Plan {
    fn drawn(seed: u64) -> Plan {
        let mut draws = Draws(seed);
        let width = 100 + draws.below(300);
        let layers = (0..2 + draws.below(3)).map(|_| (1 + draws.below(width / 2), draws.below(2) == 0));
        let layers = layers.collect();
        Plan {
            micro_batches: 2 + draws.below(3),
            width,
            layers,
            ahead: draws.below(3),
            receives_early: draws.below(2) == 0,
        }
    }
}

/// Elements that differ by rank and place.
fn values(seed: u64, rank: usize, place: usize, count: usize) -> Vec<f32> {
    let mut draws = Draws(seed ^ ((rank as u64) << 40) ^ ((place as u64) << 48));
    (0..count).map(|_| draws.below(1 << 20) as f32 / (1 << 18) as f32 - 2.0).collect()
}

/// One rank.
struct Program {
    plan: Plan,
    seed: u64,
    mistake: Mistake,
    device: Device,
    world: Comm,
    replicas: Comm,
    split: Comm,
    /// The rank of the other stage, and whether this is the first stage.
    peer: usize,
    is_first: bool,
    /// Adds gradients.
    gradients: Stream,
    /// This replica's half of each layer's weight, the whole weights' gradients, and this half's sum of them.
    shards: Vec<Tensor>,
    buckets: Vec<Tensor>,
    sums: Vec<Tensor>,
    /// What is sent is copied here, and the last send of it.
    outbox: Tensor,
    sent: Option<Pending>,
    /// Weights that are being gathered: the layer, and its weight.
    gathers: VecDeque<(usize, Tensor, Pending)>,
}

/// Runs the program of a number on a rank. The bits of what it has in the end.
pub fn run(seed: u64, rank: &Rank, mistake: Mistake) -> Result<Vec<u64>> {
    let mut program = Program::new(seed, rank, mistake)?;
    let mut norms = Vec::new();
    for step in 0..STEPS {
        norms.push(program.step(step)?);
    }
    let mut bits = Vec::new();
    for shard in &program.shards {
        bits.extend(shard.to_vec::<f32>()?.into_iter().map(|x| u64::from(x.to_bits())));
    }
    for norm in &norms {
        bits.extend(norm.to_vec::<f64>()?.into_iter().map(f64::to_bits));
    }
    program.sent.take().map_or(Ok(()), Pending::wait)?;
    program.world.barrier()?;
    Ok(bits)
}

impl Program {
    fn new(seed: u64, rank: &Rank, mistake: Mistake) -> Result<Program> {
        let (plan, device, world, me) = (Plan::drawn(seed), rank.device(), rank.comm().clone(), rank.rank());
        let (split, replicas) = (world.group(&[me & !1, me | 1])?, world.group(&[me & !2, me | 2])?);
        let shard = |(layer, (half, _)): (usize, &(usize, bool))| {
            Tensor::from_slice(&values(seed, me, layer, *half), &[*half], device)
        };
        let zeros = |count: usize| Tensor::zeros(&[count], DType::F32, device);
        Ok(Program {
            seed,
            mistake,
            device,
            replicas,
            split,
            peer: me ^ 4,
            is_first: me < 4,
            gradients: Stream::new(device)?,
            shards: plan.layers.iter().enumerate().map(shard).collect::<Result<_, _>>()?,
            buckets: plan.layers.iter().map(|(half, _)| zeros(2 * half)).collect::<Result<_, _>>()?,
            sums: plan.layers.iter().map(|(half, _)| zeros(*half)).collect::<Result<_, _>>()?,
            outbox: zeros(plan.width)?,
            sent: None,
            gathers: VecDeque::new(),
            world,
            plan,
        })
    }

    /// Starts to gather the weights of `order` until those `ahead` of the next are on their way; the next one, when it is here.
    fn weight(&mut self, order: &[usize], next: usize) -> Result<Tensor> {
        let begun = next + self.gathers.len();
        for &layer in &order[begun.min(order.len())..(next + 1 + self.plan.ahead).min(order.len())] {
            let whole = Tensor::empty(&[2 * self.plan.layers[layer].0], DType::F32, self.device)?;
            let call = Call::all_gather(whole.clone(), self.shards[layer].clone());
            self.gathers.push_back((layer, whole, self.replicas.start(call)));
        }
        match self.gathers.pop_front() {
            Some((layer, whole, pending)) if layer == order[next] => pending.wait().map(|()| whole),
            other => Err(Error::Launch(format!("layer {} is next, not {other:?}", order[next]))),
        }
    }

    /// A layer's part in `x`, and the sum over the split.
    fn layer(&mut self, x: &mut Tensor, order: &[usize], next: usize) -> Result<()> {
        let weight = self.weight(order, next)?;
        add_scaled_(&mut x.view_into(0, &[weight.numel()])?, &weight, 0.5)?;
        let sum = self.split.start(Call::all_reduce(x.clone(), Reduction::Sum));
        // Memory that comes and goes meanwhile.
        drop(weight.copy()?);
        sum.wait()?;
        Ok(scale_(x, 0.5)?)
    }

    fn receive(&self) -> Result<(Tensor, Pending)> {
        let came = Tensor::empty(&[self.plan.width], DType::F32, self.device)?;
        let pending = self.world.start(Call::recv(came.clone(), self.peer));
        Ok((came, pending))
    }

    /// What the other stage has sent: the first of those that are received already, or the next.
    fn received(&self, early: &mut VecDeque<(Tensor, Pending)>) -> Result<Tensor> {
        let (came, pending) = early.pop_front().map_or_else(|| self.receive(), Ok)?;
        pending.wait().map(|()| came)
    }

    /// Receives of all micro-batches, if they are received early.
    fn receives(&self) -> Result<VecDeque<(Tensor, Pending)>> {
        let count = if self.plan.receives_early { self.plan.micro_batches } else { 0 };
        (0..count).map(|_| self.receive()).collect()
    }

    fn send(&mut self, x: &Tensor) -> Result<()> {
        self.sent.take().map_or(Ok(()), Pending::wait)?;
        self.outbox.copy_from(x)?;
        self.sent = Some(self.world.start(Call::send(self.outbox.clone(), self.peer)));
        if self.mistake == Mistake::NoWaitBeforeReuse {
            fill_(&mut self.outbox, 0.0)?;
        }
        Ok(())
    }

    fn step(&mut self, step: usize) -> Result<Tensor> {
        let (layers, micro_batches) = (self.plan.layers.len(), self.plan.micro_batches);
        let forward: Vec<usize> = (0..layers).collect();
        let mut early = if self.is_first { VecDeque::new() } else { self.receives()? };
        let mut outputs = Vec::new();
        for micro_batch in 0..micro_batches {
            let mut x = match self.is_first {
                true => {
                    let place = 100 + 10 * step + micro_batch;
                    let values = values(self.seed, self.world.rank(), place, self.plan.width);
                    Tensor::from_slice(&values, &[self.plan.width], self.device)?
                }
                false => self.received(&mut early)?,
            };
            for next in 0..layers {
                self.layer(&mut x, &forward, next)?;
            }
            if self.is_first {
                self.send(&x)?;
            }
            outputs.push(x);
        }
        let mut early = if self.is_first { self.receives()? } else { VecDeque::new() };
        for bucket in &self.buckets {
            let mut bucket = bucket.clone();
            self.gradients.submit(move || fill_(&mut bucket, 0.0));
        }
        let (mut reductions, mut norm) = (Vec::new(), None);
        for (left, x) in outputs.into_iter().enumerate().rev() {
            let mut g = if self.is_first { self.received(&mut early)? } else { x };
            self.backward(&mut g, left == 0, &mut reductions, &mut norm)?;
            if !self.is_first {
                self.send(&g)?;
            }
        }
        for (layer, pending) in reductions {
            pending.wait()?;
            let half = self.plan.layers[layer].0;
            let own = self.buckets[layer].view_into(self.replicas.rank() * half, &[half])?;
            let sum = if self.plan.layers[layer].1 { own } else { self.sums[layer].clone() };
            add_scaled_(&mut self.shards[layer], &sum, -0.125)?;
        }
        norm.map_or_else(|| self.norm(), Ok)
    }

    /// The backward pass of a micro-batch. With the last one the buckets' reductions start.
    fn backward(
        &mut self,
        g: &mut Tensor,
        is_last: bool,
        reductions: &mut Vec<(usize, Pending)>,
        norm: &mut Option<Tensor>,
    ) -> Result<()> {
        let order: Vec<usize> = (0..self.plan.layers.len()).rev().collect();
        for (next, &layer) in order.iter().enumerate() {
            self.layer(g, &order, next)?;
            let (mut bucket, copy, mistake) = (self.buckets[layer].clone(), g.copy()?, self.mistake);
            self.gradients.submit(move || {
                let count = bucket.numel();
                add_scaled_(&mut bucket, &copy.view_into(0, &[count])?, 0.5)?;
                // The copy's memory is the other stream's, which uses it again when it is dropped.
                if mistake == Mistake::NoRecord { Ok(()) } else { record_use(&copy) }
            });
            if !is_last {
                continue;
            }
            let added = self.gradients.record();
            if self.mistake == Mistake::UnlikeOrder && layer == 0 && self.world.rank() == 0 {
                *norm = Some(self.norm()?);
            }
            if self.mistake != Mistake::NoWait {
                added.synchronize()?;
            }
            let bucket = self.buckets[layer].clone();
            let call = match self.plan.layers[layer].1 {
                true => Call::all_reduce(bucket, Reduction::Sum),
                false => Call::reduce_scatter(self.sums[layer].clone(), bucket, Reduction::Sum),
            };
            reductions.push((layer, self.replicas.start(call)));
        }
        Ok(())
    }

    /// A sum over all ranks, of a number of elements that they cannot share evenly.
    fn norm(&self) -> Result<Tensor> {
        let own = 0.5 + self.world.rank() as f64;
        let mut norm = Tensor::from_slice(&[own; RANKS + 1], &[RANKS + 1], self.device)?;
        self.world.all_reduce(&mut norm, Reduction::Sum)?;
        Ok(norm)
    }
}
