//! What one rank does and checks, whatever the backend.

use phalanx_parallel::comm::{Call, Comm, Reduction};
use phalanx_tensor::{DType, Device, Tensor};

use crate::program::{COLLECTIVES, Step};

/// Everything that needs no fault.
pub fn all(comm: &Comm, device: Device) -> Result<(), String> {
    every_collective_of_every_dtype(comm, device)?;
    let text = |e: phalanx_parallel::comm::Error| e.to_string();
    uneven_shares(comm, device).map_err(text)?;
    in_place_and_strided(comm, device).map_err(text)?;
    messages(comm, device).map_err(text)?;
    groups(comm, device)?;
    many_at_once(comm, device)
}

type Result<T, E = phalanx_parallel::comm::Error> = std::result::Result<T, E>;

fn every_collective_of_every_dtype(comm: &Comm, device: Device) -> Result<(), String> {
    for kind in COLLECTIVES {
        for dtype in DType::ALL {
            for by in [Reduction::Sum, Reduction::Prod, Reduction::Max, Reduction::Min] {
                if dtype == DType::Bool && matches!(by, Reduction::Sum | Reduction::Prod) {
                    continue;
                }
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
