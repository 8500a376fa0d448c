//! NCCL on eight emulated GPUs whose streams run in random orders that only waits restrict: the communication of training steps
//! ([`program`]) with the bits of the host's backend, training steps of models ([`layouts`]) with the bits of ranks that exchange by way of
//! the host, and mistakes that must be found ([`program::Mistake`], [`watch`]).
//!
//! Each seed is a process of its own: a program, a layout, an order of streams, and random addresses. `PHALANX_SEEDS=500` tries so many,
//! `PHALANX_SEED=7` one.

#[allow(dead_code)] // other tests use the rest
#[path = "../layouts/case.rs"]
mod case;
mod layouts;
mod program;
#[allow(dead_code)]
#[path = "../layouts/run.rs"]
mod run;
mod watch;

use std::collections::BTreeMap;
use std::io::Read;
use std::process::{Command, ExitCode, Stdio};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use phalanx_parallel::comm::NcclConfig;
use phalanx_parallel::launch::{Rank, Threads};
use phalanx_tensor::cuda::{Library, require};

use program::{Mistake, RANKS};

/// Seeds that are tried unless the environment says how many.
const SEEDS: u64 = 16;
/// Seeds under which each mistake is made.
const MISTAKE_SEEDS: u64 = 3;
/// Tells a started process what to do.
const CHILD: &str = "PHALANX_TEST_ORDERS";
/// How long a rank waits for others.
const TIMEOUT: Duration = Duration::from_secs(120);
/// The same where it waits in vain.
const SOON: Duration = Duration::from_secs(2);

/// After which a process hangs: twice what a rank waits.
const HANGS: Duration = Duration::from_secs(240);

/// How many operations of communicators a GPU runs at a time: four of NCCL's 32 blocks, one a multiprocessor, fit on the 132 of an H100.
const AT_ONCE: &str = "4";

type Outcome<T = ()> = Result<T, String>;

/// A claim, and what finds out.
type Test = (&'static str, fn() -> Outcome);

fn main() -> ExitCode {
    if let Ok(what) = std::env::var(CHILD) {
        return match child(&what) {
            Ok(text) => {
                println!("result: {text}");
                ExitCode::SUCCESS
            }
            Err(why) => {
                println!("error: {why}");
                ExitCode::FAILURE
            }
        };
    }
    let args: Vec<String> = std::env::args().skip(1).collect();
    // The protocol of test runners that list a binary's tests before they run them.
    if args.iter().any(|arg| arg == "--list") {
        if !args.iter().any(|arg| arg == "--ignored") {
            println!("orders: test");
        }
        return ExitCode::SUCCESS;
    }
    if let Err(why) = require(Library::Nvrtc) {
        println!("orders: skipped: {why}");
        return ExitCode::SUCCESS;
    }
    let tests: [Test; 6] = [
        ("every order of streams gives the bits of the host's backend", every_order),
        ("a missing wait between streams is found", || {
            mistake("no_wait", MISTAKE_SEEDS, &[&["missing wait: "]])
        }),
        ("memory that is used again without a record is found", || {
            // In some orders the memory is given back before it is used.
            mistake(
                "no_record",
                MISTAKE_SEEDS,
                &[&["missing wait: "], &["illegal access: ", "that was freed"]],
            )
        }),
        ("a buffer that is written again too early is found", || {
            mistake("no_wait_before_reuse", MISTAKE_SEEDS, &[&["missing wait: "]])
        }),
        ("unlike orders of two groups on one rank are named", || {
            // Rank 0 misses others in the one, or another misses rank 0 in the other.
            mistake("unlike_order", 1, &[&["all_reduce(sum) of ", " on GPUs", "did not arrive"]])
        }),
        ("a watch that does not see the end of the run is found", watches),
    ];
    let filter = args.iter().find(|arg| !arg.starts_with('-') && *arg != "orders");
    let chosen = tests.iter().filter(|(name, _)| filter.is_none_or(|f| name.contains(f.as_str())));
    let passed: Vec<bool> = chosen.map(|(name, test)| told(name, test)).collect();
    if passed.iter().all(|passed| *passed) { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn told(name: &str, test: &fn() -> Outcome) -> bool {
    let begin = Instant::now();
    let outcome = test();
    let seconds = begin.elapsed().as_secs_f64();
    match &outcome {
        Ok(()) => println!("orders: {name} ... ok ({seconds:.1} s)"),
        Err(why) => println!("orders: {name} ... FAILED ({seconds:.1} s): {why}"),
    }
    outcome.is_ok()
}

/// Starts a process that does something under a seed: whether it succeeded, its result or error, and all that it said.
fn start(what: &str, streams: &str, seed: u64) -> Outcome<(bool, String, String)> {
    let mut command = Command::new(std::env::current_exe().map_err(|e| e.to_string())?);
    command.env(CHILD, what).env("PHALANX_CUDA", "emulator").env("PHALANX_EMULATOR_STREAMS", streams);
    command.env("PHALANX_EMULATED_DEVICES", RANKS.to_string()).env_remove("PHALANX_CUDA_DEVICES");
    command.env("PHALANX_EMULATOR_ADDRESSES", format!("random:{seed}"));
    command.env("PHALANX_EMULATOR_NCCL_AT_ONCE", AT_ONCE);
    let (succeeded, out, err) = ended(&mut command).map_err(|e| format!("{what}: {e}"))?;
    let line = |mark: &str| out.lines().find_map(|line| line.strip_prefix(mark)).map(String::from);
    let result = line("result: ").or_else(|| line("error: ")).unwrap_or_default();
    Ok((succeeded, result, format!("{out}{err}")))
}

/// Runs a process to its end, or until the time is over: whether it succeeded, and what it said.
fn ended(command: &mut Command) -> std::io::Result<(bool, String, String)> {
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?;
    let (out, err) = (child.stdout.take(), child.stderr.take());
    std::thread::scope(|scope| {
        let [out, err] = [scope.spawn(move || text(out)), scope.spawn(move || text(err))];
        let begin = Instant::now();
        let mut status = child.try_wait()?;
        while status.is_none() && begin.elapsed() < HANGS {
            std::thread::sleep(Duration::from_millis(5));
            status = child.try_wait()?;
        }
        if status.is_none() {
            child.kill()?;
            child.wait()?;
        }
        let [out, err] = [out, err].map(|thread| thread.join().unwrap_or_default());
        let hangs = || std::io::Error::other(format!("it hangs: killed after {HANGS:?}: {out}{err}"));
        let succeeded = status.ok_or_else(hangs)?.success();
        Ok((succeeded, out, err))
    })
}

/// All that a process writes there.
fn text(from: Option<impl Read>) -> String {
    let mut bytes = Vec::new();
    // What came before an error is still worth reading.
    let _ = from.map(|mut from| from.read_to_end(&mut bytes));
    String::from_utf8_lossy(&bytes).into_owned()
}

/// What a started process does.
fn child(what: &str) -> Outcome<String> {
    let words: Vec<&str> = what.split(' ').collect();
    let seed: u64 = words.get(1).and_then(|text| text.parse().ok()).unwrap_or(0);
    let nccl = |timeout| {
        let config = NcclConfig { timeout, ..NcclConfig::default() };
        Threads::new(RANKS).timeout(timeout).nccl(config)
    };
    match words[0] {
        "seed" => {
            let layout = trained(seed, nccl(TIMEOUT))?;
            Ok(format!("{} {layout}", programmed(seed, nccl(TIMEOUT), Mistake::None)?))
        }
        "layout" => trained(seed, Threads::new(RANKS).timeout(TIMEOUT).cuda()),
        "no_wait" => programmed(seed, nccl(TIMEOUT), Mistake::NoWait),
        "no_record" => programmed(seed, nccl(TIMEOUT), Mistake::NoRecord),
        "no_wait_before_reuse" => programmed(seed, nccl(TIMEOUT), Mistake::NoWaitBeforeReuse),
        "unlike_order" => programmed(seed, nccl(SOON), Mistake::UnlikeOrder),
        "watch" => watch::told(false).map_err(|e| e.to_string()),
        "blind_watch" => watch::told(true).map_err(|e| e.to_string()),
        other => Err(format!("no such thing: {other}")),
    }
}

/// The digests of what each rank has in the end.
fn digests(threads: Threads, rank: impl Fn(&Rank) -> Outcome<Vec<u64>> + Sync) -> Outcome<String> {
    let ranks = threads.run(|of| rank(&of)).map_err(|e| e.to_string())?;
    // FNV-1a, of 64 bits.
    let digest = |bits: &Vec<u64>| {
        let bytes = bits.iter().flat_map(|word| word.to_le_bytes());
        bytes.fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
        })
    };
    Ok(ranks.iter().map(|bits| format!("{:016x}", digest(bits))).collect::<Vec<_>>().join("-"))
}

fn programmed(seed: u64, threads: Threads, mistake: Mistake) -> Outcome<String> {
    digests(threads, |rank| program::run(seed, rank, mistake).map_err(|e| e.to_string()))
}

fn trained(number: u64, threads: Threads) -> Outcome<String> {
    let case = layouts::case(number);
    digests(threads, |rank| layouts::train(&case, rank).map_err(|e| e.to_string()))
}

fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok()?.parse().ok()
}

fn every_order() -> Outcome {
    let seeds =
        number("PHALANX_SEED").map_or(0..number("PHALANX_SEEDS").unwrap_or(SEEDS), |seed| seed..seed + 1);
    let used: Vec<u64> =
        (0..layouts::COUNT).filter(|n| seeds.clone().any(|s| s % layouts::COUNT == *n)).collect();
    let reference = |number: &u64| -> Outcome<(u64, String)> {
        let (succeeded, result, said) = start(&format!("layout {number}"), "eager", 0)?;
        let case = layouts::case(*number);
        if succeeded { Ok((*number, result)) } else { Err(format!("{case} by way of the host: {said}")) }
    };
    let references: BTreeMap<u64, String> = used.iter().map(reference).collect::<Outcome<_>>()?;
    let (next, wrong) = (AtomicU64::new(seeds.start), Mutex::new(Vec::new()));
    let try_seeds = || {
        while let Some(seed) = Some(next.fetch_add(1, Ordering::Relaxed)).filter(|seed| seeds.contains(seed))
        {
            match in_order(seed, &references[&(seed % layouts::COUNT)]) {
                Ok(()) => println!("orders: seed {seed} ... ok"),
                Err(why) => {
                    println!("orders: seed {seed} ... FAILED: {why}");
                    wrong.lock().unwrap().push(seed);
                }
            }
        }
    };
    let jobs = std::thread::available_parallelism().map_or(1, |cores| cores.get().min(4));
    std::thread::scope(|scope| (0..jobs).for_each(|_| drop(scope.spawn(try_seeds))));
    let wrong = wrong.into_inner().unwrap();
    if wrong.is_empty() { Ok(()) } else { Err(format!("under the seeds {wrong:?}")) }
}

/// A seed's program and layout, beside those of the host's backend.
fn in_order(seed: u64, trained: &str) -> Outcome {
    let host = programmed(seed, Threads::new(RANKS).timeout(TIMEOUT), Mistake::None)?;
    let (succeeded, result, said) = start(&format!("seed {seed}"), &format!("deferred:{seed}"), seed)?;
    let wanted = format!("{host} {trained}");
    match succeeded && result == wanted {
        true => Ok(()),
        false => Err(format!("{}: got {result}, wanted {wanted}: {said}", layouts::case(seed))),
    }
}

/// A mistake is found under each of so many seeds, with all said of one of the lists in `wanted`.
fn mistake(name: &str, seeds: u64, wanted: &[&[&str]]) -> Outcome {
    for seed in 0..seeds {
        let (succeeded, _, said) = start(&format!("{name} {seed}"), &format!("deferred:{seed}"), seed)?;
        if succeeded || !wanted.iter().any(|all| all.iter().all(|part| said.contains(part))) {
            return Err(format!("seed {seed}: wanted {wanted:?}, got {said}"));
        }
    }
    Ok(())
}

/// A watch ends what waits for a rank whose run has failed; without it only the time does.
fn watches() -> Outcome {
    for seed in 0..MISTAKE_SEEDS {
        // One seed is enough for what takes the whole time.
        let names = [("watch", watch::SHORT), ("blind_watch", watch::LONG)];
        for (name, wanted) in &names[..if seed == 0 { 2 } else { 1 }] {
            let (_, result, said) = start(&format!("{name} 0"), &format!("deferred:{seed}"), seed)?;
            if !result.contains(wanted) || !result.contains(watch::CAUSE) {
                return Err(format!("{name}, seed {seed}: wanted {wanted:?}, got {said}"));
            }
        }
    }
    Ok(())
}
