//! Two devices train a two-layer network on half a batch each, and the dependency engine finds the overlap.
//!
//! ```text
//! cargo run --release --example engine [TRACE.json]
//! ```
//! Each operation says what it reads and mutates, in the order in which one would write the step down, and nothing about
//! when to run. So the copy of the second layer's gradient starts when that gradient is there, beside the rest of the
//! backward pass:
//!
//! ```text
//! cpu:0     forward  backward w2  backward h   backward w1   update w2        update w1
//! cpu:1     forward  backward w2  backward h   backward w1
//! priority                        copy dw2                       copy w2  copy dw1      copy w1
//! ```
//! The trace opens in Perfetto or in a browser's `about:tracing`. The serial engine then repeats the run: the same bits.

#[path = "engine/net.rs"]
mod net;
#[path = "engine/trace.rs"]
mod trace;

use std::process::ExitCode;
use std::time::Instant;

use net::Net;
use phalanx::Device;
use phalanx::parallel::engine::{Engine, EngineConfig, Lane};
use trace::Trace;

const DEVICES: [Device; 2] = [Device::Cpu(0), Device::Cpu(1)];
const STEPS: usize = 40;

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

fn main() -> ExitCode {
    let path = std::env::args().nth(1).unwrap_or_else(|| "target/engine.trace.json".into());
    match run(&path) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::from(1),
        Err(error) => {
            eprintln!("engine: {error}");
            ExitCode::from(2)
        }
    }
}

fn run(path: &str) -> Result<bool> {
    for device in DEVICES {
        device.set_threads(1)?; // the engine's workers are the threads
    }
    let config = EngineConfig::new().lane(DEVICES[0], 1).lane(DEVICES[1], 1).lane(Lane::Priority, 1);
    let (trace, start) = (Trace::new(), Instant::now());
    let threaded = train(&Engine::threaded(&config)?, &trace)?;
    let threaded_s = start.elapsed().as_secs_f64();
    let start = Instant::now();
    let serial = train(&Engine::serial(), &Trace::new())?;
    let serial_s = start.elapsed().as_secs_f64();

    println!("loss {:.4} -> {:.4} in {STEPS} steps", threaded.0[0], threaded.0[STEPS - 1]);
    println!("threaded engine {threaded_s:.2} s, serial engine {serial_s:.2} s");
    for (copies, layers) in
        [("copy dw2", "second layer"), ("copy dw1", "first layer"), ("copy dw", "both layers")]
    {
        let (overlap, total) = trace.overlap(copies, "backward");
        let (share, total_ms) = (100.0 * overlap / total, 1e3 * total);
        println!("gradient copies, {layers}: {share:.0} % of {total_ms:.1} ms beside the backward pass");
    }
    trace.write(path)?;
    println!("trace: {path}");
    let equal = threaded == serial;
    println!(
        "the serial engine's losses and weights: {}",
        if equal { "equal, bit for bit" } else { "DIFFERENT" }
    );
    Ok(equal)
}

/// The losses and all weights of both devices.
type Outcome = (Vec<f32>, Vec<Vec<f32>>);

fn train(engine: &Engine, trace: &Trace) -> Result<Outcome> {
    let net = Net::new(engine, trace, DEVICES)?;
    for _ in 0..STEPS {
        net.step()?;
    }
    engine.wait_for_all()?;
    net.outcome()
}
