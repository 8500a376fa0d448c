//! Buckets are not only started while backward runs, they end: backward waits, in its last gradient's hook, for the ends of all
//! buckets but the last. If these ended only when backward is over, it would wait for ever.

use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use phalanx_nn::autograd::HookHandle;
use phalanx_nn::{Parameter, Parameters};
use phalanx_parallel::Result;
use phalanx_parallel::comm::{CollectiveKind, observed};
use phalanx_parallel::data_parallel::{Ddp, DdpConfig};
use phalanx_parallel::launch::{Environment, Rank, Threads};

use crate::port::free_port;
use crate::{Small, threaded};

/// Far more than an exchange takes on a busy machine.
const LONG: Duration = Duration::from_secs(120);

/// What has come and gone in a rank's pass.
#[derive(Default)]
struct Pass {
    gradients: usize,
    buckets_ended: usize,
    /// The buckets that had ended before backward went on after its last gradient.
    ended_inside: Option<usize>,
}

#[derive(Default)]
struct Events {
    pass: Mutex<Pass>,
    changed: Condvar,
}

impl Events {
    fn bucket_ended(&self) {
        self.pass.lock().unwrap().buckets_ended += 1;
        self.changed.notify_all();
    }

    /// Called in backward, before `Ddp` learns of the gradient.
    fn gradient(&self, of: usize) {
        let mut pass = self.pass.lock().unwrap();
        pass.gradients += 1;
        if pass.gradients == of {
            let (mut pass, _) =
                self.changed.wait_timeout_while(pass, LONG, |pass| pass.buckets_ended + 1 < of).unwrap();
            pass.ended_inside = Some(pass.buckets_ended);
        }
    }
}

/// Four passes, each parameter in a bucket of its own; for each pass but the first the buckets that ended inside backward.
fn passes(rank: &Rank, config: DdpConfig) -> Result<Vec<usize>> {
    let model = Small::new(rank.device());
    let (events, leaves) = (Arc::new(Events::default()), model.parameters().len());
    // Registered before those of `Ddp`, so called before them.
    let watch = |p: &Parameter| {
        let events = Arc::clone(&events);
        p.leaves()[0].on_accumulate(move |_| {
            events.gradient(leaves);
            Ok(())
        })
    };
    let _hooks: Vec<HookHandle> = model.parameters().iter().map(watch).collect();
    let watched = Arc::clone(&events);
    let comm = observed(
        rank.comm().clone(),
        Arc::new(move |call| {
            if call.kind == CollectiveKind::AllReduce {
                watched.bucket_ended();
            }
        }),
    );
    let ddp = Ddp::new(&model, comm, DdpConfig { first_bucket_bytes: 1, bucket_bytes: 1, ..config })?;
    let mut seen = Vec::new();
    for number in 0..4 {
        // The buckets of the first pass are not yet in the order of the gradients.
        *events.pass.lock().unwrap() =
            Pass { gradients: if number == 0 { leaves } else { 0 }, ..Pass::default() };
        ddp.backward(&model.loss(number + 7 * rank.rank() as u64, 4, true)?)?;
        model.zero_grad()?;
        seen.extend(events.pass.lock().unwrap().ended_inside);
    }
    Ok(seen)
}

fn configs() -> [DdpConfig; 4] {
    let plain = DdpConfig::default();
    [
        DdpConfig { find_unused: true, ..plain.clone() },
        DdpConfig { static_graph: true, ..plain.clone() },
        DdpConfig { engine: threaded(), ..plain.clone() },
        plain,
    ]
}

/// All buckets but the last, which waits for the last gradient.
const ENDED: [usize; 3] = [5; 3];

#[test]
fn buckets_end_before_backward_does_on_threads() {
    for place in 0..4 {
        for ranks in [2, 3] {
            // An engine is a rank's own.
            let run = |rank: Rank| passes(&rank, configs()[place].clone());
            for ended in Threads::new(ranks).timeout(LONG).run(run).unwrap() {
                assert_eq!(ended, ENDED, "config {place}");
            }
        }
    }
}

#[test]
fn buckets_end_before_backward_does_over_tcp() {
    for place in 0..4 {
        let port = free_port();
        let process = |rank| {
            let environment = Environment::new().local(rank, 2, port).timeout(LONG);
            environment.run(|rank: Rank| passes(&rank, configs()[place].clone()))
        };
        let (first, second) = std::thread::scope(|scope| {
            let second = scope.spawn(|| process(1));
            (process(0), second.join().unwrap())
        });
        for ended in [first, second] {
            assert_eq!(ended.unwrap(), ENDED, "config {place}");
        }
    }
}
