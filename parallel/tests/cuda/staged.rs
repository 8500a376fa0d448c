//! The backends that move elements themselves, given a GPU's tensors.

use std::time::Duration;

use phalanx_parallel::comm::{Call, Error, Reduction};
use phalanx_parallel::launch::{Environment, Threads};
use phalanx_tensor::{DType, Device, Stream, Tensor};

use crate::port::free_port;
use crate::{Test, suite};

pub const TESTS: [Test; 5] = [
    ("the suite passes over threads by way of the host", over_threads),
    ("the suite passes over TCP by way of the host", over_tcp),
    ("an output comes after the work that was there before, and before the work that follows", is_ordered),
    ("so it does where the caller has a stream of its own", is_ordered_on_lanes),
    ("roots and senders keep what is only read", reads_only),
];

fn over_threads() -> Result<(), String> {
    for ranks in [1, 2, 3] {
        let run = Threads::new(ranks).cuda().run(|rank| suite::all(rank.comm(), rank.device()));
        run.map_err(|e| format!("{ranks} ranks: {e}"))?;
    }
    Ok(())
}

fn over_tcp() -> Result<(), String> {
    let (size, port) = (2, free_port());
    let process = |rank| {
        let place = Environment::new().local(rank, size, port).timeout(Duration::from_secs(60)).cuda();
        place.run(|rank| suite::all(rank.comm(), rank.device())).map_err(|e| e.to_string())
    };
    std::thread::scope(|scope| {
        let process = &process;
        let threads: Vec<_> = (0..size).map(|rank| scope.spawn(move || process(rank))).collect();
        threads.into_iter().try_for_each(|thread| thread.join().unwrap())
    })
}

fn is_ordered() -> Result<(), String> {
    let run = Threads::new(2).cuda().run(|rank| {
        let device = rank.device();
        let mut x = Tensor::zeros(&[1000], DType::F32, device)?;
        let mut sums = vec![];
        for i in 0..20 {
            // Copies stand for kernels: they are the device's own work, in its order.
            x.copy_from(&Tensor::from_slice(&[i as f32; 1000], &[1000], device)?)?;
            let got = Tensor::zeros(&[2000], DType::F32, device)?;
            let pending = rank.comm().start(Call::all_gather(got.clone(), x.clone()));
            pending.wait()?;
            sums.push(got.narrow(0, 500, 1000)?.copy()?);
        }
        for (i, sum) in sums.iter().enumerate() {
            assert_eq!(sum.to_vec::<f32>()?, [i as f32; 1000]);
        }
        Ok::<_, Error>(())
    });
    run.map(drop).map_err(|e| e.to_string())
}

/// The thread that delivers an output uses another stream than the one that waits for it.
fn is_ordered_on_lanes() -> Result<(), String> {
    let run = Threads::new(2).cuda().run(|rank| {
        let (comm, device, lane) = (rank.comm().clone(), rank.device(), Stream::new(rank.device())?);
        let me = rank.rank();
        let (ones, sum) = (
            Tensor::from_slice(&[1f32; 1000], &[1000], device)?,
            Tensor::zeros(&[1000], DType::F32, device)?,
        );
        let kept = sum.clone();
        lane.submit(move || {
            let mut x = Tensor::zeros(&[1000], DType::F32, device)?;
            for _ in 0..10 {
                x.copy_from(&ones)?;
                // What it writes is on the lane's stream, before and after.
                let came = Tensor::zeros(&[2000], DType::F32, device)?;
                let call = Call::all_gather(came.clone(), x.clone());
                comm.run(call).map_err(|e| phalanx_tensor::Error::invalid("test", e.to_string()))?;
                kept.clone().copy_from(&came.narrow(0, 500, 1000)?)?;
                // Nothing of a receive is read, so that nothing waits at its start.
                let call = if me == 0 { Call::send(x.clone(), 1) } else { Call::recv(x.copy()?, 0) };
                comm.run(call).map_err(|e| phalanx_tensor::Error::invalid("test", e.to_string()))?;
            }
            Ok(())
        });
        lane.synchronize()?;
        assert_eq!(sum.to_vec::<f32>()?, [1f32; 1000]);
        Ok::<_, Error>(())
    });
    run.map(drop).map_err(|e| e.to_string())
}

fn reads_only() -> Result<(), String> {
    let run = Threads::new(2).cuda().run(|rank| {
        let me = rank.rank();
        let mut x = Tensor::from_slice(&[me as f32 + 1.0], &[1], rank.device())?;
        let version = x.version();
        rank.comm().broadcast(&mut x, 0)?;
        assert_eq!((x.item::<f32>()?, x.version() == version), (1.0, me == 0));
        rank.comm().reduce(&mut x, 1, Reduction::Sum)?;
        assert_eq!(x.item::<f32>()?, 1.0 + me as f32);
        // What is the host's stays there, whatever the rank's device.
        let mut y = Tensor::from_slice(&[me as i64], &[1], Device::CPU)?;
        rank.comm().all_reduce(&mut y, Reduction::Max)?;
        assert_eq!(y.item::<i64>()?, 1);
        Ok::<_, Error>(())
    });
    run.map(drop).map_err(|e| e.to_string())
}
