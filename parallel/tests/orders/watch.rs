//! A rank whose run has failed while its GPU waits for another one, with a watch that sees it and with one that does not.

use std::sync::mpsc::channel;
use std::sync::{Arc, Barrier, Mutex};
use std::time::{Duration, Instant};

use phalanx_parallel::comm::{
    Call, Comm, Communicator, Error, NcclConfig, Pending, Reduction, Result, Traffic, nccl,
};
use phalanx_parallel::flight::FlightRecorder;
use phalanx_parallel::launch::Threads;
use phalanx_tensor::Tensor;

/// What ends the run.
pub const CAUSE: &str = "something else broke";
/// How long a call may run on a GPU.
const TIMEOUT: Duration = Duration::from_secs(4);

/// How long the host has waited for the GPU.
pub const SHORT: &str = "until the watch saw the end of the run";
pub const LONG: &str = "until the time was over";

/// A control plane that does not tell that the run has failed.
#[derive(Debug)]
struct Blind(Comm);

impl Communicator for Blind {
    fn rank(&self) -> usize {
        self.0.rank()
    }

    fn ranks(&self) -> &[usize] {
        self.0.ranks()
    }

    fn start(&self, call: Call) -> Pending {
        self.0.start(call)
    }

    fn group(&self, ranks: &[usize]) -> Result<Comm> {
        self.0.group(ranks)
    }

    fn traffic(&self) -> Traffic {
        self.0.traffic()
    }

    fn fail(&self, cause: &str) {
        self.0.fail(cause);
    }

    fn failure(&self) -> Option<Error> {
        None
    }

    fn flight_recorder(&self) -> Option<&FlightRecorder> {
        self.0.flight_recorder()
    }
}

/// Rank 1 fails when rank 0's GPU waits for its part in a call, which rank 1's lane cannot give to NCCL. What rank 0 is told by the call
/// that waits for its GPU.
pub fn told(blind: bool) -> Result<String> {
    let (begun, (ended, end), said) = (Barrier::new(2), channel(), Mutex::new(String::new()));
    let end = Mutex::new(end);
    let run = Threads::new(2).cuda().run(|rank| {
        let control = rank.comm().clone();
        let control = if blind { Arc::new(Blind(control)) } else { control };
        let config = NcclConfig { timeout: TIMEOUT, ..NcclConfig::default() };
        let comm = nccl(control, rank.device(), config)?;
        let mut x = Tensor::from_slice(&[1f32; 64], &[64], rank.device())?;
        comm.all_reduce(&mut x, Reduction::Sum)?;
        x.to_vec::<f32>()?;
        if rank.rank() == 0 {
            let pending = comm.start(Call::all_reduce(x.clone(), Reduction::Sum));
            begun.wait();
            pending.wait()?;
            // The host waits for the GPU here, and the watch has to end that.
            let since = Instant::now();
            let read = x.to_vec::<f32>();
            let waited = if since.elapsed() < TIMEOUT / 2 { SHORT } else { LONG };
            let outcome = comm.all_reduce(&mut x, Reduction::Sum);
            let error = outcome.err().map_or_else(String::new, |error| error.to_string());
            *said.lock().unwrap() = format!("{waited}: {error}");
            ended.send(()).unwrap();
            return read.map(drop).map_err(Error::from);
        }
        let held = x.device_read("test")?;
        let pending = comm.start(Call::all_reduce(x.clone(), Reduction::Sum));
        begun.wait();
        // Rank 0's part is on its GPU soon; if it is not yet, its watch ends it before it is there.
        std::thread::sleep(Duration::from_millis(100));
        comm.fail(CAUSE);
        let _ = end.lock().unwrap().recv_timeout(5 * TIMEOUT);
        drop(held);
        drop(pending);
        Err(Error::Launch(CAUSE.into()))
    });
    drop(run);
    Ok(said.into_inner().unwrap())
}
