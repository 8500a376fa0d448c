//! The same over NCCL: bits, order on the GPU, errors.

use std::sync::mpsc::channel;
use std::sync::{Arc, Barrier, Mutex};
use std::time::{Duration, Instant};

use phalanx_parallel::comm::{Call, Error, NcclConfig, Reduction, Sums, observed};
use phalanx_parallel::launch::{Environment, Rank, Threads};
use phalanx_tensor::cuda::{Span, Work, start_trace, take_trace};
use phalanx_tensor::{DType, Device, Tensor};

use crate::port::free_port;
use crate::{Test, suite};

pub const TESTS: [Test; 11] = [
    ("the suite passes over NCCL on 1 to 4 ranks", over_threads),
    ("the suite passes over NCCL with TCP as control plane", over_tcp),
    ("NCCL's own sums are those in order, to rounding", own_sums),
    ("over NCCL a call comes after the work before it, and before what follows its wait", is_ordered),
    ("over NCCL messages in both directions do not wait for each other", both_directions),
    ("over NCCL different calls are named on every rank", mismatches),
    ("over NCCL a tensor of the host and one of a GPU in one call are named", mixed),
    ("over NCCL a rank that fails ends the others, what is under way included", failures),
    ("over NCCL a call that is observed ends with the run", observed_call),
    ("over NCCL a rank that does not come is named", late),
    ("a trace has the collectives of each rank", traced),
];

const LONG: Duration = Duration::from_secs(60);

fn nccl(ranks: usize) -> Threads {
    Threads::new(ranks).nccl(NcclConfig::default())
}

/// Three calls over NCCL are three spans on each device, in their order.
fn traced() -> Result<(), String> {
    start_trace();
    let run = nccl(2).timeout(LONG).run(|rank| {
        let mut x = Tensor::from_slice(&[1.0f32; 64], &[64], rank.device())?;
        rank.comm().broadcast(&mut x, 0)?;
        for _ in 0..2 {
            rank.comm().broadcast(&mut x, 1)?;
        }
        x.to_vec::<f32>()?;
        Ok::<_, Error>(())
    });
    let spans = take_trace();
    run.map_err(|e| e.to_string())?;
    for device in [0, 1] {
        let ours = spans.iter().filter(|span| span.device == device && span.work == Work::Collective);
        let ours: Vec<&Span> = ours.filter(|span| span.op == "broadcast").collect();
        if ours.len() != 3 || ours.windows(2).any(|pair| pair[1].from < pair[0].from) {
            return Err(format!("cuda:{device}: {ours:?} of {spans:?}"));
        }
    }
    Ok(())
}

fn over_threads() -> Result<(), String> {
    for ranks in 1..=4 {
        let run = nccl(ranks).timeout(LONG).run(|rank| suite::all(rank.comm(), rank.device()));
        run.map_err(|e| format!("{ranks} ranks: {e}"))?;
    }
    Ok(())
}

/// Runs `f` on ranks that meet over TCP, each on a thread in place of a process.
fn processes<T: Send>(size: usize, f: impl Fn(Rank) -> Result<T, String> + Sync) -> Vec<Result<T, String>> {
    let port = free_port();
    let process = |rank| {
        let place = Environment::new().local(rank, size, port).timeout(LONG).nccl(NcclConfig::default());
        place.run(&f).map_err(|e| e.to_string())
    };
    std::thread::scope(|scope| {
        let process = &process;
        let threads: Vec<_> = (0..size).map(|rank| scope.spawn(move || process(rank))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

fn over_tcp() -> Result<(), String> {
    for size in [2, 3] {
        processes(size, |rank| suite::all(rank.comm(), rank.device()))
            .into_iter()
            .collect::<Result<(), _>>()?;
    }
    Ok(())
}

fn own_sums() -> Result<(), String> {
    let config = NcclConfig { sums: Sums::Library, ..NcclConfig::default() };
    let run = Threads::new(3).nccl(config).timeout(LONG).run(|rank| {
        let (me, device) = (rank.rank() as f32, rank.device());
        let values: Vec<f32> = (0..600).map(|i| 0.1 * i as f32 + me).collect();
        let wanted: Vec<f32> = (0..600).map(|i| 0.3 * i as f32 + 3.0).collect();
        let close = |got: &[f32], wanted: &[f32]| {
            got.len() == wanted.len() && got.iter().zip(wanted).all(|(a, b)| (a - b).abs() <= 1e-4)
        };
        let mut x = Tensor::from_slice(&values, &[600], device)?;
        let mut share = Tensor::zeros(&[200], DType::F32, device)?;
        rank.comm().reduce_scatter(&mut share, &x, Reduction::Sum)?;
        let begin = 200 * rank.rank();
        assert!(close(&share.to_vec::<f32>()?, &wanted[begin..begin + 200]));
        let mut at_root = x.copy()?;
        rank.comm().reduce(&mut at_root, 2, Reduction::Sum)?;
        assert!(close(&at_root.to_vec::<f32>()?, if me == 2.0 { &wanted } else { &values }));
        let mut average = x.copy()?;
        rank.comm().all_reduce(&mut average, Reduction::Avg)?;
        let third: Vec<f32> = wanted.iter().map(|x| x / 3.0).collect();
        assert!(close(&average.to_vec::<f32>()?, &third));
        rank.comm().all_reduce(&mut x, Reduction::Sum)?;
        assert!(close(&x.to_vec::<f32>()?, &wanted));
        // NCCL has no bitwise reductions.
        let mut bits = Tensor::from_slice(&[[0b1100i64, 0b1010, 0b1001][rank.rank()]; 100], &[100], device)?;
        rank.comm().all_reduce(&mut bits, Reduction::BitAnd)?;
        assert_eq!(bits.to_vec::<i64>()?, [0b1000; 100]);
        Ok::<_, Error>(())
    });
    run.map(drop).map_err(|e| e.to_string())
}

fn is_ordered() -> Result<(), String> {
    let run = nccl(2).timeout(LONG).run(|rank| {
        let (me, device) = (rank.rank(), rank.device());
        let mut x = Tensor::zeros(&[1001], DType::F32, device)?;
        let mut kept = vec![];
        for i in 0..20 {
            // Copies stand for kernels: they are the device's own work, in its order.
            let value = (10 * i + me) as f32;
            x.copy_from(&Tensor::from_slice(&[value; 1001], &[1001], device)?)?;
            let pending = rank.comm().start(Call::all_reduce(x.clone(), Reduction::Sum));
            // Something else meanwhile, and memory that comes and goes.
            drop(Tensor::from_slice(&[value; 3003], &[3003], device)?.copy()?);
            pending.wait()?;
            kept.push(x.copy()?);
        }
        for (i, x) in kept.iter().enumerate() {
            assert_eq!(x.to_vec::<f32>()?, [(20 * i + 1) as f32; 1001]);
        }
        // A call for which no thread waits keeps its tensors until it is over.
        for _ in 0..10 {
            let dropped = Tensor::from_slice(&[1f32; 500], &[500], device)?;
            drop(rank.comm().start(Call::all_reduce(dropped, Reduction::Sum)));
            drop(Tensor::from_slice(&[f32::NAN; 500], &[500], device)?);
        }
        rank.comm().barrier()
    });
    run.map(drop).map_err(|e| e.to_string())
}

fn both_directions() -> Result<(), String> {
    let run = nccl(2).timeout(LONG).run(|rank| {
        let (me, device) = (rank.rank(), rank.device());
        let other = 1 - me;
        for i in 0..5 {
            let values = vec![(100 * me + i) as i32; 7 + i];
            let mine = Tensor::from_slice(&values, &[7 + i], device)?;
            let sent = rank.comm().start(Call::send(mine, other));
            let mut came = Tensor::zeros(&[7 + i], DType::I32, device)?;
            rank.comm().recv(&mut came, other)?;
            sent.wait()?;
            assert_eq!(came.to_vec::<i32>()?, vec![(100 * other + i) as i32; 7 + i]);
        }
        Ok::<_, Error>(())
    });
    run.map(drop).map_err(|e| e.to_string())
}

/// The errors of all ranks.
fn errors(ranks: usize, timeout: Duration, f: impl Fn(&Rank) -> Result<(), Error> + Sync) -> Vec<String> {
    let said = Mutex::new(vec![String::new(); ranks]);
    let config = NcclConfig { timeout, ..NcclConfig::default() };
    let run = Threads::new(ranks).timeout(timeout).nccl(config).run(|rank| {
        let outcome = f(&rank);
        if let Err(error) = &outcome {
            said.lock().unwrap()[rank.rank()] = error.to_string();
        }
        outcome
    });
    assert!(run.is_err());
    said.into_inner().unwrap()
}

fn all_say(said: &[String], wanted: &[&str]) -> Result<(), String> {
    let all = said.iter().all(|text| wanted.iter().all(|wanted| text.contains(wanted)));
    if all { Ok(()) } else { Err(format!("got {said:?}, wanted {wanted:?}")) }
}

fn ones(count: usize, device: Device) -> Result<Tensor, Error> {
    Ok(Tensor::from_slice(&vec![1f32; count], &[count], device)?)
}

fn mismatches() -> Result<(), String> {
    let said = errors(3, LONG, |rank| {
        let mut x = ones(6, rank.device())?;
        rank.comm().all_reduce(&mut x, Reduction::Sum)?;
        if rank.rank() == 2 {
            return rank.comm().broadcast(&mut x, 0);
        }
        rank.comm().all_reduce(&mut x, Reduction::Sum)
    });
    let place = "(call 1 of group [0, 1, 2])";
    all_say(
        &said,
        &["rank 0 all_reduce(sum) of 6 f32 on GPUs", "rank 2 broadcast of 6 f32 from 0 on GPUs", place],
    )
}

fn mixed() -> Result<(), String> {
    let said = errors(2, LONG, |rank| {
        let mut x = ones(3, if rank.rank() == 0 { rank.device() } else { Device::CPU })?;
        rank.comm().all_reduce(&mut x, Reduction::Max)
    });
    all_say(&said, &["rank 0 all_reduce(max) of 3 f32 on GPUs", "rank 1 all_reduce(max) of 3 f32 (call 0"])
}

fn failures() -> Result<(), String> {
    let start = Instant::now();
    let said = errors(3, LONG, |rank| {
        let mut x = ones(64, rank.device())?;
        rank.comm().all_reduce(&mut x, Reduction::Sum)?;
        let under_way = rank.comm().start(Call::all_reduce(ones(64, rank.device())?, Reduction::Sum));
        if rank.rank() == 1 {
            return Err(Error::Launch("something else broke".into()));
        }
        under_way.wait()?;
        rank.comm().all_reduce(&mut x, Reduction::Sum)
    });
    assert!(start.elapsed() < LONG / 2, "{:?}", start.elapsed());
    all_say(&said, &["something else broke"])?;
    all_say(&[said[0].clone(), said[2].clone()], &["rank 1 failed", "of group [0, 1, 2]"])
}

fn observed_call() -> Result<(), String> {
    let (started, (ended, end)) = (Barrier::new(2), channel());
    let end = Mutex::new(end);
    let said = errors(2, LONG, |rank| {
        let mut x = ones(64, rank.device())?;
        rank.comm().all_reduce(&mut x, Reduction::Sum)?;
        if rank.rank() == 0 {
            let comm = observed(rank.comm().clone(), Arc::new(|_| ()));
            let pending = comm.start(Call::all_reduce(x, Reduction::Sum));
            started.wait();
            let outcome = pending.wait();
            ended.send(()).unwrap();
            return outcome.and_then(|()| comm.barrier());
        }
        // All have called it, but while other code uses the tensor this rank's lane cannot give it to NCCL.
        let held = x.device_read("test")?;
        let pending = rank.comm().start(Call::all_reduce(x.clone(), Reduction::Sum));
        started.wait();
        rank.comm().fail("something else broke");
        let ended = end.lock().unwrap().recv_timeout(LONG / 2);
        drop(held);
        drop(pending);
        assert!(ended.is_ok(), "the other rank waits for its GPU");
        Err(Error::Launch("something else broke".into()))
    });
    all_say(&said, &["something else broke"])
}

fn late() -> Result<(), String> {
    // Everything is compiled, so that one rank alone is late.
    let sum = |rank: &Rank| rank.comm().all_reduce(&mut ones(5, rank.device())?, Reduction::Sum);
    nccl(3).timeout(LONG).run(|rank| sum(&rank)).map_err(|e| e.to_string())?;
    let said = errors(3, Duration::from_secs(2), |rank| {
        let mut x = ones(5, rank.device())?;
        rank.comm().all_reduce(&mut x, Reduction::Sum)?;
        x.to_vec::<f32>()?;
        if rank.rank() == 1 {
            while rank.comm().failure().is_none() {
                std::thread::sleep(Duration::from_millis(5));
            }
        }
        rank.comm().all_reduce(&mut x, Reduction::Sum)
    });
    let wanted = ["all_reduce(sum) of 5 f32 on GPUs (call 1 of group [0, 1, 2])", "ranks [1] did not arrive"];
    all_say(&said, &wanted)
}
