//! Every program that was compiled, assembled for the architectures that matter.
//!
//! Assembling takes longer than the cases, and gives the same code for the same text. So those that have passed are in `assembled.txt`, by
//! hashes of all that decides their code, and are passed over. `PHALANX_WRITE_ASSEMBLED=1 cargo test --release --test cuda`
//! with `-p phalanx-kernels` or `-p phalanx-parallel` assembles all and writes the file of this crate anew.

use std::collections::BTreeSet;
use std::sync::LazyLock;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use phalanx_tensor::cuda::{self, Target};

use crate::code;

/// Compute capabilities: A100's and H100's.
const CAPABILITIES: [u32; 2] = [80, 90];

/// Programs that may spill, as `(name, why)`.
const SPILLS: [(&str, &str); 0] = [];

/// Hashes of the programs that have passed, one in each line.
const FILE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/cuda/assembled.txt");

static PASSED: LazyLock<BTreeSet<String>> = LazyLock::new(|| {
    let text = if is_writing() { String::new() } else { std::fs::read_to_string(FILE).unwrap_or_default() };
    text.lines().map(String::from).collect()
});

/// Whether the file is to be written anew.
pub fn is_writing() -> bool {
    std::env::var_os("PHALANX_WRITE_ASSEMBLED").is_some_and(|value| value == "1")
}

/// What is known of some programs.
#[derive(Default)]
struct Assembled {
    /// Hashes of those that were passed over, and of those that were assembled.
    known: usize,
    new: Vec<String>,
    registers: u64,
    wrong: Vec<String>,
}

/// Runs `cases` on this thread, and assembles the programs that they compile on another as they come, then the rest on
/// both. Returns what `cases` does, and the number of programs that do not assemble, or spill without a reason. On a GPU only
/// the cases run: what they run there is assembled, and other architectures would take their time. A file that is written begins anew with
/// `all` cases, and gets more by others.
pub fn assembled_beside<T>(all: bool, cases: impl FnOnce() -> T) -> (T, usize) {
    if !cuda::emulated() {
        return (cases(), 0);
    }
    let (next, over) = (AtomicUsize::new(0), AtomicBool::new(false));
    let (result, parts) = thread::scope(|scope| {
        let helper = scope.spawn(|| assemble(&next, &over));
        let result = cases();
        over.store(true, Ordering::Release);
        let rest = assemble(&next, &over);
        (result, [rest, helper.join().expect("the assembling thread panicked")])
    });
    let registers = parts.iter().map(|part| part.registers).max().unwrap_or(0);
    let known: usize = parts.iter().map(|part| part.known).sum();
    let new: BTreeSet<&str> = parts.iter().flat_map(|part| &part.new).map(String::as_str).collect();
    println!("cuda: {} programs assembled for sm_80 or sm_90a, {registers} registers at most", new.len());
    println!("cuda: {known} have passed before, by {FILE} (PHALANX_WRITE_ASSEMBLED=1 writes it anew)");
    let wrong: Vec<&String> = parts.iter().flat_map(|part| &part.wrong).collect();
    wrong.iter().for_each(|why| println!("  {why}"));
    if is_writing() && wrong.is_empty() {
        let known = if all { String::new() } else { std::fs::read_to_string(FILE).unwrap_or_default() };
        let text: String = known
            .lines()
            .chain(new)
            .collect::<BTreeSet<&str>>()
            .iter()
            .map(|hash| format!("{hash}\n"))
            .collect();
        std::fs::write(FILE, text).unwrap_or_else(|why| panic!("{FILE}: {why}"));
    }
    (result, wrong.len())
}

/// Assembles programs one by one until `over` is set and none are left. Several threads take them from one counter.
fn assemble(next: &AtomicUsize, over: &AtomicBool) -> Assembled {
    let mut all = Assembled::default();
    loop {
        // Read before the list is looked at: what is added later is not missed.
        let last = over.load(Ordering::Acquire);
        let at = next.load(Ordering::Relaxed);
        match cuda::compiled(at) {
            Some((name, text)) => {
                if next.compare_exchange(at, at + 1, Ordering::Relaxed, Ordering::Relaxed).is_ok() {
                    let of_hopper = text.contains("wgmma.mma_async");
                    for capability in CAPABILITIES.into_iter().filter(|&c| c >= 90 || !of_hopper) {
                        one(&name, &text, capability, &mut all);
                    }
                }
            }
            None if last => return all,
            None => thread::sleep(Duration::from_millis(20)),
        }
    }
}

fn one(name: &str, text: &str, capability: u32, all: &mut Assembled) {
    let hash = match code::hash(name, text, capability) {
        Ok(hash) => hash,
        Err(why) => return all.wrong.push(why),
    };
    if PASSED.contains(&hash) {
        all.known += 1;
        return;
    }
    all.new.push(hash);
    let image = match cuda::compile(name, text, Target::Cubin(capability)) {
        Ok(image) => image,
        Err(why) => return all.wrong.push(why),
    };
    all.registers = all.registers.max(numbers_before(&image.log, " registers").max().unwrap_or(0));
    // The compiler waits for each product where it cannot follow the registers of several under way (C7508 to C7520).
    if image.log.contains("wgmma.mma_async instructions are serialized") {
        all.wrong.push(format!("{name} waits for each of its products on sm_{capability}: {}", image.log));
    }
    let spilled: u64 = numbers_before(&image.log, " bytes spill").sum();
    if spilled > 0 && !SPILLS.iter().any(|(known, _)| *known == name) {
        // A file is compiled many times: its macros have the dtypes and the formula.
        let macros: Vec<&str> = text.lines().take_while(|line| line.starts_with("#define ")).collect();
        let (macros, log) = (macros.join("\n"), &image.log);
        let why = "reorder its formula, so that fewer numbers live at once";
        all.wrong.push(format!("{name} spills {spilled} bytes on sm_{capability}; {why}:\n{macros}\n{log}"));
    }
}

/// The numbers that stand before `what` in a log.
fn numbers_before<'a>(log: &'a str, what: &'a str) -> impl Iterator<Item = u64> + 'a {
    let digits =
        |before: &str| before.rsplit(|c: char| !c.is_ascii_digit()).next().and_then(|n| n.parse().ok());
    let parts: Vec<&str> = log.split(what).collect();
    parts[..parts.len() - 1].iter().filter_map(move |part| digits(part)).collect::<Vec<u64>>().into_iter()
}
