//! Every program that was compiled, assembled for the architectures that matter.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use phalanx_tensor::cuda::{self, Target};

/// Compute capabilities: A100's and H100's.
const CAPABILITIES: [u32; 2] = [80, 90];

/// Programs that may spill, as `(name, why)`.
const SPILLS: [(&str, &str); 0] = [];

/// What is known of some programs.
#[derive(Default)]
struct Assembled {
    programs: usize,
    registers: u64,
    wrong: Vec<String>,
}

/// Runs `cases` on this thread, and assembles the programs that they compile on another as they come, then the rest on
/// both. Returns what `cases` does, and the number of programs that do not assemble, or spill without a reason. On a GPU only
/// the cases run: what they run there is assembled, and other architectures would take their time.
pub fn assembled_beside<T>(cases: impl FnOnce() -> T) -> (T, usize) {
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
    let programs: usize = parts.iter().map(|part| part.programs).sum();
    println!("cuda: {programs} programs assembled for sm_80 and sm_90a, {registers} registers at most");
    let wrong: Vec<&String> = parts.iter().flat_map(|part| &part.wrong).collect();
    wrong.iter().for_each(|why| println!("  {why}"));
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
                    all.programs += 1;
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
